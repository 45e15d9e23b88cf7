"""The table of known models in docs/gpu.md: `scruple plan` for the shapes of each.

    python bench/plan_table.py SCRUPLE [--options "--batch 4 --context 1024 --recompute block"]

Cells are GiB with gradients stored / released / compressed, AdamW. Shapes are written as a config.json each; no weights
are needed. --options are more words for `scruple plan`; with --batch it counts a whole run, whose activations and
workspace the last column then has, of the first recipe with released gradients.
"""

import argparse
import json
import pathlib
import subprocess
import tempfile

from gpu_cases import GIB, LLAMA_8B, QWEN_14B, gpt2, llama

TIED = {"tie_word_embeddings": True}
MODELS = {
    "GPT-2 124M": gpt2(12, 768, 12),
    "TinyLlama 1.1B": llama(22, 2048, 32, 4, 5632, 32000),
    "Llama 3.2 1B": llama(16, 2048, 32, 8, 8192, 128256, context=131072) | TIED,
    "Llama 3.2 3B": llama(28, 3072, 24, 8, 8192, 128256, context=131072) | TIED,
    "Qwen2.5 7B": llama(28, 3584, 28, 4, 18944, 152064, kind="qwen2", context=131072),
    "Llama 3.1 8B": LLAMA_8B,
    "Qwen2.5 14B": QWEN_14B,
}
RECIPES = {"scruple": "`scruple`, `flash`", "scant": "`scant`", "mixed": "`mixed`"}
ALIKE = {"flash": "scruple"}  # whose cells one column has
POLICIES = ("stored", "released", "compressed")


def planned(command, config, recipe, policy, options):
    words = [command, "plan", str(config), "--recipe", recipe, "--gradients", policy, "--json", *options]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip()}")
    found = json.loads(done.stdout)
    parts = found["rows"][0]["parts"]
    run = parts.pop("activations", 0) + parts.pop("workspace", 0)
    return found["params"], sum(parts.values()), run


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scruple")
    parser.add_argument("--options", default="")
    arguments = parser.parse_args()
    options = arguments.options.split()
    last = " activations, workspace |" if "--batch" in options else ""
    print("| model | parameters | " + " | ".join(RECIPES.values()) + " |" + last)
    print("| --- | ---: |" + " --- |" * len(RECIPES) + (" ---: |" if last else ""))
    with tempfile.TemporaryDirectory() as folder:
        config = pathlib.Path(folder) / "config.json"
        for name, shape in MODELS.items():
            config.write_text(json.dumps(shape), encoding="utf-8")

            def plan(recipe, policy):
                return planned(arguments.scruple, config, recipe, policy, options)

            for other, recipe in ALIKE.items():
                assert all(plan(other, policy)[1] == plan(recipe, policy)[1] for policy in POLICIES)
            cells = [" / ".join(f"{plan(recipe, policy)[1] / GIB:.1f}" for policy in POLICIES) for recipe in RECIPES]
            params, _, run = plan(next(iter(RECIPES)), "released")
            print(f"| {name} | {params:,} | " + " | ".join(cells) + " |" + (f" {run / GIB:.1f} |" if last else ""))


if __name__ == "__main__":
    main()
