"""The pictures of evidence/ as SVG: the forest of gaps, and curves of a task, in the reader's light or dark colours."""

import html
import re
import statistics

import gather

DRAWN = (gather.REFERENCE, "scruple", "scant", "flash", "scruple, compressed", gather.PURE)
LIGHT = "#fff #1f2328 #d0d7de #dff3e4 #1f2328 #0969da #bc4c00 #1a7f37 #bf3989 #9a6700 #218bff #8c6d31".split()
DARK = "#0d1117 #e6edf3 #3d444d #12331f #e6edf3 #58a6ff #f0883e #3fb950 #f778ba #d29922 #a5d6ff #c9a66b".split()
NAMES = ("ground", "ink", "rule", "band", *"abcdefgh")


def scheme(colours):
    return "svg{" + "".join(f"--{name}:{colour};" for name, colour in zip(NAMES, colours)) + "}"


STYLE = f"<style>\n{scheme(LIGHT)}\n@media (prefers-color-scheme:dark){{{scheme(DARK)}}}\ntext{{fill:var(--ink)}}\n</style>"
COLOURS = tuple(f"var(--{letter})" for letter in "abcdefgh")
OURS, PEERS, CONTROL = "var(--b)", "var(--c)", "var(--e)"
REACH = 2.0  # per cent, to both sides
MARGIN = 0.3
FOREST = {OURS: "ours", PEERS: "peers", CONTROL: "pure bf16, which a task should find worse"}
ABLATION = {OURS: "stochastic", PEERS: "one part alone, or another rate", CONTROL: "nearest"}
PANEL, LABEL, LINE, HEAD = 480, 132, 13, 19  # widths of a panel and its names, heights of a row and a task's name
WIDE = PANEL - LABEL - 54  # of the axis


def svg(title, width, height, parts, size=12):
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
    head += f'font-size="{size}">'
    ground = f'<rect width="{width}" height="{height}" fill="var(--ground)"/>'
    return "\n".join([head, f"<title>{html.escape(title)}</title>", STYLE, ground, *parts, "</svg>", ""])


def marker(x, y, colour, filled):
    shapes = {
        OURS: f'<circle cx="{x:.1f}" cy="{y}" r="3.4"',
        PEERS: f'<path d="M{x - 3:.1f} {y - 3}h6v6h-6z"',
        CONTROL: f'<path d="M{x:.1f} {y - 4.2:.1f}l4.2 4.2l-4.2 4.2l-4.2 -4.2z"',
    }
    return f'{shapes[colour]} fill="{colour if filled else "var(--ground)"}" stroke="{colour}" stroke-width="1.4"/>'


def interval(gap, colour, left, y):
    """A line from end to end of what fits, an arrow where it goes on, and the mean."""
    half = WIDE / 2
    out, zero = [], left + LABEL + half

    def place(value):
        return zero + half * max(-REACH, min(REACH, value)) / REACH

    if gap.mean is None:
        return [f'<text x="{place(REACH) + 4:.1f}" y="{y + 3.5}" font-size="9.5">diverged</text>']
    low, high = gap.ends() or (gap.mean, gap.mean)
    out.append(f'<path d="M{place(low):.1f} {y}H{place(high):.1f}" stroke="{colour}" stroke-width="1.4"/>')
    for beyond, sign in ((low < -REACH, -1), (high > REACH, 1)):
        if beyond:
            x = place(sign * REACH)
            out.append(f'<path d="M{x + 4 * sign:.1f} {y}l{-6 * sign} -3.2v6.4z" fill="{colour}"/>')
    if abs(gap.mean) <= REACH:
        out.append(marker(place(gap.mean), y, colour, gap.verdict != "not shown"))
    else:
        out.append(f'<text x="{place(REACH) + 7:.1f}" y="{y + 3.5}" font-size="9.5">{gap.mean:+#.3g} %</text>')
    return out


def forest(tasks, kinds, legend, reference):
    """`tasks`: [(name, is sighted, [(row, Gap)])]; `kinds`: {row: colour}; `legend`: {colour: what it stands for}. Two
    panels, filled one after the other."""
    heights = [HEAD + LINE * len(rows) for _, _, rows in tasks]
    panels, used = [[], []], 0
    for task, height in zip(tasks, heights):
        panels[used + height / 2 > sum(heights) / 2].append(task)
        used += height
    top = 40
    bottom = top + max(sum(HEAD + LINE * len(rows) for _, _, rows in panel) for panel in panels)
    parts = []
    x = 10
    for colour, text in legend.items():
        parts += [marker(x, 14, colour, True), f'<text x="{x + 9}" y="18">{text}</text>']
        x += 26 + 6.3 * len(text)
    parts.append(f'<rect x="{x}" y="8" width="14" height="12" fill="var(--band)" stroke="var(--rule)"/>')
    parts.append(f'<text x="{x + 19}" y="18">within {MARGIN} %. Hollow: not shown. Faint task: blind</text>')
    half = WIDE / 2
    for i, panel in enumerate(panels):
        left = i * PANEL
        zero = left + LABEL + half
        end = top + sum(HEAD + LINE * len(rows) for _, _, rows in panel)
        band = half * MARGIN / REACH
        parts.append(
            f'<rect x="{zero - band:.1f}" y="{top}" width="{2 * band:.1f}" height="{end - top}" fill="var(--band)"/>'
        )
        for tick in (-2, -1, 0, 1, 2):
            x = zero + half * tick / REACH
            parts.append(f'<path d="M{x:.1f} {top}V{end}" stroke="var(--rule)"/>')
            said = f"{tick:+d} %" if tick else "0"
            parts.append(f'<text x="{x:.1f}" y="{end + 14}" text-anchor="middle">{said}</text>')
        y = top
        for name, sees, rows in panel:
            parts.append(f'<g opacity="{1 if sees else 0.4}">')
            parts.append(f'<text x="{left + 6}" y="{y + 14}" font-weight="bold">{html.escape(name)}</text>')
            y += HEAD
            for row, gap in rows:
                middle = y + LINE / 2 - 0.5
                parts.append(
                    f'<text x="{left + LABEL - 6}" y="{middle + 3.5}" text-anchor="end" font-size="10.5">'
                    f"{html.escape(row)}</text>"
                )
                parts += interval(gap, kinds[row], left, middle)
                y += LINE
            parts.append("</g>")
    words = f"Gap to {reference} in per cent of the metric, mean and 95 % interval; above 0 is worse"
    parts.append(f'<text x="10" y="{bottom + 34}">{words}</text>')
    return svg(words, 2 * PANEL, bottom + 44, parts)


def chart(title, curves, ends):
    """{name: [(x, y), ...]}; `ends` are what stands under the x axis. Who is far above the first curve leaves it."""
    width, height, left, right, top, bottom = 760, 300, 50, 210, 16, 34
    points = [point for curve in curves.values() for point in curve if point[1] is not None]
    across = [x for x, _ in points]
    every = sorted(y for _, y in points)
    first, reach = min(across), (max(across) - min(across)) or 1.0
    exact = [y for _, y in next(iter(curves.values()))]
    low, high = every[0], min(every[-max(1, len(every) // 50)], max(exact) + max(0.5 * (max(exact) - every[0]), 1.0))
    span = (high - low) or 1.0

    def place(x, y):
        across = left + (width - left - right) * (x - first) / reach
        return f"{across:.1f},{top + (height - top - bottom) * (1 - (min(y, high) - low) / span):.1f}"

    out = []
    for share in (0.0, 0.5, 1.0):
        y = top + (height - top - bottom) * (1 - share)
        out.append(f'<path d="M{left} {y:.1f}H{width - right}" stroke="var(--rule)"/>')
        out.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{low + share * span:.3g}</text>')
    out.append(f'<text x="{left}" y="{height - 10}">{ends[0]}</text>')
    out.append(f'<text x="{width - right}" y="{height - 10}" text-anchor="end">{ends[1]}</text>')
    for i, (name, curve) in enumerate(curves.items()):
        line = " ".join(place(x, y) for x, y in curve if y is not None)
        thick = 3.5 if i == 0 else 1.5  # seen under those that cover it
        out.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[i]}" stroke-width="{thick}"/>')
        y = top + 14 + 18 * i
        out.append(f'<path d="M{width - right + 10} {y - 4}h18" stroke="{COLOURS[i]}" stroke-width="3"/>')
        out.append(f'<text x="{width - right + 34}" y="{y}">{html.escape(name)}</text>')
    return svg(title, width, height, out)


def curves(task, rows):
    """Where rows are numbers of bits, the metric against them; else training losses of the first seed."""
    metric, bits = next(iter(rows[next(iter(rows))][0][0]["metrics"])), {}

    def height(runs):
        values = [run["lead"] for run in runs]
        if None in values:
            return None
        return 100 - statistics.mean(values) if metric == "test accuracy" else statistics.mean(values)

    for name, (runs, _) in rows.items():
        if found := re.fullmatch(r"(\d+) bits, (\w+)", name):
            bits.setdefault(found[2], []).append((int(found[1]), height(runs)))
    across = [x for curve in bits.values() for x, _ in curve]
    if len({*across}) > 2:
        ends, exact = (min(across), max(across)), height(rows[gather.REFERENCE][0])
        lines = {gather.REFERENCE: [(x, exact) for x in ends], **{name: sorted(curve) for name, curve in bits.items()}}
        what = "error" if metric == "test accuracy" else "loss"
        return chart(f"{task}: {what} against bits", lines, (f"{ends[0]} bits", f"{ends[1]}"))
    drawn = [name for name in DRAWN if name in rows]
    drawn = drawn if len(drawn) > 2 else list(rows)[: len(COLOURS)]
    lines = {name: list(enumerate(rows[name][0][0]["losses"])) for name in drawn}
    steps = rows[drawn[0]][0][0]["steps"]
    return chart(f"{task}: training loss", lines, ("step 0", f"{steps:,}"))
