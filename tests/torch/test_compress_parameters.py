"""compress_weights: what people do with parameters every day, and what is refused."""

import copy
import pickle
import unittest
import weakref

import torch
from torch import nn

import scruple
from coded_models import *
from support import BF16, DEVICE, FP32, Case, each, st, tensor


class Parameters(Case):
    """What people do with model.parameters() every day."""

    def test_counting_and_vectors(self):
        model, _, _, _ = compressed()
        plain, _ = made()
        self.assertEqual(sum(p.numel() for p in model.parameters()), sum(p.numel() for p in plain.parameters()))
        self.assertEqual([p.shape for p in model.parameters()], [p.shape for p in plain.parameters()])
        vector = nn.utils.parameters_to_vector(model.parameters())
        self.assertIs(type(vector), torch.Tensor)
        self.assertSame(vector, nn.utils.parameters_to_vector(plain_twin(model).parameters()))
        self.assertLess((vector - nn.utils.parameters_to_vector(plain.parameters())).abs().max().item(), 2e-3)
        for p in coded_of(model):
            self.assertIsInstance(p, nn.Parameter)
            self.assertTrue(p.is_leaf and p.requires_grad)
            self.assertIn("int10", repr(p))

    def test_copies_are_plain(self):
        model, x, opt, _ = compressed()
        average = torch.optim.swa_utils.AveragedModel(model)
        self.assertFalse(coded_of(average))
        train(model, x, opt, 3)
        average.update_parameters(model)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            self.assertFalse(coded_of(copied))
            self.assertSame(copied(x), model(x))
        for values in (model.state_dict(), nn.Sequential(model).state_dict()):
            self.assertEqual({type(value) for value in values.values()}, {torch.Tensor})
        kept = model.state_dict(keep_vars=True)
        self.assertIs(kept["0.weight"], model[0].weight)

    def test_snapshots_stay(self):
        """A clone or a cast that was made before a step has the values of before."""
        model, x, opt, _ = compressed(lr=0.5)
        p = model[0].weight
        made = [p.half().detach(), p.detach().clone(), p.detach().to(FP32, copy=True), p.detach().double(), p.detach().bfloat16()]
        before = copy.deepcopy(made)
        train(model, x, opt, 2)
        self.assertSame(made, before)
        self.assertFalse(torch.equal(p.detach(), made[0]))

    def test_writing(self):
        """In place, by views and by load_state_dict: encoded to nearest; what is not changed keeps its codes."""
        model, x, opt, _ = compressed()
        train(model, x, opt, 3)
        p = model[0].weight
        codes = p.store.codes.clone()
        model.load_state_dict(plain_twin(model).state_dict())
        self.assertSame(p.store.codes, codes)
        with torch.no_grad():
            p.clamp_(-0.01, 0.01)
            self.assertLessEqual(p.abs().max().item(), 0.01 + 1e-6)
            p.data[0].zero_()
            p.t()[:, 1].fill_(0.005)
            self.assertEqual(p[0].abs().max().item(), 0)
            self.assertTrue(torch.allclose(p[1], torch.full_like(p[1], 0.005)))
            nn.init.normal_(p)
        train(model, x, opt, 1)

    def test_writing_by_views(self):
        model, _, _, _ = compressed()
        p, marks = model[0].weight, iter(range(1, 99))
        views = (
            lambda w: w.chunk(2)[1],
            lambda w: w.split([10, 70])[0],
            lambda w: w.unbind()[3],
            lambda w: w[4:6].t()[7],
            lambda w: w.unsqueeze(0).squeeze()[5],
            lambda w: w.diagonal(),
            lambda w: w.unfold(0, 2, 2)[1],
            lambda w: w.as_strided((3, 4), (96, 1), 200),
            lambda w: w.view(-1)[100:200],
            lambda w: w.movedim(0, 1)[2, 3:9],
            lambda w: w.view(torch.int32)[9],
        )
        with torch.no_grad():
            for view in views:
                plain = p.detach().clone()
                value = next(marks) / 128
                number = value if view(plain).is_floating_point() else torch.tensor(value).view(torch.int32).item()
                view(plain).fill_(number)
                view(p).fill_(number)
                self.assertLess((plain - p).abs().max().item(), 0.002)
                self.assertTrue((view(p) == view(plain)).all() or view(p).is_floating_point())

    def test_arrays(self):
        model, x, opt, _ = compressed()
        p = model[0].weight
        with self.assertRaisesRegex((RuntimeError, TypeError), "requires grad|device type"):  # as torch's own
            p.numpy()
        array = p.detach().cpu().numpy()
        self.assertSame(torch.tensor(array), p.detach().cpu().clone())
        if DEVICE == "cpu":  # a copy for the host is plain, and the user's own
            with self.assertRaisesRegex(ValueError, "read-only"):
                array[0] = 0
        self.assertEqual(p.tolist(), p.detach().clone().tolist())
        for share in (model.share_memory, p.share_memory_, lambda: torch.from_dlpack(p.detach())):
            with self.refused("clone"):
                share()

    def test_what_no_code_holds(self):
        model, _, _, _ = compressed()
        p = model[2].weight
        codes = p.store.codes.clone()
        square = compressed("odd")[0].matrix
        for write, word in (
            (lambda: p.set_(torch.zeros(2, 2, device=DEVICE)), "another shape"),
            (lambda: p.t_(), "another shape"),
            (lambda: square.t_(), "other strides"),
            (lambda: p.resize_(4), "cannot resize"),
            (lambda: p[0].fill_(float("inf")), "not finite"),
        ):
            with torch.no_grad(), self.assertRaisesRegex((scruple.UsageError, RuntimeError), word):
                write()
        self.assertSame(p.store.codes, codes)
        self.assertEqual(p.shape, (64, 80))

    def test_assigning_data(self):
        """The same shape and type: as copy_."""
        model, _, _, _ = compressed()
        p = model[0].weight
        codes = p.store.codes
        p.data = torch.full_like(p, 0.5)
        p.data *= 0.5
        self.assertSame(p.detach().clone(), torch.full_like(p, 0.25).clone())
        nn.utils.vector_to_parameters(torch.zeros(96 * 80 + 80 + 80 * 64 + 64, device=DEVICE), model.parameters())
        self.assertEqual(p.abs().max().item(), 0)
        self.assertIs(p.store.codes, codes)

    def test_attributes_stay(self):
        model, x = made()
        model[0].weight.no_decay = "yes"
        opt = st.SGD(model.parameters(), lr=0.1, **LPMM)
        st.compress_weights(model, opt)
        self.assertEqual(model[0].weight.no_decay, "yes")

    def test_writing_what_it_is(self):
        """bf16 shows fewer bits than codes of 10 bits hold: writing them back must not drop the others."""
        model, x, opt, _ = compressed(dtype=BF16)
        train(model, x, opt, 3)
        codes = model[0].weight.store.codes.clone()
        model.load_state_dict(plain_twin(model).state_dict())
        self.assertSame(model[0].weight.store.codes, codes)

    def test_moving(self):
        """model.to() where the model is: nothing changes. Elsewhere: an error, and the model trains on."""
        model, x, opt, handle = compressed()
        twin, _, other, _ = compressed()
        for change in (lambda: model.to(DEVICE), model.float, model.train):
            change()
            for one, its in ((model, opt), (twin, other)):
                train(one, x, its, 1)
        for change in (model.double, model.bfloat16):
            with self.refused("before compress_weights"):
                change()
        with self.refused("before compress_weights"):
            model[0].weight.data = torch.zeros(80, 97, device=DEVICE)
        self.assertSame(coded_of(model)[0].store.codes, coded_of(twin)[0].store.codes)
        handle.remove()
        model(x).sum().backward()
        self.assertIsNotNone(model[0].weight.grad)

    def test_writing_into_the_state(self):
        """As in every optimizer: moments, a fresh start, and the weight's planes."""
        model, x, opt, _ = compressed()
        train(model, x, opt, 2)
        p = model[0].weight
        weight, codes = p.detach().clone(), p.store.codes
        opt.state[p]["momentum_buffer"] = torch.zeros_like(weight)
        train(model, x, opt, 1)
        before = p.detach().clone()
        opt.state[p] = {}
        self.assertSame(p.detach().clone(), before)
        self.assertFalse(torch.equal(before, weight))
        train(model, x, opt, 1)
        self.assertLess((p - before).detach().abs().max().item(), 0.05, "the weight began anew with its state")
        self.assertIs(p.store.codes, codes)

    def test_master_weights(self):
        model, x, opt, _ = compressed(dtype=BF16)
        train(model, x, opt, 2)
        wide = opt.master_weights()[model[0].weight]
        self.assertSame(wide.to(BF16), model[0].weight.detach().clone())
        opt.set_master_weights({model[0].weight: wide * 2})
        self.assertSame(opt.master_weights()[model[0].weight], wide * 2)
        self.assertSame(opt.master_state_dict(model)["0.weight"], wide * 2)


class Refusals(Case):
    """Named before the model is touched; after an error it is as it was."""

    def unchanged(self, model, opt, *words, how=None):
        before, kinds = copy.deepcopy(model.state_dict()), [type(p) for p in model.parameters()]
        with self.refused(*words):
            st.compress_weights(model, opt, **(how or {}))
        self.assertSame(before, model.state_dict())
        self.assertEqual(kinds, [type(p) for p in model.parameters()])
        self.assertIsNone(getattr(opt, "_handle", None))
        self.assertFalse(any(opt.state.values()))

    def sgd(self, model, **options):
        return st.SGD(model.parameters(), lr=0.1, **{**LPMM, **options})

    def test_before_it_is_touched(self):
        model, _ = made()
        self.unchanged(model, torch.optim.SGD(model.parameters()), "must be one of scruple.torch")
        self.unchanged(model, self.sgd(model, recipe="scruple"), "no weight becomes codes", "recipe='lpmm'")
        self.unchanged(model, self.sgd(model), "leave policy out", how=dict(policy="released"))
        self.unchanged(model, self.sgd(model), "accumulator is 'int7'", how=dict(accumulator="int7"))
        self.unchanged(model, self.sgd(model), "accumulate is 0", how=dict(accumulate=0))
        small = nn.Linear(8, 8, device=DEVICE)
        self.unchanged(small, self.sgd(small), "no weight becomes codes", "4096")
        with self.refused("int7"):
            self.sgd(model, weights="int7")
        other, _ = made()
        self.unchanged(other, self.sgd(model), "none of this model's parameters")
        with self.refused("nf4"):
            st.AdamW(model.parameters(), weights="nf4")
        normed = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(96, 96, device=DEVICE)))
        with self.refused("0.weight_v is held by something else", "parametrizations"):
            st.compress_weights(normed, self.sgd(normed))
        with self.refused("int10 cannot be checked", "watch_updates"):
            plain, x = made()
            plain(x).sum().backward()
            st.check_updates(self.sgd(plain))
        model[0].bias.grad = torch.zeros_like(model[0].bias)
        with self.refused("0.bias has a gradient", "zero_grad"):
            st.compress_weights(model, self.sgd(model))

    def test_what_cannot_be_held(self):
        model, x = made()
        model[2].weight.data[1, 2] = float("nan")
        self.unchanged(model, self.sgd(model), "2.weight", "not finite")
        model, x = made()
        model[0].weight.register_hook(lambda g: g)
        self.unchanged(model, self.sgd(model), "0.weight has hooks")
        model, x = made()
        held = weakref.ref(model[2].weight)
        self.unchanged(model, self.sgd(model), "2.weight is held by something else", "torch.compile")
        del held
        model = model.to("meta")
        with self.refused("is on device meta"):
            st.compress_weights(model, self.sgd(model))

    def test_a_step_before_it(self):
        model, x = made()
        opt = self.sgd(model)
        loss_of(model, x).backward()
        with self.refused("int10", "call compress_weights"):
            opt.step()
        self.assertEqual(len(opt.state_dict()["state"]), 0)

    def test_channels_last(self):
        """Small convolutions of such a model become contiguous, unless there is an error."""
        torch.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 64, 3, bias=False)).to(DEVICE)
        model = model.to(memory_format=torch.channels_last)
        strides = model[0].weight.stride()
        self.unchanged(model, self.sgd(model), "accumulator is 'int7'", how=dict(accumulator="int7"))
        self.assertEqual(strides, model[0].weight.stride())
        self.assertFalse(model[0].weight.is_contiguous())
        opt = self.sgd(model)
        st.compress_weights(model, opt)
        x = tensor(8, 8, 6, 6).contiguous(memory_format=torch.channels_last)
        before = loss_of(model, x).item()
        train(model, x, opt, 20)
        self.assertLess(loss_of(model, x).item(), 0.9 * before)

    def test_few_elements(self):
        """They stay, and are exact: fp32, or 16 bits with an fp32 copy. A step below a bf16's last bit moves them."""
        for kind, how in ((st.SGD, LPMM), (st.AdamW, dict(weights="int12"))):
            for dtype, form in ((FP32, "fp32"), (BF16, "bf16+fp32")):
                model, _ = made(dtype=dtype)
                opt = kind(model.parameters(), lr=1e-3, **how)
                st.compress_weights(model, opt)
                self.assertEqual(opt._layout(model[0].bias).described[0][:2], ("weight", form))
                self.assertIs(type(model[0].bias), nn.Parameter)

    def test_twice(self):
        model, _, opt, handle = compressed()
        with self.refused("in codes already", "release_gradients"):
            st.compress_weights(model, opt)

    def test_states_of_torch(self):
        """Momentum comes along, the weight stays."""
        model, x = made()
        theirs = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        train(model, x, theirs, 3)
        opt = self.sgd(model)
        st.compress_weights(model, opt)
        opt.load_state_dict(theirs.state_dict())
        for p, q in zip(model.parameters(), theirs.state_dict()["state"].values()):
            momentum, wanted = opt.state[p]["momentum_buffer"], q["momentum_buffer"]
            self.assertLess((momentum - wanted).abs().max().item(), 0.01 * wanted.abs().max().item())
        train(model, x, opt, 1)

    def test_momentum_that_comes_later(self):
        """OneCycleLR sets it when it is made."""
        model, x = made()
        opt = st.SGD(model.parameters(), lr=0.02, recipe="lpmm")
        st.compress_weights(model, opt)
        schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.02, total_steps=10)
        for _ in range(3):
            train(model, x, opt, 1)
            schedule.step()
        self.assertGreater(opt.state[model[0].weight]["momentum_buffer"].abs().max().item(), 0)

    def test_other_states(self):
        """A state of other formats, and loading in the middle of a step."""
        model, x, opt, _ = compressed(how=dict(accumulate=2))
        train(model, x, opt, 1, 2)
        saved = opt.state_dict()
        other, _, second, _ = compressed(weights="int8")
        with self.refused_unchanged(second, "int10", model=other):
            second.load_state_dict(copy.deepcopy(saved))
        plain, _ = made()
        third = st.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        with self.refused_unchanged(third, "int10", "call compress_weights", model=plain):
            third.load_state_dict(copy.deepcopy(saved))
        loss_of(model, x[::2]).backward()
        with self.refused("1 micro-batches", "after opt.step()"):
            opt.load_state_dict(saved)


if __name__ == "__main__":
    unittest.main()
