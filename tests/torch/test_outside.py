"""What others do to parameters, groups and state between steps: pruning masks, offloading, accelerate's
lists, keys of the user's own, checkpoints from another thread."""

import collections
import io
import itertools
import threading
import unittest
import warnings

import torch
from support import DEVICE, Case, give_gradients, parameter, parameters, picture, stored, take_steps, tensor

import scruple
from scruple import torch as st


class Package(Case):
    def test_version(self):
        self.assertEqual(scruple.__version__, scruple.version())


class Weights(Case):
    def test_one_nan_is_one_weight(self):
        """As in torch: what is not finite in a gradient costs its own element, not the group it is stored in."""
        for kind, recipe in itertools.product(
            (st.AdamW, st.SGD, st.RMSprop), ("fp32", "scruple", "flash", "scant")
        ):
            for dtype, bad in itertools.product(
                (torch.float32, torch.bfloat16), (float("nan"), float("inf"))
            ):
                for release in (False, True):
                    p = parameter(1000, dtype=dtype)
                    model = torch.nn.ParameterList([p])
                    more = dict(momentum=0.9) if kind is st.SGD else {}
                    opt = kind(model.parameters(), lr=1e-2, recipe=recipe, **more)
                    if release:
                        st.release_gradients(model, opt)
                    for step in range(4):
                        g = tensor(1000, seed=step).to(dtype)
                        if step == 1:
                            g[70] = bad
                        if release:
                            p.backward(g)
                        else:
                            p.grad = g
                        opt.step()
                        opt.zero_grad()
                    found = torch.nonzero(~p.detach().isfinite()).flatten().tolist()
                    self.assertEqual(found, [70], f"{kind.__name__} {recipe} {dtype} {bad} {release}")

    def test_zeros_written_over_weights(self):
        """Old extra bits that pointed below are no NaN."""
        for dtype in (torch.bfloat16, torch.float16):
            for options in (
                dict(recipe="scruple"),
                dict(recipe="split"),
                dict(rounding="stochastic"),
                dict(weights="bf16+3"),
            ):
                with self.subTest(dtype=dtype, **options):
                    p = parameter(4096, dtype=dtype)
                    opt = st.AdamW([p], lr=1e-2, **stored(options, dtype))
                    mask = (torch.arange(4096, device=DEVICE) % 3 > 0).to(dtype)
                    for step in range(4):
                        take_steps(opt, [p], 1, first=step)
                        with torch.no_grad():
                            p.mul_(mask)
                    take_steps(opt, [p], 1, first=4)
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
    def run_twice(self, disturb):
        """Six steps, with and without what is done to the state after the third."""
        found = []
        for disturbed in (False, True):
            ps = parameters(torch.bfloat16)
            opt = st.AdamW(ps, lr=1e-2)
            take_steps(opt, ps, 3)
            if disturbed:
                disturb(opt)
            take_steps(opt, ps, 3, first=3)
            found.append(picture(opt))
        return found

    def test_planes_replaced(self):
        """As when state goes to the host and comes back: no stale address is written through."""

        def offload(opt):
            for state in opt.state.values():
                for name, value in state.items():
                    if torch.is_tensor(value):
                        state[name] = value.cpu().clone().to(DEVICE)

        self.assertSame(*self.run_twice(offload))

    def test_cleared_begins_anew(self):
        for clear in (
            lambda opt: opt.state.clear(),
            lambda opt: setattr(opt, "state", collections.defaultdict(dict)),
        ):
            ps = parameters(torch.bfloat16)
            opt = st.AdamW(ps, lr=1e-2)
            take_steps(opt, ps, 3)
            clear(opt)
            take_steps(opt, ps, 2, first=3)
            self.assertEqual(int(opt.state_dict()["state"][0]["step"]), 2)

    def test_taken_by_another_thread(self):
        ps = parameters()
        opt = st.AdamW(ps, lr=1e-3)
        done = threading.Event()

        def save():
            while not done.is_set():
                opt.state_dict()

        thread = threading.Thread(target=save)
        thread.start()
        take_steps(opt, ps, 200)
        done.set()
        thread.join()
        self.assertEqual(int(opt.state_dict()["state"][0]["step"]), 200)

    def test_formats_of_a_recipe_that_leaves_small_ones_alone(self):
        how = dict(momentum=0.9, recipe="lpmm", weights="bf16+8")
        ps = [parameter(100, 100, dtype=torch.bfloat16), parameter(100, dtype=torch.bfloat16)]
        opt = st.SGD(ps, **how)
        take_steps(opt, ps, 2)
        again = st.SGD(ps, **how)
        again.load_state_dict(opt.state_dict())
        self.assertSame(picture(opt), picture(again))


class Groups(Case):
    def test_parameters_exchanged(self):
        """As accelerate does it when it shards a model."""
        old, new = parameters(), parameters(seed=50)
        opt = st.AdamW(old, lr=1e-2)
        take_steps(opt, old, 2)
        opt.zero_grad()
        before = [p.detach().clone() for p in new]
        opt.param_groups[0]["params"] = new
        give_gradients(new, 0)
        opt.step()
        for p, was in zip(new, before):
            self.assertFalse(torch.equal(p, was))

    def test_a_slot_asked_for_later(self):
        ours, theirs = parameters(), parameters()
        a, b = st.SGD(ours, lr=1e-2, recipe="fp32"), torch.optim.SGD(theirs, lr=1e-2)
        for opt, ps in ((a, ours), (b, theirs)):
            step = 0
            for momentum in (0.9, 0.0, 0.5):
                take_steps(opt, ps, 2, first=step)
                opt.param_groups[0]["momentum"] = momentum
                step += 2
            take_steps(opt, ps, 1, first=step)
        for p, q in zip(ours, theirs):
            # torch begins a late buffer with the gradient itself, ours with zero: without dampening the same.
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        self.assertIn("momentum_buffer", a.state_dict()["state"][0])

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
        ps = parameters()
        opt = st.AdamW(ps, lr=1e-2)
        give_gradients(ps, 0)
        want = torch.nn.utils.clip_grad_norm_(ps, float("inf"))
        self.assertAlmostEqual(float(opt.clip_and_step(float("inf"))), float(want), places=4)


class Casting(Case):
    def test_tied_parameters(self):
        net = torch.nn.ModuleDict(
            dict(token=torch.nn.Embedding(8, 4), head=torch.nn.Linear(4, 8, bias=False))
        )
        net["head"].weight = net["token"].weight
        with self.refused("token.weight", "head.weight", "one parameter"):
            st.cast_model(net, torch.bfloat16, overrides={"head": torch.float32})
        self.assertEqual(net["head"].weight.dtype, torch.float32)

    def test_pickled(self):
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).to(DEVICE)
        st.cast_model(net, torch.bfloat16, overrides={"1": torch.float32})
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        x = torch.ones(1, 4, dtype=torch.bfloat16, device=DEVICE)
        self.assertTrue(torch.equal(torch.load(file, weights_only=False)(x), net(x)))


if __name__ == "__main__":
    unittest.main()
