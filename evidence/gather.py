"""What tables and pictures ask of the lines: runs by task, machine and row, and gaps over pairs of one seed."""

import dataclasses
import hashlib
import json
import pathlib
import statistics
import sys

import verdicts

HERE = pathlib.Path(__file__).resolve().parent
REFERENCE, EXACT, PURE, NEAREST = "torch fp32", "mixed", "torch bf16", "scruple, moments to nearest"
LPMM, COARSE = "10 bits, stochastic", "8 bits, nearest"  # of lpmm.py: the claim, and what it should find worse
MORE_IS_BETTER = ("BLEU", "test accuracy")


def name_of(text):
    """What superseded.jsonl calls a line by."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def superseded():
    """{name of a line that no longer counts: why}. Lines themselves are never changed (PROTOCOL.md)."""
    lines = map(json.loads, (HERE / "superseded.jsonl").read_text().splitlines())
    return {line["line"]: line["reason"] for line in lines}


def lines_of(path):
    found, old = [], superseded()
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            line = json.loads(text)
        except ValueError:
            sys.exit(f"{path}, line {number} is damaged: remove it, and that run is made again")
        if name_of(text) not in old:
            found.append(line)
    return found


def setup(line):
    """Runs are compared with those of the same length, from the same weights."""
    return line["steps"], line.get("begin")


def read(folder):
    """{task: {machine: {row: ([runs by seed], its times or {})}}}, rows in the order of the harness. Of a task that was
    set up anew on a machine only what came last counts, of times the later, and of several runs of one seed their mean."""
    places = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in lines_of(path):
            places.setdefault((line["task"], line["device"]), []).append(line)
    found = {}
    for (task, device), lines in places.items():
        rows, runs = {}, [line for line in lines if line.get("seed") is not None]
        steps, begin = setup(runs[-1] if runs else lines[-1])
        for line in sorted(lines, key=lambda line: line["place"]):
            start = begin if line.get("seed") is None else line.get("begin")  # times are the same from any weights
            if (line["steps"], start) == (steps, begin):
                rows.setdefault(line["row"], {}).setdefault(line.get("seed"), []).append(line)
        kept = {
            row: ([joined(runs[seed]) for seed in sorted(runs.keys() - {None})], runs.get(None, [{}])[-1])
            for row, runs in rows.items()
        }
        kept = {row: both for row, both in kept.items() if both[0]}
        if REFERENCE in kept or EXACT in kept:  # a table without them says nothing
            found.setdefault(task, {})[device] = kept
            for run in (run for runs, _ in kept.values() for run in runs):
                run["lead"], run["last"] = next(iter(run["metrics"].values())), last_of(run["losses"])
    return found


def joined(runs):
    """Runs of one seed as one."""

    def middle(values):
        return None if None in values else statistics.mean(values)

    metrics = {name: middle([run["metrics"][name] for run in runs]) for name in runs[-1]["metrics"]}
    return {**runs[-1], "metrics": metrics, "losses": [*map(middle, zip(*(run["losses"] for run in runs)))]}


def last_of(losses):
    """The training loss of the last tenth, or None."""
    part = losses[-max(1, len(losses) // 10) :]
    return None if None in part else statistics.mean(part)


def pairs(name, rows, key="lead", reference=EXACT):
    """[(the row's, the reference's)] of each seed that both have run."""
    exact = {run["seed"]: run[key] for run in rows[reference][0]} if reference in rows else {}
    return [(run[key], exact[run["seed"]]) for run in rows[name][0] if run["seed"] in exact]


def reference_of(rows):
    return EXACT if EXACT in rows else REFERENCE


def judges(rows):
    """Whether verdicts are given: beside exact steps, and of LPMM beside fp32, whose activations are its own."""
    return EXACT in rows or LPMM in rows


def deciding(places):
    """The machine that verdicts are of: most pairs of mixed and scruple, then the latest lines."""

    def rank(device):
        rows = places[device]
        count = len(pairs("scruple", rows)) if "scruple" in rows else 0
        return count, max(run["date"] for runs, _ in rows.values() for run in runs)

    return max(places, key=rank)


@dataclasses.dataclass
class Gap:
    """Of a row to the reference, in per cent of its metric, above 0 where the row is worse."""

    verdict: str
    pairs: int
    mean: float = None  # None: diverged
    half: float = None  # of the 95 % interval; None: of one pair
    needed: int = None  # pairs that would decide
    gained: float = None  # in per cent of what training gained, where the lines say it
    within: bool = None  # shown to be within 2 % of that

    def ends(self):
        return None if self.half is None else (self.mean - self.half, self.mean + self.half)


def gap(name, rows):
    """None where there is no pair."""
    reference = reference_of(rows)
    both = pairs(name, rows, reference=reference)
    if not both:
        return None
    if any(None in pair for pair in both):
        return Gap("worse: diverged", len(both))
    metric = next(iter(rows[reference][0][0]["metrics"]))
    gaps = [b - a if metric in MORE_IS_BETTER else a - b for a, b in both]
    exact = abs(statistics.mean(b for _, b in both))
    verdict, mean, half, needed = verdicts.verdict(gaps, exact)
    found = Gap(verdict, len(both), 100 * mean / exact, half and 100 * half / exact, needed)
    seeds = {run["seed"] for run in rows[name][0]}
    chosen = [run for run in rows[reference][0] if run["seed"] in seeds]
    if all(run.get("start") is not None for run in chosen):
        gain = abs(statistics.mean(run["start"] - run["lead"] for run in chosen))
        found.gained = 100 * mean / gain
        found.within = verdicts.verdict(gaps, gain, verdicts.GAIN_MARGIN)[0] == "equivalent"
    return found


def sighted(rows):
    """Does this task find pure bf16 worse, or lpmm.py's 8 bits to nearest?"""
    name = PURE if EXACT in rows else COARSE
    control = gap(name, rows) if name in rows and judges(rows) else None
    return control is not None and (control.mean is None or control.half is not None and control.ends()[0] > 0)
