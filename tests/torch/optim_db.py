"""PyTorch's own list of optimizers with our classes in it, and what the tests over it share.

torch's wheel carries the list (torch.testing._internal.common_optimizers.optim_db: options, what must be
refused, schedulers) but not the tests, which are written anew in test_optim_db_*.py by what they assert. Each
becomes one test per optimizer and variant: recipes fp32 and scruple, and torch's own class, which shows that the
test itself is right. Recipe fp32 follows torch's numbers; scruple, whose moments have 8 bits, has the same
properties.
"""

import copy
import functools
import itertools
import sys
import types
import unittest

import torch
from torch.optim import lr_scheduler as schedulers

from support import DEVICE, KINDS, Case, st, tensor

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
COVERED = set()  # of torch's tests, by name


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


# Classes that torch has not, with what every optimizer takes; and more options of some.
MORE = {
    st.Lion: [{"betas": (0.8, 0.9), "lr": 1e-3}],
    st.SGDW: [{"momentum": 0.9, "nesterov": True}],
}
NEW = [
    info_of(kind, {}, {"weight_decay": 0.1}, {"maximize": True}, *MORE.get(kind, ()))
    for kind in KINDS
    if not hasattr(torch.optim, kind.__name__)
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
        self.follows = info.of_torch and info.recipe == "fp32"  # whether torch's numbers are expected

    def __call__(self, params, **more):
        return self.info.optim_cls(params, **{**copy.deepcopy(self.kwargs), **more})

    def takes(self, switch):
        """Torch's class may not have that implementation on this device; ours take every switch."""
        here = switch != "fused" or DEVICE.type in self.info.supports_fused_on
        return self.ours or (here and switch in self.info.supported_impls)

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
        if make.follows:
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
