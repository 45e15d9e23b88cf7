"""A trained language model, tuned at small learning rates, after FlashOptim (2602.23349): the GPT-2 of pretraining.py on
SciTLDR, abstracts with one-sentence summaries, all weights, AdamW without decay, 1e-5 and 1e-6. Here an update is smaller
than what the last bit of a bf16 weight is worth: weights without extra bits must be seen to stall.

--data DIR: train.jsonl.xz and test.jsonl.xz of SciTLDR, with "source" (sentences) and "target" (summaries). Loss on the
summary alone. The small form learns the alphabet, and is tuned to say it backwards.
"""

import json
import pathlib
import zlib

import torch
from language import KEPT, LETTERS, gpt2, letters, read, small_gpt, spelled, tokenizer

LENGTH = 512


def fitted(pairs, length):
    """(inputs, targets): prompt and answer, padded; targets are the answer's tokens, -100 elsewhere."""
    rows = []
    for prompt, answer in pairs:
        targets = [-100] * (len(prompt) - 1) + answer
        rows.append([(prompt + answer)[:-1] + [0] * (length - len(targets)), targets + [-100] * (length - len(targets))])
    both = torch.tensor(rows)
    return both[:, 0], both[:, 1]


def summaries(folder, name):
    coder = tokenizer()
    text = read(pathlib.Path(folder) / f"{name}.jsonl.xz", "the data set SciTLDR, train.jsonl.xz and test.jsonl.xz")
    found = [json.loads(line) for line in text.splitlines()]
    sources = coder.encode_batch([" ".join(x["source"]) for x in found])
    targets = coder.encode_batch([f" {x['target'][0]}\n" for x in found])
    between = coder.encode("\n\nIn short:").ids
    most = LENGTH * 3 // 4 - len(between)
    pairs = [(a.ids[:most] + between, b.ids[: LENGTH // 4]) for a, b in zip(sources, targets)]
    return fitted(pairs, LENGTH)


def backwards(count, seed):
    """From any letter four back: `c-bazy`."""
    first = torch.randint(26, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    lines = [(f"{LETTERS[i]}-", "".join(LETTERS[i - k] for k in range(1, 5)) + "\n") for i in first]
    return fitted([(spelled(a), spelled(b)) for a, b in lines], 8)


def reciter(steps=200):
    """The small model, after it has learnt the alphabet."""
    torch.manual_seed(0)
    model, text, order = small_gpt(), letters(8000).long(), torch.Generator().manual_seed(0)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        chosen = torch.randint(len(text) - 32, (16, 1), generator=order) + torch.arange(33)
        model(text[chosen[:, :-1]], text[chosen[:, 1:]]).backward()
        opt.step()
        opt.zero_grad()
    return {name: x.bfloat16().float() for name, x in model.state_dict().items()}


class Task:
    metric, optimizer = "loss on summaries", "AdamW"
    autocast = True

    def __init__(self, name, lr, start, training, testing, steps, size, small):
        self.name, self.hypers = name, {"lr": lr, "weight_decay": 0.0}
        self.start, self.training, self.testing = start, training, testing
        self.begin = f"{zlib.crc32(start['tokens.weight'].numpy()):08x}"  # runs from other weights are not compared
        self.steps, self.size, self.shape = steps, size, small_gpt if small else gpt2

    def model(self):
        model = self.shape()
        model.load_state_dict(self.start)
        return model

    def batch(self, generator):
        chosen = torch.randint(len(self.training[0]), (self.size,), generator=generator)
        return [part[chosen.to(part.device)] for part in self.training]

    def loss(self, model, batch):
        return model(*batch)

    def evaluate(self, model):
        total = count = 0
        for x, y in zip(*(part.split(16) for part in self.testing)):
            here = int((y != -100).sum())
            total, count = total + float(model(x, y)) * here, count + here
        return {"loss on summaries": total / count}


def tasks(data, small, device, name="fine-tuning", rates=(1e-5, 1e-6)):
    if small:
        start, sets, steps, size = reciter(), (backwards(2000, 1), backwards(300, 2)), 200, 32
        rates = [100 * rate for rate in rates]  # larger weights, fewer of them
    else:
        if not data:
            raise SystemExit("fine-tuning wants --data DIR, the data set SciTLDR (train.jsonl.xz, test.jsonl.xz)")
        if not (KEPT / "gpt2.pt").exists():
            raise SystemExit("fine-tuning starts from weights of TASK=pretraining, which has not run here: run it first")
        start = {name: x.float() for name, x in torch.load(KEPT / "gpt2.pt", map_location="cpu").items()}
        sets, steps, size = [summaries(data, part) for part in ("train", "test")], 375, 16
    sets = [[part.to(device) for part in parts] for parts in sets]
    end = ", small" if small else ""
    return [Task(f"{name}, {rate:g}{end}", rate, start, *sets, steps, size, small) for rate in rates]
