"""Steps, over torch's list of optimizers: what is refused, directions, groups, dtypes, switches, hooks, and models that
are called with other parameters than their own."""

import copy
import functools
import itertools
import unittest

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from optim_db import SWITCHES, Line, OptimCase, advance, for_optim_db, near, over, trained
from support import BF16, DEVICE, FP16, FP32, parameter, tensor


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
            if not make.ours or SWITCHES.isdisjoint(given.kwargs):  # INAPPLICABLE in test_optim_db.py
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
        for switch in filter(make.takes, ("foreach", "fused")):
            for dtype in (FP32, BF16, FP16)[: None if make.ours else 1]:
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
        dtypes = (FP32, FP16, BF16)
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
        self.needs("a fused implementation", make.takes("fused"))
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
        self.needs("torch's numbers", make.follows)
        line, other = Line(), Line()
        ours, theirs = make(line.params), make.of_torch(other.params)
        for _ in range(6):
            near(line.train(ours, 1), other.train(theirs, 1))
            for p, q in zip(line.params, other.params):
                for name, value in theirs.state[q].items():
                    self.assertIsInstance(ours.state[p][name], type(value), name)
                    near(ours.state[p][name], value)


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


if __name__ == "__main__":
    unittest.main()
