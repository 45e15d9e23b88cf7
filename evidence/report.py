"""Makes the tables and pictures of evidence/README.md from the lines that runs have left; nothing is typed by hand.

    python evidence/report.py [--check]     --check: fails where the page is not what the lines say
"""

import hashlib
import html
import json
import math
import pathlib
import re
import statistics
import sys

import verdicts

HERE = pathlib.Path(__file__).resolve().parent
REFERENCE, EXACT, NEAREST = "torch fp32", "mixed", "scruple, moments to nearest"
JUDGED = ("scruple", "scant", "FlashOptim", "bitsandbytes 8-bit", "torchao 8-bit", "torch bf16")
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31")
ERRORS = {"applied": "step off by", "relative": "moments' step off by", "far": "sqrt(v) off by 1.5 x"}
MORE_IS_BETTER = ("BLEU", "test accuracy")
PEAK = "#.3g"  # some models have less than a MiB
DRAWN = (REFERENCE, "scruple", "scant", "flash", "scruple, compressed", "torch bf16")


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
    """Runs are compared with those of the same length, on the same device, from the same weights."""
    return line["steps"], line["device"], line.get("begin")


def read(folder):
    """{task: {row: ([runs by seed], its times or {})}}, rows in the order of the harness. Of a task that was set up
    anew only what came last counts, of times the later, and of several runs of one seed their mean."""
    tasks = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in lines_of(path):
            tasks.setdefault(line["task"], []).append(line)
    found = {}
    for task, lines in tasks.items():
        rows, runs = {}, [line for line in lines if line.get("seed") is not None]
        steps, device, begin = setup(runs[-1] if runs else lines[-1])
        for line in sorted(lines, key=lambda line: line["place"]):
            start = begin if line.get("seed") is None else line.get("begin")  # times are the same from any weights
            if (*setup(line)[:2], start) == (steps, device, begin):
                rows.setdefault(line["row"], {}).setdefault(line.get("seed"), []).append(line)
        kept = {
            row: ([joined(runs[seed]) for seed in sorted(runs.keys() - {None})], runs.get(None, [{}])[-1])
            for row, runs in rows.items()
        }
        kept = {row: both for row, both in kept.items() if both[0]}
        if REFERENCE in kept:  # a table without it says nothing
            found[task] = kept
            lead = next(iter(kept[REFERENCE][0][0]["metrics"]))
            for run in (run for runs, _ in kept.values() for run in runs):
                run["lead"], run["last"] = run["metrics"][lead], last_of(run["losses"])
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


def mean(values):
    values = list(values)
    if None in values:
        return "not a number"
    return f"{statistics.mean(values):.4f}" + (f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else "")


def gaps_of(name, rows, key="lead", reference=REFERENCE):
    """To the reference of the same seed."""
    exact = {run["seed"]: run[key] for run in rows[reference][0]}
    found = [(run[key], exact[run["seed"]]) for run in rows[name][0] if run["seed"] in exact]
    return [] if any(None in pair for pair in found) else [a - b for a, b in found]


def gap(name, rows):
    """With the error of the mean."""
    gaps = gaps_of(name, rows)
    error = f" ± {statistics.stdev(gaps) / math.sqrt(len(gaps)):.4f}" if len(gaps) > 1 else ""
    return f"{statistics.mean(gaps):+.4f}{error}" if gaps else ""


def share(name, rows, key):
    """The gap in per cent of the reference's."""
    gaps = gaps_of(name, rows, key)
    exact = statistics.mean(run[key] for run in rows[REFERENCE][0])
    return f"{100 * statistics.mean(gaps) / exact:+.2f} %" if gaps else ""


def markdown(head, lines, texts=1):
    """A table whose first `texts` columns are words, the others numbers."""
    rule = ["---"] * texts + ["---:"] * (len(head) - texts)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


def table(rows):
    metrics = list(rows[REFERENCE][0][0]["metrics"])
    columns = {}  # {title: {row: cell}}

    def put(title, row, cell):
        columns.setdefault(title, {})[row] = cell

    for name, (runs, times) in rows.items():
        put("row (seeds)", name, f"{name} ({len(runs)})")
        put(metrics[0], name, mean(run["lead"] for run in runs))
        put("gap to fp32", name, "" if name == REFERENCE else gap(name, rows))
        for metric in metrics[1:]:
            put(metric, name, mean(run["metrics"][metric] for run in runs))
        put("training loss", name, mean(run["last"] for run in runs))
        put("gap", name, "" if name == REFERENCE else share(name, rows, "last"))
        parts = [runs[-1]["bytes"][kind] for kind in ("weights", "state", "gradients")]
        detail = " + ".join("?" if part is None else f"{part:.2f}" for part in parts)
        whole = "" if None in parts else f"{sum(parts):.2f}: "
        put("bytes per parameter: weights + state + gradients", name, whole + detail)
        if "peak_gib" in times:
            put("peak memory, GiB", name, f"{times['peak_gib']:{PEAK}}")
        if times:
            inside = f" ({times['ms_optimizer']:.2f})" if "ms_optimizer" in times else ""
            put("ms per step (its optimizer)", name, f"{times['ms']:.2f}{inside}")
        last = [run["errors"][-1] for run in runs if run["errors"]]
        for key, title in ERRORS.items():
            seen = [error[key] for error in last if error.get(key) is not None]
            if seen:
                put(title, name, f"{100 * statistics.mean(seen):.1f} %")
    columns.update({title: columns.pop(title) for title in ERRORS.values() if title in columns})  # the last ones
    return markdown(list(columns), [[cells.get(row, "") for cells in columns.values()] for row in rows])


def summary(tasks):
    """Of each task with a scruple row: what a reader asks first."""
    head = ("task", "metric", "torch fp32 (seeds)", "gap of `scruple`", "in per cent", "of the training loss")
    head += ("bytes per parameter", "peak memory, GiB", "ms per step")
    lines = []
    for task, rows in tasks.items():
        if "scruple" not in rows:
            continue
        (exact, times), (ours, our_times) = rows[REFERENCE], rows["scruple"]
        metric = next(iter(exact[0]["metrics"]))
        cells = [task, metric + ", more is better" * (metric in MORE_IS_BETTER)]
        pairs = len(gaps_of("scruple", rows))
        cells += [f"{mean(run['lead'] for run in exact)} ({len(exact)})", f"{gap('scruple', rows)} ({pairs})"]
        cells += [share("scruple", rows, key) for key in ("lead", "last")]
        cells += [" → ".join(f"{sum(runs[-1]['bytes'].values()):.2f}" for runs in (exact, ours))]
        for name, form in (("peak_gib", PEAK), ("ms", ".2f")):
            known = name in times and name in our_times
            cells += [" → ".join(f"{kept[name]:{form}}" for kept in (times, our_times)) if known else ""]
        lines.append(cells)
    return markdown(head, lines, texts=2)


def shown(tasks):
    """By the rules of PROTOCOL.md: rows beside `mixed`, gaps above 0 where they are worse."""
    head = ("task", "row", "verdict", "pairs", "gap to `mixed`, % of the metric", "95 % interval", "pairs that decide")
    lines = []
    for task, rows in tasks.items():
        for name in (name for name in JUDGED if name in rows and EXACT in rows):
            metric = next(iter(rows[EXACT][0][0]["metrics"]))
            gaps = [-x if metric in MORE_IS_BETTER else x for x in gaps_of(name, rows, reference=EXACT)]
            if not gaps:  # one of them is not finite
                lines.append((task, name, "worse: diverged", str(len(rows[name][0])), "", "", ""))
                continue
            exact = statistics.mean(run["lead"] for run in rows[EXACT][0])
            found, gap_, half, needed = verdicts.verdict(gaps, exact)
            ends = "" if half is None else " .. ".join(f"{100 * x / abs(exact):+.3g}" for x in (gap_ - half, gap_ + half))
            cells = (f"{100 * gap_ / abs(exact):+.3g}", ends, "" if needed is None else str(needed))
            lines.append((task, name, found, str(len(gaps)), *cells))
    return markdown(head, lines, texts=3)


def memory(tasks):
    """Beside mixed precision with a master copy, of each task that has it: bytes per parameter, and peaks."""
    rows_of = ("mixed", "scruple", "scruple, released", "scruple, compressed")
    head = ("task", "state: `mixed`", "`scruple`", "with weights and gradients: `mixed`", "`scruple`", "released")
    head += ("compressed", "peak, GiB: `mixed`", "`scruple`", "released", "compressed")
    lines = []

    def cells(values, form):
        """With what each is below the first."""
        first, *others = values
        lower = [f"{value:{form}} (-{100 * (1 - value / first):.0f} %)" if first and value else "" for value in others]
        return [f"{first:{form}}" if first else "", *lower]

    for task, rows in tasks.items():
        if "mixed" not in rows or "scruple" not in rows:
            continue
        found = [rows.get(name, ([], {})) for name in rows_of]
        kept = [runs[-1]["bytes"] if runs else None for runs, _ in found]
        peaks = [times.get("peak_gib") for _, times in found]
        line = [task, *cells([each["state"] for each in kept[:2]], ".2f")]
        line += cells([each and sum(each.values()) for each in kept], ".2f")
        lines.append(line + cells(peaks, PEAK))
    return markdown(head, lines)


def chart(title, curves, ends):
    """{name: [(x, y), ...]} as SVG; `ends` are what stands under the x axis. Who is far above the reference leaves it."""
    width, height, left, right, top, bottom = 760, 300, 50, 210, 16, 34
    points = [point for curve in curves.values() for point in curve if point[1] is not None]
    across = [x for x, _ in points]
    every = sorted(y for _, y in points)
    first, reach = min(across), (max(across) - min(across)) or 1.0
    exact = [y for _, y in curves[REFERENCE]]
    low, high = every[0], min(every[-max(1, len(every) // 50)], max(exact) + max(0.5 * (max(exact) - every[0]), 1.0))
    span = (high - low) or 1.0

    def place(x, y):
        across = left + (width - left - right) * (x - first) / reach
        return f"{across:.1f},{top + (height - top - bottom) * (1 - (min(y, high) - low) / span):.1f}"

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f"<title>{html.escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for share in (0.0, 0.5, 1.0):
        y = top + (height - top - bottom) * (1 - share)
        out.append(f'<path d="M{left} {y:.1f}H{width - right}" stroke="#dddddd"/>')
        out.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{low + share * span:.3f}</text>')
    out.append(f'<text x="{left}" y="{height - 10}">{ends[0]}</text>')
    out.append(f'<text x="{width - right}" y="{height - 10}" text-anchor="end">{ends[1]}</text>')
    for i, (name, curve) in enumerate(curves.items()):
        line = " ".join(place(x, y) for x, y in curve if y is not None)
        thick = 3.5 if name == REFERENCE else 1.5  # seen under those that cover it
        out.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[i]}" stroke-width="{thick}"/>')
        y = top + 14 + 18 * i
        out.append(f'<path d="M{width - right + 10} {y - 4}h18" stroke="{COLOURS[i]}" stroke-width="3"/>')
        out.append(f'<text x="{width - right + 34}" y="{y}">{html.escape(name)}</text>')
    return "\n".join([*out, "</svg>", ""])


def picture(task, rows):
    """Where rows are numbers of bits, the metric against them; else training losses of the first seed."""
    bits = {}
    for name, (runs, _) in rows.items():
        if found := re.fullmatch(r"(\d+) bits, (\w+)", name):
            bits.setdefault(found[2], []).append((int(found[1]), statistics.mean(run["lead"] for run in runs)))
    if bits:
        most = max(x for curve in bits.values() for x, _ in curve)
        exact = statistics.mean(run["lead"] for run in rows[REFERENCE][0])
        return chart(f"{task}: loss against bits", {REFERENCE: [(0, exact), (most, exact)], **bits}, ("0 bits", f"{most}"))
    drawn = [name for name in DRAWN if name in rows]
    drawn = drawn if len(drawn) > 2 else list(rows)[: len(COLOURS)]
    curves = {name: list(enumerate(rows[name][0][0]["losses"])) for name in drawn}
    steps = rows[REFERENCE][0][0]["steps"]
    return chart(f"{task}: training loss", curves, ("step 0", f"{steps:,}"))


def main():
    page = HERE / "README.md"
    text = before = page.read_text()
    tasks, pictures = read(HERE / "lines"), {}

    def put(place, made):
        nonlocal text
        begin, end = f"<!-- {place} -->\n", "<!-- end -->"
        if begin not in text:
            sys.exit(f"evidence/README.md has no place for {place!r}: add the lines {begin.strip()} and {end}")
        head, _, rest = text.partition(begin)
        text = head + begin + made + end + rest.partition(end)[2]

    for task, rows in tasks.items():
        name = re.sub(r"[^a-z0-9]+", "-", task.lower()).strip("-")
        run = rows[REFERENCE][0][0]
        dates = {line["date"] for runs, times in rows.values() for line in (*runs, times) if line}
        when = " to ".join(dict.fromkeys((min(dates), max(dates))))
        facts = f"{run['parameters']:,} parameters, {run['steps']:,} steps, {run['device']}, torch {run['torch']}, {when}"
        sheets = "".join(
            f"\n{sheet.stem.partition('-')[2].replace('-', ' ')}:\n\n![Samples](pictures/{sheet.name})\n"
            for sheet in sorted((HERE / "pictures").glob("gan-*.svg") if task.startswith("gan,") else [])
            if sheet.stem != name
        )
        put(task, f"{facts}.\n\n{table(rows)}\n\n![What the rows did](pictures/{name}.svg)\n{sheets}")
        pictures[HERE / "pictures" / f"{name}.svg"] = picture(task, rows)
    put("summary", summary(tasks) + "\n")
    put("memory", memory(tasks) + "\n")
    put("verdicts", shown(tasks) + "\n")
    if "--check" in sys.argv[1:]:
        stale = [path for path, svg in pictures.items() if not path.exists() or path.read_text() != svg]
        if text != before or stale:
            sys.exit("evidence/README.md or its pictures are not what the lines say: run python evidence/report.py")
        return
    page.write_text(text)
    for path, svg in pictures.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(svg)


if __name__ == "__main__":
    main()
