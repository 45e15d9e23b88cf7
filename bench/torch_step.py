"""The optimizer step through scruple.torch, with the optimizers of others beside it in one run.

    python bench/torch_step.py [--device cpu|cuda] [--threads N] [--cases REGEX] [--quick] [--json FILE]
    [--repeat N] [--peers DIR]

Needs torch and scruple (pip install ., or PYTHONPATH=python with SCRUPLE_LIBRARY=build/libscruple.so). The rows
of others need flashoptim (on a GPU), bitsandbytes and torchao, installed or as unpacked wheels in the folder of
--peers; torchao's steps go through torch.compile. Prints markdown rows as they are measured; a row that
fails, or whose package is not here, says why, and the run goes on. --cases keeps the rows whose "case: who"
matches; --quick takes small sizes and judges nothing. On a GPU the large model has the shapes of a Llama of
1.1 billion parameters; on a CPU it has 50 million. Parameters and gradients are bf16, except where the row says
fp32; where it ends in bf16, nothing completes these weights, and they are rounded to nearest. Columns:

  ms         large, GPU: CUDA events around one step on an idle GPU, so with what the host adds; CPU: wall
             time; median. small tensors: wall time of (10 steps, synchronize) / 10; median.
             first step: from importing the optimizer, in a new process with empty caches, after a step of
             torch.optim.SGD (which loads what torch itself needs); median of 3.
  device ms  the same events behind work that keeps the GPU busy: the host is ahead, no launch is waited for
  host ms    until the call returns
  B/param    bytes that must move: state read and written, gradient read once; fold: the accumulator in place
             of the state
  of copy    those bytes over ms, against what copy_ reaches in this run (read + written)
  of torch   torch fused fp32's ms in this run over these
  result     goal, bar or MISSED, by the bar and the goal beside it
"""

import argparse
import datetime
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time

import torch

WARM = 5
PEERS = ("flashoptim", "bitsandbytes", "torchao")
PEER_WARM = 20  # Triton compiles FlashOptim's kernels anew for step 1 and for the first multiple of 16


# ---- Time, in milliseconds ----


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def wall(step, device, times=1):
    """Of one step with the wait for its end, and of the host's part in it."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        step()
    host = time.perf_counter() - start
    synchronize(device)
    return (time.perf_counter() - start) * 1e3 / times, host * 1e3 / times


def events(step, ahead=0.0):
    """The same by CUDA events, the GPU sleeping for about `ahead` first."""
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if ahead:
        torch.cuda._sleep(int(ahead * 2e6))  # cycles at about 2 GHz
    before.record()
    start = time.perf_counter()
    step()
    host = time.perf_counter() - start
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after), host * 1e3


def medians(measure, repeat):
    return [statistics.median(column) for column in zip(*(measure() for _ in range(repeat)))]


def time_large(step, device, repeat, warm):
    for _ in range(warm):
        step()
    if device != "cuda":
        return {"ms": medians(lambda: wall(step, device), repeat)[0]}
    ms, host = medians(lambda: events(step), repeat)
    return {
        "ms": ms,
        "host_ms": host,
        "device_ms": medians(lambda: events(step, min(100, 2 + 3 * host)), repeat)[0],
    }


def time_small(step, device, repeat, warm):
    for _ in range(warm):
        step()
    ms, host = medians(lambda: wall(step, device, 10), repeat)
    return {"ms": ms, "host_ms": host}


def optimizer_named(name):
    """The class "module:name"."""
    module, name = name.split(":")
    return getattr(importlib.import_module(module), name)


def first_step(name, device):
    """In a process of its own: from importing the optimizer to the end of one step of 16 M parameters."""
    weight = torch.nn.Parameter(torch.zeros(1 << 24, dtype=torch.bfloat16, device=device))
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD(
        [weight]
    ).step()  # torch imports seconds of its own with the first optimizer, whosesoever it is
    synchronize(device)
    start = time.perf_counter()
    optimizer_named(name)([weight], lr=1e-3).step()
    synchronize(device)
    return {"ms": (time.perf_counter() - start) * 1e3}


# ---- Cases ----


def llama_shapes(vocab=32000, width=2048, layers=22, mlp=5632, kv=256):
    layer = [
        (width, width),
        (kv, width),
        (kv, width),
        (width, width),
        (mlp, width),
        (mlp, width),
        (width, mlp),
        (width,),
        (width,),
    ]
    return [(vocab, width)] + layers * layer + [(width,), (vocab, width)]


def parameters_of(shapes, dtype, device):
    made = []
    for shape in shapes:
        made.append(torch.nn.Parameter((torch.randn(shape, device=device) * 0.02).to(dtype)))
        made[-1].grad = (torch.randn(shape, device=device) * 1e-3).to(dtype)
    return made


class Run:
    def __init__(self, arguments):
        self.arguments, self.device, self.repeat = arguments, arguments.device, arguments.repeat
        cuda = self.device == "cuda"
        self.large = llama_shapes() if cuda else 48 * [(1024, 1024)]
        if arguments.quick:
            self.large = llama_shapes(4000, 512, 4, 1408, 64)
        self.small = (40 if arguments.quick else 400) * [(64, 64, 3, 3), (64,), (64,)]
        self.rows, self.torch_ms = [], {}

    def missing(self, name):
        """A row's note where the package of the optimizer is not here."""
        package = re.split("[.:]", name)[0]
        if package == "flashoptim" and self.device != "cuda":
            return {"note": "FlashOptim needs a GPU"}
        return None if importlib.util.find_spec(package) else {"note": f"skipped: {package} is not here"}

    @staticmethod
    def version_of(package):
        if not importlib.util.find_spec(package):
            return f"{package} not here"
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            return f"{package} of unknown version"

    def main(self):
        source = torch.randn(
            (1 << 24) if self.arguments.quick or self.device == "cpu" else (1 << 29), device=self.device
        )
        target = torch.empty_like(source)
        copy = time_large(lambda: target.copy_(source), self.device, 20, WARM)
        self.copy = 2e-6 * source.nbytes / copy["ms"]
        del source, target
        import scruple

        count = [sum(map(math.prod, shapes)) for shapes in (self.large, self.small)]
        head = {
            "date": datetime.date.today().isoformat(),
            "device": self.machine(),
            "torch": torch.__version__,
            "scruple": scruple.version(),
            "others": ", ".join(map(self.version_of, PEERS)),
            "large": f"{count[0]:,} parameters in {len(self.large)} tensors",
            "small": f"{count[1]:,} parameters in {len(self.small)} tensors",
            "copy_gb_per_s": round(self.copy, 1),
        }
        print(*(f"- {name}: {value}" for name, value in head.items()), sep="\n")
        print(
            "\n| case | who | ms | device ms | host ms | B/param | GB/s | of copy | of torch | bar | goal | "
            "result | note |"
        )
        print("| --- | --- " + 7 * "| ---: " + 4 * "| --- " + "|", flush=True)
        for case, who, bar, goal, measure in self.cases():
            if not re.search(self.arguments.cases, f"{case}: {who}"):
                continue
            gc.collect()
            if self.device == "cuda":
                torch.cuda.empty_cache()
            try:
                found = measure()
            except Exception as error:  # this row's, not the run's
                found = {"note": f"{type(error).__name__}: {error}"}
            self.report({"case": case, "who": who, "bar": bar, "goal": goal, **found})
            if self.arguments.json:
                with open(self.arguments.json, "w") as out:
                    json.dump({**head, "rows": self.rows}, out, indent=2)

    def machine(self):
        if self.device != "cuda":
            return f"{platform.machine()}, {torch.get_num_threads()} threads"
        return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"

    def report(self, row):
        if "moved" in row:
            row["gb_per_s"] = 1e-6 * row["moved"] / row["ms"]
            row["of_copy"] = row["gb_per_s"] / self.copy
        if row["who"] == "torch fused, fp32" and "ms" in row:
            self.torch_ms[row["case"]] = row["ms"]
        if row["case"] in self.torch_ms and "ms" in row:
            row["of_torch"] = self.torch_ms[row["case"]] / row["ms"]
        judged = row["bar"] and not self.arguments.quick
        met = [name for name in ("goal", "bar") if row[name] and self.meets(row, row[name])]
        row["result"] = (met + ["MISSED"])[0] if judged else ""
        self.rows.append(row)
        forms = {
            "ms": ".3f",
            "device_ms": ".3f",
            "host_ms": ".3f",
            "per_param": ".3f",
            "gb_per_s": ".0f",
            "of_copy": ".3f",
            "of_torch": ".2f",
        }
        cells = [row["case"], row["who"], *(format(row[k], f) if k in row else "" for k, f in forms.items())]
        units = {
            "of_copy": "of copy",
            "of_torch": "of torch",
            "ms": "ms",
            "host_ms": "ms on the host",
            "ratio": "x the step",
        }
        for limits in (row["bar"], row["goal"]):
            cells.append(", ".join(f"{limit:g} {units[key]}" for key, limit in limits.items()))
        cells += [row["result"], row.get("note", "")]
        print("|", *(" ".join(cell.split()).replace("|", "/") + " |" for cell in cells), flush=True)

    @staticmethod
    def meets(row, limits):
        return all(
            key in row and (row[key] >= limit if key.startswith("of_") else row[key] <= limit)
            for key, limit in limits.items()
        )

    def ours(self, name, recipe, shapes=None, clock=time_large, dtype=torch.bfloat16, **more):
        import scruple.torch

        parameters = parameters_of(shapes or self.large, dtype, self.device)
        opt = getattr(scruple.torch, name)(parameters, lr=1e-3, recipe=recipe, **more)
        found = clock(opt.step, self.device, self.repeat, WARM)
        state = sum(
            t.nbytes for p in parameters for t in opt.state[p].values() if isinstance(t, torch.Tensor)
        )
        weights = sum(p.nbytes for p in parameters)
        moved = 2 * (state + weights) + weights
        return {**found, "moved": moved, "per_param": moved / sum(p.numel() for p in parameters)}

    def clipped(self):
        import scruple.torch

        opt = scruple.torch.AdamW(parameters_of(self.large, torch.bfloat16, self.device), lr=1e-3)
        alone = time_large(opt.step, self.device, self.repeat, WARM)["ms"]
        both = time_large(lambda: opt.clip_and_step(1.0), self.device, self.repeat, WARM)
        return {
            **both,
            "ratio": both["ms"] / alone,
            "note": f"{both['ms'] / alone:.3f} x the step alone ({alone:.3f} ms)",
        }

    def folded(self, accumulator, per_param):
        """A micro-batch's gradients, all at once, into accumulators of so many bytes."""
        import scruple.torch

        parameters = parameters_of(self.large, torch.bfloat16, self.device)
        gradients = {i: p.grad for i, p in enumerate(parameters)}
        opt = scruple.torch.AdamW(parameters, lr=1e-3)
        path = scruple.torch.release_gradients(
            torch.nn.ParameterList(parameters), opt, "compressed", accumulate=4096, accumulator=accumulator
        )._path

        def fold():
            path.begin()
            path.add(gradients)
            path.end()

        found = time_large(fold, self.device, self.repeat, WARM)
        moved = 2 + 2 * per_param
        return {**found, "moved": moved * sum(p.numel() for p in parameters), "per_param": moved}

    def peer(self, make, per_param, dtype=torch.float32, shapes=None, clock=time_large):
        """`per_param`: the bytes that the peer's own formats must move."""
        parameters = parameters_of(shapes or self.large, dtype, self.device)
        warm = PEER_WARM if self.device == "cuda" else WARM
        found = clock(make(parameters).step, self.device, self.repeat, warm)
        return {**found, "moved": per_param * sum(p.numel() for p in parameters), "per_param": per_param}

    def other(self, name, per_param, shapes=None, clock=time_large, **hypers):
        """Another's optimizer, "module:name", over bf16 parameters."""
        return self.missing(name) or self.peer(
            lambda p: optimizer_named(name)(p, lr=1e-3, **hypers), per_param, torch.bfloat16, shapes, clock
        )

    def flash(self, name, per_param, **how):
        return self.other("flashoptim:" + name, per_param, master_weight_bits=24, **how)

    def first(self, name):
        if note := self.missing(name):
            return note
        found = []
        for _ in range(3):
            with tempfile.TemporaryDirectory() as empty:
                caches = ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR")
                environment = {**os.environ, **{cache: empty for cache in caches}}
                command = [sys.executable, os.path.abspath(__file__), "--device", self.device, "--first", name]
                if self.arguments.peers:
                    command += ["--peers", self.arguments.peers]
                done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
            found.append(json.loads(done.stdout.strip().splitlines()[-1])["ms"])
        return {"ms": statistics.median(found)}

    def cases(self):
        """Each as (case, who, bar, goal, measure)."""
        ours, peer, flash, cuda = self.ours, self.peer, self.flash, self.device == "cuda"
        # Who, the optimizer, and the bytes that must move: a scale stands for 256 or 128 moments.
        low_bits = (
            ("bitsandbytes 8-bit, bf16", "bitsandbytes.optim:AdamW8bit", 6 + 4 * (1 + 4 / 256)),
            ("torchao 8-bit, bf16", "torchao.optim:AdamW8bit", 6 + 4 * (1 + 4 / 256)),
            ("torchao 4-bit, bf16", "torchao.optim:AdamW4bit", 6 + 4 * (0.5 + 4 / 128)),
        )
        bar, goal = ({"of_copy": 0.75}, {"of_copy": 0.85}) if cuda else ({"of_torch": 0.6}, {"of_torch": 1.0})

        def adamw(**how):
            return lambda parameters: torch.optim.AdamW(parameters, **how)

        def sgd(parameters):
            return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, fused=True)

        yield "AdamW", "torch fused, fp32", {}, {}, lambda: peer(adamw(fused=True), 28)
        yield "AdamW", "scruple", bar, goal, lambda: ours("AdamW", "scruple")
        yield (
            "AdamW",
            "fp32 recipe",
            {"of_torch": 0.95},
            {},
            lambda: ours("AdamW", "fp32", dtype=torch.float32),
        )
        yield (
            "AdamW",
            "scruple, fp32 parameters",
            {},
            {},
            lambda: ours("AdamW", "scruple", dtype=torch.float32),
        )
        for recipe in ("flash", "scant", "split", "mixed"):
            yield "AdamW", recipe + " recipe", {}, {}, lambda: ours("AdamW", recipe)
        yield "AdamW", "FlashAdamW", {}, {}, lambda: flash("FlashAdamW", 12.25)
        for who, name, moved in low_bits:
            yield "AdamW", who, {}, {}, lambda: self.other(name, moved)
        yield "norm, clip, step", "scruple", {"ratio": 1.35} if cuda else {}, {}, self.clipped
        for accumulator, per_param in (("root8", 1.0625), ("int8", 1.0625), ("bf16", 2), ("fp32", 4)):
            yield "fold", accumulator, {}, {}, lambda: self.folded(accumulator, per_param)
        yield "SGD momentum", "torch fused, fp32", {}, {}, lambda: peer(sgd, 20)
        yield (
            "SGD momentum",
            "scruple",
            bar if cuda else {},
            goal if cuda else {},
            lambda: ours("SGD", "scruple", momentum=0.9),
        )
        yield "SGD momentum", "FlashSGD", {}, {}, lambda: flash("FlashSGD", 10.125, momentum=0.9)
        yield "Lion", "scruple", bar if cuda else {}, goal if cuda else {}, lambda: ours("Lion", "scruple")
        yield "Lion", "FlashLion", {}, {}, lambda: flash("FlashLion", 10.125)
        few = {"shapes": self.small, "clock": time_small}
        yield "small tensors", "torch fused, fp32", {}, {}, lambda: peer(adamw(fused=True), 28, **few)
        yield "small tensors", "scruple", {}, {}, lambda: ours("AdamW", "scruple", **few)
        yield "small tensors", "torch foreach, fp32", {}, {}, lambda: peer(adamw(foreach=True), 28, **few)
        yield "small tensors", "FlashAdamW", {}, {}, lambda: flash("FlashAdamW", 12.25, **few)
        for who, name, moved in low_bits:
            yield "small tensors", who, {}, {}, lambda: self.other(name, moved, **few)
        some = {"shapes": self.small[:300], "clock": time_small}
        yield "300 tensors", "torch fused, fp32", {}, {}, lambda: peer(adamw(fused=True), 28, **some)
        yield (
            "300 tensors",
            "scruple",
            {"host_ms": 0.3} if cuda else {},
            {},
            lambda: ours("AdamW", "scruple", **some),
        )
        yield "first step", "scruple", {}, {}, lambda: self.first("scruple.torch:AdamW")
        yield "first step", "FlashAdamW", {}, {}, lambda: self.first("flashoptim:FlashAdamW")
        for who, name, _ in low_bits:
            yield "first step", who, {}, {}, lambda: self.first(name)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--threads", type=int, help="of torch and of our CPU engine")
    parser.add_argument("--cases", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--peers", help="a folder with unpacked wheels of others")
    parser.add_argument("--first", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peers:
        sys.path.append(arguments.peers)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.first:
        print(json.dumps(first_step(arguments.first, arguments.device)))
    else:
        Run(arguments).main()


if __name__ == "__main__":
    main()
