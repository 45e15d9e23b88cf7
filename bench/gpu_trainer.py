"""`scruple train --device cuda` beside PyTorch on the same GPU: tokens per second, memory, MFU.

    python bench/gpu_trainer.py SCRUPLE [--cases NAME,NAME] [--lines FILE] [--minutes M] [--no-torch]
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

Attention alone: --attention PATH names a program that is called with SEQUENCES LENGTH HEADS KV_HEADS HEAD_WIDTH and
whose last line is {"forward_ms": ..., "backward_ms": ...}.
"""

import argparse
import ctypes
import dataclasses
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

WARM = 4  # steps that do not count: algorithms are chosen, graphs captured, kernels compiled
GIB = 2**30
LONG_TO_WRITE = 2 * GIB
ROOT = pathlib.Path(__file__).resolve().parents[1]


def gpt2(layers, width, heads, vocabulary=50257, context=1024):
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": layers,
        "n_embd": width,
        "n_head": heads,
        "n_positions": context,
        "vocab_size": vocabulary,
        "activation_function": "gelu_new",
        "torch_dtype": "bfloat16",
    }


def llama(layers, width, heads, kv_heads, inner, vocabulary, kind="llama", theta=10000.0, context=2048):
    return {
        "model_type": kind,
        "architectures": [kind.capitalize() + "ForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


@dataclasses.dataclass
class Case:
    config: dict
    batch: int
    context: int = 1024
    steps: int = 30
    recipe: str = "scruple"
    gradients: str = "stored"
    recompute: str = "none"
    accumulate: int = 1
    clip: float = 0
    offload: bool = False
    limit: str = ""  # --memory-limit
    beside: str = ""  # the case whose time per token it is measured by
    torch: tuple = ("autocast", "bf16", "scruple")
    bar: str = ""
    goal: str = ""

    def tokens(self):
        return self.batch * self.context * self.accumulate

    def options(self):
        chosen = {
            "--batch": self.batch,
            "--context": self.context,
            "--steps": self.steps,
            "--recipe": self.recipe,
            "--gradients": self.gradients,
            "--recompute": self.recompute,
            "--accumulate": self.accumulate,
            "--clip": self.clip,
            "--lr": 1e-4,
            "--schedule": "constant",
            "--validation": 1e-4,
            "--validate-every": 1000000,
        }
        if self.limit:
            chosen["--memory-limit"] = self.limit
        words = [str(word) for pair in chosen.items() for word in pair]
        return words + (["--offload"] if self.offload else [])


LLAMA_8B = llama(32, 4096, 32, 8, 14336, 128256, theta=500000.0, context=8192)
QWEN_14B = llama(48, 5120, 40, 8, 13824, 152064, kind="qwen2", theta=1000000.0, context=32768)
CASES = {
    "gpt2-124m": Case(gpt2(12, 768, 12), 64, steps=40, bar="510000", goal="620000"),
    "gpt2-774m": Case(gpt2(36, 1280, 20), 16, steps=30, bar="90000", goal="105000"),
    "llama-1.1b": Case(
        llama(22, 2048, 32, 4, 5632, 32000), 8, steps=30, bar="0.9 of torch", goal="1.1 of torch"
    ),
    "llama-8b": Case(
        LLAMA_8B,
        4,
        steps=16,
        gradients="released",
        recompute="block",
        torch=("bf16", "scruple"),
        bar="9000, 45 GiB",
        goal="12000, 42 GiB",
    ),
    "llama-8b-46gib": Case(
        LLAMA_8B,
        4,
        steps=9,
        recipe="scant",  # 43.2 GiB of state; `scruple` has 46.3 before the first activation
        gradients="compressed",
        recompute="block",
        accumulate=4,
        clip=1,
        offload=True,  # 46.1 GiB without
        limit="46GiB",
        beside="llama-8b",
        torch=("scruple",),
        bar="runs",
        goal="1.05 of llama-8b's time per token",
    ),
    "qwen-14b": Case(
        QWEN_14B,
        4,
        steps=10,
        recipe="scant",
        gradients="released",
        recompute="block",
        limit="78GiB",
        torch=(),
        bar="10 steps",
    ),
    "tiny": Case(
        llama(2, 64, 4, 2, 128, 512, context=128),
        2,
        context=64,
        steps=8,
        gradients="compressed",
        recompute="block",
        accumulate=2,
        clip=1,
        bar="runs",
        beside="tiny-gpt2",
    ),
    "tiny-gpt2": Case(gpt2(2, 64, 4, vocabulary=300, context=64), 2, context=64, steps=8),
    "tiny-qwen": Case(
        llama(2, 64, 4, 2, 128, 70000, kind="qwen2", context=128),
        2,
        context=64,
        steps=8,
        recipe="scant",
        gradients="released",
        recompute="block",
    ),
}
TRIES = ("tiny", "tiny-gpt2", "tiny-qwen")  # of the script itself; not part of the table

# sequences, length, heads, kv_heads, head_width
ATTENTION = ((64, 1024, 12, 12, 64), (16, 1024, 20, 20, 64), (4, 1024, 32, 8, 128), (8, 2048, 32, 8, 128))
TINY_ATTENTION = ((2, 64, 4, 2, 16),)
ATTENTION_BAR = ("0.6 of torch", "1.0 of torch")

# Dense bf16 TFLOP/s as NVIDIA states them; --peak-tflops for others.
PEAKS = {"H200": 989.5, "H100 PCIe": 756, "H100": 989.5, "A100": 312, "L40S": 362, "RTX 4090": 165.2, "A6000": 154.8}


# ---- The model, its weights and its arithmetic ----


def shapes_of(config):
    """Hugging Face's names and shapes, in the order of the file."""
    if config["model_type"] == "gpt2":
        width = config["n_embd"]
        shapes = {
            "transformer.wte.weight": (config["vocab_size"], width),
            "transformer.wpe.weight": (config["n_positions"], width),
        }
        products = (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        )
        for layer in (f"transformer.h.{i}." for i in range(config["n_layer"])):
            for norm in ("ln_1", "ln_2"):
                shapes[f"{layer}{norm}.weight"] = shapes[f"{layer}{norm}.bias"] = (width,)
            for name, inputs, outputs in products:
                shapes[f"{layer}{name}.weight"], shapes[f"{layer}{name}.bias"] = (inputs, outputs), (outputs,)
        shapes["transformer.ln_f.weight"] = shapes["transformer.ln_f.bias"] = (width,)
        return shapes
    width, inner = config["hidden_size"], config["intermediate_size"]
    keys = width // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], width)}
    for layer in (f"model.layers.{i}." for i in range(config["num_hidden_layers"])):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{norm}.weight"] = (width,)
        for name, outputs in (("q", width), ("k", keys), ("v", keys)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (outputs, width)
            if config["model_type"] == "qwen2":
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (outputs,)
        shapes[f"{layer}self_attn.o_proj.weight"] = (width, width)
        for name in ("gate", "up"):
            shapes[f"{layer}mlp.{name}_proj.weight"] = (inner, width)
        shapes[f"{layer}mlp.down_proj.weight"] = (width, inner)
    shapes["model.norm.weight"] = (width,)
    shapes["lm_head.weight"] = (config["vocab_size"], width)
    return shapes


def size_of(shape):
    size = 1
    for dimension in shape:
        size *= dimension
    return size


def parameters_of(config):
    return sum(size_of(shape) for shape in shapes_of(config).values())


def flop_per_token(config, context):
    """Forward and backward; see the top of this file."""
    tied = config["model_type"] == "gpt2"
    no_product = ("wpe.weight",) if tied else ("embed_tokens.weight",)
    weights = sum(
        size_of(shape)
        for name, shape in shapes_of(config).items()
        if len(shape) == 2 and not name.endswith(no_product)
    )
    layers, width = ("n_layer", "n_embd") if tied else ("num_hidden_layers", "hidden_size")
    return 6 * weights + 6 * config[layers] * context * config[width]


def write_weights(path, config):
    """A safetensors file: norms 1, biases 0, the rest of N(0, 0.02), the same 16 million numbers again and again."""
    import numpy

    header, offset = {}, 0
    for name, shape in shapes_of(config).items():
        end = offset + 2 * size_of(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    count = min(1 << 24, max(size_of(shape) for shape in shapes_of(config).values()))
    drawn = numpy.random.default_rng(1).standard_normal(count, dtype=numpy.float32) * numpy.float32(0.02)
    drawn = (drawn.view(numpy.uint32) >> 16).astype(numpy.uint16)  # bf16, towards zero
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes_of(config).items():
            left = size_of(shape)
            if len(shape) == 1:
                file.write(numpy.full(left, 0 if name.endswith("bias") else 0x3F80, numpy.uint16))
                continue
            while left > 0:
                file.write(drawn[:left])
                left -= min(left, count)


def write_tokens(path, vocabulary):
    """llm.c's form (docs/data.md)."""
    import numpy

    narrow = vocabulary <= 1 << 16
    tokens = numpy.random.default_rng(2).integers(
        vocabulary, size=1 << 22, dtype=numpy.uint16 if narrow else numpy.uint32
    )
    header = numpy.zeros(256, numpy.int32)
    header[:3] = (20240520, 1, tokens.size) if narrow else (20240801, 7, tokens.size)
    with open(path, "wb") as file:
        file.write(header)
        file.write(tokens)


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
                raise Failed(f"stopped after {timeout:.0f} s, at step {len(seen.times)}; {last_words(err.text(), 3)}")
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


# ---- PyTorch, in a process of its own ----


def torch_llama(config, recompute, compiles):
    import torch
    from torch import nn
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    width, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    each, bias = width // heads, config["model_type"] == "qwen2"

    def turned(x, cosine, sine):
        left, right = x.chunk(2, -1)
        return x * cosine + torch.cat((-right, left), -1) * sine

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = (nn.RMSNorm(width, config["rms_norm_eps"]) for _ in range(2))
            self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * each, bias=bias)
            self.out = nn.Linear(width, width, bias=False)
            self.up = nn.Linear(width, 2 * config["intermediate_size"], bias=False)
            self.down = nn.Linear(config["intermediate_size"], width, bias=False)

        def forward(self, x, cosine, sine):
            b, t, _ = x.shape
            qkv = self.qkv(self.norm1(x)).view(b, t, heads + 2 * kv_heads, each).transpose(1, 2)
            q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
            q, k = turned(q, cosine, sine).to(v.dtype), turned(k, cosine, sine).to(v.dtype)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
            x = x + self.out(y.transpose(1, 2).reshape(b, t, width))
            gate, up = self.up(self.norm2(x)).chunk(2, -1)
            return x + self.down(functional.silu(gate) * up)

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(config["vocab_size"], width)
            self.blocks = nn.ModuleList(Block() for _ in range(config["num_hidden_layers"]))
            self.norm = nn.RMSNorm(width, config["rms_norm_eps"])
            self.head = nn.Linear(width, config["vocab_size"], bias=False)
            for p in self.parameters():
                nn.init.normal_(p, std=0.02) if p.dim() == 2 else None
            self.called = [torch.compile(b, dynamic=False) if compiles and recompute else b for b in self.blocks]
            self.ended = torch.compile(self.loss, dynamic=False) if compiles and recompute else self.loss

        def loss(self, x, targets):
            logits = self.head(self.norm(x))
            return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

        def forward(self, tokens, targets):
            places = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
            steps = torch.arange(0, each, 2, device=tokens.device, dtype=torch.float32) / each
            angles = torch.outer(places, config["rope_theta"] ** -steps).repeat(1, 2)
            x = self.tokens(tokens)
            cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
            for block in self.called:
                x = checkpoint(block, x, cosine, sine, use_reentrant=False) if recompute else block(x, cosine, sine)
            return self.ended(x, targets)

    return Llama()


def torch_model(case, kind, device, compiles):
    """The module, and what is called in its place."""
    import torch

    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    config, recompute = case.config, case.recompute != "none"
    torch.set_default_dtype(torch.float32 if kind == "autocast" else torch.bfloat16)
    with torch.device(device):
        if config["model_type"] == "gpt2":
            sys.path.insert(0, str(ROOT / "evidence"))
            from language import Gpt

            padded = -(-config["vocab_size"] // 128) * 128
            net = Gpt(padded, case.context, config["n_layer"], config["n_embd"], config["n_head"])
        else:
            net = torch_llama(config, recompute, compiles)
    torch.set_default_dtype(torch.float32)
    net.train()
    return net, torch.compile(net, dynamic=False) if compiles and not recompute else net


def torch_optimizer(case, kind, net):
    """The optimizer, and whether the steps are taken inside the backward pass."""
    import torch

    if kind != "scruple":
        return torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.1, fused=True), False
    sys.path.insert(0, str(ROOT / "python"))
    from scruple.torch import AdamW, release_gradients

    opt = AdamW(net.parameters(), lr=1e-4, weight_decay=0.1, recipe=case.recipe)
    if case.gradients == "stored":
        return opt, False
    options = {"max_norm": case.clip} if case.clip else {}
    if case.accumulate > 1:
        options["accumulate"] = case.accumulate
    release_gradients(net, opt, case.gradients, **options)
    return opt, True


def torch_one(case, kind, device, compiles):
    import torch

    net, called = torch_model(case, kind, device, compiles)
    opt, inside = torch_optimizer(case, kind, net)
    vocabulary = case.config["vocab_size"]

    def step():
        for _ in range(case.accumulate):
            tokens = torch.randint(vocabulary, (case.batch, case.context + 1), device=device)
            with torch.autocast(device, torch.bfloat16, enabled=kind == "autocast"):
                loss = called(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            (loss if inside else loss / case.accumulate).backward()
        if inside:
            return loss
        if case.clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), case.clip)
        opt.step()
        opt.zero_grad()
        return loss

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    begin = time.perf_counter()
    times, losses = [], []
    for i in range(case.steps):
        if i == WARM and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = step()
        wait()
        times.append(1e3 * (time.perf_counter() - start))
        losses.append(loss.item())
        if i == WARM:
            warm_s = start - begin
    most = torch.cuda.max_memory_allocated() / GIB if device == "cuda" else None
    return {
        "steps": case.steps,
        "ms": round(statistics.median(times[WARM:]), 3),
        "ms_mean": round(statistics.mean(times[WARM:]), 3),
        "ms_most": round(max(times[WARM:]), 3),
        "load_s": None,
        "first_step_s": round(warm_s, 2),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "counted_gib": most and round(most, 3),
        "torch": torch.__version__,
    }


def torch_attention(shapes, device):
    """scaled_dot_product_attention, forward and backward, of torch's own choice of kernel."""
    import torch
    from torch.nn import functional

    def timed(work, times=20):
        for _ in range(3):
            work()
        found = []
        for _ in range(times):
            if device == "cuda":
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                start.record(), work(), stop.record()
                torch.cuda.synchronize()
                found.append(start.elapsed_time(stop))
            else:
                start = time.perf_counter()
                work()
                found.append(1e3 * (time.perf_counter() - start))
        return round(statistics.median(found), 4)

    rows = []
    for sequences, length, heads, kv_heads, width in shapes:
        torch.manual_seed(1)
        q, k, v = (
            torch.randn(sequences, length, count, width, device=device, dtype=torch.bfloat16)
            .transpose(1, 2)
            .requires_grad_()
            for count in (heads, kv_heads, kv_heads)
        )

        def forward():
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)

        y = forward()
        dy = torch.randn_like(y)
        forward_ms = timed(forward)
        rows.append(
            {
                "forward_ms": forward_ms,
                "backward_ms": timed(lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)),
                "torch": torch.__version__,
            }
        )
    return rows


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
                command, capture_output=True, text=True, timeout=arguments.timeout, env=environment, check=False
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
        done = subprocess.run([path, *map(str, shape)], capture_output=True, text=True, timeout=timeout, check=False)
        if done.returncode != 0:
            raise Failed(f"exit code {done.returncode}: {last_words(done.stderr)}")
        rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
    return rows


def gpu_name():
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
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
    torch_ms = {}  # the least of each case, with torch's own optimizer
    for line in lines:
        if line["who"] not in ("ours", "torch, scruple") and "ms" in line:
            torch_ms[line["case"]] = min(line["ms"], torch_ms.get(line["case"], float("inf")))
    rates = [line for line in lines if "tokens_per_s" in line]
    own_rate = {line["case"]: line["tokens_per_s"] for line in rates if line["who"] == "ours"}
    print("| case | who | tokens/s | ms | MFU | peak GiB | counted GiB | load s | of torch's best | bar | goal |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |")
    for line in lines:
        if "error" in line:
            print(f"| {line['case']} | {line['who']} | {' '.join(line['error'].split())[:200]} | | | | | | | | |")
            continue
        best, ours = torch_ms.get(line["case"]), line["who"] == "ours"
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
    add("--cases", default=",".join(usual), help=f"of {', '.join([*CASES, 'attention'])}; default: all but tiny ones")
    add("--device", default="cuda", help="cuda or cpu; cpu is not passed on")
    add("--lines", help="a file that each JSON line is appended to")
    add("--minutes", type=float, default=float("inf"), help="nothing is started after that")
    add("--timeout", type=float, default=300, help="seconds that one process may take")
    add("--no-torch", action="store_true")
    add("--torch", help="rows in place of each case's own: autocast,bf16,scruple")
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
