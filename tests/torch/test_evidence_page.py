"""evidence/: its pages are what the lines say, lines are only appended, and verdicts come out the same by other code."""

import hashlib
import importlib.machinery
import importlib.util
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree
from unittest import mock

from test_evidence import EVIDENCE, run

sys.path.insert(0, str(EVIDENCE))
import verdicts  # noqa: E402

# Student's t as tables have it: 0.95 and 0.975 at 1 to 30 degrees of freedom.
T95 = """6.314 2.920 2.353 2.132 2.015 1.943 1.895 1.860 1.833 1.812 1.796 1.782 1.771 1.761 1.753
1.746 1.740 1.734 1.729 1.725 1.721 1.717 1.714 1.711 1.708 1.706 1.703 1.701 1.699 1.697"""
T975 = """12.706 4.303 3.182 2.776 2.571 2.447 2.365 2.306 2.262 2.228 2.201 2.179 2.160 2.145 2.131
2.120 2.110 2.101 2.093 2.086 2.080 2.074 2.069 2.064 2.060 2.056 2.052 2.048 2.045 2.042"""
T95, T975 = ([float(x) for x in text.split()] for text in (T95, T975))
UP = ("images", "translation")  # where more is better
PAGES = [EVIDENCE / "README.md", *sorted((EVIDENCE / "tasks").glob("*.md"))]


def tabled(gaps, exact, margin):
    """(verdict, mean, half an interval) from the definitions of PROTOCOL.md, by the tables above."""
    n = len(gaps)
    mean = sum(gaps) / n
    if n == 1:
        return "not shown", mean, None
    error = math.sqrt(sum((x - mean) ** 2 for x in gaps) / (n - 1) / n)
    half = T975[n - 2] * error
    if n < 8:
        return "not shown", mean, half
    limit = margin * abs(exact)
    below, above = (limit - mean) / error, (mean + limit) / error  # the two one-sided tests
    if below > T95[n - 2] and above > T95[n - 2]:
        return "equivalent", mean, half
    return ("not shown" if -half <= mean <= half else "worse" if mean > 0 else "better"), mean, half


def lines():
    old = {json.loads(text)["line"] for text in (EVIDENCE / "superseded.jsonl").read_text().splitlines()}
    texts = [text for path in sorted(EVIDENCE.glob("lines/*.jsonl")) for text in path.read_text().splitlines()]
    found = [json.loads(text) for text in texts if hashlib.sha256(text.encode()).hexdigest()[:16] not in old]
    return [line for line in found if line.get("seed") is not None]


def table_of(text):
    """[{title: cell}] of the first table."""
    rows = []
    for line in text.splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.split("|")[1:-1]])
        elif rows:
            break
    return [dict(zip(rows[0], row)) for row in rows[2:]]


def place(name):
    """What stands between a task's marks, on whichever page it is."""
    page = next(text for text in (path.read_text() for path in PAGES) if f"<!-- {name} -->\n" in text)
    return page.partition(f"<!-- {name} -->\n")[2].partition("<!-- end -->")[0]


def queue():
    loader = importlib.machinery.SourceFileLoader("evidence_queue", str(EVIDENCE / "queue"))
    spec = importlib.util.spec_from_loader("evidence_queue", loader)
    made = sys.modules["evidence_queue"] = importlib.util.module_from_spec(spec)
    loader.exec_module(made)
    return made


class Lines(unittest.TestCase):
    def test_only_appended(self):
        """Every line of every commit is there still, and lines that do not count are lines."""
        log = ["git", "log", "--format=", "-p", "--unified=0", "--", "evidence/lines", "evidence/superseded.jsonl"]
        done = subprocess.run(log, cwd=EVIDENCE.parent, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            self.skipTest("no git checkout")
        now = {path: set(path.read_text().splitlines()) for path in [*EVIDENCE.rglob("*.jsonl")]}
        path, seen = None, 0
        for text in done.stdout.splitlines():
            if text.startswith("+++ b/"):
                path = EVIDENCE.parent / text[6:]
            elif text.startswith("+{"):
                self.assertTrue(text[1:] in now.get(path, ()), f"removed or changed in {path.name}: {text[1:200]} ...")
                seen += 1
        self.assertGreater(seen, 700)
        names = {(path.name, hashlib.sha256(text.encode()).hexdigest()[:16]) for path in now for text in now[path]}
        marked = [json.loads(text) for text in now[EVIDENCE / "superseded.jsonl"]]
        self.assertEqual([mark for mark in marked if (mark["file"], mark["line"]) not in names], [])
        self.assertTrue(all(len(mark["reason"]) > 20 for mark in marked))

    def test_seeds_have_no_gaps(self):
        """Of what came after the rules: lines with a commit. A seed may be missing where the queue still has it to run."""
        seen, planned = {}, {}
        for entry in queue().QUEUE:
            for key in ((name, row) for name in entry.names for row in entry.rows):
                planned[key] = max(entry.seeds, planned.get(key, 0))
        for line in lines():
            if line.get("commit"):
                seen.setdefault((line["task"], line["device"], line["row"]), set()).add(line["seed"])
        for (task, device, row), seeds in seen.items():
            most = max(len(seeds), planned.get((task, row), 0))
            gaps = set(range(max(seeds))) - seeds
            self.assertTrue(not gaps or task.startswith("lpmm") and len(seeds) < most and max(seeds) < most, (task, row))


class Verdicts(unittest.TestCase):
    def test_verdicts(self):
        """Student's t as tables have it; each verdict where it must be, and none with seven pairs."""
        known = {(0.95, 1): 6.3138, (0.95, 7): 1.8946, (0.975, 1): 12.7062, (0.975, 7): 2.3646, (0.975, 29): 2.0452}
        for (share, freedom), value in known.items():
            self.assertAlmostEqual(verdicts.quantile(share, freedom), value, places=4)
        for freedom in range(1, 31):
            self.assertAlmostEqual(verdicts.quantile(0.95, freedom), T95[freedom - 1], delta=6e-4)
            self.assertAlmostEqual(verdicts.quantile(0.975, freedom), T975[freedom - 1], delta=6e-4)
        small = [0.001, -0.001, 0.0005, -0.0005, 0.0008, -0.0008, 0.0002, 0.0]
        for gaps, expected in (
            (small, "equivalent"),
            (small[:7], "not shown"),
            ([0.01 + x for x in small], "worse"),
            ([-0.01 + x for x in small], "better"),
            ([0.0029 + x for x in small], "worse"),  # within the margin by its mean alone
            ([100 * x for x in small], "not shown"),
        ):
            self.assertEqual(verdicts.verdict(gaps, 1.0)[0], expected, gaps)
            self.assertEqual(tabled(gaps, 1.0, 0.003)[0], expected, gaps)
        self.assertEqual(verdicts.verdict([0.5], 1.0), ("not shown", 0.5, None, None))

    def test_of_the_pages(self):
        """Every verdict, gap and interval anew, from the lines alone; the front page's counts from those."""
        all_, counts, seeing = lines(), {}, []
        for task in dict.fromkeys(line["task"] for line in all_):
            text = place(task)
            table = table_of(text)
            if "gap to `mixed`, %" not in table[0]:
                continue
            here = [line for line in all_ if line["task"] == task]
            found, most = {}, {}
            for device in dict.fromkeys(line["device"] for line in here):
                of = [line for line in here if line["device"] == device]
                of = [line for line in of if all(line.get(k) == of[-1].get(k) for k in ("steps", "begin"))]
                found[device] = {}
                for line in of:
                    value = next(iter(line["metrics"].values())), line.get("start")
                    found[device].setdefault(line["row"], {}).setdefault(line["seed"], []).append(value)
                most[device] = len({*found[device].get("mixed", ())} & {*found[device].get("scruple", ())})
            device = next(name for name in found if f" steps, {name.replace('NVIDIA ', '')}, torch" in text.split("\n")[0])
            self.assertEqual(most[device], max(most.values()), task)
            judged = {}
            for row in table:
                ours, exact = found[device][row["row"]], found[device]["mixed"]
                self.assertEqual(int(row["seeds"]), len(ours))
                if row["row"] == "mixed":
                    continue
                seeds = sorted(ours.keys() & exact.keys())
                pairs = [[sum(x[0] for x in both[s]) / len(both[s]) for both in (ours, exact)] for s in seeds]
                gaps = [(a - b) * (-1 if task.startswith(UP) else 1) for a, b in pairs]
                mean_exact = sum(b for _, b in pairs) / len(pairs)
                verdict, mean, half = tabled(gaps, mean_exact, 0.003)
                written = row.get("verdict") or text.partition("Every verdict: ")[2].partition(".")[0]
                self.assertEqual(written, verdict, (task, row["row"]))
                percent = 100 / abs(mean_exact)
                said = [row["gap to `mixed`, %"], *(row["95 % interval"].split("..") if half is not None else ())]
                for a, b in zip(said, (mean, mean - (half or 0), mean + (half or 0))):
                    near = 6e-3 * percent * (abs(b) + (half or 0)) + 1e-4
                    self.assertAlmostEqual(float(a.replace(",", "")), b * percent, delta=near)
                judged[row["row"]] = verdict, mean * percent, half is not None and mean > half
                starts = [exact[s][0][1] for s in sorted(exact) if s in ours]
                share = row.get("gap, % of the gain", "–")
                self.assertEqual(share == "–", None in starts)
                if share != "–":
                    gained = sum(starts) / len(starts) - mean_exact
                    share_of = 100 * mean / abs(gained)
                    self.assertAlmostEqual(float(share.split()[0]), share_of, delta=6e-3 * abs(share_of) + 1e-4)
                    self.assertEqual("±2" in share, tabled(gaps, gained, 0.02)[0] == "equivalent")
            if judged["torch bf16"][2]:
                seeing.append(task)
                for row, (verdict, mean, _) in judged.items():
                    counts.setdefault(row, []).append((verdict, mean))
        for row in table_of(place("optimizers")):
            name = row["optimizer"].strip("`")
            words = [verdict for verdict, _ in counts.get(name, ())]
            said = [row[word] for word in ("equivalent", "worse", "better", "not shown")]
            if name != "mixed":
                self.assertEqual(said, [str(words.count(w)) for w in ("equivalent", "worse", "better", "not shown")], name)
                worst = max(mean for _, mean in counts[name])
                self.assertAlmostEqual(float(row["worst mean gap, %"]), worst, delta=6e-3 * abs(worst))
        self.assertEqual([row["task"][1:].partition("]")[0] for row in table_of(place("index"))
                          if row["sees pure bf16"] == "yes"], sorted(seeing))
        self.assertIn(f"{len(seeing)} of ", place("answer"))


class Queue(unittest.TestCase):
    def queue(self):
        return queue()

    def test_names_rows_and_tasks(self):
        """That there are; and it says what is missing without torch or data."""
        import bits
        import harness
        import lpmm
        from test_evidence_lpmm import NAMES

        queue = self.queue()
        rows = {row.name for row in (*harness.ROWS, *bits.rows(), *lpmm.rows(1))}
        tasks = {line["task"] for line in lines()} | NAMES
        for entry in queue.QUEUE:
            self.assertEqual(set(entry.rows) - rows, set())
            self.assertEqual(set(entry.names) - tasks, set())
        done = run(EVIDENCE / "queue", "--show")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(done.stdout.splitlines()), len(queue.QUEUE) + 1)
        self.assertIn("--data DIR is missing", run(EVIDENCE / "queue").stderr)
        done = run(EVIDENCE / "queue", "--show", "--task", "recommendation")
        self.assertEqual(len(done.stdout.splitlines()), 1 + sum(x.task == "recommendation" for x in queue.QUEUE))

    def test_jobs_share_the_runs(self):
        """Of every entry, each run is of one job."""
        with tempfile.TemporaryDirectory() as folder:
            for jobs in (1, 3):
                said = pathlib.Path(folder) / f"said{jobs}"
                with mock.patch.object(sys, "argv", ["queue", "--data", folder, "--task", "lpmm", "--jobs", str(jobs)]):
                    with mock.patch.object(subprocess, "run", lambda words, check: (
                        said.open("a").write(" ".join(words) + "\n"), subprocess.CompletedProcess(words, 0))[1]):
                        with self.assertRaises(SystemExit) as done:
                            self.queue().main()
                self.assertEqual(done.exception.code, 0)
                lines = said.read_text().splitlines()
                self.assertEqual(len(lines), len(set(lines)))
                self.assertEqual(len(lines), jobs * sum(x.task == "lpmm" for x in self.queue().QUEUE))
                self.assertEqual(sum("--job " in line for line in lines), len(lines) * (jobs > 1))


class Pages(unittest.TestCase):
    def test_are_what_the_lines_say(self):
        done = run(EVIDENCE / "report.py", "--check")
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_are_short(self):
        words = [len(path.read_text().split()) for path in PAGES]
        self.assertLessEqual(words[0], 1200)
        self.assertLessEqual(sum(words), 9300)  # of which lpmm.md, with seven tables, has 2,200

    def test_what_they_link(self):
        for path in PAGES:
            for part in path.read_text().split("](")[1:]:
                link = part.partition(")")[0].partition("#")[0]
                self.assertTrue(link.startswith("http") or (path.parent / link).exists(), (path.name, link))

    def test_figures_of_the_bench(self):
        """They stand in the page that the table names."""
        import report

        measured = (EVIDENCE.parent / report.MEASURED).read_text()
        for row, figures in report.BENCH.items():
            for figure in figures:
                self.assertTrue(figure is None or f"| {figure} |" in measured, (row, figure))

    def test_pictures(self):
        for path in (EVIDENCE / "pictures").glob("*.svg"):
            xml.etree.ElementTree.parse(path)
        forest = (EVIDENCE / "pictures" / "forest.svg").read_text()
        self.assertIn("prefers-color-scheme:dark", forest)


if __name__ == "__main__":
    unittest.main()
