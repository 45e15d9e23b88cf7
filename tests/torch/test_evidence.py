"""evidence/: its tasks run in their small form, runs are appended once, and the page is what the lines say."""

import hashlib
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

EVIDENCE = pathlib.Path(__file__).resolve().parents[2] / "evidence"


def run(*command):
    return subprocess.run([sys.executable, "-W", "ignore", *map(str, command)], capture_output=True, text=True)


def lines_of(test, task, rows, *more):
    """{row: its line} of one seed."""
    with tempfile.TemporaryDirectory() as folder:
        lines = pathlib.Path(folder) / "lines.jsonl"
        command = [EVIDENCE / "run.py", task, "--small", "--seeds", 1, "--rows", rows, "--device", "cpu", "--lines", lines]
        done = run(*command, *more)
        test.assertEqual(done.returncode, 0, done.stderr)
        return {line["row"]: line for line in map(json.loads, lines.read_text().splitlines())}


def reported(lines, program):
    """What the program prints of `tasks`, read from these lines."""
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
        head = f"import sys, pathlib; sys.path.insert(0, {str(EVIDENCE)!r}); import report; "
        return run("-c", f"{head}tasks = report.read(pathlib.Path({folder!r})); {program}")


class Evidence(unittest.TestCase):
    def test_recommendation(self):
        with tempfile.TemporaryDirectory() as folder:
            lines = pathlib.Path(folder) / "lines.jsonl"
            rows = "^(torch fp32|scruple|scruple, released|scruple, compressed|flash|torch bf16)$"
            command = [EVIDENCE / "run.py", "recommendation", "--small", "--seeds", 1, "--rows", rows, "--lines", lines]
            command += ["--device", "cpu"]
            done = run(*command)
            self.assertEqual(done.returncode, 0, done.stderr)
            found = {line["row"]: line for line in map(json.loads, lines.read_text().splitlines())}
            names = ["torch fp32", "scruple", "flash", "scruple, released", "scruple, compressed", "torch bf16"]
            self.assertEqual(list(found), names)
            loss = {row: line["metrics"]["log loss"] for row, line in found.items()}
            self.assertLess(loss["torch fp32"], 0.6)  # 0.66 without features
            self.assertLess(abs(loss["scruple"] - loss["torch fp32"]), 0.01)
            self.assertEqual(loss["scruple"], loss["scruple, released"])
            gradients = {row: round(line["bytes"]["gradients"], 1) for row, line in found.items()}
            self.assertEqual([gradients[row] for row in names], [4, 2, 2, 0, 1.1, 2])  # where the step is taken
            off = {row: line["errors"][-1]["applied"] for row, line in found.items() if line["errors"]}
            self.assertLess(off["scruple"], 0.1)
            self.assertGreater(off["flash"], 1)  # second moments that became zero
            self.assertGreater(off["torch bf16"], 0.5)  # updates below the last bit
            self.assertNotIn(folder, found["scruple"]["command"])
            self.assertEqual(found["scruple"]["hypers"], {"lr": 2e-3, "weight_decay": 1e-4})
            said = [found["scruple"][name] for name in ("optimizer", "clip", "data", "diverged")]
            self.assertEqual(said, ["AdamW", None, None, False])
            self.assertRegex(found["scruple"]["commit"] or "none", r"^([0-9a-f]{10}\+?|none)$")
            again = run(*command)
            self.assertEqual(again.returncode, 0, again.stderr)
            self.assertIn("6 of 6 runs are in", again.stdout)
            self.assertEqual(len(lines.read_text().splitlines()), 6)

    def test_lines(self):
        """What was cut off is not glued to; what is damaged is named; jobs share the runs, and none is lost."""
        with tempfile.TemporaryDirectory() as folder:
            lines = pathlib.Path(folder) / "lines.jsonl"
            command = [EVIDENCE / "run.py", "recommendation", "--small", "--device", "cpu", "--lines", lines]
            rows = ["--rows", "^(torch fp32|split|scruple)$"]
            lines.write_text('{"task": "another"}')
            done = run(*command, *rows, "--jobs", 2)
            self.assertEqual(done.returncode, 0, done.stderr)
            found = sorted(json.loads(line).get("row", "") for line in lines.read_text().splitlines())
            self.assertEqual(found, ["", "scruple", "split", "torch fp32"])
            lines.write_text('{"task": "another"}\n{"task": \n')
            for more, words in (
                ((), f"{lines}, line 2 is damaged"),
                (("--rows", "("), "is no regular expression"),
                (("--jobs", 0), "is not a whole number from 1"),
                (("--lines", folder), f"cannot append to {folder}"),
            ):
                done = run(*command, *more)
                self.assertNotEqual(done.returncode, 0)
                self.assertIn(words, done.stderr)
            lines.write_text("")
            self.assertIn("no row of no task", run(*command, "--rows", "nobody").stderr)

    def test_auc(self):
        done = run("-c", f"import sys, torch; sys.path.insert(0, {str(EVIDENCE)!r}); from recommendation import auc; "
                   "print(auc(torch.tensor([1., 2., 2., 3.]), torch.tensor([0., 0., 1., 1.])), "
                   "auc(torch.zeros(5), torch.tensor([0., 1., 0., 1., 1.])))")
        self.assertEqual(done.stdout.split(), ["0.875", "0.5"], done.stderr)

    def test_missing_data(self):
        with tempfile.TemporaryDirectory() as folder:
            done = run(EVIDENCE / "run.py", "recommendation", "--data", folder)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("UCI data set Adult", done.stderr)

    def test_what_counts(self):
        """The mean of the runs of a seed, the last set-up alone, the later of two times."""
        head = {"task": "t", "row": "torch fp32", "place": 0, "device": "d", "steps": 4, "begin": None, "errors": []}
        lines = [
            {**head, "steps": 3, "seed": 0, "metrics": {"loss": 9.0}, "losses": [9.0, 9.0]},
            {**head, "seed": 0, "metrics": {"loss": 1.0}, "losses": [2.0, 1.0]},
            {**head, "seed": 1, "metrics": {"loss": 5.0}, "losses": [5.0, 5.0]},
            {**head, "seed": 0, "metrics": {"loss": 2.0}, "losses": [2.0, None]},
            {**head, "ms": 7.0},
            {**head, "ms": 8.0},
        ]
        done = reported(lines, "runs, times = tasks['t']['torch fp32']; "
                        "print([(run['seed'], run['lead'], run['losses']) for run in runs], times['ms'])")
        self.assertEqual(done.stdout.strip(), "[(0, 1.5, [2.0, None]), (1, 5.0, [5.0, 5.0])] 8.0", done.stderr)

    def test_gaps_are_of_pairs(self):
        """A seed that the reference has not run is in its row's mean, and in no gap."""
        head = {"task": "t", "place": 0, "device": "d", "steps": 4, "errors": [], "losses": [1.0]}
        head["bytes"] = {"weights": 2.0, "state": 3.0, "gradients": 2.0}
        runs = [("torch fp32", 0, 1.0), ("torch fp32", 1, 2.0), ("scruple", 0, 1.5), ("scruple", 1, 2.5), ("scruple", 2, 8.0)]
        lines = [{**head, "row": row, "seed": seed, "metrics": {"loss": loss}} for row, seed, loss in runs]
        done = reported(lines, "print(report.summary(tasks), report.table(tasks['t']), sep='\\n')")
        self.assertIn("| +0.5000 ± 0.0000 (2) | +33.33 % |", done.stdout, done.stderr)
        self.assertIn("| scruple (3) | 4.0000 ± 3.5000 | +0.5000 ± 0.0000 |", done.stdout)

    def test_lines_are_only_appended(self):
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

    def test_verdicts(self):
        """Student's t as tables have it; each verdict where it must be, and none with seven pairs."""
        sys.path.insert(0, str(EVIDENCE))
        import verdicts

        known = {(0.95, 1): 6.3138, (0.95, 7): 1.8946, (0.975, 1): 12.7062, (0.975, 7): 2.3646, (0.975, 29): 2.0452}
        for (share, freedom), value in known.items():
            self.assertAlmostEqual(verdicts.quantile(share, freedom), value, places=4)
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
        self.assertEqual(verdicts.verdict([0.5], 1.0), ("not shown", 0.5, None, None))

    def test_verdicts_of_the_page(self):
        """Computed anew, from the lines alone."""
        old = {json.loads(text)["line"] for text in (EVIDENCE / "superseded.jsonl").read_text().splitlines()}
        texts = [text for path in sorted(EVIDENCE.glob("lines/*.jsonl")) for text in path.read_text().splitlines()]
        lines = [json.loads(text) for text in texts if hashlib.sha256(text.encode()).hexdigest()[:16] not in old]
        lines = [line for line in lines if line.get("seed") is not None]
        last = {line["task"]: [line.get(key) for key in ("steps", "device", "begin")] for line in lines}
        found = {}
        for line in lines:
            if last[line["task"]] == [line.get(key) for key in ("steps", "device", "begin")]:
                value = next(iter(line["metrics"].values()))
                found.setdefault((line["task"], line["row"]), {}).setdefault(line["seed"], []).append(value)
        page = (EVIDENCE / "README.md").read_text().partition("<!-- verdicts -->\n")[2].partition("<!-- end -->")[0]
        rows = [[cell.strip() for cell in text.split("|")[1:-1]] for text in page.splitlines()[2:]]
        self.assertGreater(len(rows), 40)
        for task, row, verdict, pairs, gap, _, _ in rows:
            ours, exact = ({s: sum(x) / len(x) for s, x in found[task, name].items()} for name in (row, "mixed"))
            gaps = [ours[seed] - exact[seed] for seed in ours if seed in exact]
            mean = 100 * sum(gaps) / len(gaps) / (sum(exact.values()) / len(exact))
            mean = -mean if task.startswith(("images", "translation")) else mean
            self.assertEqual((int(pairs), gap), (len(gaps), f"{mean:+.3g}"), (task, row))
            self.assertLess(len(gaps), 8)  # else the next line has to be thought over
            self.assertEqual(verdict, "not shown")

    def test_page(self):
        done = run(EVIDENCE / "report.py", "--check")
        self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    unittest.main()
