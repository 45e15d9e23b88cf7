"""Backward passes that fail under release_gradients, gradients and options that it refuses: nothing is lost."""

import contextlib
import copy
import unittest
from unittest import mock

import torch
from torch.utils.checkpoint import checkpoint

from support import DEVICE, FP32, Case, ModelRun as Run, each, mlp, same, st, tensor
from test_release import EXACT, WITH_8_BITS, buckets_of


class Broken(torch.autograd.Function):
    """Raises in backward when told to."""

    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        if Broken.armed:
            raise RuntimeError("out of luck")
        return g


class BrokenNet(torch.nn.Module):
    """Whose second half has its gradients when backward raises."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = torch.nn.Linear(12, 20), torch.nn.Linear(20, 5)
        self.to(DEVICE)

    def forward(self, x):
        return self.b(Broken.apply(self.a(x).tanh()))


class Failures(Case):
    @contextlib.contextmanager
    def out_of_luck(self):
        with mock.patch.object(Broken, "armed", True), self.assertRaisesRegex(RuntimeError, "out of luck"):
            yield

    @each(release={**WITH_8_BITS, "accumulate": dict(accumulate=2, **EXACT["compressed"])})
    def test_a_backward_that_fails(self, release):
        """Half of the gradients have come when it raises. Where nothing has been stepped yet, the next backward is as
        if the failed one had never been."""
        plain, run = (Run(model=BrokenNet(), release=release).steps(2) for _ in range(2))
        for _ in range(2):  # and again at once
            with self.out_of_luck():
                run.loss(9).backward()
        self.assertTrue(all(p.grad is None for p in run.params))
        batches = release.get("accumulate", 1)
        self.assertAlike(plain.steps(2 * batches), run.steps(2 * batches))

    def test_a_backward_that_fails_when_some_gradients_are_used(self):
        """Compressed begins the step anew: what the sink has of it, earlier micro-batches too, goes."""
        release = dict(accumulate=2, **EXACT["compressed"])
        with buckets_of(1):
            # A step, and for the second half of one more.
            plain, run = (Run(model=BrokenNet(), release=release).steps(steps) for steps in (2, 3))
            with self.out_of_luck():
                run.loss(9).backward()
            self.assertAlike(plain.steps(4, first=3), run.steps(4))

    def test_a_backward_that_fails_before_one_that_begins_in_a_checkpoint(self):
        """The first gradients of the second come from a reentrant checkpoint: no part of the first. Where its end
        cannot be seen, it is refused."""

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.block, self.tail = torch.nn.Linear(12, 5), torch.nn.Linear(5, 5)

            def forward(self, x, tail=True):
                x = checkpoint(self.block, Broken.apply(x), use_reentrant=True)
                return self.tail(x) if tail else x

        def made(policy, fails):
            torch.manual_seed(0)
            run = Run(model=Net().to(DEVICE), release=dict(policy=policy))
            run.model(x).sum().backward()
            run.opt.step()
            if fails:
                with buckets_of(1 << 30), self.out_of_luck():
                    run.model(x).sum().backward()
            return run

        x = torch.ones(3, 12, device=DEVICE, requires_grad=True)
        runs = [made("released", fails) for fails in (False, True)]
        for run in runs:
            for _ in range(2):
                run.model(x, tail=False).sum().backward()
                run.opt.step()
        self.assertAlike(*runs)

        run = made("compressed", True)
        with self.refused("reentrant checkpoint"):
            run.model(x, tail=False).sum().backward()
        run.model(x).sum().backward()

    @each(release=EXACT)
    def test_a_gradient_that_is_refused(self, release):
        """A sparse gradient raises inside backward, and the next one works."""
        model = torch.nn.Sequential(torch.nn.Embedding(7, 4, sparse=True), torch.nn.Linear(4, 3)).to(DEVICE)
        run = Run(model=model, release=release)
        x = torch.tensor([1, 2], device=DEVICE)
        with self.refused_unchanged(run, "sparse", "to_dense"):
            model(x).sum().backward()
        before = copy.deepcopy(model.state_dict())
        model[0].sparse = False
        model(x).sum().backward()
        self.assertFalse(same(before, model.state_dict()))

    REFUSED = {
        "policy": (dict(policy="stored"), ("'stored'", "opt.step()")),
        "max_norm": (dict(max_norm=1.0), ("max_norm", "compressed", "tensor_norm")),
        "accumulate": (dict(accumulate=4), ("4 micro-batches", "compressed", "adama")),
        "momentum of AdamW": (
            dict(accumulate=4, accumulation="momentum"),
            ("momentum is not for adamw", "adama", "compressed"),
        ),
        "adagc with accumulation": (dict(accumulate=2, accumulation="adama", adagc=1.05), ("compressed",)),
        "moments of 8 bits": (
            dict(accumulate=2, accumulation="adama"),
            ("exp_avg", "companded8", "moments in fp32", "policy compressed"),
        ),
        "tensor_norm": (dict(policy="compressed", tensor_norm=1.0), ("max_norm",)),
        "adagc": (dict(policy="compressed", adagc=1.05), ("max_norm",)),
        "accumulator": (
            dict(policy="compressed", accumulator="int4"),
            ("'int4'", "'root8'", "'int8'", "'bf16'"),
        ),
        "scaler": (dict(policy="compressed", scaler=3), ("GradScaler",)),
        "reduction": (dict(policy="compressed", reduction="max"), ("'max'", "'sum'")),
        "accumulate of nothing": (dict(policy="compressed", accumulate=0), ("accumulate", "from 1")),
        "negative norm": (dict(policy="compressed", max_norm=-1.0), ("max_norm",)),
        "norm that is no number": (dict(policy="compressed", max_norm=float("nan")), ("max_norm",)),
        "accumulation of one": (dict(policy="compressed", accumulation="adama"), ("accumulation", "leave")),
    }
    REFUSED_OF_SGD = {
        "adama": (dict(accumulate=4, accumulation="adama"), ("sgd",)),
        "unknown accumulation": (dict(accumulate=2, accumulation="mean"), ("'mean'", "'momentum'")),
        "momentum of 8 bits": (
            dict(accumulate=2, accumulation="momentum"),
            ("momentum_buffer", "companded8", "moments in fp32", "policy compressed"),
        ),
    }

    def check_refused(self, case, *kind, **options):
        release, words = case
        run = Run(*kind, dtype=FP32, **options)
        with self.refused_unchanged(run, *words):
            run.release(**{"policy": "released", **release})
        self.assertIsNone(run.opt._handle)
        run.loss().backward()
        self.assertIsNotNone(run.params[0].grad)

    @each(case=REFUSED)
    def test_refused(self, case):
        self.check_refused(case)

    @each(case=REFUSED_OF_SGD)
    def test_refused_of_sgd(self, case):
        self.check_refused(case, st.SGD, momentum=0.9, weight_decay=0.01)

    def test_refused_pairs(self):
        """Models and optimizers that do not belong together, and calls that release has taken over."""
        run = Run(dtype=FP32)
        with self.refused("AdamW", "scruple.torch"):
            st.release_gradients(run.model, torch.optim.AdamW(run.params))
        with self.refused("no parameter"):
            st.release_gradients(mlp(), run.opt)
        run.release()
        with self.refused("already", "remove()"):
            run.release()
        with self.refused("remove()"):
            run.opt.load_state_dict(run.opt.state_dict())
        run.loss().backward()
        with self.refused("max_norm", "compressed"):
            run.opt.step(max_norm=1.0)
        run.handle.remove()
        run.opt.load_state_dict(run.opt.state_dict())

    def test_parameters_that_are_not_contiguous(self):
        """Plain release takes them; the others say what to do."""
        runs = []
        for how in (None, dict(policy="released")):
            torch.manual_seed(0)
            conv = torch.nn.Conv2d(3, 4, 3).to(DEVICE).to(memory_format=torch.channels_last)
            runs.append(Run(model=conv, release=how))
            for step in range(3):
                conv(tensor(2, 3, 6, 6, seed=step)).square().sum().backward()
                runs[-1].step()
        self.assertAlike(*runs)
        with self.refused("contiguous"):
            st.release_gradients(conv, st.AdamW(conv.parameters()), "compressed")

    def test_flush(self):
        """A backward that failed leaves nothing to step with."""
        run = Run(model=BrokenNet(), release=dict(accumulate=2, **EXACT["compressed"]))
        before = run.picture()
        with self.out_of_luck():
            run.loss().backward()
        run.handle.flush()
        self.assertSame(before, run.picture())


if __name__ == "__main__":
    unittest.main()
