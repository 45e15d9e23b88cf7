"""compress_weights: weights that live as codes, in any module, and what training with them gives.

SCRUPLE_CLI names the command line; without it the test that needs it is skipped.
"""

import copy
import ctypes
import io
import json
import os
import pickle
import subprocess
import tempfile
import unittest
import weakref
from unittest import mock

import torch
from torch import nn
from safetensors.torch import load_file
from torch.nn import functional

import scruple
from scruple import _abi
from scruple.torch import coded
from support import BF16, DEVICE, FP16, FP32, Case, each, same, st, tensor

CLI = os.environ.get("SCRUPLE_CLI")
LPMM = dict(recipe="lpmm", momentum=0.9)


class Odd(nn.Module):
    """Weights that are used twice, by views, in a product of three, and by hand."""

    def __init__(self):
        super().__init__()
        self.matrix, self.table = nn.Parameter(torch.randn(80, 80) / 9), nn.Parameter(torch.randn(90, 80))

    def forward(self, x):
        x = functional.linear(torch.tanh(x @ self.matrix), self.matrix.t())
        x = x + torch.einsum("bi,ij->bj", x, self.matrix[:, :80].reshape(80, 80))
        rows = functional.embedding(torch.arange(len(x), device=x.device), self.table)
        return (x * rows) @ self.table.transpose(0, 1)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(100, 64), nn.Linear(64, 100, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding((x.abs().sum(-1) * 10).long() % 100))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x):
        x = x.view(2, -1, 64)
        return self.attention(x, x, x)[0]


def image(x):
    return x.view(-1, 8, 4, 4)


class Image(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(image(x))


# A model and the width of its inputs.
MODELS = {
    "linear": lambda: (nn.Sequential(nn.Linear(96, 80), nn.ReLU(), nn.Linear(80, 64)), 96),
    "convolution": lambda: (Image(nn.Conv2d(8, 96, 3), nn.ReLU(), nn.Conv2d(96, 20, 2)), 128),
    "grouped": lambda: (Image(nn.Conv2d(8, 64, 1), nn.Conv2d(64, 128, 3, groups=2, padding=1)), 128),
    "transposed": lambda: (Image(nn.ConvTranspose2d(8, 64, 3), nn.ConvTranspose2d(64, 8, 3, groups=1)), 128),
    "tied": lambda: (Tied(), 64),
    "attention": lambda: (Attention(), 64),
    "odd": lambda: (Odd(), 80),
}


def made(name="linear", dtype=FP32):
    torch.manual_seed(3)
    model, width = MODELS[name]()
    return model.to(DEVICE, dtype), tensor(12, width, seed=5).to(dtype)


def compressed(name="linear", kind=st.SGD, dtype=FP32, how=None, **options):
    model, x = made(name, dtype)
    opt = kind(model.parameters(), **{"lr": 0.02, **(LPMM if kind is st.SGD else {}), **options})
    return model, x, opt, st.compress_weights(model, opt, **(how or {}))


def loss_of(model, x):
    return model(x).float().square().mean()


def train(model, x, opt, steps, parts=1):
    for _ in range(steps):
        for i in range(parts):
            loss_of(model, x[i::parts]).backward()
        opt.step()
        opt.zero_grad()


def coded_of(model):
    return [p for p in model.parameters() if coded.form_of(p)]


def plain_twin(model):
    """An ordinary model with the decoded weights."""
    twin = copy.deepcopy(model)
    assert not coded_of(twin)
    return twin


def everything(model, opt):
    return copy.deepcopy([model.state_dict(), opt.state_dict()])


class Passes(Case):
    """The passes of an ordinary module with the decoded weights, to the bit."""

    @torch.backends.cudnn.flags(enabled=True, deterministic=True)
    def compare(self, model, x, handle, context=torch.no_grad):
        twin, grads = plain_twin(model), []
        self.assertTrue(coded_of(model))
        with handle.paused():
            for net in (model, twin):
                with context() if context is not torch.no_grad else torch.enable_grad():
                    out = net(x)
                out.float().square().mean().backward()
                grads.append([out.detach(), *(p.grad.clone() for p in net.parameters())])
                net.zero_grad()
        self.assertSame(*grads)

    @each(name=tuple(MODELS), dtype=(FP32, BF16))
    def test_gradients(self, name, dtype):
        model, x, _, handle = compressed(name, dtype=dtype)
        self.compare(model, x, handle)

    @each(name=("linear", "convolution", "tied", "attention"))
    def test_gradients_under_autocast(self, name):
        model, x, _, handle = compressed(name)
        self.compare(model, x, handle, lambda: torch.autocast(DEVICE.type, BF16))

    def test_gradients_under_checkpointing(self):
        model, x, _, handle = compressed()
        for reentrant in (False, True):
            checkpointed = type("Checkpointed", (nn.Module,), {})()
            checkpointed.inner = model
            checkpointed.forward = lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
            x.requires_grad_()
            with handle.paused():
                grads = []
                for forward in (model, checkpointed.forward):
                    forward(x).square().mean().backward()
                    grads.append([p.grad for p in model.parameters()])
                    model.zero_grad()
            self.assertSame(*grads)

    def test_compiled(self):
        model, x, _, handle = compressed()
        with handle.paused():
            compiled, grads = torch.compile(model, backend="aot_eager"), []
            for net in (model, compiled):
                out = net(x)
                out.square().mean().backward()
                grads.append([out.detach(), *(p.grad for p in model.parameters())])
                model.zero_grad()
        self.assertSame(*grads)

    @each(name=tuple(MODELS), cast=(False, True))
    def test_no_decoded_weight_outlives_its_use(self, name, cast):
        """Counted where forward and backward are at work, and after: one at a time, and none between operations."""
        model, x, _, _ = compressed(name)
        alive, most, decode = [], [0], coded.Store.decode

        def watched(store, *dtype):
            values = decode(store, *dtype)
            alive[:] = [one for one in alive if one() is not None]
            alive.append(weakref.ref(values))
            most[0] = max(most[0], len(alive))
            return values

        def now():
            return sum(one() is not None for one in alive)

        with mock.patch.object(coded.Store, "decode", watched):
            with torch.autocast(DEVICE.type, BF16, enabled=cast):
                out = model(x)
            self.assertEqual(now(), 0, "after the forward pass")
            out.register_hook(lambda g: self.assertEqual(now(), 0, "when backward begins"))
            out.float().square().mean().backward()
            self.assertEqual(now(), 0, "after the backward pass")
        self.assertGreaterEqual(len(alive), 1)
        self.assertEqual(most[0], 1)

    def test_a_step_between_forward_and_backward_is_an_error(self):
        """With autocast too, whose cast autograd keeps."""
        for cast in (False, True):
            model, x, opt, handle = compressed()
            with torch.autocast(DEVICE.type, BF16, enabled=cast):
                late = model(x).float().square().mean()
            train(model, x, opt, 1)
            with handle.paused(), self.assertRaises(RuntimeError) as found:
                late.backward()
            self.assertRegex(str(found.exception), "modified by an inplace|stepped after the forward")


class Steps(Case):
    def test_exact_codes_step_exactly(self):
        """Weights on the grid of their codes, and steps of whole units: what remains has no rounding at all."""
        unit, size = 2.0**-9, 64 * 128
        codes = torch.arange(size, dtype=torch.int64).mul(37).remainder(801) - 400
        codes[::64] = 511  # the largest of each group, so that its scale is `unit`
        moved = torch.arange(size, dtype=torch.int64).mul(11).remainder(7) - 3
        moved[::64] = 0
        layer = nn.Linear(128, 64, bias=False, device=DEVICE)
        layer.weight.data.copy_((codes * unit).view(64, 128))
        opt = st.SGD(layer.parameters(), lr=0.5, recipe="lpmm", rounding="nearest")
        st.compress_weights(layer, opt, accumulator="fp32")
        for _ in range(20):
            gradient = (moved * unit * 2).view(64, 128).to(DEVICE, FP32)
            (layer.weight * gradient).sum().backward()
            opt.step()
            codes -= moved
        self.assertSame(layer.state_dict()["weight"].cpu(), (codes * unit).view(64, 128).to(FP32))

    @each(kind=(st.SGD, st.SGDW, st.Lion), rounding=("stochastic", "nearest"), dtype=(FP32, BF16))
    def test_the_steps_of_the_library(self, kind, rounding, dtype):
        """Weights, momentum and accumulators: what the CPU engine makes of the same gradients, called by hand."""
        how = dict(lr=0.01, recipe="lpmm", rounding=rounding, seed=4, weight_decay=0.01)
        model = nn.Linear(96, 70, bias=False, device=DEVICE, dtype=dtype)
        model.weight.data.copy_(tensor(70, 96, seed=1))
        opt = kind(model.parameters(), **how, **({} if kind is st.Lion else {"momentum": 0.9}))
        st.compress_weights(model, opt, accumulate=2, accumulator="fp32")
        row, memory = by_hand(opt, model.weight)
        for step in range(5):
            parts = [tensor(70, 96, seed=10 * step + i).to(dtype) for i in range(2)]
            for part in parts:
                (model.weight * part).sum().backward()
            opt.step()
            mean = ((parts[0].float() + parts[1].float()) / 2).cpu().contiguous()
            row.arrays[_abi.GRADIENT] = _abi.Array(_abi.format_named("fp32").handle, mean.data_ptr())
            options = _abi.options(_abi.StepOptions, multiplier=1.0, parts=1)
            _abi.library.step(_abi_engine(), ctypes.byref(row), 1, ctypes.byref(options))
            row.step += 1
        for name, plane in memory.items():
            self.assertSame(opt.state[model.weight][name].cpu(), plane, name)

    @each(
        options={
            "plain": (st.SGD, {}),
            "nesterov": (st.SGD, dict(nesterov=True, weight_decay=0.01)),
            "sgdw": (st.SGDW, dict(recipe="lpmm", momentum=0.9)),
            "lion": (st.Lion, dict(recipe="lpmm", lr=1e-3)),
            "int8": (st.SGD, dict(weights="int8")),
            "int12": (st.SGD, dict(weights="int12")),
            "adamw": (st.AdamW, dict(weights="int12", lr=1e-3)),
        },
        how={
            "one": {},
            "four": dict(accumulate=4),
            "clipped": dict(accumulate=2, max_norm=0.5),
            "summed": dict(accumulate=2, reduction="sum"),
        },
    )
    def test_it_trains_and_resumes(self, options, how):
        """From a state dict, in both orders, and from a checkpoint: to the bit."""
        (kind, options), parts = options, how.get("accumulate", 1)
        model, x, opt, _ = compressed(kind=kind, how=how, **options)
        before = loss_of(model, x).item()
        train(model, x, opt, 6, parts)
        self.assertLess(loss_of(model, x).item(), before)
        buffer = io.BytesIO()
        torch.save([model.state_dict(), opt.state_dict()], buffer)
        with tempfile.TemporaryDirectory() as folder:
            scruple.save(opt, model, folder + "/saved")
            train(model, x, opt, 4, parts)

            def load(way, model, opt):
                buffer.seek(0)
                weights, state = torch.load(buffer, weights_only=True)
                if way == "checkpoint":
                    scruple.load(opt, model, folder + "/saved")
                    return
                for first in (way, not way):
                    model.load_state_dict(weights) if first else opt.load_state_dict(state)

            for way in (True, False, "checkpoint"):
                again, _, other, _ = compressed(kind=kind, how=how, **options)
                train(again, x, other, 1, parts)
                load(way, again, other)
                train(again, x, other, 4, parts)
                self.assertSame(everything(model, opt), everything(again, other), f"resumed from {way}")

    def test_loss_scaling(self):
        """An overflow skips the step, and a scale is undone."""
        model, x, opt, _ = compressed()
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10)
        scaled, _, other, handle = compressed(how=dict(scaler=scaler))
        for step in range(4):
            scaler.scale(loss_of(scaled, x) * (float("inf") if step == 2 else 1)).backward()
            scaler.step(other)
            scaler.update()
            other.zero_grad()
            if step != 2:
                train(model, x, opt, 1)
        self.assertEqual(handle.report()["skipped"], 1)
        for p, q in zip(model.parameters(), scaled.parameters()):
            self.assertLess((p - q).detach().abs().max().item(), 0.02)

    def test_schedulers_groups_and_frozen_parameters(self):
        model, x = made()
        model[0].weight.requires_grad_(False)
        frozen = model[0].weight.detach().clone()
        groups = [dict(params=model[0].parameters()), dict(params=model[2].parameters(), weights="int8", lr=0.01)]
        opt = st.SGD(groups, lr=0.05, **LPMM)
        schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.1)
        st.compress_weights(model, opt)
        for _ in range(4):
            train(model, x, opt, 1)
            schedule.step()
        self.assertEqual([coded.form_of(p) for p in model.parameters()], [None, None, "int8", None])
        self.assertSame(model[0].weight.detach(), frozen)
        self.assertAlmostEqual(opt.param_groups[1]["lr"], 1e-4)

    def test_a_checkpoint_of_the_other_face(self):
        """The native trainer's lpmm run goes on here, and what is saved here the command line reads."""
        if not CLI:
            self.skipTest("needs the command line: set SCRUPLE_CLI")
        with tempfile.TemporaryDirectory() as folder:
            with open(folder + "/text", "wb") as file:
                file.write(b"The quick brown fox jumps over the lazy dog.\n" * 60)
            shape = "--layers 1 --width 64 --heads 2 --context 16 --batch 2 --steps 2 --save-every 1".split()
            run = ["train", "--data", folder + "/text", "--out", folder + "/run", *shape, "--device", "cpu"]
            run += ["--recipe", "lpmm", "--optimizer", "sgd", "--lr", "0.1", "--set", "momentum=0.9"]
            subprocess.run([CLI, *run], check=True, capture_output=True)
            last = folder + "/run/checkpoints/step-00000002"
            with open(last + "/manifest.json") as file:
                manifest = json.load(file)
            model, groups = nn.Module(), [[] for _ in manifest["groups"]]
            for entry in manifest["tensors"]:
                place, (*path, name) = model, entry["name"].split(".")
                for part in path:
                    if not hasattr(place, part):
                        place.add_module(part, nn.Module())
                    place = getattr(place, part)
                place.register_parameter(name, nn.Parameter(tensor(*entry["shape"])))
                groups[entry["group"]].append(place._parameters[name])
            opt = st.SGD([dict(params=params) for params in groups], lr=0.5, **LPMM)
            st.compress_weights(model, opt)
            scruple.load(opt, model, last)
            self.assertTrue(coded_of(model))
            scruple.save(opt, model, folder + "/on")
            subprocess.run([CLI, "checkpoint", "verify", folder + "/on"], check=True, capture_output=True)
            files = [load_file(path + "/model.safetensors") for path in (last, folder + "/on")]
            self.assertIn("transformer.wte.weight/momentum_buffer", files[0])
            self.assertSame(*files)


_engines = {}


def _abi_engine():
    """The CPU engine, whatever device is tested."""
    if "cpu" not in _engines:
        _engines["cpu"] = _abi.Engine("cpu", 1)
    return _engines["cpu"].handle


def by_hand(opt, p):
    """A row of the library over copies of a parameter's planes in the host's memory, and these."""
    opt._update_rules()
    entry, memory = opt._entry(p), {}
    row = _abi.Tensor.from_buffer_copy(entry.row)
    for plane, held in entry.by_plane():
        memory[plane.name] = held.cpu().clone()
        setattr(row.arrays[plane.array], plane.part, memory[plane.name].data_ptr())
    return row, memory


class Parameters(Case):
    """What people do with model.parameters() every day."""

    def test_counting_and_vectors(self):
        model, _, _, _ = compressed()
        plain, _ = made()
        self.assertEqual(sum(p.numel() for p in model.parameters()), sum(p.numel() for p in plain.parameters()))
        self.assertEqual([p.shape for p in model.parameters()], [p.shape for p in plain.parameters()])
        vector = nn.utils.parameters_to_vector(model.parameters())
        self.assertIs(type(vector), torch.Tensor)
        self.assertSame(vector, nn.utils.parameters_to_vector(plain_twin(model).parameters()))
        self.assertLess((vector - nn.utils.parameters_to_vector(plain.parameters())).abs().max().item(), 2e-3)
        for p in coded_of(model):
            self.assertIsInstance(p, nn.Parameter)
            self.assertTrue(p.is_leaf and p.requires_grad)
            self.assertIn("int10", repr(p))

    def test_copies_are_plain(self):
        model, x, opt, _ = compressed()
        average = torch.optim.swa_utils.AveragedModel(model)
        self.assertFalse(coded_of(average))
        train(model, x, opt, 3)
        average.update_parameters(model)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            self.assertFalse(coded_of(copied))
            self.assertSame(copied(x), model(x))
        for values in (model.state_dict(), nn.Sequential(model).state_dict()):
            self.assertEqual({type(value) for value in values.values()}, {torch.Tensor})
        kept = model.state_dict(keep_vars=True)
        self.assertIs(kept["0.weight"], model[0].weight)

    def test_snapshots_stay(self):
        """A clone or a cast that was made before a step has the values of before."""
        model, x, opt, _ = compressed(lr=0.5)
        p = model[0].weight
        made = [p.detach().clone(), p.detach().to(FP32, copy=True), p.detach().double(), p.detach().bfloat16()]
        before = copy.deepcopy(made)
        train(model, x, opt, 2)
        self.assertSame(made, before)
        self.assertFalse(torch.equal(p.detach(), made[0]))

    def test_writing(self):
        """In place, by views and by load_state_dict: encoded to nearest; what is not changed keeps its codes."""
        model, x, opt, _ = compressed()
        train(model, x, opt, 3)
        p = model[0].weight
        codes = p.store.codes.clone()
        model.load_state_dict(plain_twin(model).state_dict())
        self.assertSame(p.store.codes, codes)
        with torch.no_grad():
            p.clamp_(-0.01, 0.01)
            self.assertLessEqual(p.abs().max().item(), 0.01 + 1e-6)
            p.data[0].zero_()
            p.t()[:, 1].fill_(0.005)
            self.assertEqual(p[0].abs().max().item(), 0)
            self.assertTrue(torch.allclose(p[1], torch.full_like(p[1], 0.005)))
            nn.init.normal_(p)
        train(model, x, opt, 1)

    def test_writing_what_it_is(self):
        """bf16 shows fewer bits than codes of 10 bits hold: writing them back must not drop the others."""
        model, x, opt, _ = compressed(dtype=BF16)
        train(model, x, opt, 3)
        codes = model[0].weight.store.codes.clone()
        model.load_state_dict(plain_twin(model).state_dict())
        self.assertSame(model[0].weight.store.codes, codes)

    def test_moving(self):
        """model.to() where the model is: nothing changes. Elsewhere: an error, and the model trains on."""
        model, x, opt, handle = compressed()
        twin, _, other, _ = compressed()
        for change in (lambda: model.to(DEVICE), model.float, model.train):
            change()
            for one, its in ((model, opt), (twin, other)):
                train(one, x, its, 1)
        for change in (model.double, model.bfloat16):
            with self.refused("before compress_weights"):
                change()
        with self.refused("before compress_weights"):
            model[0].weight.data = torch.zeros(80, 96, device=DEVICE)
        self.assertSame(coded_of(model)[0].store.codes, coded_of(twin)[0].store.codes)
        handle.remove()
        model(x).sum().backward()
        self.assertIsNotNone(model[0].weight.grad)

    def test_writing_into_the_state(self):
        """As in every optimizer: moments, a fresh start, and the weight's planes."""
        model, x, opt, _ = compressed()
        train(model, x, opt, 2)
        p = model[0].weight
        weight, codes = p.detach().clone(), p.store.codes
        opt.state[p]["momentum_buffer"] = torch.zeros_like(weight)
        train(model, x, opt, 1)
        opt.state[p] = {}
        self.assertSame(p.detach().clone(), p.detach().clone())
        before = p.detach().clone()
        self.assertFalse(torch.equal(before, weight))
        train(model, x, opt, 1)
        self.assertLess((p - before).detach().abs().max().item(), 0.05, "the weight began anew with its state")
        self.assertIs(p.store.codes, codes)

    def test_master_weights(self):
        model, x, opt, _ = compressed(dtype=BF16)
        train(model, x, opt, 2)
        wide = opt.master_weights()[model[0].weight]
        self.assertSame(wide.to(BF16), model[0].weight.detach().clone())
        opt.set_master_weights({model[0].weight: wide * 2})
        self.assertSame(opt.master_weights()[model[0].weight], wide * 2)
        self.assertSame(opt.master_state_dict(model)["0.weight"], wide * 2)


class Refusals(Case):
    """Named before the model is touched; after an error it is as it was."""

    def unchanged(self, model, opt, *words, how=None):
        before, kinds = copy.deepcopy(model.state_dict()), [type(p) for p in model.parameters()]
        with self.refused(*words):
            st.compress_weights(model, opt, **(how or {}))
        self.assertSame(before, model.state_dict())
        self.assertEqual(kinds, [type(p) for p in model.parameters()])
        self.assertIsNone(getattr(opt, "_handle", None))
        self.assertFalse(any(opt.state.values()))

    def sgd(self, model, **options):
        return st.SGD(model.parameters(), lr=0.1, **{**LPMM, **options})

    def test_before_it_is_touched(self):
        model, _ = made()
        self.unchanged(model, torch.optim.SGD(model.parameters()), "must be one of scruple.torch")
        self.unchanged(model, self.sgd(model, recipe="scruple"), "no weight becomes codes", "recipe='lpmm'")
        self.unchanged(model, self.sgd(model), "leave policy out", how=dict(policy="released"))
        self.unchanged(model, self.sgd(model), "accumulator is 'int7'", how=dict(accumulator="int7"))
        self.unchanged(model, self.sgd(model), "accumulate is 0", how=dict(accumulate=0))
        small = nn.Linear(8, 8, device=DEVICE)
        self.unchanged(small, self.sgd(small), "no weight becomes codes", "4096")
        with self.refused("int7"):
            self.sgd(model, weights="int7")

    def test_what_cannot_be_held(self):
        model, x = made()
        model[2].weight.data[1, 2] = float("nan")
        self.unchanged(model, self.sgd(model), "2.weight", "not finite")
        model, x = made()
        model[0].weight.register_hook(lambda g: g)
        self.unchanged(model, self.sgd(model), "0.weight has hooks")
        model, x = made()
        held = weakref.ref(model[2].weight)
        self.unchanged(model, self.sgd(model), "2.weight is held by something else", "torch.compile")
        del held
        model = model.to("meta")
        with self.refused("is on device meta"):
            st.compress_weights(model, self.sgd(model))

    def test_a_step_before_it(self):
        model, x = made()
        opt = self.sgd(model)
        loss_of(model, x).backward()
        with self.refused("int10", "call compress_weights"):
            opt.step()
        self.assertEqual(len(opt.state_dict()["state"]), 0)

    def test_channels_last(self):
        """Small convolutions of such a model become contiguous, unless there is an error."""
        torch.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 64, 3, bias=False)).to(DEVICE)
        model = model.to(memory_format=torch.channels_last)
        strides = model[0].weight.stride()
        self.unchanged(model, self.sgd(model), "accumulator is 'int7'", how=dict(accumulator="int7"))
        self.assertEqual(strides, model[0].weight.stride())
        self.assertFalse(model[0].weight.is_contiguous())
        opt = self.sgd(model)
        st.compress_weights(model, opt)
        x = tensor(8, 8, 6, 6).contiguous(memory_format=torch.channels_last)
        before = loss_of(model, x).item()
        train(model, x, opt, 20)
        self.assertLess(loss_of(model, x).item(), 0.9 * before)

    def test_few_elements(self):
        """They stay, and are exact: fp32, or 16 bits with an fp32 copy. A step below a bf16's last bit moves them."""
        for kind, how in ((st.SGD, LPMM), (st.AdamW, dict(weights="int12"))):
            for dtype, form in ((FP32, "fp32"), (BF16, "bf16+fp32")):
                model, _ = made(dtype=dtype)
                opt = kind(model.parameters(), lr=1e-3, **how)
                st.compress_weights(model, opt)
                self.assertEqual(opt._layout(model[0].bias).described[0][:2], ("weight", form))
                self.assertIs(type(model[0].bias), nn.Parameter)

    def test_twice(self):
        model, _, opt, handle = compressed()
        with self.refused("no weight becomes codes"):
            st.compress_weights(model, opt)

    def test_other_states(self):
        """A state of other formats, and loading in the middle of a step."""
        model, x, opt, _ = compressed(how=dict(accumulate=2))
        train(model, x, opt, 1, 2)
        saved = opt.state_dict()
        other, _, second, _ = compressed(weights="int8")
        with self.refused_unchanged(second, "int10", model=other):
            second.load_state_dict(copy.deepcopy(saved))
        plain, _ = made()
        third = st.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        with self.refused_unchanged(third, "int10", "call compress_weights", model=plain):
            third.load_state_dict(copy.deepcopy(saved))
        loss_of(model, x[::2]).backward()
        with self.refused("1 micro-batches", "after opt.step()"):
            opt.load_state_dict(saved)


class Quality(Case):
    """A network of 12,000 weights, 2,500 steps at the defaults of lpmm, with gradients whose scale shifts."""

    STEPS = 2500

    def final(self, seed, options, steps=STEPS):
        torch.manual_seed(100 + seed)
        teacher = nn.Sequential(nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 64))
        model = nn.Sequential(nn.Linear(32, 160), nn.Tanh(), nn.Linear(160, 64)).to(DEVICE)
        with torch.no_grad():
            x = torch.randn(2048, 32)
            y = teacher(x).to(DEVICE)
        x, opt = x.to(DEVICE), None
        if options is None:
            opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        else:
            opt = st.SGD(model.parameters(), lr=0.01, **LPMM, seed=seed, **options)
            st.compress_weights(model, opt)
        order = torch.Generator().manual_seed(seed)
        for step in range(steps):
            rows = torch.randint(0, len(x), (32,), generator=order).to(DEVICE)
            scale = 8.0 if step < steps // 2 else 1.0
            (scale * functional.mse_loss(model(x[rows]), y[rows])).backward()
            opt.step()
            opt.zero_grad()
        with torch.no_grad():
            return functional.mse_loss(model(x), y).item()

    def test_stochastic_follows_fp32_and_nearest_does_not(self):
        wide = [self.final(seed, None) for seed in range(3)]
        drawn = [self.final(seed, {}) for seed in range(3)]
        nearest = [self.final(seed, dict(rounding="nearest")) for seed in range(3)]
        spread, mean = max(wide) - min(wide), sum(wide) / 3
        print(f"final loss: fp32 {wide}, lpmm {drawn}, to nearest {nearest}")
        self.assertLess(abs(sum(drawn) / 3 - mean), max(spread, 0.05 * mean))
        self.assertGreater(min(nearest), 1.15 * max(wide + drawn))

    def test_watching_updates(self):
        """To nearest nearly nothing moves at a small rate; stochastically about as much as the step is of a unit."""
        for rounding, lr, least, most in (
            ("nearest", 1e-6, 0.999, 1.0),
            ("stochastic", 1e-6, 0.9, 1.0),
            ("nearest", 5.0, 0.0, 0.2),
            ("stochastic", 5.0, 0.0, 0.2),
        ):
            model, x, opt, _ = compressed(lr=lr, momentum=0.5, rounding=rounding)
            with st.watch_updates(opt, model) as unmoved:
                train(model, x, opt, 1)
            self.assertEqual(set(unmoved), {name for name, _ in model.named_parameters()})
            self.assertLessEqual(unmoved["0.weight"], most)
            self.assertGreaterEqual(unmoved["0.weight"], least, (rounding, lr))
        model, _ = made(dtype=BF16)
        opt = st.AdamW(model.parameters(), lr=1e-8, weights="bf16", rounding="nearest")
        loss_of(model, _).backward()
        with st.watch_updates(opt) as unmoved:
            opt.step()
        self.assertGreater(unmoved[model[0].weight], 0.999)
        with st.watch_updates(opt, model) as unmoved:
            pass
        self.assertEqual(unmoved["0.weight"], 1.0)


class Memory(Case):
    def test_bytes(self):
        """Of the model: codes with scales, momentum, accumulators. Each tensor once, whoever holds it."""
        model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(8)]).to(DEVICE)
        count = sum(p.numel() for p in model.parameters())
        opt = st.SGD(model.parameters(), lr=0.01, **LPMM)
        handle = st.compress_weights(model, opt, accumulate=2)
        x = tensor(4, 512)
        loss_of(model, x).backward()  # half a step: accumulators are there
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.tensors(model, opt)}
        (sink,) = handle._path.sinks.values()
        accumulators = sum(block.numel() for block in sink.blocks.values())
        self.assertLess((sum(held.values()) + accumulators) / count, 3.7)
        self.assertGreater((sum(held.values()) + accumulators) / count, 3.3)

    def tensors(self, model, opt):
        for p in model.parameters():
            yield from coded.planes_of(p) or (p,)
        for state in opt.state.values():
            yield from (x for x in state.values() if isinstance(x, torch.Tensor))

    @unittest.skipUnless(DEVICE.type == "cuda", "needs a GPU: run with SCRUPLE_TEST_DEVICE=cuda")
    def test_bytes_by_the_allocator(self):
        """ResNet-18's largest layers and a transformer's, at rest and at the peak of a step."""
        torch.cuda.empty_cache()
        base = torch.cuda.memory_allocated()
        model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(24)]).to(DEVICE)
        count, largest = sum(p.numel() for p in model.parameters()), 2048 * 2048 * 4
        opt = st.SGD(model.parameters(), lr=0.01, **LPMM)
        st.compress_weights(model, opt, accumulate=2)
        x = tensor(4, 2048)
        train(model, x, opt, 2, 2)
        loss_of(model, x[::2]).backward()
        self.assertLess((torch.cuda.memory_allocated() - base) / count, 3.7)
        torch.cuda.reset_peak_memory_stats()
        loss_of(model, x[::2]).backward()
        peak = torch.cuda.max_memory_allocated() - base
        # A decoded layer, its gradient, and a bucket of gradients that wait to be folded.
        self.assertLess(peak, 3.7 * count + 2 * largest + st.release.BUCKET + (32 << 20))


if __name__ == "__main__":
    unittest.main()
