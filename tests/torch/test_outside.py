"""What others do to parameters, groups and state between steps: pruning masks, offloading, accelerate's
lists, keys of the user's own, checkpoints from another thread."""

import collections
import io
import threading
import unittest
import warnings

import torch
from support import BF16, DEVICE, FP16, FP32, Case, Run, beside_torch, copies, each, give_gradients, parameter
from support import parameters, st, stored, take_steps, tensor

import scruple


class Package(Case):
    def test_version(self):
        self.assertEqual(scruple.__version__, scruple.version())


class Weights(Case):
    @each(
        kind=(st.AdamW, st.SGD, st.RMSprop),
        recipe=("fp32", "scruple", "flash", "scant"),
        dtype=(FP32, BF16),
        bad=(float("nan"), float("inf")),
        release=(None, {}),
    )
    def test_one_nan_is_one_weight(self, kind, recipe, dtype, bad, release):
        """As in torch: what is not finite in a gradient costs its own element, not the group it is stored in."""
        p, more = parameter(1000, dtype=dtype), dict(momentum=0.9) if kind is st.SGD else {}
        run = Run(kind, model=torch.nn.ParameterList([p]), release=release, recipe=recipe, **more)
        for step in range(4):
            g = tensor(1000, seed=step).to(dtype)
            if step == 1:
                g[70] = bad
            p.backward(g)
            run.step()
        self.assertEqual(torch.nonzero(~p.detach().isfinite()).flatten().tolist(), [70])

    @each(
        dtype=(BF16, FP16),
        options=[
            dict(recipe="scruple"),
            dict(recipe="split"),
            dict(rounding="stochastic"),
            dict(weights="bf16+3"),
        ],
    )
    def test_zeros_written_over_weights(self, dtype, options):
        """Old extra bits that pointed below are no NaN."""
        p = parameter(4096, dtype=dtype)
        run = Run(params=[p], **stored(options, dtype))
        mask = (torch.arange(4096, device=DEVICE) % 3 > 0).to(dtype)
        for _ in range(4):
            run.steps(1)
            with torch.no_grad():
                p.mul_(mask)
        run.steps(1)
        self.assertTrue(bool(p.isfinite().all()))

    def test_neighbours_of_a_nan_follow_for_thousands_of_steps(self):
        """At the defaults, with gradients whose scale shifts: their second moments are as near to the exact ones as
        where no NaN came."""
        size, shifts = 1024, torch.arange(1024, device=DEVICE) % 3 == 0
        for recipe in ("scruple", "scant"):
            off = []
            for bad in (False, True):
                p = parameter(size)
                opt = st.AdamW([p], recipe=recipe)
                exact, scale = torch.zeros(size, device=DEVICE), tensor(size, seed=1).exp()
                for step in range(4000):
                    if step == 1500:
                        scale = torch.where(shifts, scale * 5, scale)
                    g = tensor(size, seed=10 + step) * scale
                    exact = exact * 0.999 + g.square() * 0.001
                    if bad and step in (100, 2500):
                        g[70] = float("nan")
                    p.grad = g
                    opt.step()
                found = opt.state_dict(as_="torch")["state"][0]["exp_avg_sq"]
                error = torch.log((found / exact).sqrt())
                error[70] = 0
                off.append(float(error.square().mean().sqrt()))
                self.assertEqual(int((~p.detach().isfinite()).sum()), int(bad))
            self.assertLess(off[1], 1.02 * off[0], recipe)
            self.assertLess(off[0], 0.12 if recipe == "scruple" else 0.4)  # so that this says something


class State(Case):
    def test_planes_replaced(self):
        """As when state goes to the host and comes back: no stale address is written through."""
        run = Run().steps(3)
        for state in run.opt.state.values():
            for name, value in state.items():
                if torch.is_tensor(value):
                    state[name] = value.cpu().clone().to(DEVICE)
        self.assertAlike(run.steps(3), Run().steps(6))

    @each(
        clear={
            "cleared": lambda opt: opt.state.clear(),
            "replaced": lambda opt: setattr(opt, "state", collections.defaultdict(dict)),
        }
    )
    def test_cleared_begins_anew(self, clear):
        run = Run().steps(3)
        clear(run.opt)
        self.assertEqual(run.steps(2).counts(), {2})

    def test_taken_by_another_thread(self):
        run, done = Run(dtype=FP32, lr=1e-3), threading.Event()

        def save():
            while not done.is_set():
                run.opt.state_dict()

        thread = threading.Thread(target=save)
        thread.start()
        run.steps(200)
        done.set()
        thread.join()
        self.assertEqual(run.counts(), {200})

    def test_formats_of_a_recipe_that_leaves_small_ones_alone(self):
        how = dict(momentum=0.9, recipe="lpmm", weights="bf16+8")
        run = Run(st.SGD, params=parameters(BF16, ((100, 100), (100,))), **how).steps(2)
        self.assertAlike(run, run.resumed(**how))


class Groups(Case):
    def test_parameters_exchanged(self):
        """As accelerate does it when it shards a model."""
        run, new = Run(dtype=FP32).steps(2), parameters(seed=50)
        run.opt.zero_grad()
        before = copies(new)
        run.opt.param_groups[0]["params"] = new
        give_gradients(new, 0)
        run.opt.step()
        self.assertFalse(any(torch.equal(p, was) for p, was in zip(new, before)))

    def test_a_slot_asked_for_later(self):
        ours, theirs = runs = beside_torch("SGD")
        for run in runs:
            for momentum in (0.9, 0.0, 0.5):
                run.steps(2).opt.param_groups[0]["momentum"] = momentum
            run.steps(1)
        for p, q in zip(ours.params, theirs.params):
            # torch begins a late buffer with the gradient itself, ours with zero: without dampening the same.
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        self.assertIn("momentum_buffer", ours.opt.state_dict()["state"][0])

    def test_keys_of_the_user(self):
        ps = parameters()
        groups = [dict(params=ps[:1], name="body", lr_scale=0.5), dict(params=ps[1:], fused=True)]
        opt = st.AdamW(groups, lr=1e-2)
        take_steps(opt, ps, 1)
        saved = opt.state_dict()
        saved["param_groups"][0]["swa_lr"] = 0.1
        opt.load_state_dict(saved)
        self.assertEqual(opt.param_groups[0]["name"], "body")
        self.assertEqual(opt.param_groups[0]["swa_lr"], 0.1)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            st.AdamW([dict(params=parameters(), wieght_decay=0.1)])
        self.assertIn("'weight_decay' meant", str(said[-1].message))

    def test_no_limit(self):
        run = Run(dtype=FP32)
        give_gradients(run.params, 0)
        want = torch.nn.utils.clip_grad_norm_(run.params, float("inf"))
        self.assertAlmostEqual(float(run.opt.clip_and_step(float("inf"))), float(want), places=4)


class Casting(Case):
    def test_tied_parameters(self):
        net = torch.nn.ModuleDict(
            dict(token=torch.nn.Embedding(8, 4), head=torch.nn.Linear(4, 8, bias=False))
        )
        net["head"].weight = net["token"].weight
        with self.refused("token.weight", "head.weight", "one parameter"):
            st.cast_model(net, BF16, overrides={"head": FP32})
        self.assertEqual(net["head"].weight.dtype, FP32)

    def test_pickled(self):
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).to(DEVICE)
        st.cast_model(net, BF16, overrides={"1": FP32})
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        x = torch.ones(1, 4, dtype=BF16, device=DEVICE)
        self.assertTrue(torch.equal(torch.load(file, weights_only=False)(x), net(x)))


if __name__ == "__main__":
    unittest.main()
