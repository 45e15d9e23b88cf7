"""A click model: DLRM (Naumov et al., 1906.00091), as Lewandowski and Kosson trained it. Embedding tables whose rows
see a gradient now and then, a bottom and a top MLP, products of all pairs between them.

--data DIR: the UCI census data "Adult" (adult.data.gz, adult.test.gz), income over 50,000 from 6 numbers and 8
categories; and the same tuned: a model of the younger half of people goes on with the older half, at a hundredth of the
rate. Without it: clicks drawn from a teacher of the same shape over tables of a million rows (--small: 2,000), in
which most rows are rare.
"""

import csv
import gzip
import math
import pathlib
import zlib

import torch
from torch import nn
from torch.nn import functional

WIDTH = 16
NUMBERS = (0, 2, 4, 10, 11, 12)  # columns of Adult; the others, but the last, are categories


class Dlrm(nn.Module):
    def __init__(self, tables, numbers):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, WIDTH) for rows in tables)
        self.bottom = nn.Sequential(nn.Linear(numbers, 64), nn.ReLU(), nn.Linear(64, WIDTH), nn.ReLU())
        pairs = len(tables) * (len(tables) + 1) // 2
        widths = (pairs + WIDTH, 128, 64, 1)
        layers = [layer for a, b in zip(widths, widths[1:]) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.top = nn.Sequential(*layers[:-1])
        for table in self.tables:
            nn.init.normal_(table.weight, std=1 / math.sqrt(WIDTH))

    def forward(self, numbers, categories):
        numbers = self.bottom(numbers.to(self.bottom[0].weight.dtype))
        parts = torch.stack([numbers, *(table(column) for table, column in zip(self.tables, categories.T))], 1)
        i, j = torch.triu_indices(parts.shape[1], parts.shape[1], 1, device=parts.device)
        products = (parts @ parts.transpose(1, 2))[:, i, j]
        return self.top(torch.cat([numbers, products], 1)).squeeze(1)


def read_adult(path):
    with gzip.open(path, "rt") as text:
        rows = [[cell.strip() for cell in row] for row in csv.reader(text)]
    rows = [row for row in rows if len(row) == 15 and row[0].isdigit()]  # some copies have a head
    return rows, [row[-1].rstrip(".") == ">50K" for row in rows]


def adult(folder):
    """(numbers, categories, labels) to train with and to test with, and the sizes of the tables."""
    paths = [pathlib.Path(folder) / name for name in ("adult.data.gz", "adult.test.gz")]
    for path in paths:
        if not path.exists():
            raise SystemExit(f"{path} is not there: --data wants the UCI data set Adult, adult.data.gz and adult.test.gz")
    both = [read_adult(path) for path in paths]
    kinds = [i for i in range(14) if i not in NUMBERS]
    names = [{name: n + 1 for n, name in enumerate(sorted({row[i] for row in both[0][0]}))} for i in kinds]
    numbers = [torch.tensor([[float(row[i]) for i in NUMBERS] for row in rows]).log1p() for rows, _ in both]
    mean, spread = numbers[0].mean(0), numbers[0].std(0)
    sets = [
        (
            (x - mean) / spread,
            torch.tensor([[known.get(row[i], 0) for known, i in zip(names, kinds)] for row in rows]),
            torch.tensor(labels, dtype=torch.float32),
        )
        for x, (rows, labels) in zip(numbers, both)
    ]
    return sets, [len(known) + 1 for known in names]


def clicks(rows, count):
    """Drawn from a teacher; category k of a table comes about 1 / k as often as the first."""
    generator = torch.Generator().manual_seed(7)
    tables = [rows, rows // 4, 50, 10]
    teacher = Dlrm(tables, 6)
    for p in teacher.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator) * (1.5 / math.sqrt(p.shape[-1])))
    numbers = torch.randn(count, 6, generator=generator)
    categories = torch.stack(
        [(size ** torch.rand(count, generator=generator)).long().clamp(max=size - 1) for size in tables], 1
    )
    with torch.no_grad():
        score = torch.cat([teacher(*part) for part in zip(numbers.split(65536), categories.split(65536))])
    chance = torch.sigmoid(2 * (score - score.mean()) / score.std() - 1)
    labels = torch.bernoulli(chance, generator=generator)
    cut = count - count // 5
    return [(numbers[s], categories[s], labels[s]) for s in (slice(cut), slice(cut, count))], tables


def auc(scores, labels):
    """The share of pairs, one of each label, that stand in the right order; equal scores count half."""
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts.double() - 1) / 2)[place]
    positives = labels.sum().item()
    return float((ranks[labels > 0].sum() - positives * (positives + 1) / 2) / (positives * (len(labels) - positives)))


class Task:
    metric, optimizer = "log loss", "AdamW"
    hypers = {"lr": 2e-3, "weight_decay": 1e-4}

    def __init__(self, data, small, device):
        self.device = device
        if data:
            self.name, (sets, self.tables) = "recommendation, Adult", adult(data)
            self.steps, self.size = 1200, 256
        else:
            self.name = "recommendation, clicks" + (", small" if small else "")
            sets, self.tables = clicks(2000, 20000) if small else clicks(1_000_000, 2_500_000)
            self.steps, self.size = (150, 256) if small else (1000, 2048)  # once over: who sees it again learns it by heart
        self.training, self.testing = ([part.to(device) for part in parts] for parts in sets)

    def model(self):
        return Dlrm(self.tables, self.training[0].shape[1])

    def batch(self, generator):
        chosen = torch.randint(len(self.training[0]), (self.size,), generator=generator).to(self.device)
        return [part[chosen] for part in self.training]

    def loss(self, model, batch):
        numbers, categories, labels = batch
        return functional.binary_cross_entropy_with_logits(model(numbers, categories).float(), labels)

    @torch.no_grad()
    def evaluate(self, model):
        numbers, categories, labels = self.testing
        scores = torch.cat([model(*part).float() for part in zip(numbers.split(8192), categories.split(8192))])
        loss = functional.binary_cross_entropy_with_logits(scores, labels)
        return {"log loss": float(loss), "AUC": auc(scores.cpu(), labels.cpu())}


class Tuned(Task):
    """From a model that knows people up to the median age, as bf16 holds it: what those above it teach it."""

    hypers = {"lr": 2e-5, "weight_decay": 1e-4}

    def __init__(self, data, device):
        super().__init__(data, False, device)
        self.name = "recommendation, Adult tuned"
        middle = self.training[0][:, 0].median()  # the first number is the age
        older = [parts[0][:, 0] > middle for parts in (self.training, self.testing)]
        younger = [part[~older[0]] for part in self.training]
        self.training, self.testing = (
            [part[chosen] for part in parts] for parts, chosen in zip((self.training, self.testing), older)
        )
        self.start = {name: x.bfloat16().float().cpu() for name, x in self.learned(younger).state_dict().items()}
        self.begin = f"{zlib.crc32(self.start['top.0.weight'].numpy()):08x}"

    def learned(self, people):
        torch.manual_seed(7)
        model, order = super().model().to(self.device), torch.Generator().manual_seed(7)
        opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
        for _ in range(self.steps):
            chosen = torch.randint(len(people[0]), (self.size,), generator=order).to(self.device)
            self.loss(model, [part[chosen] for part in people]).backward()
            opt.step()
            opt.zero_grad()
        return model

    def model(self):
        model = super().model()
        model.load_state_dict(self.start)
        return model


def tasks(data, small, device):
    made = [Task(data, small, device)]
    return [*made, Tuned(data, device)] if data and not small else made
