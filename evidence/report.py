"""Makes the tables and pictures of evidence/README.md from the lines that runs have left; nothing is typed by hand.

    python evidence/report.py [--check]     --check: fails where the page is not what the lines say
"""

import html
import json
import math
import pathlib
import re
import statistics
import sys

HERE = pathlib.Path(__file__).resolve().parent
REFERENCE = "torch fp32"
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31")
DRAWN = (REFERENCE, "scruple", "scant", "flash", "scruple, compressed", "torch bf16")


def read(folder):
    """{task: {row: ([runs], its times or {})}}, rows in the order of the harness."""
    tasks = {}
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            runs, times = tasks.setdefault(line["task"], {}).setdefault(line["row"], ([], {}))
            runs.append(line) if "seed" in line else times.update(line)
    found = {task: {row: kept for row, kept in rows.items() if kept[0]} for task, rows in tasks.items()}
    return {
        task: dict(sorted(rows.items(), key=lambda row: row[1][0][0]["place"]))
        for task, rows in found.items()
        if REFERENCE in rows  # a table without it says nothing
    }


def mean(values):
    values = list(values)
    if not all(map(math.isfinite, values)):
        return "not a number"
    return f"{statistics.mean(values):.4f}" + (f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else "")


def twin(run):
    """What a run shares with the reference that it is compared with."""
    return run["seed"], run.get("begin")


def gap(runs, reference):
    """To the reference of the same seed, with the error of the mean."""
    gaps = [run["lead"] - reference[twin(run)] for run in runs if twin(run) in reference]
    if not gaps or not all(map(math.isfinite, gaps)):
        return ""
    error = f" ± {statistics.stdev(gaps) / math.sqrt(len(gaps)):.4f}" if len(gaps) > 1 else ""
    return f"{statistics.mean(gaps):+.4f}{error}"


def table(rows):
    metrics = list(next(iter(rows.values()))[0][0]["metrics"])
    for runs, _ in rows.values():
        for run in runs:
            run["lead"] = run["metrics"][metrics[0]]
    reference = {twin(run): run["lead"] for run in rows[REFERENCE][0]}
    columns = {}  # {title: {row: cell}}

    def put(title, row, cell):
        columns.setdefault(title, {})[row] = cell

    for name, (runs, times) in rows.items():
        put("row (seeds)", name, f"{name} ({len(runs)})")
        put(metrics[0], name, mean(run["lead"] for run in runs))
        put("gap to fp32", name, "" if name == REFERENCE else gap(runs, reference))
        for metric in metrics[1:]:
            put(metric, name, mean(run["metrics"][metric] for run in runs))
        put("training loss", name, mean(statistics.mean(run["losses"][-len(run["losses"]) // 10 :]) for run in runs))
        parts = [runs[-1]["bytes"][kind] for kind in ("weights", "state", "gradients")]
        detail = " + ".join(f"{part:.2f}" for part in parts)
        put("bytes per parameter: weights + state + gradients", name, f"{sum(parts):.2f}: {detail}")
        if "peak_gib" in times:
            put("peak memory, GiB", name, f"{times['peak_gib']:.2f}")
        if times:
            put("ms per step (its optimizer)", name, f"{times['ms']:.2f} ({times['ms_optimizer']:.2f})")
        last = [run["errors"][-1] for run in runs if run["errors"]]
        for key, title in (("relative", "update off by"), ("far", "sqrt(v) off by 1.5 x")):
            if last and key in last[0]:
                put(title, name, f"{100 * statistics.mean(error[key] for error in last):.1f} %")
    out = ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
    out += ["| " + " | ".join(cells.get(row, "") for cells in columns.values()) + " |" for row in rows]
    return "\n".join(out)


def summary(tasks):
    """Of each task with a scruple row: what a reader asks first."""
    head = ("task", "metric", "torch fp32 (seeds)", "`scruple`: gap", "in per cent", "bytes per parameter", "peak memory, GiB", "ms per step")
    out = ["| " + " | ".join(head) + " |", "| --- | --- |" + " ---: |" * (len(head) - 2)]
    for task, rows in tasks.items():
        if "scruple" not in rows:
            continue
        (exact, times), (ours, our_times) = rows[REFERENCE], rows["scruple"]
        reference = {twin(run): run["lead"] for run in exact}
        gaps = [run["lead"] - reference[twin(run)] for run in ours if twin(run) in reference]
        cells = [task, list(exact[0]["metrics"])[0], f"{mean(run['lead'] for run in exact)} ({len(exact)})"]
        cells += [f"{gap(ours, reference)} ({len(ours)})"]
        cells += [f"{100 * statistics.mean(gaps) / statistics.mean(reference.values()):+.2f} %"]
        cells += [" → ".join(f"{sum(runs[-1]['bytes'].values()):.2f}" for runs in (exact, ours))]
        for name, digits in (("peak_gib", 2), ("ms", 2)):
            known = name in times and name in our_times
            cells += [" → ".join(f"{kept[name]:.{digits}f}" for kept in (times, our_times)) if known else ""]
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out)


def chart(title, curves, ends):
    """{name: [(x, y), ...]} as SVG; `ends` are what stands under the x axis. Who is far above the reference leaves it."""
    width, height, left, right, top, bottom = 760, 300, 50, 210, 16, 34
    points = [point for curve in curves.values() for point in curve if math.isfinite(point[1])]
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
        line = " ".join(place(x, y) for x, y in curve if math.isfinite(y))
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
        facts = f"{run['parameters']:,} parameters, {run['steps']:,} steps, {run['device']}, torch {run['torch']}, {run['date']}"
        put(task, f"{facts}.\n\n{table(rows)}\n\n![What the rows did](pictures/{name}.svg)\n")
        pictures[HERE / "pictures" / f"{name}.svg"] = picture(task, rows)
    put("summary", summary(tasks) + "\n")
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
