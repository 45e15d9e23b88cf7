"""What the tests of scruple.torch share: the device, small models, fixed gradients, runs, and exact comparisons.

SCRUPLE_TEST_DEVICE names the device (cpu where it is not set).
"""

import contextlib
import copy
import functools
import itertools
import os
import unittest

import torch

import scruple
from scruple import torch as st
from scruple.torch import table

DEVICE = torch.device(os.environ.get("SCRUPLE_TEST_DEVICE", "cpu"))
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
cuda_only = unittest.skipUnless(DEVICE.type == "cuda", "needs a GPU: run with SCRUPLE_TEST_DEVICE=cuda")

if DEVICE.type == "cpu":
    torch.set_num_threads(1)  # small models: threads only wait for each other

# Every way of storing state, and its options. lpmm's weights are integers, which a torch parameter cannot
# hold.
STORAGE = {
    "fp32": dict(recipe="fp32"),
    "mixed": dict(recipe="mixed"),
    "split": dict(recipe="split"),
    "flash": dict(recipe="flash"),
    "scruple": dict(recipe="scruple"),
    "scant": dict(recipe="scant"),
    "stochastic": dict(recipe="scruple", rounding="stochastic", seed=7),
    "bf16 stochastic": dict(recipe="scruple", weights="bf16", rounding="stochastic", seed=8),
    "odd": dict(recipe="scruple", weights="bf16+5", moments={"exp_avg": "nf4", "exp_avg_sq": "log4"}),
}
# Torch's table of functions that show a tensor to C, and none, as older versions are.
EXCHANGES = {"C": table._exchange, "Python": None}

WIDE = dict(recipe="fp32")
# Every optimizer class of the package.
KINDS = [
    kind
    for kind in map(vars(st).get, st.__all__)
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
]


def each(**tables):
    """Runs a test once for every combination of its cases, each a subTest. The labels are the keys of a dict, or
    the cases themselves."""

    def labelled(table):
        if isinstance(table, dict):
            return table.items()
        return [(getattr(case, "__name__", case), case) for case in table]

    def decorate(test):
        @functools.wraps(test)
        def run(self):
            for row in itertools.product(*map(labelled, tables.values())):
                with self.subTest(**{name: label for name, (label, _) in zip(tables, row)}):
                    test(self, **{name: case for name, (_, case) in zip(tables, row)})

        return run

    return decorate


def stored(options, dtype):
    """These options for parameters of another dtype than bf16."""
    weights = {torch.float32: "fp32", torch.float16: options.get("weights", "").replace("bf16", "fp16")}
    return {**options, "weights": weights[dtype]} if "weights" in options and dtype in weights else options


def tensor(*shape, seed=0, scale=1.0, dtype=torch.float32):
    """Normal numbers that are the same on every device."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return made.to(dtype).to(DEVICE)


def parameter(*shape, seed=0, scale=1.0, dtype=torch.float32):
    return torch.nn.Parameter(tensor(*shape, seed=seed, scale=scale, dtype=dtype))


def parameters(dtype=torch.float32, shapes=((33, 7), (130,), (), (4, 3, 2, 2)), seed=0):
    """Shapes around the edges of groups, a scalar among them."""
    return [parameter(*shape, seed=seed + i, dtype=dtype) for i, shape in enumerate(shapes)]


def give_gradients(params, step, scale=1.0):
    """Gradients that depend on the step and the parameter's place alone."""
    for i, p in enumerate(params):
        g = tensor(*p.shape, seed=1000 * step + i + 1, scale=scale).to(p.dtype)
        # As autograd does it: in the parameter's own order of memory.
        p.grad = torch.empty_like(p).copy_(g)


def take_steps(opt, params, steps, first=0, scale=1.0):
    for step in range(first, first + steps):
        give_gradients(params, step, scale)
        opt.step()


def copies(params, dtype=None, device=None):
    """New parameters with the same values."""
    return [torch.nn.Parameter(p.detach().to(device, dtype or p.dtype, copy=True)) for p in params]


def mlp(dtype=torch.float32, seed=0, width=24, inputs=12, outputs=5):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = torch.nn.Sequential(
            torch.nn.Linear(inputs, width),
            torch.nn.Tanh(),
            torch.nn.Linear(width, width),
            torch.nn.LayerNorm(width),
            torch.nn.GELU(),
            torch.nn.Linear(width, outputs),
        )
    return made.to(DEVICE, dtype)


def loss_of(model, step, rows=16):
    """A loss on a batch that depends on the step alone."""
    p = next(model.parameters())
    x = tensor(rows, 12, seed=500 + step).to(p.dtype)
    target = tensor(rows, 5, seed=9000 + step).to(p.dtype)
    return torch.nn.functional.mse_loss(model(x).float(), target.float())


class Run:
    """An optimizer over parameters, or over a model, and the steps that it has taken. Fixed gradients, or losses on
    fixed batches, depend on the step alone: runs of the same steps end alike (Case.assertAlike)."""

    def __init__(self, kind=st.AdamW, dtype=BF16, params=None, model=None, release=None, lr=1e-2, **options):
        self.model, self.handle, self.taken = model, None, 0
        if params is None:
            params = parameters(dtype) if model is None else model.parameters()
        self.params = list(params)
        self.opt = (getattr(st, kind) if isinstance(kind, str) else kind)(self.params, lr=lr, **options)
        if release is not None:
            self.release(**release)

    def release(self, **how):
        self.handle = st.release_gradients(self.model, self.opt, **how)
        return self

    def loss(self, step=None):
        return loss_of(self.model, self.taken if step is None else step)

    def step(self, **how):
        """opt.step(), where the gradients have come."""
        self.opt.step(**how)
        self.opt.zero_grad()
        self.taken += 1

    def steps(self, count=1, first=None, scale=1.0, **how):
        self.taken = self.taken if first is None else first
        for _ in range(count):
            if self.model is None:
                give_gradients(self.params, self.taken, scale)
                self.opt.step(**how)
                self.taken += 1
            else:
                self.loss().backward()
                self.step(**how)
        return self

    def copied(self, kind=None, dtype=None, lr=0.5, **options):
        """Another optimizer, without state, over copies of the parameters."""
        made = Run(kind or type(self.opt), params=copies(self.params, dtype), lr=lr, **options)
        made.taken = self.taken
        return made

    def resumed(self, kind=None, state=None, **options):
        """The same with this one's state, from which its hyperparameters come."""
        made = self.copied(kind, **options)
        made.opt.load_state_dict(copy.deepcopy(self.opt.state_dict() if state is None else state))
        return made

    def counts(self):
        """The numbers of steps that the parameters have taken."""
        return {int(state["step"]) for state in self.opt.state_dict()["state"].values()}

    def weights(self):
        return [p.detach() for p in self.params]

    def picture(self):
        return picture(self.opt, self.model)


class ModelRun(Run):
    """The same over a small model of its own."""

    def __init__(self, kind=st.AdamW, dtype=BF16, model=None, seed=0, **options):
        super().__init__(kind, model=mlp(dtype, seed) if model is None else model, **options)


def beside_torch(name, dtype=FP32, recipe="fp32", torchs={}, **options):
    """Ours, and torch's optimizer of that name, over the same parameters."""
    theirs = Run(getattr(torch.optim, name), dtype, **copy.deepcopy(options), **torchs)
    return Run(name, dtype, recipe=recipe, **options), theirs


def follow(first, *others, steps, scale=1.0):
    """Steps of several runs with the gradients of the first, as its dtype has rounded them."""
    for _ in range(steps):
        give_gradients(first.params, first.taken, scale)
        for run in others:
            for p, q in zip(first.params, run.params):
                q.grad = p.grad.to(q.device, q.dtype)
        for run in (first, *others):
            run.opt.step()
            run.taken += 1


def tensors_of(x):
    """What is compared of a run, a model, or tensors."""
    return x.params if isinstance(x, Run) else x.parameters() if isinstance(x, torch.nn.Module) else x


def distance(a, b, order=torch.inf):
    """The largest difference between two runs, models or lists of tensors; or another norm of it."""
    off = [
        (x.detach().double() - y.detach().double()).reshape(-1) for x, y in zip(tensors_of(a), tensors_of(b))
    ]
    return float(torch.cat(off).norm(order))


def bits(x):
    """A tensor's bytes: NaN equals NaN and -0 differs from 0."""
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def same(a, b):
    """Equal to the bit, through dicts and lists."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def picture(opt, model=None):
    """Everything an optimizer holds, to compare with later."""
    held = {"state": opt.state_dict(), "weights": [p.detach() for g in opt.param_groups for p in g["params"]]}
    if model is not None:
        held["model"] = model.state_dict()
    return copy.deepcopy(held)


class Case(unittest.TestCase):
    def assertSame(self, a, b, message=None):
        self.assertTrue(same(a, b), message or "the bits differ")

    def assertAlike(self, a, b, message=None):
        """Two runs: all that their optimizers and models hold, to the bit."""
        self.assertSame(a.picture(), b.picture(), message)

    def assertNear(self, a, b, limit, message=None):
        self.assertLess(distance(a, b), limit, message)

    @contextlib.contextmanager
    def refused(self, *words, kind=scruple.UsageError):
        """Expects an error that is a ValueError and whose message has these words."""
        with self.assertRaises(kind, msg=f"expected an error with {words}") as found:
            yield
        if kind is scruple.UsageError:
            self.assertIsInstance(found.exception, ValueError)
        for word in words:
            self.assertIn(word, str(found.exception))

    @contextlib.contextmanager
    def refused_unchanged(self, opt, *words, model=None, kind=scruple.UsageError):
        """The same, and nothing of the optimizer (or run) and the model may have changed."""
        opt, model = (opt.opt, opt.model) if isinstance(opt, Run) else (opt, model)
        before = picture(opt, model)
        with self.refused(*words, kind=kind):
            yield
        self.assertSame(before, picture(opt, model), "the error left a change behind")
