"""Parameters and gradients of every kind: layouts, dtypes, absence, clipping, loss scaling, what is refused, and what
a GPU adds."""

import copy
import math
import pickle
import traceback
import unittest
from unittest import mock

import torch

import scruple
from scruple.torch import table
from support import BF16, DEVICE, EXCHANGES, FP16, FP32, STORAGE, WIDE, Case, Run, beside_torch, copies
from support import cuda_only, each, give_gradients, parameter, parameters, same, st, stored, take_steps
from support import tensor


class Parameters(Case):
    """Parameters of every kind step as a plain contiguous one with the same values does."""

    def same_as_plain(self, p, plain, steps=4, **options):
        run, other = (Run(params=[x], **options) for x in (p, plain))
        for step in range(steps):
            plain.grad = tensor(*plain.shape, seed=step + 50).to(plain.dtype)
            p.grad = torch.empty_like(p).copy_(plain.grad)
            run.opt.step(), other.opt.step()
        self.assertSame(p.detach().contiguous(), plain.detach())
        self.assertSame(run.opt.master_weights()[p], other.opt.master_weights()[plain])
        self.assertSame(run.opt.state_dict()["state"], other.opt.state_dict()["state"])

    @each(
        case={
            "channels_last": (lambda x: x.to(memory_format=torch.channels_last), (4, 6, 3, 3)),
            "transposed": (lambda x: x.t().contiguous().t(), (9, 20)),
            "every second column": (lambda x: torch.stack([x, x], -1).flatten(-2)[:, ::2], (9, 20)),
            "a slice of rows": (lambda x: torch.cat([x, x])[: len(x)], (9, 20)),
            "not aligned": (lambda x: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape), (9, 20)),
        },
        dtype=(FP32, BF16),
        storage={name: STORAGE[name] for name in ("scruple", "scant", "stochastic", "bf16 stochastic")},
    )
    def test_layouts_in_memory(self, case, dtype, storage):
        arrange, shape = case
        values = tensor(*shape, seed=3, dtype=dtype)
        p = torch.nn.Parameter(arrange(values.clone()))
        stride, before = p.stride(), p.data_ptr()
        self.same_as_plain(p, torch.nn.Parameter(values.clone()), **stored(storage, dtype))
        self.assertEqual((p.stride(), p.data_ptr()), (stride, before))

    def test_the_gaps_stay_as_they_are(self):
        memory = tensor(9, 40)
        gaps = memory[:, 1::2].clone()
        Run(params=[torch.nn.Parameter(memory[:, ::2])], lr=0.1).steps(2)
        self.assertSame(memory[:, 1::2], gaps)

    def test_a_gradient_that_is_not_contiguous(self):
        p, q = parameter(6, 8, dtype=BF16), parameter(6, 8, dtype=BF16)
        a, b = st.AdamW([p]), st.AdamW([q])
        for step in range(3):
            g = tensor(8, 6, seed=step, dtype=BF16).t()
            p.grad, q.grad = g, g.contiguous()
            self.assertFalse(p.grad.is_contiguous())
            a.step(), b.step()
            self.assertSame(p, q)

    @each(
        exchange=EXCHANGES,
        change={
            "a wider dtype": lambda g: g.float(),
            "a dtype of the same width": lambda g: g.half(),
            "transposed": lambda g: g.t().contiguous().t(),
            "expanded": lambda g: g[:1].expand_as(g),
            "every second column": lambda g: torch.stack([g, g], -1).flatten(-2)[:, ::2],
        },
    )
    def test_gradients_that_change_between_steps(self, exchange, change):
        with mock.patch.object(table, "_exchange", exchange):
            one, two = (Run(params=parameters(BF16, ((6, 8), (5, 7), (3, 4)))) for _ in range(2))
            for step in range(6):
                give_gradients(one.params, step)
                give_gradients(two.params, step)
                if step in (2, 4):
                    g = one.params[1].grad
                    g.data = change(g)
                    two.params[1].grad.data = g.data.clone(memory_format=torch.contiguous_format)
                two.opt.load_state_dict(two.opt.state_dict())  # which looks at all of them anew
                one.opt.step(), two.opt.step()
            self.assertAlike(one, two)

    @each(exchange=EXCHANGES)
    def test_gradients_that_stay_where_they_are(self, exchange):
        """The same objects over the same memory, or over another."""
        with mock.patch.object(table, "_exchange", exchange):
            one, two = Run().steps(1), Run().steps(1)
            # Known by now, so that none is looked at in Python.
            with mock.patch.object(table.Table, "_borrow", side_effect=AssertionError):
                for step in range(1, 7):
                    give_gradients(two.params, step)
                    for p, q in zip(one.params, two.params):
                        if step % 3:
                            p.grad.copy_(q.grad)
                        else:
                            p.grad.data = q.grad.clone()
                    one.opt.step(), two.opt.step()
            self.assertAlike(one, two)

    def test_state_that_is_replaced(self):
        """Between steps, through a reference from before them."""
        one, two = Run().steps(4), Run().steps(2)
        held = two.opt.state
        two.steps(2)
        for plane, value in held[two.params[0]].items():
            if torch.is_tensor(value):
                one.opt.state[one.params[0]][plane].zero_()
                held[two.params[0]][plane] = torch.zeros_like(value)
        self.assertAlike(one.steps(2), two.steps(2))

    def test_parameters_that_are_replaced(self):
        """In a group's list, by others of the same value."""
        run = Run(st.SGD, params=[parameter()], lr=0.1).steps(2)
        (new,), before = copies(run.params), run.params[0].detach().clone()
        run.opt.param_groups[0]["params"][0] = new
        take_steps(run.opt, [new], 1)
        self.assertSame(run.params[0].detach(), before)
        self.assertFalse(same(new.detach(), before))

    @each(dtype=(FP32, BF16), storage=STORAGE)
    def test_scalar_and_empty(self, dtype, storage):
        scalar, empty = parameter(dtype=dtype), parameter(0, 4, dtype=dtype)
        one = torch.nn.Parameter(scalar.detach().clone().reshape(1))
        opts = [
            st.AdamW(ps, lr=0.1, **stored(storage, dtype))
            for ps in ([empty, scalar], [parameter(0, dtype=dtype), one])
        ]
        for step in range(3):
            empty.grad = torch.zeros_like(empty)
            for p, opt in zip((scalar, one), opts):
                p.grad = torch.full_like(p, 0.5 + step)
                opt.step()
        self.assertSame(scalar.detach().reshape(1), one.detach())
        opts[0].load_state_dict(opts[0].state_dict())
        masters = opts[0].master_weights()
        self.assertEqual((masters[empty].shape, masters[scalar].shape), ((0, 4), ()))

    def test_only_empty(self):
        run = Run(params=[parameter(0)]).steps(1)
        self.assertEqual(float(run.opt.clip_and_step(1.0)), 0.0)

    @each(case=[("AdamW", dict(lr=0.01)), ("SGD", dict(lr=0.1, momentum=0.9)), ("Adagrad", dict(lr=0.1))])
    def test_frozen_unused_and_sometimes_absent(self, case):
        """As in torch: without a gradient nothing moves and no step counts."""
        name, options = case
        ours, theirs = beside_torch(name, **options)
        for run in (ours, theirs):
            ps = run.params
            ps[0].requires_grad_(False)
            for step in range(12):
                give_gradients(ps, step)
                ps[0].grad = None
                if step % 3:
                    ps[1].grad = None
                if step % 4 == 1:
                    ps[2].grad = None
                run.opt.step()
        self.assertNear(ours, theirs, 2e-6)
        self.assertSame(ours.params[0], theirs.params[0])
        saved = ours.opt.state_dict()["state"]
        self.assertEqual([int(saved[i]["step"]) for i in (1, 2, 3)], [4, 9, 12])
        self.assertNotIn(0, saved)

    def test_absent_gradients_and_random_numbers(self):
        """Which other parameters have a gradient changes no bit of a parameter's own."""
        one, two = (Run(rounding="stochastic") for _ in range(2))
        for step in range(4):
            give_gradients(one.params, step)
            give_gradients(two.params, step)
            two.params[0].grad = two.params[2].grad = None
            one.opt.step(), two.opt.step()
        self.assertSame(one.params[1::2], two.params[1::2])

    def test_tied(self):
        """A shared parameter is one parameter: one state, one step, the sum of its gradients."""
        torch.manual_seed(0)
        ours = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 10, bias=False)).to(DEVICE)
        ours[1].weight = ours[0].weight
        theirs, x = copy.deepcopy(ours), torch.arange(10, device=DEVICE)
        runs = Run(model=ours, **WIDE), Run(torch.optim.AdamW, model=theirs)
        for run in runs:
            for _ in range(5):
                run.model(x).logsumexp(-1).sum().backward()
                run.step()
        self.assertNear(*runs, 1e-6)
        self.assertEqual(len(runs[0].opt.state), 1)
        self.assertIs(ours[0].weight, ours[1].weight)

    @each(storage=STORAGE)
    def test_weights_that_move_in_memory(self, storage):
        """p.data may be replaced between steps; state and count go on."""
        run, kept = Run(**storage), []
        for _ in range(4):
            run.steps(1)
            kept.append(run.params[1].data)  # or the new memory may be the old
            run.params[1].data = run.params[1].data.clone()
        self.assertAlike(Run(**storage).steps(4), run)

    def test_a_model_cast_after_steps_is_refused(self):
        run = Run(params=[parameter(64)]).steps(1)
        (p,) = run.params
        p.data, p.grad = p.data.to(BF16), None
        with self.refused("bf16", "after"):
            run.steps(1)

    def test_other_formats_after_steps_are_refused(self):
        """By the names of what rounds, and by the public name of the error."""
        run = Run(params=[parameter(64, dtype=BF16)]).steps(1)
        run.opt.param_groups[0]["weights"] = "bf16+16"
        with self.refused("held as bf16+8 wide, not bf16+16 wide", "state_dict(as_='torch')"):
            run.steps(1)
        said = traceback.format_exception_only(scruple.UsageError("what"))
        self.assertEqual(said, ["scruple.UsageError: what\n"])
        self.assertIs(type(pickle.loads(pickle.dumps(scruple.UsageError("what")))), scruple.UsageError)
        self.assertEqual(scruple.Error.__module__, "scruple")

    def test_a_model_cast_before_steps(self):
        run = Run(params=[parameter(64)])
        run.opt.state_dict()
        run.params[0].data = run.params[0].data.to(BF16)
        self.assertEqual(run.steps(1).opt.state[run.params[0]]["extra"].dtype, torch.uint8)


class Refused(Case):
    def test_construction(self):
        real, half = parameter(4, 4), parameter(4, 4, dtype=BF16)

        def made(x):
            return torch.nn.Parameter(x)

        table = [
            ("complex", made(real.detach().to(torch.complex64)), {}, ("complex64", "torch.view_as_real")),
            ("fp64", made(real.detach().double()), {}, ("float64", "fp32")),
            ("expanded", made(tensor(4, 1).expand(4, 4)), {}, ("(4, 4)", "contiguous")),
            ("sparse parameter", made(torch.eye(3, device=DEVICE).to_sparse()), {}, ("sparse",)),
            ("recipe", real, dict(recipe="scrupel"), ("scrupel", "scruple")),
            ("recipe that is no name", real, dict(recipe=3), ("3",)),
            ("moments", real, dict(moments="fp13"), ("fp13",)),
            ("moments of no slot", real, dict(moments={"exp": "bf16"}), ("'exp'", "exp_avg")),
            ("moments that cannot hold signs", real, dict(moments={"exp_avg": "log4"}), ("log4", "exp_avg")),
            ("weights", half, dict(weights="bf16+17"), ("bf16+17",)),
            ("weights of an fp32 parameter", real, dict(weights="bf16+17"), ("bf16+17",)),
            ("extra bits of fp32", real, dict(weights="bf16+8"), ("bf16+8", "fp32", "cast_model")),
            ("another 16 bits", half, dict(weights="fp16+8"), ("fp16+8", "'bf16+8'")),
            ("lpmm of AdamW", parameter(8192), dict(recipe="lpmm", weights="bf16+8"), ("lpmm",)),
            ("rounding", real, dict(rounding="up"), ("'up'", "stochastic")),
            ("differentiable", real, dict(differentiable=True), ("differentiable", "torch.optim")),
            ("lr", real, dict(lr=-1.0), ("lr",)),
            ("lr in words", real, dict(lr="1e-3"), ("lr", "'1e-3'", "number")),
            ("eps in words", real, dict(eps="1e-8"), ("eps", "'1e-8'", "number")),
            ("betas in words", real, dict(betas=("0.9", 0.99)), ("beta1", "'0.9'", "number")),
            ("no decay", real, dict(weight_decay=None), ("weight_decay", "None", "number")),
            ("seed in words", real, dict(seed="one"), ("seed", "'one'", "number")),
            ("betas", real, dict(betas=(0.9, 1.5)), ("beta2",)),
            ("eps", real, dict(kind=st.Adam, eps=-1.0), ("eps",)),
            ("nesterov", real, dict(kind=st.SGD, nesterov=True), ("nesterov", "momentum")),
            ("coupled decay", real, dict(kind=st.Adam, decay_lr=1e-3), ("decay_lr", "decoupled_weight_decay=True")),
            ("recipe of a group", dict(params=[real], recipe="x"), {}, ("'x'", "scruple")),
            ("lr of a group", dict(params=[real], lr="1e-3"), {}, ("lr", "'1e-3'", "number")),
        ]
        for label, param, options, words in table:
            options = {"kind": st.AdamW, **options}
            with self.subTest(label), self.refused(*words):
                options.pop("kind")([param], **options)

    def test_added_groups(self):
        run = Run().steps(2)
        double = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        for label, group, words in (
            ("recipe", dict(params=[parameter(3)], recipe="x"), ("'x'",)),
            ("dtype", dict(params=[double]), ("float64",)),
        ):
            with self.subTest(label), self.refused_unchanged(run, *words):
                run.opt.add_param_group(group)
        with self.assertRaises(ValueError):  # torch's own words
            run.opt.add_param_group(dict(params=[run.params[0]]))
        self.assertAlike(run.steps(1), Run().steps(3))

    @each(steps=(0, 2))  # in the first step, and after dense ones
    def test_sparse_gradients(self, steps):
        e = torch.nn.Embedding(10, 4, sparse=True).to(DEVICE)
        run = Run(params=[parameter(5), e.weight]).steps(steps)
        run.opt.zero_grad()
        e(torch.tensor([1, 2], device=DEVICE)).sum().backward()
        run.params[0].grad = torch.ones_like(run.params[0])
        with self.refused_unchanged(run, "sparse", "to_dense"):
            run.opt.step()
        with self.refused_unchanged(run, "sparse"):
            run.opt.step(max_norm=1.0)
        e.weight.grad = e.weight.grad.to_dense()
        run.opt.step()
        self.assertEqual(run.counts(), {steps + 1})

    @each(
        case={
            "integers": (lambda g: g.to(torch.int16), ["int16", "fp32"]),
            "sparse": (lambda g: g.to_sparse(), ["sparse", "to_dense"]),
            "another shape": (lambda g: g[:1].clone(), ["(1, 7)", "(33, 7)"]),
        }
    )
    def test_gradients_of_another_kind(self, case):
        """Behind dense ones, in the table that these have left."""
        change, words = case
        run = Run().steps(2)
        give_gradients(run.params, 2)
        dense, before = run.params[0].grad, copies(run.params)
        changed = change(dense)
        if changed.shape != dense.shape and not table._exchange:
            return  # what torch lets nobody assign is not looked for in every step
        if changed.is_sparse:
            run.params[0].grad = changed
        else:
            dense.data = changed
        with self.refused(*words):
            run.opt.step()
        self.assertSame(run.params, before)

    def test_max_norm(self):
        ps = parameters()
        opt = st.AdamW(ps)
        give_gradients(ps, 0)
        for bad in (0, -1.0, float("nan")):
            with self.subTest(bad), self.refused_unchanged(opt, "max_norm"):
                opt.step(max_norm=bad)

    def test_another_class(self):
        with self.refused("'bigger'", "torch"):
            st.AdamW(parameters()).state_dict(as_="bigger")


class Clipping(Case):
    @each(scale=(1e-3, 1.0, 1e3), dtype=(FP32, BF16))
    def test_equals_torchs(self, scale, dtype):
        one, two = (Run(st.SGD, dtype, lr=0.1, momentum=0.9, **WIDE) for _ in range(2))
        for step in range(5):
            give_gradients(one.params, step, scale)
            kept = [p.grad.clone() for p in one.params]
            norm = one.opt.clip_and_step(1.0)
            # In fp32, since torch's writes what it clips back into bf16.
            wide = copies(two.params, FP32)
            for p, q, g in zip(two.params, wide, kept):
                q.grad = g.float().clone()
            expected = torch.nn.utils.clip_grad_norm_(wide, 1.0)
            if dtype is FP32:
                for p, q in zip(two.params, wide):
                    p.grad = q.grad
                two.opt.step()
            self.assertAlmostEqual(float(norm) / float(expected), 1.0, places=5)
            self.assertSame([p.grad for p in one.params], kept, "the gradients were written to")
        if dtype is FP32:
            self.assertNear(one, two, 1e-6)

    def test_below_the_limit_changes_no_bit(self):
        self.assertAlike(Run().steps(3, max_norm=1e6), Run().steps(3))

    def test_over_groups_and_directions(self):
        """One norm over all, parameters that go up included."""
        a, b = parameters(), parameters()
        opt, ref = (
            kind([dict(params=ps[:2]), dict(params=ps[2:], maximize=True)], lr=0.1)
            for kind, ps in ((st.SGD, a), (torch.optim.SGD, b))
        )
        give_gradients(a, 0)
        give_gradients(b, 0)
        norm = opt.clip_and_step(0.5)
        expected = torch.nn.utils.clip_grad_norm_(b, 0.5)
        ref.step()
        self.assertAlmostEqual(float(norm), float(expected), places=4)
        self.assertNear(a, b, 1e-6)

    @each(bad=(float("inf"), float("-inf"), float("nan")), storage=STORAGE)
    def test_not_finite_skips_the_whole_step(self, bad, storage):
        run = Run(**storage).steps(2)
        before = run.picture()
        give_gradients(run.params, 2)
        run.params[1].grad[77] = bad
        self.assertFalse(math.isfinite(float(run.opt.clip_and_step(1.0))))
        self.assertSame(before, run.picture())
        self.assertAlike(run.steps(1, max_norm=1e9), Run(**storage).steps(3))

    def test_without_gradients(self):
        self.assertIsNone(st.AdamW(parameters()).clip_and_step(1.0))


# torch's own looks at bf16 gradients on the CPU alone.
BF16_SCALER = torch.amp.GradScaler if DEVICE.type == "cpu" else st.LossScaler


class Scaling(Case):
    def scaler(self, kind=torch.amp.GradScaler, **options):
        return kind(DEVICE.type, **options)

    def loop(self, dtype, kind=torch.amp.GradScaler, unscale=False, max_norm=None, overflow=(), **options):
        """Eight steps under a scaler; at those of `overflow` a gradient is infinite."""
        run, scales = Run(dtype=dtype, **options), []
        scaler = self.scaler(kind, init_scale=2.0**10, growth_interval=3)
        for step in range(8):
            scale = float(scaler.scale(torch.ones((), device=DEVICE)))
            give_gradients(run.params, step, scale * 2.0**-10)
            if step in overflow:
                run.params[0].grad.view(-1)[5] = float("inf")
            if unscale:
                scaler.unscale_(run.opt)
                torch.nn.utils.clip_grad_norm_(run.params, max_norm)
                scaler.step(run.opt)
            else:
                scaler.step(run.opt, **({} if max_norm is None else dict(max_norm=max_norm)))
            scaler.update()
            scales.append(scaler.get_scale() / 2**10)
        return run, scales

    def plain(self, dtype, max_norm=None, skip=(), **options):
        run = Run(dtype=dtype, **options)
        for step in set(range(8)) - set(skip):
            run.steps(1, first=step, scale=2.0**-10, **({} if max_norm is None else dict(max_norm=max_norm)))
        return run

    @each(storage=STORAGE)
    def test_overflow_and_growth(self, storage):
        run, scales = self.loop(BF16, BF16_SCALER, overflow=(1, 6), **storage)
        self.assertEqual(scales, [1, 0.5, 0.5, 0.5, 1, 1, 0.5, 0.5])
        # Powers of two leave every bit as it is.
        self.assertAlike(run, self.plain(BF16, skip=(1, 6), **storage))

    def test_fp32_parameters(self):
        self.assertAlike(self.loop(FP32, overflow=(0,))[0], self.plain(FP32, skip=(0,)))

    def test_loss_scaler_with_fp16(self):
        """Gradients in fp16, which torch's scaler refuses to unscale."""
        run, scales = self.loop(FP16, kind=st.LossScaler, overflow=(4,))
        self.assertEqual(scales, [1, 1, 2, 2, 1, 1, 1, 2])
        plain = Run(dtype=FP16)
        for step in (0, 1, 2, 3, 5, 6, 7):
            give_gradients(plain.params, step)
            plain.opt.grad_scale = torch.tensor(2.0**10, device=DEVICE)
            plain.opt.step()
        # Scales of 2^10 and 2^11 round fp16 gradients alike, so the same bits come of both.
        self.assertSame(plain.weights(), run.weights())

    def test_small_fp16_gradients_survive(self):
        """The reason for scaling: 1e-8 is zero in fp16, and 1e-8 * 2^16 is not."""
        p, scaler = parameter(32, dtype=FP16), self.scaler(st.LossScaler)
        opt = Run(st.SGD, params=[p], lr=1.0, momentum=0.9, **WIDE).opt
        before = opt.master_weights()[p]
        scaler.scale((p.float() * 1e-8).sum()).backward()
        scaler.step(opt)
        scaler.update()
        moved = before - opt.master_weights()[p]
        self.assertTrue(bool((moved > 0).any()) or bool((opt.state[p]["momentum_buffer"] > 5e-9).all()))

    def test_unscale_and_clip(self):
        run, _ = self.loop(FP32, unscale=True, max_norm=0.01, overflow=(2,), **WIDE)
        self.assertNear(run, self.plain(FP32, max_norm=0.01, skip=(2,), **WIDE), 1e-6)
        self.assertEqual(run.counts(), {7})

    @each(case=[(FP32, torch.amp.GradScaler), (BF16, BF16_SCALER), (BF16, st.LossScaler)])
    def test_step_with_max_norm(self, case):
        dtype, kind = case
        run, _ = self.loop(dtype, kind, max_norm=0.01, overflow=(2, 3))
        self.assertAlike(run, self.plain(dtype, max_norm=0.01, skip=(2, 3)))

    def test_unscale_of_fp16_is_refused(self):
        ps = parameters(FP16)
        opt = st.AdamW(ps)
        scaler = self.scaler(st.LossScaler)
        scaler.scale(torch.ones((), device=DEVICE))
        give_gradients(ps, 0)
        with self.refused_unchanged(opt, "fp16", "scaler.step"):
            scaler.unscale_(opt)

    def test_disabled(self):
        run, scaler = Run(dtype=FP32), self.scaler(enabled=False)
        give_gradients(run.params, 0)
        scaler.step(run.opt)
        scaler.update()
        self.assertAlike(run, Run(dtype=FP32).steps(1))


@cuda_only
class Cuda(Case):
    @each(dtype=(BF16, FP16, FP32), storage=STORAGE)
    def test_same_bits_as_the_cpu(self, dtype, storage):
        here = Run(dtype=dtype, **stored(storage, dtype))
        there = Run(params=copies(here.params, device="cpu"), **stored(storage, dtype))
        for step in range(5):
            give_gradients(here.params, step)
            for p, q in zip(here.params, there.params):
                q.grad = p.grad.cpu()
            here.opt.clip_and_step(1.0), there.opt.clip_and_step(1.0)
        self.assertAlike(here, there)

    def test_peak_memory_of_a_step(self):
        """A step allocates nothing that grows with the parameters, and state is what the formats say."""
        size = 1 << 24
        p = torch.nn.Parameter(torch.zeros(size, dtype=BF16, device=DEVICE))
        p.grad = torch.ones_like(p)
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        opt = st.AdamW([p])
        opt.step()
        state = torch.cuda.memory_allocated() - base
        self.assertLess(state / size, 3.2)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            opt.clip_and_step(1.0)
        self.assertLess(torch.cuda.max_memory_allocated() - before, 1 << 20)

    def test_current_stream(self):
        """The step waits for the work before it on the current stream, and the work after it for the step."""
        side = torch.cuda.Stream()
        for stream in (torch.cuda.current_stream(), side):
            a, b = parameter(1 << 20), parameter(1 << 20)
            opt = st.SGD([a], lr=1.0, **WIDE)
            g = tensor(1 << 20, seed=5)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                a.grad = torch.zeros_like(a)
                torch.cuda._sleep(20_000_000)  # about 10 ms: a step on another stream would read zeros
                a.grad.copy_(g)
                opt.step()
                after = a.detach().clone()
            stream.synchronize()
            self.assertSame(after, b.detach() - g)

    @each(storage=STORAGE)
    def test_graph_capture(self, storage):
        """A captured step counts its own replays and reads the learning rate at each."""
        rates = [torch.tensor(1e-2, device=DEVICE) for _ in range(2)]
        run, plain = Run(lr=rates[0], capturable=True, **storage), Run(lr=rates[1], **storage)
        for p in run.params:
            p.grad = torch.zeros_like(p)

        def feed(step):
            give_gradients(plain.params, step)
            for p, q in zip(run.params, plain.params):
                p.grad.copy_(q.grad)

        feed(0)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run.opt.step()
        torch.cuda.current_stream().wait_stream(side)
        plain.opt.step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run.opt.step()
        for step in range(1, 5):
            feed(step)
            for rate in rates:
                rate.fill_(1e-2 / step)
            graph.replay()
            plain.opt.step()
        torch.cuda.synchronize()
        self.assertSame(run.weights(), plain.weights())
        self.assertSame(run.opt.state_dict()["state"], plain.opt.state_dict()["state"])

    def test_no_wait_for_the_device(self):
        """step and clip_and_step return while the device is still at work."""
        ps = parameters(BF16)
        opt = st.AdamW(ps)
        for step in range(2):
            give_gradients(ps, step)
            opt.step(), opt.clip_and_step(1.0)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            opt.step(), opt.clip_and_step(1.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_moved_before_the_first_step(self):
        p = torch.nn.Parameter(torch.ones(8))
        opt = st.AdamW([p])
        opt.state_dict()
        p.data = p.data.to(DEVICE)
        p.grad = torch.ones_like(p)
        opt.step()
        self.assertEqual(opt.state[p]["exp_avg/codes"].device.type, "cuda")
        p.data, p.grad = p.data.cpu(), None
        p.grad = torch.ones_like(p)
        with self.refused("moved"):
            opt.step()


if __name__ == "__main__":
    unittest.main()
