"""Time and memory of training with compress_weights, beside torch's fp32 and `mixed`, in one process.

    python bench/torch_lpmm.py [--models resnet18,resnet50,gpt] [--rounds 7] [--compile] [--graph] [--json FILE]

--graph: a step of forward, backward and optimizer is one CUDA graph, for each way.

Needs a GPU, torch and scruple. fp32: SGD with momentum, fused. mixed: the same, fp32 weights with autocast to bf16.
lpmm: SGD(recipe="lpmm") and compress_weights, with the same autocast. Images are 224 x 224 (resnet18-32: CIFAR's 32 x 32
with a stem of 3 x 3), 128 in a batch, channels last; gpt is GPT-2 with 124 M parameters, 8 sequences of 1,024 tokens.
Inputs are random. The ways to train take turns, ten steps at a time; times are medians over rounds, by wall clock.

  ms       of a step; host: until Python has asked for everything, without waiting for the GPU
  bytes    per parameter, by torch's allocator between two micro-batches: weights, state, gradients or accumulators
  peak     GiB over one training step, above what was there before the model
"""

import argparse
import gc
import json
import pathlib
import statistics
import sys
import time
import types

import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import torch_gpt

import scruple.torch as st

VOCABULARY = 50304  # GPT-2's, filled up to a multiple of 64, as nanoGPT does


class Block(nn.Module):
    """He et al., 1512.03385: two layers of 3 x 3, or 1 x 1, 3 x 3 and 1 x 1 around a narrower inside."""

    def __init__(self, before, width, stride, deep):
        super().__init__()
        after = 4 * width if deep else width
        shapes = [(before, width, 1, 1), (width, width, 3, stride), (width, after, 1, 1)]
        shapes = shapes if deep else [(before, width, 3, stride), (width, width, 3, 1)]
        self.inside = nn.Sequential()
        for i, shape in enumerate(shapes):
            self.inside.extend([*self.layer(*shape), nn.ReLU(inplace=True)])
        del self.inside[-1]
        self.across = nn.Identity() if stride == 1 and before == after else self.layer(before, after, 1, stride)

    @staticmethod
    def layer(before, after, size, stride):
        return nn.Sequential(nn.Conv2d(before, after, size, stride, size // 2, bias=False), nn.BatchNorm2d(after))

    def forward(self, x):
        return torch.relu(self.inside(x) + self.across(x))


class ResNet(nn.Module):
    def __init__(self, depths, deep, small=False):
        super().__init__()
        stem = [Block.layer(3, 64, *((3, 1) if small else (7, 2))), nn.ReLU(inplace=True)]
        blocks, before = [], 64
        for width, depth in zip((64, 128, 256, 512), depths):
            for i in range(depth):
                blocks.append(Block(before, width, 2 if i == 0 and width > 64 else 1, deep))
                before = 4 * width if deep else width
        self.layers = nn.Sequential(*stem, *([] if small else [nn.MaxPool2d(3, 2, 1)]), *blocks)
        self.head = nn.Linear(before, 10 if small else 1000)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.head(self.layers(x).mean((2, 3))), y)


def images(size, kinds):
    def draw(scale):
        x = torch.randn(max(128 // scale, 1), 3, size, size, device="cuda").contiguous(memory_format=torch.channels_last)
        return x, torch.randint(kinds, (len(x),), device="cuda")

    return draw


def tokens(scale):
    return torch.randint(VOCABULARY, (2, max(8 // scale, 1), 1024), device="cuda").unbind()


def gpt():
    torch_gpt.VOCABULARY = VOCABULARY
    return torch_gpt.Gpt(types.SimpleNamespace(width=768, heads=12, layers=12, context=1024))


MODELS = {
    "resnet18": (lambda: ResNet((2, 2, 2, 2), False), images(224, 1000)),
    "resnet18-32": (lambda: ResNet((2, 2, 2, 2), False, True), images(32, 10)),
    "resnet50": (lambda: ResNet((3, 4, 6, 3), True), images(224, 1000)),
    "gpt": (gpt, tokens),
}
WAYS = ("fp32", "mixed", "lpmm")


class Run:
    """A model, its optimizer, and a batch of `1 / scale` of the usual size."""

    def __init__(self, name, way, scale=1, accumulate=1, compiled=False, graph=False):
        make, draw = MODELS[name]
        torch.manual_seed(1)
        self.batch, self.way = draw(scale), way
        self.model = make().cuda()
        if name.startswith("resnet"):
            self.model.to(memory_format=torch.channels_last)
        self.count = sum(p.numel() for p in self.model.parameters())
        if way == "lpmm":
            how = dict(momentum=0.9, weight_decay=1e-4, recipe="lpmm", **(dict(capturable=True) if graph else {}))
            self.opt = st.SGD(self.model.parameters(), lr=0.01, **how)
            st.compress_weights(self.model, self.opt, accumulate=accumulate)
        else:
            self.opt = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=True)
        if compiled:
            self.model.compile()

    def capture(self):
        """From now on step() replays a graph of one."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self.step()
        self.step = lambda: (graph.replay(), loss)[1]

    def backward(self):
        with torch.autocast("cuda", torch.bfloat16, enabled=self.way != "fp32"):
            loss = self.model(*self.batch)
        loss.backward()
        return loss

    def step(self):
        loss = self.backward()
        self.opt.step()
        self.opt.zero_grad()
        return loss


def memory(name, way):
    """(bytes of the model for each parameter, peak of a step): of batches so small that activations hardly count."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    run = Run(name, way, scale=128, accumulate=2)
    batch = sum(x.untyped_storage().nbytes() for x in run.batch)
    run.backward()
    run.step()
    torch.cuda.reset_peak_memory_stats()
    run.backward()
    held = torch.cuda.memory_allocated() - before - batch
    run.step()
    return held / run.count, (torch.cuda.max_memory_allocated() - before) / 2**30


def times(name, rounds, compiled, graph, steps=10):
    runs = {way: Run(name, way, compiled=compiled, graph=graph) for way in WAYS}
    for run in runs.values() if graph else ():
        run.capture()
    seconds, host, losses = {way: [] for way in WAYS}, {way: [] for way in WAYS}, {}
    for turn in range(rounds + 1):
        for way, run in runs.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(steps):
                losses[way] = run.step()
            asked = time.perf_counter() - start
            torch.cuda.synchronize()
            if turn:  # the first is a warm-up
                seconds[way].append((time.perf_counter() - start) / steps)
                host[way].append(asked / steps)
    return {way: (statistics.median(seconds[way]), statistics.median(host[way]), losses[way].item()) for way in WAYS}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet18,resnet18-32,resnet50,gpt")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compile", action="store_true", help="time models by torch.compile")
    parser.add_argument("--graph", action="store_true", help="time steps that are one CUDA graph")
    parser.add_argument("--json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU; torch finds none")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    rows = []
    for name in options.models.split(","):
        held = {way: memory(name, way) for way in WAYS}
        found = times(name, options.rounds, options.compile, options.graph)
        for way in WAYS:
            (bytes_, peak), (seconds, asked, loss) = held[way], found[way]
            ratio = seconds / found["mixed"][0]
            rows.append(dict(model=name, way=way, ms=1e3 * seconds, of_mixed=ratio, host_ms=1e3 * asked, loss=loss))
            rows[-1].update(bytes=bytes_, peak=peak)
            line = f"{1e3 * seconds:8.2f} ms {ratio:6.3f} of mixed  host {1e3 * asked:7.2f} ms"
            print(f"{name:12} {way:6} {line} {bytes_:7.2f} bytes {peak:7.3f} GiB peak  loss {loss:.3f}", flush=True)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
