"""release_gradients over several processes: under FSDP2 (fully_shard), and in place of DDP."""

import itertools
import unittest
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import worlds
from scruple import torch as st
from scruple.torch import release
from worlds import Bag, expect, expect_alike, expect_near, expect_near_model, expect_refused, expect_replicas
from worlds import expect_same_model, expect_same_way, expect_same_way_on_the_whole, gradients_of, loss_of
from worlds import mlp, ranks, sharded


def pair(dtype=torch.float32, cls=st.AdamW, count=2, **kw):
    models = [sharded(mlp(dtype)) for _ in range(count)]
    return [(m, cls(m.parameters(), lr=1e-2, rounding="stochastic", seed=5, **kw)) for m in models]


@ranks(3)
def fsdp_released():
    """Bit for bit the stored loop."""
    for dtype, bucket in ((torch.bfloat16, release.BUCKET), (torch.float32, 4096)):
        (a, stored), (b, opt) = pair(dtype)
        release.BUCKET = bucket
        handle = st.release_gradients(b, opt)
        for step in (0, 1, 2, 9):
            if step == 9:
                expect_alike(a, stored, b, opt, "released")
                handle.remove()
            for m, o in ((a, stored), (b, opt)):
                loss_of(m, step, dist.get_rank(), dtype).backward()
                if m is b and step != 9:
                    expect(all(p.grad is None for p in b.parameters()), "gradients are freed")
                o.step()
                o.zero_grad()
        expect_same_model(a, b, "after remove")


@ranks(3, cases=[(1, None, False), (2, 0.5, False), (2, 0.5, True)])
def fsdp_compressed(micro_batches, max_norm, scaled):
    """With fp32 accumulators bit for bit the stored loop; with 8 bits near it."""
    rank = dist.get_rank()
    (a, stored), (b, opt), (c, small) = pair(count=3)
    scalers = [torch.amp.GradScaler("cpu", 256.0, growth_interval=2, enabled=scaled) for _ in range(3)]
    how = dict(policy="compressed", accumulate=micro_batches, max_norm=max_norm)
    used = scalers if scaled else [None] * 3
    handle = st.release_gradients(b, opt, accumulator="fp32", scaler=used[1], **how)
    st.release_gradients(c, small, scaler=used[2], **how)
    for step in range(4):
        stored.zero_grad()
        for i in range(micro_batches):
            for scaler, model, share in zip(scalers, (a, b, c), (micro_batches, 1, 1)):
                scaler.scale(loss_of(model, 10 * step + i, rank) / share).backward()
        for scaler, o in zip(scalers, (stored, opt, small)):
            scaler.step(o, **({"max_norm": max_norm} if o is stored and max_norm else {}))
            scaler.update()
        norm = handle.report()["norm"]
        if max_norm:
            expect(float(stored.last_norm) == norm, "norm", float(stored.last_norm), norm)
    expect(handle.report()["steps"] == 4, handle.report())
    expect_alike(a, stored, b, opt, "compressed", micro_batches, max_norm, scaled)
    expect_same_way(a, c, mlp(), 0.3, "8 bits")
    if scaled:
        expect(len({scaler.get_scale() for scaler in scalers}) == 1, [s.get_scale() for s in scalers])


@ranks(2)
def fsdp_sums():
    """A loop that divides the loss and steps itself, the last step being shorter; and flush, on every rank."""
    rank = dist.get_rank()
    (a, stored), (b, opt) = pair(cls=st.SGD, recipe="fp32")  # which does not forgive a wrong factor
    c = sharded(mlp())
    late = st.SGD(c.parameters(), lr=1e-2, recipe="fp32")
    how = dict(policy="compressed", accumulate=3, max_norm=0.5, accumulator="fp32")
    handle = st.release_gradients(b, opt, reduction="sum", **how)
    flushed = st.release_gradients(c, late, **how)
    for step, parts in enumerate((3, 2)):
        for i in range(parts):
            (loss_of(a, 10 * step + i, rank) / parts).backward()
            (loss_of(b, 10 * step + i, rank) / parts).backward()
            loss_of(c, 10 * step + i, rank).backward()
        stored.step(max_norm=0.5)
        stored.zero_grad()
        opt.step()
        flushed.flush()
        for found in (handle, flushed):
            expect_near(torch.tensor(found.report()["norm"]), stored.last_norm, 1e-5, "norm")
            expect(found.report()["steps"] == step + 1, found.report())
    expect_near_model(a, b, 1e-6, "sums")
    expect_near_model(a, c, 1e-6, "flushed")


@ranks(3)
def fsdp_overflow():
    """A gradient that is not finite on one rank's shard alone: no rank steps, and all scales are halved."""
    rank = dist.get_rank()
    shapes = [(6, 128), (9, 100)]
    for policy, micro_batches in ((None, 1), ("compressed", 1), ("compressed", 2)):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = fully_shard(Bag(shapes, torch.float32), mesh=mesh)
        opt = st.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        if policy:
            how = dict(accumulate=micro_batches, max_norm=1.0, scaler=scaler)
            handle = st.release_gradients(model, opt, policy, **how)
        for step in range(3):
            before = [p.full_tensor().clone() for p in model.parameters()]
            gradients = gradients_of(shapes, step, rank)
            if step == 1 and rank == 0:
                gradients[0][-1, 5] = float("inf")  # a row that the last rank holds
            opt.zero_grad()
            for _ in range(micro_batches):
                scaler.scale(model(gradients)).backward()
            if step == 1 and not policy:
                bad = [not torch.isfinite(p.grad._local_tensor).all() for p in model.parameters()]
                expect(any(bad) == (rank == dist.get_world_size() - 1), "inf on the last rank alone", bad)
            scaler.step(opt)
            scaler.update()
            moved = [not torch.equal(p.full_tensor(), q) for p, q in zip(model.parameters(), before)]
            expect(moved == [step != 1] * 2, policy, "step", step, "moved", moved)
            expect(scaler.get_scale() == (1024.0 if step == 0 else 512.0), policy, step, scaler.get_scale())
        if policy:
            expect(handle.report()["skipped"] == 1 and handle.report()["steps"] == 2, handle.report())
        expect(all(int(state["step"]) == 2 for state in opt.state_dict()["state"].values()), "steps counted")


@ranks(2)
def fsdp_folded():
    """Released with several micro-batches, which the moments take: AdamA, and SGD's momentum."""
    rank = dist.get_rank()
    one, many = mlp(), sharded(mlp())
    opt, ref = (st.AdamW(m.parameters(), lr=1e-2, moments="fp32") for m in (many, one))
    st.release_gradients(many, opt, accumulate=2, accumulation="adama")
    st.release_gradients(one, ref, accumulate=2, accumulation="adama")
    for step in range(4):
        loss_of(many, step, 0).backward()  # every rank has the same batch, so the mean is that of one process
        loss_of(one, step, 0).backward()
    expect_near_model(many, one, 5e-3, "AdamA")
    (a, stored), (b, opt) = pair(cls=st.SGD, momentum=0.9, moments="fp32")
    st.release_gradients(b, opt, accumulate=2, accumulation="momentum")
    for step in range(2):
        stored.zero_grad()
        for i in range(2):
            (loss_of(a, 10 * step + i, rank) / 2).backward()
            loss_of(b, 10 * step + i, rank).backward()
        stored.step()
    expect_near_model(a, b, 1e-3, "momentum")


@ranks(2)
def fsdp_refusals():
    model = sharded(mlp())
    opt = st.AdamW(model.parameters())
    expect_refused(["compressed"], st.release_gradients, model, opt, tensor_norm=1.0)
    expect_refused(["compressed"], st.release_gradients, model, opt, adagc=1.05)
    expect_refused(["fully_shard"], st.release_gradients, model, opt, process_group=dist.group.WORLD)
    st.release_gradients(model, opt).remove()


@ranks(3)
def fsdp_many_groups():
    """torch 2.11 gives another object at every look at a mesh: a norm must not be summed object by object."""
    rank, groups = dist.get_rank(), itertools.cycle([dist.new_group(), dist.new_group()])
    (a, stored), (b, opt) = pair()
    with mock.patch.object(DeviceMesh, "get_group", lambda *_: next(groups)):
        handle = st.release_gradients(b, opt, "compressed", max_norm=0.1, accumulator="fp32")
        for step in range(3):
            stored.zero_grad()
            loss_of(a, step, rank).backward()
            norm = float(stored.clip_and_step(0.1))
            loss_of(b, step, rank).backward()
            expect(handle.report()["norm"] == norm, handle.report(), norm)
    expect_same_model(a, b, "many groups")


@ranks(2, 3)
def data_parallel_released():
    """In place of DDP."""
    rank = dist.get_rank()
    for dtype, bucket, policy in (
        (torch.bfloat16, release.BUCKET, "released"),
        (torch.float32, 4096, "released"),
        (torch.bfloat16, 4096, "compressed"),
    ):
        release.BUCKET = bucket
        a, b = mlp(dtype), mlp(dtype)
        ddp = DistributedDataParallel(a)
        stored, opt = (st.AdamW(m.parameters(), lr=1e-2, rounding="stochastic", seed=5) for m in (a, b))
        kw = {"accumulator": "fp32"} if policy == "compressed" else {}
        st.release_gradients(b, opt, policy, process_group=dist.group.WORLD, **kw)
        for step in range(3):
            stored.zero_grad()
            loss_of(ddp, step, rank, dtype).backward()
            stored.step()
            loss_of(b, step, rank, dtype).backward()
            expect(all(p.grad is None for p in b.parameters()), "gradients are freed")
        if dist.get_world_size() == 2:  # where sums have no order
            expect_alike(a, stored, b, opt, dtype, policy)
        else:
            expect_same_way(a, b, mlp(dtype), 0.1 if dtype == torch.bfloat16 else 0.01, dtype, policy)
        expect_replicas(b, opt)


@ranks(2)
def data_parallel_compressed():
    """Accumulation and clipping over ranks, against the stored loop."""
    rank = dist.get_rank()
    for accumulator, share in (("fp32", 1e-3), ("root8", 0.2), ("int8", 0.2)):
        a, b = mlp(), mlp()
        ddp = DistributedDataParallel(a)
        stored, opt = (st.AdamW(m.parameters(), lr=1e-2, recipe="fp32") for m in (a, b))
        how = dict(accumulate=2, max_norm=0.1, accumulator=accumulator, process_group=dist.group.WORLD)
        handle = st.release_gradients(b, opt, "compressed", **how)
        for step in range(4):
            stored.zero_grad()
            with ddp.no_sync():
                (loss_of(ddp, 10 * step, rank) / 2).backward()
            (loss_of(ddp, 10 * step + 1, rank) / 2).backward()
            norm = float(stored.clip_and_step(0.1))
            for i in range(2):
                loss_of(b, 10 * step + i, rank).backward()
            found = handle.report()
            expect(abs(found["norm"] / norm - 1) < (1e-3 if accumulator == "fp32" else 0.05), found, norm)
            expect(found["clip"] < 1, "clips", found)
        expect_same_way_on_the_whole(a, b, mlp(), share, accumulator)
        expect_replicas(b, opt)


@ranks(2)
def data_parallel_overflow():
    """An overflow on one rank is an overflow of the mean."""
    rank = dist.get_rank()
    model = mlp()
    opt, scaler = st.AdamW(model.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", init_scale=1024.0)
    handle = st.release_gradients(model, opt, "compressed", scaler=scaler, process_group=dist.group.WORLD)
    before = [p.detach().clone() for p in model.parameters()]
    loss = loss_of(model, 0, rank) * (float("inf") if rank == 1 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    expect(scaler.get_scale() == 512.0, scaler.get_scale())
    expect(all(torch.equal(p, q) for p, q in zip(model.parameters(), before)), "no rank has moved")
    expect(handle.report()["skipped"] == 1, handle.report())
    scaler.scale(loss_of(model, 1, rank)).backward()
    scaler.step(opt)
    scaler.update()
    expect(handle.report()["steps"] == 1, handle.report())
    expect_replicas(model, opt)


@ranks(2)
def data_parallel_codes():
    """Coded weights: those of the first rank, the same after every step, and the steps of one process with both batches."""
    rank = dist.get_rank()
    how = dict(accumulate=2, max_norm=0.5, accumulator="fp32")
    runs = []
    for group in (dist.group.WORLD, None):
        model = mlp()
        if rank == 1 and group is not None:
            with torch.no_grad():
                model[0].weight.add_(1)  # the first rank's count
        opt = st.SGD(model.parameters(), lr=0.05, momentum=0.9, recipe="lpmm")
        st.compress_weights(model, opt, process_group=group, **how)
        runs.append((model, opt))
    (model, opt), (alone, other) = runs
    for step in range(4):
        for i in range(2):
            loss_of(model, 2 * step + i, rank).backward()
            (sum(loss_of(alone, 2 * step + i, r) for r in range(2)) / 2).backward()
        for one in (opt, other):
            one.step()
            one.zero_grad()
        expect_replicas(model, opt)
    start = mlp()
    expect_same_way_on_the_whole(alone, model, start, 0.05, "both batches")


@ranks(2)
def fsdp_codes():
    model = sharded(mlp())
    opt = st.SGD(model.parameters(), lr=0.05, momentum=0.9, recipe="lpmm")
    before = [p.detach().clone() for p in model.parameters()]
    expect_refused(["DTensor", "process_group"], st.compress_weights, model, opt)
    expect(opt._handle is None and not any(opt.state.values()), "nothing was begun")
    expect(all(torch.equal(p.to_local(), q.to_local()) for p, q in zip(model.parameters(), before)), "untouched")


class Normed(torch.nn.Module):
    """A convolution in channels_last and a normalisation with buffers."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3)
        self.norm = torch.nn.BatchNorm2d(8)

    def forward(self, x):
        return self.norm(self.conv(x))


@ranks(2)
def data_parallel_start():
    """Weights and buffers are the first rank's from the start, for every recipe and memory format."""
    rank = dist.get_rank()
    for policy, recipe in (
        ("released", "scruple"),
        ("released", "mixed"),
        ("compressed", "mixed"),
        ("compressed", "split"),
    ):
        torch.manual_seed(rank)
        model = mlp(torch.bfloat16)
        for p in model.parameters():
            p.data.add_(torch.randn(p.shape).to(p.dtype), alpha=0.01)
        opt = st.AdamW(model.parameters(), lr=1e-3, recipe=recipe)
        first = [p.detach().clone() for p in model.parameters()]
        st.release_gradients(model, opt, policy, process_group=dist.group.WORLD)
        if rank == 0:
            kept = all(torch.equal(p, q) for p, q in zip(model.parameters(), first))
            expect(kept, "the first rank keeps its own")
        expect_replicas(model)
        for step in range(2):
            loss_of(model, step, rank, torch.bfloat16).backward()
        expect_replicas(model, opt)
    torch.manual_seed(rank)
    model = Normed().to(memory_format=torch.channels_last)
    torch.nn.init.normal_(model.norm.running_mean)
    opt = st.SGD(model.parameters(), lr=0.1, momentum=0.9)
    st.release_gradients(model, opt, process_group=dist.group.WORLD)
    expect_replicas(model)
    means = [torch.empty(8) for _ in range(dist.get_world_size())]
    dist.all_gather(means, model.norm.running_mean)
    expect(all(torch.equal(means[0], mean) for mean in means), "buffers")
    for _ in range(2):
        model(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)).square().mean().backward()
    expect_replicas(model, opt)


@ranks(2)
def data_parallel_refusals():
    model = mlp()
    opt = st.AdamW(model.parameters())
    expect_refused(
        ["model.module", "process_group="], st.release_gradients, DistributedDataParallel(model), opt
    )


class Released(worlds.Distributed):
    """All of whose tests are above."""


if __name__ == "__main__":
    unittest.main()
