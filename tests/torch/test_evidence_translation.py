"""evidence/translation.py: its small form learns the toy language, and its BLEU is BLEU."""

import math
import sys
import tempfile
import unittest

from test_evidence import EVIDENCE, lines_of, run

sys.path.insert(0, str(EVIDENCE))
import translation  # noqa: E402


class Translation(unittest.TestCase):
    def test_small(self):
        lines = lines_of(self, "translation", "^(torch fp32|scruple|scruple, released)$")
        found = {row: line["metrics"] for row, line in lines.items()}
        self.assertEqual(sorted(found), ["scruple", "scruple, released", "torch fp32"])
        for row in ("torch fp32", "scruple"):  # in the midst of learning: 52 and 63, 0.37 and 0.31
            self.assertGreater(found[row]["BLEU"], 25, row)
            self.assertLess(found[row]["validation loss"], 0.7, row)  # 4.1 at first
        self.assertLess(abs(found["scruple"]["validation loss"] - found["torch fp32"]["validation loss"]), 0.2)
        self.assertEqual(found["scruple"], found["scruple, released"])

    def test_bleu(self):
        same = ["ein Mann, ein Hund", "zwei"]
        self.assertAlmostEqual(translation.bleu(same, same), 100)
        # 5 of 5, 4, 3 and 2 n-grams are right, and 5 words stand for 7.
        self.assertAlmostEqual(translation.bleu(["a b c d e"], ["a b c d e f g"]), 100 * math.exp(1 - 7 / 5))
        # A word counts as often as it is in the reference: 4/5, 3/4, 2/3, 1/2 of the n-grams.
        self.assertAlmostEqual(translation.bleu(["a b c d d"], ["a b c d e"]), 100 * (1 / 5) ** 0.25)
        self.assertEqual(translation.bleu(["a b c"], ["a b c"]), 0)  # no 4-grams

    def test_missing_data(self):
        with tempfile.TemporaryDirectory() as folder:
            for command in (("--data", folder), ()):
                done = run(EVIDENCE / "run.py", "translation", *command)
                self.assertNotEqual(done.returncode, 0)
                self.assertIn("data set Multi30k", done.stderr)


if __name__ == "__main__":
    unittest.main()
