"""Makes the tables and pictures of evidence/README.md and evidence/tasks/ from the lines that runs have left; nothing in
them is typed by hand.

    python evidence/report.py [--check]     --check: fails where a page is not what the lines say
"""

import re
import statistics
import sys

import gather
import pictures
from gather import EXACT, HERE, PURE, REFERENCE, gap, sighted

KINDS = {
    **dict.fromkeys(("scruple", "scant", "flash"), pictures.OURS),
    **dict.fromkeys(("FlashOptim", "bitsandbytes 8-bit", "torchao 8-bit", "torchao 4-bit"), pictures.PEERS),
    PURE: pictures.CONTROL,
}
ERRORS = {"applied": "step off by, %", "far": "sqrt(v) off by 1.5 x, %"}
# (ms of AdamW's step on 1.1 B parameters, GiB at the peak of the 8 B iteration), stored gradients, as MEASURED has them.
MEASURED = "bench/results/2026-11-16-h200.md"
BENCH = {
    REFERENCE: ("9.410", "119.85"),
    EXACT: ("7.938", None),
    "scruple": ("3.981", "53.48"),
    "scant": ("3.924", None),
    "flash": ("4.930", None),
    "FlashOptim": ("10.121", "53.49"),
    "bitsandbytes 8-bit": ("37.453", "45.27"),
    "torchao 8-bit": ("120.632", "49.10"),
    "torchao 4-bit": ("94.582", "49.71"),
    PURE: (None, "59.99"),
}


def three(value, form=""):
    """Three significant digits; what is below 0.00005 is 0."""
    if value is None:
        return "–"
    if abs(value) < 5e-5:
        return "0"
    return f"{value:{form},.0f}" if abs(value) >= 99.95 else f"{value:{form}#.3g}"


def machine(device):
    return device.replace("NVIDIA ", "")


def markdown(head, lines, texts=1):
    """A table whose first `texts` columns are words, the others numbers."""
    rule = ["---"] * texts + ["---:"] * (len(head) - texts)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines)) + "\n"


def middle(values):
    values = list(values)
    return "not a number" if None in values else three(statistics.mean(values))


def ends(found):
    return "–" if found.half is None else "..".join(three(x, "+") for x in found.ends())


def cells(name, rows):
    """{title: cell} of a row of a task's table."""
    runs, times = rows[name]
    found, reference, judges = gap(name, rows), gather.reference_of(rows), gather.judges(rows)
    metrics = list(rows[reference][0][0]["metrics"])
    out = {"row": name, **({"seeds": str(len(runs))} if judges else {})}
    out[metrics[0]] = middle(run["lead"] for run in runs)
    if name != reference and found:
        out[f"gap to `{reference}`, %"] = three(found.mean, "+")
        out["95 % interval"] = ends(found)
        if judges:
            within = " ±2" * bool(found.within)
            out["gap, % of the gain"] = "–" if found.gained is None else three(found.gained, "+") + within
            out["verdict"] = found.verdict
    for metric in metrics[1:]:
        out[metric] = middle(run["metrics"][metric] for run in runs)
    parts = [runs[-1]["bytes"][kind] for kind in ("weights", "state", "gradients")]
    out["bytes"] = "–" if None in parts else three(sum(parts))
    if reference == EXACT and times:
        out["peak, GiB"], out["ms"] = three(times.get("peak_gib")), three(times["ms"])
    elif None not in (peaks := [run.get("peak_gib") for run in runs]):
        out["peak, GiB"] = three(statistics.mean(peaks))
    looks = [run["errors"][len(run["errors"]) // 2] for run in runs if run["errors"]]
    if shares := [look["unmoved"] for look in looks if "unmoved" in look]:
        out["unmoved, %"] = three(100 * statistics.mean(shares))
    last = [run["errors"][-1] for run in runs if run["errors"]]
    for key, title in ERRORS.items():
        seen = [error[key] for error in last if error.get(key) is not None]
        if seen and (key == "applied" or reference == REFERENCE):
            out[title] = three(100 * statistics.mean(seen))
    return out


def table(rows):
    """With the columns that any row fills, in the order of the row that has most of them. One verdict for all is said
    once."""
    found = [cells(name, rows) for name in rows]
    verdicts = {line["verdict"] for line in found if "verdict" in line}
    titles = list(max(found, key=len))
    titles += [title for line in found for title in line if title not in titles]
    titles = [title for title in titles if any(line.get(title, "–") != "–" for line in found)]
    if len(verdicts) == 1:
        titles.remove("verdict")
    said = f"Every verdict: {verdicts.pop()}.\n\n" if len(verdicts) == 1 else ""
    return said + markdown(titles, [[line.get(title, "–") for title in titles] for line in found])


def short(rows):
    """Of a machine that does not decide."""
    found = {name: gap(name, rows) for name in KINDS if name in rows}
    lines = [(name, str(each.pairs), three(each.mean, "+"), ends(each)) for name, each in found.items() if each]
    return markdown(("row", "pairs", f"gap to `{gather.reference_of(rows)}`, %", "95 % interval"), lines)


def facts(device, rows):
    runs = [run for runs, _ in rows.values() for run in runs]
    dates = {run["date"] for run in runs}
    when = " to ".join(dict.fromkeys((min(dates), max(dates))))
    run = runs[0]
    counts = dict.fromkeys(f(len(runs) for runs, _ in rows.values()) for f in (min, max))
    seeds = "" if gather.judges(rows) else f" {' or '.join(map(str, counts))} seeds."
    return f"{run['parameters']:,} parameters, {run['steps']:,} steps, {machine(device)}, torch {run['torch']}, {when}.{seeds}"


def slug(task):
    return re.sub(r"[^a-z0-9]+", "-", task.lower()).strip("-")


def of_task(task, places):
    """What stands on its page."""
    first = gather.deciding(places)
    rows = places[first]
    sheets = "".join(
        f"\n{sheet.stem.partition('-')[2].replace('-', ' ')}:\n\n![Samples](../pictures/{sheet.name})\n"
        for sheet in sorted((HERE / "pictures").glob("gan-*.svg") if task.startswith("gan,") else [])
        if sheet.stem != slug(task)
    )
    more = [device for device in places if {*places[device]} & {*KINDS} - {*rows}]  # it has rows that the first lacks
    others = "".join(f"\n{facts(device, places[device])}\n\n{short(places[device])}" for device in more)
    curves = f"![Training losses](../pictures/{slug(task)}.svg)"
    control = f"Found worse: `{gather.COARSE}`, {'yes' if sighted(rows) else 'no'}.\n\n" if gather.LPMM in rows else ""
    return f"{facts(first, rows)}\n\n{control}{table(rows)}\n{curves}\n{others}{sheets}"


def judged(tasks):
    """[(task, machine, rows)] of those that have exact steps beside the others."""
    found = [(task, device, places[device]) for task, places in tasks.items() for device in [gather.deciding(places)]]
    return [(task, device, rows) for task, device, rows in found if EXACT in rows and "scruple" in rows]


def forest(tasks):
    lines = []
    for task, device, rows in judged(tasks):
        gaps = [(name, gap(name, rows)) for name in KINDS if name in rows]
        most = max(found.pairs for _, found in gaps if found)
        name = f"{task} ({machine(device).split(',')[0].split('(')[0].strip()}, {most} pairs)"
        lines.append((name, sighted(rows), [(row, found) for row, found in gaps if found]))
    return pictures.forest(lines, KINDS, pictures.FOREST, "exact steps")


def ablation(tasks):
    """All rows of lpmm.py."""
    lines, kinds = [], {}
    for task, places in tasks.items():
        rows = places[gather.deciding(places)]
        if gather.LPMM in rows:
            gaps = [(name, gap(name, rows)) for name in rows if name != REFERENCE]
            lines.append((task.removeprefix("lpmm, "), sighted(rows), gaps))
            for name in rows:
                rounding = name.rpartition(", ")[2]
                colours = {"stochastic": pictures.OURS, "nearest": pictures.CONTROL}
                kinds[name] = colours.get(rounding, pictures.PEERS)
    return pictures.forest(lines, kinds, pictures.ABLATION, REFERENCE)


def optimizers(tasks):
    head = ("optimizer", "bytes per parameter", "equivalent", "worse", "better", "not shown", "worst mean gap, %")
    head += ("1.1 B step, ms", "8 B peak, GiB")
    tasks_of = judged(tasks)
    seeing = [rows for _, _, rows in tasks_of if sighted(rows)]
    lines = []
    for name in (EXACT, *KINDS):
        # The bytes of AdamW, of its largest model.
        kept = [rows[name][0][-1] for _, _, rows in tasks_of if name in rows]
        run = max((run for run in kept if run["bytes"]["state"] is not None), key=lambda run: run["parameters"])
        found = [gap(name, rows) for rows in seeing if name in rows] if name != EXACT else []
        words = [each.verdict.partition(":")[0] for each in found]
        counts = [str(words.count(word)) for word in head[2:6]] if found else ["–"] * 4
        means = [each.mean for each in found if each.mean is not None]
        cost = [three(None if value is None else float(value)) for value in BENCH[name]]
        star = "`" if KINDS.get(name, pictures.OURS) == pictures.OURS else ""
        size = three(sum(run["bytes"].values()))
        lines.append([f"{star}{name}{star}", size, *counts, three(max(means), "+") if means else "–", *cost])
    return markdown(head, lines)


def answer(tasks):
    """The sentence that the table comes to."""
    all_ = judged(tasks)
    seeing = [(task, gap("scruple", rows)) for task, _, rows in all_ if sighted(rows)]
    words = [found.verdict.partition(":")[0] for _, found in seeing]
    counts = ", ".join(f"{words.count(word)} {word}" for word in ("equivalent", "worse", "better", "not shown"))
    return f"{len(seeing)} of {len(all_)} tasks see pure bf16 fail. In these, `scruple` against exact steps: {counts}.\n"


def index(tasks, pages):
    lines = []
    for task, places in tasks.items():
        device = gather.deciding(places)
        rows, where = places[device], machine(device).split(",")[0]
        page = next(path for path, text in pages.items() if f"<!-- {task} -->" in text)
        link = f"[{task}]({page.relative_to(HERE)})"
        if EXACT not in rows or "scruple" not in rows:
            lines.append((link, where, "–", "–", "–", "–"))
            continue
        found = gap("scruple", rows)
        sees = "yes" if sighted(rows) else "no"
        lines.append((link, where, sees, str(found.pairs), three(found.mean, "+"), found.verdict))
    return markdown(("task", "machine", "sees pure bf16", "pairs", "gap of `scruple`, %", "verdict"), lines, texts=2)


def made(tasks, pages):
    """{path: what it should hold} of every page and picture."""
    parts = {task: of_task(task, places) for task, places in tasks.items()}
    parts |= {"answer": answer(tasks), "optimizers": optimizers(tasks), "index": index(tasks, pages)}
    found = dict(pages)
    for place, text in parts.items():
        begin, end = f"<!-- {place} -->\n", "<!-- end -->"
        path = next((path for path, page in found.items() if begin in page), None)
        if path is None:
            sys.exit(f"no page of evidence/ has a place for {place!r}: add the lines {begin.strip()} and {end} to one")
        head, _, rest = found[path].partition(begin)
        found[path] = head + begin + text + end + rest.partition(end)[2]
    folder = HERE / "pictures"
    found[folder / "forest.svg"] = forest(tasks)
    found[folder / "lpmm.svg"] = ablation(tasks)
    for task, places in tasks.items():
        found[folder / f"{slug(task)}.svg"] = pictures.curves(task, places[gather.deciding(places)])
    return found


def main():
    pages = {path: path.read_text() for path in (HERE / "README.md", *sorted((HERE / "tasks").glob("*.md")))}
    found = made(gather.read(HERE / "lines"), pages)
    stale = [path for path, text in found.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        if stale:
            names = ", ".join(str(path.relative_to(HERE.parent)) for path in stale)
            sys.exit(f"not what the lines say: {names}; run python evidence/report.py")
        return
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(found[path])


if __name__ == "__main__":
    main()
