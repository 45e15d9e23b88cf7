"""scruple.torch's optimizers as torch.optim optimizers: the same steps as torch's own, in groups of every kind,
with schedulers, closures, hooks and copies; and the package itself."""

import contextlib
import copy
import ctypes
import inspect
import io
import os
import pathlib
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import scruple
from scruple import _abi
from support import BF16, DEVICE, FP16, FP32, KINDS, STORAGE, WIDE, Case, ModelRun, Run, beside_torch, copies
from support import distance, each, follow, give_gradients, loss_of, mlp, parameter, parameters, st, stored
from support import take_steps, tensor

TWINS = [kind for kind in KINDS if hasattr(torch.optim, kind.__name__)]


def changed(default):
    """Another value than the default, which shows."""
    if isinstance(default, bool):
        return not default
    if isinstance(default, tuple):
        return tuple(map(changed, default))
    return 0.1 if default < 1e-6 else 0.9 * default


def option_sets(kind):
    """Options that torch's optimizer of this name has too: the defaults, each option changed alone, all changed, all
    but one, and lr as a tensor. Without what torch refuses, such as Nesterov's variant with dampening."""
    theirs = getattr(torch.optim, kind.__name__)
    shared = inspect.signature(kind).parameters.keys() & inspect.signature(theirs).parameters.keys()
    shared -= {"params", "foreach", "fused", "capturable", "differentiable"}
    defaults = {name: theirs([parameter(1)]).defaults[name] for name in sorted(shared)}
    whole = {name: changed(value) for name, value in defaults.items()}
    sets = [{}, whole, {"lr": torch.tensor(defaults["lr"])}]
    for name in whole:
        sets += [{name: whole[name]}, {other: value for other, value in whole.items() if other != name}]
    for options in sets:
        with contextlib.suppress(ValueError):
            theirs([parameter(1)], **options)
            yield kind.__name__, options


class LionReference(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al., 2302.06675, in fp64."""

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            beta1, beta2 = g["betas"]
            for p in g["params"]:
                grad = -p.grad if g["maximize"] else p.grad
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                update = (beta1 * m + (1 - beta1) * grad).sign()
                p.mul_(1 - g["lr"] * g["weight_decay"] / (g["decay_lr"] or 1)).sub_(g["lr"] * update)
                m.mul_(beta2).add_((1 - beta2) * grad)


class SGDWReference(torch.optim.Optimizer):
    """Algorithm 1 of Loshchilov and Hutter, 1711.05101, with torch.optim.SGD's momentum (lr outside of it),
    dampening and Nesterov's variant, and decay by lr * weight_decay as torch.optim.AdamW has it. In fp64."""

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            for p in g["params"]:
                grad = -p.grad if g["maximize"] else p.grad
                p.mul_(1 - g["lr"] * g["weight_decay"] / (g["decay_lr"] or 1))
                if g["momentum"]:
                    m = self.state[p].get("m")
                    m = grad.clone() if m is None else g["momentum"] * m + (1 - g["dampening"]) * grad
                    self.state[p]["m"] = m
                    grad = grad + g["momentum"] * m if g["nesterov"] else m
                p.sub_(g["lr"] * grad)


LION = dict(lr=0.01, betas=(0.9, 0.99), weight_decay=0.0, decay_lr=0.0, maximize=False)
SGDW = dict(
    lr=0.1, momentum=0.0, dampening=0.0, weight_decay=0.05, nesterov=False, decay_lr=0.0, maximize=False
)
# (class, what the paper says, options).
AGAINST_PAPERS = [
    (st.Lion, LionReference, LION),
    (st.Lion, LionReference, {**LION, "betas": (0.8, 0.95), "weight_decay": 0.3}),
    (st.Lion, LionReference, {**LION, "weight_decay": 0.1, "maximize": True}),
    (st.Lion, LionReference, {**LION, "weight_decay": 0.01, "decay_lr": 0.02}),
    (st.SGDW, SGDWReference, SGDW),
    (st.SGDW, SGDWReference, {**SGDW, "momentum": 0.9, "nesterov": True}),
    (st.SGDW, SGDWReference, {**SGDW, "momentum": 0.9, "dampening": 0.2, "maximize": True}),
    (st.SGDW, SGDWReference, {**SGDW, "momentum": 0.5, "weight_decay": 0.01, "decay_lr": 0.2}),
]


class FollowsTorch(Case):
    def follows(self, ours, exact, theirs=None, steps=100):
        """Ours is no further from the same formula in fp64 than torch's fp32 is (or, where torch has none,
        than 100 roundings of the largest value), with a factor of 3 for luck."""
        start = copies(ours.params)
        follow(ours, exact, *([theirs] if theirs else []), steps=steps)
        allowed = 3 * distance(theirs, exact) + 1e-7 if theirs else 1e-5
        self.assertGreater(distance(start, exact), 1e-3, "nothing moved")
        self.assertLess(allowed, 1e-3)
        self.assertLessEqual(distance(ours, exact), allowed)

    @each(case=[case for kind in TWINS for case in option_sets(kind)])
    def test_every_option(self, case):
        name, options = case
        theirs = getattr(torch.optim, name)
        on_device = {k: v.to(DEVICE) if torch.is_tensor(v) else v for k, v in options.items()}
        numbers = {k: float(v) if torch.is_tensor(v) else v for k, v in options.items()}
        ours = Run(name, FP32, **{"lr": theirs([parameter(1)]).defaults["lr"], **on_device}, **WIDE)
        self.follows(
            ours,
            ours.copied(theirs, torch.float64, **{"lr": ours.opt.defaults["lr"], **numbers}, foreach=False),
            ours.copied(theirs, **{"lr": ours.opt.defaults["lr"], **on_device}, foreach=False),
        )

    @each(case=AGAINST_PAPERS)
    def test_the_papers(self, case):
        kind, reference, options = case
        ours = Run(kind, FP32, **options, **WIDE)
        self.follows(ours, ours.copied(lambda ps, **_: reference(ps, options), torch.float64))

    def test_every_class_is_compared(self):
        papers = {kind for kind, _, _ in AGAINST_PAPERS}
        self.assertEqual(set(KINDS), {*TWINS, *papers}, "torch has no such optimizer: add it to AGAINST_PAPERS")

    def test_defaults_are_torchs(self):
        p = [parameter(3)]
        for kind in TWINS:
            theirs, ours = getattr(torch.optim, kind.__name__)(p).defaults, kind(p).defaults
            for key in set(theirs) & set(ours):
                with self.subTest(kind.__name__, key=key):
                    self.assertEqual(theirs[key], ours[key])
            ignored = {"foreach", "fused", "differentiable", "decoupled_weight_decay"}
            self.assertLessEqual(set(theirs) - set(ours), ignored)

    @each(kind=KINDS)
    def test_signatures_are_whole(self, kind):
        """They show what all optimizers take, after what each takes; a slip is refused."""
        shown = inspect.signature(kind).parameters
        self.assertLessEqual({"params", "lr", "recipe", "seed", "maximize", "fused"}, set(shown))
        self.assertNotIn("options", shown)
        with self.assertRaisesRegex(TypeError, "recipes"):
            kind([parameter(3)], recipes="scant")

    def test_decoupled_decay_of_adam(self):
        """It is AdamW, also copied and saved; a state of the other kind makes it that, as in torch."""
        how = dict(weight_decay=0.3, betas=(0.8, 0.9))
        run, plain = Run(st.Adam, decoupled_weight_decay=True, **how).steps(2), Run(**how).steps(4)
        run = copy.deepcopy(run).steps(2)
        self.assertSame(run.weights(), plain.weights())
        self.assertSame(run.opt.state_dict()["state"], plain.opt.state_dict()["state"])
        run.opt.load_state_dict(run.opt.state_dict())
        with tempfile.TemporaryDirectory() as folder:
            scruple.save(plain.opt, torch.nn.ParameterList(plain.params), folder)
            loaded = Run(st.Adam, params=parameters(BF16, seed=5), decoupled_weight_decay=True)
            scruple.load(loaded.opt, torch.nn.ParameterList(loaded.params), folder)
            self.assertSame(loaded.steps(1, first=4).weights(), plain.steps(1).weights())

    @each(
        case=[
            ("AdamW", dict(lr=1e-2)),
            ("SGD", dict(lr=0.05, momentum=0.9)),
            ("Adam", dict(lr=1e-2)),
            ("RMSprop", dict(lr=1e-3)),
            ("Adagrad", dict(lr=1e-2)),
        ]
    )
    def test_a_model_in_training(self, case):
        """Not only fixed gradients: errors would feed back here."""
        name, options = case
        ours = ModelRun(name, FP32, **options, **WIDE).steps(30)
        self.assertNear(ours, ModelRun(getattr(torch.optim, name), FP32, **options).steps(30), 1e-4)
        self.assertGreater(distance(ours, mlp()), 1e-2)

    @each(
        stored=[(BF16, "fp32"), (BF16, "mixed"), (BF16, "split"), (FP16, "fp32"), (FP16, "mixed")],
        rule={"AdamW": dict(lr=1e-3), "SGD": dict(lr=1e-2, momentum=0.9)},
    )
    def test_master_weights_of_16_bit_parameters_follow(self, stored, rule):
        """The wide weights of a 16-bit model are the bits of an fp32 model with the same gradients."""
        (dtype, recipe), kind = stored, st.SGD if "momentum" in rule else st.AdamW
        narrow = Run(kind, dtype, recipe=recipe, **rule)
        wide = narrow.copied(dtype=FP32, **WIDE, **rule)
        follow(narrow, wide, steps=20)
        masters = narrow.opt.master_weights()
        for p, q in zip(narrow.params, wide.weights()):
            self.assertSame(masters[p], q)
            self.assertLessEqual(float((p.detach().float() - q).abs().max()), float(q.abs().max()) * 2**-8)
            if recipe != "split":  # whose ties go away from zero
                self.assertSame(p.detach(), q.to(dtype))


class Groups(Case):
    @each(dtype=(BF16, FP32))
    def test_own_settings_per_group(self, dtype):
        """Each group steps as an optimizer of its own would, seeds and formats included."""
        made = [
            dict(lr=1e-2, recipe="flash"),
            dict(lr=1e-3, recipe="scruple", weights="bf16+16"),
            dict(lr=0.0),
            dict(lr=1e-3, recipe="scant", seed=5),
            dict(lr=1e-2, moments={"exp_avg": "nf4"}, weight_decay=0.0),
            dict(lr=1e-2, weights="bf16", rounding="stochastic", seed=3),
            dict(betas=(0.5, 0.6), maximize=True),
            dict(eps=1e-2, amsgrad=True),
        ]
        made = [stored(options, dtype) for options in made]
        together = [parameter(70, 3, seed=i, dtype=dtype) for i in range(len(made))]
        opt, alone = st.AdamW([dict(params=[p], **x) for p, x in zip(together, made)]), copies(together)
        # The parameter's number is part of the random key: it is the last of as many as in `opt`.
        opts = [
            st.AdamW([parameter(0, dtype=dtype) for _ in range(i)] + [p], **options)
            for i, (p, options) in enumerate(zip(alone, made))
        ]
        take_steps(opt, together, 5)
        for step in range(5):
            give_gradients(alone, step)
            for o in opts:
                o.step()
        for i, (p, q) in enumerate(zip(together, alone)):
            with self.subTest(group=i):
                self.assertSame(p.detach(), q.detach())
                held = ({k: v for k, v in x.items() if k != "step"} for x in (opt.state[p], opts[i].state[q]))
                self.assertSame(*held)

    @each(
        case=[
            (dict(), ("bf16+8", "companded8", "companded8")),
            (dict(recipe="flash"), ("bf16+8", "flash8", "flash8")),
            (dict(recipe="scant"), ("bf16+8", "companded8", "log5")),
            (dict(recipe="split"), ("bf16+16", "fp32", "fp32")),
            (dict(recipe="mixed"), ("bf16+fp32", "fp32", "fp32")),
            (dict(recipe="fp32"), ("bf16+fp32", "fp32", "fp32")),
            (dict(weights="bf16+3", moments="bf16"), ("bf16+3", "bf16", "bf16")),
            (dict(moments={"exp_avg": "nf4"}), ("bf16+8", "nf4", "companded8")),
            (dict(moments="log4"), ("bf16+8", "companded8", "log4")),
        ]
    )
    def test_formats_are_what_was_asked(self, case):
        options, expected = case
        run = Run(params=[parameter(128, 2, dtype=BF16)], **options).steps(1)
        saved = run.opt.state_dict()["param_groups"][0]["formats"]["bf16"]
        self.assertEqual((saved["weight"], saved["exp_avg"], saved["exp_avg_sq"]), expected)

    @each(case=[("scruple", 5.13), ("flash", 5.13), ("scant", 4.72), ("split", 12), ("mixed", 14)])
    def test_bytes_per_parameter(self, case):
        """What the README promises: state and weight in 5 to 7 bytes, gradient apart."""
        recipe, limit = case
        p = parameter(1 << 14, dtype=BF16)
        run = Run(params=[p], recipe=recipe).steps(1)
        planes = [x for name, x in run.opt.state[p].items() if name != "step"]
        self.assertLessEqual(2 + sum(x.nbytes for x in planes) / p.numel(), limit)

    def test_added_later(self):
        """A group that comes later starts from its own first step; the old ones go on."""
        ps = parameters(BF16)
        run, late = Run(params=ps[:2]), copies(ps[2:])
        run.steps(3).opt.add_param_group(dict(params=ps[2:], lr=1e-3, recipe="flash"))
        run.params = ps
        run.steps(3)
        apart = Run(params=parameters(BF16)[:2]).steps(6)
        other = st.AdamW([dict(params=[]), dict(params=late, lr=1e-3, recipe="flash")])
        for step in range(3, 6):
            give_gradients(ps, step)
            for p, q in zip(ps[2:], late):
                q.grad = p.grad
            other.step()
        self.assertSame(run.weights(), apart.weights() + [p.detach() for p in late])
        self.assertEqual([run.opt.state[p]["step"] for p in ps if run.opt.state_dict()], [6, 6, 3, 3])

    def test_named_parameters(self):
        model = mlp()
        opt = st.AdamW(model.named_parameters())
        self.assertEqual(opt.param_groups[0]["param_names"], [name for name, _ in model.named_parameters()])
        loss_of(model, 0).backward()
        opt.step()

    @each(
        case=[
            (dict(recipe="flash"), ("exp_avg", "companded8", "flash8")),
            (dict(recipe="fp32"), ("weight", "bf16+8", "bf16+fp32")),
            (dict(weights="bf16+4"), ("weight", "bf16+8", "bf16+4")),
            (dict(moments={"exp_avg": "nf4"}), ("exp_avg", "nf4")),
            (dict(rounding="stochastic"), ("weight", "stochastic")),  # splits are read by it
        ]
    )
    def test_formats_changed_between_steps(self, case):
        """What stands in the state would be read as something else: refused before anything is lost."""
        change, words = case
        run = Run().steps(2)
        opt, (group,), weights = run.opt, run.opt.param_groups, copies(run.params)
        was = {name: group[name] for name in change}
        group.update(change)
        give_gradients(run.params, 2)
        for look in (opt.step, opt.state_dict, opt.master_weights) * 2:
            with self.refused(*words, "Set that back", "as_='torch'"):
                look()
        self.assertSame(run.weights(), [p.detach() for p in weights])
        group.update(was)
        self.assertAlike(run.steps(2), Run().steps(4))

    def test_moments_changed_in_place(self):
        run = Run(moments={"exp_avg": "bf16"}).steps(1)
        run.opt.param_groups[0]["moments"]["exp_avg"] = "nf4"
        with self.refused("exp_avg", "nf4"):
            run.opt.step()

    def test_rounding_changed_between_steps(self):
        """Where the codes mean the same it counts from the next step on."""
        run = Run().steps(2)
        saved = copy.deepcopy(run.opt.state_dict())
        saved["param_groups"][0]["rounding"] = run.opt.param_groups[0]["rounding"] = "nearest"
        twin = run.resumed(state=saved)
        self.assertAlike(run.steps(2), twin.steps(2))

    def test_steps_are_told_at_any_time(self):
        """In opt.state as in a state dict, when gradients come and go, and over a scaler's skipped steps."""
        run = Run()
        opt, ps = run.opt, run.params

        def told(*steps):
            self.assertEqual([opt.state[p]["step"] for p in ps], list(steps))

        for step in range(1, 5):
            run.steps(1)
            told(step, step, step, step)
        ps[0].grad = None
        opt.step()
        told(4, 5, 5, 5)
        for inf in (0.0, 1.0):
            opt.found_inf = torch.full((), inf, device=DEVICE)
            opt.step()
            told(4, 6, 6, 6)
        del opt.found_inf
        self.assertEqual([int(opt.state_dict()["state"][i]["step"]) for i in range(4)], [4, 6, 6, 6])
        run.steps(1)
        told(5, 7, 7, 7)

    @each(release=(dict(), dict(policy="compressed")))
    def test_steps_are_told_while_gradients_are_released(self, release):
        run = ModelRun(release=release)
        for step in range(3):
            run.loss().backward()
            self.assertEqual({int(run.opt.state[p]["step"]) for p in run.params}, {step + 1})
            run.step()
        run.handle.remove()

    @each(
        case=[
            ("SGD", dict(lr=0.1, momentum=0.9), dict(momentum=0.5, weight_decay=0.1)),
            ("SGD", dict(lr=0.1, momentum=0.9), dict(maximize=True)),
            ("AdamW", {}, dict(betas=(0.5, 0.5), eps=1e-3)),
            ("AdamW", {}, dict(maximize=True)),
        ]
    )
    def test_changed_between_steps(self, case):
        """What a user or a scheduler writes into a group counts from the next step on, as in torch."""
        name, options, change = case
        runs = beside_torch(name, **options)
        for run in runs:
            run.steps(3).opt.param_groups[0].update(change)
            run.steps(3)
        self.assertNear(*runs, 2e-6)


s = torch.optim.lr_scheduler


def one_cycle(opt):
    return s.OneCycleLR(opt, 0.05, total_steps=12)


class Schedulers(Case):
    TABLE = {
        "LambdaLR": ("AdamW", dict(lr=0.01), lambda o: s.LambdaLR(o, lambda i: 0.8**i)),
        "Cosine": ("AdamW", dict(lr=0.01), lambda o: s.CosineAnnealingLR(o, 10)),
        "OneCycle, betas": ("AdamW", dict(lr=0.01, weight_decay=0.1), one_cycle),
        "OneCycle, momentum": ("SGD", dict(lr=0.01, momentum=0.9), one_cycle),
        "Sequential": (
            "SGD",
            dict(lr=0.1),
            lambda o: s.SequentialLR(o, [s.ConstantLR(o, 0.1, 4), s.StepLR(o, 2)], [4]),
        ),
    }

    @each(case=TABLE, tensor_lr=(False, True))
    def test_against_torch(self, case, tensor_lr):
        name, options, schedule = case
        if tensor_lr:
            options = {**options, "lr": torch.tensor(options["lr"], device=DEVICE)}
        on_device = tensor_lr and name == "AdamW" and DEVICE.type == "cuda"
        torchs = dict(foreach=False, **(dict(capturable=True) if on_device else {}))
        runs = beside_torch(name, torchs=torchs, **options)
        for run in runs:
            plan = schedule(run.opt)
            for _ in range(10):
                run.steps(1)
                plan.step()
        self.assertNear(*runs, 2e-6)
        self.assertEqual(*(float(run.opt.param_groups[0]["lr"]) for run in runs))

    def test_tensors_written_in_place(self):
        """A hyperparameter that is a tensor counts with the value that it has at the step."""
        beta, beta2 = torch.tensor(0.9), torch.tensor(0.999)
        ours, plain = (Run(dtype=FP32, betas=x, **WIDE) for x in ((beta, beta2), (0.9, float(beta2))))
        for value in (0.9, 0.5, 0.5, 0.7):
            beta.fill_(value)
            plain.opt.param_groups[0]["betas"] = float(beta), float(beta2)
            ours.steps(1), plain.steps(1)
        self.assertEqual(distance(ours, plain), 0)


class AsAnOptimizer(Case):
    def test_closure(self):
        run = ModelRun()

        def closure():
            self.assertTrue(torch.is_grad_enabled())
            run.opt.zero_grad()
            loss = run.loss(3)
            loss.backward()
            return loss

        self.assertTrue(run.opt.step(closure).requires_grad)
        self.assertSame(run.weights(), ModelRun().steps(1, first=3).weights())

    def test_hooks(self):
        run, seen = Run(st.SGD, FP32), []
        opt = run.opt
        opt.register_step_pre_hook(lambda o, args, kwargs: seen.append("pre"))
        opt.register_step_post_hook(lambda o, args, kwargs: seen.append("post"))
        opt.register_state_dict_pre_hook(lambda o: seen.append("save"))
        opt.register_state_dict_post_hook(lambda o, made: dict(made, note=1))
        opt.register_load_state_dict_pre_hook(lambda o, made: seen.append("load") or dict(made))
        opt.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
        saved = run.steps(1).opt.state_dict()
        self.assertEqual(saved["note"], 1)
        opt.load_state_dict(saved)
        self.assertEqual(seen, ["pre", "post", "save", "load", "loaded"])

    def test_a_step_that_is_watched(self):
        """By hooks for all optimizers, by one of its own, by a profiler; and the same step if by none."""
        run, seen = Run(st.SGD, FP32).steps(1), []
        of_all = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
        for register in (*of_all, run.opt.register_step_pre_hook, run.opt.register_step_post_hook):
            handle = register(lambda o, args, kwargs: seen.append(o))
            run.steps(1)
            handle.remove()
            run.steps(1)
            self.assertEqual(seen, [run.opt], register)
            seen.clear()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
            run.steps(1)
        self.assertIn("Optimizer.step#SGD.step", [event.key for event in found.key_averages()])
        self.assertEqual(run.opt.state[run.params[0]]["step"], 10)

    def test_zero_grad(self):
        run = Run(dtype=FP32)
        give_gradients(run.params, 0)
        run.opt.zero_grad(set_to_none=False)
        self.assertTrue(all(not p.grad.any() for p in run.params))
        run.opt.zero_grad()
        self.assertTrue(all(p.grad is None for p in run.params))
        before = copies(run.params)
        self.assertIsNone(run.opt.step())
        self.assertSame(run.params, before)
        self.assertEqual(len(run.opt.state), 0)

    def copies(self, make_copy, options):
        run = Run(**options).steps(3)
        twin = make_copy(run)
        self.assertIsNot(twin.params[0], run.params[0])
        self.assertAlike(run, twin)
        twin.steps(3)
        self.assertEqual(run.counts(), {3})
        self.assertAlike(run.steps(3), twin)

    @each(storage=STORAGE)
    def test_deepcopy(self, storage):
        self.copies(copy.deepcopy, storage)

    @each(storage=STORAGE)
    def test_pickle(self, storage):
        self.copies(lambda run: pickle.loads(pickle.dumps(run)), storage)

    @each(storage=STORAGE)
    def test_torch_save_of_the_optimizer(self, storage):
        def through_a_file(run):
            file = io.BytesIO()
            torch.save(run, file)
            file.seek(0)
            return torch.load(file, weights_only=False)

        self.copies(through_a_file, storage)

    def test_weights_are_marked_as_changed(self):
        """Autograd must see that a step has changed what it saved, as it does with torch's optimizers."""
        w, x = parameter(3, 3), tensor(2, 3).requires_grad_()
        opt = st.SGD([w], lr=0.1)
        y = (x @ w).sum()
        y.backward(retain_graph=True)
        opt.step()
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            y.backward()


class Compiled(Case):
    def run_steps(self, backend=None, what=None):
        """Weights and state after four steps; `what` is compiled."""
        torch._dynamo.reset()
        run = ModelRun()
        take = torch.compile(run.opt.step, backend=backend) if what == "step" else run.opt.step

        def train(step):
            run.opt.zero_grad()
            loss_of(run.model, step).backward()
            take()

        if what == "train":
            train = torch.compile(train, backend=backend)
        for step in range(4):
            train(step)
        return run

    @each(backend=("eager", "aot_eager"), what=("step", "train"))
    def test_same_bits(self, backend, what):
        self.assertAlike(self.run_steps(backend, what), self.run_steps())

    def test_by_the_default_backend(self):
        """The step alone: gradients of a model that the compiler has fused have other bits."""
        self.assertAlike(self.run_steps("inductor", "step"), self.run_steps())


class Package(Case):
    def python(self, *words, **environment):
        return subprocess.run(
            [sys.executable, "-c", *words], capture_output=True, text=True, env={**os.environ, **environment}
        )

    def test_import_without_torch(self):
        code = (
            "import sys, scruple\n"
            "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
            "assert {f.name for f in scruple.formats()} >= {'fp32', 'bf16+8', 'companded8', 'flash8'}\n"
            "assert set(scruple.recipes()) >= {'fp32', 'mixed', 'split', 'flash', 'scruple', 'scant'}\n"
            "assert set(scruple.rules()) >= {'sgd', 'sgdw', 'adam', 'adamw', 'lion', 'rmsprop'}\n"
            "assert scruple.engines()['cpu-baseline'] is None\n"
            "assert 'torch' not in sys.modules, 'listing imported torch'\n"
            "print(scruple.version())\n"
        )
        done = self.python(code)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"^\d+\.\d+\.\d+$")

    def test_a_library_that_is_not_there(self):
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            done = self.python("import scruple; scruple.formats()", SCRUPLE_LIBRARY=file.name)
        self.assertIn("cannot be used as libscruple", done.stderr)

    def test_structs_are_the_compilers(self):
        """Size and offsets of every struct, as a C compiler lays them out. A nested struct's fields have
        other names there (memory.alloc is alloc here)."""
        cc = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        header = pathlib.Path(__file__).resolve().parents[2] / "include" / "scruple" / "scruple.h"
        if cc is None or not header.exists():
            self.skipTest("no C compiler, or no header")
        # A struct of the package has the C name of its own in snake_case, but these.
        of_checkpoints = {
            "StoredArray": "array",
            "StoredTensor": "tensor",
            **{name: name.lower() for name in ("Plane", "Hyper", "Group", "Scale", "Note", "Contents")},
        }
        structs = {}
        for name, kind in vars(_abi).items():
            if isinstance(kind, type) and issubclass(kind, ctypes.Structure) and kind is not ctypes.Structure:
                words = re.sub(r"(?<=.)([A-Z])", r"_\1", name).lower()
                where = f"checkpoint_{of_checkpoints[name]}" if name in of_checkpoints else words
                structs[f"scruple_{where}"] = kind
        self.assertEqual(len(structs), 23)
        nested = {
            "scruple_sink_options": {
                "memory_context": "memory.context",
                "alloc": "memory.alloc",
                "free": "memory.free",
                "reduce_context": "reduce.context",
                "reduce": "reduce.add",
            }
        }
        lines = []
        for c_name, struct in structs.items():
            lines.append(f'printf("%zu\\n", sizeof({c_name}));')
            lines += [
                f'printf("%zu\\n", offsetof({c_name}, {nested.get(c_name, {}).get(field, field)}));'
                for field, *_ in struct._fields_
            ]
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder, "layout.c")
            head = f'#include <stddef.h>\n#include <stdio.h>\n#include "{header}"\nint main(void) {{\n'
            source.write_text(head + "\n".join(lines) + "\nreturn 0; }\n")
            subprocess.run([cc, "-o", folder + "/layout", str(source)], check=True)
            said = subprocess.run([folder + "/layout"], capture_output=True, text=True, check=True).stdout
        numbers = iter(map(int, said.split()))
        for c_name, struct in structs.items():
            self.assertEqual(ctypes.sizeof(struct), next(numbers), f"sizeof {c_name}")
            for field, *_ in struct._fields_:
                self.assertEqual(getattr(struct, field).offset, next(numbers), f"{c_name}.{field}")


if __name__ == "__main__":
    unittest.main()
