"""Runs every file of examples/ for a few steps, saves and resumes where it can, and checks that its loss
fell.
"""

import ast
import concurrent.futures
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LOSS = re.compile(r"loss\W+([0-9.]+)")


def run(*command):
    """The output of an example, and the losses in it."""
    paths = [os.environ.get("PYTHONPATH"), str(ROOT / "python")]
    settings = dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONWARNINGS="ignore")
    settings.update(PYTHONPATH=os.pathsep.join(filter(None, paths)))
    command = [sys.executable, *map(str, command)]
    how = dict(cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True, timeout=300)
    found = subprocess.run(command, **how)
    if found.returncode:
        said = f"{found.stdout}\n{found.stderr[-4000:]}"
        raise AssertionError(f"{' '.join(command)} ended with {found.returncode}:\n{said}")
    return found.stdout, [float(loss) for loss in LOSS.findall(found.stdout)]


TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"


def gpt(folder):
    first = run("examples/gpt.py", "--steps", 20, "--save", folder / "gpt.pt")
    return first, run(
        "examples/gpt.py", "--steps", 22, "--resume", folder / "gpt.pt", "--gradients", "released"
    )


def images(folder):
    return [run("examples/images.py", "--steps", 41, "--recipe", recipe) for recipe in ("scruple", "lpmm")]


def fsdp2(folder):
    first = run(*TORCHRUN, 2, "examples/fsdp2.py", "--steps", 12, "--save", folder / "fsdp2")
    return first, run(
        *TORCHRUN, 1, "examples/fsdp2.py", "--steps", 14, "--load", folder / "fsdp2", "--gradients", "stored"
    )


def trainer(folder):
    first = run("examples/trainer.py", "--output", folder / "trainer", "--steps", 20)
    return first, run(
        *("examples/trainer.py", "--output", folder / "trainer", "--steps", 30, "--resume"),
        *("--gradients", "compressed"),
    )


class Examples(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.pool = concurrent.futures.ThreadPoolExecutor(2)  # most of the time goes into imports
        kept = [gpt, images, fsdp2] + ([trainer] if importlib.util.find_spec("transformers") else [])
        cls.runs = {example: cls.pool.submit(example, pathlib.Path(cls.folder.name)) for example in kept}

    @classmethod
    def tearDownClass(cls):
        cls.pool.shutdown()
        cls.folder.cleanup()

    def assert_fell(self, losses, share):
        self.assertGreater(len(losses), 1, losses)
        self.assertLess(losses[-1], share * losses[0], losses)

    def test_gpt(self):
        (said, losses), (_, more) = self.runs[gpt].result()
        self.assert_fell(losses, 0.6)
        self.assertIn("optimizer 3.1", said)
        self.assertLess(more[-1], 0.6 * losses[0])

    def test_images(self):
        for _, losses in self.runs[images].result():
            self.assert_fell(losses, 0.8)

    def test_fsdp2(self):
        (_, losses), (_, more) = self.runs[fsdp2].result()
        self.assert_fell(losses, 0.9)
        self.assertLess(more[-1], 0.9 * losses[0])

    def test_trainer(self):
        if trainer not in self.runs:
            self.skipTest("transformers is not installed")
        (_, losses), (said, more) = self.runs[trainer].result()
        self.assert_fell(losses[:2], 0.9)
        self.assertLess(more[0], losses[1])
        self.assertNotIn("'epoch': '0.03906'", said, "it began anew")
        self.assertNotIn("'grad_norm': '0'", said)

    def test_all_are_described(self):
        """Every example has a docstring with its command and is in the table."""
        table = (ROOT / "examples/README.md").read_text()
        for path in sorted((ROOT / "examples").glob("*.py")):
            described = ast.get_docstring(ast.parse(path.read_text())) or ""
            self.assertIn(f"examples/{path.name}", described)
            self.assertIn(path.name, table)


if __name__ == "__main__":
    unittest.main()
