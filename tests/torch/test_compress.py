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
import warnings
import weakref
from unittest import mock

import torch
from torch import nn
from safetensors.torch import load_file
from torch.nn import functional

import scruple
from coded_models import *
from scruple import _abi
from scruple.torch import coded
from support import BF16, DEVICE, FP16, FP32, Case, each, same, st, tensor

CLI = os.environ.get("SCRUPLE_CLI")
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
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

    @each(dtype=(BF16, FP16), cast=(BF16, FP16))
    def test_gradients_under_the_other_autocast(self, dtype, cast):
        """A weight of 16 bits is rounded to its own type first."""
        model, x, _, handle = compressed(dtype=dtype)
        self.compare(model, x, handle, lambda: torch.autocast(DEVICE.type, cast))

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

    @each(name=("convolutions", "products", "a product"))
    def test_layers(self, name):
        """Kinds of them, and of backward passes."""
        torch.manual_seed(4)
        convolutions = [
            nn.Conv2d(8, 72, 3, padding="same"),
            nn.Conv2d(72, 72, 3, 1, 1, padding_mode="reflect"),
            nn.Conv2d(72, 64, 3, groups=2),
        ]
        products = [nn.Linear(72, 72), nn.Linear(72, 80, bias=False), nn.Linear(80, 72)]
        model = nn.Sequential(*(convolutions if name == "convolutions" else products)).to(DEVICE)
        shape = {"convolutions": (2, 8, 6, 6), "products": (2, 3, 72), "a product": (4, 72)}[name]
        opt, x = st.SGD(model.parameters(), lr=0.02, **LPMM), tensor(*shape)
        handle = st.compress_weights(model, opt)
        twin = plain_twin(model)

        def checkpointed(net, x):
            return torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False)

        def offloaded(net, x):
            with torch.autograd.graph.save_on_cpu():
                return net(x)

        def of_gradient(net, x):
            return torch.autograd.grad(net(x).square().sum(), x, create_graph=True)[0]

        def functional(net, x):
            return torch.func.grad(lambda x: net(x).square().sum())(x)

        with torch.backends.cudnn.flags(enabled=True, deterministic=True), handle.paused():
            for forward in (nn.Module.__call__, checkpointed, offloaded, of_gradient, functional):
                found = []
                for net in (model, twin):
                    net.zero_grad()
                    given = x.clone().requires_grad_()
                    out = forward(net, given)
                    out.square().sum().backward()
                    found.append([out.detach(), *(p.grad for p in (given, *net.parameters()) if p.grad is not None)])
                self.assertSame(*found)
            self.assertSame(model[0](x[0]), twin[0](x[0]))  # without a batch
            for net in (model, twin):  # of an input without a gradient
                net.zero_grad(), net(x).square().sum().backward()
            self.assertSame([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
        opt.zero_grad()
        late = model(x)
        train(model, x, opt, 1)
        with handle.paused(), self.assertRaisesRegex(RuntimeError, "modified by an inplace|stepped after the forward"):
            late.sum().backward()

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

    @unittest.skipIf(TORCH < (2, 15), "torch does not look at the versions of what a compiled model keeps")
    def test_compiled_and_a_step_between(self):
        """Compiled or not, forward and backward see the same weights, or there is an error."""
        model, x, opt, handle = compressed()
        compiled = torch.compile(model, backend="aot_eager")
        compiled(x).square().mean().backward()
        opt.step()
        late = compiled(x).square().mean()
        train(model, x, opt, 1)
        with handle.paused(), self.assertRaisesRegex(RuntimeError, "modified by an inplace"):
            late.backward()

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
        self.assertLessEqual(most[0], 4 if name == "recurrent" else 1)  # one operation takes all weights of an LSTM

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

    @unittest.skipUnless(DEVICE.type == "cuda", "CUDA graphs are a GPU's")
    @each(name=("linear", "convolution"), cast=(False, True), how={"one": {}, "clipped": dict(accumulate=2, max_norm=0.5)})
    @torch.backends.cudnn.flags(enabled=True, deterministic=True)
    def test_a_captured_step(self, name, cast, how):
        """A CUDA graph of forward, backward and step: replays count their steps, draw new coins, read the learning rate, and
        end with the bits of a loop, in a state that can be saved."""
        parts, runs = how.get("accumulate", 1), []
        for captured in (False, True):
            rate = torch.tensor(0.02, device=DEVICE)
            model, x, opt, _ = compressed(name, how=how, lr=rate, capturable=True)
            batches = [x * (1 + 0.1 * i) for i in range(6)]
            seen = torch.zeros_like(x)

            def step(i):
                seen.copy_(batches[i])
                rate.fill_(0.02 / (i + 1))

            def passes():
                for part in range(parts):
                    with torch.autocast("cuda", BF16, enabled=cast):
                        loss = loss_of(model, seen[part::parts])
                    loss.backward()
                opt.step(), opt.zero_grad()

            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for i in range(3):
                    step(i), passes()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            if captured:
                with torch.cuda.graph(graph):
                    passes()
            for i in range(3, 6):
                step(i)
                graph.replay() if captured else passes()
            torch.cuda.synchronize()
            runs.append(everything(model, opt))
        self.assertSame(*runs)

    @each(name=("linear", "convolution"))
    def test_a_whole_module_is_pickled(self, name):
        model, x, opt, _ = compressed(name)
        train(model, x, opt, 1)
        again = pickle.loads(pickle.dumps(model))
        self.assertSame(again(x), model(x))

    @each(name=("linear", "convolution"))
    def test_a_copy_is_scripted(self, name):
        model, x, _, _ = compressed(name)
        with warnings.catch_warnings(action="ignore"):  # torch.jit is deprecated
            self.assertSame(torch.jit.script(copy.deepcopy(model))(x), model(x))

    def test_a_layer_takes_its_input_by_name(self):
        model, x, _, _ = compressed("linear")
        layer = next(m for m in model.modules() if type(m) is nn.Linear and coded.form_of(m.weight))
        x = x[..., : layer.in_features]
        self.assertSame(layer(input=x), layer(x))

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


class Quality(Case):
    """A network of 12,000 weights, 2,500 steps at the defaults of lpmm, with gradients whose scale shifts."""

    STEPS = 2500

    def final(self, options, seed=0):
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
        for step in range(self.STEPS):
            rows = torch.randint(0, len(x), (32,), generator=order).to(DEVICE)
            scale = 8.0 if step < self.STEPS // 2 else 1.0
            (scale * functional.mse_loss(model(x[rows]), y[rows])).backward()
            opt.step()
            opt.zero_grad()
        with torch.no_grad():
            return functional.mse_loss(model(x), y).item()

    def test_stochastic_follows_fp32_and_nearest_does_not(self):
        """From seeds 0 to 3 lpmm ends within 0.3 % of fp32 from the same seed, and to nearest at least 32 % above it."""
        wide, drawn, nearest = (self.final(options) for options in (None, {}, dict(rounding="nearest")))
        print(f"final loss: fp32 {wide}, lpmm {drawn}, to nearest {nearest}")
        self.assertLess(abs(drawn - wide), 0.02 * wide)
        self.assertGreater(nearest, 1.15 * max(wide, drawn))

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
