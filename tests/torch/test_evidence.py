"""evidence/: its tasks run in their small form, and runs are appended once."""

import contextlib
import gzip
import io
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import torch

EVIDENCE = pathlib.Path(__file__).resolve().parents[2] / "evidence"
sys.path.insert(0, str(EVIDENCE))
import recommendation  # noqa: E402
import run as runner  # noqa: E402


def run(*command):
    """evidence/run.py in this process, which has torch already; other programs in one of their own."""
    command = list(map(str, command))
    if command[0] != str(EVIDENCE / "run.py"):
        return subprocess.run([sys.executable, "-W", "ignore", *command], capture_output=True, text=True)
    out, err, code = io.StringIO(), io.StringIO(), 0
    with mock.patch.object(sys, "argv", command), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runner.main()
        except SystemExit as end:
            code = end.code
    if isinstance(code, str):
        code, _ = 1, err.write(code)
    return subprocess.CompletedProcess(command, code or 0, out.getvalue(), err.getvalue())


def lines_of(test, task, rows, *more):
    """{row: its line} of one seed."""
    with tempfile.TemporaryDirectory() as folder:
        lines = pathlib.Path(folder) / "lines.jsonl"
        command = [EVIDENCE / "run.py", task, "--small", "--seeds", 1, "--rows", rows, "--device", "cpu", "--lines", lines]
        done = run(*command, *more)
        test.assertEqual(done.returncode, 0, done.stderr)
        return {line["row"]: line for line in map(json.loads, lines.read_text().splitlines())}


def reported(lines, program):
    """What the program prints of `rows`, those of a task on a machine, read from these lines."""
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
        head = f"import sys, pathlib; sys.path.insert(0, {str(EVIDENCE)!r}); import gather, report; "
        return run("-c", f"{head}places = gather.read(pathlib.Path({folder!r}))['t']; rows = places['d']; {program}")


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
        auc, tensor = recommendation.auc, torch.tensor
        self.assertEqual(float(auc(tensor([1.0, 2.0, 2.0, 3.0]), tensor([0.0, 0.0, 1.0, 1.0]))), 0.875)
        self.assertEqual(float(auc(torch.zeros(5), tensor([0.0, 1.0, 0.0, 1.0, 1.0]))), 0.5)

    def test_tuned(self):
        """Of files in Adult's form: who is tuned begins with what was learnt, and only older people are left."""
        draw = random.Random(1)
        with tempfile.TemporaryDirectory() as folder:
            for name in ("data", "test"):
                with gzip.open(pathlib.Path(folder) / f"adult.{name}.gz", "wt") as out:
                    for _ in range(400):
                        age = draw.randrange(20, 70)
                        rich = "<=50K" if (age > 45) == (draw.random() < 0.9) else ">50K"
                        some = [draw.randrange(50) for _ in range(5)]
                        cells = (age, "a", some[0], "b", some[1], *"cdefg", *some[2:], "h", rich)
                        out.write(", ".join(map(str, cells)) + "\n")
            younger, learn = [], recommendation.Tuned.learned

            def learned(task, people):
                task.steps = 60
                younger.append(len(people[0]))
                return learn(task, people)

            with mock.patch.object(recommendation.Tuned, "learned", learned):
                task = recommendation.tasks(folder, False, torch.device("cpu"))[1]
            same = torch.equal(task.model().top[0].weight, task.start["top.0.weight"])
        older = len(task.training[0])
        self.assertEqual(younger[0] + older, 400)
        self.assertGreater(older, 150)
        self.assertEqual((same, len(task.begin)), (True, 8))

    def test_missing_data(self):
        with tempfile.TemporaryDirectory() as folder:
            done = run(EVIDENCE / "run.py", "recommendation", "--data", folder)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("UCI data set Adult", done.stderr)

    def test_controls(self):
        """Each takes its rate, its line says so, and the metric at the start stands in all."""
        rows = "^(mixed|mixed, lr x 0.9|scruple, moments to nearest)$"
        found = lines_of(self, "recommendation", rows)
        rates = {row: line["hypers"]["lr"] for row, line in found.items()}
        self.assertEqual(rates, {"mixed": 2e-3, "scruple, moments to nearest": 2e-3, "mixed, lr x 0.9": 2e-3 * 0.9})
        self.assertEqual(found["scruple, moments to nearest"]["hypers"]["rounding"], {"moments": "nearest"})
        self.assertEqual(len({line["start"] for line in found.values()}), 1)
        self.assertEqual(len({line["metrics"]["log loss"] for line in found.values()}), 3)
        for line in found.values():
            self.assertGreater(line["start"], line["metrics"]["log loss"] + 0.02)

    def test_what_counts(self):
        """The mean of the runs of a seed, the last set-up alone, the later of two times; machines apart."""
        head = {"task": "t", "row": "torch fp32", "place": 0, "device": "d", "steps": 4, "begin": None, "errors": []}
        lines = [
            {**head, "steps": 3, "seed": 0, "metrics": {"loss": 9.0}, "losses": [9.0, 9.0]},
            {**head, "seed": 0, "metrics": {"loss": 1.0}, "losses": [2.0, 1.0]},
            {**head, "seed": 1, "metrics": {"loss": 5.0}, "losses": [5.0, 5.0]},
            {**head, "seed": 0, "metrics": {"loss": 2.0}, "losses": [2.0, None]},
            {**head, "ms": 7.0},
            {**head, "ms": 8.0},
            {**head, "device": "e", "seed": 0, "metrics": {"loss": 7.0}, "losses": [7.0]},
        ]
        done = reported(lines, "runs, times = rows['torch fp32']; "
                        "print([(run['seed'], run['lead'], run['losses']) for run in runs], times['ms'], [*places])")
        said = "[(0, 1.5, [2.0, None]), (1, 5.0, [5.0, 5.0])] 8.0 ['d', 'e']"
        self.assertEqual(done.stdout.strip(), said, done.stderr)

    def test_gaps_are_of_pairs(self):
        """A seed that the reference has not run is in its row's mean, and in no gap. Of the machines the one with more
        pairs decides."""
        head = {"task": "t", "place": 0, "device": "d", "steps": 4, "errors": [], "losses": [1.0], "date": "2026-11-18"}
        head["bytes"] = {"weights": 2.0, "state": 3.0, "gradients": 2.0}
        runs = [("mixed", 0, 1.0), ("mixed", 1, 2.0), ("scruple", 0, 1.5), ("scruple", 1, 2.5), ("scruple", 2, 8.0)]
        lines = [{**head, "row": row, "seed": seed, "metrics": {"loss": loss}} for row, seed, loss in runs]
        lines += [{**line, "device": "e", "date": "2026-11-19"} for line in lines if line["seed"] == 0]
        done = reported(lines, "print(report.table(rows), gather.deciding(places))")
        self.assertIn("| scruple | 3 | 4.00 | +33.3 | +33.3..+33.3 | 7.00 |", done.stdout, done.stderr)
        self.assertIn("Every verdict: not shown.", done.stdout)
        self.assertEqual(done.stdout.split()[-1], "d")
        for line in lines:
            line["start"] = 3.5
        done = reported(lines, "print(gather.gap('scruple', rows).gained)")
        self.assertEqual(done.stdout.strip(), "25.0", done.stderr)  # 0.5 of 2


if __name__ == "__main__":
    unittest.main()
