"""Underflow: what is lost in few bits, where it shows and what mends it. After Micikevicius et al. (1710.03740), whose
gradients vanish in fp16 unless losses are scaled, and LPMM, whose sums of micro-batches and moments lose small parts
in 8 bits.

The next of many words, of which most are rare, from the two before it: embeddings, one hidden layer, a softmax. The
words are drawn from a teacher of the same shape; there is no data to be had. Three tasks, each changes one thing:

  fp16            the dtype of weights and gradients, and the loss scale
  accumulation    where the gradients of micro-batches are added up; all else is fp32
  moments         the format of the second moments; all else is fp32
"""

import math

import torch
from harness import REFERENCE, Row
from torch import nn
from torch.nn import functional

import scruple.torch as st

WIDTH = 16  # four rows of the table share a group of 64, and their words are not equally frequent
SIZE = 1024  # a batch


class Words(nn.Module):
    def __init__(self, words, hidden):
        super().__init__()
        self.table = nn.Embedding(words, WIDTH)
        self.hidden = nn.Linear(2 * WIDTH, hidden)
        self.out = nn.Linear(hidden, words)

    def forward(self, context):
        return self.out(functional.relu(self.hidden(self.table(context).flatten(1))))


def draw(words, hidden, count):
    """(contexts, next words). Word k comes about 1 / k as often as the first; their numbers are shuffled."""
    generator = torch.Generator().manual_seed(7)
    order = torch.randperm(words, generator=generator)
    context = order[(words ** torch.rand(count, 2, generator=generator)).long().clamp(max=words - 1)]
    teacher = Words(words, hidden)
    for p in teacher.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator) * math.sqrt(2 / p.shape[-1]))
    nn.init.normal_(teacher.table.weight, generator=generator)
    teacher.out.bias.data[order] = -torch.arange(1.0, words + 1).log()
    with torch.no_grad():
        chances = (teacher(part).softmax(1) for part in context.split(4096))
        following = torch.cat([torch.multinomial(part, 1, generator=generator)[:, 0] for part in chances])
    return context, following


class Task:
    metric, optimizer = "validation loss", "AdamW"
    hypers = {"lr": 3e-3, "weight_decay": 0.01}
    parts = 1  # that a step's words come in, of which a batch is one: its gradient is divided by them

    def __init__(self, kind, rows, data, small, device):
        self.name, self.rows, self.device = f"underflow, {kind}" + (", small" if small else ""), rows, device
        self.words, self.layer, self.steps = (256, 32, 150) if small else (2048, 256, 1000)
        self.training, self.validation = data

    def model(self):
        return Words(self.words, self.layer)

    def batch(self, generator):
        chosen = torch.randint(len(self.training[0]), (SIZE,), generator=generator).to(self.device)
        return [part[chosen] for part in self.training]

    def loss(self, model, batch):
        context, following = batch
        loss = functional.cross_entropy(model(context).float(), following)
        return loss if self.parts == 1 else loss / self.parts + (loss - loss / self.parts).detach()

    def evaluate(self, model):
        batch = [part[:SIZE] for part in self.validation]
        losses = [self.loss(model, part) for part in zip(*(x.split(SIZE) for x in self.validation))]
        return {"validation loss": float(torch.stack(losses).mean()), **self.gradients(model, batch)}

    def gradients(self, model, batch):
        """As the row makes them."""
        return {}

    def copy(self, model, dtype):
        fresh = self.model().to(self.device, dtype)
        fresh.load_state_dict(model.state_dict())
        return fresh


class Fp16(Task):
    parts = 512  # half a million words, as a GPU among many sees them; eps is as small, so fp32 trains as ever
    hypers = {**Task.hypers, "eps": 1e-8 / parts}

    @torch.enable_grad()
    def gradients(self, model, batch):
        """The share of a batch's gradient that is zero as the row computes it, and is not in fp32."""
        ours, true = self.copy(model, self.row.dtype), self.copy(model, torch.float32)
        (self.loss(ours, batch) * (self.row.loss_scale or 1.0)).backward()
        self.loss(true, batch).backward()
        pairs = [(p.grad, q.grad) for p, q in zip(ours.parameters(), true.parameters())]
        if not all(bool(x.isfinite().all()) for pair in pairs for x in pair):
            return {"vanished": math.nan}  # the weights are not numbers any more
        lost = sum(int(((g == 0) & (h != 0)).sum()) for g, h in pairs)
        return {"vanished": lost / sum(int((h != 0).sum()) for _, h in pairs)}


class Accumulation(Task):
    @torch.enable_grad()
    def gradients(self, model, batch):
        """Of a batch in micro-batches: how far the sum as the row keeps it is from the sum in fp64 of the same parts."""
        row = self.row
        parts = list(zip(*(x.chunk(row.passes) for x in batch)))
        fresh = self.copy(model, row.dtype)
        params = list(fresh.parameters())
        true = [torch.zeros_like(p, dtype=torch.float64) for p in params]
        for part in parts:
            loss = self.loss(fresh, part) / row.passes
            for total, g in zip(true, torch.autograd.grad(loss, params)):
                total += g
        if row.gradients == "stored":
            for part in parts:
                (self.loss(fresh, part) / row.passes).backward()
            ours = [p.grad for p in params]
        else:
            opt = st.SGD(params, lr=0.0, momentum=0.9, recipe="fp32")  # its momentum is the gradient, after a step
            handle = st.release_gradients(
                fresh, opt, row.gradients, accumulate=row.passes, accumulator=row.accumulator, scaler=False
            )
            for part in parts:
                self.loss(fresh, part).backward()
            handle.remove()
            kept = opt.state_dict(as_="torch")["state"]
            ours = [kept[i]["momentum_buffer"].to(self.device) for i in range(len(params))]
        off = [(g.double() - h).abs() for g, h in zip(ours, true)]
        length = math.sqrt(sum(float(h.square().sum()) for h in true))
        half = sum(int((e > h.abs() / 2).sum()) for e, h in zip(off, true))
        return {
            "gradient off by": math.sqrt(sum(float(e.square().sum()) for e in off)) / length,
            "elements off by half": half / sum(h.numel() for h in true),
        }


SCALE = 2.0**16
FP16 = (
    REFERENCE,
    Row("bf16", recipe="split"),
    Row("fp16", torch.float16, recipe="split"),
    Row("fp16, scaled", torch.float16, recipe="split", loss_scale=SCALE),
    Row("fp16, scaled, scruple", torch.float16, recipe="scruple", loss_scale=SCALE),
    Row("fp16, scaled, all of it fp16", torch.float16, loss_scale=SCALE),  # torch's moments have the weight's dtype
)


def sums(passes, accumulators):
    """Rows that fold micro-batches; beside them torch, which adds up in the dtype of the weights."""
    some = f"{passes} micro-batch" + ("es" if passes > 1 else "")
    for name in accumulators:
        options = dict(recipe="fp32", gradients="compressed", passes=passes, accumulator=name)
        yield Row(f"{name}, {some}", torch.float32, **options)
    yield Row(f"bf16 by torch, {some}", recipe="mixed", passes=passes)


ACCUMULATION = (
    REFERENCE,
    *sums(1, ("int8", "root8")),
    *sums(8, ("int8", "root8")),
    *sums(64, ("int8", "root8", "bf16", "fp32")),
)
MOMENTS = (
    REFERENCE,
    *(
        Row(
            f"{name}, {rounding}",
            torch.float32,
            recipe="fp32",
            options={"moments": {"exp_avg_sq": name}, "rounding": {"exp_avg_sq": rounding}},
        )
        for name in ("bf16", "linear8", "flash8", "companded8", "log5")
        for rounding in ("nearest", "stochastic")
    ),
)


def tasks(data, small, device):
    if data:
        raise SystemExit("underflow draws its own words: leave --data out")
    words, hidden, count = (256, 32, 1 << 15) if small else (2048, 256, 1 << 18)
    parts = [part.to(device) for part in draw(words, hidden, count)]
    cut = count - (1 << 13)
    sets = [[part[s] for part in parts] for s in (slice(cut), slice(cut, count))]
    kinds = (Fp16, "fp16", FP16), (Accumulation, "accumulation", ACCUMULATION), (Task, "moments", MOMENTS)
    return [task(kind, rows, sets, small, device) for task, kind, rows in kinds]
