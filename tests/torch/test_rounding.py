"""What formats and rounding cost: training that gains what fp32 gains, random numbers, the roundings of every array,
and moments that are exact."""

import copy
import itertools
import math
import pickle
import unittest

import torch

from scruple import _abi
from support import BF16, DEVICE, FP32, STORAGE, WIDE, Case, Run, beside_torch, copies, each, parameter
from support import parameters, same, st, stored, tensor


class Training(Case):
    """Fine-tuning at a small learning rate, where a format can lose: compressed recipes gain what fp32 gains,
    weights without extra bits stand still."""

    @classmethod
    def setUpClass(cls):
        cls.x = tensor(1024, 16, seed=1)
        y = (cls.x[:, :4] * cls.x[:, 4:8]).sum(1, keepdim=True) + (2 * cls.x[:, 8:9]).sin()
        cls.y = y / y.std()
        torch.manual_seed(0)
        (a, b, c), gelu = (torch.nn.Linear(*x) for x in ((16, 80), (80, 64), (64, 1))), torch.nn.GELU()
        cls.start = torch.nn.Sequential(a, gelu, b, gelu, c).to(DEVICE)
        cls.fit(cls.start, st.AdamW(cls.start.parameters(), lr=3e-3, **WIDE), 100, 99)
        cls.before = cls.loss(cls.start)

    @classmethod
    def fit(cls, model, opt, steps, order):
        order, dtype = torch.Generator().manual_seed(order), next(model.parameters()).dtype
        for _ in range(steps):
            rows = torch.randint(len(cls.x), (64,), generator=order).to(DEVICE)
            opt.zero_grad()
            torch.nn.functional.mse_loss(model(cls.x[rows].to(dtype)).float(), cls.y[rows]).backward()
            opt.step()

    @classmethod
    def loss(cls, model):
        with torch.no_grad():
            return float(torch.nn.functional.mse_loss(model(cls.x), cls.y))

    def gain(self, kind, dtype, order=0, **options):
        """How much of the loss goes in 60 steps, by the wide weights."""
        model = copy.deepcopy(self.start).to(dtype)
        opt = kind(model.parameters(), lr=1e-4 if kind is st.AdamW else 2e-3, **stored(options, dtype))
        opt.load_master_state_dict(model, self.start.state_dict())
        self.fit(model, opt, 60, order)
        wide = copy.deepcopy(self.start)
        wide.load_state_dict(opt.master_state_dict(model))
        return self.before - self.loss(wide)

    @each(kind=(st.AdamW, st.SGD))
    def test_compressed_gains_what_fp32_gains(self, kind):
        plain, recipes = {}, {name: how for name, how in STORAGE.items() if name != "fp32"}
        if kind is st.SGD:
            plain, recipes = dict(momentum=0.9), dict(
                scruple={}, flash=dict(recipe="flash"), lpmm=dict(recipe="lpmm", weights="bf16+8")
            )
        gains = [self.gain(kind, FP32, order, **WIDE, **plain) for order in range(3)]
        noise = max(max(gains) - min(gains), 0.03 * gains[0])  # of the order of batches, or 3 %
        self.assertGreater(min(gains), 4 * noise, "too noisy to show anything")
        for dtype, (label, options) in itertools.product((BF16, FP32), recipes.items()):
            with self.subTest(recipe=label, dtype=dtype):
                self.assertGreater(self.gain(kind, dtype, **options, **plain), gains[0] - noise)
        naive = self.gain(kind, BF16, weights="bf16", **WIDE, **plain)
        told = "even plain bf16 weights gained: the task cannot tell formats apart"
        self.assertLess(naive, gains[0] - 4 * noise, told)


def creep(test, gap, arrives, **options):
    """400 steps of 1/32 of a gap above 1 each: on average they arrive where the exact sum does, or they are lost. The
    parameter is the nearest bf16 number of the wide value in either case."""
    steps, size = 400, 4096
    p = torch.nn.Parameter(torch.ones(size, dtype=BF16, device=DEVICE))
    opt = st.SGD([p], lr=gap / 32, **options)
    p.grad = -torch.ones_like(p)
    for _ in range(steps):
        opt.step()
    wide = opt.master_weights()[p]
    # A step adds variance of at most gap^2 * (1/32) (31/32); six standard deviations of the mean.
    delta = 6 * gap * math.sqrt(steps / 32 / size)
    arrived = 1 + steps * gap / 32 if arrives else 1.0
    test.assertAlmostEqual(float(wide.double().mean()), arrived, delta=delta)
    test.assertLess(delta, steps * gap / 32 / 10)
    test.assertSame(p.detach(), wide.to(BF16))


class Stochastic(Case):
    """Random numbers come from (seed, step, parameter, element) and nothing else."""

    def run_once(self, seed=0, params=None):
        return Run(params=params, lr=1e-3, weights="bf16", rounding="stochastic", seed=seed).steps(4)

    def test_seeds(self):
        torch.manual_seed(1)
        first = self.run_once(5)
        torch.manual_seed(2)  # torch's own generator has no part in it
        self.assertAlike(first, self.run_once(5))
        self.assertFalse(same(first.weights(), self.run_once(6).weights()))

    @unittest.skipIf(DEVICE.type != "cpu", "threads are the CPU engine's")
    def test_threads(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(self.run_once(params=parameters(BF16, ((300_007,), (5,)))))
        self.assertAlike(found[0], found[1])
        self.assertAlike(found[0], found[2])

    def test_each_parameter_element_and_step_has_its_own(self):
        """Equal values and equal gradients round differently in each place, and differently in each step."""
        ps = [torch.nn.Parameter(torch.ones(4096, dtype=BF16, device=DEVICE)) for _ in range(2)]
        opt = st.SGD(ps, lr=2.0**-10, weights="bf16", rounding="stochastic")
        seen, both = [], []
        for _ in range(16):
            for p in ps:
                with torch.no_grad():
                    p.fill_(1.0)
                p.grad = torch.ones_like(p)
            opt.step()
            seen += [p.detach() != 1.0 for p in ps]
        for i, moved in enumerate(seen):
            self.assertAlmostEqual(
                float(moved.float().mean()), 0.25, delta=0.03
            )  # a quarter of the gap below 1
            both += [float((moved & other).float().mean()) for other in seen[:i]]
            self.assertFalse(any(torch.equal(moved, other) for other in seen[:i]))
        # The coins of a parameter are a lattice, drawn anew at every step. Two of them over 4,096 elements
        # meet more or less often than by chance (0.04 for 1/16 was seen); over all 496 pairs they do not.
        self.assertAlmostEqual(sum(both) / len(both), 1 / 16, delta=0.01)

    @each(rounding=("stochastic", "nearest"))
    def test_the_mean_follows_the_exact_sum(self, rounding):
        creep(self, 2.0**-7, rounding == "stochastic", weights="bf16", rounding=rounding)  # bf16's gap


class Rounding(Case):
    """What rounding= says, array by array."""

    TABLE = [
        # options, then roundings of weight, exp_avg and exp_avg_sq
        (dict(), "wide stochastic stochastic"),
        (dict(recipe="scant"), "wide stochastic stochastic"),
        (dict(recipe="flash"), "nearest nearest nearest"),
        (dict(weights="bf16+16"), "wide stochastic stochastic"),
        (dict(weights="bf16"), "nearest stochastic stochastic"),
        (dict(rounding="nearest"), "nearest nearest nearest"),
        (dict(rounding="stochastic"), "stochastic stochastic stochastic"),
        (dict(rounding="truncate"), "truncate stochastic stochastic"),
        (dict(rounding="wide"), "wide stochastic stochastic"),
        (dict(rounding="wide", recipe="flash"), "wide stochastic stochastic"),
        (dict(rounding="wide", weights="bf16"), "nearest stochastic stochastic"),
        (dict(rounding={}), "wide stochastic stochastic"),
        (dict(rounding={"weights": "nearest"}), "nearest stochastic stochastic"),
        (dict(rounding={"weights": "stochastic"}), "stochastic stochastic stochastic"),
        (dict(rounding={"weights": "wide"}, recipe="flash"), "wide nearest nearest"),
        (dict(rounding={"moments": "nearest"}), "wide nearest nearest"),
        (dict(rounding={"exp_avg_sq": "nearest"}), "wide stochastic nearest"),
        (dict(rounding={"exp_avg": "nearest", "moments": "stochastic"}), "wide nearest stochastic"),
        (dict(rounding={"moments": "nearest", "exp_avg_sq": "stochastic"}), "wide nearest stochastic"),
        (
            dict(rounding={"weights": "nearest", "moments": "stochastic", "exp_avg_sq": "nearest"}),
            "nearest stochastic nearest",
        ),
        (dict(rounding={"exp_avg": "truncate"}, moments={"exp_avg": "bf16"}), "wide truncate stochastic"),
        # fp32 rounds nothing: what is said to all goes past it.
        (dict(rounding={"weights": "wide"}, dtype=FP32), "nearest stochastic stochastic"),
        (
            dict(rounding={"moments": "stochastic"}, moments={"exp_avg": "fp32"}, recipe="flash"),
            "nearest nearest stochastic",
        ),
    ]

    def roundings(self, row):
        return " ".join(_abi.rounding_names()[row.arrays[a].rounding] for a in range(3))

    @each(case=TABLE)
    def test_reaches_the_rows(self, case):
        """Of the layout, and of the table that a step hands to the library."""
        options, expected = case
        p = parameter(300, dtype=options.get("dtype", BF16))
        run = Run(params=[p], **options)
        self.assertEqual(self.roundings(run.opt._layout(p).row), expected)
        (table,) = run.steps(2).opt._tables.values()
        self.assertEqual(self.roundings(table.rows[0]), expected)

    def test_of_a_group(self):
        ps = parameters(BF16)
        groups = [dict(params=ps[:2], rounding={"moments": "nearest"}), dict(params=ps[2:])]
        opt = st.AdamW(groups, rounding={"weights": "nearest"})
        found = [self.roundings(opt._layout(p).row) for p in ps]
        self.assertEqual(found, ["wide nearest nearest"] * 2 + ["nearest stochastic stochastic"] * 2)

    def test_is_saved(self):
        """A dict comes back with the state, and the steps go on with the same bits."""
        run = Run(rounding={"weights": "nearest", "exp_avg_sq": "nearest"}, seed=4).steps(3)
        twin = run.resumed(state=pickle.loads(pickle.dumps(run.opt.state_dict())))
        self.assertAlike(run.steps(3), twin.steps(3))

    @each(name=("nearest", "stochastic"))
    def test_means_the_same_as_a_name(self, name):
        one, two = (Run(rounding=x).steps(4) for x in (name, {"weights": name, "moments": name}))
        self.assertSame(one.weights(), two.weights())
        self.assertSame(one.opt.state_dict()["state"], two.opt.state_dict()["state"])

    @each(rounding=("wide", "nearest"))
    def test_wide_adds_up(self, rounding):
        creep(self, 2.0**-15, rounding == "wide", rounding={"weights": rounding})  # bf16+8's gap

    REFUSED = {
        "a name": (dict(rounding="up"), ("'up'", "nearest, truncate, stochastic, wide", "'weights'")),
        "an accumulator's": (dict(rounding="dither"), ("'dither'", "stochastic")),
        "no name": (dict(rounding=2), ("2", "stochastic")),
        "a list": (dict(rounding=["nearest"]), ("['nearest']", "a dict")),
        "a name in a dict": (dict(rounding={"exp_avg": "up"}), ("'up'", "stochastic")),
        "None in a dict": (dict(rounding={"weights": None}), ("None", "stochastic")),
        "a key": (dict(rounding={"weight": "nearest"}), ("'weight'", "'weights', 'moments', 'exp_avg'")),
        "a slot": (dict(rounding={"momentum_buffer": "nearest"}), ("'momentum_buffer'", "'exp_avg_sq'")),
        "weights that cannot": (
            dict(rounding={"weights": "wide"}, weights="bf16"),
            ("'wide'", "weights", "bf16", "nearest, truncate, stochastic"),
        ),
        "a master copy": (
            dict(rounding={"weights": "stochastic"}, recipe="mixed"),
            ("'stochastic'", "bf16+fp32", "nearest"),
        ),
        "moments that cannot": (
            dict(rounding={"moments": "truncate"}),
            ("'truncate'", "exp_avg", "companded8", "nearest, stochastic"),
        ),
        "wide moments": (dict(rounding={"exp_avg": "wide"}), ("'wide'", "exp_avg", "companded8")),
    }

    @each(case=REFUSED)
    def test_refused(self, case):
        options, words = case
        with self.refused(*words):
            Run(params=[parameter(64, dtype=BF16)], **options)

    def test_refused_of_groups(self):
        half, wide = [parameter(64, dtype=BF16)], [parameter(64)]
        with self.refused("'weight'"):
            st.AdamW([dict(params=wide, rounding={"weight": "nearest"})])
        opt = st.AdamW(wide)
        with self.refused_unchanged(opt, "'up'"):
            opt.add_param_group(dict(params=half, rounding={"weights": "up"}))


class Exact(Case):
    """Second moments of which maxima or small differences count are fp32 in every recipe."""

    TABLE = [
        ("Adam", dict(lr=0.01, amsgrad=True), ("exp_avg_sq", "max_exp_avg_sq")),
        ("AdamW", dict(lr=0.01, amsgrad=True), ("exp_avg_sq", "max_exp_avg_sq")),
        ("RMSprop", dict(lr=0.005, centered=True), ("square_avg", "grad_avg")),
        ("RMSprop", dict(lr=0.005, centered=True, momentum=0.9), ("square_avg", "grad_avg")),
    ]

    @each(case=TABLE, more=range(6))
    def test_formats(self, case, more):
        """Whatever the recipe and moments= say; the other moment does as it is told."""
        name, options, exact = case
        more, form = (
            (dict(), "companded8"),
            (dict(recipe="flash"), "flash8"),
            (dict(recipe="scant"), "companded8"),
            (dict(moments="bf16"), "bf16"),
            (dict(moments={slot: "companded8" for slot in exact}), "companded8"),
            (dict(rounding={"moments": "nearest"}), "companded8"),
        )[more]
        p = parameter(200, dtype=BF16)
        opt = Run(name, params=[p], **options, **more).steps(1).opt
        found = opt.state_dict()["param_groups"][0]["formats"]["bf16"]
        self.assertEqual({slot: found[slot] for slot in exact}, dict.fromkeys(exact, "fp32"))
        self.assertEqual(found.get("exp_avg" if "Adam" in name else "momentum_buffer", form), form)
        self.assertTrue(all(opt.state[p][slot].dtype is FP32 for slot in exact))

    def test_formats_refused(self):
        for words, moments in (
            (["fp13"], {"exp_avg_sq": "fp13"}),
            (["log4", "exp_avg"], "log4"),  # there is no other slot that could be in log4
        ):
            with self.subTest(moments), self.refused(*words):
                st.AdamW([parameter(9)], amsgrad=True, moments=moments)

    @each(case=TABLE)
    def test_follows_torch(self, case):
        """300 steps whose gradients shrink to a tenth after 100: maxima must stay where they were."""
        name, options, exact = case
        ours, theirs = beside_torch(name, recipe="scruple", **options)
        start = theirs.copied()
        for run in (ours, theirs):
            run.steps(100).steps(200, scale=0.1)
        saved = ours.opt.state_dict(as_="torch")["state"]
        for i, (p, q) in enumerate(zip(ours.weights(), theirs.params)):
            for slot in exact:
                found, true = saved[i][slot], theirs.opt.state[q][slot]
                self.assertLess(float((found - true).abs().max()), 1e-5 * float(true.abs().max()))
            # The 8-bit first moment, where there is one, is what is left of the difference.
            limit = 1e-5 if len(saved[i]) == 1 + len(exact) else 0.05
            moved = (q - start.params[i]).detach().norm()
            self.assertLess(float((p - q.detach()).norm() / moved), limit)

    @each(
        rule=[
            ("AdamW", "amsgrad", "exp_avg_sq"),
            ("Adam", "amsgrad", "exp_avg_sq"),
            ("RMSprop", "centered", "square_avg"),
        ],
        more=(dict(), dict(recipe="scant"), dict(moments="bf16")),
        began=(False, True),
    )
    def test_asked_for_between_steps(self, rule, more, began):
        """A hyperparameter that asks for exact moments, or stops, when others stand in the state: refused;
        set back, the run goes on."""
        name, ask, exact = rule
        run, plain = (Run(name, lr=1e-3, **{ask: began}, **more) for _ in range(2))
        opt, (group,) = run.steps(3).opt, run.opt.param_groups
        group[ask] = not began
        for look in (opt.state_dict, opt.master_weights, opt.step):
            with self.refused(exact, "Set that back"):
                look()
        group[ask] = began
        self.assertAlike(run.steps(2), plain.steps(5))

    def test_asked_for_in_fp32(self):
        """Nothing changes its format."""
        run = Run(dtype=FP32, recipe="fp32").steps(2)
        run.opt.param_groups[0]["amsgrad"] = True
        self.assertIn("max_exp_avg_sq", run.steps(2).opt.state_dict()["state"][0])


class Following(Case):
    def test_second_moments_after_a_shift(self):
        """A third of the elements has gradients 5 times larger, or smaller, from step 1,000 on. At step 3,000
        the RMS of ln(sqrt(v) / exact) was 0.08 to 0.12 over 8 seeds; rounded to nearest v lags: 0.55."""
        size, steps = 512, 3000
        for factor in (5.0, 0.2):
            made = torch.Generator().manual_seed(1)
            scale = torch.exp(torch.randn(size, generator=made))
            shifted = torch.where(torch.arange(size) % 3 == 0, factor * scale, scale)
            zeros = torch.nn.Parameter(torch.zeros(size, device=DEVICE))
            runs = [Run(params=copies([zeros]), lr=1e-4, rounding=rounding) for rounding in (None, "nearest")]
            theirs = runs[0].copied(torch.optim.AdamW, lr=1e-4)
            for step in range(steps):
                g = (torch.randn(size, generator=made) * (scale if step < 1000 else shifted)).to(DEVICE)
                for run in (*runs, theirs):
                    run.params[0].grad = g
                    run.opt.step()
            exact = theirs.opt.state[theirs.params[0]]["exp_avg_sq"]
            found = [run.opt.state_dict(as_="torch")["state"][0]["exp_avg_sq"] for run in runs]
            drawn, nearest = (float((v / exact).log().div(2).square().mean().sqrt()) for v in found)
            with self.subTest(factor=factor):
                self.assertLess(drawn, 0.12)
                self.assertGreater(nearest, 0.3)


if __name__ == "__main__":
    unittest.main()
