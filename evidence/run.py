"""Trains a task with every row and appends a JSON line for each run; what is there already is not run again.

    python evidence/run.py TASK [--data DIR] [--small] [--rows REGEX] [--seeds N] [--jobs N] [--minutes N] ...
    python evidence/run.py TASK --times ...     time per step and memory of every row, one at a time
"""

import argparse
import importlib
import json
import pathlib
import re
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
TASKS = ("images", "recommendation", "translation", "gan", "pretraining", "finetuning", "bits", "underflow")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--data", metavar="DIR", help="the public data set that the task names")
    parser.add_argument("--small", action="store_true", help="a minute on two cores, no data: shows that it runs")
    parser.add_argument("--rows", metavar="REGEX", default="", help="those whose name matches")
    parser.add_argument("--only", metavar="REGEX", default="", help="of several tasks those whose name matches")
    parser.add_argument("--seeds", type=int, default=3, help="of the reference and scruple; others take one less")
    parser.add_argument("--times", action="store_true", help="measure time and memory instead; nothing beside it")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--minutes", type=float, default=1e9, help="no run begins later; a later call goes on")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU where there is one")
    parser.add_argument("--lines", type=pathlib.Path, help="default: evidence/lines/TASK.jsonl")
    parser.add_argument("--share", type=int, default=0, help=argparse.SUPPRESS)  # which of the jobs this is
    return parser.parse_args()


def runs_of(task, asked, device):
    """(row, seed) in the order in which they are wanted: a first seed of all, then a second."""
    import harness

    rows = []
    for row in getattr(task, "rows", harness.ROWS):
        if not re.search(asked.rows, row.name):
            continue
        problem = row.missing(task.optimizer, device)
        if problem is None:
            rows.append(row)
        elif asked.share <= 1:
            print(f"{task.name}, {row.name}: left out, {problem}", flush=True)
    if asked.times:
        return [(row, None) for row in rows]
    return [(row, seed) for seed in range(asked.seeds) for row in rows if seed < row.seeds(asked.seeds)]


def main():
    start, asked = time.monotonic(), arguments()
    if asked.jobs > 1 and asked.times:
        sys.exit("--times with --jobs: times are of one row at a time; leave --jobs out")
    if asked.jobs > 1 and not asked.share:
        command = [sys.executable, *sys.argv, "--share"]
        jobs = [subprocess.Popen([*command, str(share + 1)]) for share in range(asked.jobs)]
        sys.exit(max(job.wait() for job in jobs))

    import harness
    import torch

    device = torch.device(asked.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu" and (asked.small or asked.jobs > 1):
        torch.set_num_threads(1)  # there is too little work for two
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    path = asked.lines or HERE / "lines" / f"{asked.task}.jsonl"
    done = set()
    if path.exists():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        done = {(line["task"], line["row"], line.get("seed"), line.get("begin")) for line in lines}
    tasks = importlib.import_module(asked.task).tasks(asked.data, asked.small, device)
    wanted = [(task, *run) for task in tasks if re.search(asked.only, task.name) for run in runs_of(task, asked, device)]
    wanted = [
        (task, row, seed)
        for task, row, seed in wanted
        if (task.name, row.name, seed, None if asked.times else getattr(task, "begin", None)) not in done
    ]
    for task, row, seed in wanted[max(0, asked.share - 1) :: asked.jobs]:
        if time.monotonic() - start > 60 * asked.minutes:
            print("time is over; the same command goes on from here", flush=True)
            break
        tell = sys.stdout.isatty() and asked.jobs == 1
        label = f"{task.name}, {row.name}" + ("" if asked.times else f", seed {seed}")
        if asked.times:
            line = harness.clock(task, row, device)
            said = f"{line['ms']:.2f} ms per step, {line['ms_optimizer']:.2f} of them the optimizer"
        else:
            line = harness.run(task, row, seed, device, lambda text: tell and print(f"\r{label}: {text}", end="", flush=True))
            said = f"{task.metric} {line['metrics'][task.metric]:.4f}"
        line["command"] = f"make evidence TASK={asked.task}" + " DATA=DIR" * bool(asked.data)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as out:
            out.write(json.dumps(line) + "\n")
        print("\r" * tell + f"{label}: {said}", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
