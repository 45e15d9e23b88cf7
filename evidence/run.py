"""Trains a task with every row and appends a JSON line for each run; what is there already is not run again.

    python evidence/run.py TASK [--data DIR] [--small] [--rows REGEX] [--seeds N] [--jobs N] [--minutes N] ...
    python evidence/run.py TASK --times ...     time per step and memory of every row, one at a time
"""

import argparse
import hashlib
import importlib
import json
import math
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import time
import traceback

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import gather  # noqa: E402

TASKS = "images recommendation translation gan pretraining finetuning bits underflow lpmm".split()


def pattern(text):
    try:
        return re.compile(text)
    except re.error as problem:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {problem}") from None


def count(text):
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--data", metavar="DIR", help="the public data set that the task names")
    parser.add_argument("--small", action="store_true", help="minutes on two cores, no data: shows that it runs")
    parser.add_argument("--rows", metavar="REGEX", type=pattern, default="", help="those whose name matches")
    parser.add_argument("--only", metavar="REGEX", type=pattern, default="", help="tasks whose name matches")
    parser.add_argument("--seeds", type=count, help="of every row (3; small: 1)")
    parser.add_argument("--times", action="store_true", help="measure time and memory instead; nothing beside it")
    parser.add_argument("--jobs", type=count, default=1, help="processes side by side")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no run begins later; a later call goes on")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU where there is one")
    parser.add_argument("--lines", type=pathlib.Path, help="default: evidence/lines/TASK.jsonl")
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)  # which of them this is, from 0
    asked = parser.parse_args()
    if asked.jobs > 1 and asked.times:
        parser.error("--times with --jobs: times are of one row at a time; leave --jobs out")
    asked.seeds = asked.seeds or (1 if asked.small else 3)
    usual = HERE.parent / "build" / "evidence.jsonl" if asked.small else HERE / "lines" / f"{asked.task}.jsonl"
    asked.lines = asked.lines or usual
    return asked


def runs_of(task, asked, device):
    """(task, row, seed) in the order in which they are wanted: a first seed of all, then a second."""
    import harness

    rows = []
    for row in getattr(task, "rows", harness.ROWS):
        if not re.search(asked.rows, row.name):
            continue
        problem = row.missing(task.optimizer, device)
        if row.other and asked.small and device.type == "cpu":  # torchao alone compiles for minutes
            problem = problem or "no peers in the small form on a CPU"
        if problem is None:
            rows.append(row)
        elif not asked.job:
            print(f"{task.name}, {row.name}: left out, {problem}", flush=True)
    if asked.times:
        return [(task, row, None) for row in rows]
    return [(task, row, seed) for seed in range(asked.seeds) for row in rows]


def key(line):
    return tuple(line.get(name) for name in ("task", "row", "seed", "device", "steps", "begin"))


def append(path, line):
    """One write, behind whole lines."""
    whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    with path.open("a") as out:
        out.write("\n" * (not whole) + json.dumps(line) + "\n")


def plain(value):
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {name: plain(x) for name, x in value.items()}
    if isinstance(value, list):
        return [plain(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def command_of(words):
    """Without what is this machine's."""
    kept, words = ["evidence/run.py"], iter(words)
    for word in words:
        if word in ("--lines", "--job"):
            next(words)
        else:
            kept += [word, "DIR"][: 2 if word == "--data" and next(words) else 1]
    return " ".join(kept)


def commit_of():
    """That this was run at, "+" where files were changed; None without git. SCRUPLE_COMMIT says it for a copy of a work tree,
    whose git may be older."""
    if said := os.environ.get("SCRUPLE_COMMIT"):
        return said
    try:
        git = ["git", "-C", str(HERE)]
        head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ":!evidence/lines"], check=False).returncode
        return head.stdout.strip() + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return None


def digest_of(folder):
    """Of names and contents of the data; None where a task draws its own."""
    if folder is None:
        return None
    digest = hashlib.sha256()
    for path in sorted(path for path in pathlib.Path(folder).rglob("*") if path.is_file()):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def main():
    start, asked = time.monotonic(), arguments()
    try:
        asked.lines.parent.mkdir(parents=True, exist_ok=True)
        if asked.lines.exists():  # what cannot be written is said now, not after hours
            asked.lines.open("a").close()
            done = {key(line) for line in gather.lines_of(asked.lines)}
        else:
            tempfile.TemporaryFile(dir=asked.lines.parent).close()
            done = set()
    except OSError as problem:
        sys.exit(f"cannot append to {asked.lines}: {problem.strerror}")
    if asked.jobs > 1 and asked.job is None:
        command = [sys.executable, *sys.argv, "--job"]
        jobs = [subprocess.Popen([*command, str(job)]) for job in range(asked.jobs)]
        sys.exit(int(any([job.wait() for job in jobs])))

    import harness
    import torch

    device = torch.device(asked.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu" and (asked.small or asked.jobs > 1):
        torch.set_num_threads(1)  # there is too little work for two
    if device.type == "cpu" and platform.machine() != "x86_64":
        torch.backends.mkldnn.set_flags(False)  # its 16-bit products took 6 to 50 times as long on an ARM core
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    tasks = importlib.import_module(asked.task).tasks(asked.data, asked.small, device)
    all_ = [run for task in tasks if re.search(asked.only, task.name) for run in runs_of(task, asked, device)]
    if not all_:
        sys.exit("no row of no task matches --rows and --only; leave them out to see all names")
    mine = all_[asked.job or 0 :: asked.jobs]
    is_done = [key({**harness.head(task, row, device), "seed": seed}) in done for task, row, seed in mine]
    if any(is_done):
        print(f"{sum(is_done)} of {len(mine)} runs are in {asked.lines} already", flush=True)
    failed, commit, data = False, commit_of(), digest_of(asked.data)
    for again, (task, row, seed) in sorted(zip(is_done, mine), key=lambda run: run[0]):
        if again and (asked.times or not (hasattr(task, "needs") and task.needs(row, seed))):
            continue
        if time.monotonic() - start > 60 * asked.minutes:
            print("time is over; the same command goes on from here", flush=True)
            break
        shows = sys.stdout.isatty() and asked.jobs == 1
        label = f"{task.name}, {row.name}" + ("" if asked.times else f", seed {seed}")
        try:
            if asked.times:
                line = harness.clock(task, row, device)
                said = f"{line['ms']:.2f} ms per step"
            else:
                line = harness.run(
                    task, row, seed, device, lambda text: shows and print(f"\r{label}: {text}", end="", flush=True)
                )
                said = f"{task.metric} {line['metrics'][task.metric]:.4f}"
        except Exception:  # noqa: BLE001 - of a peer, or no memory: the other rows go on
            traceback.print_exc()
            print(f"{label}: failed", flush=True)
            failed = True
            continue
        line["command"], line["commit"], line["data"] = command_of(sys.argv[1:]), commit, data
        if line.get("seed") is not None:
            line["diverged"] = plain(line["metrics"]) != line["metrics"] or None in plain(line["losses"])
        append(asked.lines, plain(line))
        print("\r" * shows + f"{label}: {said}", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
