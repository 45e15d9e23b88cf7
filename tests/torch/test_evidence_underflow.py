"""evidence/underflow.py: in its small form what should fail fails, and what mends it does."""

import math
import unittest

from test_evidence import EVIDENCE, lines_of, run


class Underflow(unittest.TestCase):
    def lines(self, task, rows):
        """By row."""
        found = lines_of(self, "underflow", f"^({rows})$", "--only", task)
        self.assertEqual(len(found), 1 + rows.count("|"))
        for line in found.values():
            line["loss"] = line["metrics"]["validation loss"]
        self.assertLess(found["torch fp32"]["loss"], 4.2)  # 5.5 at first
        return found

    def test_fp16(self):
        found = self.lines("fp16", "torch fp32|fp16|fp16, scaled")
        reference = found["torch fp32"]["loss"]
        self.assertGreater(found["fp16"]["metrics"]["vanished"], 0.1)
        self.assertGreater(found["fp16"]["loss"], reference + 0.3)
        self.assertLess(found["fp16, scaled"]["metrics"]["vanished"], 0.01)
        self.assertLess(abs(found["fp16, scaled"]["loss"] - reference), 0.01)

    def test_accumulation(self):
        some = "8 micro-batches"
        found = self.lines("accumulation", f"torch fp32|int8, {some}|root8, {some}|bf16 by torch, {some}")
        for row, line in found.items():
            self.assertLess(abs(line["loss"] - found["torch fp32"]["loss"]), 0.01, row)
            self.assertLess(line["metrics"]["gradient off by"], 0.05, row)
        half = {row: line["metrics"]["elements off by half"] for row, line in found.items()}
        self.assertEqual(half["torch fp32"], 0)
        self.assertGreater(half[f"root8, {some}"], 0)
        self.assertGreater(half[f"int8, {some}"], 2 * half[f"root8, {some}"])  # small ones beside large ones

    def test_moments(self):
        found = self.lines("moments", "torch fp32|linear8, nearest|companded8, stochastic|log5, stochastic")
        reference = found["torch fp32"]["loss"]
        self.assertGreater(found["linear8, nearest"]["loss"] or math.inf, reference + 1)  # None: not a number at all
        for row in ("companded8, stochastic", "log5, stochastic"):
            self.assertLess(abs(found[row]["loss"] - reference), 0.03, row)
        far = {row: line["errors"][-1]["far"] for row, line in found.items() if line["errors"]}
        self.assertLess(far["companded8, stochastic"], 0.01)
        self.assertLess(far["log5, stochastic"], 0.2)

    def test_data(self):
        done = run(EVIDENCE / "run.py", "underflow", "--data", "here")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("leave --data out", done.stderr)


if __name__ == "__main__":
    unittest.main()
