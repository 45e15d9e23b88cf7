"""offload=True: moments and extra bits in pinned host memory. The same bits as without, in steps, states and checkpoints;
where planes lie; refusals. On a CPU it changes nothing, which the same tests show."""

import copy
import gc
import os
import pickle
import tempfile
import unittest
from unittest import mock

import torch
import torch.distributed as dist

os.environ.setdefault("SCRUPLE_CUDA_SLOT", "131072")  # read by the engine: small slots, many pieces

import scruple
from scruple.torch import pinned
from scruple.torch.shards import local
from support import BF16, DEVICE, FP16, FP32, KINDS, STORAGE, Case, Run, cuda_only, each, give_gradients, mlp
from support import parameters, same, st, stored, tensor
from test_state import OPTIONS, moments_of

SHAPES = ((300, 257), (70001,), (33, 7), (), (600, 256))  # those of up to 65,536 elements stay
RELEASED = {
    "released": dict(policy="released"),
    "tensor_norm": dict(policy="released", tensor_norm=0.1),
    "compressed": dict(policy="compressed", max_norm=0.1, accumulate=2),
    "sum": dict(policy="compressed", max_norm=0.1, accumulate=2, reduction="sum"),
    "adama": dict(policy="released", accumulate=2, accumulation="adama"),
}
BOTH_WAYS = dict(was=(False, True), now=(False, True))


def pair(kind=st.AdamW, dtype=BF16, **options):
    """A run, and the same with offload=True."""
    return [Run(kind, params=parameters(dtype, SHAPES), offload=x, **options) for x in (False, True)]


def models(dtype=BF16, release=None, **options):
    made = (mlp(dtype, width=300) for _ in range(2))
    return [Run(model=m, release=release, offload=x, **options) for m, x in zip(made, (False, True))]


def on_host(run):
    """The names of the planes in pinned memory, of each parameter."""
    return [[k for k, x in run.opt.state[p].items() if torch.is_tensor(x) and x.is_pinned()] for p in run.params]


class SameBits(Case):
    @each(options=STORAGE, dtype=(BF16, FP16, FP32))
    def test_every_recipe(self, options, dtype):
        plain, away = pair(dtype=dtype, **stored(options, dtype))
        self.assertAlike(plain.steps(3), away.steps(3))

    @each(kind=KINDS, recipe=("scruple", "fp32"))
    def test_every_optimizer(self, kind, recipe):
        plain, away = pair(kind, recipe=recipe, **moments_of(OPTIONS[kind.__name__], kind.__name__))
        self.assertAlike(plain.steps(3, max_norm=0.5), away.steps(3, max_norm=0.5))

    @each(release=RELEASED, recipe=("scruple", "mixed", "fp32"))
    def test_gradients_in_backward(self, release, recipe):
        moments = "fp32" if "accumulation" in release else None
        runs = models(release=release, recipe=recipe, moments=moments, weight_decay=0.0)
        for run in runs:
            for step in range(6):
                run.loss(step).backward()
                run.opt.step(), run.opt.zero_grad()
        self.assertAlike(*runs)

    @each(release=(None, dict(policy="released"), dict(policy="compressed", max_norm=1.0)))
    def test_loss_scaling(self, release):
        """One of the steps overflows, and is skipped."""
        runs = []
        for away in (False, True):
            scaler = st.LossScaler(DEVICE.type, init_scale=2.0**9)
            how = release and dict(release, scaler=scaler)
            runs.append(run := Run(model=mlp(FP16, width=300), release=how, offload=away))
            for step in range(4):
                scaler.scale(run.loss(step) * (1e30 if step == 2 else 1)).backward()
                scaler.step(run.opt)
                scaler.update()
                run.opt.zero_grad()
        self.assertAlike(*runs)

    def test_groups_schedulers_and_frozen_parameters(self):
        runs = []
        for away in (False, True):
            ps = parameters(BF16, SHAPES)
            ps[1].requires_grad_(False)
            opt = st.AdamW([dict(params=ps[:2], recipe="scant", lr=0.1), dict(params=ps[2:4])], offload=away)
            scheduler, run = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5), Run(params=ps)
            for step in range(4):
                give_gradients([p for i, p in enumerate(ps) if i != (3 if step == 1 else 1)], step)
                opt.step(), scheduler.step()
                if step == 2:
                    opt.add_param_group(dict(params=ps[4:], recipe="flash"))
            run.opt = opt
            runs.append(run)
        self.assertAlike(*runs)

    @each(weights=("int8", "int12"))
    def test_coded_weights(self, weights):
        runs = models(kind=st.SGD, recipe="lpmm", momentum=0.9, weights=weights)
        for run in runs:
            run.handle = st.compress_weights(run.model, run.opt, accumulate=2, max_norm=1.0)
            for step in range(4):
                run.loss(step).backward()
                run.opt.step(), run.opt.zero_grad()
        self.assertAlike(*runs)

    def test_fsdp(self):
        """Shards, and what torch.distributed.checkpoint makes of them, in a world of one rank."""
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
        from torch.distributed.fsdp import fully_shard

        backend = "cpu:gloo,cuda:nccl" if DEVICE.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        runs = []
        for away in (False, True, False, True):
            model = mlp(BF16, width=384)  # rows of whole groups
            fully_shard(model, mesh=dist.device_mesh.init_device_mesh(DEVICE.type, (1,)))
            runs.append(Run(model=model, offload=away))

        def held(run):
            return [
                {name: local(x) if torch.is_tensor(x) else x for name, x in state.items()}
                for state in (*run.opt.state_dict()["state"].values(), dict(enumerate(run.params)))
            ]

        plain, away, *others = (run.steps(2) if i < 2 else run for i, run in enumerate(runs))
        self.assertSame(held(plain), held(away))
        for other, source in zip(others, (away, plain)):
            with torch.no_grad():
                for p, q in zip(other.params, source.params):
                    local(p).copy_(local(q))
            saved = get_optimizer_state_dict(source.model, source.opt)
            set_optimizer_state_dict(other.model, other.opt, optim_state_dict=saved)
            other.taken = source.taken
        for run in runs:
            run.steps(2)
        for other in (away, *others):
            self.assertSame(held(plain), held(other))
        if DEVICE.type == "cuda":
            devices = {local(x).device.type for x in away.opt.state_dict()["state"][2].values()}
            self.assertEqual(devices, {"cpu"})

    def test_reading_and_writing_between_steps(self):
        """Planes on the host are read and written by the host, while copies of steps before are on their way."""
        runs = []
        for away in (False, True):
            run, read = Run(params=parameters(BF16, ((1 << 11, 1 << 10),)), recipe="mixed", offload=away), []
            for _ in range(6):
                state = run.steps().opt.state[run.params[0]]
                read.append(float(state["exp_avg"].double().sum()))
                state["exp_avg"].mul_(0.5)
                run.steps()
                read.append({k: v.clone() for k, v in run.opt.state_dict()["state"][0].items()})
            runs.append((run, read))
        for x, y in zip(*(read for _, read in runs)):
            self.assertTrue(same(x, y) if isinstance(x, dict) else abs(x - y) <= 1e-6 * abs(x))
        self.assertAlike(*(run for run, _ in runs))


class States(Case):
    @each(options=STORAGE, **BOTH_WAYS)
    def test_state_dicts_both_ways(self, options, was, now):
        run = Run(params=parameters(BF16, SHAPES), offload=was, **options).steps(2)
        twin = run.resumed(offload=now)
        self.assertAlike(run, twin)
        self.assertAlike(run.steps(2), twin.steps(2))
        self.assertEqual(any(on_host(twin)), now and DEVICE.type == "cuda")

    @each(**BOTH_WAYS)
    def test_states_of_torch_both_ways(self, was, now):
        run = Run(params=parameters(FP32, SHAPES), recipe="fp32", offload=was).steps(2)
        twin = run.resumed(state=run.opt.state_dict(as_="torch"), recipe="fp32", offload=now)
        self.assertAlike(run.steps(2), twin.steps(2))

    @each(recipe=("scruple", "mixed", "scant"), **BOTH_WAYS)
    def test_checkpoints_both_ways(self, recipe, was, now):
        run, twin = (Run(model=mlp(BF16, i, 300), offload=x, recipe=recipe) for i, x in enumerate((was, now)))
        run.steps(2)
        with tempfile.TemporaryDirectory() as folder:
            scruple.save(run.opt, run.model, folder + "/saved")
            scruple.load(twin.opt, twin.model, folder + "/saved")
        twin.taken = run.taken
        self.assertAlike(run, twin)
        self.assertAlike(run.steps(2), twin.steps(2))

    @each(recipe=("scruple", "mixed", "fp32"))
    def test_state_written_by_users(self, recipe):
        plain, away = pair(recipe=recipe)
        for run in (plain, away):
            state = [run.steps(2).opt.state[p] for p in run.params]
            state[0]["exp_avg"] = tensor(*SHAPES[0], seed=1)
            state[0]["exp_avg_sq"].mul_(0.5)
            state[0]["step"] = 7
            run.opt.state[run.params[1]] = {}
            state[4]["mine"] = torch.ones(3)
            run.steps(2)
        self.assertAlike(plain, away)
        if DEVICE.type == "cuda":
            shown = [away.opt.state[p]["exp_avg"].device.type for p in away.params]
            self.assertEqual(shown, ["cpu", "cpu", "cuda", "cuda", "cpu"])

    @each(recipe=("scruple", "split", "mixed"))
    def test_master_weights(self, recipe):
        plain, away = pair(recipe=recipe)
        for run in (plain, away):
            run.steps(1)
            run.opt.set_master_weights({p: tensor(*p.shape, seed=i) for i, p in enumerate(run.params)})
            run.steps(1)
        self.assertAlike(plain, away)
        self.assertSame(*([run.opt.master_weights()[p] for p in run.params] for run in (plain, away)))
        watched = []
        for run in (plain, away):
            give_gradients(run.params, 5, 1e-3)
            watched.append(st.check_updates(run.opt))
            with st.watch_updates(run.opt) as unmoved:
                run.steps(1)
            watched[-1] += unmoved.values()
        self.assertEqual(*watched)

    @each(copied=(copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))), recipe=("scruple", "fp32"))
    def test_copies(self, copied, recipe):
        run, twin = Run(params=parameters(BF16, SHAPES), recipe=recipe, offload=True).steps(2), Run()
        twin.params, twin.opt = copied((run.params, run.opt))
        twin.taken = run.taken
        self.assertAlike(run.steps(2), twin.steps(2))
        self.assertEqual(on_host(run), on_host(twin))

    @each(recipe=("scruple", "mixed"))
    def test_a_group_goes_and_comes_back(self, recipe):
        plain, moved = (Run(params=parameters(BF16, SHAPES), recipe=recipe) for _ in range(2))
        for away in (True, False, True):
            moved.opt.param_groups[0]["offload"] = away  # while copies of the step before are on their way
            moved.steps(2)
        self.assertAlike(plain.steps(6), moved)
        self.assertEqual(any(on_host(moved)), DEVICE.type == "cuda")
        moved.opt.param_groups[0]["offload"] = False
        self.assertAlike(plain.steps(1), moved.steps(1))
        self.assertFalse(any(on_host(moved)))


class Memory(Case):
    @cuda_only
    @each(recipe=("fp32", "mixed", "split", "scruple", "scant"), dtype=(BF16, FP32))
    def test_where_planes_lie(self, recipe, dtype):
        run = Run(params=parameters(dtype, SHAPES), recipe=recipe, offload=True).steps(1)
        for p, names in zip(run.params, on_host(run)):
            planes = run.opt._layout(p).planes
            self.assertEqual(names, [plane.name for plane in planes] if p.numel() > pinned.SMALL else [])
        self.assertTrue(all(p.is_cuda for p in run.params))

    @cuda_only
    def test_what_the_device_holds(self):
        size, taken = 1 << 24, {}
        for away in (False, True):
            p = parameters(BF16, ((size,),))
            opt = st.AdamW(p, offload=away)
            p[0].grad = torch.zeros_like(p[0])
            before = torch.cuda.memory_allocated()
            opt.step()
            taken[away] = (torch.cuda.memory_allocated() - before) / size
        self.assertGreater(taken[False], 3)
        self.assertLess(taken[True], 0.01)

    @cuda_only
    def test_one_group(self):
        a, b = (parameters(BF16, SHAPES[:1], seed) for seed in range(2))
        run = Run(params=a + b)
        run.opt = st.AdamW([dict(params=a, offload=True), dict(params=b)])
        self.assertEqual(list(map(bool, on_host(run.steps(1)))), [True, False])

    @cuda_only
    def test_planes_live_as_long_as_somebody_has_them(self):
        given_back = []
        real = pinned._free
        with mock.patch.object(pinned, "_free", lambda *how: (given_back.append(how), real(*how))):
            run = Run(params=parameters(BF16, SHAPES[:1]), recipe="mixed", offload=True).steps(3)
            part = run.opt.state[run.params[0]]["exp_avg"][:5]
            was = part.clone()
            del run
            gc.collect()
            self.assertEqual(len(given_back), 2)  # the other moment and the master copy
            self.assertSame(part, was)
            del part
            gc.collect()
            self.assertEqual(len(given_back), 3)

    @cuda_only
    def test_dropped_while_copies_are_on_their_way(self):
        for seed in range(5):
            run = Run(params=parameters(BF16, ((1 << 22,),), seed), recipe="mixed", offload=True)
            give_gradients(run.params, 0)
            for _ in range(5):
                run.opt.step()
            del run
            other = Run(params=parameters(BF16, ((1 << 22,),)), recipe="mixed", offload=True).steps(1)
            self.assertTrue(all(x.isfinite().all() for x in other.opt.state[other.params[0]].values()))


class Refused(Case):
    def test_what_it_cannot_be(self):
        for wrong in ("20GiB", None, 2):
            with self.refused("offload is", "True or False"):
                st.AdamW(parameters(), offload=wrong)
        with self.refused("offload is"):
            st.AdamW([dict(params=parameters(), offload="yes")])

    def test_cuda_graphs(self):
        with self.refused("offload=True", "capturable=True", "CUDA graph", "leave out"):
            st.AdamW(parameters(), offload=True, capturable=True)
        run = Run(offload=True).steps(1)
        run.opt.param_groups[0]["capturable"] = True
        capturable = run.opt.state_dict()
        with self.refused("capturable=True"):
            run.resumed(offload=True, state=capturable)

    @cuda_only
    def test_a_stream_that_is_captured(self):
        for steps in (0, 1):
            run = Run(params=parameters(BF16, SHAPES), offload=True).steps(steps)
            give_gradients(run.params, 1)
            gc.collect()  # planes of tests before would be freed, and waited for, inside the capture
            with self.refused_unchanged(run, "captured" if steps else "CUDA graph"):
                with torch.cuda.graph(torch.cuda.CUDAGraph()):
                    run.opt.step()
            run.steps(1)

    @cuda_only
    @each(release=(None, dict(policy="released"), dict(policy="compressed")))
    def test_little_host_memory(self, release):
        """Said before anything is changed: as the system counts it, and as CUDA finds it."""
        zeros, left = pinned.zeros, [2]

        def few_zeros(*how):
            left[0] -= 1
            if left[0] < 0:
                raise MemoryError("the host has no more")
            return zeros(*how)

        run = Run(model=mlp(BF16, width=600), offload=True)
        run.loss(0).backward()
        for short in (mock.patch.object(pinned, "_free_bytes", lambda: 100), mock.patch.object(pinned, "zeros", few_zeros)):
            with short, self.refused_unchanged(run, "GiB", "pinned host memory", "scant", kind=MemoryError):
                run.release(**release) if release else run.opt.step()
            self.assertEqual(len(run.opt.state), 0)
        if release:
            run.opt.zero_grad()
            run.release(**release)
        run.steps(1)

    def test_more_than_there_is(self):
        with self.refused("1048576.0 GiB", "free", kind=MemoryError):
            pinned.refuse_short(1 << 50)


class OnACpu(Case):
    @unittest.skipIf(DEVICE.type == "cuda", "of a CPU")
    def test_nothing_is_taken(self):
        with mock.patch.object(pinned, "zeros") as zeros:
            run = Run(params=parameters(BF16, SHAPES), offload=True).steps(1)
        zeros.assert_not_called()
        self.assertEqual(on_host(run), [[]] * len(SHAPES))


if __name__ == "__main__":
    unittest.main()
