"""PyTorch's own tests of optimizers, with our classes in the list that they run over.

torch's wheel carries the list (torch.testing._internal.common_optimizers.optim_db: options, what must be
refused, schedulers) but not the tests, which are written anew here by what they assert. Each becomes one test
per optimizer and variant: recipes fp32 and scruple, and torch's own class, which shows that the test itself
is right. Recipe fp32 follows torch's numbers; scruple, whose moments have 8 bits, has the same properties.
"""

import collections
import contextlib
import copy
import functools
import gc
import io
import itertools
import pickle
import sys
import types
import unittest
import warnings
import weakref

import torch
from torch.optim import lr_scheduler as schedulers
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from support import DEVICE, Case, give_gradients, loss_of, parameter, parameters, picture, st, tensor

try:
    import expecttest  # noqa: F401
except ImportError:  # the base of torch's test classes, none of which is used here
    sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)
try:
    from torch.testing._internal import common_optimizers as listed
except ImportError as problem:
    print(f"torch's list of optimizers cannot be imported: {problem}")
    sys.exit(77)

SWITCHES = {"foreach", "fused", "differentiable"}
# Those of torch's tests that do not apply, and why: nothing but these four reasons.
REASONS = ("differentiable", "sparse", "foreach and fused", "float64")
INAPPLICABLE = {
    "TestDifferentiableOptimizer": "differentiable: a step runs outside autograd; refused at construction",
    "rosenbrock_sparse": "sparse: such gradients are refused; its dense half is test_rosenbrock",
    "peak_memory_foreach": "foreach and fused: the switches change nothing",
    "foreach_large_tensor": "foreach and fused: the switches change nothing",
    "fused_large_tensor": "foreach and fused: the switches change nothing",
    "defaults_changed_to_foreach": "foreach and fused: there is one implementation",
    "errors of options beside a switch": "foreach and fused: what torch refuses beside one works here",
    "foreach_matches_forloop, in float64": "float64: refused where it trains; the other dtypes are here",
}
# All of TestOptimRenewed.
TORCHS_TESTS = """
can_load_from_to_named_state_dict can_load_older_state_dict complex complex_2d cpu_load_state_dict
deepcopy_copies_all_public_attrs defaults_changed_to_foreach errors foreach_large_tensor
foreach_matches_forloop forloop_goes_right_direction forloop_goes_right_direction_multigpu
fused_cpu_matches_cuda fused_does_not_step_if_foundinf fused_error_on_params_on_meta fused_large_tensor
fused_matches_forloop grad_scaling_autocast_fused_optimizers load_nontensor_step load_state_dict_post_hook
load_state_dict_pre_hook_and_prepend load_state_dict_pre_post_hook mixed_device_dtype non_empty_state
optim_infos_do_not_specify_global_cliquey_kwargs optimizer_can_be_printed
param_group_with_lrscheduler_goes_right_direction param_groups_lr param_groups_weight_decay
peak_memory_foreach rosenbrock_sparse save_load_equality_with_weights_only
second_order_optims_return_consistent_types set_default_dtype_works_with_foreach state_dict_deterministic
state_dict_post_hook state_dict_pre_hook state_dict_pre_post_hook state_dict_with_cuda_params step_all_hooks
step_is_noop_for_zero_grads step_is_noop_when_params_have_no_grad step_post_hook step_pre_hook tensor_lr
""".split()
COVERED = set()


# ---- Our classes in torch's list ----


def info_of(kind, *kwargs):
    """An entry for a class that torch has not."""
    given = [listed.OptimizerInput(None, options, str(options)) for options in kwargs]
    return listed.OptimizerInfo(
        kind,
        optim_inputs_func=lambda device, dtype=None: copy.deepcopy(given),
        optim_error_inputs_func=listed.get_error_inputs_for_all_optims,
    )


def entry(info, recipe):
    """torch's entry with our class of that name in it; as it is where the recipe is "torch"."""
    made = copy.copy(info)
    made.recipe, made.ours, made.of_torch = recipe, recipe != "torch", getattr(torch.optim, info.name, None)
    if made.ours:
        made.optim_cls = functools.partial(getattr(st, info.name), recipe=recipe)
        made.optim_cls.__name__ = info.name
    return made


NEW = [
    info_of(st.Lion, {}, {"weight_decay": 0.1}, {"maximize": True}, {"betas": (0.8, 0.9), "lr": 1e-3}),
    info_of(st.SGDW, {}, {"momentum": 0.9, "nesterov": True}, {"maximize": True, "weight_decay": 0}),
]
ENTRIES = [
    entry(info, recipe)
    for info, recipe in itertools.product(listed.optim_db + NEW, ("fp32", "scruple", "torch"))
    if hasattr(st, info.name) and (info not in NEW or recipe != "torch")
]


class Make:
    """Makes an entry's optimizer with one of its configurations; `of_torch` makes torch's beside it."""

    def __init__(self, info, kwargs):
        self.info, self.ours, self.kwargs = info, info.ours, kwargs
        self.counts = info.name not in ("SGD", "SGDW")  # whether torch would keep a step count

    def __call__(self, params, **more):
        return self.info.optim_cls(params, **{**copy.deepcopy(self.kwargs), **more})

    def of_torch(self, params, **more):
        kwargs = {**copy.deepcopy(self.kwargs), **more, "foreach": False}
        return self.info.of_torch(params, **kwargs)


def over(which, covers=""):
    """Runs a test over "each" configuration of every entry, or with the "default" alone. `covers`: torch's
    tests that it stands for, beside the one of its own name."""

    def mark(test):
        test.which = which
        COVERED.update({test.__name__.removeprefix("test_"), *covers.split()})
        return test

    return mark


def for_optim_db(cls):
    """Makes test_x_<optimizer>_<recipe> of each test_x, for every entry."""

    def bind(test, info):
        def run(self):
            configurations = info.optim_inputs_func(device=DEVICE.type)
            for given in configurations[: 1 if test.which == "default" else None]:
                with self.subTest(given.desc):
                    test(self, Make(info, given.kwargs))

        return run

    for name, test in list(vars(cls).items()):
        if hasattr(test, "which"):
            delattr(cls, name)
            for info in ENTRIES:
                setattr(cls, f"{name}_{info.name}_{info.recipe}", bind(test, info))
    return cls


# ---- What the tests share ----


class Line:
    """A weight, a bias, and the sum of squares of what they make of one input: torch's sample."""

    def __init__(self, contiguous=True, devices=(DEVICE, DEVICE)):
        views = tensor(10, 5, 2)[..., 0], tensor(10, 2, seed=1)[..., 0]
        views = [(x.contiguous() if contiguous else x).to(where) for x, where in zip(views, devices)]
        self.params, self.x = list(map(torch.nn.Parameter, views)), tensor(5, seed=2).to(devices[0])

    def named(self, wanted=True):
        return list(zip(("weight", "bias"), self.params)) if wanted else self.params

    def loss(self):
        weight, bias = self.params
        return (weight.mv(self.x).to(bias.device) + bias).pow(2).sum()

    def backward(self, opt):
        opt.zero_grad()
        loss = self.loss()
        loss.backward()
        return loss

    def train(self, opt, steps=3, plans=()):
        for _ in range(steps):
            loss = self.backward(opt)
            opt.step()
            advance(plans, loss)
        return self.params

    def like(self, other):
        for p, q in zip(self.params, other.params):
            p.data.copy_(q.data)
        return self


def trained(make, steps=3, named=False, **options):
    line = Line()
    opt = make(line.named(named), **options)
    line.train(opt, steps)
    return line, opt


def advance(plans, loss):
    for plan in plans:
        plan.step(*[loss] if isinstance(plan, schedulers.ReduceLROnPlateau) else [])


def near(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6, check_dtype=False, check_device=False)


class OptimCase(Case):
    def beside(self, make, drive):
        """What drive(make) gives; with recipe fp32 it is what torch's optimizer gives."""
        found = drive(make)
        if make.info.recipe == "fp32" and make.info.of_torch:
            near(found, drive(make.of_torch))
        return found

    def agree(self, make, a, b):
        """Two of ours to the bit, two of torch's nearly."""
        if make.ours:
            self.assertSame(a, b)
        else:
            near(a, b)

    def moved(self, make, line, before):
        check = self.assertGreater if make.kwargs.get("maximize") else self.assertLess
        check(line.loss().item(), before)

    def needs(self, what, there):
        if not there:
            self.skipTest(f"needs {what}")


# ---- TestOptimRenewed ----


@for_optim_db
class Steps(OptimCase):
    @over("default", "optim_infos_do_not_specify_global_cliquey_kwargs")
    def test_errors(self, make):
        for given in make.info.optim_inputs_func(device=DEVICE.type):
            self.assertTrue(SWITCHES.isdisjoint(given.kwargs))
        p = parameter(2)
        opt = make([p])
        two = make([{"params": [parameter(3)]}, {"params": [parameter(4)]}]).state_dict()
        table = [
            ("no parameters", ValueError, lambda: make([])),
            ("no tensor", TypeError, lambda: make([1.0])),
            ("no leaf", ValueError, lambda: make([p * 2])),
            ("no group", TypeError, lambda: opt.add_param_group([parameter(1)])),
            ("a set", TypeError, lambda: opt.add_param_group({"params": {parameter(1)}})),
            ("twice", ValueError, lambda: opt.add_param_group({"params": [p]})),
            ("other groups", ValueError, lambda: opt.load_state_dict(two)),
            ("other sizes", ValueError, lambda: make([p, parameter(3)]).load_state_dict(opt.state_dict())),
        ]
        for error in make.info.optim_error_inputs_func(device=DEVICE.type, dtype=torch.float32):
            given = error.optimizer_error_input
            if not make.ours or SWITCHES.isdisjoint(given.kwargs):  # INAPPLICABLE
                call = functools.partial(make.info.optim_cls, given.params, **given.kwargs)
                table.append((given.desc, error.error_type, call))
        for label, kind, call in table:
            expect = self.assertWarns if issubclass(kind, Warning) else self.assertRaises
            with self.subTest(label), expect(kind):
                call()

    @over(
        "each",
        "forloop_goes_right_direction forloop_goes_right_direction_multigpu "
        "param_group_with_lrscheduler_goes_right_direction param_groups_weight_decay",
    )
    def test_goes_right_direction(self, make):
        """Strides, groups, schedulers; over two GPUs where there are."""
        places = [(DEVICE, DEVICE)] + [("cuda:0", "cuda:1")] * (torch.cuda.device_count() > 1)
        groups = (True, {}), (False, {}), (True, {"lr": 0.01}), (False, {"weight_decay": 0.0})
        runs = [((), *group) for group in groups]
        runs += [(plans, *groups[1 + i % 2]) for i, plans in enumerate(make.info.scheduler_inputs)]
        for (plans, contiguous, own), devices in itertools.product(runs, places):

            def drive(kind):
                line = Line(contiguous, devices)
                opt = kind([{"params": line.params[:1]}, {"params": line.params[1:], **own}])
                before = line.loss().item()
                line.train(opt, 20, [plan(opt) for plan in plans])
                self.moved(make, line, before)
                return line.params

            self.beside(make, drive)

    @over("each")
    def test_param_groups_lr(self, make):
        line, still = Line(), parameter(2, seed=5)
        options = {**copy.deepcopy(make.kwargs), "lr": make.kwargs.get("lr") or 1e-3}
        opt = make([{"params": line.params, **options}, {"params": [still]}], lr=1e-28)
        before, was = line.loss().item(), still.detach().clone()
        for _ in range(20):
            line.backward(opt)
            still.grad = torch.ones_like(still)
            opt.step()
        self.moved(make, line, before)
        self.assertSame(still.detach(), was)

    @over("each")
    def test_tensor_lr(self, make):
        """And, where there are betas, those: the bits of the numbers, which are the same in fp32."""
        plain, tensors = {"lr": 2.0**-10}, {"lr": torch.tensor(2.0**-10)}
        if make.ours and "betas" in make([parameter(1)]).defaults:  # torch 2.6's Adam does not
            plain["betas"] = 0.875, 0.96875
            tensors["betas"] = torch.tensor(0.875), torch.tensor([[0.96875]])
        self.agree(make, trained(make, **plain)[0].params, trained(make, **tensors)[0].params)

    @over("each")
    def test_rosenbrock(self, make):
        """One coordinate of the gradient in each step, as torch's test of sparse ones has it."""
        self.needs("its options in torch's list", make.info.supports_sparse)
        options, some = make.info.metadata_for_sparse
        start, odd = torch.full((2,), 1.5, device=DEVICE), torch.tensor([1.0, 0.0], device=DEVICE)

        def rosenbrock(p):
            return (1 - p[0]) ** 2 + 100 * (p[1] - p[0] ** 2) ** 2

        for plans in ([], some):

            def drive(kind):
                p = torch.nn.Parameter(start.clone())
                opt = kind([p], **{**options, "maximize": False})
                made = [plan(opt) for plan in plans]
                for step in range(60):
                    opt.zero_grad()
                    loss = rosenbrock(p)
                    loss.backward()
                    p.grad *= odd if step % 2 else 1 - odd
                    opt.step()
                    advance(made, loss)
                self.assertLess(rosenbrock(p).item(), rosenbrock(start).item())
                return p

            self.beside(make, drive)

    @over("each", "complex_2d")
    def test_complex(self, make):
        """Refused where it trains, with a way that works: real and imaginary parts as a real parameter."""
        self.needs("one of ours", make.ours)
        z = torch.view_as_complex(tensor(10, 2)).requires_grad_()
        with self.refused("view_as_real"):
            make([z])
        make([z.detach(), parameter(2)])  # frozen

        def drive(kind):
            made = z.detach().clone() if kind == make.of_torch else torch.view_as_real(z.detach().clone())
            opt = kind([made.requires_grad_()])
            for step in range(3):
                g = tensor(10, 2, seed=step)
                made.grad = torch.view_as_complex(g) if made.is_complex() else g
                opt.step()
            return torch.view_as_real(made.detach()) if made.is_complex() else made.detach()

        self.beside(make, drive)

    def switched(self, make, dtype, **switch):
        """A layer that is frozen for two steps, a step without gradients, a scalar parameter."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Sigmoid(), torch.nn.Linear(3, 1))
        model, alone = model.to(DEVICE, dtype), parameter(dtype=dtype)
        opt = make([*model.parameters(), alone], **switch)
        x = torch.linspace(0.1, 0.6, 6, device=DEVICE).to(dtype).view(3, 2)
        for step in range(7):
            opt.zero_grad()
            model[2].requires_grad_(step not in (3, 4))
            if step != 2:
                model(x).sum().backward()
                alone.grad = torch.ones_like(alone)
            opt.step()
        params = [p.detach() for p in opt.param_groups[0]["params"]]
        return params, [dict(opt.state[p]) for p in opt.param_groups[0]["params"]]

    @over("each", "foreach_matches_forloop fused_matches_forloop")
    def test_switches_change_nothing(self, make):
        for switch in ("foreach", "fused"):
            for dtype in (torch.float32, torch.bfloat16, torch.float16)[: None if make.ours else 1]:
                theirs = make.info.supported_impls if not make.ours else ()
                if switch == "fused" and DEVICE.type not in getattr(make.info, "supports_fused_on", ()):
                    theirs = ()
                if make.ours or switch in theirs:
                    with self.subTest(switch, dtype=dtype):
                        self.agree(make, *(self.switched(make, dtype, **{switch: x}) for x in (False, True)))

    @over("default")
    def test_set_default_dtype_works_with_foreach(self, make):
        self.addCleanup(torch.set_default_dtype, torch.get_default_dtype())
        for dtype, of_step in ((torch.float64, torch.float64), (torch.float16, torch.float32)):
            torch.set_default_dtype(dtype)
            one, two = (self.switched(make, torch.float32, foreach=x) for x in (False, True))
            self.agree(make, one, two)
            for state in one[1] if make.counts else ():
                self.assertEqual(state["step"].dtype, of_step)

    @over("each")
    def test_mixed_device_dtype(self, make):
        """Parameters of 32 and 16 bits in one group: each as in an optimizer of its own."""
        dtypes = (torch.float32, torch.float16, torch.bfloat16)
        if not make.ours:
            return

        def drive(kind, dtypes, **switch):
            ps = [parameter(2, 3, dtype=dtype) for dtype in dtypes]
            opt = kind(ps, **switch)
            for step in range(3):
                for p in ps:
                    p.grad = tensor(2, 3, seed=step, dtype=p.dtype)
                opt.step()
            return ps

        self.assertSame(drive(make, dtypes), drive(make, dtypes, foreach=True))
        self.assertSame(drive(make, dtypes)[0], drive(make, dtypes[:1])[0])
        self.beside(make, lambda kind: drive(kind, dtypes[:1]))

    @over("default")
    def test_fused_error_on_params_on_meta(self, make):
        """Accepted; a gradient there is an error in the step."""
        self.needs("a fused implementation", make.ours or DEVICE.type in make.info.supports_fused_on)
        p = torch.nn.Parameter(torch.empty(3, device="meta"))
        opt = make([p], fused=True)
        opt.step()
        p.grad = torch.empty_like(p)
        with self.assertRaises((RuntimeError, ValueError)):
            opt.step()
        opt.zero_grad()
        opt.step()

    @over("each", "second_order_optims_return_consistent_types")
    def test_step_is_noop_when_params_have_no_grad(self, make):
        """What the closure returns comes back; inside, gradients can be taken."""
        p, enabled = tensor(2, 3), []
        before, opt, loss = p.clone(), make([p]), torch.ones(1)
        with torch.no_grad():
            self.assertIs(opt.step(lambda: enabled.append(torch.is_grad_enabled()) or loss), loss)
            self.assertEqual(opt.step(closure=lambda: 7), 7)
        self.assertIsNone(opt.step())
        self.assertEqual(enabled, [True])
        self.assertSame(p, before)

    @over("each")
    def test_step_is_noop_for_zero_grads(self, make):
        if make.kwargs.get("weight_decay"):
            return
        p, none = parameter(5, 1), parameter(5, 0)  # and one without elements
        before = p.detach().clone()
        opt = make([p, none], **{"lr": 1e-5} if make.info.name in ("AdamW", "SGDW") else {})  # which decay
        p.grad, none.grad = torch.zeros_like(p), torch.zeros_like(none)
        opt.step(lambda: 1)
        near(p.detach(), before)
        opt.load_state_dict(opt.state_dict())

    @over("each", "optimizer_can_be_printed")
    def test_repr_and_zero_grad(self, make):
        line, opt = trained(make)
        for part in (make.info.name, "Parameter Group 0", "lr:", "weight_decay:"):
            self.assertIn(part, repr(opt))
        opt.zero_grad(set_to_none=False)
        self.assertEqual([p.grad.abs().sum().item() for p in line.params], [0, 0])
        opt.zero_grad()
        self.assertEqual([p.grad for p in line.params], [None, None])

    @over("each", "step_pre_hook step_post_hook step_all_hooks")
    def test_step_hooks(self, make):
        seen, opt, other = [], make([parameter(2)]), torch.optim.SGD([parameter(2)])

        def note(word):
            return lambda opt, args, kwargs: seen.append(word)

        handles = [register_optimizer_step_pre_hook(note(1)), register_optimizer_step_post_hook(note(4))]
        for x in (opt, other):
            handles += [x.register_step_pre_hook(note(2)), x.register_step_post_hook(note(3))]
        try:
            for x in (opt, other, opt):
                x.step()
        finally:
            for handle in handles:
                handle.remove()
        opt.step()
        self.assertEqual(seen, [1, 2, 3, 4] * 3)

    @over("each")
    def test_follows_torch(self, make):
        """Weights, and all that torch keeps, by its names."""
        self.needs("torch's numbers", make.info.of_torch and make.info.recipe == "fp32")
        line, other = Line(), Line()
        ours, theirs = make(line.params), make.of_torch(other.params)
        for _ in range(6):
            near(line.train(ours, 1), other.train(theirs, 1))
            for p, q in zip(line.params, other.params):
                for name, value in theirs.state[q].items():
                    self.assertIsInstance(ours.state[p][name], type(value), name)
                    near(ours.state[p][name], value)


@for_optim_db
class State(OptimCase):
    @over("each")
    def test_non_empty_state(self, make):
        opt = make([parameter(1)])
        self.assertIsInstance(opt.state, collections.defaultdict)
        for state in trained(make)[1].state.values():
            self.assertGreater(len(state), 0)
            if make.counts:
                self.assertIsInstance(state["step"], torch.Tensor)
                self.assertEqual(state["step"], 3)

    @over("default")
    def test_groups_have_torchs_keys(self, make):
        self.needs("one that torch has", make.info.of_torch)
        ours, theirs = make([parameter(2)]), make.of_torch([parameter(2)])
        for mine, its in ((ours.defaults, theirs.defaults), (ours.param_groups[0], theirs.param_groups[0])):
            for key in set(its) - SWITCHES - {"params"}:
                self.assertEqual(mine[key], its[key], key)

    @over("each", "can_load_from_to_named_state_dict")
    def test_state_dict_deterministic(self, make):
        for first, second in itertools.product((False, True), repeat=2):
            line, opt = trained(make, named=first)
            other = Line().like(line)
            twin = make(other.named(second))
            twin.load_state_dict(copy.deepcopy(opt.state_dict()))
            names = twin.state_dict()["param_groups"][0].get("param_names")
            self.assertEqual(names, ["weight", "bias"] if first or second else None)
            self.assertSame(line.train(opt), other.train(twin))
            for group in opt.param_groups + twin.param_groups:
                group.pop("param_names", None)
            self.assertSame(opt.state_dict(), twin.state_dict())
            twin.param_groups.extend(twin.param_groups)  # of repeated parameters the first place counts
            self.assertSame(opt.state_dict()["param_groups"][-1], twin.state_dict()["param_groups"][-1])

    @over("default")
    def test_repeated_parameters(self, make):
        p, q = parameter(2), parameter(3)
        found = []
        for kind in (make, torch.optim.SGD):
            with self.assertWarns(UserWarning):
                opt = kind([p, q, p])
            found.append(opt.state_dict()["param_groups"][0]["params"])
        self.assertEqual(*found)

    @over("each", "can_load_older_state_dict load_nontensor_step")
    def test_older_state_dicts(self, make):
        """Without the options that came later, and with a count that is a number."""
        line, opt = trained(make)
        saved = copy.deepcopy(opt.state_dict())
        for group in saved["param_groups"]:
            for flag in make.info.not_og_supported_flags:
                group.pop(flag, None)
        for state in saved["state"].values():
            state.update({"step": float(state["step"])} if "step" in state else {})
        opt.load_state_dict(saved)
        line.train(opt, 1)
        for state in opt.state.values():
            self.assertEqual(int(state.get("step", 4)), 4)

    @over("each", "deepcopy_copies_all_public_attrs")
    def test_save_load_equality_with_weights_only(self, make):
        for named in (False, True):
            (_, opt), file = trained(make, named=named), io.BytesIO()
            torch.save(opt.state_dict(), file)
            for how in ({}, {"weights_only": True}):
                file.seek(0)
                self.assertSame(torch.load(file, **how), opt.state_dict())
            for twin in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
                self.assertSame(opt.state_dict(), twin.state_dict())
                self.assertEqual(*({k for k in x.__dict__ if k[0] != "_"} for x in (opt, twin)))

    @over("each", "cpu_load_state_dict state_dict_with_cuda_params fused_cpu_matches_cuda")
    def test_from_the_cpu_to_the_device(self, make):
        """Also a state that says fused or capturable. The bits go on as they would on the CPU."""
        self.needs("one of ours", make.ours)
        for dtype, flag in itertools.product(
            (torch.float32, torch.bfloat16, torch.float16), ({}, {"fused": True}, {"capturable": True})
        ):
            p = torch.nn.Parameter(tensor(33, 7, dtype=dtype).cpu())
            opt, grads = make([p]), [tensor(33, 7, seed=x, dtype=dtype).cpu() for x in range(5)]
            p.grad = grads[0]
            opt.step()
            q = torch.nn.Parameter(p.detach().clone().to(DEVICE))
            saved = copy.deepcopy(opt.state_dict())
            saved["param_groups"][0].update(flag)
            given, twin = copy.deepcopy(saved), make([q], **flag)
            twin.load_state_dict(given)
            self.assertSame(given, saved)
            if make.counts and "capturable" not in {**make.kwargs, **flag}:
                self.assertEqual(twin.state[q]["step"].device.type, "cpu")
            for g in grads[1:]:
                p.grad, q.grad = g, g.to(DEVICE)
                opt.step()
                twin.step()
            self.assertSame(p.detach(), q.detach().cpu())

    @over("each", "state_dict_pre_hook state_dict_post_hook state_dict_pre_post_hook")
    def test_state_dict_hooks(self, make):
        opt = make([parameter(2, 3)])
        before = opt.register_state_dict_pre_hook(lambda opt: opt.state.__setitem__("test", 1))
        self.assertEqual(opt.state_dict()["state"]["test"], 1)
        after = opt.register_state_dict_post_hook(lambda opt, made: {"found": made["state"].get("test")})
        self.assertEqual(opt.state_dict(), {"found": 1})
        before.remove()
        opt.state.pop("test")
        self.assertEqual(opt.state_dict(), {"found": None})
        after.remove()
        opt.register_state_dict_post_hook(lambda opt, made: made.update(more=1))
        self.assertEqual(opt.state_dict()["more"], 1)

    @over(
        "each", "load_state_dict_pre_hook_and_prepend load_state_dict_post_hook load_state_dict_pre_post_hook"
    )
    def test_load_state_dict_hooks(self, make):
        opt = make([parameter(2, 3)])

        def change(lr, copied):
            def hook(opt, given):
                given = copy.deepcopy(given) if copied else given
                given["param_groups"][0]["lr"] = lr
                return given if copied else None

            return hook

        opt.register_load_state_dict_post_hook(lambda opt: opt.state.update(seen=opt.param_groups[0]["lr"]))
        for hook, how, expected in (
            (change(0.002, False), {}, 0.002),
            (change(0.003, True), {"prepend": True}, 0.002),
            (change(0.004, True), {}, 0.004),
        ):
            opt.register_load_state_dict_pre_hook(hook, **how)
            opt.load_state_dict(opt.state_dict())
            self.assertEqual(opt.state["seen"], expected)

    @over("each")
    def test_entries_of_the_user(self, make):
        """In the state of a parameter and beside it: saved, loaded, and left alone by steps."""
        line, opt = trained(make)
        opt.state["mine"] = {"a": 1}
        opt.state[line.params[0]].update(mine=torch.ones(3), number=2.5)
        line.train(opt, 1)
        twin = make(line.params)
        twin.load_state_dict(copy.deepcopy(opt.state_dict()))
        for x in (opt, twin):
            line.train(x, 1)
            held = x.state[line.params[0]]
            self.assertEqual(held["mine"].tolist(), [1, 1, 1])
            self.assertEqual((x.state["mine"], held["number"]), ({"a": 1}, 2.5))

    @over("each")
    def test_state_that_is_taken_away(self, make):
        """It begins anew, with the bits of a new optimizer."""
        self.needs("state that a step makes", make.ours or make.info.name != "Adagrad")
        for take in (
            lambda opt, p: opt.state.__setitem__(p, {}),
            lambda opt, p: opt.state.pop(p, None),
            lambda opt, p: opt.state[p].clear(),
        ):
            line, opt = trained(make)
            for p in line.params:
                take(opt, p)
            other = Line().like(line)
            self.assertSame(line.train(opt, 2), other.train(make(other.params), 2))

    @over("each")
    def test_state_that_is_written(self, make):
        """In place or as another tensor: it counts from the next step on."""

        def drive(kind, in_place, factor):
            line, opt = trained(kind)
            for p in line.params:
                for name, value in opt.state[p].items():
                    if torch.is_tensor(value) and (make.counts or name != "step"):
                        new = value * (0 if name == "step" else factor)
                        opt.state[p][name] = value.copy_(new) if in_place else new
            line.train(opt, 2)
            for p in line.params if make.counts else ():
                self.assertEqual(int(opt.state[p]["step"]), 2)
            return line.params

        factor = 0 if make.info.recipe == "scruple" else 4  # codes and scales are no numbers to multiply
        one, two = (self.beside(make, functools.partial(drive, in_place=x, factor=factor)) for x in (0, 1))
        self.assertSame(one, two)

    @over("each")
    def test_states_of_torch(self, make):
        """Loaded, or put into a new optimizer's state: steps go on as torch's do."""
        self.needs("one that torch has", make.info.of_torch)
        for load in (True, False):
            other, theirs = trained(make.of_torch)
            saved, line = copy.deepcopy(theirs.state_dict()), Line().like(other)
            if not saved["state"]:  # SGD's without momentum; once it was this
                saved["state"] = {i: {"momentum_buffer": None} for i in range(2)}
            opt = make(line.params)
            if load:
                opt.load_state_dict(saved)
            else:
                for i, p in enumerate(line.params):
                    opt.state[p] = saved["state"][i]
            line.train(opt, 2)
            if make.info.recipe == "fp32":
                near(line.params, other.train(theirs, 2))
            for p in line.params if make.counts else ():
                self.assertEqual(int(opt.state[p]["step"]), 5)

    @over("default")
    def test_frozen_parameters_of_any_kind(self, make):
        """They are there, count in the order, and have no part in a step."""
        others = [torch.zeros(2, dtype=x, device=DEVICE) for x in (torch.uint8, torch.int64, torch.float64)]
        others = [torch.nn.Parameter(x, requires_grad=False) for x in others]
        others.append(torch.nn.Parameter(torch.zeros(2, device="meta")))
        line = Line()
        params = [*line.params[:1], *others[1:], *line.params[1:]]
        opt, twin = make(params), make(params)
        for x in (opt, twin):
            x.add_param_group({"params": others[:1]})
        line.train(opt)
        twin.load_state_dict(opt.state_dict())
        self.assertEqual(opt.state_dict()["state"].keys(), twin.state_dict()["state"].keys())
        plain = Line()  # in the same places, by which random numbers go
        plain.train(make([plain.params[0], *parameters(shapes=[(2,)] * 3), plain.params[1]]))
        self.assertSame(line.params, plain.params)


# ---- TestLRScheduler ----

s = schedulers
SCHEDULERS = {
    "LambdaLR": lambda o: s.LambdaLR(o, lambda i: 0.9**i),
    "MultiplicativeLR": lambda o: s.MultiplicativeLR(o, lambda i: 0.95),
    "StepLR": lambda o: s.StepLR(o, 3, gamma=0.5),
    "MultiStepLR": lambda o: s.MultiStepLR(o, [2, 5, 9]),
    "ConstantLR": lambda o: s.ConstantLR(o, factor=0.5, total_iters=4),
    "LinearLR": lambda o: s.LinearLR(o, start_factor=0.5, total_iters=4),
    "ExponentialLR": lambda o: s.ExponentialLR(o, gamma=0.9),
    "SequentialLR": lambda o: s.SequentialLR(o, [s.ConstantLR(o, 0.1, 4), s.StepLR(o, 2)], [4]),
    "CosineAnnealingLR": lambda o: s.CosineAnnealingLR(o, 8),
    "ChainedScheduler": lambda o: s.ChainedScheduler([s.LinearLR(o), s.ExponentialLR(o, 0.9)]),
    "ReduceLROnPlateau": lambda o: s.ReduceLROnPlateau(o, patience=0, threshold=0.9),
    "CyclicLR": lambda o: s.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "CyclicLR, lr alone": lambda o: s.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: s.CosineAnnealingWarmRestarts(o, 4),
    "OneCycleLR": lambda o: s.OneCycleLR(o, 0.1, total_steps=12),
    "OneCycleLR, lr alone": lambda o: s.OneCycleLR(o, 0.1, total_steps=12, cycle_momentum=False),
    "PolynomialLR": lambda o: s.PolynomialLR(o, total_iters=8, power=2.0),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=4),
}


def scheduled(kind, make_plan, lr):
    """What a scheduler writes into the groups, step by step, its state, and the parameters."""
    line = Line()
    opt = kind([{"params": line.params[:1]}, {"params": line.params[1:]}], lr=copy.deepcopy(lr))
    keys = set(opt.param_groups[0])
    try:
        plan = make_plan(opt)
    except ValueError as problem:  # no momentum to cycle
        return str(problem), line.params
    seen = []
    for step in range(11):
        line.train(opt, 1, [plan])
        if step == 5:  # another one goes on
            saved, plan = copy.deepcopy(plan.state_dict()), make_plan(opt)
            plan.load_state_dict(saved)
        for group in opt.param_groups:
            written = sorted(group.keys() - keys | {"lr"} | group.keys() & {"momentum"})
            beta1 = float(group["betas"][0]) if "betas" in group else None
            seen.append([type(group["lr"]), beta1, *((key, float(group[key])) for key in written)])
    state = {k: v for k, v in plan.state_dict().items() if k[0] != "_" and not callable(v)}
    return [seen, repr(state)], line.params


@for_optim_db
class Schedulers(OptimCase):
    @over("default")
    def test_lrs_groups_and_states(self, make):
        self.assertGreaterEqual({x.partition(",")[0] for x in SCHEDULERS}, {*s.__all__} - {"LRScheduler"})
        # Those that torch has not have the momentum of these.
        like = {"Lion": torch.optim.Adam, "SGDW": torch.optim.SGD}.get(make.info.name, make.of_torch)
        lrs = (0.02, torch.tensor(0.02))[: None if make.ours else 1]
        for (name, plan), lr in itertools.product(SCHEDULERS.items(), lrs):
            with self.subTest(name, lr=lr):
                (found, params), (expected, theirs) = (scheduled(kind, plan, lr) for kind in (make, like))
                self.assertEqual(found, expected)
                if make.info.recipe == "fp32" and make.info.of_torch:
                    near(params, theirs)

    @over("default")
    def test_warnings_about_the_order(self, make):
        """A scheduler that steps before the optimizer says so."""
        for steps in (0, 1):
            line, opt = trained(make, 0)
            plan = s.StepLR(opt, 3)
            line.train(opt, steps)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                plan.step()
            self.assertEqual(["optimizer.step()" in str(x.message) for x in caught], [True] * (1 - steps))

    @over("default")
    def test_no_cyclic_references(self, make):
        """All go when the last name goes, without the collector."""

        def run():
            line, opt = trained(make)
            plan = s.StepLR(opt, 1)
            line.train(opt, 1, [plan])
            state = next((x for x in opt.state[line.params[0]].values() if torch.is_tensor(x)), opt)
            return list(map(weakref.ref, (opt, plan, line.params[0], state)))

        gc.disable()
        self.addCleanup(gc.enable)
        self.assertEqual([ref() for ref in run()], [None] * 4)

    @over("default")
    def test_groups_added_later(self, make):
        line = Line()
        opt = make(line.params[:1], lr=0.1)
        plan = s.ReduceLROnPlateau(opt, patience=0, factor=0.5)
        opt.add_param_group({"params": line.params[1:], "lr": 0.01})
        for loss in (1.0, 2.0):
            if make.ours or make.info.name != "Adagrad":  # torch 2.11's has no state for these
                line.train(opt, 1)
            plan.step(loss)
        self.assertEqual([group["lr"] for group in opt.param_groups], [0.05, 0.005])


# ---- torch.amp.GradScaler ----


def scaler():
    return torch.amp.GradScaler(DEVICE.type, init_scale=2.0**7, growth_interval=2)


@for_optim_db
class Scaling(OptimCase):
    def begin(self, make, **options):
        line = Line()
        return line, scaler(), make(line.params, **options)

    def scaled(self, opt, line, scale, steps, overflow=(), between=None, under=contextlib.nullcontext()):
        for step in range(steps):
            opt.zero_grad()
            with under:
                loss = line.loss()
            scale.scale(loss).backward()
            if step in overflow:
                line.params[1].grad[3] = float("inf")
            if between:
                between(scale, opt)
            scale.step(opt)
            scale.update()

    @over("each")
    def test_steps_as_without(self, make):
        """Scales are powers of two, so nothing is lost. An overflow skips a step and halves the scale."""

        def clip(scale, opt):
            scale.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(opt.param_groups[0]["params"], 1e9)

        other, plain = trained(make)
        for between in (None, torch.amp.GradScaler.unscale_, clip):
            line, scale, opt = self.begin(make)
            self.scaled(opt, line, scale, 5, (0, 3), between)
            self.agree(make, line.params, other.params)
            self.agree(make, opt.state_dict()["state"], plain.state_dict()["state"])
            self.assertEqual(scale.get_scale(), 2.0**6)  # halved, doubled, halved

    @over("each")
    def test_overflow_leaves_all_as_it_was(self, make):
        line, scale, opt = self.begin(make)
        self.scaled(opt, line, scale, 1, (0,))  # before there is state
        self.assertTrue(all(int(x.get("step", 0)) == 0 for x in opt.state.values()))
        self.scaled(opt, line, scale, 2)
        before = picture(opt)
        self.scaled(opt, line, scale, 1, (0,))
        self.assertSame(before, picture(opt))

    @over("each")
    def test_gradients_are_unscaled_by_the_step(self, make):
        line, scale, opt = self.begin(make)
        line.backward(opt)
        plain = [p.grad.clone() for p in line.params]
        self.scaled(opt, line, scale, 1)
        near([p.grad for p in line.params], plain)

    @over("default")
    def test_order_of_calls(self, make):
        line, scale, opt = self.begin(make)
        scale.scale(line.loss()).backward()
        scale.unscale_(opt)
        for call in (lambda: scale.unscale_(opt), lambda: scale.step(opt, closure=lambda: 1)):
            self.assertRaises(RuntimeError, call)
        scale.step(opt)
        for call in (scale.step, scale.unscale_):
            self.assertRaises(RuntimeError, call, opt)
        scale.update()
        self.scaled(opt, line, scale, 1)

    @over("default")
    def test_several_optimizers(self, make):
        """The one that overflows is skipped, alone."""
        bad, good, alone, scale = Line(), Line(), trained(make, 1)[0], scaler()
        opts = make(bad.params), make(good.params)
        before = copy.deepcopy(bad.params)
        scale.scale(bad.loss() + good.loss()).backward()
        bad.params[0].grad[0, 0] = float("nan")
        for opt in opts:
            scale.step(opt)
        self.assertEqual([float(*scale._found_inf_per_device(x).values()) for x in opts], [1.0, 0.0])
        scale.update()
        self.assertEqual(scale.get_scale(), 2.0**6)
        self.assertSame(bad.params, before)
        self.agree(make, good.params, alone.params)

    @over("each")
    def test_grad_scaling_autocast_fused_optimizers(self, make):
        """Unscaled inside a fused step, or before it."""
        self.needs("a fused implementation", make.ours or DEVICE.type in make.info.supports_fused_on)
        dtype, found = torch.float16 if DEVICE.type == "cuda" else torch.bfloat16, []
        for fused, between in ((True, None), (False, torch.amp.GradScaler.unscale_)):
            line, scale, opt = self.begin(make, fused=fused)
            self.scaled(opt, line, scale, 4, (1,), between, torch.autocast(DEVICE.type, dtype))
            found.append((line.params, scale.state_dict()))
        self.agree(make, *found)

    @over("each")
    def test_fused_does_not_step_if_foundinf(self, make):
        self.needs("a fused implementation", make.ours or DEVICE.type in make.info.supports_fused_on)
        for grad_scale in (None, torch.ones(1, device=DEVICE)):
            ps = parameters()
            before, opt = copy.deepcopy(ps), make(ps, fused=True)
            opt.grad_scale, opt.found_inf = grad_scale, torch.ones((), device=DEVICE)
            give_gradients(ps, 0)
            opt.step()
            self.assertTrue(all(int(opt.state[p].get("step", 0)) == 0 for p in ps))
            self.assertSame(ps, before)


# ---- Models that are called with other parameters than their own ----


@for_optim_db
class Stateless(OptimCase):
    @over("each")
    def test_functional_call(self, make):
        """Gradients of the model's own parameters, of copies, and of torch.func.grad: the same steps."""
        x, y = tensor(8, 3, seed=7), tensor(8, 2, seed=8)

        def drive(kind, way):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = torch.nn.Linear(3, 2).to(DEVICE)
            start = copy.deepcopy(model.state_dict())
            params = {name: p if way == "own" else p.detach().clone() for name, p in model.named_parameters()}
            opt = kind([p.requires_grad_() for p in params.values()])

            def loss_of(params):
                return torch.nn.functional.mse_loss(torch.func.functional_call(model, params, (x,)), y)

            before = loss_of(params).item()
            for _ in range(5):
                opt.zero_grad()
                if way == "func":
                    grads = torch.func.grad(loss_of)({name: p.detach() for name, p in params.items()})
                    for name, p in params.items():
                        p.grad = grads[name]
                else:
                    loss_of(params).backward()
                opt.step()
            self.assertEqual(loss_of(params).item() > before, bool(make.kwargs.get("maximize")))
            if way != "own":
                self.assertSame(start, model.state_dict())
            return [p.detach() for p in params.values()]

        own = self.beside(make, functools.partial(drive, way="own"))
        for way in ("copies", "func"):
            self.assertSame(own, drive(make, way))


class Coverage(Case):
    def test_only_four_things_do_not_apply(self):
        for name, reason in INAPPLICABLE.items():
            self.assertTrue(reason.startswith(REASONS), name)

    def test_every_test_of_torch(self):
        self.assertEqual(set(TORCHS_TESTS) - COVERED, set(TORCHS_TESTS) & set(INAPPLICABLE))

    def test_every_optimizer_of_ours(self):
        kinds = [getattr(st, name) for name in st.__all__]
        ours = {x.__name__ for x in kinds if isinstance(x, type) and issubclass(x, torch.optim.Optimizer)}
        self.assertEqual({info.name for info in ENTRIES}, ours)


if __name__ == "__main__":
    unittest.main()
