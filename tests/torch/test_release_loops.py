"""Loops under release_gradients: steps of several micro-batches, passes that are no steps, and calls in every
order, beside the same loop with stored gradients."""

import contextlib
import itertools
import unittest
from unittest import mock

import torch

from scruple.torch import release as release_module
from support import DEVICE, FP32, Case, ModelRun as Run, copies, each, loss_of, mlp, parameter, picture, st
from support import tensor


class MicroBatches(Case):
    """Steps of fewer micro-batches than were announced, and losses that the loop divides itself."""

    WAYS = {
        # SGD's steps show a wrong factor, which Adam's would forgive.
        "compressed": (st.SGD, dict(policy="compressed", accumulator="fp32"), {}),
        "clipped": (st.AdamW, dict(policy="compressed", accumulator="fp32", max_norm=0.2), {}),
        "momentum": (st.SGD, dict(policy="released", accumulation="momentum"), dict(momentum=0.9)),
    }
    SUMMED = {label: way for label, way in WAYS.items() if label != "momentum"}

    def wide(self, kind=st.AdamW, **options):
        return Run(kind, FP32, recipe="fp32", **options)

    def stored(self, kind, counts, max_norm=None, **options):
        """Steps of the means of so many micro-batches each, and the last norm."""
        run, batch = self.wide(kind, **options), itertools.count()
        for count in counts:
            for _ in range(count):
                (run.loss(next(batch)) / count).backward()
            norm = torch.nn.utils.clip_grad_norm_(run.params, max_norm or float("inf"))
            run.step()
        return run, float(norm)

    @each(way=WAYS)
    def test_sums(self, way):
        """The loop divides and calls opt.step(), as with stored gradients; the last step is shorter."""
        kind, release, options = way
        plain, norm = self.stored(kind, (3, 3, 2), release.get("max_norm"), **options)
        run, batch = (
            self.wide(kind, release=dict(accumulate=3, reduction="sum", **release), **options),
            itertools.count(),
        )
        for step, count in enumerate((3, 3, 2)):
            for _ in range(count):
                (run.loss(next(batch)) / count).backward()
            run.step()
            self.assertEqual(run.handle.report()["steps"], step + 1)
        self.assertNear(plain, run, 2e-5)
        if release["policy"] == "compressed":
            self.assertAlmostEqual(run.handle.report()["norm"] / norm, 1.0, places=5)
        run.handle.remove()
        run.steps(1)  # and opt.step() is a plain one again
        self.assertEqual(run.counts(), {4})

    def test_sums_with_a_closure_and_a_scaler(self):
        """opt.step() runs the closure, and the step comes after; scaler.step() likewise."""
        release = dict(policy="compressed", accumulator="fp32", accumulate=3, reduction="sum")
        plain, _ = self.stored(st.AdamW, (3, 2))
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**8)
        closed, scaled = (self.wide(release=dict(scaler=x, **release)) for x in (False, scaler))
        batch = 0
        for count in (3, 2):
            for i in range(count):

                def closure():
                    loss = closed.loss(batch) / count
                    loss.backward()
                    return loss

                closed.opt.step(closure) if i == count - 1 else closure()
                scaler.scale(scaled.loss(batch) / count).backward()
                batch += 1
            scaler.step(scaled.opt)
            scaler.update()
        self.assertNear(plain, closed, 2e-5)
        self.assertNear(plain, scaled, 2e-5)
        scaler.scale(scaled.loss(0) * float("inf")).backward()
        with_flag = scaled.picture()
        scaler.step(scaled.opt)
        scaler.update()
        self.assertEqual(scaler.get_scale(), 2.0**7)
        self.assertSame(with_flag, scaled.picture())

    @each(way=WAYS)
    def test_more_than_announced(self, way):
        kind, release, options = way
        run = self.wide(kind, release=dict(accumulate=2, reduction="sum", **release), **options)
        for batch in range(2):
            run.loss(batch).backward()
        with self.refused_unchanged(run, "accumulate=2", "opt.step()"):
            run.loss(2).backward()
        run.opt.step()
        run.loss(2).backward()
        run.opt.step()
        self.assertEqual(run.counts(), {2})

    @each(way=SUMMED)
    def test_flush(self, way):
        """The mean of those that came."""
        kind, release, _ = way
        plain, norm = self.stored(kind, (4, 3), release.get("max_norm"))
        run = self.wide(kind, release=dict(accumulate=4, **release))
        run.handle.flush()
        for batch in range(7):
            run.loss(batch).backward()
            run.opt.step()
        run.handle.flush()
        run.handle.flush()
        self.assertNear(plain, run, 2e-5)
        self.assertAlmostEqual(run.handle.report()["norm"] / norm, 1.0, places=5)
        self.assertEqual(run.counts(), {2})
        plain.steps(1, first=7)
        for _ in range(4):  # whole steps go on
            run.loss(7).backward()
        if "max_norm" not in release:
            self.assertNear(plain, run, 2e-5)

    def test_without_flush(self):
        """What is left over counts towards the next step."""
        run = self.wide(release=dict(policy="compressed", accumulator="fp32", accumulate=4))
        for epoch in (range(0, 6), range(6, 8)):
            for batch in epoch:
                run.loss(batch).backward()
                run.opt.step()
        self.assertNear(self.stored(st.AdamW, (4, 4))[0], run, 2e-5)

    def test_flush_of_nothing_and_of_moments(self):
        run = Run(release=dict(policy="released")).steps(1)
        run.handle.flush()
        self.assertAlike(run, Run().steps(1))
        run = self.wide(st.SGD, momentum=0.9, release=dict(accumulate=2, accumulation="momentum")).steps(1)
        with self.refused("1 of 2", "compressed"):
            run.handle.flush()
        run.steps(1)
        self.assertEqual(run.handle.report()["steps"], 1)


class Passes(Case):
    """A backward that is no training step moves no weight."""

    WAYS = {"released": dict(), "compressed": dict(policy="compressed", accumulator="fp32")}

    @each(release=WAYS, by_module=(False, True))  # who calls zero_grad of the module alone has to pause
    def test_a_generator_through_its_discriminator(self, release, by_module):
        """A GAN's loop, as torch's: the gradients that G's pass leaves in D wait for opt_d.zero_grad()."""
        ends = []
        for how in (None, release):
            nets = mlp(inputs=4, outputs=12, seed=1), mlp(outputs=1, seed=2)
            g, d = (Run(model=net, recipe="fp32", release=how) for net in nets)
            for step in range(4):
                noise, real = tensor(8, 4, seed=step), tensor(8, 12, seed=20 + step)
                (d.model if by_module else d.opt).zero_grad()
                (d.model(g.model(noise).detach()).sum() - d.model(real).sum()).backward()
                d.opt.step()
                (g.model if by_module else g.opt).zero_grad()
                with d.handle.paused() if how is not None and by_module else contextlib.nullcontext():
                    (-d.model(g.model(noise)).sum()).backward()
                g.opt.step()
            ends.append([g.picture(), d.picture()])
        self.assertSame(*ends)

    def both(self, release):
        return [Run(dtype=FP32, release=how) for how in (None, release)]

    def probe(self, model):
        x = tensor(2, 12, seed=3).requires_grad_()
        model(x).sum().backward()
        return x.grad

    @each(release=WAYS, order=("zero, backward, step", "backward, step, zero", "backward, step"))
    def test_a_probe(self, release, order):
        plain, run = self.both(release)
        first = order.startswith("zero")  # then nothing has to be said
        for each_run in (plain, run):
            for step in range(3):
                if first:
                    each_run.opt.zero_grad()
                each_run.loss(step).backward()
                each_run.opt.step()
                if order.endswith("zero") or each_run is plain:
                    each_run.opt.zero_grad()
                with each_run.handle.paused() if each_run is run and not first else contextlib.nullcontext():
                    before = copies(each_run.params)
                    self.probe(each_run.model)
                    self.assertTrue(all(p.grad is not None for p in each_run.params))
                self.assertSame(each_run.weights(), [p.detach() for p in before])
                if not first:
                    each_run.opt.zero_grad()
        self.assertAlike(plain, run)

    @each(release=WAYS)
    def test_a_probe_that_nobody_announced(self, release):
        """It has moved the weights before anyone could know; the next call says so."""
        run = Run(dtype=FP32, release=release).steps(2)
        self.probe(run.model)
        with self.refused("second backward", "handle.paused()"):
            run.loss().backward()
        with self.refused("opt.zero_grad() before opt.step()", "handle.paused()"):
            run.opt.zero_grad()
        run.step()  # so it was a step
        run.steps(1)

    SUMS = {
        "mean": (st.AdamW, dict(policy="compressed", accumulator="fp32", accumulate=4)),
        "sum": (st.AdamW, dict(policy="compressed", accumulator="fp32", accumulate=4, reduction="sum")),
    }
    MOMENTS = {
        "momentum": (st.SGD, dict(accumulate=4, accumulation="momentum")),
        "momentum's sum": (st.SGD, dict(accumulate=4, accumulation="momentum", reduction="sum")),
    }

    def accumulating(self, kind, release, steps=0):
        """A run whose opt.step() and opt.zero_grad() come after every fourth backward."""
        options = dict(momentum=0.9) if kind is st.SGD else {}
        return self.accumulate(Run(kind, FP32, recipe="fp32", release=release, **options), release, steps)

    def accumulate(self, run, release, steps=1):
        share = 4 if release.get("reduction") == "sum" else 1
        for _ in range(steps):
            for batch in range(4):
                (run.loss(4 * run.taken + batch) / share).backward()
            run.step()
        return run

    @each(case=SUMS, before=(0, 2), steps=(0, 1))
    def test_zero_grad_drops_a_probe_between_micro_batches(self, case, before, steps):
        """As torch does; micro-batches that came before it go with it. Before the first opt.step(), too, and the count
        of steps goes on."""
        plain, run = (self.accumulating(*case, steps=steps) for _ in range(2))
        for batch in range(before):
            run.loss(50 + batch).backward()
        self.probe(run.model)
        run.opt.zero_grad()
        self.assertEqual(run.handle.report()["steps"], steps)
        self.assertAlike(*(self.accumulate(x, case[1], 2) for x in (plain, run)))
        self.assertEqual(run.handle.report()["steps"], steps + 2)

    @each(case=MOMENTS, steps=(0, 1))
    def test_zero_grad_after_a_probe_that_moments_have_taken(self, case, steps):
        """It is too late to drop it: refused, and opt.step() goes on."""
        run = self.accumulating(*case, steps=steps)
        self.probe(run.model)
        with self.refused("opt.zero_grad() before opt.step()", "moments", "handle.paused()"):
            run.opt.zero_grad()
        run.step()
        run.loss(1).backward()

    def test_zero_grad_after_a_probe_that_weights_have_taken(self):
        """One backward a step, which opt.step() ends."""
        run = Run(dtype=FP32, recipe="fp32", release=dict(tensor_norm=1.0, reduction="sum")).steps(2)
        self.probe(run.model)
        with self.refused("weights", "handle.paused()", "opt.step()"):
            run.opt.zero_grad()

    @each(case={**SUMS, **MOMENTS})
    def test_zero_grad_of_accumulating_loops_drops_nothing(self, case):
        """opt.step() and opt.zero_grad() for every micro-batch, in both orders, or after every fourth: the same steps,
        and no sink is made anew."""
        with mock.patch.object(release_module.Handle, "_abandon", side_effect=AssertionError("dropped")):
            whole = self.accumulating(*case, steps=3)
            self.assertEqual(whole.handle.report()["steps"], 3)
            for loop in ("backward step zero", "zero backward step"):
                if case[1].get("reduction") == "sum":
                    continue  # there opt.step() takes the step, also of one micro-batch
                run = self.accumulating(*case)
                for batch in range(12):
                    if loop.startswith("zero"):
                        run.opt.zero_grad()
                    run.loss(batch).backward()
                    run.opt.step()
                    if loop.endswith("zero"):
                        run.opt.zero_grad()
                self.assertAlike(whole, run, loop)

    def test_a_loop_whose_zero_grad_drops_every_step(self):
        """opt.zero_grad() before every micro-batch: no step would ever be whole."""
        run = self.accumulating(*self.SUMS["mean"], steps=1)
        with self.refused("opt.zero_grad()", "call it after opt.step()"):
            for batch in range(8):
                run.opt.zero_grad()
                run.loss(batch).backward()
                if batch % 4 == 3:
                    run.opt.step()

    def test_a_loop_without_step_whose_zero_grad_drops_every_step(self):
        """The second time it says so; after whole steps it drops nothing."""
        run = self.accumulating(*self.SUMS["mean"])
        for batch in range(8):
            run.loss(batch).backward()
            if batch % 4 == 3:
                run.opt.zero_grad()
        self.assertEqual(run.handle.report()["steps"], 2)
        with self.refused("opt.zero_grad()", "call it after opt.step()"):
            for batch in range(3):
                run.opt.zero_grad()
                run.loss(batch).backward()

    @each(case=SUMS)
    def test_zero_grad_after_flush_drops_nothing(self, case):
        run = self.accumulating(*case, steps=1)
        run.loss(9).backward()
        run.handle.flush()
        sinks = run.handle._path.sinks
        run.opt.zero_grad()
        self.assertIs(run.handle._path.sinks, sinks)
        self.assertEqual(run.handle.report()["steps"], 2)

    @each(release=WAYS)
    def test_two_losses(self, release):
        run = Run(dtype=FP32, release=release)
        for step in range(2):
            run.loss(step).backward()
        with self.refused("second backward", "accumulate="):  # the first that tells what loop this is
            run.opt.step()
        run.opt.step()
        run.steps(1)
        run.loss(2).backward()
        with self.refused_unchanged(run, "second backward", "accumulate="):
            run.loss(3).backward()
        run.step()
        run.steps(1)

    def test_two_losses_that_were_announced(self):
        release = dict(policy="compressed", accumulator="fp32", accumulate=2, reduction="sum")
        plain, run = (Run(dtype=FP32, recipe="fp32", release=how) for how in (None, release))
        for one in (plain, run):
            for step in range(3):
                one.loss(step).backward()
                one.loss(step + 9).backward()
                one.step()
        self.assertNear(plain, run, 1e-6)

    @each(release=WAYS, zero=(False, True))
    def test_loops_without_step(self, release, zero):
        """Every backward is a step, with or without opt.zero_grad()."""
        plain, run = self.both(release)
        for step in range(4):
            if zero:
                run.opt.zero_grad()
            run.loss(step).backward()
        self.assertAlike(plain.steps(4), run)

    def test_two_losses_of_different_parameters(self):
        runs = [Run(model=torch.nn.ModuleList([mlp(), mlp(seed=1)]), release=how) for how in (None, {})]
        for step in range(2):
            for run in runs:
                for net in run.model:
                    loss_of(net, step).backward()
                run.step()
        self.assertAlike(*runs)

    @each(release=WAYS)
    def test_gradients_that_were_left(self, release):
        """What a pause leaves in p.grad is neither stepped with nor added to the next pass."""
        run = Run(dtype=FP32, release=release).steps(1)
        with run.handle.paused():
            self.probe(run.model)
        with self.refused_unchanged(run, "paused()", "opt.zero_grad()"):
            run.opt.step()
        with self.refused_unchanged(run, "no training step", "opt.zero_grad()"):
            run.loss().backward()
        run.opt.zero_grad()
        run.steps(1)
        with run.handle.paused():
            self.probe(run.model)
        run.model.zero_grad()  # by another way
        run.steps(1)

    def test_zero_grad_once_before_the_loop(self):
        """The second pass comes without it: refused before the second step, which would add up gradients."""
        run = Run(dtype=FP32, release=dict())
        run.opt.zero_grad()
        run.loss(0).backward()
        run.opt.step()
        run.loss(1).backward()
        with self.refused_unchanged(run, "opt.zero_grad()"):
            run.opt.step()

    @each(release=WAYS)
    def test_a_step_before_the_loop(self, release):
        """As against a scheduler's warning: no pass came, so it says nothing of the loop."""
        runs = self.both(release)
        for run in runs:
            run.opt.zero_grad()
            run.opt.step()
            run.steps(3)
            run.opt.step()
        self.assertAlike(*runs)

    @each(release=(dict(policy="compressed", accumulate=4, max_norm=1.0), dict(tensor_norm=1.0)))
    def test_parameters_that_come_later(self, release):
        """Unfrozen or added: they take no part in accumulation and clipping, so they are refused."""
        model = mlp()
        frozen = list(model.parameters())[:2]
        for p in frozen:
            p.requires_grad_(False)
        run = Run(model=model, release=release)
        run.loss().backward()
        run.opt.step()
        for p in frozen:
            p.requires_grad_(True)
        run.loss(1).backward()
        with self.refused_unchanged(run, "unfrozen", "handle.remove()"):
            run.opt.step()
        with self.refused_unchanged(run, "group that was added", "handle.remove()"):
            run.opt.add_param_group(dict(params=[parameter(3)]))
        run.handle.remove()
        run.opt.zero_grad()
        run.opt.add_param_group(dict(params=[parameter(3)]))
        run.release(**release)
        run.loss(2).backward()
        self.assertTrue(all(p.grad is None for p in frozen))

    @each(release=WAYS)
    def test_gradients_of_another_model(self, release):
        """Plain release leaves them to opt.step(), the others refuse them."""
        ends, compressed = [], "policy" in release
        for released in (True, False):
            model, other = mlp(), mlp(seed=1)
            opt = st.AdamW([*model.parameters(), *other.parameters()], lr=1e-2)
            if released:
                st.release_gradients(model, opt, **release)
            refused = self.refused("of another model", "handle.remove()")
            with refused if released and compressed else contextlib.nullcontext():
                for step in range(3):
                    opt.zero_grad()
                    (loss_of(model, step) + loss_of(other, step)).backward()
                    opt.step()
            ends.append(picture(opt))
        if not compressed:
            self.assertSame(*ends)

    def test_gradients_set_by_hand(self):
        run = Run(dtype=FP32, release=dict(policy="compressed")).steps(3)
        p = run.params[0]
        p.grad = torch.ones_like(p)
        with self.refused_unchanged(run, "set by hand", "handle.remove()"):
            run.opt.step()
        p.grad = None
        run.steps(2)
        self.assertEqual(int(run.opt.state[p]["step"]), 5)

    def test_memory_of_dropped_sinks(self):
        """It goes when the step begins anew, not when a collector comes."""
        run = self.accumulating(*self.SUMS["mean"], steps=1)
        (sink,) = run.handle._path.sinks.values()
        self.assertGreater(len(sink.blocks), 0)
        self.probe(run.model)
        run.opt.zero_grad()
        self.assertEqual(len(sink.blocks), 0)

    def test_a_scaler_that_nobody_finds(self):
        """The plain path behind the search for it: torch's scaler complains after the first step."""
        run = Run(dtype=FP32, release=dict())
        scaler = torch.amp.GradScaler(DEVICE.type)
        with mock.patch.object(release_module, "_refuse_scaled_losses"):
            scaler.scale(loss_of(run.model, 0)).backward()
            scaler.step(run.opt)
        with self.assertRaisesRegex(AssertionError, "No inf checks"):
            scaler.update()


if __name__ == "__main__":
    unittest.main()
