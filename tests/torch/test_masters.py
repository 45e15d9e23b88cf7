"""Weights at full width: reading and writing them, and check_updates, which says when steps are too small for a format."""

import copy
import unittest

import torch

from support import BF16, DEVICE, FP32, Case, ModelRun, Run, each, give_gradients, mlp, parameter, st
from support import take_steps, tensor


class Masters(Case):
    @each(weights={"bf16+16": 32, "fp32": 32, "bf16+8": 24, "bf16": 16}.items(), steps=(0, 2))
    def test_a_wide_checkpoint_fills_the_extra_bits(self, weights, steps):
        """bf16+16 and a master copy return every fp32 bit; bf16+8 every one of its 24."""
        weights, keep = weights
        run, wide = ModelRun(weights=weights).steps(steps), mlp(seed=3).state_dict()
        run.opt.load_master_state_dict(run.model, wide)
        found, visible = run.opt.master_state_dict(run.model), run.model.state_dict()
        self.assertEqual(list(found), list(visible))
        for name, value in wide.items():
            largest = float(value.abs().max())
            if keep == 32:
                self.assertSame(found[name], value)
            else:
                self.assertLessEqual(float((found[name] - value).abs().max()), 2.0 ** -(keep - 8) * largest)
            self.assertLessEqual(float((visible[name].float() - value).abs().max()), 2.0**-8 * largest)

    @each(dtype=(FP32, BF16))
    def test_is_a_copy(self, dtype):
        run = Run(dtype=dtype, lr=0.1)
        for _ in range(2):  # before the first step, and after
            masters = run.opt.master_weights()
            kept = {p: v.clone() for p, v in masters.items()}
            self.assertTrue(all(v.dtype is FP32 and v.shape == p.shape for p, v in masters.items()))
            run.steps(1)
            self.assertSame(*([x[p] for p in run.params] for x in (masters, kept)))

    def net(self, **head):
        layers = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2, **head)
        return torch.nn.Sequential(*layers).to(DEVICE)

    def test_buffers_and_parameters_of_others(self):
        model = self.net()
        wide = {name: x + 1 for name, x in model.state_dict().items()}
        st.AdamW(model[0].parameters()).load_master_state_dict(model, wide)
        self.assertSame(dict(model.state_dict()), wide)

    def test_what_is_outside_the_optimizer(self):
        """In fp32 too, and not the model's own memory."""
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).to(DEVICE, BF16)
        model[1].double()
        opt = st.AdamW([model[0].weight])
        found = opt.master_state_dict(model)
        self.assertEqual(list(found), list(model.state_dict()))
        for name, value in model.state_dict().items():
            self.assertNotEqual(found[name].data_ptr(), value.data_ptr(), name)
            self.assertTrue(torch.equal(found[name].to(value.dtype), value), name)
        self.assertEqual({found[n].dtype for n in ("0.weight", "0.bias")}, {FP32})
        self.assertEqual(found["1.running_mean"].dtype, torch.float64)  # is wider than that
        self.assertEqual(found["1.num_batches_tracked"].dtype, torch.int64)

    @each(dtype=(FP32, BF16))
    def test_own_values(self, dtype):
        """A parameter's own memory as its new value, or that of another which is written first."""
        run = ModelRun(dtype=dtype)
        before = copy.deepcopy(run.model.state_dict())
        run.opt.load_master_state_dict(run.model, run.model.state_dict())
        self.assertSame(run.model.state_dict(), before)
        both = tensor(2, 4, 4, dtype=dtype)
        a, b = torch.nn.Parameter(both[0]), torch.nn.Parameter(both[1])  # of one piece of memory
        was = both.clone()
        st.SGD([a, b]).set_master_weights({a: b.detach(), b: a.detach()})
        self.assertSame(both, was.flip(0))

    def test_all_or_nothing(self):
        model = self.net(dtype=BF16)
        opt = st.AdamW([*model[0].parameters(), model[2].weight])
        good = {name: x + 1 for name, x in model.state_dict().items()}
        for label, change, words in (
            ("no tensor", {"2.weight": 3.0}, ("(2, 4)", "3.0")),
            ("no numbers", {"2.weight": torch.zeros(2, 4, dtype=torch.int64)}, ("(2, 4)", "int64")),
            ("no values", {"2.weight": torch.zeros(2, 4, device="meta")}, ("(2, 4)", "meta")),
            ("shape of a buffer", {"1.running_mean": torch.zeros(5)}, ("running_mean", "(5,)", "(4,)")),
            ("shape of another's", {"2.bias": torch.zeros(5)}, ("2.bias", "(5,)", "(2,)")),
        ):
            with self.subTest(label), self.refused_unchanged(opt, *words, model=model):
                opt.load_master_state_dict(model, {**good, **change})
        # A parameter that cannot be written any more, after others that can.
        take_steps(opt, opt.param_groups[0]["params"][2:], 1)
        model[2].weight.data = model[2].weight.data.float()
        before = copy.deepcopy(model.state_dict())
        with self.refused("cast"):
            opt.set_master_weights({p: torch.ones_like(p) for p in opt.param_groups[0]["params"]})
        self.assertSame(model.state_dict(), before)

    def test_tied(self):
        model = torch.nn.ModuleDict({name: torch.nn.Linear(6, 6) for name in "ab"}).to(DEVICE, BF16)
        model["b"].weight = model["a"].weight
        opt = st.AdamW(model.parameters(), weights="bf16+16")
        wide = {name: tensor(*x.shape, seed=i) for i, (name, x) in enumerate(model.state_dict().items())}
        wide["b.weight"] = wide["a.weight"]
        opt.load_master_state_dict(model, wide)
        self.assertSame(dict(opt.master_state_dict(model)), wide)

    @each(
        case={
            "missing": (lambda d: d.pop("0.weight"), ("0.weight", "strict=False")),
            "unexpected": (lambda d: d.update(what=torch.zeros(1)), ("what", "strict=False")),
            "shape": (lambda d: d.update({"2.bias": torch.zeros(3)}), ("(3,)", "(24,)")),
        }
    )
    def test_refused(self, case):
        change, words = case
        run, bad = ModelRun(), mlp(seed=3).state_dict()
        change(bad)
        with self.refused_unchanged(run, *words):
            run.opt.load_master_state_dict(run.model, bad)

    def test_strict(self):
        run, good = ModelRun(), mlp(seed=3).state_dict()["0.weight"]
        run.opt.load_master_state_dict(run.model, {"0.weight": good, "what": torch.zeros(1)}, strict=False)
        self.assertNear([run.opt.master_state_dict(run.model)["0.weight"]], [good], 1e-4)
        with self.refused("not in"):
            run.opt.set_master_weights({parameter(3): tensor(3)})

    def test_the_extra_bits_count(self):
        """Small steps that bf16 cannot show add up in the master weights, and show in the end."""
        p = torch.nn.Parameter(torch.ones(64, dtype=BF16, device=DEVICE))
        opt = st.SGD([p], lr=2.0**-13)
        p.grad = torch.ones_like(p)
        opt.step()
        self.assertTrue(bool((p == 1).all()))
        self.assertTrue(bool((opt.master_weights()[p] == 1 - 2.0**-13).all()))
        for _ in range(63):
            opt.step()
        self.assertTrue(bool((p == 1 - 2.0**-7).all()))


class CheckUpdates(Case):
    def check(self, dtype=BF16, **options):
        run = ModelRun(dtype=dtype, **options).steps(2)
        run.loss().backward()
        before = run.picture()
        found = st.check_updates(run.opt, run.model)
        self.assertSame(before, run.picture(), "a check changed something")
        return found

    def test_says_when_weights_stand_still(self):
        found = self.check(lr=1e-6, weights="bf16")
        self.assertTrue(any(line.startswith("0.weight (bf16, lr 1e-06)") for line in found), found)
        self.assertIn("bf16+8", found[0])
        self.assertIn("rounding='stochastic'", found[0])
        self.assertTrue(self.check(lr=1e-9, dtype=FP32))
        found = self.check(lr=1e-8, recipe="flash")
        self.assertIn("weights='bf16+16' (more extra bits) or rounding={'weights': 'wide'}", found[0])
        # All 16 bits are kept: there is nothing for wide to round.
        self.assertIn("a larger lr", self.check(lr=1e-10, weights="bf16+16")[0])

    @each(
        options=(
            dict(lr=1e-3),
            dict(lr=1e-4),
            dict(lr=1e-6, weights="bf16+16"),
            dict(lr=1e-3, recipe="scant"),
            dict(lr=1e-6, weights="bf16", rounding="stochastic"),
            dict(lr=1e-8),
            dict(lr=1e-8, recipe="flash", rounding={"weights": "wide"}),
            dict(lr=1e-4, dtype=FP32),
            dict(lr=1e-2, maximize=True),
        )
    )
    def test_says_nothing_otherwise(self, options):
        self.assertEqual(self.check(**options), [])

    def test_before_the_first_step(self):
        ps = [parameter(4000, dtype=BF16), parameter(3, 5, seed=1).detach().t().requires_grad_()]
        ps[1] = torch.nn.Parameter(ps[1].detach())
        opt = st.AdamW(ps, lr=1e-7, weights="bf16")
        self.assertEqual(st.check_updates(opt), [])  # no gradients
        give_gradients(ps, 0)
        self.assertIn("parameter 0 (bf16", st.check_updates(opt)[0])
        self.assertEqual(len(opt.state), 0)
        opt.step()
        self.assertEqual([opt.state_dict()["state"][i]["step"] for i in range(2)], [1, 1])


if __name__ == "__main__":
    unittest.main()
