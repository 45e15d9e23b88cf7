"""What the tests of scruple.torch share: the device, small models, fixed gradients, and exact comparisons.

SCRUPLE_TEST_DEVICE names the device (cpu where it is not set).
"""

import copy
import os
import unittest

import torch

import scruple
from scruple import torch as st

DEVICE = torch.device(os.environ.get("SCRUPLE_TEST_DEVICE", "cpu"))
cuda_only = unittest.skipUnless(DEVICE.type == "cuda", "needs a GPU: run with SCRUPLE_TEST_DEVICE=cuda")

if DEVICE.type == "cpu":
    torch.set_num_threads(1)  # small models: threads only wait for each other

# Every way of storing state: (name, options). lpmm's weights are integers, which a torch parameter cannot
# hold.
STORAGE = [
    ("fp32", dict(recipe="fp32")),
    ("mixed", dict(recipe="mixed")),
    ("split", dict(recipe="split")),
    ("flash", dict(recipe="flash")),
    ("scruple", dict(recipe="scruple")),
    ("scant", dict(recipe="scant")),
    ("stochastic", dict(recipe="scruple", rounding="stochastic", seed=7)),
    ("bf16 stochastic", dict(recipe="scruple", weights="bf16", rounding="stochastic", seed=8)),
    ("odd", dict(recipe="scruple", weights="bf16+5", moments={"exp_avg": "nf4", "exp_avg_sq": "log4"})),
]


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

    def refused(self, *words, kind=scruple.UsageError):
        """Expects an error that is a ValueError and whose message has these words."""
        test = self

        class Expect:
            def __enter__(self):
                return self

            def __exit__(self, found, problem, trace):
                test.assertIsNotNone(found, f"was not refused; expected an error with {words}")
                if not issubclass(found, kind):
                    return False
                if kind is scruple.UsageError:
                    test.assertIsInstance(problem, ValueError)
                for word in words:
                    test.assertIn(word, str(problem))
                return True

        return Expect()

    def refused_unchanged(self, opt, *words, model=None):
        """The same, and nothing may have changed."""
        before, expect, test = picture(opt, model), self.refused(*words), self

        class Unchanged:
            def __enter__(self):
                return self

            def __exit__(self, *found):
                done = expect.__exit__(*found)
                test.assertSame(before, picture(opt, model), "the error left a change behind")
                return done

        return Unchanged()
