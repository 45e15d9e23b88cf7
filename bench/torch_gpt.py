"""A GPT-2 in plain torch modules, fp32, eager, on the CPU: what `scruple train` is measured against.

usage: bench/torch_gpt.py [--layers 6] [--width 256] [--heads 8] [--context 256] [--batch 8]
                          [--vocabulary 256] [--steps 10] [--threads 2]

Needs torch. Prints one JSON object: tokens per second of forward + backward, and of the same with AdamW's
fused step.
"""

import argparse
import json
import math
import statistics
import time

import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.attended = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attended(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.contract(functional.gelu(self.expand(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.layers = nn.ModuleList(Layer(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        for name, value in self.named_parameters():
            if value.dim() == 2:
                residual = name.endswith(("attended.weight", "contract.weight"))
                nn.init.normal_(value, std=0.02 / math.sqrt(2 * shape.layers) if residual else 0.02)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)  # tied
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def seconds_per_step(step, steps):
    step(), step()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure(shape):
    torch.set_num_threads(shape.threads)
    torch.manual_seed(1)
    model = Gpt(shape)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens, targets = torch.randint(shape.vocabulary, (2, shape.batch, shape.context))

    def gradients():
        optimizer.zero_grad(set_to_none=True)
        model(tokens, targets).backward()

    def train():
        gradients()
        optimizer.step()

    count = shape.batch * shape.context
    return {
        "torch": torch.__version__,
        "threads": shape.threads,
        "parameters": sum(p.numel() for p in model.parameters()),
        "gradients_tokens_per_s": round(count / seconds_per_step(gradients, shape.steps)),
        "train_tokens_per_s": round(count / seconds_per_step(train, shape.steps)),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    defaults = {"layers": 6, "width": 256, "heads": 8, "context": 256, "batch": 8, "vocabulary": 256}
    for name, value in {**defaults, "steps": 10, "threads": 2}.items():
        parser.add_argument("--" + name, type=int, default=value)
    shape = parser.parse_args()
    print(json.dumps({**vars(shape), **measure(shape)}))


if __name__ == "__main__":
    main()
