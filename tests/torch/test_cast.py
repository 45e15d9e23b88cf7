"""cast_model: what is cast and what is kept, overrides by name, and networks that train afterwards."""

import copy
import itertools
import unittest

import torch

from support import BF16, DEVICE, FP16, FP32, Case, each, loss_of, mlp, st, tensor


class Net(torch.nn.Module):
    """Convolutions with batch normalisation, frequencies that are not saved, and a head."""

    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU()
        )
        self.block = torch.nn.Sequential(
            torch.nn.Conv2d(8, 8, 3, stride=2),
            torch.nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
            torch.nn.ReLU(),
        )
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 4)
        self.register_buffer("table", torch.linspace(0, 1, 8))
        self.register_buffer("frequencies", torch.linspace(0, 1, 8), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        x = self.block(self.stem(x)).mean((2, 3))
        return self.head(self.norm(x) + self.table)


def net():
    torch.manual_seed(0)
    return Net().to(DEVICE)


def dtypes(model):
    return {name: x.dtype for name, x in [*model.named_parameters(), *model.named_buffers()]}


class CastModel(Case):
    def test_what_is_cast(self):
        for dtype in (BF16, FP16):
            with self.subTest(dtype):
                model = net()
                before = copy.deepcopy(model)
                self.assertIs(st.cast_model(model, dtype), model)
                found = dtypes(model)
                kept = {name for name, d in found.items() if d is FP32}
                names = itertools.product(
                    ("stem.1", "block.1"), ("weight", "bias", "running_mean", "running_var")
                )
                self.assertEqual(kept, {"frequencies", *map(".".join, names)})
                self.assertEqual(found["count"], torch.int64)
                self.assertEqual(found["stem.1.num_batches_tracked"], torch.int64)
                self.assertEqual(
                    {found[name] for name in ("stem.0.weight", "norm.weight", "head.bias", "table")}, {dtype}
                )
                for (name, a), b in zip(model.named_parameters(), before.parameters()):
                    self.assertSame(a.detach(), b.detach().to(a.dtype), name)

    def test_parameters_stay_the_same_objects(self):
        """An optimizer, or a tied weight, made before goes on working."""
        model = mlp()
        model[5].bias = torch.nn.Parameter(model[5].bias.detach())
        ps = list(model.parameters())
        opt = st.AdamW(ps, lr=1e-2)
        ps[0].grad = torch.ones_like(ps[0])
        st.cast_model(model)
        self.assertTrue(all(a is b for a, b in zip(ps, model.parameters())))
        self.assertEqual(ps[0].grad.dtype, BF16)
        loss_of(model, 0).backward()
        opt.step()
        self.assertEqual(opt.state_dict()["param_groups"][0]["formats"]["bf16"]["weight"], "bf16+8")

    def test_overrides(self):
        table = [
            ({"head": FP32}, {"head.weight", "head.bias"}),
            ({"head.bias": FP32}, {"head.bias"}),
            (
                {"stem*": FP32, "*norm*": FP32},
                {"stem.0.weight", "stem.0.bias", "norm.weight", "norm.bias"},
            ),
            ({"stem.0.weight": BF16, "stem": FP32}, {"stem.0.bias"}),
            # the first match wins
            ({"table": FP32}, {"table"}),
        ]
        statistics = {
            name for name in dtypes(net()) if name.startswith(("stem.1", "block.1", "frequencies", "count"))
        }
        for overrides, kept in table:
            with self.subTest(str(overrides)):
                found = dtypes(st.cast_model(net(), overrides=overrides))
                self.assertEqual({n for n, d in found.items() if d is FP32} - statistics, kept)
        # Also down: what is kept otherwise.
        found = dtypes(st.cast_model(net(), overrides={"stem.1": BF16}))
        self.assertEqual(found["stem.1.running_mean"], BF16)

    @each(
        case={
            "unused pattern": (dict(overrides={"haed": FP32}), ("'haed'", "stem.0.weight")),
            "one of two": (dict(overrides={"head": FP32, "x.*": FP32}), ("'x.*'",)),
            "dtype": (dict(dtype=torch.int8), ("int8", "bfloat16")),
            "override's dtype": (dict(overrides={"head": torch.int8}), ("int8", "head")),
            "fp64": (dict(dtype=torch.float64), ("float64",)),
        }
    )
    def test_refused(self, case):
        arguments, words = case
        model = net()
        with self.refused_unchanged(st.AdamW(model.parameters()), *words, model=model):
            st.cast_model(model, **arguments)
        self.assertFalse(any(m._forward_pre_hooks for m in model.modules()))

    def test_buffers_that_are_not_saved(self):
        """A mask that meets attention is cast with the model, as 0 and -100 lose nothing; frequencies would."""

        class Block(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.qkv = torch.nn.Linear(8, 24)
                mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -100.0)
                self.register_buffer("mask", mask, persistent=False)
                self.register_buffer("frequencies", 10000.0 ** -torch.linspace(0, 1, 4), persistent=False)
                self.register_buffer("empty", torch.zeros(2, device="meta"), persistent=False)

            def forward(self, x):
                q, k, v = self.qkv(x).chunk(3, -1)
                return (q @ k.transpose(-1, -2) + self.mask).softmax(-1) @ v

        model = st.cast_model(Block())
        self.assertEqual(model(torch.ones(2, 4, 8, dtype=BF16)).dtype, BF16)
        self.assertSame(model.frequencies, Block().frequencies)
        # And by name, what would lose by it.
        model = st.cast_model(Block(), overrides={"frequencies": BF16, "mask": FP32})
        self.assertEqual((model.frequencies.dtype, model.mask.dtype), (BF16, FP32))

    def test_outputs_of_a_kept_head(self):
        """The second of a pair is the dtype of what comes out."""
        pair = (FP32, FP32)
        model = st.cast_model(net(), overrides={"head": pair})
        out = model(tensor(2, 3, 8, 8, dtype=BF16))
        self.assertEqual((out.dtype, model.head.weight.dtype), pair)
        self.assertFalse(torch.equal(out, out.bfloat16().float()))
        # A module in the model's own dtype whose outputs are wide.
        model = st.cast_model(net(), overrides={"head": (BF16, FP32)})
        out = model(tensor(2, 3, 8, 8, dtype=BF16))
        self.assertEqual((out.dtype, model.head.weight.dtype), (FP32, BF16))
        with self.refused("int8", "head"):
            st.cast_model(net(), overrides={"head": (FP32, torch.int8)})

    def test_a_kept_head(self):
        """Inputs are cast on the way in and outputs on the way out, in keywords and structures too."""
        model = st.cast_model(net(), overrides={"head": FP32})
        seen = []
        model.head.register_forward_hook(
            lambda m, args, out: seen.append((args[0].dtype, m.weight.dtype, out.dtype))
        )
        out = model(tensor(2, 3, 8, 8, dtype=BF16))
        self.assertEqual(out.dtype, BF16)
        self.assertEqual(seen[0][:2], (FP32, FP32))
        out.float().sum().backward()
        self.assertEqual((model.head.weight.grad.dtype, model.stem[0].weight.grad.dtype), (FP32, BF16))

        class Inner(torch.nn.Module):
            def forward(self, x, *, mask=None, many=()):
                return {"x": x, "mask": mask, "many": [m for m in many], "name": "same"}

        class Outer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.p = Inner(), torch.nn.Parameter(torch.zeros(1))

            def forward(self, x):
                return self.inner(x, mask=torch.ones(2, dtype=torch.bool), many=(x, x.long()))

        found = st.cast_model(Outer(), overrides={"inner": FP32})(torch.zeros(2, dtype=BF16))
        self.assertEqual(
            (found["x"].dtype, found["mask"].dtype, [m.dtype for m in found["many"]], found["name"]),
            (BF16, torch.bool, [BF16, torch.int64], "same"),
        )

    def train(self, model, opt, dtype, steps=60):
        losses, labels = [], torch.arange(32, device=DEVICE) % 4
        centres = tensor(4, 3, 8, 8, seed=1)
        for step in range(steps):
            x = (centres[labels] + 0.5 * tensor(32, 3, 8, 8, seed=2 + step)).to(dtype)
            loss = torch.nn.functional.cross_entropy(model(x).float(), labels)
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        return losses

    def test_trains(self):
        """In bf16 as in fp32, statistics included, with and without a head in fp32."""
        wide = net()
        ends = {"fp32": self.train(wide, st.AdamW(wide.parameters(), lr=1e-2, recipe="fp32"), FP32)}
        for label, overrides in (("bf16", None), ("fp32 head", {"head": FP32})):
            with self.subTest(label):
                model = st.cast_model(net(), overrides=overrides)
                start = model.stem[1].running_mean.clone()
                ends[label] = self.train(model, st.AdamW(model.parameters(), lr=1e-2), BF16)
                self.assertGreater(ends[label][0], 1.0)
                self.assertLess(ends[label][-1], 0.1)
                self.assertLess(abs(sum(ends[label][-5:]) - sum(ends["fp32"][-5:])) / 5, 0.05)
                # Averages of many batches end where those of the fp32 network do.
                self.assertFalse(torch.equal(model.stem[1].running_mean, start))
                self.assertEqual(int(model.stem[1].num_batches_tracked), 60)
                model.eval()
                self.assertTrue(bool(model(tensor(2, 3, 8, 8, dtype=BF16)).isfinite().all()))


if __name__ == "__main__":
    unittest.main()
