"""The step on one GPU through the C ABI, with torch's and FlashOptim's optimizers beside it in one run.

    bench/torch_cuda.py build/libscruple.so [--cases REGEX] [--quick] [--json FILE] [--repeat N]
    PYTHONPATH=where/flashoptim/is bench/torch_cuda.py build/libscruple.so
    bench/torch_cuda.py build/libscruple.so --device cpu --quick --repeat 3   # the same code without a GPU

Needs torch and numpy. Prints markdown rows as they are measured; a row that fails says why, and the run goes
on. --cases keeps the rows whose "case: who" matches; --quick takes small sizes and judges nothing. Columns:

  ms         large: CUDA events around one step on an idle GPU, so with what the host adds; median.
             small tensors: wall time of (10 steps, synchronize) / 10; median.
             first step: wall time from loading the library, in a new process with empty caches; median of 3.
  device ms  the same events behind work that keeps the GPU busy: the host is ahead, no launch is waited for
  host ms    until the call returns
  B/param    bytes that must move: state read and written, gradient read once
  of copy    those bytes over ms, against what copy_ of 2 GiB reaches in this run (read + written)
  result     goal, bar or MISSED, by the bar and the goal beside it
"""
import argparse
import ctypes
import datetime
import gc
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from ctypes import byref, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p

import numpy
import torch

WARM = 5
PEER_WARM = 20  # Triton compiles FlashOptim's kernels anew for step 1 and for the first multiple of 16
STOCHASTIC = 2  # SCRUPLE_STOCHASTIC
GRADIENT = 4  # SCRUPLE_GRADIENT
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


# ---- scruple.h, as much as is called here ----

def struct(**fields):
    return type("Struct", (ctypes.Structure,), {"_fields_": list(fields.items())})


Array = struct(format=c_void_p, codes=c_void_p, aux=c_void_p, rounding=c_int32, owned=c_int32)
Tensor = struct(optimizer=c_void_p, size=c_int64, step=c_int64, offset=c_int64, folds=c_int64, id=c_uint32,
                reserved=c_uint32, arrays=Array * 5)
StepOptions = struct(struct_size=c_size_t, multiplier=c_float, found_inf=c_void_p, clip=c_void_p,
                     loss_scale=c_void_p, steps=c_void_p)
MeasureOptions = struct(struct_size=c_size_t, max_norm=c_double, loss_scale=c_void_p, steps=c_void_p,
                        norm=c_void_p, found_inf=c_void_p, clip=c_void_p)
SIGNATURES = {
    "engine_create": [c_char_p, c_int, c_void_p],
    "engine_set_stream": [c_void_p, c_void_p],
    "optimizer_create": [c_char_p, c_void_p],
    "optimizer_set": [c_void_p, c_char_p, c_double],
    "format_bytes": [c_void_p, c_int64, c_void_p, c_void_p],
    "tensor_use": [c_void_p, c_char_p],
    "tensor_array": [c_void_p, c_int, c_void_p, c_void_p, c_void_p],
    "tensor_reset": [c_void_p, c_void_p],
    "encode": [c_void_p, c_void_p, c_int, c_void_p],
    "step": [c_void_p, c_void_p, c_int64, c_void_p],
    "measure": [c_void_p, c_void_p, c_int64, c_void_p],
    "advance": [c_void_p, c_void_p, c_void_p, c_void_p],
}


class Library:
    """libscruple with one engine; each of SIGNATURES is a method that raises the library's message."""

    def __init__(self, path, device):
        self.c = ctypes.CDLL(os.path.abspath(path))
        if self.c.scruple_abi_version() != 1:
            raise RuntimeError("this script speaks ABI version 1")
        for name in ("last_error", "engine_name"):
            getattr(self.c, "scruple_" + name).restype = c_char_p
        self.c.scruple_format_find.restype = c_void_p
        for name, types in SIGNATURES.items():
            function = getattr(self.c, "scruple_" + name)
            function.argtypes = types
            setattr(self, name, self.checked(function))
        self.loaded = time.perf_counter()
        self.engine, self.device = c_void_p(), device
        self.engine_create(device.encode(), 0, byref(self.engine))
        if device == "cuda":
            self.engine_set_stream(self.engine, torch.cuda.current_stream().cuda_stream or None)

    def checked(self, function):
        def call(*arguments):
            if function(*arguments) != 0:
                raise RuntimeError(self.c.scruple_last_error().decode())
        return call


def random_values(shape, spread, dtype, device):
    return (torch.randn(shape, device=device) * spread).to(dtype)


class Table:
    """The rows of one call: planes in torch's memory, weights and gradients like those of training.

    `gradient`: bf16 or fp32 in a torch tensor, or "recipe" for the recipe's own format.
    """

    def __init__(self, library, sizes, rule, recipe, gradient="bf16", stochastic=(), source=random_values):
        self.library, self.count, self.kept, self.moved = library, len(sizes), [], 0
        optimizer = c_void_p()
        library.optimizer_create(rule.encode(), byref(optimizer))
        if rule in ("sgd", "sgdw"):
            library.optimizer_set(optimizer, b"momentum", 0.9)
        self.rows = (Tensor * self.count)()
        for i, size in enumerate(sizes):
            row = self.rows[i]
            row.optimizer, row.size, row.step, row.id = optimizer.value, size, 1, i
            library.tensor_use(byref(row), recipe.encode())
            if gradient in DTYPES:
                row.arrays[GRADIENT] = Array(library.c.scruple_format_find(gradient.encode()))
            for a in stochastic:
                row.arrays[a].rounding = STOCHASTIC
            self.fill(row, gradient, source)
        # One contiguous table, as a front end keeps it: only the steps change.
        words = numpy.frombuffer(self.rows, dtype=numpy.int64).reshape(self.count, ctypes.sizeof(Tensor) // 8)
        self.steps = words[:, Tensor.step.offset // 8]
        self.taken = torch.zeros(1, dtype=torch.int64, device=library.device)
        self.norm = torch.zeros(1, dtype=torch.float64, device=library.device)
        self.flags = torch.zeros(2, dtype=torch.float32, device=library.device)

    def fill(self, row, gradient, source):
        library, device = self.library, self.library.device
        spreads = {0: 0.02} if gradient in DTYPES else {0: 0.02, GRADIENT: 1e-3}
        for a, array in enumerate(row.arrays):
            used, codes, aux = c_int(0), c_int64(), c_int64()
            if array.format:
                library.tensor_array(byref(row), a, None, None, byref(used))
            if not used.value:  # such as max_exp_avg_sq, which only amsgrad asks for
                continue
            library.format_bytes(array.format, row.size, byref(codes), byref(aux))
            self.moved += (codes.value + aux.value) * (1 if a == GRADIENT else 2)
            if a == GRADIENT and gradient in DTYPES:
                planes = [source(row.size, 1e-3, DTYPES[gradient], device)]
            else:
                planes = [torch.empty(n.value, dtype=torch.uint8, device=device) for n in (codes, aux)]
            self.kept += planes
            array.codes = planes[0].data_ptr()
            array.aux = planes[1].data_ptr() if aux.value else None
        library.tensor_reset(library.engine, byref(row))
        for a, spread in spreads.items():
            values = source(row.size, spread, torch.float32, device)
            library.encode(library.engine, byref(row), a, values.data_ptr())

    def step(self, options=None):
        self.library.step(self.library.engine, self.rows, self.count, options)
        self.steps += 1

    def counted_step(self):
        """The step's number lies in the engine's memory: the table never changes."""
        taken = self.taken.data_ptr()
        options = StepOptions(ctypes.sizeof(StepOptions), multiplier=1, steps=taken)
        self.library.step(self.library.engine, self.rows, self.count, byref(options))
        self.library.advance(self.library.engine, None, None, taken)

    def clipped_step(self):
        found_inf, clip = self.flags.data_ptr(), self.flags.data_ptr() + 4
        measure = MeasureOptions(ctypes.sizeof(MeasureOptions), max_norm=1, norm=self.norm.data_ptr(),
                                 found_inf=found_inf, clip=clip)
        self.library.measure(self.library.engine, self.rows, self.count, byref(measure))
        options = StepOptions(ctypes.sizeof(StepOptions), multiplier=1, found_inf=found_inf, clip=clip)
        self.step(byref(options))


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
        ms, host = medians(lambda: wall(step, device), repeat)
        return {"ms": ms, "host_ms": host}
    ms, host = medians(lambda: events(step), repeat)
    return {"ms": ms, "host_ms": host,
            "device_ms": medians(lambda: events(step, min(100, 2 + 3 * host)), repeat)[0]}


def time_small(step, device, repeat, warm):
    for _ in range(warm):
        step()
    ms, host = medians(lambda: wall(step, device, 10), repeat)
    return {"ms": ms, "host_ms": host}


def first_step(kind, arguments, size):
    """In a process of its own: from loading the library to the end of one step."""
    device = arguments.device
    made = {torch.float32: random_values(size, 0.02, torch.float32, device),
            torch.bfloat16: random_values(size, 1e-3, torch.bfloat16, device)}
    weight = torch.nn.Parameter(made[torch.float32].to(torch.bfloat16))
    weight.grad = made[torch.bfloat16]
    torch.empty(8 * size, dtype=torch.uint8, device=device)  # freed at once: torch holds enough from here on
    synchronize(device)
    marks = {"": time.perf_counter()}
    if kind == "ours":
        library = Library(arguments.library, device)
        marks |= {"load": library.loaded, "engine": time.perf_counter()}
        table = Table(library, [size], "adamw", "scruple", source=lambda n, spread, dtype, where: made[dtype])
        synchronize(device)
        marks["state"] = time.perf_counter()
        table.step()
    else:
        import flashoptim
        marks["import"] = time.perf_counter()
        flashoptim.FlashAdamW([weight], lr=1e-3).step()
    synchronize(device)
    marks["step"] = time.perf_counter()
    names, at = list(marks), [1e3 * mark for mark in marks.values()]
    parts = [f"{name} {after - before:.1f}" for name, before, after in zip(names[1:], at, at[1:])]
    return {"ms": at[-1] - at[0], "note": ", ".join(parts)}


# ---- Cases ----

def llama_shapes(vocab=32000, width=2048, layers=22, mlp=5632, kv=256):
    layer = [(width, width), (kv, width), (kv, width), (width, width), (mlp, width), (mlp, width),
             (width, mlp), (width,), (width,)]
    return [(vocab, width)] + layers * layer + [(width,), (vocab, width)]


def sizes_of(shapes):
    return [int(numpy.prod(shape)) for shape in shapes]


class Run:
    def __init__(self, arguments):
        self.arguments, self.device, self.repeat = arguments, arguments.device, arguments.repeat
        self.large = llama_shapes(4000, 512, 4, 1408, 64) if arguments.quick else llama_shapes()
        self.small = (40 if arguments.quick else 400) * [(64, 64, 3, 3), (64,), (64,)]
        self.library = Library(arguments.library, self.device)
        self.rows = []
        found = self.device == "cuda" and importlib.util.find_spec("flashoptim")
        self.no_flash = None if found else {"note": "FlashOptim is not here"}

    def main(self):
        source = torch.randn((1 << 24) if self.arguments.quick else (1 << 29), device=self.device)
        target = torch.empty_like(source)
        copy = time_large(lambda: target.copy_(source), self.device, 20, WARM)
        self.copy = 2e-6 * source.nbytes / copy["ms"]
        del source, target
        head = {"date": datetime.date.today().isoformat(), "device": self.machine(),
                "torch": torch.__version__,
                "engine": self.library.c.scruple_engine_name(self.library.engine).decode(),
                "large": f"{sum(sizes_of(self.large)):,} parameters in {len(self.large)} tensors",
                "small": f"{sum(sizes_of(self.small)):,} parameters in {len(self.small)} tensors",
                "copy_gb_per_s": round(self.copy, 1)}
        print(*(f"- {name}: {value}" for name, value in head.items()), sep="\n")
        print("\n| case | who | ms | device ms | host ms | B/param | GB/s | of copy "
              "| bar | goal | result | note |")
        print("| --- | --- " + 6 * "| ---: " + 4 * "| --- " + "|", flush=True)
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
            return "cpu"
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
        except (OSError, subprocess.CalledProcessError):
            driver = "unknown"
        return f"{torch.cuda.get_device_name()}, driver {driver}, CUDA {torch.version.cuda}"

    def report(self, row):
        if "moved" in row:
            row["gb_per_s"] = 1e-6 * row["moved"] / row["ms"]
            row["of_copy"] = row["gb_per_s"] / self.copy
        judged = row["bar"] and self.device == "cuda" and not self.arguments.quick
        met = [name for name in ("goal", "bar") if row[name] and self.meets(row, row[name])]
        row["result"] = (met + ["MISSED"])[0] if judged else ""
        self.rows.append(row)
        forms = {"ms": ".3f", "device_ms": ".3f", "host_ms": ".3f", "per_param": ".3f", "gb_per_s": ".0f",
                 "of_copy": ".3f"}
        cells = [row["case"], row["who"], *(format(row[k], f) if k in row else "" for k, f in forms.items())]
        units = {"of_copy": "of copy", "ms": "ms", "ratio": "x the step"}
        for limits in (row["bar"], row["goal"]):
            cells.append(", ".join(f"{limit:g} {units[key]}" for key, limit in limits.items()))
        cells += [row["result"], row.get("note", "")]
        print("|", *(" ".join(cell.split()).replace("|", "/") + " |" for cell in cells), flush=True)

    @staticmethod
    def meets(row, limits):
        return all(key in row and (row[key] >= limit if key == "of_copy" else row[key] <= limit)
                   for key, limit in limits.items())

    def ours(self, rule, recipe, shapes=None, clock=time_large, by="step", **more):
        sizes = sizes_of(shapes or self.large)
        table = Table(self.library, sizes, rule, recipe, **more)
        found = clock(getattr(table, by), self.device, self.repeat, WARM)
        return {**found, "moved": table.moved, "per_param": table.moved / sum(sizes)}

    def clipped(self):
        table = Table(self.library, sizes_of(self.large), "adamw", "scruple")
        alone = time_large(table.step, self.device, self.repeat, WARM)["ms"]
        both = time_large(table.clipped_step, self.device, self.repeat, WARM)
        note = f"{both['ms'] / alone:.3f} x the step alone ({alone:.3f} ms); norm {table.norm.item():.3f}"
        return {**both, "alone_ms": alone, "ratio": both["ms"] / alone, "note": note}

    def peer(self, make, per_param, dtype=torch.float32, shapes=None, clock=time_large):
        """`per_param`: the bytes that the peer's own formats must move."""
        parameters = []
        for shape in shapes or self.large:
            parameters.append(torch.nn.Parameter(random_values(shape, 0.02, dtype, self.device)))
            parameters[-1].grad = random_values(shape, 1e-3, dtype, self.device)
        warm = PEER_WARM if self.device == "cuda" else 1
        found = clock(make(parameters).step, self.device, self.repeat, warm)
        return {**found, "moved": per_param * sum(p.numel() for p in parameters), "per_param": per_param}

    def flash(self, name, per_param, shapes=None, clock=time_large, **hypers):
        if self.no_flash:
            return self.no_flash
        import flashoptim
        hypers |= {"lr": 1e-3, "master_weight_bits": 24}
        make = getattr(flashoptim, name)
        return self.peer(lambda p: make(p, **hypers), per_param, torch.bfloat16, shapes, clock)

    def first(self, kind):
        if kind == "flash" and self.no_flash:
            return self.no_flash
        found = []
        for _ in range(3):
            with tempfile.TemporaryDirectory() as empty:
                environment = {**os.environ, "TRITON_CACHE_DIR": empty, "CUDA_CACHE_PATH": empty}
                command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--first", kind]
                done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
            found.append(json.loads(done.stdout.strip().splitlines()[-1]))
        return {**sorted(found, key=lambda one: one["ms"])[1], "all_ms": [one["ms"] for one in found]}

    def cases(self):
        """Each as (case, who, bar, goal, measure)."""
        bar, goal, ours, peer, flash = {"of_copy": 0.75}, {"of_copy": 0.85}, self.ours, self.peer, self.flash

        def adamw(**how):
            return lambda parameters: torch.optim.AdamW(parameters, **how)

        def sgd(parameters):
            return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, fused=True)

        yield "AdamW", "scruple", bar | {"ms": 4.3}, goal | {"ms": 3.8}, lambda: ours("adamw", "scruple")
        yield "AdamW", "flash recipe", {"of_copy": 0.65}, {"of_copy": 0.80}, lambda: ours("adamw", "flash")
        yield "AdamW", "torch fused, fp32", {}, {}, lambda: peer(adamw(fused=True), 28)
        yield "AdamW", "FlashAdamW", {}, {}, lambda: flash("FlashAdamW", 12.25)
        yield "SGD momentum", "scruple", bar, goal, lambda: ours("sgd", "scruple")
        yield "SGD momentum", "torch fused, fp32", {}, {}, lambda: peer(sgd, 20)
        yield "SGD momentum", "FlashSGD", {}, {}, lambda: flash("FlashSGD", 10.125, momentum=0.9)
        yield "Lion", "scruple", bar, goal, lambda: ours("lion", "scruple")
        yield "Lion", "FlashLion", {}, {}, lambda: flash("FlashLion", 10.125)
        few, short, shortest = {"shapes": self.small, "clock": time_small}, {"ms": 0.5}, {"ms": 0.15}
        yield ("small tensors", "scruple, table reused", short, shortest,
               lambda: ours("adamw", "scruple", **few))
        yield ("small tensors", "scruple, engine counts the steps", short, shortest,
               lambda: ours("adamw", "scruple", by="counted_step", **few))
        yield "small tensors", "torch fused, fp32", {}, {}, lambda: peer(adamw(fused=True), 28, **few)
        yield "small tensors", "torch foreach, fp32", {}, {}, lambda: peer(adamw(foreach=True), 28, **few)
        yield "small tensors", "FlashAdamW", {}, {}, lambda: flash("FlashAdamW", 12.25, **few)
        yield "first step", "scruple", {"ms": 100}, {}, lambda: self.first("ours")
        yield "first step", "FlashAdamW", {}, {}, lambda: self.first("flash")
        yield "norm, clip, step", "scruple", {"ratio": 1.35}, {}, self.clipped
        for recipe in ("fp32", "mixed", "split", "scant"):
            yield "AdamW", recipe + " recipe", {}, {}, lambda: ours("adamw", recipe)
        yield "AdamW", "fp32 recipe, fp32 gradients", {}, {}, lambda: ours("adamw", "fp32", gradient="fp32")
        yield "SGD momentum", "lpmm recipe", {}, {}, lambda: ours("sgd", "lpmm")
        yield ("SGD momentum", "lpmm recipe, int8 gradients", {}, {},
               lambda: ours("sgd", "lpmm", gradient="recipe"))
        for who, arrays in (("weights", [0]), ("all", range(GRADIENT))):
            yield ("AdamW", f"scruple, {who} stochastic", {}, {},
                   lambda: ours("adamw", "scruple", stochastic=arrays))
        for rule in ("sgdw", "adam", "adagrad", "rmsprop"):
            yield rule, "scruple", {}, {}, lambda: ours(rule, "scruple")


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("library", help="libscruple.so")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--cases", default="", metavar="REGEX")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--first", choices=["ours", "flash"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.first:
        size = (1 << 20) if arguments.quick else (1 << 26)
        print(json.dumps(first_step(arguments.first, arguments, size)))
    else:
        Run(arguments).main()


if __name__ == "__main__":
    main()
