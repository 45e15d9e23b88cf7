"""Memory and time of whole training iterations of a Llama, every optimizer in a process of its own.

    python bench/torch_llama.py [--model 1.1b|8b|tiny] [--runs REGEX] [--json FILE] [--peers DIR]

Needs a GPU, torch, transformers and scruple. The rows of others need flashoptim, bitsandbytes and torchao,
installed or as unpacked wheels in the folder of --peers; a row whose package is not here says so. (On
PYTHONPATH transformers would import them too, in every row, and one that is broken would break all.) The model is
transformers' LlamaForCausalLM with random weights in bf16 (fp32 with autocast in the first row), gradient
checkpointing, sequences of 1,024 tokens, 8 at a time for 1.1b and 4 for 8b. After three iterations the peak is
reset; then come seven that count. One iteration is one optimizer step; with 4 micro-batches it has four forward
and backward passes. "No master": nothing completes the bf16 weights, and they are rounded to nearest.

  peak GiB   torch.cuda.max_memory_allocated over the seven iterations: weights, state, gradients, activations
  at rest    torch.cuda.memory_allocated between iterations
  ms         median of the seven, by wall clock with a synchronize around each
"""

import argparse
import datetime
import importlib
import json
import re
import statistics
import subprocess
import sys
import time

import torch

MODELS = {
    "1.1b": (
        dict(
            vocab_size=32000,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=22,
            num_attention_heads=32,
            num_key_value_heads=4,
        ),
        8,
        1024,
    ),
    "8b": (
        dict(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
        ),
        4,
        1024,
    ),
    "tiny": (
        dict(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        ),
        2,
        64,
    ),
}
WARM, TIMED = 3, 7

# Who, and how: kind, options. Bars at 8b: (peak GiB, ms).
RUNS = {
    "torch fused, fp32 + autocast": ("torch", {"autocast": True}),
    "torch fused, pure bf16 (no master)": ("torch", {}),
    "FlashAdamW": ("flash", {}),
    "FlashAdamW, release": ("flash", {"release": True}),
    "bitsandbytes 8-bit (no master)": ("bitsandbytes.optim", {"name": "AdamW8bit"}),
    "torchao 8-bit (no master)": ("torchao.optim", {"name": "AdamW8bit"}),
    "torchao 4-bit (no master)": ("torchao.optim", {"name": "AdamW4bit"}),
    "scruple": ("scruple", {}),
    "scruple, clip_and_step": ("scruple", {"clip": True}),
    "scruple, released": ("scruple", {"policy": "released"}),
    "scruple, released, offload": ("scruple", {"policy": "released", "offload": True}),
    "scruple, compressed, clip": ("scruple", {"policy": "compressed", "max_norm": 1.0}),
    "scruple, compressed, clip, 4 micro-batches": (
        "scruple",
        {"policy": "compressed", "max_norm": 1.0, "accumulate": 4},
    ),
    "scant, released": ("scruple", {"recipe": "scant", "policy": "released"}),
}
BARS = {
    "scruple": (53.9, 510),
    "scruple, released": (45.4, 505),
    "scruple, released, offload": (23.5, 734),  # beside it the library has 0.5 GiB on the device
    "scruple, compressed, clip": (47.5, None),
    "scruple, compressed, clip, 4 micro-batches": (54, None),
    "scant, released": (41.5, None),
}


def build(model, dtype, device):
    from transformers import LlamaConfig, LlamaForCausalLM

    shape, batch, length = MODELS[model]
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        made = LlamaForCausalLM(
            LlamaConfig(**shape, max_position_embeddings=length, use_cache=False, tie_word_embeddings=False)
        )
    torch.set_default_dtype(torch.float32)
    made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    made.train()
    return made, torch.randint(shape["vocab_size"], (batch, length), device=device)


def one(model, who, peers):
    kind, how = RUNS[who]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net, tokens = build(model, torch.float32 if how.get("autocast") else torch.bfloat16, device)
    hypers = {"lr": 1e-4, "weight_decay": 0.1}
    if peers:
        sys.path.append(peers)
    if kind == "torch":
        opt = torch.optim.AdamW(net.parameters(), fused=True, **hypers)
    elif kind == "flash":
        import flashoptim

        opt = flashoptim.FlashAdamW(net.parameters(), master_weight_bits=24, **hypers)
        if how.get("release"):
            flashoptim.enable_gradient_release(net, opt)
    elif kind != "scruple":
        opt = getattr(importlib.import_module(kind), how["name"])(net.parameters(), **hypers)
    else:
        from scruple.torch import AdamW, release_gradients

        opt = AdamW(net.parameters(), recipe=how.get("recipe", "scruple"), offload=how.get("offload", False), **hypers)
        if "policy" in how:
            options = {key: how[key] for key in ("max_norm", "accumulate") if key in how}
            release_gradients(net, opt, how["policy"], **options)
    released = how.get("release") or "policy" in how

    def iteration():
        for _ in range(how.get("accumulate", 1)):
            with torch.autocast(device, torch.bfloat16, enabled=bool(how.get("autocast"))):
                loss = net(input_ids=tokens, labels=tokens).loss
            loss.backward()
        if not released:
            opt.clip_and_step(1.0) if how.get("clip") else opt.step()
            opt.zero_grad()
        return loss

    first = float(iteration())
    for _ in range(WARM - 1):
        iteration()
    times = []
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(TIMED):
        start = time.perf_counter()
        loss = iteration()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    memory = (
        (torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()) if device == "cuda" else (0, 0)
    )
    return {
        "parameters": sum(p.numel() for p in net.parameters()),
        "peak_gib": memory[0] / 2**30,
        "rest_gib": memory[1] / 2**30,
        "ms": statistics.median(times),
        "least_ms": min(times),
        "first_loss": first,
        "last_loss": float(loss),
    }


def judged(model, who, row):
    if model != "8b" or who not in BARS:
        return ""
    peak, ms = BARS[who]
    met = row["peak_gib"] <= peak and (ms is None or row["ms"] <= ms)
    return f"{'met' if met else 'MISSED'} ({peak} GiB{f', {ms} ms' if ms else ''})"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="1.1b")
    parser.add_argument("--runs", default="", help="only those whose name matches this regular expression")
    parser.add_argument("--json")
    parser.add_argument("--peers", help="a folder with unpacked wheels of others")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(arguments.model, arguments.one, arguments.peers)))
        return
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    _, batch, length = MODELS[arguments.model]
    print(
        f"{arguments.model}, {batch} x {length} tokens, {name}, torch {torch.__version__}, "
        f"{datetime.date.today().isoformat()}\n"
    )
    print("| optimizer | peak GiB | at rest GiB | ms per iteration | loss, first to last | bar |")
    print("| --- | ---: | ---: | ---: | --- | --- |", flush=True)
    rows = {}
    for who in RUNS:
        if not re.search(arguments.runs, who):
            continue
        command = [sys.executable, __file__, "--model", arguments.model, "--one", who]
        if arguments.peers:
            command += ["--peers", arguments.peers]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            print(f"| {who} | {reason} | | | | |", flush=True)
            continue
        rows[who] = row = json.loads(done.stdout.strip().splitlines()[-1])
        print(
            f"| {who} | {row['peak_gib']:.2f} | {row['rest_gib']:.2f} | {row['ms']:.1f} | "
            f"{row['first_loss']:.3f} to "
            f"{row['last_loss']:.3f} | {judged(arguments.model, who, row)} |",
            flush=True,
        )
        if arguments.json:
            with open(arguments.json, "w") as out:
                json.dump({"model": arguments.model, "device": name, "rows": rows}, out, indent=2)


if __name__ == "__main__":
    main()
