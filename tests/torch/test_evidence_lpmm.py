"""evidence/lpmm.py: its small form trains, its control can fail, and steps of N micro-batches see the same data."""

import sys
import unittest

import torch
from test_evidence import EVIDENCE, lines_of, reported, run

sys.path.insert(0, str(EVIDENCE))
import gather  # noqa: E402
import harness  # noqa: E402
import images  # noqa: E402
import language  # noqa: E402
import lpmm  # noqa: E402

CPU = torch.device("cpu")
NAMES = {f"lpmm, {kind}{parts}" for kind in ("images", "text") for parts in ("", " x 4", " x 16")}


def small():
    return {task.name.removesuffix(", small"): task for task in lpmm.tasks(None, True, CPU)}


def of(lines, key):
    return {row: line["metrics"][key] for row, line in lines.items()}


class Lpmm(unittest.TestCase):
    def test_images(self):
        """10 bits follow, 8 bits to nearest do not: no large weight moves at the end."""
        rows = "^(torch fp32|10 bits, stochastic|8 bits, nearest|weights alone|momentum alone|accumulators alone)$"
        found = lines_of(self, "lpmm", rows, "--only", "^lpmm, images, small$")
        self.assertEqual(len(found), 6)
        loss, right = of(found, "test loss"), of(found, "test accuracy")
        self.assertGreater(right["torch fp32"], 85)  # 25 by chance
        for row in loss.keys() - {gather.COARSE}:
            self.assertLess(abs(right[row] - right["torch fp32"]), 2, row)
            self.assertLess(abs(loss[row] - loss["torch fp32"]), 0.02, row)
        self.assertGreater(loss[gather.COARSE], loss["torch fp32"] + 0.08)
        self.assertLess(right[gather.COARSE], right["torch fp32"] - 3)
        unmoved = {row: [look["unmoved"] for look in line["errors"]] for row, line in found.items()}
        self.assertEqual(unmoved["torch fp32"], [])
        self.assertGreater(unmoved[gather.COARSE][1], unmoved[gather.LPMM][1])
        self.assertGreater(unmoved[gather.COARSE][-1], 0.99)
        self.assertLess(max(unmoved["momentum alone"] + unmoved["accumulators alone"]), 0.01)

    def test_bytes(self):
        """Of each part where it is in few bits, and of a model that nearly all is: at most 3.7 of 12."""
        sets = [(torch.zeros(16, 32, 32, 3).byte(), torch.zeros(16).long())] * 2
        task = lpmm.Images(sets, 1, False, CPU)
        task.size, task.steps, found = 4, 10, {}
        for row in (r for r in task.rows if r.name in (gather.REFERENCE, gather.LPMM, *lpmm.ALONE)):
            training = harness.Training(task, row, 0, CPU)
            training.step(0, task.batch(training.order))
            found[row.name] = {kind: round(size, 1) for kind, size in training.bytes().items()}
        kinds = "weights", "state", "gradients"
        self.assertEqual(found.pop(gather.REFERENCE), dict(zip(kinds, (4, 4, 4))))
        low = found.pop(gather.LPMM)
        self.assertLess(sum(low.values()), 3.7)
        for (row, held), kind in zip(found.items(), kinds):
            self.assertEqual(held, {**dict(zip(kinds, (4, 4, 4))), kind: low[kind]}, row)

    def test_text(self):
        found = lines_of(self, "lpmm", "^(torch fp32|10 bits, stochastic|8 bits, nearest)$", "--only", "^lpmm, text, small$")
        loss = of(found, "validation loss")
        self.assertLess(loss["torch fp32"], 1.0)  # 3.3 knows nothing
        self.assertLess(abs(loss[gather.LPMM] - loss["torch fp32"]), 0.002)
        self.assertGreater(loss[gather.COARSE] - loss["torch fp32"], 0.005)

    def test_micro_batches(self):
        found = lines_of(self, "lpmm", "torch fp32|10 bits, stochastic", "--only", "text x 16")
        self.assertEqual([line["steps"] for line in found.values()], [20, 20])
        loss = of(found, "validation loss")
        self.assertLess(abs(loss[gather.LPMM] - loss["torch fp32"]), 0.02)
        tasks = small()
        for kind in ("images", "text"):
            one, four, sixteen = (tasks[f"lpmm, {kind}{x}"] for x in ("", " x 4", " x 16"))
            self.assertEqual(one.steps // 4, four.steps)
            self.assertEqual((four.size, sixteen.size), (4 * one.size, 16 * one.size))
            self.assertEqual({row.passes for row in sixteen.rows}, {16})
            self.assertEqual(len(sixteen.batch(torch.Generator())[0]), sixteen.size)
        self.assertEqual(tasks.keys(), NAMES)

    def test_models(self):
        sets = [(torch.zeros(50, 32, 32, 3).byte(), torch.zeros(50).long())] * 2
        task = lpmm.Images(sets, 1, False, CPU)
        self.assertEqual(sum(p.numel() for p in task.model().parameters()), 11_173_962)
        task = lpmm.Text(language.letters(100), 4, False, CPU)
        self.assertEqual(task.steps, 384)
        self.assertAlmostEqual(task.hypers["lr"], 0.05 * 4**0.25)

    def test_page(self):
        """Verdicts are against fp32; the control is told; accuracies are drawn as errors against bits."""
        head = {"task": "t", "place": 0, "device": "d", "steps": 4, "losses": [1.0], "date": "2026-11-19", "torch": "2"}
        head |= {"bytes": {"weights": 1.0, "state": 1.0, "gradients": 1.0}, "start": 10.0, "peak_gib": 0.5, "parameters": 9}
        runs = {gather.REFERENCE: 90, gather.LPMM: 90, gather.COARSE: 80, "12 bits, nearest": 85, "9 bits, nearest": None}
        looks = [{"step": 1, "unmoved": share} for share in (0.1, 0.5, 0.9)]
        lines = [
            {**head, "row": row, "seed": seed, "errors": looks, "metrics": {"test accuracy": right and right + 0.01 * seed}}
            for row, right in runs.items()
            for seed in range(8)
        ]
        done = reported(lines, "import pictures; print(report.of_task('t', places), pictures.curves('t', rows))")
        self.assertIn("Found worse: `8 bits, nearest`, yes.", done.stdout, done.stderr)
        self.assertIn("| 10 bits, stochastic | 8 | 90.0 | 0 | 0..0 | 0 ±2 | equivalent | 3.00 | 0.500 | 50.0 |", done.stdout)
        self.assertRegex(done.stdout, r"\| 8 bits, nearest \|.*\| worse \|")
        self.assertIn("error against bits", done.stdout)

    def test_missing_data(self):
        done = run(EVIDENCE / "run.py", "lpmm", "--device", "cpu")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("CIFAR-10", done.stderr)
        self.assertIn("classic_books.txt.xz", done.stderr)


if __name__ == "__main__":
    unittest.main()
