"""scruple.torch over several processes: DDP, FSDP2 (fully_shard) and torch.distributed.checkpoint."""

import copy
import itertools
import tempfile
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import worlds
from scruple import torch as st
from worlds import SHAPES, Bag, aligned, batch, bound_of, expect, expect_alike, expect_equal, expect_near
from worlds import expect_near_model, expect_replicas, expect_same_model, gradients_of, loss_of, mlp, ranks
from worlds import sharded, whole


@ranks(2)
def ddp_stored():
    rank, world = dist.get_rank(), dist.get_world_size()
    model, one = mlp(torch.bfloat16), mlp(torch.bfloat16)
    ddp = DistributedDataParallel(model)
    opt, ref = (st.AdamW(m.parameters(), lr=1e-2, rounding="stochastic", seed=3) for m in (model, one))
    for step in range(4):
        opt.zero_grad()
        loss_of(ddp, step, rank, torch.bfloat16).backward()
        # What DDP averages, by hand: a share of each, then the sum.
        for r in range(world):
            alone = copy.deepcopy(model)
            alone.zero_grad()
            loss_of(alone, step, r, torch.bfloat16).backward()
            for p, q in zip(alone.parameters(), one.parameters()):
                share = p.grad * (1.0 / world)
                q.grad = share if r == 0 else q.grad + share
        for p, q in zip(model.parameters(), one.parameters()):
            expect_equal(p.grad, q.grad, "gradient in step", step)
        opt.step()
        ref.step()
    expect_alike(model, opt, one, ref, "DDP and one process")
    expect_replicas(model, opt)


def sharded_bag(shapes=SHAPES, dtype=torch.bfloat16, **options):
    return fully_shard(Bag(shapes, dtype), mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **options)


def both(recipe, rounding, dtype=torch.bfloat16, **options):
    """Shards and one process, with an optimizer each."""
    models = sharded_bag(dtype=dtype, **options), Bag(SHAPES, dtype)
    how = dict(lr=1e-2, recipe=recipe, rounding=rounding, seed=7, weight_decay=0.1)
    return *models, *(st.AdamW(model.parameters(), **how) for model in models)


def backward_both(many, one, shapes, step, spread=1.0):
    many.zero_grad()
    many(gradients_of(shapes, step, dist.get_rank(), spread)).backward()
    for p, q in zip(many.parameters(), one.parameters()):
        q.grad = p.grad.full_tensor()


@ranks(3, cases=[*itertools.product(("scruple", "flash", "scant", "fp32"), ("nearest", "stochastic"))])
def fsdp_equals_one_process(recipe, rounding):
    """Bit for bit where groups are the same; elsewhere the weights of the first step still are, since a step
    uses moments before they are rounded, and moments are within their format's bound."""
    many, one, opt, ref = both(recipe, rounding)
    exact = st.AdamW(copy.deepcopy(one).parameters(), lr=1e-2, recipe="fp32", weight_decay=0.1)
    backward_both(many, one, SHAPES, 0)
    for p, q in zip(exact.param_groups[0]["params"], one.parameters()):
        p.grad = q.grad
    for o in (opt, ref, exact):
        o.step()
    expect_same_model(many, one, "the first step")
    formats = opt.state_dict()["param_groups"][0]["formats"]["bf16"]
    found, true = opt.state_dict(as_="torch")["state"], exact.state_dict(as_="torch")["state"]
    for i, slot in itertools.product(range(len(SHAPES)), ("exp_avg", "exp_avg_sq")):
        value = true[i][slot]
        off = (found[i][slot].full_tensor() - value).abs()
        limit = bound_of(formats[slot], slot == "exp_avg_sq", value)
        expect(bool((off <= limit).all()), recipe, slot, SHAPES[i])
    for step in range(1, 5):
        backward_both(many, one, SHAPES, step)
        opt.step()
        ref.step()
    compare_shards(many, one, opt, ref, recipe)


def compare_shards(many, one, opt, ref, recipe, shapes=SHAPES, lr=1e-2, steps=5):
    masters, wide = opt.master_weights(), ref.master_weights()
    ours, theirs = opt.state_dict()["state"], ref.state_dict()["state"]
    checked = planes = 0
    for i, (shape, p, q) in enumerate(zip(shapes, many.parameters(), one.parameters())):
        if aligned(shape) or recipe == "fp32":
            checked += 1
            expect_equal(p, q, recipe, shape)
            expect_equal(masters[p], wide[q], recipe, shape, "master")
            for name, plane in ours[i].items():
                other = theirs[i][name]
                if plane.dtype == other.dtype and plane.numel() == other.numel():  # planes on both sides
                    expect_equal(whole(plane).reshape(-1), other.reshape(-1), recipe, shape, name)
                    planes += 1
        # A weight moves by about lr in a step; moments of other groups change that by their rounding.
        limit = (1 if recipe == "scant" else 0.25) * lr * steps
        expect_near(masters[p], wide[q], limit, recipe, shape)
    expect(checked >= 5 and planes >= 3 * checked, "aligned shapes", checked, "planes", planes)


@ranks(3)
def fsdp_mixed_precision():
    """fp32 shards that are gathered in bf16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for recipe, rounding in (("scruple", "stochastic"), ("fp32", None)):
        many, one, opt, ref = both(recipe, rounding, dtype=torch.float32, mp_policy=policy)
        for step in range(4):
            backward_both(many, one, SHAPES, step)
            expect(all(p.grad.dtype == torch.float32 for p in many.parameters()), "gradients are fp32")
            opt.step()
            ref.step()
        compare_shards(many, one, opt, ref, recipe)


@ranks(3)
def fsdp_clipping():
    """The norm is that of all ranks, and clipping by it is torch's."""
    for dtype in (torch.bfloat16, torch.float32):
        many, one, opt, ref = both("scruple", None, dtype=dtype)
        for step in range(3):
            backward_both(many, one, SHAPES, step, spread=0.1 if step == 1 else 1.0)
            limit = 5.0 if step < 2 else 1e6
            true = torch.nn.utils.get_total_norm([p.grad.float() for p in many.parameters()]).full_tensor()
            norm = opt.clip_and_step(limit)
            other = ref.clip_and_step(limit)
            expect(abs(float(norm) / float(true) - 1) < 1e-5, "norm", float(norm), "torch's", float(true))
            expect(abs(float(norm) / float(other) - 1) < 1e-12, "norm", float(norm), "one's", float(other))
        compare_shards(many, one, opt, ref, "scruple")
    # Clipped by us and by torch.
    ours, theirs = (sharded_bag(dtype=torch.float32) for _ in range(2))
    a, b = (st.AdamW(m.parameters(), lr=1e-2, recipe="fp32", betas=(0.0, 0.5)) for m in (ours, theirs))
    for step in range(3):
        for m in (ours, theirs):
            m.zero_grad()
            m(gradients_of(SHAPES, step, dist.get_rank())).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 2.0).full_tensor()
        b.step()
        got = a.clip_and_step(2.0)
        expect(abs(float(got) / float(norm) - 1) < 1e-5, "norm", float(got), "torch's", float(norm))
    expect_near_model(ours, theirs, 1e-5, "clipped by torch")


@ranks(2, 3)
def fsdp_layers():
    """A network whose layers are sharded one by one, against one process with its gradients."""
    rank = dist.get_rank()
    one, many = mlp(torch.bfloat16), sharded(mlp(torch.bfloat16))
    opt, ref = (st.AdamW(m.parameters(), lr=1e-2, rounding="stochastic", seed=5) for m in (many, one))
    for step in range(3):
        opt.zero_grad()
        loss_of(many, step, rank, torch.bfloat16).backward()
        for p, q in zip(many.parameters(), one.parameters()):
            q.grad = p.grad.full_tensor()
        opt.clip_and_step(0.5)
        ref.clip_and_step(0.5)
    for p, q in zip(many.parameters(), one.parameters()):
        if aligned(p.shape):
            expect_equal(p, q, tuple(p.shape))


@ranks(2)
def hybrid():
    """Meshes of two dimensions: replicas of shards, and FSDP over tensor parallelism. Norm and step are
    right."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    rank = dist.get_rank()
    for sizes, tensor_parallel in (((2, 1), False), ((1, 2), False), ((2, 1), True), ((1, 2), True)):
        one = mlp(torch.float32)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner"))
        many = mlp(torch.float32)
        if tensor_parallel:
            many = parallelize_module(
                many, mesh["inner"], {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel()}
            )
            many = sharded(many, mesh["outer"])
            data = mesh["outer"].get_local_rank()
        else:
            many, data = sharded(many, mesh), rank
        opt, ref = (st.AdamW(m.parameters(), lr=1e-2, recipe="fp32") for m in (many, one))
        for step in range(2):
            opt.zero_grad()
            out = many(batch(step, data)[0])
            expect(out.shape[1] in (3, 6), out.shape)
            out.float().square().mean().backward()
            grads = [p.grad.full_tensor() for p in many.parameters()]
            for g, q in zip(grads, one.parameters()):
                q.grad = g
            norm, true = opt.clip_and_step(0.05), torch.nn.utils.get_total_norm(grads)
            off = abs(float(norm) / float(true) - 1)
            expect(off < 1e-5, sizes, tensor_parallel, float(norm), float(true))
            ref.clip_and_step(0.05)
        expect_same_model(many, one, sizes, tensor_parallel)


DICT = {"weights": "stochastic", "moments": "nearest", "exp_avg": "stochastic"}


def mixed_groups(model):
    """One optimizer with a recipe for every two parameters, so that one checkpoint has every kind of
    plane."""
    params = list(model.parameters())
    kinds = [
        dict(recipe="scruple"),
        dict(recipe="flash"),
        dict(recipe="scant"),
        dict(recipe="split"),
        dict(recipe="scruple", weights="bf16+4", rounding=DICT),
        dict(recipe="mixed"),
        dict(moments="bf16", weights="bf16+11"),
    ]
    groups = [dict(params=params[i :: len(kinds)], **kind) for i, kind in enumerate(kinds)]
    return st.AdamW([g for g in groups if g["params"]], lr=1e-2, rounding="stochastic", seed=11)


# Every recipe of mixed_groups gets an aligned matrix, one that is not, and a vector.
SAVED_SHAPES = [(4, 128)] * 7 + [(5, 100)] * 7 + [(70,)] * 7 + [(2, 256)]


def saved_world(shard=True, lr=None):
    model = sharded_bag(SAVED_SHAPES) if shard else Bag(SAVED_SHAPES)
    opt = mixed_groups(model)
    if lr is not None:
        for group in opt.param_groups:
            group.update(lr=lr, seed=0)
    return model, opt


def train(model, opt, first, last):
    """The same mean gradients in any world."""
    for step in range(first, last):
        opt.zero_grad()
        model(gradients_of(SAVED_SHAPES, step)).backward()
        opt.step()


def state_of(model, opt, **options):
    made = StateDictOptions(**options)
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, opt, options=made)}


def gathered(model, opt):
    """What a reader in another world must find: planes, moments in fp32, and master weights."""
    optim = get_optimizer_state_dict(model, opt)["state"]
    names = {p: name for name, p in model.named_parameters()}
    torch_state = opt.state_dict(as_="torch")["state"]
    numbers = {p: i for i, p in enumerate(opt._all_params())}
    return {
        "weights": {names[p]: whole(p).detach() for p in names},
        "planes": {name: {k: whole(v) for k, v in planes.items()} for name, planes in optim.items()},
        "values": {names[p]: {k: whole(v) for k, v in torch_state[i].items()} for p, i in numbers.items()},
        "formats": {
            names[p]: group["formats"]["bf16"] for group in opt.param_groups for p in group["params"]
        },
        "masters": {names[p]: whole(v) for p, v in opt.master_weights().items()},
    }


def dcp_save(folder):
    """Saves, resumes on the same ranks, and leaves for other worlds what they must find."""
    for flat in (False, True):
        options = dict(flatten_optimizer_state_dict=flat)
        path = f"{folder}/flat-{flat}"
        model, opt = saved_world()
        train(model, opt, 0, 3)
        dcp.save(state_of(model, opt, **options), checkpoint_id=path)
        if not flat:
            found = gathered(model, opt)
            if dist.get_rank() == 0:
                torch.save(found, f"{folder}/expected")
        train(model, opt, 3, 5)
        again, other = saved_world(lr=1.0)
        load(again, other, path, options)
        expect(all((g["lr"], g["seed"]) == (1e-2, 11) for g in other.param_groups), "hyperparameters")
        train(again, other, 3, 5)
        expect_alike(model, opt, again, other, "resumed, flat", flat)
    after = {name: whole(p).detach() for name, p in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save(after, f"{folder}/after")
    dist.barrier()


def load(model, opt, path, options):
    state = state_of(model, opt, **options)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, opt, optim_state_dict=state["optim"], options=StateDictOptions(**options))


def dcp_load(folder, shard=True):
    """A world of another size, or one process without shards."""
    for flat in (False, True):
        path = f"{folder}/flat-{flat}"
        model, opt = saved_world(shard, lr=1.0)
        load(model, opt, path, dict(flatten_optimizer_state_dict=flat))
        roundings = [group["rounding"] for group in opt.param_groups]
        expect(roundings == ["stochastic"] * 4 + [DICT] + ["stochastic"] * 2, "roundings", roundings)
        expect(all(group["lr"] == 1e-2 for group in opt.param_groups), "groups")
        check_loaded(gathered(model, opt), torch.load(f"{folder}/expected", weights_only=True), flat)
        train(model, opt, 3, 5)
        after = torch.load(f"{folder}/after", weights_only=True)
        for name, p in model.named_parameters():
            expect_near(p, after[name], 0.05, "resumed elsewhere", name)
    if not shard:
        back_into_shards(model, opt, f"{folder}/plain")


def back_into_shards(plain, alone, path):
    """What one process has saved, for ranks that hold a part each."""
    dcp.save(state_of(plain, alone), checkpoint_id=path)
    model, opt = saved_world(lr=1.0)
    load(model, opt, path, {})
    check_loaded(gathered(model, opt), gathered(plain, alone), "back into shards")


def check_loaded(found, expected, *what):
    for name, weight in expected["weights"].items():
        expect_equal(found["weights"][name], weight, *what, name)
        expect_equal(found["masters"][name], expected["masters"][name], *what, name, "master")
        shape, planes, true = weight.shape, found["planes"][name], expected["planes"][name]
        expect(planes.keys() == true.keys(), *what, name, list(planes), list(true))
        follows = len(shape) > 1 and shape[1:].numel() % 128 == 0
        for key in true:
            if follows or key in ("step", "extra"):
                expect_equal(planes[key], true[key], *what, name, key)
        for slot in ("exp_avg", "exp_avg_sq"):
            # Rounded once when it was saved in other groups than these.
            value = expected["values"][name][slot]
            form = expected["formats"][name][slot]
            off = (found["values"][name][slot] - value).abs()
            limit = torch.zeros_like(off) if follows else bound_of(form, slot == "exp_avg_sq", value)
            expect(bool((off <= limit).all()), *what, name, form, "values", off.max().item())


@ranks(3)
def dcp_full_state():
    """A whole state dict on rank 0's CPU, and back to all ranks; and to one process."""
    model, opt = saved_world()
    train(model, opt, 0, 3)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(model, opt, options=options)
    weights = get_model_state_dict(model, options=options)
    expect(bool(state["state"] if "state" in state else state) == (dist.get_rank() == 0), "on rank 0 alone")
    kept = copy.deepcopy({"model": weights, "optim": state})  # torch writes shards into what it loads
    again, other = saved_world(lr=1.0)
    back = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(again, weights, options=back)
    set_optimizer_state_dict(again, other, optim_state_dict=state, options=back)
    expect_alike(model, opt, again, other, "full state")
    expected = gathered(model, opt)
    if dist.get_rank() == 0:
        plain, alone = saved_world(shard=False, lr=1.0)
        plain.load_state_dict(kept["model"])
        set_optimizer_state_dict(plain, alone, optim_state_dict=kept["optim"])
        check_loaded(gathered(plain, alone), expected, "one process")
    train(model, opt, 3, 4)
    train(again, other, 3, 4)
    expect_same_model(model, again, "full state, resumed")


@ranks(2, 3)
def plain_state_into_shards():
    """opt.state_dict() of one process, loaded by ranks that hold a part each."""
    plain, alone = saved_world(shard=False)
    train(plain, alone, 0, 3)
    model, opt = saved_world(lr=1.0)
    set_model_state_dict(model, plain.state_dict(), options=StateDictOptions(full_state_dict=True))
    opt.load_state_dict(alone.state_dict())
    expected, found = gathered(plain, alone), gathered(model, opt)
    check_loaded(found, expected, "plain into shards")
    # And torch.optim's own.
    torch_opt = torch.optim.AdamW(Bag(SHAPES).parameters(), lr=1e-3)
    for p, g in zip(torch_opt.param_groups[0]["params"], gradients_of(SHAPES, 0)):
        p.grad = g.to(p.dtype)
    torch_opt.step()
    opt, true = st.AdamW(sharded_bag().parameters(), recipe="split"), torch_opt.state_dict()
    opt.load_state_dict(true)
    for i, state in opt.state_dict(as_="torch")["state"].items():
        for slot in ("exp_avg", "exp_avg_sq"):
            expect_equal(state[slot].full_tensor(), true["state"][i][slot].float(), "torch.optim", slot)


def as_older(saved):
    """The state of AdamW without amsgrad as one with it that the first library has left: second moments in
    the recipe's formats, of which the largest is what there is."""
    saved = copy.deepcopy(saved)
    for state in saved["state"].values():
        for name in [name for name in state if name.startswith("exp_avg_sq")]:
            state["max_" + name] = state[name]
    for group in saved["param_groups"]:
        group["amsgrad"] = True
        for formats in group["formats"].values():
            formats["max_exp_avg_sq"] = formats["exp_avg_sq"]
    return saved


@ranks(2, 3)
def older_state_into_shards():
    """Moments that must be exact now and stand in codes: of one process, and of the same shards."""
    plain, alone = saved_world(shard=False)
    train(plain, alone, 0, 3)
    many, each = saved_world()
    train(many, each, 0, 3)
    for source in (alone, each):
        expected = source.state_dict(as_="torch")["state"]
        model, opt = saved_world(lr=1.0)
        set_model_state_dict(model, plain.state_dict(), options=StateDictOptions(full_state_dict=True))
        opt.load_state_dict(as_older(source.state_dict()))
        found = opt.state_dict(as_="torch")["state"]
        for i, true in expected.items():
            for slot in ("exp_avg_sq", "max_exp_avg_sq"):
                expect_equal(whole(found[i][slot]), whole(true["exp_avg_sq"]), "older", i, slot)
        train(model, opt, 3, 4)


def fails_on_rank_1():
    """For the harness itself: the others wait for a rank that does not come."""
    if dist.get_rank() == 1:
        raise AssertionError("on purpose")
    dist.barrier()


class Stored(worlds.Distributed):
    def test_checkpoint_in_other_worlds(self):
        with tempfile.TemporaryDirectory() as folder:
            self.run_in(3, dcp_save, folder)
            for shard in (True, False):
                with self.subTest(shard=shard):
                    self.run_in(2, dcp_load, folder, shard)

    def test_zz_a_failing_rank_does_not_hang_the_rest(self):
        self.assertIn("on purpose", self.worlds[2].run(fails_on_rank_1)[1])


if __name__ == "__main__":
    unittest.main()
