"""evidence/: its tasks run in their small form, runs are appended once, and the page is what the lines say.

Run as: python tests/torch/test_evidence.py
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

EVIDENCE = pathlib.Path(__file__).resolve().parents[2] / "evidence"


def run(*command):
    return subprocess.run([sys.executable, "-W", "ignore", *map(str, command)], capture_output=True, text=True)


class Evidence(unittest.TestCase):
    def test_recommendation(self):
        with tempfile.TemporaryDirectory() as folder:
            lines = pathlib.Path(folder) / "lines.jsonl"
            rows = "^(torch fp32|scruple|scruple, released|flash)$"
            command = [EVIDENCE / "run.py", "recommendation", "--small", "--seeds", 1, "--rows", rows, "--lines", lines]
            command += ["--device", "cpu"]
            done = run(*command)
            self.assertEqual(done.returncode, 0, done.stderr)
            found = {line["row"]: line for line in map(json.loads, lines.read_text().splitlines())}
            self.assertEqual(list(found), ["torch fp32", "scruple", "flash", "scruple, released"])
            loss = {row: line["metrics"]["log loss"] for row, line in found.items()}
            self.assertLess(loss["torch fp32"], 0.6)  # 0.66 without features
            self.assertLess(abs(loss["scruple"] - loss["torch fp32"]), 0.01)
            self.assertEqual(loss["scruple"], loss["scruple, released"])
            self.assertEqual(found["scruple, released"]["bytes"]["gradients"], 0)
            off = {row: line["errors"][-1]["relative"] for row, line in found.items() if line["errors"]}
            self.assertLess(off["scruple"], 0.1)
            self.assertGreater(off["flash"], 1)  # second moments that became zero
            again = run(*command)
            self.assertEqual((again.returncode, again.stdout), (0, ""))
            self.assertEqual(len(lines.read_text().splitlines()), 4)

    def test_missing_data(self):
        with tempfile.TemporaryDirectory() as folder:
            done = run(EVIDENCE / "run.py", "recommendation", "--data", folder)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("UCI data set Adult", done.stderr)

    def test_page(self):
        done = run(EVIDENCE / "report.py", "--check")
        self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    unittest.main()
