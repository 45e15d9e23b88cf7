"""evidence/: pretraining, fine-tuning and bits in their small forms."""

import unittest

from test_evidence import EVIDENCE, lines_of, run


class Language(unittest.TestCase):
    def test_pretraining(self):
        found = lines_of(self, "pretraining", "^(torch fp32|scruple|scruple, released)$")
        loss = {row: line["metrics"]["validation loss"] for row, line in found.items()}
        self.assertLess(loss["torch fp32"], 1.0)  # 3.3 knows nothing; where a line ends cannot be known
        self.assertLess(abs(loss["scruple"] - loss["torch fp32"]), 0.02)
        self.assertEqual(loss["scruple"], loss["scruple, released"])
        self.assertEqual([error["step"] for error in found["scruple"]["errors"]], [50, 120, 190])

    def test_finetuning(self):
        rows = "^(torch fp32|scruple|torch bf16)$"
        found = lines_of(self, "finetuning", rows, "--only", "0.0001")
        loss = {row: line["metrics"]["loss on summaries"] for row, line in found.items()}
        before = found["torch fp32"]["losses"][0]
        self.assertGreater(before - loss["torch fp32"], 2)
        self.assertLess(abs(loss["scruple"] - loss["torch fp32"]), 0.2)
        self.assertGreater(loss["torch bf16"] - loss["torch fp32"], 1)  # updates below the last bit are lost

    def test_bits(self):
        found = lines_of(self, "bits", "^(torch fp32|0 bits, (nearest|stochastic)|8 bits, nearest)$")
        loss = {row: line["metrics"]["loss on summaries"] for row, line in found.items()}
        exact = loss["torch fp32"]
        self.assertGreater(loss["0 bits, nearest"] - exact, 1)
        self.assertLess(abs(loss["0 bits, stochastic"] - exact), 0.2)
        self.assertLess(abs(loss["8 bits, nearest"] - exact), 0.1)
        # A byte, two moments in fp32, and a count per tensor.
        self.assertAlmostEqual(found["8 bits, nearest"]["bytes"]["state"], 9, delta=0.01)

    def test_missing_data(self):
        for task, words in (("pretraining", "books"), ("finetuning", "SciTLDR")):
            done = run(EVIDENCE / "run.py", task)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(words, done.stderr)
        done = run(EVIDENCE / "run.py", "pretraining", "--small", "--times", "--jobs", 2)
        self.assertIn("leave --jobs out", done.stderr)


if __name__ == "__main__":
    unittest.main()
