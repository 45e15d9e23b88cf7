"""scruple.save and scruple.load: runs that go on with the same bits in a new process, files that are what
docs/checkpoint.md says and `scruple checkpoint` reads, and damage that is found before anything changes.

SCRUPLE_CLI names the command line; without it the tests that need it are skipped.
"""

import copy
import ctypes
import json
import os
import struct
import subprocess
import sys
import tempfile
import unittest
import warnings
import weakref
import zlib
from unittest import mock

import torch

import older
import scruple
import test_state
from scruple.torch import checkpoint
from support import BF16, DEVICE, FP16, FP32, Case, ModelRun, Run, bits, copies, cuda_only, each
from support import give_gradients, mlp, parameter, picture, same, st, stored, take_steps, tensor

HALF = 3  # steps before the save, and after it
CLI = os.environ.get("SCRUPLE_CLI")
with_cli = unittest.skipUnless(CLI, "needs the command line: set SCRUPLE_CLI")


class Bag(torch.nn.Module):
    def __init__(self, params):
        super().__init__()
        self.bag = torch.nn.ParameterList(params)


class Statistics(torch.nn.Module):
    """Everything that a model may hold and the optimizer does not."""

    def __init__(self, seed=0):
        super().__init__()
        self.first, self.tied = torch.nn.Linear(12, 24), torch.nn.Linear(12, 24)
        self.norm, self.frozen = torch.nn.BatchNorm1d(24), torch.nn.Linear(24, 5)
        self.to(DEVICE)
        st.cast_model(self, overrides={"frozen.bias": FP16})
        self.tied.weight = self.first.weight
        self.register_buffer("mask", tensor(3, 5, seed=seed) > 0)
        self.register_buffer("wide", tensor(4, seed=seed + 1).double())
        self.register_buffer("empty", tensor(0, 3))
        self.register_buffer("passing", tensor(2, seed=seed), persistent=False)
        self.frozen.requires_grad_(False)
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(tensor(*p.shape, seed=seed + i, scale=0.3))

    def forward(self, x):
        x = self.norm(self.first(x) + self.tied(x)).to(BF16)
        return torch.nn.functional.linear(x, self.frozen.weight)

    @classmethod
    def run(cls, seed=0, **options):
        model = cls(seed)
        return Run(model=model, params=[p for p in model.parameters() if p.requires_grad], **options)


def cases():
    """Every way of storing state, with models as lists of parameters."""
    for label, *case in test_state.resumable():
        run = test_state.Resumable(*case)
        run.model = Bag(run.params)
        yield label.replace(" ", "-"), run


def child(folder):
    """In a new process: loads what the parent saved, takes the second half, and pictures it."""
    ends = {}
    for label, run in cases():
        with torch.no_grad():
            for p in run.params:
                p.fill_(7)
        scruple.load(run.opt, run.model, os.path.join(folder, label))
        run.taken = HALF
        ends[label] = run.steps(HALF).picture()
    torch.save(ends, os.path.join(folder, "end.pt"))


def read(path):
    with open(path, "rb") as file:
        return file.read()


def write(path, data):
    with open(path, "wb") as file:
        file.write(data)


def tensors_of(path):
    """{name: (dtype, shape, bytes)} of a safetensors file."""
    raw = read(path)
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    return {
        name: (x["dtype"], x["shape"], raw[start + x["data_offsets"][0] : start + x["data_offsets"][1]])
        for name, x in header.items()
    }


def raw_bytes(x):
    return bytes(bits(x).tolist())


class Folder(Case):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def saved(self, name="a", steps=2, **options):
        run = ModelRun(**options).steps(steps)
        self.save(run, name)
        return run

    def save(self, run, name="a", **more):
        scruple.save(run.opt, run.model, self.path(name), **more)

    def load(self, run, name="a", **more):
        return scruple.load(run.opt, run.model, self.path(name), **more)

    def goes_on(self, run, other, name="a", steps=2):
        """Another that loads what the run has saved ends where the run does."""
        self.load(other, name)
        self.assertAlike(run.steps(steps), other.steps(steps, first=run.taken - steps))

    def cli(self, *arguments, code=0, command="checkpoint"):
        done = subprocess.run([CLI, command, *arguments], capture_output=True, text=True)
        self.assertEqual(done.returncode, code, f"{arguments}: {done.stdout}{done.stderr}")
        return done.stdout

    def flip(self, name, at):
        data = bytearray(read(self.path(name)))
        data[at] ^= 1
        write(self.path(name), data)

    def rewrite(self, change, name="a"):
        """Edits a manifest, and makes its checksum right again."""
        manifest = json.loads(read(self.path(name, "manifest.json")))
        change(manifest)
        rest = {k: v for k, v in manifest.items() if k not in ("scruple_checkpoint", "library", "crc32")}
        line = f'{{"scruple_checkpoint":{manifest["scruple_checkpoint"]},"library":"0.1.0","crc32":"%s",\n'
        text = json.dumps(rest)[1:]
        crc = zlib.crc32((line % "00000000" + text).encode())
        write(self.path(name, "manifest.json"), (line % f"{crc:08x}" + text).encode())


class Resume(Folder):
    def test_in_a_new_process(self):
        """Half of the steps, a checkpoint, a new process, the other half: the bits of all steps in one go."""
        ends = {}
        for label, run in cases():
            self.save(run.steps(HALF), label)
            ends[label] = run.steps(HALF).picture()
        command = [sys.executable, "-W", "ignore", __file__, "--child", self.folder]
        done = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        found = torch.load(self.path("end.pt"), weights_only=True)
        for label, end in ends.items():
            with self.subTest(label):
                self.assertSame(found[label], end)

    def test_planes_are_those_in_memory(self):
        for label, run in cases():
            with self.subTest(label):
                self.save(run.steps(2), label)
                named, expected = list(run.model.named_parameters()), {}
                for (name, p), state in zip(named, run.opt.state_dict()["state"].values()):
                    expected[name] = raw_bytes(p)
                    for plane, x in state.items():
                        if plane != "step":
                            expected[f"{name}/{plane.removesuffix('/codes')}"] = raw_bytes(x)
                file = tensors_of(self.path(label, "model.safetensors"))
                self.assertEqual({name: data for name, (_, _, data) in file.items()}, expected)
                for name, p in named:
                    kind = {BF16: "BF16", FP16: "F16", FP32: "F32"}[p.dtype]
                    self.assertEqual(file[name][:2], (kind, list(p.shape)))

    @each(recipe=("scruple", "fp32"))
    def test_before_the_first_step(self, recipe):
        """A parameter without state is saved with its first values, and keeps none."""
        run = self.saved(steps=0, recipe=recipe)
        self.assertEqual(len(run.opt.state), 0)
        self.goes_on(run, ModelRun(seed=5, recipe=recipe))

    def test_saving_changes_nothing(self):
        a, b = (ModelRun(rounding="stochastic") for _ in range(2))
        for _ in range(4):
            a.steps(1)
            self.save(b.steps(1))
        self.assertAlike(a, b)
        self.assertEqual(os.listdir(self.folder), ["a"])

    @each(options=({}, dict(amsgrad=True)))
    def test_into_one_that_has_stepped(self, options):
        """Planes that are there are used again; a moment that is new is made."""
        run, other = self.saved(**options), ModelRun(seed=5, lr=0.5).steps(3)

        def planes():
            return [other.opt.state[p]["exp_avg/codes"].data_ptr() for p in other.params]

        before, version = planes(), other.params[0]._version
        self.load(other)
        self.assertGreater(other.params[0]._version, version)
        if not options:
            self.assertEqual(before, planes())
        self.assertAlike(run.steps(2, first=3), other.steps(2))

    def test_the_rest_of_a_model(self):
        """Frozen parameters, statistics, integers, booleans, doubles: all come back, tied ones once."""
        run, other = Statistics.run().steps(3), Statistics.run(seed=50)
        self.save(run)
        self.load(other)
        model, twin = run.model, other.model
        self.assertSame(model.state_dict(), twin.state_dict())
        self.assertFalse(same(model.passing, twin.passing))
        self.assertIs(twin.tied.weight, twin.first.weight)
        self.assertAlike(run.steps(2), other.steps(2, first=3))

    def test_groups_notes_and_scale(self):
        def made(lr, seed=0):
            model = mlp(BF16, seed=seed)
            ps, decay = list(model.named_parameters()), dict(decay_lr=0.1 * lr if seed else 0.0)
            groups = dict(params=ps[:3], lr=lr, recipe="flash"), dict(
                params=ps[3:], weights="bf16+4", seed=seed
            )
            return Run(model=model, params=groups, betas=(0.8, 0.99), lr=1e-3, **decay)

        run, other = made(0.1, seed=3), made(0.7)
        run.opt.param_groups[1]["lr"] = torch.tensor(0.02, device=DEVICE)
        torch.optim.lr_scheduler.LambdaLR(run.opt, lambda step: 0.5**step)
        scaler = st.LossScaler(DEVICE.type, init_scale=2.0**9, growth_interval=7)
        for step in range(3):
            run.opt.zero_grad()
            scaler.scale(run.loss(step)).backward()
            scaler.step(run.opt)
            scaler.update()
        notes = {"epoch": "3", 'any "text"\n\u20ac': "\U0001f600"}
        self.save(run, scaler=scaler, notes=notes)
        back = st.LossScaler(DEVICE.type)
        self.assertEqual(self.load(other, scaler=back), notes)
        self.assertEqual(back.state_dict(), scaler.state_dict())
        self.assertEqual(back.state_dict()["_growth_tracker"], 3)
        self.assertAlike(run, other)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            self.load(other)
        self.assertIn("scaler=", str(said[0].message))
        self.save(run)
        with self.refused_unchanged(other, "no loss scale"):
            self.load(other, scaler=back)

    @each(
        case=[
            (BF16, {}),
            (BF16, dict(rounding="stochastic")),
            (BF16, dict(weights="bf16+5")),
            (BF16, dict(weights="fp32")),
            (FP16, {}),
        ]
    )
    def test_fp32_takes_a_weight_of_any_format(self, case):
        dtype, options = case
        run, wide = self.saved(dtype=dtype, **options), ModelRun(dtype=FP32, seed=5, **stored(options, FP32))
        self.load(wide)
        self.assertSame(run.opt.master_state_dict(run.model), wide.model.state_dict())

    def test_released_gradients(self):
        run, other = ModelRun(release=dict(adagc=1.05)).steps(2), ModelRun()
        self.save(run)
        run.handle.remove()
        self.load(other)
        self.assertIn("adagc_norm", other.opt.state_dict()["state"][0])
        self.assertAlike(run, other)
        run.release(policy="compressed", accumulate=2)
        run.loss().backward()
        with self.refused("middle of a step"):
            self.save(run, "b")
        with self.refused("release_gradients"):
            self.load(run)
        run.handle.remove()
        self.assertEqual(os.listdir(self.folder), ["a"])

    def test_not_one_run_of_memory(self):
        def made(seed):
            model = torch.nn.Conv2d(3, 4, 3).to(DEVICE, BF16, memory_format=torch.channels_last)
            with torch.no_grad():
                for i, p in enumerate(model.parameters()):
                    p.copy_(tensor(*p.shape, seed=seed + i))
            return model, st.AdamW(model.parameters())

        (model, opt), (twin, other) = made(0), made(5)
        take_steps(opt, list(model.parameters()), 2)
        scruple.save(opt, model, self.path("a"))
        scruple.load(other, twin, self.path("a"))
        self.assertFalse(twin.weight.is_contiguous())
        for m, o in ((model, opt), (twin, other)):
            take_steps(o, list(m.parameters()), 2, first=2)
        self.assertSame(picture(opt, model), picture(other, twin))

    def test_codes_of_a_frozen_layer(self):
        """Parameters of integers, which the optimizer was given and does not step."""
        model, codes = mlp(BF16), torch.arange(8, dtype=torch.int8, device=DEVICE)
        model.register_parameter("codes", torch.nn.Parameter(codes.clone(), requires_grad=False))
        run = self.saved(model=model, steps=0)
        model.codes.zero_()
        self.load(run)
        self.assertSame(model.codes.data, codes)

    def test_in_chunks(self):
        """Planes longer than a chunk, on both ways, as those on a GPU go."""
        run, other = self.saved("whole"), ModelRun(seed=5)
        with (
            mock.patch.object(checkpoint, "CHUNK", 1 << 7),
            mock.patch.object(checkpoint, "_on_host", lambda tensor: False),
        ):
            self.save(run)
            self.load(other)
        self.assertAlike(run, other)
        for name in ("model.safetensors", "manifest.json"):
            self.assertEqual(read(self.path("a", name)), read(self.path("whole", name)))

    def test_memory_of_temporaries(self):
        """A copy that .cpu() or .contiguous() makes is read while it is there: here each is spoiled the moment
        that nothing holds it any more."""
        run = Statistics.run()
        run.model.register_buffer("turned", tensor(5, 3, seed=9).double().t())
        with torch.no_grad():
            run.model.frozen.weight.data = run.model.frozen.weight.t().contiguous().t()
        self.save(run, "plain")
        kept, copies = [], {name: getattr(torch.Tensor, name) for name in ("cpu", "contiguous")}

        def copied(x, name):
            with mock.patch.multiple(torch.Tensor, **copies):
                size = x.numel() * x.element_size()
                if size == 0 or (name == "contiguous" and x.is_contiguous()):
                    return copies[name](x)
                memory = bytearray(size)
                kept.append(memory)  # stays, so that reading it too late is wrong, and not a crash
                lent = (ctypes.c_ubyte * size).from_buffer(memory)
                weakref.finalize(lent, ctypes.memset, ctypes.addressof(lent), 0xA5, size)
                made = torch.frombuffer(lent, dtype=x.dtype).view(x.shape)
                return made.copy_(x)

        with mock.patch.multiple(
            torch.Tensor,
            cpu=lambda x: copied(x, "cpu"),
            contiguous=lambda x, **_: copied(x, "contiguous"),
        ):
            self.save(run, "spoiled")
        self.assertGreater(len(kept), 4)
        self.assertTrue(all(set(memory) == {0xA5} for memory in kept), "something still holds a copy")
        for name in ("model.safetensors", "manifest.json"):
            self.assertEqual(read(self.path("spoiled", name)), read(self.path("plain", name)))

    @cuda_only
    def test_across_devices(self):
        run = self.saved()
        other = ModelRun(model=copy.deepcopy(run.model).cpu(), lr=1.0)
        self.load(other)
        moved = other.opt.state_dict()["state"]
        for i, state in run.opt.state_dict()["state"].items():
            self.assertSame({name: x.cpu() for name, x in state.items()}, moved[i])
        self.assertSame(list(map(bits, run.params)), list(map(bits, other.params)))

    def test_other_readers(self):
        model = self.saved().model
        try:
            from safetensors.torch import load_file
        except ImportError:
            self.skipTest("needs safetensors")
        found = load_file(self.path("a", "model.safetensors"))
        for name, value in model.state_dict().items():
            self.assertSame(found[name], value.cpu())
        model.load_state_dict({name: x for name, x in found.items() if "/" not in name})

    def test_without_torch(self):
        program = "import sys; sys.modules['torch'] = None; import scruple; print(scruple.save.__doc__[:5])"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        self.assertEqual(done.stdout, "Saves\n", done.stderr)


class Older(Folder):
    """Checkpoints of the first library (older.py), and roundings that read alike."""

    def written(self, label):
        case = older.CASES[label]
        os.makedirs(self.path(label), exist_ok=True)
        for name, data in case["files"].items():
            write(self.path(label, name), bytes(data.tolist()))
        return case

    def empty(self, case):
        return self.of([torch.zeros_like(w) for w in case["weights"]], case)

    def of(self, weights, case):
        params = copies(weights, device=DEVICE)
        return Run(case["kind"], params=params, model=Bag(params))

    @each(label=("AdamW", "AdamW amsgrad"), stepped=(0, 2))
    def test_load(self, label, stepped):
        """Into an optimizer of today's defaults: values as they were, and steps that go on as from the state
        dict of the same moment."""
        case = self.written(label)
        run, other = self.empty(case), self.of(case["weights"], case)
        take_steps(run.opt, run.params, stepped)
        self.load(run, label)
        test_state.Older.check_values(self, case, run)
        other.opt.load_state_dict(copy.deepcopy(case["state"]))
        self.assertSame(run.opt.state_dict()["state"], other.opt.state_dict()["state"])
        for each_run in (run, other):
            take_steps(each_run.opt, each_run.params, 3, first=5)
        self.assertAlike(run, other)

    def test_saved_anew(self):
        """What was converted is saved as it is now."""
        case = self.written("AdamW amsgrad")
        run, other = self.empty(case), self.empty(case)
        self.load(run, "AdamW amsgrad")
        self.save(run, "new")
        manifest = json.loads(read(self.path("new", "manifest.json")))
        self.assertEqual(
            {a["name"]: (a["format"], a["rounding"]) for a in manifest["tensors"][0]["arrays"]},
            {
                "weight": ("bf16+8", "wide"),
                "exp_avg": ("companded8", "stochastic"),
                "exp_avg_sq": ("fp32", "nearest"),
                "max_exp_avg_sq": ("fp32", "nearest"),
            },
        )
        self.load(other, "new")
        self.assertAlike(run, other)

    @each(
        change={
            "a format for signs": dict(format="nf4"),
            "a weight's format": dict(format="bf16+8"),
            "shorter planes": dict(format="bf16"),
            "no format": dict(format="x\ud800"),
            "no rounding": dict(rounding="x"),
            "a rounding that it has not": dict(rounding="wide"),
            "another name": dict(name="exp_avg"),
        }
    )
    def test_hostile(self, change):
        """A moment that would be converted, in a format that is not its, or with planes that are not."""
        run = self.empty(self.written("AdamW amsgrad"))
        self.rewrite(lambda m: m["tensors"][0]["arrays"][2].update(change), "AdamW amsgrad")
        with self.refused_unchanged(run, "AdamW amsgrad", kind=scruple.Error):
            self.load(run, "AdamW amsgrad")

    # How a weight is read by each: alike, or in a way of its own.
    ROUNDINGS = [
        ("nearest", 0),
        ("wide", 0),
        ({"weights": "wide", "moments": "nearest"}, 0),
        ({"weights": "nearest", "exp_avg": "nearest"}, 0),
        ("stochastic", 1),
        ({"weights": "stochastic", "moments": "nearest"}, 1),
        ({"weights": "truncate"}, 2),
    ]

    @each(saved=ROUNDINGS, loaded=ROUNDINGS)
    def test_roundings_that_read_alike(self, saved, loaded):
        """Saved with one, loaded into another: the same planes. A weight of two parts that was truncated or
        rounded stochastically is read in its own way, and refused."""
        run, other = self.saved(rounding=saved[0]), ModelRun(seed=5, rounding=loaded[0])
        if saved[1] != loaded[1]:
            with self.refused_unchanged(other, "weight in bf16+8"):
                self.load(other)
            return
        self.load(other)
        self.assertSame(run.opt.state_dict()["state"], other.opt.state_dict()["state"])
        self.assertSame(run.model.state_dict(), other.model.state_dict())
        self.assertSame(run.opt.master_state_dict(run.model), other.opt.master_state_dict(other.model))
        self.assertEqual(other.opt.param_groups[0]["rounding"], loaded[0])  # formats stay the optimizer's own

    def test_roundings_of_weights_without_extra_bits(self):
        """There codes are numbers."""
        run, other = self.saved(weights="bf16", rounding="stochastic"), ModelRun(seed=5, weights="bf16")
        self.load(other)
        self.assertSame(run.model.state_dict(), other.model.state_dict())


@with_cli
class CommandLine(Folder):
    def test_verify_inspect_diff(self):
        for label, run in cases():
            self.save(run.steps(3), label)
            with self.subTest(label):
                self.assertIn("complete", self.cli("verify", self.path(label)))
        run.opt.param_groups[0]["lr"] = 0.025
        self.save(run, "again", notes={"who": "me"})
        found = json.loads(self.cli("inspect", self.path("again"), "--json"))
        self.assertEqual((found["step"], found["groups"][0]["optimizer"]), (3, run.opt.rule))
        self.assertEqual(found["groups"][0]["hyperparameters"]["lr"], 0.025)
        self.assertEqual(found["trainer"]["note.who"], "me")
        names = [name for name, _ in run.model.named_parameters()]
        self.assertEqual([t["name"] for t in found["tensors"]], names)
        self.assertEqual([t["id"] for t in found["tensors"]], list(range(len(found["tensors"]))))
        self.assertEqual([t["step"] for t in found["tensors"]], [4, 4, 4, 4, 3])  # the last lacked a gradient
        self.save(run, "twice")
        self.assertIn("the same, to the bit", self.cli("diff", self.path("again"), self.path("twice")))
        self.cli("diff", self.path("again"), self.path(label), code=1)

    def test_the_rest_of_a_model(self):
        run = Statistics.run(weights="bf16+16").steps(2)
        self.save(run)
        self.cli("verify", self.path("a"))
        self.cli("inspect", self.path("a"), "--histogram", "all")
        self.cli("export", self.path("a"), "--fp32", "--out", self.path("w"))
        wide, found = run.opt.master_state_dict(run.model), tensors_of(self.path("w"))
        for name in ("first.weight", "norm.weight", "norm.running_var", "frozen.bias", "frozen.weight"):
            self.assertEqual(found[name][2], raw_bytes(wide[name].float()), name)

    def test_export(self):
        for label, run in cases():
            with self.subTest(label):
                self.save(run.steps(2), label)
                self.cli("export", self.path(label), "--fp32", "--out", self.path(label + ".w"))
                found, wide = tensors_of(self.path(label + ".w")), run.opt.master_weights()
                for name, p in run.model.named_parameters():
                    self.assertEqual(found[name], ("F32", list(p.shape), raw_bytes(wide[p])), name)

    def test_reshard_and_convert(self):
        run, other = Statistics.run().steps(3), Statistics.run(seed=5)
        self.save(run)
        self.cli("reshard", self.path("a"), "--shards", "3", "--out", self.path("three"))
        self.load(other, "three")
        self.assertAlike(run, other)
        self.flip("three/model-00002-of-00003.safetensors", -1)
        with self.refused_unchanged(other, "model-00002-of-00003", "checksum", kind=scruple.Error):
            self.load(other, "three")
        self.cli("convert", self.path("a"), "--recipe", "scant", "--out", self.path("scant"))
        with self.refused_unchanged(other, "scant", "scruple", "convert"):
            self.load(other, "scant")
        small = Statistics.run(seed=5, recipe="scant")
        self.load(small, "scant")
        self.cli("export", self.path("scant"), "--fp32", "--out", self.path("w"))
        found, wide = tensors_of(self.path("w")), small.opt.master_state_dict(small.model)
        for name, (_, _, data) in found.items():
            self.assertEqual(data, raw_bytes(wide[name].float()), name)
        # fp32 weights stand in 24 bits now, and take them as they are.
        self.assertNear([small.model.norm.weight], [run.model.norm.weight], 1e-4)
        self.save(small.steps(2, first=3), "on")
        self.cli("verify", self.path("on"))

    def test_pieces_out_of_order(self):
        """As many bytes each, at another's place."""
        run = self.saved(model=Bag([parameter(384)]), steps=0)
        self.cli("reshard", self.path("a"), "--shards", "3", "--out", self.path("three"))
        self.load(run, "three")

        def swap(manifest):
            for array in manifest["tensors"][0]["arrays"]:
                for plane in array["planes"]:
                    one, two, _ = plane["pieces"]
                    one[1:3], two[1:3] = two[1:3], one[1:3]

        self.rewrite(swap, "three")
        with self.refused_unchanged(run, "piece", kind=scruple.Error):
            self.load(run, "three")

    def test_a_run_of_the_native_trainer(self):
        """Names decide; formats, steps and hyperparameters come along."""
        write(self.path("text"), b"The quick brown fox jumps over the lazy dog.\n" * 60)
        shape = (
            "--layers 1 --width 32 --heads 2 --context 16 --batch 2 --steps 2 --save-every 1 --seed 3".split()
        )
        self.cli("--data", self.path("text"), "--out", self.path("run"), *shape, command="train")
        last = self.path("run", "checkpoints", "step-00000002")
        manifest = json.loads(read(os.path.join(last, "manifest.json")))
        model, groups = torch.nn.Module(), [[], []]
        for entry in manifest["tensors"]:
            *path, name = entry["name"].split(".")
            place = model
            for part in path:
                if not hasattr(place, part):
                    place.add_module(part, torch.nn.Module())
                place = getattr(place, part)
            place.register_parameter(name, torch.nn.Parameter(tensor(*entry["shape"]).to(BF16)))
            groups[entry["group"]].append(place._parameters[name])
        opt = st.AdamW([dict(params=ps) for ps in groups], betas=(0.1, 0.2))
        self.assertEqual(scruple.load(opt, model, self.path("run"))["program"], "scruple train")
        file = tensors_of(os.path.join(last, "model.safetensors"))
        for name, p in model.named_parameters():
            self.assertEqual(file[name][2], raw_bytes(p))
            self.assertEqual(file[name + "/exp_avg"][2], raw_bytes(opt.state[p]["exp_avg/codes"]))
            self.assertEqual(opt.state[p]["step"], 2)
        hypers = [group["hyperparameters"] for group in manifest["groups"]]
        for group, saved in zip(opt.param_groups, hypers):
            self.assertEqual((group["lr"], group["seed"]), (saved["lr"], 3))
            self.assertEqual(group["betas"], (saved["beta1"], saved["beta2"]))
            self.assertEqual(group["weight_decay"], saved["weight_decay"])
        give_gradients(list(model.parameters()), 0)
        opt.step()
        scruple.save(opt, model, self.path("on"))
        self.cli("verify", self.path("on"))
        one = st.AdamW(model.parameters())
        with self.refused_unchanged(one, "2 groups", "same groups", model=model):
            scruple.load(one, model, self.path("run"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2])
    else:
        unittest.main()
