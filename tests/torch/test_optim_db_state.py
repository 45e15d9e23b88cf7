"""State, over torch's list of optimizers: saved, loaded, written, taken away, from older versions and from torch."""

import collections
import copy
import functools
import io
import itertools
import pickle
import unittest

import torch

from optim_db import SWITCHES, Line, OptimCase, for_optim_db, near, over, trained
from support import BF16, DEVICE, FP16, FP32, parameter, parameters, tensor


@for_optim_db
class State(OptimCase):
    @over("each")
    def test_non_empty_state(self, make):
        opt = make([parameter(1)])
        self.assertIsInstance(opt.state, collections.defaultdict)
        for state in trained(make)[1].state.values():
            self.assertGreater(len(state), 0)
            if make.counts:
                self.assertIsInstance(state["step"], torch.Tensor)
                self.assertEqual(state["step"], 3)

    @over("default")
    def test_groups_have_torchs_keys(self, make):
        self.needs("one that torch has", make.info.of_torch)
        ours, theirs = make([parameter(2)]), make.of_torch([parameter(2)])
        for mine, its in ((ours.defaults, theirs.defaults), (ours.param_groups[0], theirs.param_groups[0])):
            for key in set(its) - SWITCHES - {"params"}:
                self.assertEqual(mine[key], its[key], key)

    @over("each", "can_load_from_to_named_state_dict")
    def test_state_dict_deterministic(self, make):
        for first, second in itertools.product((False, True), repeat=2):
            line, opt = trained(make, named=first)
            other = Line().like(line)
            twin = make(other.named(second))
            twin.load_state_dict(copy.deepcopy(opt.state_dict()))
            names = twin.state_dict()["param_groups"][0].get("param_names")
            self.assertEqual(names, ["weight", "bias"] if first or second else None)
            self.assertSame(line.train(opt), other.train(twin))
            for group in opt.param_groups + twin.param_groups:
                group.pop("param_names", None)
            self.assertSame(opt.state_dict(), twin.state_dict())
            twin.param_groups.extend(twin.param_groups)  # of repeated parameters the first place counts
            self.assertSame(opt.state_dict()["param_groups"][-1], twin.state_dict()["param_groups"][-1])

    @over("default")
    def test_repeated_parameters(self, make):
        p, q = parameter(2), parameter(3)
        found = []
        for kind in (make, torch.optim.SGD):
            with self.assertWarns(UserWarning):
                opt = kind([p, q, p])
            found.append(opt.state_dict()["param_groups"][0]["params"])
        self.assertEqual(*found)

    @over("each", "can_load_older_state_dict load_nontensor_step")
    def test_older_state_dicts(self, make):
        """Without the options that came later, and with a count that is a number."""
        line, opt = trained(make)
        saved = copy.deepcopy(opt.state_dict())
        for group in saved["param_groups"]:
            for flag in make.info.not_og_supported_flags:
                group.pop(flag, None)
        for state in saved["state"].values():
            state.update({"step": float(state["step"])} if "step" in state else {})
        opt.load_state_dict(saved)
        line.train(opt, 1)
        for state in opt.state.values():
            self.assertEqual(int(state.get("step", 4)), 4)

    @over("each", "deepcopy_copies_all_public_attrs")
    def test_save_load_equality_with_weights_only(self, make):
        for named in (False, True):
            (_, opt), file = trained(make, named=named), io.BytesIO()
            torch.save(opt.state_dict(), file)
            for how in ({}, {"weights_only": True}):
                file.seek(0)
                self.assertSame(torch.load(file, **how), opt.state_dict())
            for twin in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
                self.assertSame(opt.state_dict(), twin.state_dict())
                self.assertEqual(*({k for k in x.__dict__ if k[0] != "_"} for x in (opt, twin)))

    @over("each", "cpu_load_state_dict state_dict_with_cuda_params fused_cpu_matches_cuda")
    def test_from_the_cpu_to_the_device(self, make):
        """Also a state that says fused or capturable. The bits go on as they would on the CPU."""
        self.needs("one of ours", make.ours)
        for dtype, flag in itertools.product((FP32, BF16, FP16), ({}, {"fused": True}, {"capturable": True})):
            p = torch.nn.Parameter(tensor(33, 7, dtype=dtype).cpu())
            opt, grads = make([p]), [tensor(33, 7, seed=x, dtype=dtype).cpu() for x in range(5)]
            p.grad = grads[0]
            opt.step()
            q = torch.nn.Parameter(p.detach().clone().to(DEVICE))
            saved = copy.deepcopy(opt.state_dict())
            saved["param_groups"][0].update(flag)
            given, twin = copy.deepcopy(saved), make([q], **flag)
            twin.load_state_dict(given)
            self.assertSame(given, saved)
            if make.counts and "capturable" not in {**make.kwargs, **flag}:
                self.assertEqual(twin.state[q]["step"].device.type, "cpu")
            for g in grads[1:]:
                p.grad, q.grad = g, g.to(DEVICE)
                opt.step()
                twin.step()
            self.assertSame(p.detach(), q.detach().cpu())

    @over("each", "state_dict_pre_hook state_dict_post_hook state_dict_pre_post_hook")
    def test_state_dict_hooks(self, make):
        opt = make([parameter(2, 3)])
        before = opt.register_state_dict_pre_hook(lambda opt: opt.state.__setitem__("test", 1))
        self.assertEqual(opt.state_dict()["state"]["test"], 1)
        after = opt.register_state_dict_post_hook(lambda opt, made: {"found": made["state"].get("test")})
        self.assertEqual(opt.state_dict(), {"found": 1})
        before.remove()
        opt.state.pop("test")
        self.assertEqual(opt.state_dict(), {"found": None})
        after.remove()
        opt.register_state_dict_post_hook(lambda opt, made: made.update(more=1))
        self.assertEqual(opt.state_dict()["more"], 1)

    @over(
        "each", "load_state_dict_pre_hook_and_prepend load_state_dict_post_hook load_state_dict_pre_post_hook"
    )
    def test_load_state_dict_hooks(self, make):
        opt = make([parameter(2, 3)])

        def change(lr, copied):
            def hook(opt, given):
                given = copy.deepcopy(given) if copied else given
                given["param_groups"][0]["lr"] = lr
                return given if copied else None

            return hook

        opt.register_load_state_dict_post_hook(lambda opt: opt.state.update(seen=opt.param_groups[0]["lr"]))
        for hook, how, expected in (
            (change(0.002, False), {}, 0.002),
            (change(0.003, True), {"prepend": True}, 0.002),
            (change(0.004, True), {}, 0.004),
        ):
            opt.register_load_state_dict_pre_hook(hook, **how)
            opt.load_state_dict(opt.state_dict())
            self.assertEqual(opt.state["seen"], expected)

    @over("each")
    def test_entries_of_the_user(self, make):
        """In the state of a parameter and beside it: saved, loaded, and left alone by steps."""
        line, opt = trained(make)
        opt.state["mine"] = {"a": 1}
        opt.state[line.params[0]].update(mine=torch.ones(3), number=2.5)
        line.train(opt, 1)
        twin = make(line.params)
        twin.load_state_dict(copy.deepcopy(opt.state_dict()))
        for x in (opt, twin):
            line.train(x, 1)
            held = x.state[line.params[0]]
            self.assertEqual(held["mine"].tolist(), [1, 1, 1])
            self.assertEqual((x.state["mine"], held["number"]), ({"a": 1}, 2.5))

    @over("each")
    def test_state_that_is_taken_away(self, make):
        """It begins anew, with the bits of a new optimizer."""
        self.needs("state that a step makes", make.ours or make.info.name != "Adagrad")
        for take in (
            lambda opt, p: opt.state.__setitem__(p, {}),
            lambda opt, p: opt.state.pop(p, None),
            lambda opt, p: opt.state[p].clear(),
        ):
            line, opt = trained(make)
            for p in line.params:
                take(opt, p)
            other = Line().like(line)
            self.assertSame(line.train(opt, 2), other.train(make(other.params), 2))

    @over("each")
    def test_state_that_is_written(self, make):
        """In place or as another tensor: it counts from the next step on."""

        def drive(kind, in_place, factor):
            line, opt = trained(kind)
            for p in line.params:
                for name, value in opt.state[p].items():
                    if torch.is_tensor(value) and (make.counts or name != "step"):
                        new = value * (0 if name == "step" else factor)
                        opt.state[p][name] = value.copy_(new) if in_place else new
            line.train(opt, 2)
            for p in line.params if make.counts else ():
                self.assertEqual(int(opt.state[p]["step"]), 2)
            return line.params

        factor = 0 if make.info.recipe == "scruple" else 4  # codes and scales are no numbers to multiply
        one, two = (self.beside(make, functools.partial(drive, in_place=x, factor=factor)) for x in (0, 1))
        self.assertSame(one, two)

    @over("each")
    def test_states_of_torch(self, make):
        """Loaded, or put into a new optimizer's state: steps go on as torch's do."""
        self.needs("one that torch has", make.info.of_torch)
        for load in (True, False):
            other, theirs = trained(make.of_torch)
            saved, line = copy.deepcopy(theirs.state_dict()), Line().like(other)
            if not saved["state"]:  # SGD's without momentum; once it was this
                saved["state"] = {i: {"momentum_buffer": None} for i in range(2)}
            opt = make(line.params)
            if load:
                opt.load_state_dict(saved)
            else:
                for i, p in enumerate(line.params):
                    opt.state[p] = saved["state"][i]
            line.train(opt, 2)
            if make.info.recipe == "fp32":
                near(line.params, other.train(theirs, 2))
            for p in line.params if make.counts else ():
                self.assertEqual(int(opt.state[p]["step"]), 5)

    @over("default")
    def test_frozen_parameters_of_any_kind(self, make):
        """They are there, count in the order, and have no part in a step."""
        others = [torch.zeros(2, dtype=x, device=DEVICE) for x in (torch.uint8, torch.int64, torch.float64)]
        others = [torch.nn.Parameter(x, requires_grad=False) for x in others]
        others.append(torch.nn.Parameter(torch.zeros(2, device="meta")))
        line = Line()
        params = [*line.params[:1], *others[1:], *line.params[1:]]
        opt, twin = make(params), make(params)
        for x in (opt, twin):
            x.add_param_group({"params": others[:1]})
        line.train(opt)
        twin.load_state_dict(opt.state_dict())
        self.assertEqual(opt.state_dict()["state"].keys(), twin.state_dict()["state"].keys())
        plain = Line()  # in the same places, by which random numbers go
        plain.train(make([plain.params[0], *parameters(shapes=[(2,)] * 3), plain.params[1]]))
        self.assertSame(line.params, plain.params)


if __name__ == "__main__":
    unittest.main()
