"""What a user writes into opt.state is what the next step uses: in every recipe, as in torch.optim."""

import collections
import copy
import gc
import inspect
import unittest
import weakref
from unittest import mock

import torch

import scruple
from support import BF16, DEVICE, FP32, STORAGE, WIDE, Case, ModelRun, Run, beside_torch, copies, each, mlp
from support import parameter, parameters, st, stored, take_steps, tensor
from scruple.torch import watched

# torch's own has it from 2.7 on.
needs_decoupled = unittest.skipUnless(
    "decoupled_weight_decay" in inspect.signature(torch.optim.Adam).parameters, "an older torch"
)
KINDS = {
    "SGD": dict(lr=0.1, momentum=0.9, dampening=0.3),
    "Adam": dict(lr=0.1),
    "AdamW": dict(lr=0.1, amsgrad=True),
    "Adagrad": dict(lr=0.1),
    "RMSprop": dict(lr=0.01, momentum=0.5, centered=True),
}


def alone(size=300, kind=st.AdamW, dtype=BF16, steps=0, **options):
    """A run over one vector, and that vector."""
    run = Run(kind, params=[parameter(size, dtype=dtype)], **options).steps(steps)
    return run, run.params[0]


class AsTorch(Case):
    """Recipe fp32 beside torch.optim: the same is written to both."""

    def follows(self, write, kinds=KINDS):
        for kind in kinds:
            with self.subTest(kind):
                runs = beside_torch(kind, **KINDS[kind])
                for run in runs:
                    write(run.steps(3).opt, run.params[0])
                    run.steps(3)
                self.assertNear(*runs, 2e-6)

    def test_a_parameter_is_restarted(self):
        theirs, kinds = Run(torch.optim.Adagrad, params=[parameter(2)]), KINDS.keys()
        theirs.opt.state.clear()
        try:  # not before torch 2.12
            theirs.steps(1)
        except KeyError:
            kinds -= {"Adagrad"}
        for write in (
            lambda opt, p: opt.state.__setitem__(p, {}),
            lambda opt, p: opt.state.pop(p),
            lambda opt, p: opt.state[p].clear(),
            lambda opt, p: opt.state.clear(),
            lambda opt, p: setattr(opt, "state", collections.defaultdict(dict)),
        ):
            self.follows(write, kinds)

    def test_moments(self):
        def moments(opt, p):
            return {name: x for name, x in sorted(opt.state[p].items()) if name != "step"}

        def replace(opt, p):
            for i, name in enumerate(moments(opt, p)):
                opt.state[p][name] = tensor(*p.shape, seed=70 + i).abs() * (0.01 if name == "grad_avg" else 1)

        def update(opt, p):
            opt.state[p].update({name: x * 4 for name, x in moments(opt, p).items()})

        def in_place(opt, p):
            for x in moments(opt, p).values():
                x.mul_(4)

        for write in (replace, update, in_place):
            self.follows(write)

    def test_step(self):
        kinds = ("Adam", "AdamW")
        for value in (0, 7, 20.0, torch.tensor(9)):  # torch's own must be tensors of floats

            def write(opt, p, value=value):
                mine = isinstance(opt, st.Adam)
                opt.state[p]["step"] = value if mine else torch.tensor(float(value))

            self.follows(write, kinds)
        for value in (0.0, 7.0, 40.0, 1000.0):
            self.follows(lambda opt, p: opt.state[p].update(step=torch.tensor(value)), kinds)
            self.follows(lambda opt, p: opt.state[p]["step"].fill_(value), kinds)

    @each(kind=("Adam", "AdamW"))
    def test_step_that_is_held(self, kind):
        """A state that was taken before the steps is the one that they use."""
        runs = beside_torch(kind, **KINDS[kind])
        for run in runs:
            state = run.steps(1).opt.state[run.params[0]]
            run.steps(2)
            state["step"] += 5
            self.assertEqual(float(state["step"]), 8)
            run.steps(2)
        self.assertNear(*(run.params[:1] for run in runs), 2e-6)

    @each(recipe=("fp32", "scruple"), kind=KINDS.keys())
    def test_before_the_first_step(self, recipe, kind):
        """A state in torch's form, by torch's names."""
        theirs = Run(getattr(torch.optim, kind), FP32, **KINDS[kind]).steps(2)
        ours = theirs.copied(kind, recipe=recipe, **KINDS[kind])
        for p, q in zip(ours.params, theirs.params):
            ours.opt.state[p] = copy.deepcopy(theirs.opt.state[q])
        ours.steps(1), theirs.steps(1)
        for p, q in zip(ours.params, theirs.params):
            scale = float((q.detach() - tensor(*q.shape, seed=0)).abs().max())
            self.assertNear([p], [q], 2e-6 if recipe == "fp32" else 0.1 * max(scale, 0.1))

    def test_no_momentum_yet(self):
        self.follows(lambda opt, p: opt.state[p].update(momentum_buffer=None), ("SGD",))


class InEveryRecipe(Case):
    """Against a new optimizer that was given the same."""

    @each(storage=STORAGE, dtype=(BF16, FP32))
    def test_restart(self, storage, dtype):
        how = {**stored(storage, dtype), "lr": 0.1, "seed": 3}
        run = Run(dtype=dtype, **how).steps(3)
        for p in run.params:
            run.opt.state[p] = {}
        fresh = run.copied(**how)
        self.assertAlike(run.steps(2, first=0), fresh.steps(2, first=0))

    @each(storage=STORAGE)
    def test_values_by_torchs_names(self, storage):
        """They are encoded as load_state_dict encodes them; reading alone changes no bit."""
        ours, twin = (Run(**storage).steps(3) for _ in range(2))
        for p in ours.params:
            self.assertEqual(ours.opt.state[p]["exp_avg"].shape, p.shape)
            self.assertNotEqual(ours.opt.state[p]["exp_avg_sq"].dtype, torch.uint8)
        self.assertAlike(ours, twin)
        self.assertAlike(ours.steps(1), twin.steps(1))
        saved = twin.opt.state_dict(as_="torch")
        for i, p in enumerate(ours.params):
            for name in ("exp_avg", "exp_avg_sq"):
                ours.opt.state[p][name] = saved["state"][i][name] = tensor(*p.shape, seed=30 + i).abs()
            ours.opt.state[p]["step"] = saved["state"][i]["step"] = torch.tensor(11.0)
        masters = twin.opt.master_weights()
        twin.opt.load_state_dict(saved)
        twin.opt.set_master_weights(masters)
        ours.steps(2), twin.steps(2)
        self.assertSame(ours.opt.state_dict()["state"], twin.opt.state_dict()["state"])
        self.assertSame(ours.weights(), twin.weights())

    @each(recipe=("scruple", "flash", "scant"))
    def test_written_in_place(self, recipe):
        """Values that were read count until the next step; written to after that, they are refused."""
        run, p = alone(recipe=recipe, steps=2)
        for name in ("exp_avg", "exp_avg_sq"):
            run.opt.state[p][name].zero_()
        values = run.opt.state_dict(as_="torch")["state"][0]
        self.assertEqual(float(values["exp_avg"].abs().max() + values["exp_avg_sq"].abs().max()), 0)

    @each(
        recipe=("scruple", "flash", "scant"),
        write={
            "in place": (lambda x: x, lambda held: held.zero_()),
            "past its version": (lambda x: x, lambda held: held.data.zero_()),
            "by its data": (lambda x: x.data, lambda held: held.zero_()),
            "by a view": (lambda x: x.view(-1)[7:], lambda held: held.zero_()),
            "in other memory": (lambda x: x, lambda held: setattr(held, "data", torch.zeros_like(held))),
        },
    )
    def test_written_after_a_step_took_it_over(self, recipe, write):
        """Refused, however much is read meanwhile; set again, it counts."""
        hold, change = write
        run, p = alone(recipe=recipe, steps=2)
        held = hold(run.opt.state[p]["exp_avg"])
        run.steps(2)
        run.opt.state[p]["exp_avg"].clone()
        run.steps(1)
        change(held)
        before = p.detach().clone()
        with self.refused("exp_avg", "read", "again"):
            run.steps(1)
        self.assertSame(p.detach(), before)
        run.steps(1)  # who was told can go on
        mine = torch.ones_like(p, dtype=FP32)
        for value, given in ((1.0, mine), (2.0, mine), (3.0, mine.data)):
            mine.fill_(value)
            run.opt.state[p]["exp_avg"] = given
            self.assertNear(run.opt.state_dict(as_="torch")["state"][0]["exp_avg"], mine, 0.1)
            run.steps(1)

    def test_what_nobody_holds_is_not_kept(self):
        run, alive, most = Run().steps(2), weakref.WeakSet(), []

        class Counted(watched.Lent):
            def __init__(self, values):
                super().__init__(values)
                alive.add(self)
                most.append(len(alive))

        for state in run.opt.state.values():
            state["exp_avg"].mul_(0.5)
        held = run.opt.state[run.params[0]]["exp_avg_sq"]
        with mock.patch("scruple.torch.optimizer.Lent", Counted):
            run.steps(1)
        self.assertEqual(len(most), len(run.params) + 1)
        self.assertEqual((max(most), len(alive)), (2, 1))
        del held
        run.steps(1)
        self.assertEqual(len(alive), 0)

    @each(recipe=("fp32", "scruple"), dtype=(FP32, BF16))
    def test_pruned_and_grown(self, recipe, dtype):
        """As Gaussian splatting does it: other rows, new parameter, the moments of those that stay."""
        rows = tensor(90, 5, scale=0.1).to(dtype)
        opt = st.Adam([dict(params=[torch.nn.Parameter(rows)], name="xyz")], lr=0.01, recipe=recipe)
        theirs = torch.optim.Adam([torch.nn.Parameter(rows.clone().float())], lr=0.01)
        keep = tensor(90, seed=4) > 0
        for turn in range(2):
            for run in (opt, theirs):
                p = run.param_groups[0]["params"][0]
                for step in range(3):
                    p.grad = tensor(*p.shape, seed=step).to(p.dtype)
                    run.step()
                held = run.state.get(p)
                for name in ("exp_avg", "exp_avg_sq"):
                    here = held[name]
                    held[name] = here[keep] if turn == 0 else torch.cat([here, torch.zeros_like(here)])
                del run.state[p]
                data = p.detach()[keep] if turn == 0 else torch.cat([p.detach(), p.detach()])
                run.param_groups[0]["params"][0] = torch.nn.Parameter(data.clone())
                run.state[run.param_groups[0]["params"][0]] = held
        p, q = (run.param_groups[0]["params"][0] for run in (opt, theirs))
        p.grad, q.grad = tensor(*p.shape, seed=9).to(dtype), tensor(*p.shape, seed=9)
        opt.step(), theirs.step()
        self.assertEqual(int(opt.state[p]["step"]), int(theirs.state[q]["step"]))
        exact = recipe == "fp32" and dtype == FP32
        self.assertLess(float((p.float() - q).detach().abs().max()), 1e-6 if exact else 4e-3)
        moved = float((q.detach() - (rows.float()[keep].repeat(2, 1))).abs().max())
        self.assertGreater(moved, 0.03)  # so that the limit says something

    def test_refused_before_anything_is_stepped(self):
        run = Run().steps(1)
        opt, ps = run.opt, run.params
        for name, value, words in (
            ("exp_avg", tensor(3), ("(3,)", "(33, 7)")),
            ("exp_avg_sq", 3.0, ("3.0",)),
            ("exp_avg", torch.zeros(33, 7, dtype=torch.int64), ("int64",)),
            ("exp_avg_sq", None, ("None",)),
            ("exp_avg_sq", torch.full((33, 7), -1.0), ("negative",)),
            ("exp_avg", torch.full((33, 7), float("nan")), ("not finite",)),
            ("step", -1, ("-1",)),
            ("step", 2**40, ("1099511627776",)),
            ("step", 1.5, ("1.5",)),
            ("step", "two", ("two",)),
        ):
            with self.subTest(name, words=words):
                kept, before = dict(opt.state[ps[0]]), copies(ps)
                opt.state[ps[0]][name] = value
                for _ in range(2):  # and again, until it is mended
                    with self.refused(name, *words):
                        run.steps(1)
                self.assertSame(ps, before)
                opt.state[ps[0]] = kept
                run.steps(1)
        for take in (lambda state: state.pop("exp_avg"), lambda state: state.__delitem__("exp_avg")):
            for read in (False, True):
                state, was = opt.state[ps[1]], opt.state[ps[1]]["exp_avg"].clone() if read else None
                found = take(state)
                self.assertTrue(found is None or was is None or torch.equal(found, was))
                self.assertNotIn("exp_avg", state)
                with self.refused("lacks exp_avg", "{}"):
                    opt.step()
                opt.state[ps[1]] = {}
                opt.step()
        with self.assertRaises(KeyError):
            opt.state[ps[1]].pop("nothing")
        self.assertEqual(opt.state[ps[1]].pop("nothing", 3), 3)

    @each(
        release=(dict(), dict(policy="compressed"), dict(policy="compressed", accumulate=2, max_norm=1.0)),
    )
    def test_under_release(self, release):
        written, anew = (ModelRun(release=release).steps(4) for _ in range(2))
        written.opt.state[written.params[0]] = {}
        written.opt.state[written.params[1]]["step"].fill_(7)
        anew.handle.remove()
        saved = anew.opt.state_dict()
        del saved["state"][0]
        saved["state"][1]["step"] = torch.tensor(7)
        anew.opt.load_state_dict(saved)
        self.assertAlike(written.steps(4), anew.release(**release).steps(4))
        if "accumulate" in release:
            for run in (written, anew):
                run.loss(9).backward()
                run.opt.state[run.params[0]] = {}
                with self.refused("micro-batches", "between steps"):
                    run.loss(10).backward()

    @each(recipe=("fp32", "mixed", "scruple"))
    def test_extra_bits_stay_with_their_weight(self, recipe):
        """Moments can be copied to another parameter; its master copy or extra bits do not come along."""
        for copied in (copy.deepcopy, dict, lambda s: {k: v.clone() for k, v in s.items()}):
            a, b = (torch.nn.Parameter(torch.full((512,), x, device=DEVICE).bfloat16()) for x in (1.0, 5.0))
            opt = st.AdamW([a, b], lr=1e-3, recipe=recipe)
            take_steps(opt, [a], 1)
            opt.state[b] = copied(opt.state.pop(a))
            a.grad = None
            take_steps(opt, [b], 1)
            self.assertLess(float((b - 5).detach().abs().max()), 0.1)
        for again in (lambda s: s, lambda s: collections.defaultdict(dict, s), copy.copy):
            wide = opt.master_weights()[b]
            opt.state = again(opt.state)
            self.assertSame(opt.master_weights()[b], wide)
        self.assertEqual(len(opt.state | {}), len(opt.state.copy()))

    @each(held=(False, True))
    def test_counts_that_only_the_device_knows(self, held):
        """A write to one of them leaves the others' alone."""
        run = Run()

        def steps(count):
            for _ in range(count):
                run.opt.found_inf = torch.zeros((), device=DEVICE)
                run.steps(1)

        steps(1)
        shown = run.opt.state[run.params[0]]["step"]
        steps(5)
        (shown if held else run.opt.state[run.params[0]]["step"]).fill_(0)
        steps(1)
        self.assertEqual([int(run.opt.state[p]["step"]) for p in run.params], [1, 7, 7, 7])

    def test_as_a_dict(self):
        run, p = alone()
        self.assertNotIn("exp_avg", run.opt.state[p])
        state = run.steps(2).opt.state[p]
        self.assertIn("exp_avg", state)
        self.assertEqual(state.get("exp_avg").shape, p.shape)
        self.assertSame(state.setdefault("exp_avg_sq", None), state["exp_avg_sq"])
        self.assertEqual((state.get("ema", 3), state.setdefault("ema", 4), state["ema"]), (3, 4, 4))
        state["exp_avg"].data.zero_()  # which no version tells
        run.opt.state[p]["step"].data.fill_(100)
        self.assertEqual(float(run.opt.state_dict(as_="torch")["state"][0]["exp_avg"].abs().max()), 0)
        self.assertEqual(run.steps(1).counts(), {101})
        values = torch.ones_like(p)
        run.opt.state[p]["exp_avg"] = values
        run.opt.state_dict()
        values.zero_()  # too late
        with self.refused("exp_avg", "set", "again"):
            run.steps(1)

    def test_a_count_written_past_its_version(self):
        run, p = alone(steps=2)
        run.opt.state[p]["step"].data.fill_(100)
        self.assertEqual(int(run.steps(1).opt.state[p]["step"]), 101)

    def test_a_state_that_was_moved_is_written_to_later(self):
        """Whoever has moved a state to another parameter holds that parameter's state."""
        ends = []
        for kind, how in ((st.Adam, WIDE), (torch.optim.Adam, {})):
            (run, old), new = alone(kind=kind, dtype=FP32, lr=0.1, steps=2, **how), parameter(300, seed=1)
            held = run.opt.state.pop(old)
            run.params = run.opt.param_groups[0]["params"] = [new]
            run.opt.state[new] = held
            run.steps(2, first=0)
            held["exp_avg"] = torch.zeros_like(new)
            held["step"] = torch.tensor(0.0)
            ends.append(run.steps(1))
        self.assertNear(*ends, 2e-6)

    def test_one_state_for_two_optimizers(self):
        """Each steps by its own learning rate, and sees what is written to its own."""
        p = parameter(300, dtype=BF16)
        one, two = (Run(params=[p], lr=lr, weight_decay=0) for lr in (0.0, 0.1))
        before = one.steps(2).weights()[0].clone()
        two.opt.state = one.opt.state
        self.assertSame(one.steps(1).weights()[0], before)
        two.steps(1)
        self.assertGreater(float((p.detach() - before).abs().max()), 0.01)
        one.opt.param_groups[0]["lr"] = 0.1
        one.opt.state[p]["exp_avg"] = torch.full_like(p, -50.0, dtype=FP32)
        before = p.detach().clone()
        one.steps(1, first=0)
        self.assertGreater(float((p.detach() - before).min()), 1.0)  # it goes by what was written
        other, master = Run(params=[parameter(300, seed=1, dtype=BF16)], lr=0.1), one.opt.master_weights()[p]
        other.opt.state[other.params[0]] = one.opt.state[p]
        other.steps(1)
        self.assertSame(one.opt.master_weights()[p], master)

    @each(storage=STORAGE)
    def test_moments_that_are_moved_in_memory(self, storage):
        """`.data = ...`, as loops that offload state do, leaves no note."""
        run = Run(**storage)
        for _ in range(4):
            for state in run.steps(1).opt.state.values():
                for value in filter(torch.is_tensor, state.values()):
                    value.data = value.data.clone()
        self.assertAlike(Run(**storage).steps(4), run)
        run.opt.state[run.params[0]]["step"].data = torch.tensor(50.0)
        self.assertEqual(int(run.steps(1).opt.state[run.params[0]]["step"]), 51)

    @each(storage=STORAGE)
    def test_data_that_is_set_by_an_old_reference(self, storage):
        """Seen like any other, though nobody looked at opt.state; and nobody else's memory is written to."""
        runs = []
        for old in (False, True):
            run, p = alone(4096, steps=1, **storage)
            held = {name: x for name, x in run.opt.state[p].items() if name.startswith("exp_avg_sq")}
            count = run.opt.state[p]["step"]
            run.steps(2)
            for name, x in held.items():
                if old:
                    x.data = torch.zeros_like(x)
                else:
                    run.opt.state[p][name].zero_()
            if old:
                count.data = torch.tensor(7.0)
            else:
                run.opt.state[p]["step"].fill_(7)
            others = [torch.full_like(p, 7.0) for _ in range(8)]
            runs.append(run.steps(1))
            self.assertTrue(all(bool((other == 7).all()) for other in others))
        self.assertAlike(*runs)

    @each(
        write={
            "a moment": lambda mine: mine.update(exp_avg=torch.zeros(300)),
            "the step": lambda mine: mine.update(step=9),
            "one less": lambda mine: mine.pop("exp_avg_sq"),
            "one more": lambda mine: mine.update(mine="own"),
        }
    )
    def test_a_plain_dict_that_is_written_to_later(self, write):
        run, p = alone(dtype=FP32, steps=2)
        mine = {"exp_avg": torch.ones(300), "exp_avg_sq": torch.ones(300), "step": 3}
        run.opt.state[p] = mine
        run.steps(2)
        before, held = p.detach().clone(), dict(mine)
        write(mine)
        for _ in range(2):  # until it is mended
            with self.refused("write to opt.state"):
                run.steps(1)
        self.assertTrue(torch.equal(p, before))
        mine.clear()
        mine.update(held)
        run.steps(1)
        run.opt.state[p] = {}
        mine.update(step=0)  # nobody's now
        run.steps(1)

    def test_a_plain_dict_is_not_kept(self):
        run, p = alone(dtype=FP32, steps=2)
        alive = weakref.ref(values := torch.ones(300))
        run.opt.state[p] = {"exp_avg": values, "exp_avg_sq": torch.ones(300), "step": 3}
        del values
        run.steps(2)
        self.assertIsNone(alive())

    @each(recipe=("fp32", "scruple", "flash"))
    def test_no_momentum_again(self, recipe):
        """As torch.optim.SGD has it before its first step; of codes, too."""
        runs = [
            alone(kind=st.SGD, dtype=FP32, lr=0.1, momentum=0.9, recipe=recipe),
            alone(kind=torch.optim.SGD, dtype=FP32, lr=0.1, momentum=0.9),
        ]
        for run, p in runs:
            run.steps(3).opt.state[p]["momentum_buffer"] = None
            run.steps(2)
        self.assertNear(runs[0][0], runs[1][0], 2e-6 if recipe == "fp32" else 2e-2)

    def test_a_value_that_stays_alive_costs_no_layout(self):
        run = Run().steps(2)
        kept = torch.zeros_like(run.params[0], dtype=FP32)
        run.opt.state[run.params[0]]["exp_avg"] = kept
        run.steps(1)
        with mock.patch.object(run.opt, "_layout", side_effect=AssertionError):
            run.steps(2)

    def test_torchs_own_state_is_not_written_to(self):
        """A moment in fp32 could be a plane as it stands; it stays torch's."""
        (ours, _), (theirs, _) = alone(kind=st.Adam, dtype=FP32, **WIDE), alone(
            kind=torch.optim.Adam, dtype=FP32
        )
        saved = theirs.steps(2).opt.state_dict()
        before = copy.deepcopy(saved)
        ours.opt.load_state_dict(saved)
        ours.steps(2)
        self.assertSame(saved["state"][0]["exp_avg"], before["state"][0]["exp_avg"])
        theirs.steps(1)  # which writes to it
        ours.steps(1)

    def test_in_inference_mode(self):
        run, _ = alone()
        with torch.inference_mode():
            run.steps(2)
        self.assertEqual(run.steps(1).counts(), {3})

    def test_a_note_costs_no_table(self):
        """Entries of the user's own may be written at every step."""
        run = Run().steps(2)
        tables, p = list(map(id, run.opt._tables.values())), run.params[0]
        for _ in range(3):
            run.opt.state[p]["ema"] = p.detach().clone()
            run.steps(1)
        self.assertEqual(list(map(id, run.opt._tables.values())), tables)

    def test_nothing_keeps_an_optimizer_alive(self):
        """Its memory goes with it, and does not wait for a collection."""
        run, p = alone(steps=2)
        plane = weakref.ref(run.opt.state[p]["exp_avg/codes"])
        gc.disable()
        self.addCleanup(gc.enable)
        del run
        self.assertIsNone(plane())


class OwnEntries(Case):
    """Of the user's: torch keeps them, and casts and moves tensors among them."""

    @each(as_=("scruple", "torch"))
    def test_kept(self, as_):
        run = Run()
        ps, state = run.params, run.opt.state
        state[ps[0]]["early"] = 1  # before the first step, which it must not hinder
        run.steps(1)
        state["mine"] = {"epoch": 3, "losses": [1.0, 2.0]}
        state["count"] = 5
        state[ps[0]]["ema"] = tensor(33, 7)
        state[ps[1]]["note"] = "text"
        saved = copy.deepcopy(run.opt.state_dict(as_=as_))
        self.assertEqual(saved["state"]["mine"], {"epoch": 3, "losses": [1.0, 2.0]})
        other = run.resumed(state=saved)
        qs, found = other.params, other.opt.state
        self.assertEqual((found["mine"], found["count"]), (state["mine"], 5))
        self.assertEqual((found[qs[0]]["early"], found[qs[1]]["note"]), (1, "text"))
        self.assertSame(found[qs[0]]["ema"], tensor(33, 7).to(BF16))
        run.steps(2), other.steps(2)
        if as_ == "scruple":
            self.assertSame(run.weights(), other.weights())
            self.assertSame(*(x.opt.state_dict()["state"].keys() for x in (run, other)))

    def test_without_a_step(self):
        run, p = alone(8)
        run.opt.state[p]["ema"] = tensor(8)
        run.opt.load_state_dict(run.opt.state_dict())
        self.assertEqual(set(run.opt.state[p]), {"ema"})
        self.assertIn("ema", run.steps(1).opt.state[p])

    def test_names_that_other_optimizers_use(self):
        run, p = alone(8, steps=1)
        run.opt.state[p]["sum"] = 7
        self.assertEqual(run.opt.state_dict()["state"][0]["sum"], 7)
        run.opt.load_state_dict(run.opt.state_dict())
        self.assertEqual(run.opt.state[p]["sum"], 7)

    def test_torchs_state(self):
        theirs, q = alone(8, torch.optim.AdamW, FP32, steps=1)
        theirs.opt.state[q]["ema"], theirs.opt.state["mine"] = tensor(8), 4
        ours = theirs.resumed(st.AdamW)
        self.assertSame(ours.opt.state[ours.params[0]]["ema"], tensor(8))
        self.assertEqual(ours.opt.state["mine"], 4)

    def test_a_checkpoint_has_no_place_for_them(self):

        model = mlp(BF16)
        opt = st.AdamW(model.parameters())
        for name, write in (
            ("mine", lambda: opt.state.update(mine=1)),
            ("ema", lambda: opt.state[next(model.parameters())].update(ema=tensor(3))),
        ):
            opt.state.clear()
            write()
            with self.refused(name, "notes="):
                scruple.save(opt, model, "/nonexistent/never")


class Decay(Case):
    """AdamW's state in Adam stays decoupled, as in torch; Adam's in AdamW becomes so."""

    @needs_decoupled
    @each(as_=("scruple", "torch"), kinds=(("AdamW", "Adam"), ("Adam", "AdamW")))
    def test_adamw_into_adam(self, as_, kinds):
        run = Run(kinds[0], FP32, recipe="fp32", lr=0.1, weight_decay=0.5).steps(2)
        other = run.resumed(kinds[1], run.opt.state_dict(as_=as_), recipe="fp32")
        theirs = run.resumed(getattr(torch.optim, kinds[1]), run.opt.state_dict(as_="torch"))
        self.assertIs(other.opt.param_groups[0]["decoupled_weight_decay"], True)
        self.assertNear(other.steps(2), theirs.steps(2), 2e-6)

    @needs_decoupled
    def test_of_one_group(self):
        ps, qs, opts = parameters(), parameters(), []
        for kind, xs, more in ((st.Adam, ps, WIDE), (torch.optim.Adam, qs, {})):
            groups = [dict(params=xs[:2], decoupled_weight_decay=True), dict(params=xs[2:])]
            opts.append(kind(groups, lr=0.1, weight_decay=0.5, **more))
        for _ in range(2):
            take_steps(opts[0], ps, 2), take_steps(opts[1], qs, 2)
            self.assertNear(ps, qs, 2e-6)
            for opt in opts:
                opt.param_groups[0]["decoupled_weight_decay"] = False  # from the next step on

    def test_sgdw_is_not_sgd(self):
        for one, other in ((st.SGDW, st.SGD), (st.SGD, st.SGDW)):
            p = parameter(4)
            with self.refused("SGDW", "decay"):
                other([p]).load_state_dict(one([p]).state_dict())

    def test_states_from_before(self):
        """AdamW's of version 2 said nothing of it; it alone had decay_lr."""
        p, q = parameter(4), parameter(4)
        saved = st.AdamW([p]).state_dict()
        del saved["param_groups"][0]["decoupled_weight_decay"]
        opt = st.Adam([q])
        opt.load_state_dict(saved)
        self.assertIs(opt.param_groups[0]["decoupled_weight_decay"], True)


class AtConstruction(Case):
    def test_frozen_parameters_of_any_dtype(self):
        """As in QLoRA: nobody's business until they have a gradient."""
        others = dict(codes=torch.uint8, wide=torch.float64)
        others = {name: torch.zeros(5, dtype=dtype, device=DEVICE) for name, dtype in others.items()}
        frozen = {name: torch.nn.Parameter(x, requires_grad=False) for name, x in others.items()}
        model = torch.nn.ParameterDict({**frozen, "lora": parameter(6, dtype=BF16)})
        opt = st.AdamW(model.parameters(), lr=0.1)
        take_steps(opt, [model["lora"]], 2)
        saved = opt.state_dict()
        self.assertEqual(list(saved["state"]), [list(model).index("lora")])
        opt.load_state_dict(saved)
        self.assertEqual(list(opt.master_weights()), [model["lora"]])
        opt.load_master_state_dict(model, opt.master_state_dict(model))
        self.assertEqual(opt.master_state_dict(model)["codes"].dtype, torch.uint8)
        model["wide"].requires_grad_(True)
        model["wide"].grad = torch.ones_like(model["wide"])
        with self.refused("float64"):
            opt.step()
        self.assertNotIn(model["wide"], opt.state)

    def test_without_memory(self):
        run = Run(params=[torch.nn.Parameter(torch.empty(4, device="meta"))])
        run.params[0].grad = torch.empty(4, device="meta")
        with self.refused("meta", "to_empty"):
            run.opt.step()
        self.assertEqual(len(run.opt.state), 0)

    def test_repeated_parameters(self):
        """Its first place counts, and it is stepped once."""
        p, q, r = parameter(4), parameter(4, seed=1), parameter(4)
        with self.assertWarns(UserWarning):
            opt = st.AdamW([p, q, p], lr=0.1)
        take_steps(opt, [p], 1), take_steps(st.AdamW([r], lr=0.1), [r], 1)
        self.assertSame(p.detach(), r.detach())
        for groups in ([p, q, p],), ([p, q], [q, p]):
            found = []
            for kind in (st.AdamW, torch.optim.AdamW):
                opt = kind([parameter(1)])
                opt.param_groups = [{**opt.param_groups[0], "params": ps} for ps in groups]
                found.append([x["params"] for x in opt.state_dict()["param_groups"]])
            self.assertEqual(*found)

    def test_a_group_that_asks_for_what_it_cannot_have(self):
        """Beside another in bf16, which could: now, and where it is asked for later."""
        wide, narrow = parameter(300), parameter(300, dtype=BF16)
        with self.refused("weights='bf16+8'", "cast_model"):
            st.AdamW([dict(params=[wide], weights="bf16+8"), dict(params=[narrow])])
        opt = st.AdamW([dict(params=[wide]), dict(params=[narrow])], lr=0.01)
        take_steps(opt, [wide, narrow], 1)
        opt.param_groups[0]["weights"] = "bf16+8"
        for _ in range(2):
            with self.refused("weights='bf16+8'", "cast_model"):
                take_steps(opt, [wide, narrow], 1)
        opt.param_groups[0]["weights"] = None
        take_steps(opt, [wide, narrow], 1)

    def test_mixed_dtypes_take_one_choice_of_weights(self):
        """fp32 ones beside those that it is for keep all of their bits."""
        ps = [parameter(70, dtype=BF16), parameter(70)]
        opt = st.AdamW([dict(params=ps[1:]), dict(params=ps[:1])], weights="bf16+16")
        take_steps(opt, ps, 1)
        self.assertEqual(opt.state[ps[0]]["extra"].dtype, torch.int16)
        self.assertNotIn("extra", opt.state[ps[1]])


if __name__ == "__main__":
    unittest.main()
