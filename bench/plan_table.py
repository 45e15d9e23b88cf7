"""The table of known models in docs/gpu.md, by `scruple plan`; tests/folders_test.py compares them.

    python bench/plan_table.py SCRUPLE

GiB of weights, moments and gradients with AdamW, gradients stored/released/compressed, and what a run takes beside them;
then for each card what fits, of --gradients, --recompute and --offload: state leaves it only where it must. Shapes are
written as a config.json each; no weights are needed, and no GPU.
"""

import argparse
import json
import pathlib
import subprocess
import tempfile

from gpu_cases import GIB, LLAMA_8B, QWEN_14B, llama

TIED = {"tie_word_embeddings": True}
MODELS = {
    "Llama-3.2-1B": llama(16, 2048, 32, 8, 8192, 128256, context=131072) | TIED,
    "Llama-3.2-3B": llama(28, 3072, 24, 8, 8192, 128256, context=131072) | TIED,
    "Llama-3.1-8B": LLAMA_8B,
    "Qwen2.5-14B": QWEN_14B,
    "Qwen2.5-32B": llama(64, 5120, 40, 8, 27648, 152064, kind="qwen2", context=131072),
    "Llama-3.1-70B": llama(80, 8192, 64, 8, 28672, 128256, context=131072),
}
POLICIES = ("stored", "released", "compressed")
CARDS = {"16 GB": 14.9, "24 GB": 22.9, "48 GB": 46.9, "80 GB": 78.4, "141 GB": 138.4}  # GiB that a run may plan with


def planned(command, config, policy, *more):
    run = ["--recipe", "scruple", "--batch", "4", "--context", "1024", "--device", "cuda"]
    words = [command, "plan", str(config), "--gradients", policy, "--json", *run, *more]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip()}")
    return json.loads(done.stdout)["rows"][0]


def sizes(command, config):
    def parted(policy):
        parts = planned(command, config, policy, "--recompute", "block")["parts"]
        run = parts.pop("activations") + parts.pop("workspace")
        return sum(parts.values()) / GIB, run / GIB

    return ["/".join(f"{parted(policy)[0]:.1f}" for policy in POLICIES), f"{parted('released')[1]:.1f}"]


def what_fits(command, config, limit):
    """Gradients that are kept before those that are not, while state stays on the card; else released, which hide the link."""
    auto = ("--recompute", "auto", "--offload", "auto", "--memory-limit", f"{int(limit * GIB)}B")
    for policy in ("stored", "compressed", "released"):
        best = planned(command, config, policy, *auto)
        if best["fits"] and "state" not in best["chosen"]["offload"]:
            break
    if not best["fits"]:
        return "-"
    words = [best["gradients"], *(word for word in best["chosen"].values() if word != "none")]
    host = sum(size for kind, size in best["host_parts"].items() if kind != "saves")
    return " ".join(words) + (f":{host / GIB:.1f}" if host else "")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scruple")
    command = parser.parse_args().scruple
    table = [["model", "`scruple`", "rest", *CARDS], ["---", "---", "---:"] + ["---"] * len(CARDS)]
    with tempfile.TemporaryDirectory() as folder:
        config = pathlib.Path(folder) / "config.json"
        for name, shape in MODELS.items():
            config.write_text(json.dumps(shape), encoding="utf-8")
            fits = []
            for limit in reversed(CARDS.values()):  # what fits no card fits no smaller one
                fits.insert(0, "-" if "-" in fits else what_fits(command, config, limit))
            table.append([name, *sizes(command, config), *fits])
    print("\n".join("| " + " | ".join(row) + " |" for row in table))


if __name__ == "__main__":
    main()
