"""What drives an optimizer, over torch's list of them: schedulers of the learning rate, and torch.amp.GradScaler."""

import contextlib
import copy
import gc
import itertools
import unittest
import warnings
import weakref

import torch
from torch.optim import lr_scheduler as s

from optim_db import Line, OptimCase, for_optim_db, near, over, trained
from support import DEVICE, give_gradients, parameters, picture

# ---- TestLRScheduler ----

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
                if make.follows:
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
        self.needs("a fused implementation", make.takes("fused"))
        dtype, found = torch.float16 if DEVICE.type == "cuda" else torch.bfloat16, []
        for fused, between in ((True, None), (False, torch.amp.GradScaler.unscale_)):
            line, scale, opt = self.begin(make, fused=fused)
            self.scaled(opt, line, scale, 4, (1,), between, torch.autocast(DEVICE.type, dtype))
            found.append((line.params, scale.state_dict()))
        self.agree(make, *found)

    @over("each")
    def test_fused_does_not_step_if_foundinf(self, make):
        self.needs("a fused implementation", make.takes("fused"))
        for grad_scale in (None, torch.ones(1, device=DEVICE)):
            ps = parameters()
            before, opt = copy.deepcopy(ps), make(ps, fused=True)
            opt.grad_scale, opt.found_inf = grad_scale, torch.ones((), device=DEVICE)
            give_gradients(ps, 0)
            opt.step()
            self.assertTrue(all(int(opt.state[p].get("step", 0)) == 0 for p in ps))
            self.assertSame(ps, before)


if __name__ == "__main__":
    unittest.main()
