"""`scruple train --device cuda` beside PyTorch and LLMQ on the same GPU: tokens per second, memory, MFU.

    python bench/gpu_trainer.py SCRUPLE [--cases NAME,NAME] [--lines FILE] [--minutes M] [--no-torch] [--llmq PROGRAM]
    python bench/gpu_trainer.py --table FILE

SCRUPLE is the path of the command. Every run is a process of its own, and one JSON line: printed, and appended to
--lines when it ends. --table makes markdown of such a file. Needs numpy; torch for the rows beside ours.
`--cases tiny --device cpu` tries the script itself where there is no GPU.

Ours: the model is a Hugging Face folder with random bf16 weights, which this script writes; data are random tokens. With
--drawn it is a config.json alone, and the trainer draws the weights on the host: 58 ns each on one core of a
Neoverse-V1. The time of a step is that between two lines of metrics.jsonl, seen from outside;
tokens_per_s is of the median after the first WARM. Runs whose weights would take long to write are killed after their
last step.

PyTorch: plain modules, scaled_dot_product_attention, torch.compile (the whole model, or each block where it is
recomputed), a fused AdamW, new random tokens at each step, a synchronize around each. Rows:
  autocast   fp32 weights under bf16 autocast: the usual mixed precision
  bf16       pure bf16: weights, gradients, moments; no master weights
  scruple    bf16 weights and scruple.torch's AdamW, with the case's recipe and gradient policy
GPT-2's vocabulary is padded to 50,304 for PyTorch, which is faster so; ours has the 50,257 of the model.

  peak_gib     what nvidia-smi calls memory.used, at its highest while the process lived, less what was used before it;
               looked at every 20 ms; with CUDA's context (about half a GiB)
  counted_gib  ours: the peak of the run's ledger; PyTorch: torch.cuda.max_memory_allocated
  load_s       ours: from the start of the process to its table of memory
  first_step_s ours: from there to the end of the first step, with a validation; PyTorch: the first WARM steps
  wall_s       all of it, with the writing of our weights, and PyTorch's compilation
  mfu          of the GPU's dense bf16 peak: 6 FLOP per token and weight of a product (the head is one, the embedding
               none), and 6 x layers x context x (heads x head width) for causal attention. What is recomputed is not
               counted

LLMQ: its own program, built elsewhere, with its graphs and random weights; the time of a step is that between two of its
lines. It keeps bf16 weights and moments and no extra bits, 8 bytes per parameter with its gradients.

Attention alone: --attention PATH names a program that is called with SEQUENCES LENGTH HEADS KV_HEADS HEAD_WIDTH and
whose last line is {"forward_ms": ..., "backward_ms": ...}.
"""

import argparse
import ctypes
import datetime
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from gpu_cases import ATTENTION, ATTENTION_BAR, CASES, GIB, PEAKS, TINY_ATTENTION, TRIES, WARM
from gpu_cases import flop_per_token, parameters_of, random_tokens, write_tokens, write_weights
from gpu_torch import torch_attention, torch_one

LONG_TO_WRITE = 2 * GIB


# ---- Watching a process ----


class NvmlMemory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def memory_reader():
    """A function that tells how many bytes of the GPU are used: by NVML, as nvidia-smi does, or by nvidia-smi itself."""
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        handle, memory = ctypes.c_void_p(), NvmlMemory()
        if (
            index.isdigit()
            and nvml.nvmlInit_v2() == 0
            and nvml.nvmlDeviceGetHandleByIndex_v2(int(index), ctypes.byref(handle)) == 0
        ):

            def by_nvml():
                return memory.used if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0 else 0

            return by_nvml
    except (OSError, AttributeError):
        pass
    query = ["nvidia-smi", "-i", index, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]

    def by_command():
        text = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        return int(text) * 2**20 if text.isdigit() else 0

    return by_command if shutil.which("nvidia-smi") else None


class GpuMemory:
    """What is used on the GPU: before, and at most until the end of the `with`."""

    def __init__(self, on):
        self.used = memory_reader() if on else None
        self.before = self.most = 0

    def __enter__(self):
        if self.used:
            self.before = self.most = self.used()
            self.ended = threading.Event()
            self.thread = threading.Thread(target=self.poll, daemon=True)
            self.thread.start()
        return self

    def poll(self):
        while not self.ended.wait(0.02):
            self.most = max(self.most, self.used())

    def __exit__(self, *_):
        if self.used:
            self.ended.set()
            self.thread.join()

    def peak_gib(self):
        return round((self.most - self.before) / GIB, 2) if self.used else None


class Lines:
    """The lines of a pipe, with the time at which each came."""

    def __init__(self, pipe):
        self.lines = []
        self.thread = threading.Thread(target=self.read, args=(pipe,), daemon=True)
        self.thread.start()

    def read(self, pipe):
        for line in pipe:
            self.lines.append((time.perf_counter(), line.rstrip("\n")))

    def text(self):
        return "\n".join(line for _, line in self.lines)


class Failed(Exception):
    pass


def last_words(text, count=12):
    return "\n".join(text.strip().splitlines()[-count:]) or "no message"


class StepTimes:
    """When each step's line came to metrics.jsonl, which the trainer flushes after every step."""

    def __init__(self, path):
        self.path, self.at, self.rest, self.times, self.losses = path, 0, "", [], []

    def look(self):
        now = time.perf_counter()
        try:
            if os.stat(self.path).st_size == self.at:
                return
            with open(self.path, encoding="utf-8") as file:
                file.seek(self.at)
                text = file.read()
        except FileNotFoundError:
            return
        self.at += len(text.encode())
        *whole, self.rest = (self.rest + text).split("\n")
        for line in whole:
            found = json.loads(line)
            if "loss" in found:
                self.times.append(now)
                self.losses.append(found["loss"])


SIZES = {"B": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def memory_table(text):
    """What the run printed before its first step: GiB by kind."""
    found = re.search(r"^memory +(\w+) +B/param\n((?:\S.*\n)+)", text + "\n", re.MULTILINE)
    if not found:
        return None
    unit = SIZES[found.group(1)]
    rows = (line.rsplit(None, 2) for line in found.group(2).splitlines())
    return {name: round(float(size.replace(",", "")) * unit / GIB, 4) for name, size, _ in rows}


def ledger_peak(text):
    found = re.findall(r"peak ([\d.,]+) (B|bytes|KiB|MiB|GiB|TiB)\b", text)
    return round(float(found[-1][0].replace(",", "")) * SIZES[found[-1][1]] / GIB, 3) if found else None


def end(process):
    """Ours, by its id; waits for it."""
    if process.poll() is None:
        process.kill()
    process.wait()


def watched(command, metrics, steps, is_killed, timeout):
    """Runs a training. Times of its steps, of its table, and all that it printed."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = Lines(process.stdout), Lines(process.stderr)
    seen = StepTimes(metrics)
    enough = None
    try:
        while process.poll() is None:
            seen.look()
            now = time.perf_counter()
            if now - begin > timeout:
                raise Failed(
                    f"stopped after {timeout:.0f} s, at step {len(seen.times)}; {last_words(err.text(), 3)}"
                )
            if is_killed and enough is None and len(seen.times) >= steps:
                enough = now
            if enough is not None and (now - enough > 3 or f"step {steps:,}/{steps:,}" in err.text()):
                break  # the last progress line has the ledger's peak
            time.sleep(0.0005)
        seen.look()
        if enough is None and process.returncode != 0:
            raise Failed(f"exit code {process.returncode}: {last_words(err.text())}")
    finally:
        end(process)
        out.thread.join(5), err.thread.join(5)
    table_at = next((at for at, line in out.lines if re.match(r"total +[\d.,]+ ", line)), None)
    return seen, begin, table_at, out.text() + "\n" + err.text()


# ---- Ours ----


def scruple_row(case, arguments, folder, model):
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    data = folder / f"tokens-{case.config['vocab_size']}.bin"
    if not data.exists():
        write_tokens(data, case.config["vocab_size"])
    command = [arguments.scruple, "train", "--model", str(model), "--data", str(data), "--out", str(out)]
    command += case.options()
    if arguments.device != "cpu":  # versions for the CPU alone do not know it
        command += ["--device", arguments.device]
    command += arguments.options.split()
    is_killed = 2 * parameters_of(case.config) > LONG_TO_WRITE
    with GpuMemory(arguments.device != "cpu") as memory:
        seen, begin, table_at, text = watched(
            command, out / "metrics.jsonl", case.steps, is_killed, arguments.timeout
        )
    shutil.rmtree(out, ignore_errors=True)
    if len(seen.times) < WARM + 2:
        raise Failed(f"{len(seen.times)} steps were seen: {last_words(text)}")
    between = [1e3 * (b - a) for a, b in zip(seen.times[:-1], seen.times[1:])]
    steady = between[WARM - 1 :]
    return {
        "steps": len(seen.times),
        "ms": round(statistics.median(steady), 3),
        "ms_mean": round(statistics.mean(steady), 3),
        "ms_most": round(max(steady), 3),
        "load_s": table_at and round(table_at - begin, 2),
        "first_step_s": table_at and round(seen.times[0] - table_at, 2),  # a validation too
        "first_loss": seen.losses[0],
        "last_loss": seen.losses[-1],
        "peak_gib": memory.peak_gib(),
        "counted_gib": ledger_peak(text),
        "memory_gib": memory_table(text),
        "command": " ".join(["scruple", *command[1:]]).replace(str(folder) + "/", ""),
    }


def model_of(case, folder, drawn):
    """What --model gets; the folder of a model stays for the next case that has the same."""
    where = folder / "model"
    text = json.dumps(case.config, indent=2)
    config = where / "config.json"
    if not config.exists() or config.read_text(encoding="utf-8") != text:
        shutil.rmtree(where, ignore_errors=True)
        where.mkdir()
        begin = time.perf_counter()
        if not drawn:
            write_weights(where / "model.safetensors", case.config)
        config.write_text(text, encoding="utf-8")
        print(f"# wrote the model in {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
    return config if drawn else where


# ---- LLMQ ----


def llmq_row(case, arguments, folder):
    """LLMQ's own trainer from random weights, by its command line: bf16 weights, gradients and moments, no extra bits."""
    import numpy

    where = folder / "llmq"
    where.mkdir(exist_ok=True)
    config = {"bos_token_id": 0, "eos_token_id": 0, **case.config}  # it wants to know them
    (where / "config.json").write_text(json.dumps(config), encoding="utf-8")
    vocabulary = case.config["vocab_size"]
    for name in ("train.bin", "eval.bin"):
        tokens = random_tokens(vocabulary, numpy.int32)
        with open(where / name, "wb") as file:
            header = numpy.array(
                [2, 4, tokens.size, vocabulary, 0], numpy.int32
            ).tobytes()  # version, bytes, ...
            file.write((b"BIN.TOK\n" + header).ljust(1024, b"\0"))
            file.write(tokens)
    options = {
        "model": where,
        "train-file": where / "train.bin",
        "eval-file": where / "eval.bin",
        "seq-len": case.context,
        "batch-size": case.batch,
        "grad-accumulation": case.accumulate,
        "steps": case.steps,
        "eval-every-n-steps": 0,
        "ckpt-interval": 100000,
        "log-gpu-util": 0,
        "log-file": where / "log.json",
        **dict.fromkeys(("model-dtype", "matmul-dtype", "opt-m-dtype", "opt-v-dtype"), "bf16"),
    }
    command = [os.path.abspath(arguments.llmq), "--from-scratch", "--use-cuda-graphs", "--gpus=1"]
    command += [f"--{name}={value}" for name, value in options.items()]
    with GpuMemory(True) as memory:
        process = subprocess.Popen(
            ["stdbuf", "-oL", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=where,
        )
        out, begin = Lines(process.stdout), time.perf_counter()
        try:  # it is not left to write its model
            while process.poll() is None and out.text().count("[T] step") < case.steps:
                if time.perf_counter() - begin > arguments.timeout:
                    raise Failed(f"stopped after {arguments.timeout:.0f} s; {last_words(out.text(), 3)}")
                time.sleep(0.01)
        finally:
            end(process)
            out.thread.join(5)
    times = [at for at, line in out.lines if line.startswith("[T] step")]
    if len(times) < WARM + 2:
        raise Failed(f"{len(times)} steps were seen: {last_words(out.text())}")
    steady = [1e3 * (b - a) for a, b in zip(times[:-1], times[1:])][WARM - 1 :]
    return {
        "steps": len(times),
        "ms": round(statistics.median(steady), 3),
        "ms_mean": round(statistics.mean(steady), 3),
        "ms_most": round(max(steady), 3),
        "peak_gib": memory.peak_gib(),
        "command": " ".join(["llmq", *command[1:]]).replace(str(folder) + "/", ""),
    }


# ---- PyTorch, in a process of its own ----


def in_child(arguments, name, kind, memory):
    """This script again; the last line of what it prints."""
    command = [sys.executable, str(pathlib.Path(__file__).resolve()), "--one", f"{name}:{kind}"]
    command += ["--device", arguments.device]
    command += ["--eager"] if arguments.eager else []
    environment = dict(os.environ)
    library = arguments.scruple and pathlib.Path(arguments.scruple).resolve().parent / "libscruple.so"
    if library and library.exists():
        environment.setdefault("SCRUPLE_LIBRARY", str(library))
    with memory:
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=arguments.timeout,
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"stopped after {arguments.timeout:.0f} s") from None
    if done.returncode != 0:
        raise Failed(last_words(done.stderr, 4))
    return json.loads(done.stdout.strip().splitlines()[-1])


# ---- Rows, and the table that they make ----


def attention_rows(who, shapes, found):
    for shape, row in zip(shapes, found):
        sequences, length, heads, kv_heads, width = shape
        flop = 2 * sequences * heads * length * length * width  # two causal products, forward
        both = row["forward_ms"] + row["backward_ms"]
        words = f"{sequences} x {length}, {heads}/{kv_heads} heads of {width}"
        yield {
            "case": f"attention {words}",
            "who": who,
            **row,
            "ms": round(both, 4),
            "tflops": round(3.5 * flop / both / 1e9, 1),  # backward: five products
            "bar": ATTENTION_BAR[0],
            "goal": ATTENTION_BAR[1],
        }


def own_attention(path, shapes, timeout):
    rows = []
    for shape in shapes:
        done = subprocess.run(
            [path, *map(str, shape)], capture_output=True, text=True, timeout=timeout, check=False
        )
        if done.returncode != 0:
            raise Failed(f"exit code {done.returncode}: {last_words(done.stderr)}")
        rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
    return rows


def gpu_name():
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        return (
            subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
        )
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "no GPU"


def peak_of(name):
    return next((peak for key, peak in PEAKS.items() if key in name), None)


class Report:
    def __init__(self, arguments):
        self.path = arguments.lines
        self.device = "cpu" if arguments.device == "cpu" else gpu_name()
        self.peak = arguments.peak_tflops or (peak_of(self.device) if arguments.device != "cpu" else None)

    def add(self, name, who, case, row):
        now = datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds")
        line = {"case": name, "who": who, "date": now, "device": self.device}
        if case is not None:
            line |= {"parameters": parameters_of(case.config), "bar": case.bar, "goal": case.goal}
            if "ms" in row:
                rate = 1e3 * case.tokens() / row["ms"]
                line["tokens_per_s"] = round(rate)
                flop = flop_per_token(case.config, case.context)
                line["mfu"] = self.peak and round(rate * flop / self.peak / 1e12, 4)
        self.put(line | row)

    def put(self, line):
        text = json.dumps(line)
        print(text, flush=True)
        if self.path:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(text + "\n")


def table(path):
    with open(path, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file if line.strip()]
    best_ms = {}  # the least of each case's peers: LLMQ, and PyTorch with its own optimizer
    for line in lines:
        if line["who"] not in ("ours", "torch, scruple") and "ms" in line:
            best_ms[line["case"]] = min(line["ms"], best_ms.get(line["case"], float("inf")))
    rates = [line for line in lines if "tokens_per_s" in line]
    own_rate = {line["case"]: line["tokens_per_s"] for line in rates if line["who"] == "ours"}
    print(
        "| case | who | tokens/s | ms | MFU | peak GiB | counted GiB | load s | of the best peer | bar | goal |"
    )
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |")
    for line in lines:
        if "error" in line:
            print(
                f"| {line['case']} | {line['who']} | {' '.join(line['error'].split())[:200]} | | | | | | | | |"
            )
            continue
        best, ours = best_ms.get(line["case"]), line["who"] == "ours"
        rate = f"{line['tokens_per_s']:,}" if "tokens_per_s" in line else f"{line.get('tflops', '')} TFLOP/s"
        cells = [line["case"], line["who"], rate, line["ms"]]
        cells += [line.get(key) for key in ("mfu", "peak_gib", "counted_gib", "load_s")]
        cells += [f"{best / line['ms']:.3f}" if ours and best else ""]
        cells += [line.get(key) if ours else "" for key in ("bar", "goal")]
        beside = CASES[line["case"]].beside if line["case"] in CASES else ""
        if ours and beside in own_rate:
            cells[-1] += f" (is {own_rate[beside] / line['tokens_per_s']:.3f})"
        print("| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |")


def run_attention(arguments, report, in_time):
    shapes = TINY_ATTENTION if arguments.device == "cpu" else ATTENTION
    rows = []
    if arguments.attention:
        rows.append(("ours", lambda: own_attention(arguments.attention, shapes, arguments.timeout)))
    if arguments.torch:
        rows.append(("torch", lambda: in_child(arguments, "attention", "torch", GpuMemory(False))))
    for who, measure in rows:
        if not in_time():
            return
        try:
            for row in attention_rows(who, shapes, measure()):
                report.put({"device": report.device, **row})
        except (Failed, OSError, ValueError, subprocess.TimeoutExpired) as problem:
            report.add("attention", who, None, {"error": str(problem)})


def run_case(name, arguments, report, folder, in_time):
    case = CASES[name]
    if arguments.scruple:
        begin = time.perf_counter()
        try:
            row = scruple_row(case, arguments, folder, model_of(case, folder, arguments.drawn))
        except (Failed, OSError) as problem:
            row = {"error": str(problem)}
        report.add(name, "ours", case, row | {"wall_s": round(time.perf_counter() - begin, 1)})
    if arguments.llmq and case.llmq and in_time():
        try:
            row = llmq_row(case, arguments, folder)
        except (Failed, OSError) as problem:
            row = {"error": str(problem)}
        report.add(name, "LLMQ", case, row)
    for kind in case.torch if arguments.torch is True else arguments.torch:
        if not in_time():
            return
        memory = GpuMemory(arguments.device != "cpu")
        begin = time.perf_counter()
        try:
            row = in_child(arguments, name, kind, memory) | {"peak_gib": memory.peak_gib()}
        except Failed as problem:
            row = {"error": str(problem)}
        report.add(name, "torch, " + kind, case, row | {"wall_s": round(time.perf_counter() - begin, 1)})


def parsed():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    usual = [name for name in CASES if name not in TRIES] + ["attention"]
    add("scruple", nargs="?", help="path of the command; without it PyTorch alone is measured")
    add(
        "--cases",
        default=",".join(usual),
        help=f"of {', '.join([*CASES, 'attention'])}; default: all but tiny ones",
    )
    add("--device", default="cuda", help="cuda or cpu; cpu is not passed on")
    add("--lines", help="a file that each JSON line is appended to")
    add("--minutes", type=float, default=float("inf"), help="nothing is started after that")
    add("--timeout", type=float, default=300, help="seconds that one process may take")
    add("--no-torch", action="store_true")
    add("--torch", help="rows in place of each case's own: autocast,bf16,scruple")
    add(
        "--llmq",
        metavar="PROGRAM",
        help="LLMQ's `train` (github.com/IST-DASLab/llmq): rows of cases that it has, too",
    )
    add("--eager", action="store_true", help="PyTorch without torch.compile")
    add("--attention", help="the program that measures our attention")
    add("--drawn", action="store_true", help="no weights are written; the trainer draws them")
    add("--options", default="", help="more words for 'scruple train', in one argument")
    add("--work", help="where models and runs are written for a while (default: a new folder in $TMPDIR)")
    add("--peak-tflops", type=float, help="the GPU's dense bf16 TFLOP/s")
    add("--table", metavar="FILE", help="print such a file's lines as markdown, and measure nothing")
    add("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for name in arguments.cases.split(","):
        if name != "attention" and name not in CASES:
            parser.error(f"--cases: there is no {name}; there are {', '.join([*CASES, 'attention'])}")
    arguments.torch = () if arguments.no_torch else arguments.torch.split(",") if arguments.torch else True
    return arguments


def main():
    arguments = parsed()
    if arguments.table:
        table(arguments.table)
        return
    if arguments.one:
        name, kind = arguments.one.split(":")
        if name == "attention":
            shapes = TINY_ATTENTION if arguments.device == "cpu" else ATTENTION
            print(json.dumps(torch_attention(shapes, arguments.device)))
        else:
            print(json.dumps(torch_one(CASES[name], kind, arguments.device, not arguments.eager)))
        return
    deadline = time.monotonic() + 60 * arguments.minutes
    report = Report(arguments)

    def in_time():
        return time.monotonic() < deadline

    with tempfile.TemporaryDirectory(prefix="gpu_trainer-", dir=arguments.work) as folder:
        for name in arguments.cases.split(","):
            if not in_time():
                print(f"# no time for {name}", file=sys.stderr, flush=True)
            elif name == "attention":
                run_attention(arguments, report, in_time)
            else:
                run_case(name, arguments, report, pathlib.Path(folder), in_time)


if __name__ == "__main__":
    main()
