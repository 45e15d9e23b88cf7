"""scruple.save and scruple.load: runs that go on with the same bits in a new process, files that are what
docs/checkpoint.md says and `scruple checkpoint` reads, and damage that is found before anything changes.

SCRUPLE_CLI names the command line; without it the tests that need it are skipped.
"""

import contextlib
import copy
import ctypes
import itertools
import json
import os
import resource
import shutil
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
from support import (
    DEVICE,
    Case,
    bits,
    cuda_only,
    give_gradients,
    loss_of,
    mlp,
    picture,
    same,
    st,
    stored,
    take_steps,
    tensor,
)

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
        self.first, self.norm, self.frozen = (
            torch.nn.Linear(12, 24),
            torch.nn.BatchNorm1d(24),
            torch.nn.Linear(24, 5),
        )
        self.tied = torch.nn.Linear(12, 24)
        self.to(DEVICE)
        st.cast_model(self, overrides={"frozen.bias": torch.float16})
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
        x = self.norm(self.first(x) + self.tied(x)).to(torch.bfloat16)
        return torch.nn.functional.linear(x, self.frozen.weight)

    def optimizer(self, **options):
        return st.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01, **options)


def train(model, opt, first, steps):
    for step in range(first, first + steps):
        loss_of(model, step).backward()
        opt.step()
        opt.zero_grad()


def cases():
    """Every way of storing state, with models as lists of parameters."""
    for label, kind, dtype, options in test_state.resumable():
        ps, opt = test_state.make(kind, dtype, options)
        yield label.replace(" ", "-"), Bag(ps), opt


def child(folder):
    """In a new process: loads what the parent saved, takes the second half, and pictures it."""
    ends = {}
    for label, model, opt in cases():
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(7)
        scruple.load(opt, model, os.path.join(folder, label))
        test_state.advance(list(model.parameters()), opt, HALF, HALF)
        ends[label] = picture(opt, model)
    torch.save(ends, os.path.join(folder, "end.pt"))


def read(path):
    with open(path, "rb") as file:
        return file.read()


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

    def saved(self, name="a", model=None, steps=2, **options):
        model = model or mlp(torch.bfloat16)
        opt = st.AdamW(model.parameters(), lr=0.01, **options)
        train(model, opt, 0, steps)
        scruple.save(opt, model, self.path(name))
        return model, opt

    def cli(self, *arguments, code=0):
        done = subprocess.run([CLI, "checkpoint", *arguments], capture_output=True, text=True)
        self.assertEqual(done.returncode, code, f"{arguments}: {done.stdout}{done.stderr}")
        return done.stdout

    def flip(self, name, at):
        data = bytearray(read(self.path(name)))
        data[at] ^= 1
        with open(self.path(name), "wb") as file:
            file.write(data)

    @contextlib.contextmanager
    def nothing_changes(self, opt, model, *words, kind=scruple.Error):
        before = picture(opt, model)
        with self.refused(*words, kind=kind):
            yield
        self.assertSame(before, picture(opt, model), "the error left a change behind")

    def rewrite(self, change, name="a"):
        """Edits a manifest, and makes its checksum right again."""
        manifest = json.loads(read(self.path(name, "manifest.json")))
        change(manifest)
        rest = {k: v for k, v in manifest.items() if k not in ("scruple_checkpoint", "library", "crc32")}
        line = f'{{"scruple_checkpoint":{manifest["scruple_checkpoint"]},"library":"0.1.0","crc32":"%s",\n'
        text = json.dumps(rest)[1:]
        crc = zlib.crc32((line % "00000000" + text).encode())
        with open(self.path(name, "manifest.json"), "w") as file:
            file.write(line % f"{crc:08x}" + text)


class Resume(Folder):
    def test_in_a_new_process(self):
        """Half of the steps, a checkpoint, a new process, the other half: the bits of all steps in one go."""
        ends = {}
        for label, model, opt in cases():
            ps = list(model.parameters())
            test_state.advance(ps, opt, 0, HALF)
            scruple.save(opt, model, self.path(label))
            test_state.advance(ps, opt, HALF, HALF)
            ends[label] = picture(opt, model)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", __file__, "--child", self.folder], capture_output=True, text=True
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        found = torch.load(self.path("end.pt"), weights_only=True)
        for label, end in ends.items():
            with self.subTest(label):
                self.assertSame(found[label], end)

    def test_planes_are_those_in_memory(self):
        for label, model, opt in cases():
            with self.subTest(label):
                test_state.advance(list(model.parameters()), opt, 0, 2)
                scruple.save(opt, model, self.path(label))
                expected = {}
                for (name, p), state in zip(model.named_parameters(), opt.state_dict()["state"].values()):
                    expected[name] = raw_bytes(p)
                    for plane, x in state.items():
                        if plane != "step":
                            expected[f"{name}/{plane.removesuffix('/codes')}"] = raw_bytes(x)
                file = tensors_of(self.path(label, "model.safetensors"))
                self.assertEqual({name: data for name, (_, _, data) in file.items()}, expected)
                for name, p in model.named_parameters():
                    kind = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[p.dtype]
                    self.assertEqual(file[name][:2], (kind, list(p.shape)))

    def test_before_the_first_step(self):
        """A parameter without state is saved with its first values, and keeps none."""
        for recipe in ("scruple", "fp32"):
            model = mlp(torch.bfloat16)
            opt = st.AdamW(model.parameters(), recipe=recipe)
            scruple.save(opt, model, self.path(recipe))
            self.assertEqual(len(opt.state), 0)
            twin = mlp(torch.bfloat16, seed=5)
            other = st.AdamW(twin.parameters(), recipe=recipe)
            scruple.load(other, twin, self.path(recipe))
            train(model, opt, 0, 2)
            train(twin, other, 0, 2)
            self.assertSame(picture(opt, model), picture(other, twin))

    def test_saving_changes_nothing(self):
        a, b = mlp(torch.bfloat16), mlp(torch.bfloat16)
        opts = [st.AdamW(m.parameters(), rounding="stochastic") for m in (a, b)]
        for step in range(4):
            train(a, opts[0], step, 1)
            train(b, opts[1], step, 1)
            scruple.save(opts[1], b, self.path("b"))
        self.assertSame(picture(opts[0], a), picture(opts[1], b))
        self.assertEqual(os.listdir(self.folder), ["b"])

    def test_into_one_that_has_stepped(self):
        """Planes that are there are used again; a moment that is new is made."""
        for options in ({}, dict(amsgrad=True)):
            model, opt = self.saved(**options)
            twin = mlp(torch.bfloat16, seed=5)
            other = st.AdamW(twin.parameters(), lr=0.5)
            train(twin, other, 0, 3)
            planes = {p: other.state[p]["exp_avg/codes"].data_ptr() for p in twin.parameters()}
            version = next(twin.parameters())._version
            scruple.load(other, twin, self.path("a"))
            self.assertGreater(next(twin.parameters())._version, version)
            if not options:
                now = {p: other.state[p]["exp_avg/codes"].data_ptr() for p in twin.parameters()}
                self.assertEqual(planes, now)
            train(model, opt, 3, 2)
            train(twin, other, 3, 2)
            self.assertSame(picture(opt, model), picture(other, twin))

    def test_the_rest_of_a_model(self):
        """Frozen parameters, statistics, integers, booleans, doubles: all come back, tied ones once."""
        model = Statistics()
        opt = model.optimizer()
        train(model, opt, 0, 3)
        scruple.save(opt, model, self.path("a"))
        twin = Statistics(seed=50)
        other = twin.optimizer()
        scruple.load(other, twin, self.path("a"))
        self.assertSame(model.state_dict(), twin.state_dict())
        self.assertFalse(same(model.passing, twin.passing))
        self.assertIs(twin.tied.weight, twin.first.weight)
        train(model, opt, 3, 2)
        train(twin, other, 3, 2)
        self.assertSame(picture(opt, model), picture(other, twin))

    def test_groups_notes_and_scale(self):
        def made(lr, seed=0):
            model = mlp(torch.bfloat16, seed=seed)
            ps = list(model.named_parameters())
            groups = [
                dict(params=ps[:3], lr=lr, recipe="flash"),
                dict(params=ps[3:], weights="bf16+4", seed=seed),
            ]
            return model, st.AdamW(groups, betas=(0.8, 0.99), decay_lr=0.1 * lr if seed else 0.0)

        model, opt = made(0.1, seed=3)
        opt.param_groups[1]["lr"] = torch.tensor(0.02, device=DEVICE)
        torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5**step)
        scaler = st.LossScaler(DEVICE.type, init_scale=2.0**9, growth_interval=7)
        for step in range(3):
            opt.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            scaler.step(opt)
            scaler.update()
        notes = {"epoch": "3", 'any "text"\n\u20ac': "\U0001f600"}
        scruple.save(opt, model, self.path("a"), scaler=scaler, notes=notes)
        twin, other = made(0.7)
        back = st.LossScaler(DEVICE.type)
        self.assertEqual(scruple.load(other, twin, self.path("a"), scaler=back), notes)
        self.assertEqual(back.state_dict(), scaler.state_dict())
        self.assertEqual(back.state_dict()["_growth_tracker"], 3)
        self.assertSame(picture(opt, twin), picture(other, model))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            scruple.load(other, twin, self.path("a"))
        self.assertIn("scaler=", str(said[0].message))
        scruple.save(opt, model, self.path("a"))
        with self.refused_unchanged(other, "no loss scale", model=twin):
            scruple.load(other, twin, self.path("a"), scaler=back)

    def test_fp32_takes_a_weight_of_any_format(self):
        for i, (dtype, options) in enumerate(
            (
                (torch.bfloat16, {}),
                (torch.bfloat16, dict(rounding="stochastic")),
                (torch.bfloat16, dict(weights="bf16+5")),
                (torch.bfloat16, dict(weights="fp32")),
                (torch.float16, {}),
            )
        ):
            model, opt = self.saved(str(i), mlp(dtype), **options)
            wide = mlp(seed=5)
            other = st.AdamW(wide.parameters(), **stored(options, torch.float32))
            scruple.load(other, wide, self.path(str(i)))
            self.assertSame(opt.master_state_dict(model), wide.state_dict(), f"{dtype} {options}")

    def test_released_gradients(self):
        model = mlp(torch.bfloat16)
        opt = st.AdamW(model.parameters())
        handle = st.release_gradients(model, opt, adagc=1.05)
        for step in range(2):
            loss_of(model, step).backward()
            opt.step()
        scruple.save(opt, model, self.path("a"))
        handle.remove()
        twin = mlp(torch.bfloat16)
        other = st.AdamW(twin.parameters())
        scruple.load(other, twin, self.path("a"))
        self.assertIn("adagc_norm", other.state_dict()["state"][0])
        self.assertSame(picture(opt, model), picture(other, twin))
        handle = st.release_gradients(model, opt, policy="compressed", accumulate=2)
        loss_of(model, 3).backward()
        with self.refused("middle of a step"):
            scruple.save(opt, model, self.path("b"))
        with self.refused("release_gradients"):
            scruple.load(opt, model, self.path("a"))
        handle.remove()
        self.assertEqual(os.listdir(self.folder), ["a"])

    def test_not_one_run_of_memory(self):
        def made(seed):
            model = torch.nn.Conv2d(3, 4, 3).to(DEVICE, torch.bfloat16, memory_format=torch.channels_last)
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
        model = mlp(torch.bfloat16)
        codes = torch.arange(8, dtype=torch.int8, device=DEVICE)
        model.register_parameter("codes", torch.nn.Parameter(codes.clone(), requires_grad=False))
        opt = st.AdamW(model.parameters())
        scruple.save(opt, model, self.path("a"))
        model.codes.zero_()
        scruple.load(opt, model, self.path("a"))
        self.assertSame(model.codes.data, codes)

    def test_in_chunks(self):
        """Planes longer than a chunk, on both ways, as those on a GPU go."""
        model, opt = self.saved("whole")
        with (
            mock.patch.object(checkpoint, "CHUNK", 1 << 7),
            mock.patch.object(checkpoint, "_on_host", lambda tensor: False),
        ):
            scruple.save(opt, model, self.path("a"))
            twin = mlp(torch.bfloat16, seed=5)
            other = st.AdamW(twin.parameters())
            scruple.load(other, twin, self.path("a"))
        self.assertSame(picture(opt, model), picture(other, twin))
        self.assertEqual(read(self.path("a/model.safetensors")), read(self.path("whole/model.safetensors")))
        self.assertEqual(read(self.path("a/manifest.json")), read(self.path("whole/manifest.json")))

    def test_memory_of_temporaries(self):
        """A copy that .cpu() or .contiguous() makes is read while it is there: here each is spoiled the moment
        that nothing holds it any more."""
        model = Statistics()
        opt = model.optimizer()
        model.register_buffer("turned", tensor(5, 3, seed=9).double().t())
        with torch.no_grad():
            model.frozen.weight.data = model.frozen.weight.t().contiguous().t()
        scruple.save(opt, model, self.path("plain"))
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
            scruple.save(opt, model, self.path("spoiled"))
        self.assertGreater(len(kept), 4)
        self.assertTrue(all(set(memory) == {0xA5} for memory in kept), "something still holds a copy")
        for name in ("model.safetensors", "manifest.json"):
            self.assertEqual(read(self.path("spoiled", name)), read(self.path("plain", name)))

    @cuda_only
    def test_across_devices(self):
        model, opt = self.saved()
        twin = copy.deepcopy(model).cpu()
        other = st.AdamW(twin.parameters(), lr=1.0)
        scruple.load(other, twin, self.path("a"))
        moved = other.state_dict()["state"]
        for i, state in opt.state_dict()["state"].items():
            self.assertSame({name: x.cpu() for name, x in state.items()}, moved[i])
        for p, q in zip(model.parameters(), twin.parameters()):
            self.assertSame(bits(p), bits(q))

    def test_other_readers(self):
        model, _ = self.saved()
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
            with open(self.path(label, name), "wb") as file:
                file.write(bytes(data.tolist()))
        return case

    def empty(self, case, **options):
        model = Bag([torch.nn.Parameter(torch.zeros_like(w, device=DEVICE)) for w in case["weights"]])
        return model, getattr(st, case["kind"])(model.parameters(), **options)

    def test_load(self):
        """Into an optimizer of today's defaults: values as they were, and steps that go on as from the state
        dict of the same moment."""
        for label in ("AdamW", "AdamW amsgrad"):
            case = self.written(label)
            for stepped in (False, True):
                with self.subTest(label, stepped=stepped):
                    model, opt = self.empty(case)
                    if stepped:
                        take_steps(opt, list(model.parameters()), 2)
                    scruple.load(opt, model, self.path(label))
                    masters, values = opt.master_weights(), opt.state_dict(as_="torch")["state"]
                    for i, p in enumerate(model.parameters()):
                        self.assertSame(masters[p].cpu(), case["masters"][i])
                        for slot, true in case["values"][i].items():
                            # By value: the first library had zeros of both signs.
                            self.assertTrue(torch.equal(values[i][slot].cpu(), true), f"{slot} of {i}")
                    twin = Bag([torch.nn.Parameter(w.clone().to(DEVICE)) for w in case["weights"]])
                    other = st.AdamW(twin.parameters())
                    other.load_state_dict(copy.deepcopy(case["state"]))
                    self.assertSame(picture(opt)["state"]["state"], picture(other)["state"]["state"])
                    for m, o in ((model, opt), (twin, other)):
                        take_steps(o, list(m.parameters()), 3, first=5)
                    self.assertSame(picture(opt, model), picture(other, twin))

    def test_saved_anew(self):
        """What was converted is saved as it is now."""
        case = self.written("AdamW amsgrad")
        model, opt = self.empty(case)
        scruple.load(opt, model, self.path("AdamW amsgrad"))
        scruple.save(opt, model, self.path("new"))
        manifest = json.loads(read(self.path("new", "manifest.json")))
        found = {a["name"]: (a["format"], a["rounding"]) for a in manifest["tensors"][0]["arrays"]}
        self.assertEqual(
            found,
            {
                "weight": ("bf16+8", "wide"),
                "exp_avg": ("companded8", "stochastic"),
                "exp_avg_sq": ("fp32", "nearest"),
                "max_exp_avg_sq": ("fp32", "nearest"),
            },
        )
        twin, other = self.empty(case)
        scruple.load(other, twin, self.path("new"))
        self.assertSame(picture(opt, model), picture(other, twin))

    def test_hostile(self):
        """A moment that would be converted, in a format that is not its, or with planes that are not."""
        case = self.written("AdamW amsgrad")
        kept = read(self.path("AdamW amsgrad", "manifest.json"))

        def second(m):
            return m["tensors"][0]["arrays"][2]

        for label, change in {
            "a format for signs": lambda m: second(m).update(format="nf4"),
            "a weight's format": lambda m: second(m).update(format="bf16+8"),
            "shorter planes": lambda m: second(m).update(format="bf16"),
            "no format": lambda m: second(m).update(format="x\ud800"),
            "no rounding": lambda m: second(m).update(rounding="x"),
            "a rounding that it has not": lambda m: second(m).update(rounding="wide"),
            "another name": lambda m: second(m).update(name="exp_avg"),
        }.items():
            with self.subTest(label):
                with open(self.path("AdamW amsgrad", "manifest.json"), "wb") as file:
                    file.write(kept)
                self.rewrite(change, "AdamW amsgrad")
                model, opt = self.empty(case)
                with self.nothing_changes(opt, model, "AdamW amsgrad"):
                    scruple.load(opt, model, self.path("AdamW amsgrad"))

    def test_roundings_that_read_alike(self):
        """Saved with one, loaded into another: the same planes. A weight of two parts that was truncated or
        rounded stochastically is read in its own way, and refused."""
        ways = [
            "nearest",
            "wide",
            {"weights": "wide", "moments": "nearest"},
            {"weights": "nearest", "exp_avg": "nearest"},
            "stochastic",
            {"weights": "stochastic", "moments": "nearest"},
            {"weights": "truncate"},
        ]
        kinds = [0, 0, 0, 0, 1, 1, 2]
        for (i, a), (j, b) in itertools.product(enumerate(ways), repeat=2):
            with self.subTest(saved=a, loaded=b):
                model, opt = self.saved("x", rounding=a)
                twin = mlp(torch.bfloat16, seed=5)
                other = st.AdamW(twin.parameters(), rounding=b)
                if kinds[i] != kinds[j]:
                    with self.nothing_changes(other, twin, "weight in bf16+8", kind=scruple.UsageError):
                        scruple.load(other, twin, self.path("x"))
                    continue
                scruple.load(other, twin, self.path("x"))
                self.assertSame(picture(opt, model)["state"]["state"], picture(other, twin)["state"]["state"])
                self.assertSame(model.state_dict(), twin.state_dict())
                self.assertSame(opt.master_state_dict(model), other.master_state_dict(twin))
                self.assertEqual(other.param_groups[0]["rounding"], b)  # formats stay the optimizer's own
        # Where there are no extra bits, codes are numbers.
        model, opt = self.saved("y", weights="bf16", rounding="stochastic")
        twin = mlp(torch.bfloat16, seed=5)
        scruple.load(st.AdamW(twin.parameters(), weights="bf16"), twin, self.path("y"))
        self.assertSame(model.state_dict(), twin.state_dict())


@with_cli
class CommandLine(Folder):
    def test_verify_inspect_diff(self):
        for label, model, opt in cases():
            test_state.advance(list(model.parameters()), opt, 0, 3)
            scruple.save(opt, model, self.path(label))
            with self.subTest(label):
                self.assertIn("complete", self.cli("verify", self.path(label)))
        opt.param_groups[0]["lr"] = 0.025
        scruple.save(opt, model, self.path("again"), notes={"who": "me"})
        found = json.loads(self.cli("inspect", self.path("again"), "--json"))
        self.assertEqual((found["step"], found["groups"][0]["optimizer"]), (3, opt.rule))
        self.assertEqual(found["groups"][0]["hyperparameters"]["lr"], 0.025)
        self.assertEqual(found["trainer"]["note.who"], "me")
        self.assertEqual(
            [t["name"] for t in found["tensors"]], [name for name, _ in model.named_parameters()]
        )
        self.assertEqual([t["id"] for t in found["tensors"]], list(range(len(found["tensors"]))))
        self.assertEqual([t["step"] for t in found["tensors"]], [4, 4, 4, 4, 3])  # the last lacked a gradient
        scruple.save(opt, model, self.path("twice"))
        self.assertIn("the same, to the bit", self.cli("diff", self.path("again"), self.path("twice")))
        self.cli("diff", self.path("again"), self.path(label), code=1)

    def test_the_rest_of_a_model(self):
        model = Statistics()
        opt = model.optimizer(weights="bf16+16")
        train(model, opt, 0, 2)
        scruple.save(opt, model, self.path("a"))
        self.cli("verify", self.path("a"))
        self.cli("inspect", self.path("a"), "--histogram", "all")
        self.cli("export", self.path("a"), "--fp32", "--out", self.path("w"))
        wide, found = opt.master_state_dict(model), tensors_of(self.path("w"))
        for name in ("first.weight", "norm.weight", "norm.running_var", "frozen.bias", "frozen.weight"):
            self.assertEqual(found[name][2], raw_bytes(wide[name].float()), name)

    def test_export(self):
        for label, model, opt in cases():
            with self.subTest(label):
                test_state.advance(list(model.parameters()), opt, 0, 2)
                scruple.save(opt, model, self.path(label))
                self.cli("export", self.path(label), "--fp32", "--out", self.path(label + ".w"))
                found, wide = tensors_of(self.path(label + ".w")), opt.master_weights()
                for name, p in model.named_parameters():
                    self.assertEqual(found[name][:2], ("F32", list(p.shape)))
                    self.assertEqual(found[name][2], raw_bytes(wide[p]), name)

    def test_reshard_and_convert(self):
        def made(recipe, seed=5):
            model = Statistics(seed=seed)
            return model, model.optimizer(recipe=recipe)

        model, opt = made("scruple", seed=0)
        train(model, opt, 0, 3)
        scruple.save(opt, model, self.path("a"))
        self.cli("reshard", self.path("a"), "--shards", "3", "--out", self.path("three"))
        twin, other = made("scruple")
        scruple.load(other, twin, self.path("three"))
        self.assertSame(picture(opt, model), picture(other, twin))
        self.flip("three/model-00002-of-00003.safetensors", -1)
        with self.nothing_changes(other, twin, "model-00002-of-00003", "checksum"):
            scruple.load(other, twin, self.path("three"))
        self.cli("convert", self.path("a"), "--recipe", "scant", "--out", self.path("scant"))
        with self.refused_unchanged(other, "scant", "scruple", "convert", model=twin):
            scruple.load(other, twin, self.path("scant"))
        small, last = made("scant")
        scruple.load(last, small, self.path("scant"))
        self.cli("export", self.path("scant"), "--fp32", "--out", self.path("w"))
        found, wide = tensors_of(self.path("w")), last.master_state_dict(small)
        for name, (_, _, data) in found.items():
            self.assertEqual(data, raw_bytes(wide[name].float()), name)
        # fp32 weights stand in 24 bits now, and take them as they are.
        self.assertLess(float((small.norm.weight - model.norm.weight).abs().max()), 1e-4)
        train(small, last, 3, 2)
        scruple.save(last, small, self.path("on"))
        self.cli("verify", self.path("on"))

    def test_pieces_out_of_order(self):
        """As many bytes each, at another's place."""
        model = Bag([torch.nn.Parameter(tensor(384))])
        opt = st.AdamW(model.parameters())
        scruple.save(opt, model, self.path("a"))
        self.cli("reshard", self.path("a"), "--shards", "3", "--out", self.path("three"))
        scruple.load(opt, model, self.path("three"))

        def swap(manifest):
            for array in manifest["tensors"][0]["arrays"]:
                for plane in array["planes"]:
                    one, two, _ = plane["pieces"]
                    one[1:3], two[1:3] = two[1:3], one[1:3]

        self.rewrite(swap, "three")
        with self.nothing_changes(opt, model, "piece"):
            scruple.load(opt, model, self.path("three"))

    def test_a_run_of_the_native_trainer(self):
        """Names decide; formats, steps and hyperparameters come along."""
        with open(self.path("text"), "w") as file:
            file.write("The quick brown fox jumps over the lazy dog.\n" * 60)
        shape = ("--layers", "1", "--width", "32", "--heads", "2", "--context", "16", "--batch", "2")
        done = subprocess.run(
            [CLI, "train", "--data", self.path("text"), "--out", self.path("run"), "--steps", "2", *shape]
            + ["--save-every", "1", "--seed", "3"],
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
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
            place.register_parameter(name, torch.nn.Parameter(tensor(*entry["shape"]).to(torch.bfloat16)))
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


class Refused(Folder):
    def setUp(self):
        super().setUp()
        self.saved()
        self.model = mlp(torch.bfloat16, seed=5)
        self.opt = st.AdamW(self.model.parameters(), lr=0.01)
        train(self.model, self.opt, 0, 1)

    def unchanged(self, *words, kind=scruple.UsageError):
        return self.nothing_changes(self.opt, self.model, *words, kind=kind)

    def load(self, name="a"):
        scruple.load(self.opt, self.model, self.path(name))

    def test_bytes_that_are_no_text(self):
        """What the message quotes of them can be read."""
        for file in ("a/model.safetensors", "a/manifest.json"):
            raw = read(self.path(file))
            for at in range(10, 400, 13):
                with open(self.path(file), "wb") as damaged:
                    damaged.write(raw[:at] + b"\x97" + raw[at + 1 :])
                with self.unchanged(os.path.basename(file), kind=scruple.Error):
                    self.load()
            with open(self.path(file), "wb") as mended:
                mended.write(raw)
        self.load()

    def test_a_flipped_bit(self):
        raw = read(self.path("a/model.safetensors"))
        start = 8 + struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8:start])
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            for at in (start + entry["data_offsets"][0], start + entry["data_offsets"][1] - 1):
                self.flip("a/model.safetensors", at)
                with self.unchanged(f'"{name}"', "checksum", "damaged", kind=scruple.Error):
                    self.load()
                self.flip("a/model.safetensors", at)
        for at in (0, 7, 8, 9, 100, start // 2, start - 1):
            self.flip("a/model.safetensors", at)
            with self.unchanged("model.safetensors", kind=scruple.Error):
                self.load()
            self.flip("a/model.safetensors", at)
        for at in range(0, len(read(self.path("a/manifest.json"))), 211):
            self.flip("a/manifest.json", at)
            with self.unchanged("manifest.json", kind=scruple.Error):
                self.load()
            self.flip("a/manifest.json", at)
        self.load()

    def test_files_that_are_not_right(self):
        for name in ("model.safetensors", "manifest.json"):
            shutil.copytree(self.path("a"), self.path("b"))
            os.rename(self.path("b", name), self.path("away"))
            kind = scruple.Error if name == "model.safetensors" else scruple.UsageError
            with self.unchanged(name, kind=kind):
                self.load("b")
            os.rename(self.path("away"), self.path("b", name))
            with open(self.path("b", name), "ab") as file:
                file.write(b" ")
            with self.unchanged(name, kind=scruple.Error):
                self.load("b")
            with open(self.path("b", name), "wb"):
                pass
            with self.unchanged(name, kind=scruple.Error):
                self.load("b")
            shutil.rmtree(self.path("b"))

    def test_a_newer_version(self):
        self.rewrite(lambda m: m.update(scruple_checkpoint=2, news=3))
        with self.unchanged("version 2", "0.1.0", "up to 1"):
            self.load()

    def test_rules_of_the_specification(self):
        """Manifests with a right checksum and a wrong content."""

        def plane(m):
            return m["tensors"][0]["arrays"][1]["planes"][1]

        changes = {
            "a field more": lambda m: m.update(more=1),
            "a field less": lambda m: m.pop("recipe"),
            "no file": lambda m: m.update(files=[]),
            "a way out of the folder": lambda m: m["files"][0].update(name="../a/model.safetensors"),
            "a name twice": lambda m: m["tensors"][1].update(name=m["tensors"][0]["name"]),
            "a tensor twice": lambda m: m["tensors"].append(m["tensors"][0]),
            "a plane's name": lambda m: m["tensors"][1].update(name="0.weight/exp_avg"),
            "a group": lambda m: m["tensors"][0].update(group=2),
            "an id": lambda m: m["tensors"][0].update(id=1 << 32),
            "a step": lambda m: m["tensors"][0].update(step=0),
            "a true step": lambda m: m["tensors"][0].update(step=True),
            "a norm": lambda m: m["tensors"][0].update(adagc_norm="1"),
            "an infinite norm": lambda m: m["tensors"][0].update(adagc_norm=float("inf")),
            "a note": lambda m: m["trainer"].update(note=1),
            "no weight": lambda m: m["tensors"][0]["arrays"].pop(0),
            "a kind": lambda m: plane(m).update(kind="codes"),
            "a dtype": lambda m: plane(m).update(dtype="F99"),
            "another dtype": lambda m: plane(m).update(dtype="U32"),
            "another shape": lambda m: plane(m).update(shape=[4]),
            "a shape that is negative": lambda m: plane(m).update(shape=[-5, -1]),
            "a block": lambda m: plane(m).update(block_bytes=4),
            "a hole": lambda m: plane(m)["pieces"][0].__setitem__(1, 128),
            "an end": lambda m: plane(m)["pieces"][0].__setitem__(2, 128),
            "an end within a block": lambda m: plane(m)["pieces"][0].__setitem__(2, 5),
            "a file": lambda m: plane(m)["pieces"][0].__setitem__(0, 1),
            "two pieces in one file": lambda m: plane(m).update(
                pieces=[[0, 0, 128, "0" * 8], [0, 128, 288, "0" * 8]]
            ),
            "a checksum": lambda m: plane(m)["pieces"][0].__setitem__(3, "0"),
            "a tensor less": lambda m: m["tensors"].pop(),
            "a hyperparameter": lambda m: m["groups"][0]["hyperparameters"].update(lr=None),
            "a seed": lambda m: m["groups"][0].update(seed=-1),
            "groups that cannot be read": lambda m: m["trainer"].update(param_groups="["),
            "a learning rate": lambda m: m["trainer"].update(param_groups='[{"lr": "high"}]'),
            "no learning rate": lambda m: m["trainer"].update(param_groups='[{"lr": -1.0}]'),
            "groups of something else": lambda m: m["trainer"].update(param_groups='[{"lr": {"what": 1}}]'),
        }
        kept = read(self.path("a/manifest.json"))
        self.rewrite(lambda m: None)
        self.load()
        for label, change in changes.items():
            with self.subTest(label):
                with open(self.path("a/manifest.json"), "wb") as file:
                    file.write(kept)
                self.rewrite(change)
                with self.unchanged(self.path("a"), kind=scruple.Error):
                    self.load()

    def test_formats_that_do_not_fit_their_planes(self):
        """What the library would read by, it must not believe."""
        model = Statistics()
        opt = model.optimizer()
        scruple.save(opt, model, self.path("a"))

        def weight(form):
            return lambda m: m["tensors"][-1]["arrays"][0].update(format=form)

        self.assertEqual(
            json.loads(read(self.path("a/manifest.json")))["tensors"][-1]["name"], "norm.running_var"
        )
        for form, kind in (
            ("bf16+8", scruple.Error),
            ("companded8", scruple.UsageError),
            ("x", scruple.UsageError),
        ):
            self.rewrite(weight(form))
            with self.nothing_changes(opt, model, "norm.running_var", kind=kind):
                scruple.load(opt, model, self.path("a"))

    def test_other_models_and_optimizers(self):
        def loads(model, opt, *words):
            with self.refused_unchanged(opt, *words, model=model):
                scruple.load(opt, model, self.path("a"))

        def adamw(model, **options):
            return model, st.AdamW(model.parameters(), lr=0.01, **options)

        loads(*adamw(mlp(torch.bfloat16, width=25)), "0.weight", "(25, 12)", "(24, 12)")
        loads(*adamw(mlp(torch.bfloat16), recipe="flash"), "flash8", "'scruple'", "--recipe flash", "convert")
        loads(*adamw(mlp(torch.bfloat16), weights="bf16+4"), "bf16+4", "bf16+8")
        loads(*adamw(mlp(torch.bfloat16), rounding="stochastic"), "(stochastic)", "(wide)")
        loads(*adamw(mlp(torch.bfloat16), rounding={"weights": "truncate"}), "(truncate)", "(wide)")
        loads(*adamw(mlp(torch.float16)), "fp16+8", "bf16+8", "cast")
        wrapped = torch.nn.Sequential(mlp(torch.bfloat16))
        loads(*adamw(wrapped), "lacks 0.0.weight", "has 0.weight", "model.module")
        model = mlp(torch.bfloat16)
        loads(model, st.SGD(model.parameters(), lr=0.1), "adamw", "sgd")
        loads(model, st.AdamW(list(model.parameters())[:-1]), "5.bias", "same parameters")
        with self.refused("not in the model"):
            scruple.load(st.AdamW(model.parameters()), mlp(torch.bfloat16), self.path("a"))
        with self.refused("not in the model"):
            scruple.save(st.AdamW(model.parameters()), mlp(torch.bfloat16), self.path("b"))
        with self.refused("those of scruple.torch"):
            scruple.save(torch.optim.AdamW(model.parameters()), model, self.path("b"))
        with self.refused("dict of strings"):
            scruple.save(st.AdamW(model.parameters()), model, self.path("b"), notes={"epoch": 3})
        self.saved("s", rounding="stochastic")
        turned = st.AdamW(list(model.parameters())[::-1], lr=0.01, rounding="stochastic")
        with self.refused_unchanged(turned, "same order", model=model):
            scruple.load(turned, model, self.path("s"))
        turned = st.AdamW(list(model.parameters())[::-1], lr=0.01)
        with self.refused_unchanged(turned, "same order", model=model):
            scruple.load(turned, model, self.path("a"))
        self.saved("w", rounding={"weights": "wide", "moments": "nearest"})
        with self.refused_unchanged(turned, "same order", model=model):
            scruple.load(turned, model, self.path("w"))
        self.saved("n", rounding="nearest")
        scruple.load(turned, model, self.path("n"))  # without random numbers the order means nothing
        self.assertEqual(sorted(os.listdir(self.folder)), ["a", "n", "s", "w"])

    def test_what_a_checkpoint_cannot_hold(self):
        class Own(torch.nn.Linear):
            def get_extra_state(self):
                return {"a": 1}

        for model, words in (
            (Own(3, 3), ("get_extra_state",)),
            (mlp(), ("persistent=False", "noise")),
        ):
            model.to(DEVICE)
            if "noise" in words:
                noise = torch.randint(1 << 62, (1 << 20,), generator=torch.Generator().manual_seed(0))
                model.register_buffer("noise", noise)
            with self.refused(*words):
                scruple.save(st.AdamW(model.parameters()), model, self.path("b"))
        self.assertEqual(os.listdir(self.folder), ["a"])

    def test_nowhere(self):
        with self.unchanged("nosuch", "manifest.json"):
            self.load("nosuch")

    def test_shards_of_a_tensor(self):
        from torch.distributed.tensor import Shard, distribute_tensor

        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        try:
            mesh = torch.distributed.init_device_mesh("cpu", (1,))
            model = torch.nn.Linear(4, 4, bias=False)
            model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
            opt = st.AdamW(model.parameters())
            for call in (scruple.save, scruple.load):
                with self.refused("weight", "DTensor", "torch.distributed.checkpoint"):
                    call(opt, model, self.path("a"))
        finally:
            torch.distributed.destroy_process_group()


class Writing(Folder):
    def contents(self, name="a"):
        return {file: read(self.path(name, file)) for file in os.listdir(self.path(name))}

    def test_one_replaces_another(self):
        """That it does so in one step, whatever fails, is tests/save_failures_test.cpp's matter."""
        model, opt = self.saved()
        before = self.contents()
        train(model, opt, 2, 1)
        scruple.save(opt, model, self.path("a"))
        self.assertNotEqual(self.contents(), before)
        self.assertEqual(os.listdir(self.folder), ["a"])
        scruple.load(opt, model, self.path("a"))

    def test_a_save_that_fails(self):
        """Wherever in the files the disk takes no more: the old one stays, and nothing is left beside it."""
        model, opt = self.saved()
        before, state = self.contents(), picture(opt, model)
        train(model, opt, 2, 1)
        scruple.save(opt, model, self.path("whole"))
        size = len(read(self.path("whole/model.safetensors")))
        self.assertLess(len(read(self.path("whole/manifest.json"))), size)
        shutil.rmtree(self.path("whole"))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        for limit in (0, 1, 100, *range(500, size, 500), size - 1):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            try:
                with self.refused("was not saved", "File too large", "ulimit", kind=scruple.Error):
                    scruple.save(opt, model, self.path("a"))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            self.assertEqual(self.contents(), before, limit)
            self.assertEqual(os.listdir(self.folder), ["a"], limit)
        with self.refused("was not saved", "Not a directory", kind=scruple.Error):
            scruple.save(opt, model, self.path("a/manifest.json/b"))
        self.assertEqual(self.contents(), before)
        scruple.load(opt, model, self.path("a"))
        self.assertSame(picture(opt, model), state)

    def test_a_plane_that_cannot_be_copied(self):
        model, opt = self.saved()
        before, state = self.contents(), picture(opt, model)
        real = checkpoint._write
        for kind in (RuntimeError, KeyboardInterrupt):
            effects = itertools.chain([real] * 3, itertools.repeat(None))

            def fails(*arguments):
                call = next(effects)
                if call is None:
                    raise kind("out of memory")
                call(*arguments)

            with mock.patch.object(checkpoint, "_write", fails):
                with self.assertRaises(kind):
                    scruple.save(opt, model, self.path("a"))
            self.assertEqual(self.contents(), before)
            self.assertEqual(os.listdir(self.folder), ["a"])
        self.assertSame(picture(opt, model), state)

    def test_a_killed_save(self):
        model = mlp(torch.bfloat16).cpu()  # CUDA does not survive a fork
        opt = st.AdamW(model.parameters())
        take_steps(opt, list(model.parameters()), 2)
        scruple.save(opt, model, self.path("a"))
        before = self.contents()
        for name, place, word in (
            ("a", checkpoint, "_write"),
            ("b", checkpoint.library, "checkpoint_commit"),
        ):  # at the first plane, and after the last
            if os.fork() == 0:
                try:
                    with mock.patch.object(place, word, lambda *_: os._exit(9)):
                        scruple.save(opt, model, self.path(name))
                finally:
                    os._exit(1)
            self.assertEqual(os.waitstatus_to_exitcode(os.wait()[1]), 9)
        self.assertEqual(self.contents(), before)
        left = sorted(name for name in os.listdir(self.folder) if "partial" in name)
        self.assertEqual(len(left), 2, left)
        scruple.load(opt, model, self.path("a"))
        for name in ("b", left[1]):
            with self.refused("did not end"):
                scruple.load(opt, model, self.path(name))
        os.makedirs(self.path("run/checkpoints"))
        os.rename(self.path(left[1]), self.path("run/checkpoints/step-00000009.partial-1-1"))
        scruple.save(opt, model, self.path("run/checkpoints/step-00000008"))
        scruple.save(opt, model, self.path("run/checkpoints/step-00000002"), notes={"old": ""})
        self.assertEqual(scruple.load(opt, model, self.path("run")), {})

    def test_what_is_no_checkpoint_is_not_replaced(self):
        model, opt = self.saved("folder")
        with open(self.path("folder/thesis.txt"), "w") as file:
            file.write("x")
        with self.refused("thesis.txt"):
            scruple.save(opt, model, self.path("folder"))
        with self.refused(".partial-"):
            scruple.save(opt, model, self.path("a.partial-b"))
        with self.refused("not a folder"):
            scruple.save(opt, model, self.path("folder/thesis.txt"))
        os.mkdir(self.path("empty"))
        scruple.save(opt, model, self.path("empty"))
        os.symlink(self.path("empty"), self.path("link"))
        scruple.save(opt, model, self.path("link") + "/")
        self.assertTrue(os.path.islink(self.path("link")))
        scruple.save(opt, model, self.path("new/and/deeper"))
        scruple.load(opt, model, self.path("link"))

    def test_a_file_that_changes_while_it_is_loaded(self):
        """Between the checksums and the reading it is cut: an error, and the process lives."""
        model, opt = self.saved()
        kept = read(self.path("a/model.safetensors"))

        def cut(*_):
            os.truncate(self.path("a/model.safetensors"), len(kept) // 2)

        with mock.patch.object(checkpoint, "make_state", cut):
            with self.refused("shortened", "load again", kind=scruple.Error):
                scruple.load(opt, model, self.path("a"))
        with open(self.path("a/model.safetensors"), "wb") as file:
            file.write(kept)
        scruple.load(opt, model, self.path("a"))

    def test_texts(self):
        """Notes hold any text; what no file can hold is refused before anything is written."""
        model, opt = self.saved()
        notes = {"zeros": "a\0b\0", "empty": "", "": "no name", "\u20ac": "\U0001f600\n" * 1000}
        scruple.save(opt, model, self.path("a"), notes=notes)
        self.assertEqual(scruple.load(opt, model, self.path("a")), notes)
        before = self.contents()
        for bad, words in (
            ({"x": "\ud800"}, "not valid Unicode"),
            ({"\ud800": "x"}, "not valid Unicode"),
            ({"a\0b": "x"}, "zero"),
            ({str(i): "" for i in range(1024)}, "1024"),
        ):
            with self.refused(words):
                scruple.save(opt, model, self.path("a"), notes=bad)
        for call in (scruple.save, scruple.load):
            with self.refused("zero"):
                call(opt, model, self.path("a\0b"))
        self.assertEqual(self.contents(), before)
        self.assertEqual(os.listdir(self.folder), ["a"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2])
    else:
        unittest.main()
