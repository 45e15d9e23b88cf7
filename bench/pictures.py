"""Draws the README's pictures from kept results into docs/pictures/.

    python bench/pictures.py [--check]     --check: fails where a picture is not what the results say
"""

import csv
import html
import itertools
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS, PICTURES = ROOT / "bench/results", ROOT / "docs/pictures"
GIB = 2**30
PARAMETERS = 8_030_261_248

# Light and dark follow the reader's browser; colours are Okabe and Ito's, which colour-blind readers can tell apart.
STYLE = """<style>
  svg { font: 13px system-ui, sans-serif; fill: #1f2328; --page: #ffffff; --faint: #d1d9e0; --soft: #59636e; --ours: #0072b2; --other: #b45309;
    --weights: #0072b2; --master: #56b4e9; --moments: #009e73; --rest: #b7bec7; }
  @media (prefers-color-scheme: dark) { svg { fill: #e6edf3; --page: #0d1117; --faint: #3d444d; --soft: #9198a1; --ours: #58a6ff; --other: #f0a052;
    --weights: #388bfd; --master: #79c0ff; --moments: #3fb27f; --rest: #6e7681; } }
</style>"""

# Row of the results: (what the picture calls it, bytes per parameter of weights, of master weights or extra bits, of moments).
MEMORY = {
    "torch fused, fp32 + autocast": ("torch AdamW, fp32 with autocast", 4, 0, 8),
    "torch fused, pure bf16 (no master)": ("torch AdamW, bf16, no master weights", 2, 0, 4),
    "torchao 8-bit (no master)": ("torchao 8-bit, no master weights", 2, 0, 2),
    "bitsandbytes 8-bit (no master)": ("bitsandbytes 8-bit, no master weights", 2, 0, 2),
    "FlashAdamW, release": ("FlashOptim, released", 2, 1, 2),
    "scruple": ("Scruple", 2, 1, 2),
    "scruple, compressed, clip": ("Scruple, compressed, clipped", 2, 1, 2),
    "scruple, released": ("Scruple, released", 2, 1, 2),
    "scant, released": ("Scruple, scant, released", 2, 1, 1.625),
    "scruple, released, offload": ("Scruple, released, offload", 2, 0, 0),
}
KINDS = {"weights": "weights", "master": "extra bits", "moments": "moments", "rest": "gradients, activations, scales"}

# Column of the curves: (what the picture calls it, colour).
CURVES = {
    "bitsandbytes, torchao 8-bit nearest": ("bitsandbytes, torchao 8-bit", "other"),
    "`flash8` nearest": ("FlashOptim", "other"),
    "`companded8` nearest": ("our codes, rounded to nearest", "soft"),
    "`companded8` stochastic": ("Scruple", "ours"),
}


def svg(title, width, height, parts):
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    return "\n".join([head, f"<title>{html.escape(title)}</title>", STYLE,
                      f'<rect width="{width}" height="{height}" style="fill:var(--page)"/>', *parts, "</svg>", ""])


def text(x, y, words, anchor="start", style=""):
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" style="{style}">{html.escape(words)}</text>'


def peaks():
    """{optimizer: GiB at the peak}: tables of an 8.03 B iteration, each row measured with the others."""
    found = {}
    for day in ("2026-11-20", "2026-11-16"):  # where both have a row: the one with the peers
        lines = (RESULTS / f"{day}-h200.md").read_text().splitlines()
        first = next(i for i, line in enumerate(lines) if line.startswith("| optimizer | peak GiB | at rest GiB |"))
        for line in itertools.takewhile(lambda line: line.startswith("|"), lines[first + 2:]):
            name, peak, *_ = (cell.strip() for cell in line.strip("|").split("|"))
            found[name] = float(peak)
    return found


def memory():
    left, top, bar, scale, measured = 276, 62, 27, 3.6, peaks()
    parts = [text(10, 22, "A full fine-tuning step of an 8 B Llama: peak memory, GiB", style="font-weight:600")]
    for i, (kind, words) in enumerate(KINDS.items()):
        x = 10 + (0, 86, 180, 272)[i]
        parts += [f'<rect x="{x}" y="34" width="11" height="11" style="fill:var(--{kind})"/>', text(x + 16, 44, words, style="fill:var(--soft)")]
    for row, (name, (words, *bytes_each)) in enumerate(MEMORY.items()):
        peak, y, x = measured[name], top + row * bar, left
        sizes = [size * PARAMETERS / GIB for size in bytes_each]
        for kind, size in zip(KINDS, [*sizes, peak - sum(sizes)]):
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{size * scale:.1f}" height="18" style="fill:var(--{kind})"/>')
            x += size * scale
        bold = "font-weight:600" if words.startswith("Scruple") else ""
        parts += [text(left - 8, y + 14, words, "end", bold), text(x + 6, y + 14, f"{peak + 1e-9:.1f}", style=bold)]
    return svg("Peak memory of an 8 B fine-tune by optimizer", 770, top + len(MEMORY) * bar + 6, parts)


def following():
    with open(RESULTS / "2026-11-18-following.csv", newline="") as file:
        header, *rows = csv.reader(file)
    left, right, top, bottom, most = 46, 552, 66, 270, 1.0
    last = int(rows[-1][0])

    def at(step, error):
        return left + (right - left) * step / last, bottom - (bottom - top) * min(error, most) / most

    parts = [text(10, 22, "How far sqrt(v) is from the exact average, after a third of the gradients grows by 5", style="font-weight:600"),
             text(10, 42, "RMS of ln(sqrt(v) / exact), AdamW, beta2 0.999, 4,096 elements", style="fill:var(--soft)")]
    for error in (0, 0.25, 0.5, 0.75, 1):
        y = at(0, error)[1]
        parts += [f'<path d="M{left} {y:.1f}H{right}" style="stroke:var(--faint)"/>', text(left - 6, y + 4, f"{error:g}", "end", "fill:var(--soft)")]
    for step in range(0, last + 1, 2000):
        parts.append(text(at(step, 0)[0], bottom + 18, f"step {step:,}" if step == 0 else f"{step:,}", "middle", "fill:var(--soft)"))
    below = 0
    for name, (words, colour) in CURVES.items():
        points = [(int(row[0]), float(row[header.index(name)])) for row in rows]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
        wide, dashed = (3, "") if colour == "ours" else (1.6, "" if colour == "other" else ";stroke-dasharray:4 3")
        parts.append(f'<polyline points="{path}" style="fill:none;stroke:var(--{colour});stroke-width:{wide}{dashed}"/>')
        y = below = max(at(*points[-1])[1] + 4, below + 17)
        parts.append(text(right + 8, y, f"{words}, {points[-1][1]:.2f}", style=f"fill:var(--{colour})" + (";font-weight:600" if colour == "ours" else "")))
    return svg("Second moments beside the exact average", 800, bottom + 28, parts)


def main():
    pictures = {"memory.svg": memory(), "following.svg": following()}
    stale = [name for name, drawn in pictures.items() if not (PICTURES / name).exists() or (PICTURES / name).read_text() != drawn]
    if "--check" in sys.argv:
        sys.exit(f"docs/pictures: {', '.join(stale)} not as the results are; run bench/pictures.py" if stale else 0)
    for name in stale:
        (PICTURES / name).write_text(pictures[name])


if __name__ == "__main__":
    main()
