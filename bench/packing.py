"""Examples per second of `scruple train` where whole documents share windows, beside windows of one document each.

    python bench/packing.py SCRUPLE [--device cuda] [--steps N]

Its data are prompts with completions, some 200 tokens together, as Alpaca's; the context is 2,048. On a GPU the model is
GPT-2's 124M, on a CPU a small one. Prints a JSON line for each layout, by its fastest
step after the first WARM, and their ratio.
"""

import argparse
import json
import pathlib
import random
import subprocess
import tempfile

from gpu_cases import WARM, gpt2

EXAMPLES = 4000
# Of each device: the model, windows in a step, steps.
SIZES = {"cpu": (gpt2(2, 64, 2, vocabulary=2048, context=2048), 1, 12), "cuda": (gpt2(12, 768, 12, context=2048), 8, 40)}


def write_examples(path):
    """Bytes, each of them a token: 60 and 140 of them on average, as uneven as instructions and answers are."""
    draw = random.Random(1)
    text = lambda mean: "".join(draw.choices("abcdefgh ", k=min(1000, 1 + int(draw.lognormvariate(0, 0.6) * mean / 1.2))))
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(EXAMPLES):
            file.write(json.dumps({"prompt": text(60), "completion": text(140)}) + "\n")


def examples_per_second(program, folder, layout, device, steps):
    config, batch, _ = SIZES[device]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_examples(folder / "examples.jsonl")
    out = folder / layout
    options = {
        "--model": folder / "config.json",
        "--data": folder / "examples.jsonl",
        "--out": out,
        "--device": device,
        "--layout": layout,
        "--context": 2048,
        "--batch": batch,
        "--steps": steps,
        "--validation": 0,
    }
    words = [str(word) for pair in options.items() for word in pair]
    subprocess.run([program, "train", *words], check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    seen = [(line["time"], line["epoch"]) for line in lines if "loss" in line]
    seconds = [b[0] - a[0] for a, b in zip(seen[WARM:], seen[WARM + 1 :])]
    a_step = EXAMPLES * (seen[-1][1] - seen[WARM][1]) / len(seconds)
    return {
        "layout": layout,
        "examples_a_step": round(a_step, 1),
        "step_s": round(min(seconds), 4),
        "examples_per_s": round(a_step / min(seconds), 1),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scruple")
    parser.add_argument("--device", choices=SIZES, default="cpu")
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    rates = []
    with tempfile.TemporaryDirectory() as folder:
        for layout in ("padded", "whole"):
            steps = options.steps or SIZES[options.device][2]
            found = examples_per_second(options.scruple, pathlib.Path(folder), layout, options.device, steps)
            print(json.dumps(found), flush=True)
            rates.append(found["examples_per_s"])
    print(f"whole over padded: {rates[1] / rates[0]:.2f}")


if __name__ == "__main__":
    main()
