"""Opens reports in headless Chromium and holds the picture to the data inside each file.

    browser_test.py CHROMIUM FILE.html... [--screenshots DIR]

Every file is opened wide and narrow, light and dark, and printed. A console message, an exception, a
request, a curve that is not drawn, a bar of the wrong width, a cell that is missing or out of sight, two ways to
write numbers in one column, or anything wider than the page fails. So does a function of the script that none of
the files made run, and a declaration of the style sheet that the browser does not know. Exits with 77 (skipped) where CHROMIUM is not there. Needs Python's standard library only.
"""

import base64
import fcntl
import html.parser
import itertools
import json
import os
import pathlib
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time

SKIPPED = 77
VIEWS = [(1280, 900, "light"), (1280, 900, "dark"), (375, 740, "light"), (375, 740, "dark")]
SECONDS = 60


class Browser:
    """Chromium, driven by its DevTools protocol over two pipes: JSON messages, each ended by a zero byte."""

    def __init__(self, program, profile):
        to_browser, self.to = os.pipe()
        self.back, from_browser = os.pipe()
        # Chromium reads from descriptor 3 and writes to 4; move ours out of the way before they are placed.
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (to_browser, from_browser)]

        def place():
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
                 "--no-first-run", "--disable-dev-shm-usage", "--hide-scrollbars",
                 "--disable-background-networking", "--disable-component-update",
                 f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen([program, *flags], preexec_fn=place, pass_fds=(3, 4),
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for fd in (to_browser, from_browser, *ends):
            os.close(fd)
        self.next_id, self.buffer, self.events, self.session = 0, b"", [], None

    def read(self, deadline):
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.back], [], [], max(0, deadline - time.monotonic()))
            chunk = os.read(self.back, 1 << 20) if ready else b""
            if not chunk:
                raise RuntimeError("Chromium went silent; start it by hand with --headless to see why")
            self.buffer += chunk
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, **params):
        self.next_id += 1
        message = {"id": self.next_id, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.to, data):]
        deadline = time.monotonic() + SECONDS
        while True:
            answer = self.read(deadline)
            if answer.get("id") == self.next_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def open_tab(self):
        self.session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Profiler"):
            self.call(domain + ".enable")
        self.call("Profiler.startPreciseCoverage", callCount=True, detailed=False)
        self.events.clear()
        return target

    def close_tab(self, target):
        self.session = None
        self.call("Target.closeTarget", targetId=target)

    def evaluate(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"the test's own script failed: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def navigate(self, url):
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + SECONDS
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self.read(deadline))
        self.settle()

    def settle(self):
        """Two frames: the page redraws in the one after it was resized."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() =>"
                      " setTimeout(done, 30))))")

    def close(self):
        try:
            self.session = None
            self.call("Browser.close")
            self.process.wait(10)
        except (RuntimeError, OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()


class Page(html.parser.HTMLParser):
    """The file as text: the report's data, the document's head, and what would be loaded from elsewhere."""

    def __init__(self, text):
        super().__init__()
        self.inside, self.data, self.title, self.lang, self.metas, self.loads = None, "", "", None, [], []
        self.doctype = ""
        self.feed(text)
        self.report = json.loads(self.data)

    def handle_decl(self, decl):
        self.doctype = decl

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.inside = "data" if attrs.get("id") == "data" else tag
        if tag == "html":
            self.lang = attrs.get("lang")
        if tag == "meta":
            self.metas.append(attrs.get("name") or attrs.get("http-equiv") or "charset")
        for key in ("src", "href"):
            if key in attrs and not (attrs[key] or "").startswith("data:"):
                self.loads.append(attrs[key])

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside == "data":
            self.data += data
        if self.inside == "title":
            self.title += data


# What the browser made of the file, as plain values. Widths are fractions of the bar's own box.
COLLECT = r"""
(() => {
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  const numbers = (d) => (d.match(/-?[\d.]+(e-?\d+)?/g) || []).map(Number);
  const broken = all("svg *").filter((node) => [...node.attributes].some((a) => a.name !== "data-name" &&
      !a.name.startsWith("aria") && a.name !== "data-gap" && a.name !== "data-beyond" &&
      a.name !== "data-level" && /NaN|Infinity|undefined/.test(a.value)));
  // Whether a curve has points that the panel's frame cuts off.
  const leaves = (path) => {
    const box = path.closest("svg").querySelector("clipPath rect").getBBox();
    const d = numbers(path.getAttribute("d"));
    return d.some((y, i) => i % 2 && d[i - 1] >= box.x && d[i - 1] <= box.x + box.width &&
        (y < box.y - 1 || y > box.y + box.height + 1));
  };
  // The lowest and the highest value that a curve's line shows, read back from its pixels.
  const extent = (path) => {
    const svg = path.closest("svg"), box = svg.querySelector("clipPath rect").getBBox();
    const lo = Number(svg.dataset.lo), hi = Number(svg.dataset.hi), bottom = box.y + box.height - 4;
    const shown = numbers(path.getAttribute("d")).filter((_, i) => i % 2)
        .map((y) => lo + (bottom - y) / (box.height - 8) * (hi - lo));
    return shown.length ? [Math.min(...shown), Math.max(...shown), hi - lo] : null;
  };
  const limit = innerWidth + 0.5;
  // Whether a reader sees all of a cell, and beside or above it what its column is called.
  const seen = (cell) => {
    const box = cell.getBoundingClientRect(), table = cell.closest("table");
    const heading = table.querySelectorAll("thead th")[cell.cellIndex];
    const above = heading.getBoundingClientRect();
    const named = cell.cellIndex === 0 ||
        (above.height > 1 && Math.abs(above.right - box.right) < 1 && above.bottom <= box.top + 1) ||
        (!["none", "normal"].includes(getComputedStyle(cell, "::before").content) &&
            cell.dataset.heading === heading.textContent);
    return box.width > 0 && box.left >= 0 && box.right <= limit && cell.scrollWidth <= cell.clientWidth + 1 &&
        named;
  };
  return {
    title: document.title, heading: document.querySelector("h1").textContent,
    standards: document.compatMode === "CSS1Compat", scripts: document.scripts.length,
    images: all("img, iframe, object, embed, link:not([rel=icon])").length,
    page_width: document.documentElement.scrollWidth, view_width: innerWidth,
    overflowing: all("main *").filter((node) => !node.closest("clipPath") && !node.closest("[clip-path]") && node.getBoundingClientRect().right > limit)
        .map((node) => node.outerHTML.slice(0, 160)),
    broken: broken.map((node) => node.outerHTML.slice(0, 160)),
    ids: all("[id]").map((node) => node.id),
    background: getComputedStyle(document.body).backgroundColor,
    sections: all("main > section").map((section) => ({
      text: section.textContent,
      tables: all("table", section).map((table) => ({
        rows: all("tr", table).map((row) => [...row.children].map((cell) => cell.textContent)),
        headings: all("thead th[scope=col]", table).length, names: all("tbody th[scope=row]", table).length,
        unseen: all("tbody th, tbody td", table).filter((cell) => !seen(cell))
            .map((cell) => cell.textContent.slice(0, 80))})),
      bars: all(".bars", section).map((bars) => all(".row", bars).map((row) => ({
        name: row.querySelector(".label").textContent, label: row.querySelector("[role=img]").ariaLabel,
        parts: all(".part", row).map((part) => ({kind: part.dataset.kind, amount: Number(part.dataset.amount),
          width: part.getBoundingClientRect().width / part.parentElement.getBoundingClientRect().width}))}))),
      charts: all(".chart", section).map((chart) => ({
        panels: all(".panels > svg", chart).map((svg) => ({
          lo: Number(svg.dataset.lo), role: svg.getAttribute("role"), label: svg.getAttribute("aria-label"),
          width: svg.getBoundingClientRect().width, height: svg.getBoundingClientRect().height,
          ticks: all("text:not([class])", svg).length + all("text[class='']", svg).length,
          curves: all("path.curve", svg).map((path) => ({name: path.dataset.name,
              points: numbers(path.getAttribute("d")).length / 2, leaves: leaves(path),
              extent: extent(path),
              stroke: getComputedStyle(path).stroke, dash: getComputedStyle(path).strokeDasharray})),
          bands: all("path.band", svg).map((path) => path.dataset.name),
          levels: all("line.level", svg).map((line) => line.dataset.level),
          gaps: all(".gap", svg).map((mark) => mark.dataset.gap),
          beyond: all(".beyond", svg).map((mark) => mark.dataset.beyond)})),
        notes: all(".note", chart).map((note) => note.textContent).join(" "),
        legend: all(".legend li", chart).map((item) => ({name: item.dataset.name,
            shown: item.textContent.includes(item.dataset.name),
            value: item.querySelector(".number").textContent, apart: item.querySelector(".apart").textContent,
            full: item.querySelector(".number").title})),
        reachable: all(".panels > svg", chart).every((svg) => svg.tabIndex === 0)}))}))
  };
})()
"""


class Checks:
    def __init__(self):
        self.failures, self.count, self.where = [], 0, ""

    def that(self, condition, message):
        self.count += 1
        if not condition:
            self.failures.append(f"{self.where}: {message}")

    def same(self, found, wanted, what):
        self.that(found == wanted, f"{what}: found {found!r:.300}, wanted {wanted!r:.300}")


def check_file(checks, page):
    checks.same(page.doctype.lower(), "doctype html", "document type")
    checks.same(page.lang, "en", "language")
    checks.that(page.title, "the title is empty")
    checks.same(page.loads, [], "references to other files")
    for name in ("charset", "viewport", "Content-Security-Policy"):
        checks.that(name in page.metas, f"no <meta> for {name}")


def check_events(checks, events, url):
    for event in events:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.consoleAPICalled":
            checks.that(False, f"console.{params['type']}: {params['args']}")
        elif method == "Runtime.exceptionThrown":
            checks.that(False, f"exception: {params['exceptionDetails']}")
        elif method == "Log.entryAdded":
            checks.that(False, f"log: {params['entry']}")
        elif method == "Network.requestWillBeSent":
            checks.same(params["request"]["url"].split("#")[0], url, "request")
        elif method == "Page.javascriptDialogOpening":
            checks.that(False, f"dialog: {params}")


def check_table(checks, table, found):
    checks.same(found["rows"], table["rows"] or [[]], f"cells of table '{table['title']}'")
    checks.same(found["headings"], len(table["rows"][0]) if table["rows"] else 0, "column headings")
    checks.same(found["names"], max(0, len(table["rows"]) - 1), "row headings")
    checks.same(found["unseen"], [], f"cells of table '{table['title']}' that are out of sight")


def check_bars(checks, bars, found):
    checks.same([row["name"] for row in found], [row["name"] for row in bars["rows"]], "names of bars")
    longest = max([sum(part["amount"] for part in row["parts"]) for row in bars["rows"]] or [0]) or 1
    for row, shown in zip(bars["rows"], found):
        checks.that(row["name"] in shown["label"], f"bar '{row['name']}' has no spoken label")
        checks.same([[p["kind"], p["amount"]] for p in shown["parts"]],
                    [[p["kind"], p["amount"]] for p in row["parts"]], f"parts of bar '{row['name']}'")
        for part, drawn in zip(row["parts"], shown["parts"]):
            wanted = part["amount"] / longest
            checks.that(abs(drawn["width"] - wanted) < 0.002, f"'{part['kind']}' of bar '{row['name']}' is "
                        f"{drawn['width']:.4f} wide, not {wanted:.4f}")


def finite(curve):
    return [(x, y) for x, y in zip(curve["x"], curve["y"]) if y is not None]


def on_top(chart):
    """The curves as they are drawn: those of a stack stand on those before them."""
    if not chart["stacked"]:
        return chart["curves"]
    tops = itertools.accumulate((curve["y"] for curve in chart["curves"]), lambda under, own: [a + b for a, b in zip(under, own)])
    return [{**curve, "y": top} for curve, top in zip(chart["curves"], tops)]


def check_panel(checks, chart, panel, first, last, whole, notes):
    name = chart["title"]
    least = panel["width"] / 4 if whole else 18  # the close view draws two dozen means
    checks.same(panel["role"], "img", f"role of chart '{name}'")
    checks.that(chart["y_label"] in (panel["label"] or ""), f"chart '{name}' has no spoken summary")
    checks.same(sorted(c["name"] for c in panel["curves"]), sorted(c["name"] for c in chart["curves"]),
                f"curves of '{name}'")
    looks = {(c["stroke"], c["dash"]) for c in panel["curves"]}
    if len(chart["curves"]) <= 12:
        checks.same(len(looks), len(chart["curves"]), f"curves of '{name}' that look different")
    bands = [c["name"] for c in chart["curves"] if c["x"]] if chart["stacked"] else []
    checks.same(panel["bands"], bands, f"bands of '{name}'")
    for curve in on_top(chart):
        drawn = next(c for c in panel["curves"] if c["name"] == curve["name"])
        inside = [p for p in finite(curve) if first <= p[0] <= last]
        checks.that(drawn["points"] >= min(len(inside), least),
                    f"curve '{curve['name']}' has {drawn['points']} points for {len(inside)} values")
        checks.that(drawn["points"] <= 4 * panel["width"] + 4,
                    f"curve '{curve['name']}' has {drawn['points']} points on {panel['width']} pixels")
        if whole and inside and not drawn["leaves"]:
            lowest, highest, height = drawn["extent"]
            wanted = [pick(y for _, y in inside) for pick in (min, max)]
            checks.that(abs(lowest - wanted[0]) <= height / 500 and abs(highest - wanted[1]) <= height / 500,
                        f"curve '{curve['name']}' is drawn from {lowest} to {highest}, not {wanted}")
        if drawn["leaves"] or curve["name"] in panel["beyond"]:
            checks.that(drawn["leaves"] and curve["name"] in panel["beyond"] and curve["name"] in notes,
                        f"'{curve['name']}' leaves the frame of '{name}' and nothing says so, or the reverse")
        marked = curve["name"] in panel["gaps"]
        if not any(y is None and first <= x <= last for x, y in zip(curve["x"], curve["y"])):
            checks.that(not marked, f"'{curve['name']}' has a mark but no gap")
        elif whole:
            checks.that(marked, f"the gap of '{curve['name']}' is not marked")


def check_chart(checks, chart, found):
    xs = [x for curve in chart["curves"] for x in curve["x"]] or [0, 1]
    first, last = min(xs), max(xs)
    third = last - (last - first) / 3
    closely = not chart["small"] and not chart["stacked"] and first < last and any(sum(x >= third for x in c["x"]) >= 3 for c in chart["curves"])
    checks.same(len(found["panels"]), 2 if closely else 1, f"panels of '{chart['title']}'")
    for panel, start in zip(found["panels"], (first, third)):
        check_panel(checks, chart, panel, start, last, panel is found["panels"][0], found["notes"])
        checks.that(panel["ticks"] >= 4, f"'{chart['title']}' has {panel['ticks']} ticks")
    if chart["stacked"]:
        most = max((y for curve in on_top(chart) for y in curve["y"]), default=0)
        near = [level["name"] for level in chart["levels"] if level["value"] < 1.6 * most]
        checks.same(found["panels"][0]["levels"], near, f"levels of '{chart['title']}'")
        checks.that(found["panels"][0]["lo"] <= 0, f"the stack '{chart['title']}' does not stand on 0")
    for level in chart["levels"]:
        drawn = any(level["name"] in panel["levels"] for panel in found["panels"])
        if level["value"] is None:
            checks.that(not drawn, f"level '{level['name']}' is not finite but drawn")
    entries = [c["name"] for c in chart["curves"]] + [level["name"] for level in chart["levels"]]
    checks.same([entry["name"] for entry in found["legend"]], entries, f"legend of '{chart['title']}'")
    for entry, curve in zip(found["legend"], chart["curves"]):
        checks.that(entry["shown"], f"legend does not show '{entry['name']}'")
        wanted = curve["y"][-1] if curve["y"] else None
        shown = float(entry["full"]) if entry["full"] else None
        checks.same(shown, wanted, f"last value of '{curve['name']}' in the legend")
    for entry in found["legend"]:  # the table's minus, and none before zero
        sound = re.fullmatch(r"(\+[\d.,]+|-[0.,]*[1-9][\d.,]*)(e[+-]\d+)?", entry["apart"] or "+0")
        checks.that(sound, f"'{entry['name']}' is {entry['apart']} from the reference")
    for column in ("value", "apart"):
        numbers = [entry[column] for entry in found["legend"] if any(c.isdigit() for c in entry[column])]
        shapes = {(len(n.partition(".")[2].partition("e")[0]), "e" in n) for n in numbers}
        checks.that(len(shapes) <= 1, f"one column of '{chart['title']}' has {numbers}")
    checks.that(found["reachable"], f"the keyboard does not reach '{chart['title']}'")


def check_picture(checks, page, found):
    report = page.report
    checks.same(found["title"], " ".join(page.title.split()), "document title")
    checks.same(found["heading"], report["title"], "heading")
    checks.that(found["standards"], "the page is in quirks mode")
    checks.same(found["scripts"], 2, "scripts")
    checks.same(found["images"], 0, "elements that could load something")
    checks.that(found["page_width"] <= found["view_width"],
                f"the page is {found['page_width']} wide in a view of {found['view_width']}")
    checks.same(found["overflowing"], [], "elements wider than the page")
    checks.same(found["broken"], [], "shapes with broken numbers")
    checks.same(len(found["ids"]), len(set(found["ids"])), "distinct ids")
    checks.same(len(found["sections"]), len(report["sections"]), "sections")
    for section, shown in zip(report["sections"], found["sections"]):
        checks.that(section["title"] in shown["text"] and section["text"] in shown["text"],
                    f"text of section '{section['title']}'")
        for kind, check in (("tables", check_table), ("bars", check_bars), ("charts", check_chart)):
            checks.same(len(shown[kind]), len(section[kind]), f"{kind} of section '{section['title']}'")
            for wanted, drawn in zip(section[kind], shown[kind]):
                check(checks, wanted, drawn)


# What the key of the first chart shows, and for which step.
POINTED = ("(() => { const chart = document.querySelector('.chart'); return {"
           " lines: chart.querySelectorAll('.cross line').length,"
           " step: chart.querySelector('.cross text')?.textContent,"
           " full: [...chart.querySelectorAll('.legend li .number:not(.apart)')].map((n) => n.title)}; })()")


def check_pointed(checks, chart, shown, by):
    checks.that(shown["lines"] >= 1, f"no line where {by} points")
    step = float((shown.get("step") or "nan").replace(",", ""))
    for curve, full in zip(chart["curves"], shown["full"]):
        at = [y for x, y in zip(curve["x"], curve["y"]) if abs(x - step) < 1e-3]
        if at:
            checks.same(float(full) if full else None, at[0], f"'{curve['name']}' where {by} points")
    return step


def check_pointing(checks, browser, page):
    """The pointer over the first chart, then keys: its legend must show each curve's value at the step it names."""
    charts = [chart for section in page.report["sections"] for chart in section["charts"]]
    if not charts or not any(len(curve["x"]) > 2 for curve in charts[0]["curves"]):
        return
    left, top, width, height = browser.evaluate(
        "(() => { const svg = document.querySelector('.panels svg'); svg.scrollIntoView();"
        " const b = svg.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + width * 0.6, y=top + height / 2)
    browser.settle()
    check_pointed(checks, charts[0], browser.evaluate(POINTED), "the mouse")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)

    def press(key):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key)
        browser.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)
        return browser.evaluate(POINTED)

    steps = sorted({x for curve in charts[0]["curves"] for x in curve["x"]})
    browser.evaluate("document.querySelector('.panels svg').focus()")
    for key, wanted in (("ArrowRight", 0), ("ArrowRight", 1), ("End", -1), ("ArrowLeft", -2), ("Home", 0)):
        step = check_pointed(checks, charts[0], press(key), key)
        checks.that(abs(step - steps[wanted]) < 1e-3, f"{key} points at {step}, not {steps[wanted]}")
    press("PageDown")
    checks.same(press("Escape")["lines"], 0, "lines after Escape")
    x, y = browser.evaluate(
        "(() => { const item = document.querySelector('.legend li'); item.scrollIntoView({block: 'center'});"
        " const b = item.getBoundingClientRect(); return [b.left + 20, b.top + b.height / 2]; })()")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    faded = browser.evaluate("document.querySelector('.chart').querySelectorAll('.fade').length")
    checks.that(faded > 0 or len(charts[0]["curves"]) == 1, "the legend's first curve is not brought out")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)


def check_coverage(checks, functions):
    """`functions`: (name, place in the script) -> whether it ran in any view of any file."""
    checks.where = "the script"
    for (name, place), ran in sorted(functions.items()):
        checks.that(ran, f"no file made function '{name}' at character {place} run")
    checks.that(len(functions) > 50, f"only {len(functions)} functions were seen")


STYLE = r"""(() => {
  const text = document.querySelector("style").textContent.replace(/\/\*.*?\*\//gs, "");
  return [...text.matchAll(/([-\w]+)\s*:\s*([^;{}]+);/g)].map(([all, name, value]) => [all, CSS.supports(name, value)]);
})()"""


def check_style(checks, browser):
    declarations = browser.evaluate(STYLE)
    for declaration, known in declarations:
        checks.that(known, f"the browser does not know '{declaration}'")
    checks.that(len(declarations) > 100, f"only {len(declarations)} declarations were seen")


def check_view(checks, browser, page, url, view, shots, functions):
    width, height, scheme = view
    checks.where = f"{pathlib.Path(url).name} at {width} px, {scheme}"
    target = browser.open_tab()
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                 mobile=width < 600)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.navigate(url)
    found = browser.evaluate(COLLECT)
    check_picture(checks, page, found)
    checks.same(found["background"] == "rgb(255, 255, 255)", scheme == "light", "white page")
    if shots:
        png = browser.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        (shots / f"{pathlib.Path(url).stem}-{width}-{scheme}.png").write_bytes(base64.b64decode(png))
    check_pointing(checks, browser, page)
    if view == VIEWS[0]:
        check_style(checks, browser)
        # Resized and printed: drawn again, and as it was afterwards.
        pdf = browser.call("Page.printToPDF", printBackground=True)["data"]
        checks.that(base64.b64decode(pdf).startswith(b"%PDF"), "does not print")
        if shots:
            (shots / f"{pathlib.Path(url).stem}.pdf").write_bytes(base64.b64decode(pdf))
        browser.call("Emulation.setDeviceMetricsOverride", width=500, height=900, deviceScaleFactor=1,
                     mobile=False)
        browser.settle()
        checks.where += ", made narrow"
        check_picture(checks, page, browser.evaluate(COLLECT))
    for script in browser.call("Profiler.takePreciseCoverage")["result"]:
        for function in script["functions"] if script["url"].split("#")[0] == url else ():
            key = function["functionName"], function["ranges"][0]["startOffset"]
            functions[key] = functions.get(key, False) or function["ranges"][0]["count"] > 0
    check_events(checks, browser.events, url)
    browser.close_tab(target)


def main(arguments):
    shots = None
    if "--screenshots" in arguments:
        at = arguments.index("--screenshots")
        shots = pathlib.Path(arguments[at + 1])
        shots.mkdir(parents=True, exist_ok=True)
        del arguments[at:at + 2]
    if len(arguments) < 2:
        sys.exit(__doc__)
    program = shutil.which(arguments[0])
    if not program:
        print(f"skipped: no Chromium at '{arguments[0]}'; install Debian's package chromium")
        return SKIPPED
    checks, functions = Checks(), {}
    # The browser's last children may still write into its profile while it is removed.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, profile)
        try:
            for path in map(pathlib.Path, arguments[1:]):
                page = Page(path.read_text(encoding="utf-8"))
                checks.where = path.name
                check_file(checks, page)
                for view in VIEWS:
                    check_view(checks, browser, page, path.resolve().as_uri(), view, shots, functions)
        finally:
            browser.close()
    check_coverage(checks, functions)
    for failure in checks.failures[:40]:
        print(failure)
    print(f"{checks.count} checks, {len(checks.failures)} failed")
    return 1 if checks.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
