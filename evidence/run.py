"""Trains a task with every row and appends a JSON line for each run; what is there already is not run again.

    python evidence/run.py TASK [--data DIR] [--small] [--rows REGEX] [--seeds N] [--device cpu|cuda] [--lines FILE]
"""

import argparse
import importlib
import json
import pathlib
import re
import sys

import torch

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import harness  # noqa: E402

TASKS = ("recommendation",)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--data", metavar="DIR", help="the public data set that the task names")
    parser.add_argument("--small", action="store_true", help="a minute on two cores, no data: shows that it runs")
    parser.add_argument("--rows", metavar="REGEX", default="", help="those whose name matches")
    parser.add_argument("--seeds", type=int, default=3, help="of the reference and scruple; others take one less")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lines", type=pathlib.Path, help="default: evidence/lines/TASK.jsonl")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    if asked.small and device.type == "cpu":
        torch.set_num_threads(1)  # there is too little work for two
    task = importlib.import_module(asked.task).Task(asked.data, asked.small, device)
    path = asked.lines or HERE / "lines" / f"{asked.task}.jsonl"
    done = set()
    if path.exists():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        done = {(line["task"], line["row"], line["seed"]) for line in lines}
    for row in harness.ROWS:
        if not re.search(asked.rows, row.name):
            continue
        if problem := row.missing(device):
            print(f"{row.name}: left out, {problem}", flush=True)
            continue
        for seed in range(asked.seeds if row.name in (harness.REFERENCE.name, "scruple") else max(1, asked.seeds - 1)):
            if (task.name, row.name, seed) in done:
                continue
            label = f"{task.name}, {row.name}, seed {seed}"
            line = harness.run(task, row, seed, device, lambda text: print(f"\r{label}: {text}", end="", flush=True))
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as out:
                out.write(json.dumps(line) + "\n")
            print(f"\r{label}: {task.metric} {line['metrics'][task.metric]:.4f}, {line['ms']:.1f} ms per step", flush=True)


if __name__ == "__main__":
    main()
