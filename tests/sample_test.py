"""`scruple sample` from outside: texts from runs and checkpoints, and every way to fail.

Usage: sample_test.py PATH_TO_SCRUPLE
"""
import os

import command
from command import run


class Sample(command.Case):
    def test_from_a_checkpoint(self):
        """The same text as from the weights that the run has written, in every kind of weight."""
        for number, recipe in enumerate((("--recipe", "scruple"), ("--recipe", "lpmm", "--optimizer", "sgd", "--width", "64"),
                                         ("--recipe", "fp32"), ("--weights", "fp16+8"))):
            out = f"run{number}"
            self.trained(*recipe, "--save-every", "3", out=out)
            words = ("--prompt", "The quick", "--length", "20")
            want = run("sample", self.path(out), *words).stdout
            self.assertTrue(want.startswith("The quick"))
            self.assertEqual(run("sample", self.step_of(out, 3), *words).stdout, want, recipe)
            os.remove(self.path(out, "config.json"))
            self.assertEqual(run("sample", self.path(out), *words).stdout, want, recipe)  # only checkpoints are left

    def test_a_prompt_longer_than_the_context_is_said(self):
        self.trained()
        for length, words in ((16, ""), (19, "scruple: the prompt is longer than the context of 16 tokens; the model does not "
                                             "see its first 3\n")):
            done = run("sample", self.path("run"), "--prompt", "a" * length, "--length", "1")
            self.assertEqual((done.returncode, done.stderr), (0, words))

    def test_continues_the_prompt(self):
        self.trained(steps=150)
        said = self.done("sample", self.path("run"), "--prompt", "The quick", "--length", "30", "--temperature", "0")
        self.assertTrue(said.startswith("The quick"))
        self.assertEqual(len(said), len("The quick") + 30 + 1)
        # 17 bytes are more than the context: the model reads the last 8 of them anew.
        again = run("sample", self.path("run"), "--prompt", said[9:17], "--length", "9", "--temperature", "0")
        self.assertEqual(again.stdout, said[9:26] + "\n")
        draws = [run("sample", self.path("run"), "--seed", seed).stdout for seed in ("1", "1", "2")]
        self.assertEqual(draws[0], draws[1])
        self.assertNotEqual(draws[0], draws[2])

    def test_refusals(self):
        self.fails(1, f"there is nothing at {self.path('missing')}; give the folder of a run", "sample", self.path("missing"))
        self.fails(1, f"{self.data} is no folder; give the folder of a run", "sample", self.data)
        self.fails(1, "has neither config.json nor a complete checkpoint", "sample", self.folder)
        self.trained()
        self.fails(2, "--length", "sample", self.path("run"), "--length", "0")
        self.fails(2, "finite", "sample", self.path("run"), "--temperature", "nan")
        self.fails(2, "--prompt", "sample", self.path("run"), "--prompt", "")
        with open(self.path("run/model.safetensors"), "r+b") as file:
            file.truncate(1000)
        self.fails(1, "model.safetensors", "sample", self.path("run"))


if __name__ == "__main__":
    command.main()
