"""What a user writes into opt.state is what the next step uses: in every recipe, as in torch.optim."""

import collections
import copy
import inspect
import unittest
import weakref
from unittest import mock

import torch
from support import (
    DEVICE,
    STORAGE,
    Case,
    give_gradients,
    loss_of,
    mlp,
    parameter,
    parameters,
    picture,
    st,
    stored,
    take_steps,
    tensor,
)

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


def pair(kind, dtype=torch.float32, **options):
    """Ours and torch's over the same parameters."""
    ps, qs = parameters(dtype), parameters(dtype)
    return (
        ps,
        getattr(st, kind)(ps, **KINDS[kind], **options),
        qs,
        getattr(torch.optim, kind)(qs, **KINDS[kind]),
    )


class AsTorch(Case):
    """Recipe fp32 beside torch.optim: the same is written to both."""

    def follows(self, write, kinds=KINDS):
        for kind in kinds:
            with self.subTest(kind):
                ps, ours, qs, theirs = pair(kind, recipe="fp32")
                take_steps(ours, ps, 3), take_steps(theirs, qs, 3)
                write(ours, ps[0]), write(theirs, qs[0])
                take_steps(ours, ps, 3, first=3), take_steps(theirs, qs, 3, first=3)
                for p, q in zip(ps, qs):
                    self.assertLess(float((p - q).detach().abs().max()), 2e-6)

    def test_a_parameter_is_restarted(self):
        q = parameter(2)
        theirs = torch.optim.Adagrad([q])
        theirs.state.clear()
        try:  # not before torch 2.12
            take_steps(theirs, [q], 1)
            kinds = KINDS
        except KeyError:
            kinds = KINDS.keys() - {"Adagrad"}
        self.follows(lambda opt, p: opt.state.__setitem__(p, {}), kinds)
        self.follows(lambda opt, p: opt.state.pop(p), kinds)
        self.follows(lambda opt, p: opt.state[p].clear(), kinds)
        self.follows(lambda opt, p: opt.state.clear(), kinds)
        self.follows(lambda opt, p: setattr(opt, "state", collections.defaultdict(dict)), kinds)

    def test_moments(self):
        def replace(opt, p):
            for i, name in enumerate(sorted(opt.state[p])):
                if name != "step":
                    opt.state[p][name] = tensor(*p.shape, seed=70 + i).abs() * (
                        0.01 if name == "grad_avg" else 1
                    )

        def update(opt, p):
            opt.state[p].update({name: x * 4 for name, x in opt.state[p].items() if name != "step"})

        def in_place(opt, p):
            for name, x in opt.state[p].items():
                if name != "step":
                    x.mul_(4)

        for write in (replace, update, in_place):
            self.follows(write)

    def test_step(self):
        def fill(opt, p):
            opt.state[p]["step"].fill_(40)

        def held(opt, p):
            states[opt]["step"] += 5

        states, kinds = {}, ("Adam", "AdamW")
        for value in (0, 7, 20.0, torch.tensor(9)):  # torch's own must be tensors of floats

            def write(opt, p, value=value):
                mine = isinstance(opt, st.Adam)
                opt.state[p]["step"] = value if mine else torch.tensor(float(value))

            self.follows(write, kinds)
        for value in (0.0, 7.0, 1000.0):
            self.follows(lambda opt, p: opt.state[p].update(step=torch.tensor(value)), kinds)
            self.follows(lambda opt, p: opt.state[p]["step"].fill_(value), kinds)
        self.follows(fill, kinds)

        for kind in kinds:  # a state that was taken before the steps is the one that they use
            ps, ours, qs, theirs = pair(kind, recipe="fp32")
            take_steps(ours, ps, 1), take_steps(theirs, qs, 1)
            states = {ours: ours.state[ps[0]], theirs: theirs.state[qs[0]]}
            take_steps(ours, ps, 2, first=1), take_steps(theirs, qs, 2, first=1)
            for opt in (ours, theirs):
                held(opt, None)
                self.assertEqual(float(states[opt]["step"]), 8)
            take_steps(ours, ps, 2, first=3), take_steps(theirs, qs, 2, first=3)
            self.assertLess(float((ps[0] - qs[0]).detach().abs().max()), 2e-6)

    def test_before_the_first_step(self):
        """A state in torch's form, by torch's names."""
        for recipe in ("fp32", "scruple"):
            for kind, options in KINDS.items():
                ps, ours, qs, theirs = pair(kind, recipe=recipe)
                take_steps(theirs, qs, 2)
                for p, q in zip(ps, qs):
                    with torch.no_grad():
                        p.copy_(q)
                    ours.state[p] = copy.deepcopy(theirs.state[q])
                take_steps(ours, ps, 1, first=2), take_steps(theirs, qs, 1, first=2)
                for p, q in zip(ps, qs):
                    scale = float((q.detach() - tensor(*q.shape, seed=0)).abs().max())
                    limit = 2e-6 if recipe == "fp32" else 0.1 * max(scale, 0.1)
                    self.assertLess(float((p - q).detach().abs().max()), limit, f"{kind} {recipe}")

    def test_no_momentum_yet(self):
        self.follows(lambda opt, p: opt.state[p].update(momentum_buffer=None), ("SGD",))


class InEveryRecipe(Case):
    """Against a new optimizer that was given the same."""

    def test_restart(self):
        for label, options in STORAGE:
            for dtype in (torch.bfloat16, torch.float32):
                with self.subTest(label, dtype=dtype):
                    how = dict(
                        lr=0.1, seed=3, **{k: v for k, v in stored(options, dtype).items() if k != "seed"}
                    )
                    ps = parameters(dtype)
                    opt = st.AdamW(ps, **how)
                    take_steps(opt, ps, 3)
                    for p in ps:
                        opt.state[p] = {}
                    qs = [torch.nn.Parameter(p.detach().clone()) for p in ps]
                    fresh = st.AdamW(qs, **how)
                    take_steps(opt, ps, 2), take_steps(fresh, qs, 2)
                    self.assertSame(picture(opt), picture(fresh))

    def test_values_by_torchs_names(self):
        """They are encoded as load_state_dict encodes them; reading alone changes no bit."""
        for label, options in STORAGE:
            with self.subTest(label):
                ps, qs = parameters(torch.bfloat16), parameters(torch.bfloat16)
                ours, same = st.AdamW(ps, lr=0.01, **options), st.AdamW(qs, lr=0.01, **options)
                take_steps(ours, ps, 3), take_steps(same, qs, 3)
                for p in ps:
                    self.assertEqual(ours.state[p]["exp_avg"].shape, p.shape)
                    self.assertEqual(ours.state[p]["exp_avg_sq"].dtype == torch.uint8, False)
                self.assertSame(picture(ours), picture(same))
                take_steps(ours, ps, 1, first=3), take_steps(same, qs, 1, first=3)
                self.assertSame(picture(ours), picture(same))
                saved = same.state_dict(as_="torch")
                for i, p in enumerate(ps):
                    for name in ("exp_avg", "exp_avg_sq"):
                        values = tensor(*p.shape, seed=30 + i).abs()
                        ours.state[p][name] = values
                        saved["state"][i][name] = values
                    ours.state[p]["step"] = saved["state"][i]["step"] = torch.tensor(11.0)
                masters = same.master_weights()
                same.load_state_dict(saved)
                same.set_master_weights(masters)
                take_steps(ours, ps, 2, first=4), take_steps(same, qs, 2, first=4)
                self.assertSame(picture(ours)["state"]["state"], picture(same)["state"]["state"])
                self.assertSame([p.detach() for p in ps], [q.detach() for q in qs])

    def test_written_in_place(self):
        """Values that were read count until the next step; written to after that, they are refused."""
        for recipe in ("scruple", "flash", "scant"):
            p = parameter(300, dtype=torch.bfloat16)
            opt = st.AdamW([p], lr=0.01, recipe=recipe)
            take_steps(opt, [p], 2)
            for name in ("exp_avg", "exp_avg_sq"):
                opt.state[p][name].zero_()
            values = opt.state_dict(as_="torch")["state"][0]
            self.assertEqual(float(values["exp_avg"].abs().max() + values["exp_avg_sq"].abs().max()), 0)
            old = opt.state[p]["exp_avg"]
            take_steps(opt, [p], 1)
            old.zero_()
            before = p.detach().clone()
            with self.refused("exp_avg", "read", "again"):
                take_steps(opt, [p], 1)
            self.assertSame(p.detach(), before)
            take_steps(opt, [p], 1)  # who was told can go on

    def test_pruned_and_grown(self):
        """As Gaussian splatting does it: other rows, new parameter, the moments of those that stay."""
        for recipe in ("fp32", "scruple"):
            for dtype in (torch.float32, torch.bfloat16):
                with self.subTest(recipe, dtype=dtype):
                    self.prune_and_grow(recipe, dtype)

    def prune_and_grow(self, recipe, dtype):
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
        exact = recipe == "fp32" and dtype == torch.float32
        self.assertLess(float((p.float() - q).detach().abs().max()), 1e-6 if exact else 4e-3)
        moved = float((q.detach() - (rows.float()[keep].repeat(2, 1))).abs().max())
        self.assertGreater(moved, 0.03)  # so that the limit says something

    def test_refused_before_anything_is_stepped(self):
        ps = parameters(torch.bfloat16)
        opt = st.AdamW(ps, lr=0.01)
        take_steps(opt, ps, 1)
        for name, value, words in (
            ("exp_avg", tensor(3), ("exp_avg", "(3,)", "(33, 7)")),
            ("exp_avg_sq", 3.0, ("exp_avg_sq", "3.0")),
            ("exp_avg", torch.zeros(33, 7, dtype=torch.int64), ("exp_avg", "int64")),
            ("exp_avg_sq", None, ("exp_avg_sq", "None")),
            ("exp_avg_sq", torch.full((33, 7), -1.0), ("exp_avg_sq", "negative")),
            ("exp_avg", torch.full((33, 7), float("nan")), ("exp_avg", "not finite")),
            ("step", -1, ("step", "-1")),
            ("step", 2**40, ("step", "1099511627776")),
            ("step", 1.5, ("step", "1.5")),
            ("step", "two", ("step", "two")),
        ):
            kept, before = dict(opt.state[ps[0]]), [p.detach().clone() for p in ps]
            opt.state[ps[0]][name] = value
            for _ in range(2):  # and again, until it is mended
                with self.refused(*words):
                    take_steps(opt, ps, 1, first=1)
            self.assertSame([p.detach() for p in ps], before)
            opt.state[ps[0]] = kept
            take_steps(opt, ps, 1, first=1)
        del opt.state[ps[1]]["exp_avg/codes"], opt.state[ps[1]]["exp_avg/scale"]
        with self.refused("lacks exp_avg", "{}"):
            opt.step()
        opt.state[ps[1]] = {}
        opt.step()

    def test_under_release(self):
        for release in (
            dict(),
            dict(policy="compressed"),
            dict(policy="compressed", accumulate=2, max_norm=1.0),
        ):
            runs = []
            for how in ("written", "made anew"):
                model = mlp(torch.bfloat16)
                opt = st.AdamW(model.parameters(), lr=1e-2)
                handle = st.release_gradients(model, opt, **release)
                first = next(model.parameters())

                def steps(begin, model=model, opt=opt):
                    for step in range(begin, begin + 4):
                        loss_of(model, step).backward()
                        opt.step()

                steps(0)
                if how == "written":
                    opt.state[first] = {}
                    opt.state[list(model.parameters())[1]]["step"].fill_(7)
                else:
                    handle.remove()
                    saved = opt.state_dict()
                    del saved["state"][0]
                    saved["state"][1]["step"] = torch.tensor(7)
                    opt.load_state_dict(saved)
                    handle = st.release_gradients(model, opt, **release)
                steps(4)
                runs.append(picture(opt, model))
                if "accumulate" in release:
                    loss_of(model, 9).backward()
                    opt.state[first] = {}
                    with self.refused("micro-batches", "between steps"):
                        loss_of(model, 10).backward()
            self.assertSame(*runs)

    def test_extra_bits_stay_with_their_weight(self):
        """Moments can be copied to another parameter; its master copy or extra bits do not come along."""
        for recipe in ("fp32", "mixed", "scruple"):
            for copied in (copy.deepcopy, dict, lambda s: {k: v.clone() for k, v in s.items()}):
                a, b = (
                    torch.nn.Parameter(torch.full((512,), x, device=DEVICE).bfloat16()) for x in (1.0, 5.0)
                )
                opt = st.AdamW([a, b], lr=1e-3, recipe=recipe)
                give_gradients([a], 0)
                opt.step()
                opt.state[b] = copied(opt.state.pop(a))
                a.grad = None
                give_gradients([b], 0)
                opt.step()
                self.assertLess(float((b - 5).detach().abs().max()), 0.1)
            for again in (lambda s: s, lambda s: collections.defaultdict(dict, s), copy.copy):
                wide = opt.master_weights()[b]
                opt.state = again(opt.state)
                self.assertSame(opt.master_weights()[b], wide)
        self.assertEqual(len(opt.state | {}), len(opt.state.copy()))

    def test_counts_that_only_the_device_knows(self):
        """A write to one of them leaves the others' alone."""
        for held in (False, True):
            ps = parameters(torch.bfloat16)
            opt = st.AdamW(ps, lr=0.01)

            def steps(count, opt=opt, ps=ps):
                for step in range(count):
                    give_gradients(ps, step)
                    opt.found_inf = torch.zeros((), device=DEVICE)
                    opt.step()

            steps(1)
            shown = opt.state[ps[0]]["step"]
            steps(5)
            (shown if held else opt.state[ps[0]]["step"]).fill_(0)
            steps(1)
            self.assertEqual([int(opt.state[p]["step"]) for p in ps], [1, 7, 7, 7])

    def test_as_a_dict(self):
        p = parameter(300, dtype=torch.bfloat16)
        opt = st.AdamW([p], lr=0.01)
        self.assertNotIn("exp_avg", opt.state[p])
        take_steps(opt, [p], 2)
        state = opt.state[p]
        self.assertIn("exp_avg", state)
        self.assertEqual(state.get("exp_avg").shape, p.shape)
        self.assertSame(state.setdefault("exp_avg_sq", None), state["exp_avg_sq"])
        self.assertEqual((state.get("ema", 3), state.setdefault("ema", 4), state["ema"]), (3, 4, 4))
        state["exp_avg"].data.zero_()  # which no version tells
        opt.state[p]["step"].data.fill_(100)
        self.assertEqual(float(opt.state_dict(as_="torch")["state"][0]["exp_avg"].abs().max()), 0)
        take_steps(opt, [p], 1)
        self.assertEqual(int(opt.state[p]["step"]), 101)
        values = torch.ones_like(p)
        opt.state[p]["exp_avg"] = values
        opt.state_dict()
        values.zero_()  # too late
        with self.refused("exp_avg", "set", "again"):
            take_steps(opt, [p], 1)

    def test_a_count_written_past_its_version(self):
        p = parameter(300, dtype=torch.bfloat16)
        opt = st.AdamW([p], lr=0.01)
        take_steps(opt, [p], 2)
        opt.state[p]["step"].data.fill_(100)
        take_steps(opt, [p], 1)
        self.assertEqual(int(opt.state[p]["step"]), 101)

    def test_a_state_that_was_moved_is_written_to_later(self):
        """Whoever has moved a state to another parameter holds that parameter's state."""
        ps, qs = [parameter(300), parameter(300, seed=1)], [parameter(300), parameter(300, seed=1)]
        for opt, (old, new) in (
            (st.Adam(ps[:1], lr=0.1, recipe="fp32"), ps),
            (torch.optim.Adam(qs[:1], lr=0.1), qs),
        ):
            take_steps(opt, [old], 2)
            held = opt.state.pop(old)
            opt.param_groups[0]["params"][0] = new
            opt.state[new] = held
            take_steps(opt, [new], 2)
            held["exp_avg"] = torch.zeros_like(new)
            held["step"] = torch.tensor(0.0)
            take_steps(opt, [new], 1)
        self.assertLess(float((ps[1] - qs[1]).detach().abs().max()), 2e-6)

    def test_one_state_for_two_optimizers(self):
        """Each steps by its own learning rate, and sees what is written to its own."""
        p = parameter(300, dtype=torch.bfloat16)
        one, two = st.AdamW([p], lr=0.0, weight_decay=0), st.AdamW([p], lr=0.1, weight_decay=0)
        take_steps(one, [p], 2)
        before, master = p.detach().clone(), one.master_weights()[p]
        two.state = one.state
        take_steps(one, [p], 1)
        self.assertSame(p.detach(), before)
        take_steps(two, [p], 1)
        self.assertGreater(float((p.detach() - before).abs().max()), 0.01)
        one.param_groups[0]["lr"] = 0.1
        one.state[p]["exp_avg"] = torch.full_like(p, -50.0, dtype=torch.float32)
        before = p.detach().clone()
        take_steps(one, [p], 1)
        self.assertGreater(float((p.detach() - before).min()), 1.0)  # it goes by what was written
        q = parameter(300, seed=1, dtype=torch.bfloat16)
        other, master = st.AdamW([q], lr=0.1), one.master_weights()[p]
        other.state[q] = one.state[p]
        take_steps(other, [q], 1)
        self.assertSame(one.master_weights()[p], master)

    def test_moments_that_are_moved_in_memory(self):
        """`.data = ...`, as loops that offload state do, leaves no note."""
        for label, options in STORAGE:
            runs = []
            for moves in (False, True):
                ps = parameters(torch.bfloat16)
                opt = st.AdamW(ps, lr=0.01, **stored(options, torch.bfloat16))
                for step in range(4):
                    take_steps(opt, ps, 1, first=step)
                    for state in opt.state.values() if moves else ():
                        for value in state.values():
                            if isinstance(value, torch.Tensor):
                                value.data = value.data.clone()
                runs.append(picture(opt))
            self.assertSame(*runs, label)
        opt.state[ps[0]]["step"].data = torch.tensor(50.0)
        take_steps(opt, ps, 1)
        self.assertEqual(int(opt.state[ps[0]]["step"]), 51)

    def test_data_that_is_set_by_an_old_reference(self):
        """Seen like any other, though nobody looked at opt.state; and nobody else's memory is written to."""
        for label, options in STORAGE:
            pictures = []
            for old in (False, True):
                p = parameter(4096, dtype=torch.bfloat16)
                opt = st.AdamW([p], lr=0.01, **stored(options, torch.bfloat16))
                take_steps(opt, [p], 1)
                held = {name: x for name, x in opt.state[p].items() if name.startswith("exp_avg_sq")}
                count = opt.state[p]["step"]
                take_steps(opt, [p], 2)
                for name, x in held.items():
                    if old:
                        x.data = torch.zeros_like(x)
                    else:
                        opt.state[p][name].zero_()
                if old:
                    count.data = torch.tensor(7.0)
                else:
                    opt.state[p]["step"].fill_(7)
                others = [torch.full_like(p, 7.0) for _ in range(8)]
                take_steps(opt, [p], 1)
                self.assertTrue(all(bool((other == 7).all()) for other in others))
                pictures.append(picture(opt))
            self.assertSame(*pictures, label)

    def test_a_plain_dict_that_is_written_to_later(self):
        p = parameter(300)
        opt = st.AdamW([p], lr=0.01)
        take_steps(opt, [p], 2)
        mine = {"exp_avg": torch.ones(300), "exp_avg_sq": torch.ones(300), "step": 3}
        for write in (
            lambda: mine.update(exp_avg=torch.zeros(300)),
            lambda: mine.update(step=9),
            lambda: mine.pop("exp_avg_sq"),
            lambda: mine.update(mine="own"),
        ):
            opt.state[p] = mine
            take_steps(opt, [p], 2)
            before, held = p.detach().clone(), dict(mine)
            write()
            for _ in range(2):  # until it is mended
                with self.refused("write to opt.state"):
                    take_steps(opt, [p], 1)
            self.assertTrue(torch.equal(p, before))
            mine.clear()
            mine.update(held)
            take_steps(opt, [p], 1)
            opt.state[p] = {}
            mine.update(step=0)  # nobody's now
            take_steps(opt, [p], 1)
            mine.update(held)
        alive = weakref.ref(values := torch.ones(300))
        opt.state[p] = {"exp_avg": values, "exp_avg_sq": torch.ones(300), "step": 3}
        del values
        take_steps(opt, [p], 2)
        self.assertIsNone(alive())

    def test_no_momentum_again(self):
        """As torch.optim.SGD has it before its first step; of codes, too."""
        for recipe in ("fp32", "scruple", "flash"):
            ps, qs = [parameter(300)], [parameter(300)]
            opt, theirs = st.SGD(ps, lr=0.1, momentum=0.9, recipe=recipe), torch.optim.SGD(
                qs, lr=0.1, momentum=0.9
            )
            for each, params in ((opt, ps), (theirs, qs)):
                take_steps(each, params, 3)
                each.state[params[0]]["momentum_buffer"] = None
                take_steps(each, params, 2, first=3)
            self.assertLess(
                float((ps[0] - qs[0]).detach().abs().max()), 2e-6 if recipe == "fp32" else 2e-2, recipe
            )

    def test_a_value_that_stays_alive_costs_no_layout(self):
        ps = parameters(torch.bfloat16)
        opt = st.AdamW(ps, lr=0.01)
        take_steps(opt, ps, 2)
        kept = torch.zeros_like(ps[0], dtype=torch.float32)
        opt.state[ps[0]]["exp_avg"] = kept
        take_steps(opt, ps, 1, first=2)
        with mock.patch.object(opt, "_layout", side_effect=AssertionError):
            take_steps(opt, ps, 2, first=3)

    def test_torchs_own_state_is_not_written_to(self):
        """A moment in fp32 could be a plane as it stands; it stays torch's."""
        p, q = parameter(300), parameter(300)
        opt, theirs = st.Adam([p], lr=0.1, recipe="fp32"), torch.optim.Adam([q], lr=0.1)
        take_steps(theirs, [q], 2)
        saved = theirs.state_dict()
        before = copy.deepcopy(saved)
        opt.load_state_dict(saved)
        take_steps(opt, [p], 2)
        self.assertSame(saved["state"][0]["exp_avg"], before["state"][0]["exp_avg"])
        take_steps(theirs, [q], 1)  # which writes to it
        take_steps(opt, [p], 1)

    def test_in_inference_mode(self):
        p = parameter(300, dtype=torch.bfloat16)
        opt = st.AdamW([p], lr=0.01)
        with torch.inference_mode():
            take_steps(opt, [p], 2)
        take_steps(opt, [p], 1)
        self.assertEqual(int(opt.state[p]["step"]), 3)

    def test_a_note_costs_no_table(self):
        """Entries of the user's own may be written at every step."""
        ps = parameters(torch.bfloat16)
        opt = st.AdamW(ps, lr=0.01)
        take_steps(opt, ps, 2)
        tables = list(map(id, opt._tables.values()))
        for step in range(3):
            opt.state[ps[0]]["ema"] = ps[0].detach().clone()
            take_steps(opt, ps, 1, first=2 + step)
        self.assertEqual(list(map(id, opt._tables.values())), tables)

    def test_nothing_keeps_an_optimizer_alive(self):
        """Its memory goes with it, and does not wait for a collection."""
        import gc
        import weakref

        p = parameter(300, dtype=torch.bfloat16)
        opt = st.AdamW([p])
        take_steps(opt, [p], 2)
        plane = weakref.ref(opt.state[p]["exp_avg/codes"])
        gc.disable()
        try:
            del opt
            self.assertIsNone(plane())
        finally:
            gc.enable()


class OwnEntries(Case):
    """Of the user's: torch keeps them, and casts and moves tensors among them."""

    def test_kept(self):
        for as_ in ("scruple", "torch"):
            ps, qs = parameters(torch.bfloat16), parameters(torch.bfloat16)
            opt, other = st.AdamW(ps), st.AdamW(qs)
            opt.state[ps[0]]["early"] = 1  # before the first step, which it must not hinder
            take_steps(opt, ps, 1)
            opt.state["mine"] = {"epoch": 3, "losses": [1.0, 2.0]}
            opt.state["count"] = 5
            opt.state[ps[0]]["ema"] = tensor(33, 7)
            opt.state[ps[1]]["note"] = "text"
            saved = copy.deepcopy(opt.state_dict(as_=as_))
            self.assertEqual(saved["state"]["mine"], {"epoch": 3, "losses": [1.0, 2.0]})
            other.load_state_dict(saved)
            for p, q in zip(ps, qs):
                q.data.copy_(p.data)
            self.assertEqual((other.state["mine"], other.state["count"]), (opt.state["mine"], 5))
            self.assertEqual((other.state[qs[0]]["early"], other.state[qs[1]]["note"]), (1, "text"))
            self.assertSame(other.state[qs[0]]["ema"], tensor(33, 7).to(torch.bfloat16))
            take_steps(opt, ps, 2, first=1), take_steps(other, qs, 2, first=1)
            if as_ == "scruple":
                self.assertSame([p.detach() for p in ps], [q.detach() for q in qs])
                self.assertSame(opt.state_dict()["state"].keys(), other.state_dict()["state"].keys())

    def test_without_a_step(self):
        p = parameter(8, dtype=torch.bfloat16)
        opt = st.AdamW([p])
        opt.state[p]["ema"] = tensor(8)
        opt.load_state_dict(opt.state_dict())
        self.assertEqual(set(opt.state[p]), {"ema"})
        take_steps(opt, [p], 1)
        self.assertIn("ema", opt.state[p])

    def test_names_that_other_optimizers_use(self):
        p = parameter(8, dtype=torch.bfloat16)
        opt = st.AdamW([p])
        take_steps(opt, [p], 1)
        opt.state[p]["sum"] = 7
        self.assertEqual(opt.state_dict()["state"][0]["sum"], 7)
        opt.load_state_dict(opt.state_dict())
        self.assertEqual(opt.state[p]["sum"], 7)

    def test_torchs_state(self):
        q = parameter(8)
        theirs = torch.optim.AdamW([q])
        take_steps(theirs, [q], 1)
        theirs.state[q]["ema"], theirs.state["mine"] = tensor(8), 4
        p = parameter(8)
        opt = st.AdamW([p])
        opt.load_state_dict(theirs.state_dict())
        self.assertSame(opt.state[p]["ema"], tensor(8))
        self.assertEqual(opt.state["mine"], 4)

    def test_a_checkpoint_has_no_place_for_them(self):
        import scruple

        model = mlp(torch.bfloat16)
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
    def test_adamw_into_adam(self):
        how = dict(lr=0.1, weight_decay=0.5)
        for as_ in ("scruple", "torch"):
            for kinds in (("AdamW", "Adam"), ("Adam", "AdamW")):
                ps, qs, rs = (parameters() for _ in range(3))
                opt = getattr(st, kinds[0])(ps, recipe="fp32", **how)
                take_steps(opt, ps, 2)
                other, theirs = getattr(st, kinds[1])(qs, recipe="fp32", **how), getattr(
                    torch.optim, kinds[1]
                )(rs, **how)
                for p, q, r in zip(ps, qs, rs):
                    with torch.no_grad():
                        q.copy_(p), r.copy_(p)
                other.load_state_dict(copy.deepcopy(opt.state_dict(as_=as_)))
                theirs.load_state_dict(copy.deepcopy(opt.state_dict(as_="torch")))
                self.assertIs(other.param_groups[0]["decoupled_weight_decay"], True)
                take_steps(other, qs, 2, first=2), take_steps(theirs, rs, 2, first=2)
                for q, r in zip(qs, rs):
                    self.assertLess(float((q - r).detach().abs().max()), 2e-6, f"{kinds} {as_}")

    @needs_decoupled
    def test_of_one_group(self):
        ps, qs = parameters(), parameters()
        how = dict(lr=0.1, weight_decay=0.5)
        opts = []
        for kind, xs, more in ((st.Adam, ps, dict(recipe="fp32")), (torch.optim.Adam, qs, {})):
            groups = [dict(params=xs[:2], decoupled_weight_decay=True), dict(params=xs[2:])]
            opts.append(kind(groups, **how, **more))
        for _ in range(2):
            take_steps(opts[0], ps, 2), take_steps(opts[1], qs, 2)
            for p, q in zip(ps, qs):
                self.assertLess(float((p - q).detach().abs().max()), 2e-6)
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
        model = torch.nn.ParameterDict(
            dict(
                codes=torch.nn.Parameter(
                    torch.zeros(5, dtype=torch.uint8, device=DEVICE), requires_grad=False
                ),
                wide=torch.nn.Parameter(
                    torch.zeros(5, dtype=torch.float64, device=DEVICE), requires_grad=False
                ),
                lora=parameter(6, dtype=torch.bfloat16),
            )
        )
        opt = st.AdamW(model.parameters(), lr=0.1)
        for step in range(2):
            give_gradients([model["lora"]], step)
            opt.step()
        saved = opt.state_dict()
        self.assertEqual(list(saved["state"]), [list(model).index("lora")])
        opt.load_state_dict(saved)
        self.assertEqual(list(opt.master_weights()), [model["lora"]])
        opt.load_master_state_dict(model, opt.master_state_dict(model))
        self.assertEqual(opt.master_state_dict(model)["codes"].dtype, torch.uint8)
        model["wide"].requires_grad_(True)
        model["wide"].grad = torch.ones(5, dtype=torch.float64, device=DEVICE)
        with self.refused("float64"):
            opt.step()
        self.assertNotIn(model["wide"], opt.state)

    def test_without_memory(self):
        p = torch.nn.Parameter(torch.empty(4, device="meta"))
        opt = st.AdamW([p])
        p.grad = torch.empty(4, device="meta")
        with self.refused("meta", "to_empty"):
            opt.step()
        self.assertEqual(len(opt.state), 0)

    def test_repeated_parameters(self):
        """Its first place counts, and it is stepped once."""
        p, q, r = parameter(4), parameter(4, seed=1), parameter(4)
        with self.assertWarns(UserWarning):
            opt = st.AdamW([p, q, p], lr=0.1)
        plain = st.AdamW([r], lr=0.1)
        give_gradients([p], 0), give_gradients([r], 0)
        opt.step(), plain.step()
        self.assertSame(p.detach(), r.detach())
        for groups in ([p, q, p],), ([p, q], [q, p]):
            opt, theirs = st.AdamW([parameter(1)]), torch.optim.AdamW([parameter(1)])
            for one in (opt, theirs):
                one.param_groups = [{**one.param_groups[0], "params": ps} for ps in groups]
            saved, expected = (one.state_dict()["param_groups"] for one in (opt, theirs))
            self.assertEqual([x["params"] for x in saved], [x["params"] for x in expected])

    def test_a_group_that_asks_for_what_it_cannot_have(self):
        """Beside another in bf16, which could: now, and where it is asked for later."""
        wide, narrow = parameter(300), parameter(300, dtype=torch.bfloat16)
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
        ps = [parameter(70, dtype=torch.bfloat16), parameter(70)]
        opt = st.AdamW([dict(params=ps[1:]), dict(params=ps[:1])], weights="bf16+16")
        take_steps(opt, ps, 1)
        self.assertEqual(opt.state[ps[0]]["extra"].dtype, torch.int16)
        self.assertNotIn("extra", opt.state[ps[1]])


if __name__ == "__main__":
    unittest.main()
