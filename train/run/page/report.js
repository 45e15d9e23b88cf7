// Draws a report from the JSON of its element "data": tables, bars, charts. What the reader sees is made here,
// from the data alone.
"use strict";
const report = JSON.parse(document.getElementById("data").textContent);

// ---- Elements. Text enters as text nodes and attributes only, so no name can become markup. ----

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
const tag = (name, attributes = {}, ...children) =>
    fill(document.createElement(name), attributes, children);
const shape = (name, attributes = {}, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
const words = (name, text, kind) => text ? [tag(name, kind ? {class: kind} : {}, text)] : [];

// ---- Numbers ----

const power_of = (v) => Math.floor(Math.log10(Math.abs(v)) + 1e-9);
// How all numbers of a column are written: with the decimals that give its middle one five digits or so, or
// all as powers of ten. The page keeps each whole number beside it, in `title`.
function column(values) {
  const sizes = values.filter((v) => v).map(Math.abs).sort((a, b) => a - b);
  const middle = sizes.length ? power_of(sizes[sizes.length >> 1]) : 0;
  const powers = middle < -3 || (sizes.length && power_of(sizes[sizes.length - 1]) >= 7);
  const digits = Math.max(0, 4 - Math.max(0, middle));
  return (v) => v === null ? "not finite" : powers ? v.toExponential(3) : group(v, digits);
}
const brief = (v) => column([v])(v);
const group = (v, digits) =>
    v.toLocaleString("en-US", {minimumFractionDigits: digits, maximumFractionDigits: digits});
const counted = (x) => x.toLocaleString("en-US");
const amount = (v) => v.toLocaleString("en-US", {maximumSignificantDigits: 4});

// A difference; one that rounds to zero is "+0.0000".
function signed(v, written) {
  const size = written(Math.abs(v));
  return (v < 0 && /[1-9]/.test(size.split("e")[0]) ? "-" : "+") + size;
}

// Round numbers between lo and hi: 1, 2 or 5 times a power of ten apart. `whole`: integers only.
function ticks(lo, hi, count, whole = false) {
  const rough = whole ? Math.max(1, (hi - lo) / count) : (hi - lo) / count, power = 10 ** power_of(rough);
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough * (1 - 1e-9));
  const digits = Math.max(0, -power_of(step)), list = [];
  for (let i = Math.ceil(lo / step - 1e-6); i * step <= hi + step * 1e-6; i++) list.push(i * step || 0);
  const largest = Math.max(Math.abs(lo), Math.abs(hi));
  const text = (v) => largest >= 1e9 || digits > 6 ? Number(v.toPrecision(4)).toExponential()
      : largest >= 1e5 && step >= 10 ?
          v.toLocaleString("en-US", {notation: "compact", maximumSignificantDigits: 6})
      : group(v, digits);
  return {list, text};
}

// ---- Tables ----

// The roles are spelled out because a row that is drawn as a card is no longer a table's row to the browser.
function draw_table(table) {
  const [head = [], ...body] = table.rows;
  const heading = (cell) => tag("th", {scope: "col", role: "columnheader"}, cell);
  const value = (cell, i) => i === 0 ? tag("th", {scope: "row", role: "rowheader"}, cell)
      : tag("td", {role: "cell", "data-heading": head[i]}, tag("span", {}, cell));
  const line = (cells, one) => tag("tr", {role: "row"}, ...cells.map(one));
  return tag("figure", {}, ...words("h3", table.title), ...words("p", table.note, "note"),
      tag("table", {role: "table", "aria-label": table.title || "table"},
          tag("thead", {role: "rowgroup"}, line(head, heading)),
          tag("tbody", {role: "rowgroup"}, ...body.map((row) => line(row, value)))));
}

// A table that is wider than the page becomes a card for each row, so that no column is out of sight.
function fit_tables() {
  for (const table of document.querySelectorAll("table")) {
    table.classList.remove("cards");
    table.classList.toggle("cards", table.offsetWidth > table.parentElement.clientWidth);
  }
}

// ---- Bars ----

const kinds = [];  // one colour for a kind all over the report
function hue_of(kind) {
  if (!kinds.includes(kind)) kinds.push(kind);
  const i = kinds.indexOf(kind);
  return `k${i % 8}` + (Math.floor(i / 8) % 2 ? " hatched" : "");
}

function draw_bars(bars) {
  const total = (row) => row.parts.reduce((sum, part) => sum + part.amount, 0);
  const longest = Math.max(...bars.rows.map(total)) || 1;
  const used = [...new Set(bars.rows.flatMap((row) => row.parts.map((part) => part.kind)))];
  const drawn = bars.rows.map((row) => {
    const parts = row.parts.map((part) => tag("div", {
      class: "part " + hue_of(part.kind), "data-kind": part.kind, "data-amount": part.amount,
      style: `width: ${100 * part.amount / longest}%`, title: `${part.kind}: ${part.amount} ${bars.unit}`
    }, amount(part.amount)));
    const spoken = row.parts.map((part) => `${part.kind} ${amount(part.amount)}`).join(", ");
    const label = `${row.name}: ${spoken}; ${amount(total(row))} ${bars.unit} in all`;
    return tag("div", {class: "row"}, tag("span", {class: "label"}, row.name),
        tag("div", {class: "bar", role: "img", "aria-label": label}, ...parts),
        tag("span", {class: "total"}, amount(total(row))));
  });
  const key = used.map((kind) => tag("li", {}, tag("span", {class: "chip " + hue_of(kind)}), kind));
  return tag("figure", {}, ...words("h3", bars.title), ...words("p", bars.note, "note"),
      tag("ul", {class: "key"}, ...key), tag("div", {class: "bars"}, ...drawn),
      ...words("p", bars.unit && `In ${bars.unit}; the total stands at the right.`, "readout"));
}

// A number that does not fit its part of the bar is left to the tooltip. `shrunk`: how much narrower than now
// the bars will be drawn.
function fit_bars(shrunk) {
  for (const part of document.querySelectorAll(".part"))
    part.classList.toggle("tight", part.offsetWidth * shrunk < 1.15 * breadth(part.textContent) + 6);
}

// ---- Charts ----

const names = [];  // one colour for a curve's name all over the report, while there are enough
for (const section of report.sections) for (const chart of section.charts) for (const curve of chart.curves)
  if (!chart.stacked && !curve.reference && !names.includes(curve.name)) names.push(curve.name);

function dress({curves, stacked}) {
  let own = 0;
  for (const curve of curves) {
    if (stacked) { curve.look = "c" + hue_of(curve.name).replace("hatched", "d1 pale").slice(1); continue; }
    if (curve.reference) { curve.look = "ink"; continue; }
    const i = names.length <= 16 ? names.indexOf(curve.name) : own++;
    const dash = Math.floor(i / 4) % 4;
    curve.look = `c${i % 8}` + (dash ? ` d${dash}` : "");
  }
}

// The first index whose x is not below the given one.
function lower_bound(x, value) {
  let lo = 0, hi = x.length;
  while (lo < hi) { const mid = (lo + hi) >> 1; if (x[mid] < value) lo = mid + 1; else hi = mid; }
  return lo;
}
function nearest(x, value) {
  const i = lower_bound(x, value);
  if (i === 0) return 0;
  return i < x.length && x[i] - value < value - x[i - 1] ? i : i - 1;
}

// What a panel shows of y: all curves but those that ran away, which would press the others into a line. They
// leave the frame, and the panel says so. The whole run's frame reaches twice a typical curve's height or
// three times its size beyond it; the close view's, three times the height or the distance between curves,
// and nowhere further than the whole run's. A stack stands on 0, whole.
function frame(chart, x0, x1, whole) {
  const all = [];
  for (const curve of chart.curves) {
    let lo = Infinity, hi = -Infinity;
    for (let i = lower_bound(curve.x, x0); i < curve.x.length && curve.x[i] <= x1; i++)
      if (curve.y[i] !== null) { lo = Math.min(lo, curve.y[i]); hi = Math.max(hi, curve.y[i]); }
    if (lo <= hi) all.push({curve, lo, hi});
  }
  const levels = chart.levels.filter((level) => level.value !== null).map((level) => level.value);
  if (chart.stacked) {
    const most = Math.max(0, ...all.map((s) => s.hi)), near = levels.filter((v) => v < 1.6 * most);
    return {...padded(0, Math.max(most, ...near), []), lowest: 0};
  }
  if (!all.length) return padded(Math.min(...levels), Math.max(...levels), []);
  const sorted = (list) => list.sort((a, b) => a - b);
  const middle = (list) => sorted(list)[(list.length - 1) >> 1];
  const low = middle(all.map((s) => s.lo)), high = middle(all.map((s) => s.hi));
  const far = all.map((s) => Math.max(Math.abs(s.lo - low), Math.abs(s.hi - high)));
  const apart = sorted(far)[all.length >> 1];
  const reach = whole ? 3 * Math.max(high - low, apart)
      : Math.max(2 * (high - low), 3 * Math.max(Math.abs(low), Math.abs(high)));
  const bounds = whole || {lo: -Infinity, hi: Infinity};
  const inside = (s) => s.lo >= Math.max(low - reach, bounds.lo) && s.hi <= Math.min(high + reach, bounds.hi);
  const kept = all.some(inside) ? all.filter(inside) : all;
  const lo = Math.min(...kept.map((s) => s.lo)), hi = Math.max(...kept.map((s) => s.hi));
  const near = levels.filter((v) => v > lo - .6 * (hi - lo) && v < hi + .6 * (hi - lo));
  const below = near.some((v) => v < lo) ? .06 * (hi - lo) : 0;  // room for the name of a level under all
  const cut = all.filter((s) => !kept.includes(s) || s.lo < -kLargest || s.hi > kLargest);
  return {...padded(Math.min(lo, ...near) - below, Math.max(hi, ...near), cut), lowest: lo};
}
const kLargest = 1e300;  // a frame of larger values would have no finite height
function padded(lo, hi, cut) {
  if (!(lo <= hi)) return {lo: 0, hi: 1, cut};
  lo = Math.max(lo, -kLargest); hi = Math.min(hi, kLargest);
  const pad = Math.max(.04 * (hi - lo), 1e-6 * Math.abs(hi), 1e-300);
  return hi > lo ? {lo: lo - pad, hi: hi + pad, cut}
      : {lo: lo - (Math.abs(lo) * .05 || 1), hi: hi + (Math.abs(hi) * .05 || 1), cut};
}

// Of each pixel column the first, lowest, highest and last point: no extreme is lost, however long the run.
function thin(run, curve, at) {
  const kept = [];
  for (let i = 0; i < run.length;) {
    const column = Math.floor(at.x(curve.x[run[i]]));
    let low = i, high = i, j = i;
    for (; j < run.length && Math.floor(at.x(curve.x[run[j]])) === column; j++) {
      if (curve.y[run[j]] < curve.y[run[low]]) low = j;
      if (curve.y[run[j]] > curve.y[run[high]]) high = j;
    }
    kept.push(...[...new Set([i, low, high, j - 1])].sort((a, b) => a - b).map((k) => run[k]));
    i = j;
  }
  return kept;
}

// The close view's curve: means of so many neighbours, counted from the end, that two dozen are left. The
// batches' noise would hide what the view is for. A short curve stays as it is.
function averaged(curve, x0) {
  const first = lower_bound(curve.x, x0), size = Math.floor((curve.x.length - first) / 24);
  if (size < 3) return {...curve, size: 1};
  const mean = (list) => list.includes(null) ? null : list.reduce((sum, v) => sum + v / size, 0);
  const x = [], y = [];
  for (let end = curve.x.length; end - size >= first; end -= size) {
    x.unshift(mean(curve.x.slice(end - size, end)));
    y.unshift(mean(curve.y.slice(end - size, end)));
  }
  return {...curve, x, y, size};
}

// Each curve on top of those before it; its name goes beside the middle of its band.
function stack(curves) {
  const sums = curves.length ? curves[0].x.map(() => 0) : [];
  return curves.map((curve) => {
    const y = curve.y.map((amount, i) => sums[i] += amount), last = y.length - 1;
    return {...curve, y, middle: y[last] - curve.y[last] / 2};
  });
}

// Each from its curve down to the one before.
function draw_bands(curves, at, x0, x1, inside) {
  let under = [`${at.x(x1)},${at.y(0)}`, `${at.x(x0)},${at.y(0)}`];
  for (const curve of curves.filter((curve) => curve.x.length)) {
    const line = trace(curve, at, x0, x1).d.slice(1).split("L");
    inside.append(shape("path", {d: "M" + [...line, ...under].join("L") + "Z", class: "band " + curve.look,
        "data-name": curve.name}));
    under = line.reverse();
  }
}

// A curve's line, its lonely points, and a cross where it stops being finite.
function trace(curve, at, x0, x1) {
  const runs = [], gaps = [];
  const first = Math.max(0, lower_bound(curve.x, x0) - 1);
  let run = [];
  for (let i = first; i < curve.x.length && curve.x[i] <= x1; i++) {
    if (curve.y[i] !== null) { run.push(i); continue; }
    // What was not finite before an averaged curve's first point is no news here.
    if (curve.x[i] >= x0 && (i === 0 ? !(curve.size > 1) : curve.y[i - 1] !== null)) gaps.push(i);
    if (run.length) runs.push(run);
    run = [];
  }
  if (run.length) runs.push(run);
  const place = (i) => `${at.x(curve.x[i]).toFixed(1)},${at.y(curve.y[i]).toFixed(2)}`;
  const d = runs.map((r) => "M" + thin(r, curve, at).map(place).join("L")).join("");
  return {d, gaps, dots: runs.filter((r) => r.length === 1).map((r) => r[0])};
}

const pen = document.createElement("canvas").getContext("2d");
pen.font = "12px system-ui, sans-serif";
const breadth = (text) => pen.measureText(text).width;
function shortened(text, room) {
  if (breadth(text) <= room) return text;
  let letters = [...text];
  while (letters.length > 1 && breadth(letters.join("") + "…") > room) letters.pop();
  return letters.join("") + "…";
}

// One plot of [x0, x1]. `named`: with the curves' names at its right edge.
function panel(chart, width, height, x0, x1, named, heading, whole) {
  const {lo, hi, cut, lowest} = frame(chart, x0, x1, whole);
  const y_ticks = ticks(lo, hi, height / 40), x_ticks = ticks(x0, x1, width / 90, chart.counts);
  const longest = Math.max(0, ...chart.curves.map((curve) => breadth(curve.name)));
  const name_room = named ? Math.min(width * .3, longest) : 0;
  const left = 10 + Math.max(...y_ticks.list.map((v) => breadth(y_ticks.text(v))));
  const right = width - (named ? name_room + 26 : 18), top = heading ? 40 : 24, bottom = height - 36;
  const clamp = (v, a, b) => Math.min(b, Math.max(a, v));
  const at = {
    x: (v) => left + (v - x0) / (x1 - x0) * (right - left),
    y: (v) => clamp(bottom - (v - lo) / (hi - lo) * (bottom - top), -4 * height, 5 * height)
  };
  const root = shape("svg", {viewBox: `0 0 ${width} ${height}`, width, height, role: "img", tabindex: 0,
      "aria-label": `${heading || chart.title}. ${chart.spoken}`, "data-lo": lo, "data-hi": hi});
  const line = (xa, ya, xb, yb, kind) => shape("line", {x1: xa, y1: ya, x2: xb, y2: yb, class: kind});
  const text = (x, y, anchor, kind, value) =>
      shape("text", {x, y, "text-anchor": anchor, class: kind}, value);

  root.append(text(0, 12, "start", "heading", shortened(heading, width)));
  root.append(text(0, top - 11, "start", "", shortened(chart.y_label, width)));
  for (const v of y_ticks.list) root.append(line(left, at.y(v), right, at.y(v), "grid"),
      text(left - 6, at.y(v) + 4, "end", "", y_ticks.text(v)));
  for (const v of x_ticks.list) root.append(line(at.x(v), bottom, at.x(v), bottom + 4, "grid"),
      text(at.x(v), bottom + 16, "middle", "", x_ticks.text(v)));
  root.append(text((left + right) / 2, height - 4, "middle", "", shortened(chart.x_label, width)));

  const clip = "clip" + ++panel.count;
  const inside = shape("g", {"clip-path": `url(#${clip})`}), over = shape("g");
  root.append(shape("clipPath", {id: clip}, shape("rect", {x: left, y: top - 4, width: right - left + 4,
      height: bottom - top + 8})), inside, over);
  draw_levels(chart, {lo, hi, lowest, left, right}, at, inside, over, line, text);
  if (chart.stacked) draw_bands(chart.curves, at, x0, x1, inside);
  // The reference lies under the others, which would vanish behind its wider line.
  for (const curve of [...chart.curves].sort((a, b) => b.reference - a.reference)) {
    const {d, gaps, dots} = trace(curve, at, x0, x1);
    inside.append(shape("path", {d, class: "curve " + curve.look, "data-name": curve.name}));
    for (const i of dots) inside.append(shape("circle", {cx: at.x(curve.x[i]), cy: at.y(curve.y[i]), r: 3.5,
        class: "dot " + curve.look}));
    for (const i of gaps) over.append(gap_mark(curve, i, at, x0, clamp, top, bottom));
  }
  for (const {curve, hi: most} of cut)
    over.append(beyond_mark(curve, most > hi, at, {lo, hi, x0, top, bottom}));
  if (chart.curves.every((curve) => curve.y.every((y) => y === null)))
    over.append(text((left + right) / 2, top + 40, "middle", "", "no finite values"));
  if (named) draw_names(chart, at, {x0, x1, right, top, bottom, name_room}, root);
  const cross = shape("g", {class: "cross"});
  root.append(cross);
  return {root, at, x0, x1, lo, hi, left, right, top, bottom, width, cross, inside, cut,
      curves: chart.curves};
}
panel.count = 0;

function spoken(chart) {
  const end = (curve) => curve.y.length ? brief(curve.y[curve.y.length - 1]) : "has no points";
  const ends = chart.curves.map((curve) => `${curve.name} ${end(curve)}`);
  const levels = chart.levels.map((level) => `${level.name} ${brief(level.value)}`);
  return `${chart.y_label} against ${chart.x_label}. At the end: ${[...ends, ...levels].join(", ")}.`;
}

function draw_levels(chart, f, at, inside, over, line, text) {
  let last = Infinity;
  const seen = (level) => level.value !== null && level.value >= f.lo && level.value <= f.hi;
  for (const level of chart.levels.filter(seen).sort((a, b) => a.value - b.value)) {
    const y = at.y(level.value), label = Math.min(level.value < f.lowest ? y + 14 : y - 5, last - 14);
    const drawn = line(f.left, y, f.right, y, "level");
    drawn.setAttribute("data-level", level.name);
    inside.append(drawn);
    over.append(text(f.left + 6, label, "start", "halo", shortened(level.name, f.right - f.left - 12)));
    last = label;
  }
}

function gap_mark(curve, i, at, x0, clamp, top, bottom) {
  const before = i > 0 && curve.y[i - 1] !== null && curve.x[i - 1] >= x0 ? i - 1 : -1;
  const x = at.x(curve.x[before < 0 ? i : before]);
  const y = before < 0 ? top : clamp(at.y(curve.y[before]), top, bottom);
  return shape("path", {d: `M${x - 5},${y - 5}l10,10m0,-10l-10,10`, class: "gap " + curve.look.split(" ")[0],
      "data-gap": curve.name}, shape("title", {}, `${curve.name}: not finite at ${counted(curve.x[i])}`));
}

// A small triangle at the frame's edge, where a cut curve first leaves it.
function beyond_mark(curve, up, at, f) {
  let i = lower_bound(curve.x, f.x0);
  while (curve.y[i] === null || !(up ? curve.y[i] > f.hi : curve.y[i] < f.lo)) i++;
  const x = at.x(curve.x[i]), y = up ? f.top : f.bottom, s = up ? 1 : -1;
  return shape("path", {d: `M${x},${y - 7 * s}l6,${10 * s}h-12z`, class: "beyond " + curve.look.split(" ")[0],
      "data-beyond": curve.name}, shape("title", {}, `${curve.name} leaves the frame: ${curve.y[i]}`));
}

// The names stand beside the curves' ends, pushed apart where they would touch.
function draw_names(chart, at, f, root) {
  const list = [];
  for (const curve of chart.curves) {
    let i = curve.x.length - 1;
    while (i >= 0 && curve.y[i] === null) i--;
    if (i < 0 || curve.x[i] < f.x0) continue;
    const wanted = at.y(curve.middle ?? curve.y[i]), y = Math.min(f.bottom, Math.max(f.top, wanted));
    const mark = wanted < f.top - 1 ? "▲ " : wanted > f.bottom + 1 ? "▼ " : "";
    list.push({curve, x: at.x(curve.x[i]), y, label: y, name: mark + curve.name});
  }
  list.sort((a, b) => a.y - b.y);
  const apart = Math.min(14, (f.bottom - f.top + 12) / Math.max(1, list.length - 1));
  list.forEach((e, k) => { if (k) e.label = Math.max(e.label, list[k - 1].label + apart); });
  let limit = f.bottom + 6;
  for (const e of list.reverse()) { e.label = Math.min(e.label, limit); limit = e.label - apart; }
  for (const e of list) root.append(
      shape("path", {d: `M${e.x + 3},${e.y}L${f.right + 5},${e.y}L${f.right + 18},${e.label}`,
          class: "leader " + e.curve.look.split(" ")[0]}),
      shape("text", {x: f.right + 22, y: e.label + 4, class: "name"},
          shortened(e.name, f.name_room)));
}

// The key under a chart: a sample of each line, its name, its value and how far it is from the reference.
function legend(chart) {
  const sample = (look) => shape("svg", {width: 28, height: 8, "aria-hidden": "true"},
      shape("line", {x1: 1, x2: 27, y1: 4, y2: 4, class: look}));
  const entry = (look, name) => {
    const value = tag("span", {class: "number"}), apart = tag("span", {class: "number apart"});
    const item = tag("li", {"data-name": name}, sample(look), tag("span", {}, name), value, apart);
    return {value, apart, item};
  };
  const curves = chart.curves.map((curve) => ({curve, ...entry("sample curve " + curve.look, curve.name)}));
  const levels = chart.levels.map((level) => ({level, ...entry("level", level.name)}));
  const readout = tag("p", {class: "readout"});
  const list = tag("ul", {class: "legend"}, ...[...curves, ...levels].map((e) => e.item));
  return {readout, list, curves, levels};
}

// Writes the values at x, or the last ones where x is null.
function show_values(chart, key, x) {
  const reference = chart.curves.find((curve) => curve.reference);
  const index = (curve) => x === null ? curve.x.length - 1
      : !curve.x.length || x < curve.x[0] || x > curve.x[curve.x.length - 1] ? -1 : nearest(curve.x, x);
  const base = reference && index(reference);
  const where = x === null ? "At the end" : `At ${chart.x_label || "x"} ${counted(x)}`;
  key.readout.textContent = `${where}: ${chart.y_label || "value"}` +
      (reference && chart.curves.length > 1 ? `, and how far from ${reference.name}` : "");
  const found = key.curves.map(({curve}) => index(curve));
  const values = key.curves.map(({curve}, k) => found[k] < 0 ? undefined : curve.y[found[k]]);
  const written = column([...values, ...key.levels.map(({level}) => level.value)]);
  for (const {level, value} of key.levels) value.textContent = written(level.value);
  for (const [k, {curve, value, apart}] of key.curves.entries()) {
    const i = found[k], y = values[k];
    const elsewhere = i >= 0 && x !== null && curve.x[i] !== x;
    value.textContent = y === undefined ? "–" : written(y) + (elsewhere ? ` (at ${counted(curve.x[i])})` : "");
    value.title = y === undefined || y === null ? "" : y;
    const both = base >= 0 && i >= 0 && reference !== curve && reference.x[base] === curve.x[i];
    const other = both ? reference.y[base] : null;
    const gap = y === undefined || y === null || other === null ? null : y - other;
    apart.textContent = gap === null ? "" : signed(gap, written);
  }
}

// The line under the pointer, in every panel that shows this x. An averaged curve has no dot: the value shown
// is the one measured.
function point_at(chart, panels, key, x) {
  for (const p of panels) {
    p.cross.replaceChildren();
    if (x === null || x < p.x0 || x > p.x1) continue;
    const px = p.at.x(x), side = px > (p.left + p.right) / 2;
    p.cross.append(shape("line", {x1: px, x2: px, y1: p.top - 6, y2: p.bottom}),
        shape("text", {x: px + (side ? -5 : 5), y: p.top - 1, "text-anchor": side ? "end" : "start",
            class: "halo"}, counted(x)));
    for (const curve of p.curves) {
      const i = nearest(curve.x, x), y = curve.y[i];
      if (curve.size > 1 || curve.x[i] !== x || y === null) continue;
      const py = p.at.y(y), look = curve.look.split(" ")[0];
      if (py > p.top - 4 && py < p.bottom + 4)
        p.cross.append(shape("circle", {cx: px, cy: py, r: 3.5, class: "dot " + look}));
    }
  }
  key.x = x;
  show_values(chart, key, x);
}

// What a key does to the pointed index of `count`; -1: none is pointed at. Undefined: nothing.
function moved(pressed, at, count) {
  const leap = Math.max(1, Math.round(count / 10)), last = count - 1;
  const to = (i) => Math.min(last, Math.max(0, i));
  switch (pressed) {
    case "ArrowRight": return to(at + 1);
    case "ArrowLeft": return at < 0 ? last : to(at - 1);
    case "PageDown": return to(at + leap);
    case "PageUp": return at < 0 ? last : to(at - leap);
    case "Home": return 0;
    case "End": return last;
    case "Escape": return -1;
  }
}

function listen(chart, panels, key, p) {
  p.root.addEventListener("pointermove", (event) => {
    const box = p.root.getBoundingClientRect();
    const px = (event.clientX - box.left) * p.width / box.width;
    const wanted = p.x0 + (px - p.left) / (p.right - p.left) * (p.x1 - p.x0);
    const near = chart.curves.filter((c) => c.x.length).map((c) => c.x[nearest(c.x, wanted)])
        .filter((x) => x >= p.x0 && x <= p.x1);
    near.sort((a, b) => Math.abs(a - wanted) - Math.abs(b - wanted));
    if (near.length) point_at(chart, panels, key, near[0]);
  });
  // A finger that is lifted leaves the line where it was: there is nothing else to read the values by.
  p.root.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse") point_at(chart, panels, key, null);
  });
  p.root.addEventListener("keydown", (event) => {
    const all = new Set(chart.curves.flatMap((curve) => curve.x).filter((x) => x >= p.x0 && x <= p.x1));
    const steps = [...all].sort((a, b) => a - b);
    const to = moved(event.key, key.x === null ? -1 : lower_bound(steps, key.x), steps.length);
    if (to === undefined || !steps.length) return;
    event.preventDefault();
    point_at(chart, panels, key, to < 0 ? null : steps[to]);
  });
  p.root.addEventListener("blur", () => point_at(chart, panels, key, null));
}

const redraws = [];  // one function per chart, called with the width to draw in

function draw_chart(chart) {
  dress(chart);
  chart.spoken = spoken(chart);
  chart.counts = chart.curves.every((curve) => curve.x.every(Number.isInteger));
  const box = tag("div", {class: "panels"}), key = legend(chart), cut = tag("p", {class: "note"});
  const figure = tag("figure", {class: "chart" + (chart.small ? " small" : "")}, ...words("h3", chart.title),
      ...words("p", chart.note, "note"), box, cut, key.readout, key.list);
  let x0 = Infinity, x1 = -Infinity;
  for (const {x} of chart.curves.filter((curve) => curve.x.length)) {
    x0 = Math.min(x0, x[0]);
    x1 = Math.max(x1, x[x.length - 1]);
  }
  if (!(x0 <= x1)) { x0 = 0; x1 = 1; }
  if (x0 === x1) { x0 -= .5; x1 += .5; }
  const third = x1 - (x1 - x0) / 3;
  const closely = !chart.small && !chart.stacked && chart.curves.some((c) => c.x.length - lower_bound(c.x, third) >= 3);
  const whole = chart.stacked ? {...chart, curves: stack(chart.curves)} : chart;
  const late = {...chart, curves: chart.curves.map((curve) => averaged(curve, third))};
  const size = Math.max(...late.curves.map((curve) => curve.size));
  const heading = "The last third, closely" + (size > 1 ? `: means of ${group(size, 0)} points` : "");
  let panels = [];
  redraws.push((width) => {
    const wide = width >= 640 && (closely || chart.small);
    const each = wide ? Math.floor((width - 24) / 2) : width;
    const height = chart.small ? 200 : width >= 720 ? 340 : 250;
    const named = !closely && chart.curves.length > 1;
    panels = [panel(whole, each, height, x0, x1, named, chart.small ? "" : "The whole run")];
    if (closely) panels.push(panel(late, each, height, third, x1, true, heading, panels[0]));
    box.replaceChildren(...panels.map((p) => p.root));
    for (const p of panels) listen(chart, panels, key, p);
    cut.textContent = left_out(panels[0].cut, "the frame of the whole run") +
        (closely ? left_out(panels[1].cut, "the close view") : "");
    point_at(chart, panels, key, null);
  });
  for (const {item, curve} of key.curves) {
    const fade = (on) => panels.forEach((p) => p.inside.querySelectorAll(".curve, .band").forEach((path) =>
        path.classList.toggle("fade", on && path.dataset.name !== curve.name)));
    item.addEventListener("pointerenter", () => fade(true));
    item.addEventListener("pointerleave", () => fade(false));
  }
  return figure;
}
function left_out(cut, where) {
  const list = cut.map((s) => `${s.curve.name} (${brief(s.lo)} to ${brief(s.hi)})`);
  return list.length ? `▲ Outside ${where}: ${list.join(", ")}. ` : "";
}

// ---- The page ----

const page = document.getElementById("report");
page.append(tag("h1", {}, report.title), ...words("p", report.lead, "lead"));
for (const section of report.sections) page.append(tag("section", {}, ...words("h2", section.title),
    ...words("p", section.text), ...section.tables.map(draw_table), ...section.bars.map(draw_bars),
    tag("div", {class: "charts"}, ...section.charts.map(draw_chart))));
page.append(tag("footer", {},
    "This page is one file and loads nothing. Its numbers stand in it as JSON, with all digits."));

let drawn = 0;
function draw(width) {
  if (width === drawn) return;
  drawn = width;
  for (const redraw of redraws) redraw(width);
  fit_tables();
  fit_bars(Math.min(1, width / room()));
}
function room() {
  const style = getComputedStyle(page);
  return Math.floor(page.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight));
}
let printing = false;
draw(room());
new ResizeObserver(() => { if (!printing) requestAnimationFrame(() => draw(room())); }).observe(page);
// Paper is about this wide; the browser does not ask the script for another size.
addEventListener("beforeprint", () => { printing = true; draw(680); });
addEventListener("afterprint", () => { printing = false; draw(room()); });
