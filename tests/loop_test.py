"""What `scruple train` does over its steps, from outside: schedules, rates by name.

Usage: loop_test.py PATH_TO_SCRUPLE
"""

import math
import os

import command
from command import content, run


class Case(command.Case):
    batch = "2"

    def rates(self, out="run"):
        return [row["lr"] for row in self.metrics(out) if "lr" in row]

    def refused(self, code, message, *arguments):
        self.fails(code, message, *self.training(*arguments, out="no"))
        self.assertFalse(os.path.exists(self.path("no")))


class Schedules(Case):
    WSD = ("--schedule", "wsd", "--warmup", "2", "--cooldown", "0.5", "--min-lr", "1e-4")

    def test_a_plateau_and_its_end(self):
        said = self.trained(*self.WSD, steps=10)
        self.assertIn("; lr 0.001 wsd to 0.0001 over the last 5 steps, seed 1\n", said)
        falls = [1e-4 + 9e-4 * (1 - k / 6) for k in range(1, 6)]
        for got, wanted in zip(self.rates(), [5e-4, 1e-3, 1e-3, 1e-3, 1e-3, *falls], strict=True):
            self.assertAlmostEqual(got, wanted)
        self.assertIn("10 steps of", said)
        self.assertIn("wsd to 0.0001 over the last 5 steps", content(self.path("run/report.html")).decode())

    def test_a_longer_plateau(self):
        """From a save of the plateau the bits are those of a run that was meant to be as long."""
        self.trained(*self.WSD, "--validate-every", "5", "--save-every", "5", "--keep", "0", out="a", steps=10)
        self.trained(*self.WSD, "--validate-every", "5", out="b", steps=20)
        said = self.done("train", "--resume", self.step_of("a", 5), "--out", self.path("c"), "--steps", "20")
        self.assertIn("from 10 steps to 20: the plateau of wsd is longer, and the rate falls over the last 10 steps; "
                      "learning rate 0.001 at step 5, 0.001 at step 6\n", said)  # fmt: skip
        self.assertEqual(self.weights("c"), self.weights("b"))
        self.assertEqual(self.rates("c"), self.rates("b")[5:])
        # From its end the rate goes up again, and that is said.
        said = self.done("train", "--resume", self.path("a"), "--steps", "20")
        self.assertIn("learning rate 0.00025 at step 10, 0.000918182 at step 11\n", said)

    def test_the_inverse_square_root(self):
        said = self.trained("--schedule", "inverse-sqrt", "--warmup", "2", "--save-every", "8", steps=8)
        self.assertIn("; lr 0.001 inverse-sqrt, seed 1\n", said)
        for step, rate in enumerate(self.rates(), 1):
            self.assertAlmostEqual(rate, 5e-4 * step if step < 2 else 1e-3 * math.sqrt(2 / step))
        said = self.done("train", "--resume", self.path("run"), "--steps", "9")
        self.assertIn("from 8 steps to 9: the inverse-sqrt schedule goes on; learning rate 0.0005 at step 8", said)

    def test_refusals(self):
        self.refused(2, "--cooldown is for --schedule wsd, and --schedule is cosine", "--cooldown", "0.5")
        self.refused(2, "--min-lr has no effect: --schedule constant does not fall",
                     "--schedule", "constant", "--min-lr", "1e-5")  # fmt: skip
        self.refused(2, "--min-lr is 0.01, above the peak --lr 0.001", "--min-lr", "0.01")
        self.refused(2, "--warmup is 2 and --cooldown 0.5 of 3 steps, 2; together they must be at most --steps",
                     "--schedule", "wsd", "--cooldown", "0.5", "--warmup", "2")  # fmt: skip
        self.refused(2, "did you mean 'inverse-sqrt'?", "--schedule", "inverse-sqr")


class ByName(Case):
    def test_what_is_0_stays(self):
        """Rates and decays by name are the run's, and it goes on with them."""
        more = ("--lr-for", "*.wte.*=0", "--lr-for", "*mlp*=0.5", "--weight-decay-for", "*attn*=0.3", "--recipe", "fp32",
                "--schedule", "constant", "--warmup", "0", "--save-every", "2", "--keep", "0")  # fmt: skip
        self.trained(*more, out="a", steps=4)
        self.trained("--recipe", "fp32", out="start", steps=0)
        for name in ("wte", "wpe"):
            a, start = [self.tensor(out, f"transformer.{name}.weight") for out in ("a", "start")]
            self.assertEqual(a == start, name == "wte", name)
        whole = self.weights("a")
        os.rename(self.step_of("a", 4), self.path("away"))
        os.remove(self.path("a/report.html"))
        self.done("train", "--resume", self.path("a"))
        self.assertEqual(self.weights("a"), whole)
        notes = self.manifest("a", 4)["trainer"]
        self.assertEqual((notes["lr-for"], notes["weight-decay-for"]), ("*.wte.*=0\n*mlp*=0.5", "*attn*=0.3"))
        self.assertEqual(len(self.manifest("a", 4)["groups"]), 6)
        self.fails(2, "--resume takes --lr-for from the run", "train", "--resume", self.path("a"), "--lr-for", "*=1")

    def tensor(self, out, name):
        header, bytes_of = command.tensors_of(self.path(out, "model.safetensors"))
        return header[name]["dtype"], bytes(bytes_of(header[name]))

    def test_refusals(self):
        done = run(*self.training("--lr-for", "lm_head.*=0.5", out="no"))
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertRegex(done.stderr, r"^scruple: --lr-for: no parameter of the model has a name like 'lm_head\.\*'; \* "
                         r"stands for any letters\. Names: transformer\.wte\.weight, .* and \d+ more\n$")  # fmt: skip
        self.refused(2, "did you mean 'transformer.wte.weight'?", "--weight-decay-for", "transformer.wte.wieght=0")
        for wrong in ("wte", "=1"):
            self.refused(2, f"--lr-for is '{wrong}'; it must be a pattern of names and a number", "--lr-for", wrong)
        self.refused(2, "must be finite, and 0 or more", "--lr-for", "*=-1")
        self.refused(2, "--weight-decay-for *=x", "--weight-decay-for", "*=x")


if __name__ == "__main__":
    command.main()
