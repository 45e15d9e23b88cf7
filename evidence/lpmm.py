"""LPMM, "Training Neural Networks with Low-Precision Model Memory" (Li et al., ICLR 2023 submission): SGD with momentum
whose weights, momentum and gradient accumulators live in few bits. The paper's ablation on a ResNet-18 and a GPT.

"N bits, ROUNDING" is all of it: weights of N bits, momentum in linear8, both by that rounding, and accumulators in int8,
which are always drawn. "10 bits, stochastic" is recipe lpmm. A step takes 1, 4 or 16 micro-batches, each of the same
size, over the same data: "x 4" has a quarter of the steps. "16 epochs" has as many steps of 16 as "x 4" has of 4. The
rate grows with the square root of their number on images, with the fourth root on text, where SGD diverges sooner.

--data DIR: CIFAR-10 as images.py takes it, or the books of pretraining.py, of which the first 20 MB are read as bytes.
--small: the drawn shapes of images.py and the alphabet of pretraining.py.
"""

import dataclasses
import lzma
import math
import pathlib

import gather
import harness
import images
import language
import pretraining
import torch
from torch import nn
from torch.nn import functional

PARTS = (1, 4, 16)
WHOLE = dict(recipe="lpmm", gradients="coded", accumulator="int8")
ALONE = {
    "weights alone": dict(
        recipe="fp32", gradients="coded", accumulator="fp32", options={"weights": "int10", "rounding": "stochastic"}
    ),
    "momentum alone": dict(recipe="lpmm", options={"weights": "fp32"}),
    "accumulators alone": dict(recipe="fp32", gradients="compressed", accumulator="int8"),
}


def rows(parts):
    def row(name, **how):
        return harness.Row(name, torch.float32, passes=parts, **how)

    yield dataclasses.replace(harness.REFERENCE, passes=parts)
    for bits in (8, 9, 10, 12):
        for rounding in ("stochastic", "nearest"):
            name, options = f"{bits} bits, {rounding}", {"weights": f"int{bits}", "rounding": rounding}
            if parts == 1 or name in (gather.LPMM, gather.COARSE):
                yield row(name, options=options, **WHOLE)
    if parts == 1:
        yield from (row(name, **how) for name, how in ALONE.items())
        yield from (row(f"{gather.REFERENCE}, lr x {rate}", rate=rate) for rate in (0.9, 1.1))


class Shared:
    optimizer, watches, compiled = "SGD", True, False

    def set_up(self, kind, parts, small, lr, size, samples):
        """`size` samples to a micro-batch, `samples` in all."""
        self.name = f"lpmm, {kind}" + (f" x {parts}" if parts > 1 else "") + (", small" if small else "")
        self.rows, self.size, self.steps = tuple(rows(parts)), parts * size, samples // (parts * size)
        self.hypers = {"lr": lr * parts**self.growth, "momentum": 0.9, "weight_decay": self.decay}

    def rate(self, step):
        """Up over a tenth of the steps, and a cosine down to zero."""
        return min(1, 10 * (step + 1) / self.steps) * (1 + math.cos(math.pi * step / self.steps)) / 2


class Images(Shared, images.Task):
    growth, decay = 0.5, 5e-4

    def __init__(self, sets, parts, small, device, longer=1):
        images.Task.__init__(self, sets, "SGD", {}, small, device)
        epochs, size = (8, 16) if small else (4 * longer, 128)
        self.set_up("images", parts, small, 0.002 if small else 0.1, size, epochs * len(sets[0][0]))
        self.name += f", {epochs} epochs" * (longer > 1)


class Text(Shared, pretraining.Task):
    growth, decay = 0.25, 0.0

    def __init__(self, tokens, parts, small, device):
        self.context, self.shape = (32, (28, 32, 1, 64, 2)) if small else (128, (256, 128, 4, 384, 6))
        self.set_up("text", parts, small, 0.05, *((8, 8 * 320) if small else (32, 32 * 1536)))
        cut = len(tokens) * 98 // 100
        self.training, self.testing = tokens[:cut].to(device), tokens[cut:].to(device)

    def model(self):
        return Reader(*self.shape)


class Reader(nn.Module):
    """A GPT with a head of its own and torch's first weights: with GPT-2's, SGD stays at single letters for long."""

    def __init__(self, signs, context, layers, width, heads):
        super().__init__()
        self.signs, self.places = nn.Embedding(signs, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(language.Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, signs)

    def forward(self, signs, targets):
        x = self.signs(signs) + self.places(torch.arange(signs.shape[1], device=signs.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def pixels(folder):
    """images.cifar10, decoded once: many processes want them."""
    path = language.KEPT / "cifar10.pt"
    if not path.exists():
        sets = images.cifar10(folder)
        language.keep(path.name, lambda fresh: torch.save(sets, fresh))
    return torch.load(path)


def books(path):
    with lzma.open(path) as text:
        return torch.frombuffer(bytearray(text.read(20 << 20)), dtype=torch.uint8)


def tasks(data, small, device):
    if small:
        sets = {Images: images.shapes(1600), Text: language.letters(8000)}
    elif data and (text := pathlib.Path(data) / "classic_books.txt.xz").exists():
        sets = {Text: books(text)}
    elif data:
        sets = {Images: pixels(data)}
    else:
        raise SystemExit(f"lpmm needs data: {images.WANTED}; or classic_books.txt.xz, any English books as one text")
    found = [kind(held, parts, small, device) for kind, held in sets.items() for parts in PARTS]
    return found + ([] if small or Images not in sets else [Images(sets[Images], 16, small, device, longer=4)])
