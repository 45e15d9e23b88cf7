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
    """{task: {row: [runs]}}, in the order in which they came."""
    tasks = {}
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            tasks.setdefault(line["task"], {}).setdefault(line["row"], []).append(line)
    return tasks


def spread(values):
    return statistics.stdev(values) if len(values) > 1 else 0.0


def table(rows):
    metrics = list(next(iter(rows.values()))[0]["metrics"])
    lead = metrics[0]
    head = [lead, "gap to fp32", *metrics[1:], "training loss", "bytes per parameter: weights + state + gradients", "ms per step"]
    head += ["update off by", "sqrt(v) off by 1.5 x"]
    out = ["| row (seeds) | " + " | ".join(head) + " |", "| --- |" + " ---: |" * len(head)]
    reference = {run["seed"]: run["metrics"][lead] for run in rows.get(REFERENCE, [])}
    for name, runs in rows.items():
        values = {metric: [run["metrics"][metric] for run in runs] for metric in metrics}
        cells = [f"{name} ({len(runs)})"]
        for metric in metrics:
            cells.append(f"{statistics.mean(values[metric]):.4f} ± {spread(values[metric]):.4f}")
        gaps = [run["metrics"][lead] - reference[run["seed"]] for run in runs if run["seed"] in reference]
        gap = ""
        if name != REFERENCE and gaps:
            gap = f"{statistics.mean(gaps):+.4f} ± {spread(gaps) / math.sqrt(len(gaps)):.4f}"
        cells.insert(2, gap)
        last = [statistics.mean(run["losses"][-len(run["losses"]) // 10 :]) for run in runs]
        cells.append(f"{statistics.mean(last):.4f} ± {spread(last):.4f}")
        kept = runs[-1]["bytes"]
        parts = [kept["weights"], kept["state"], kept["gradients"]]
        cells.append(f"{sum(parts):.2f}: " + " + ".join(f"{part:.2f}" for part in parts))
        cells.append(f"{statistics.median(run['ms'] for run in runs):.2f}")
        last = [run["errors"][-1] for run in runs if run["errors"]]
        for key in ("relative", "far"):
            cells.append(f"{100 * statistics.mean(error[key] for error in last):.1f} %" if last else "")
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out)


def picture(task, rows):
    """Training losses of the first seed, as SVG."""
    width, height, left, top, bottom = 720, 300, 50, 16, 34
    curves = {name: rows[name][0]["losses"] for name in DRAWN if name in rows}
    every = [loss for losses in curves.values() for loss in losses if math.isfinite(loss)]
    low, high = min(every), sorted(every)[-max(1, len(every) // 50)]
    span = (high - low) or 1.0

    def place(i, count, loss):
        x = left + (width - left - 170) * i / max(1, count - 1)
        y = top + (height - top - bottom) * (1 - (min(loss, high) - low) / span)
        return f"{x:.1f},{y:.1f}"

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f"<title>{html.escape(task)}: training loss</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for share in (0.0, 0.5, 1.0):
        y = top + (height - top - bottom) * (1 - share)
        out.append(f'<path d="M{left} {y:.1f}H{width - 170}" stroke="#dddddd"/>')
        out.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{low + share * span:.3f}</text>')
    steps = next(iter(rows.values()))[0]["steps"]
    out.append(f'<text x="{left}" y="{height - 10}">step 0</text>')
    out.append(f'<text x="{width - 170}" y="{height - 10}" text-anchor="end">{steps:,}</text>')
    for i, (name, losses) in enumerate(curves.items()):
        points = " ".join(place(k, len(losses), loss) for k, loss in enumerate(losses) if math.isfinite(loss))
        out.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[i]}" stroke-width="1.5"/>')
        y = top + 14 + 18 * i
        out.append(f'<path d="M{width - 160} {y - 4}h18" stroke="{COLOURS[i]}" stroke-width="3"/>')
        out.append(f'<text x="{width - 136}" y="{y}">{html.escape(name)}</text>')
    return "\n".join([*out, "</svg>", ""])


def main():
    page = HERE / "README.md"
    text = before = page.read_text()
    pictures = {}
    for task, rows in read(HERE / "lines").items():
        name = re.sub(r"[^a-z0-9]+", "-", task.lower()).strip("-")
        pictures[HERE / "pictures" / f"{name}.svg"] = picture(task, rows)
        run = next(iter(rows.values()))[0]
        made = (
            f"{run['parameters']:,} parameters, {run['steps']:,} steps, {run['device']}, torch {run['torch']}, "
            f"{run['date']}.\n\n{table(rows)}\n\n![Training loss](pictures/{name}.svg)\n"
        )
        begin, end = f"<!-- {task} -->\n", "<!-- end -->"
        if begin not in text:
            sys.exit(f"evidence/README.md has no place for {task!r}: add the lines {begin.strip()} and {end}")
        head, _, rest = text.partition(begin)
        text = head + begin + made + end + rest.partition(end)[2]
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
