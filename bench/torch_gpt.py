"""A GPT-2 in plain torch modules, fp32, eager, on the CPU, and `scruple train` beside it.

usage: bench/torch_gpt.py [SCRUPLE] [--layers 6] [--width 256] [--heads 8] [--context 256] [--batch 8]
                          [--steps 10] [--threads 2] [--config FILE]

--config: the model of a Hugging Face config.json instead, as transformers computes it; llama: one of 11 million
parameters with 4,096 words. Needs torch. Prints one JSON object: tokens per second of forward + backward, and of whole steps with AdamW (torch's
fused one); with SCRUPLE, the path of the command, also its whole steps in several recipes and their ratio to torch's.
"""

import argparse
import json
import math
import os
import random
import re
import statistics
import subprocess
import tempfile
import time

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256  # bytes


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


LLAMA = {"model_type": "llama", "vocab_size": 4096, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
         "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 2048, "hidden_act": "silu",
         "tie_word_embeddings": True}


class Family(nn.Module):
    """transformers' model of a config, with its loss."""

    def __init__(self, config):
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__()
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))  # its own attention: torch's fused

    def forward(self, tokens, targets):
        logits = self.model(tokens).logits
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Gpt(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
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
    model = Family(shape.config) if shape.config else Gpt(shape)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    words = shape.config["vocab_size"] if shape.config else VOCABULARY
    tokens, targets = torch.randint(words, (2, shape.batch, shape.context))

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


def measure_scruple(path, shape, recipe):
    with tempfile.TemporaryDirectory() as folder:
        data = os.path.join(folder, "data.bin" if shape.config else "data")
        with open(data, "wb") as file:
            if shape.config:  # nanoGPT's form: 16 bits to a token
                file.write(torch.randint(shape.config["vocab_size"], (1 << 19,), dtype=torch.int16).numpy().tobytes())
            else:
                file.write(random.Random(1).randbytes(1 << 20))
        sizes = ("context", "batch", "steps", "threads") + (() if shape.config else ("layers", "width", "heads"))
        model = [word for name in sizes for word in ("--" + name, str(getattr(shape, name)))]
        if shape.config:
            with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
                json.dump(shape.config, file)
            model += ["--model", os.path.join(folder, "config.json")]
        done = subprocess.run([path, "train", "--data", data, "--out", os.path.join(folder, "out"), "--recipe", recipe,
                               "--clip", "0", "--validate-every", "1000000", *model], check=True, capture_output=True,
                              text=True)
    milliseconds = float(re.search(r"([\d.]+) ms per step", done.stdout).group(1))
    return round(shape.batch * shape.context * 1e3 / milliseconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("scruple", nargs="?", help="path of the command")
    defaults = {"layers": 6, "width": 256, "heads": 8, "context": 256, "batch": 8, "steps": 10, "threads": 2}
    for name, value in defaults.items():
        parser.add_argument("--" + name, type=int, default=value)
    parser.add_argument("--config", help="a config.json, or llama")
    shape = parser.parse_args()
    if shape.config == "llama":
        shape.config = LLAMA
    elif shape.config:
        with open(shape.config, encoding="utf-8") as file:
            shape.config = json.load(file)
    found = {**vars(shape), **measure(shape)}
    if shape.scruple:
        for recipe in ("fp32", "scruple"):
            found[f"scruple_{recipe}_tokens_per_s"] = measure_scruple(shape.scruple, shape, recipe)
            found[f"scruple_{recipe}_over_torch"] = round(
                found[f"scruple_{recipe}_tokens_per_s"] / found["train_tokens_per_s"], 3)
    for name in ("scruple",) + (("layers", "width", "heads") if shape.config else ("config",)):
        del found[name]
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
