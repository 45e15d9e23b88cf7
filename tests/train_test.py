"""The trainer's commands from outside: what they write, every way to fail, Ctrl-C, memory against the plan.

Usage: train_test.py PATH_TO_SCRUPLE
"""
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

SCRUPLE = ""
WHOLE = os.environ.get("SCRUPLE_TEST_WHOLE", "0") != "0"
ROW_KEYS = {"recipe", "optimizer", "seed", "bytes_per_param_planned", "bytes_per_param_measured", "peak_bytes",
            "ms_per_step", "val_loss", "gap"}
TINY = {"--layers": "1", "--width": "32", "--heads": "2", "--context": "16", "--batch": "4"}
# 10.8 million parameters, and nothing to compute.
LARGE = ("--layers", "6", "--width", "384", "--heads", "6", "--context", "8", "--batch", "1", "--steps", "1")


def tiny(*arguments):
    """The options of a tiny model, but those that are given."""
    return [word for pair in TINY.items() if pair[0] not in arguments for word in pair] + list(arguments)


def run(*arguments):
    return subprocess.run([SCRUPLE, *arguments], capture_output=True, text=True, timeout=300, errors="replace")


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.data = self.path("text")
        with open(self.data, "w", encoding="utf-8") as out:
            out.write("The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n" * 60)

    def path(self, name):
        return os.path.join(self.folder, name)

    def train(self, *arguments, out="run", steps=3):
        return run("train", "--data", self.data, "--out", self.path(out), "--steps", str(steps), *tiny(*arguments))

    def trained(self, *arguments, **options):
        done = self.train(*arguments, **options)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def fails(self, code, message, *arguments):
        done = run(*arguments)
        self.assertEqual(done.returncode, code, f"{arguments}: {done.stdout}{done.stderr}")
        self.assertTrue(done.stderr.startswith("scruple: "), done.stderr)
        self.assertIn(message, done.stderr, arguments)
        return done

    def metrics(self, out="run"):
        with open(self.path(out + "/metrics.jsonl"), encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    def weights(self, out="run"):
        with open(self.path(out + "/model.safetensors"), "rb") as file:
            return file.read()


class Train(Case):
    def test_writes_what_it_says(self):
        said = self.trained(steps=20)
        for name in ("metrics.jsonl", "report.html", "model.safetensors", "config.json"):
            self.assertTrue(os.path.getsize(self.path("run/" + name)) > 0, name)
            self.assertIn(name, said)
        steps = [row for row in self.metrics() if "loss" in row]
        validations = [row for row in self.metrics() if "val_loss" in row]
        self.assertEqual([row["step"] for row in steps], list(range(1, 21)))
        self.assertLess(steps[-1]["loss"], steps[0]["loss"])
        self.assertEqual((validations[0]["step"], validations[-1]["step"]), (0, 20))
        self.assertIn(f"-> {validations[-1]['val_loss']:.4f}", said)

    def test_says_where_every_byte_goes(self):
        said = self.trained()
        rows = {line.split()[0]: float(line.split()[2]) for line in said.splitlines()
                if re.fullmatch(r"[a-z_]+ +[\d.]+ +[\d.]+", line)}
        self.assertEqual(set(rows), {"weights", "extra", "exp_avg", "exp_avg_sq", "scales", "gradients", "activations",
                                     "workspace", "total"})
        self.assertAlmostEqual(rows.pop("total"), sum(rows.values()), delta=0.01)
        self.assertAlmostEqual(rows["weights"], 2, delta=0.001)

    def test_the_same_bits_for_any_number_of_threads(self):
        for threads in (1, 2, 3):
            self.trained("--threads", str(threads), "--gradients", "compressed", out=f"run{threads}")
        self.assertEqual(self.metrics("run1"), self.metrics("run2"))
        self.assertEqual(self.weights("run1"), self.weights("run2"))
        self.assertEqual(self.weights("run1"), self.weights("run3"))

    def test_options_reach_the_run(self):
        for number, arguments in enumerate((
                ("--optimizer", "lion", "--lr", "1e-4"), ("--recipe", "lpmm", "--optimizer", "sgd", "--accumulate", "4"),
                ("--gradients", "released", "--adagc", "1.05"), ("--gradients", "released", "--clip-tensor", "0.1"),
                ("--gradients", "released", "--accumulate", "2", "--accumulation", "adama", "--moments", "fp32"),
                ("--gradients", "compressed", "--accumulate", "2", "--clip", "0.5", "--loss-scale", "dynamic"),
                ("--weights", "fp16+8", "--activations", "fp16"), ("--loss-scale", "128", "--schedule", "linear"),
                ("--gradients", "compressed", "--gradient-format", "fp32"),
                ("--rounding", "stochastic", "--rounding", "exp_avg_sq=nearest"),
                ("--weight-decay", "0.5", "--warmup", "2", "--schedule", "constant"))):
            self.trained(*arguments, out=f"run{number}")
        scaled = [row["loss_scale"] for row in self.metrics("run6") if "loss" in row]
        self.assertEqual(scaled[0], 65536)  # fp16 activations bring dynamic scaling along
        self.assertEqual({row["loss_scale"] for row in self.metrics("run7") if "loss" in row}, {128})
        self.assertEqual([row["lr"] for row in self.metrics("run10") if "loss" in row], [5e-4, 1e-3, 1e-3])

    def test_released_without_clipping_equals_stored_in_fp32(self):
        self.trained("--recipe", "fp32", "--clip", "0", out="a")
        self.trained("--recipe", "fp32", "--gradients", "released", out="b")
        self.trained("--recipe", "fp32", "--gradients", "compressed", "--gradient-format", "fp32", "--clip", "0", out="c")
        self.assertEqual(self.weights("a"), self.weights("b"))
        self.assertEqual(self.weights("a"), self.weights("c"))

    def test_interrupted(self):
        process = subprocess.Popen([SCRUPLE, "train", "--data", self.data, "--out", self.path("run"), "--steps", "1000000",
                                    *tiny()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.time() + 60
        while time.time() < deadline and not (os.path.exists(self.path("run/metrics.jsonl"))
                                              and os.path.getsize(self.path("run/metrics.jsonl")) > 1000):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said, complaints = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 0, complaints)
        self.assertIn("Stopped by Ctrl-C or a signal after step", said)
        self.assertEqual(run("sample", self.path("run"), "--length", "5").returncode, 0)

    def test_divergence_is_said(self):
        said = self.trained("--lr", "1e6", steps=12)
        self.assertIn("diverged", said)
        self.assertIn("steps were skipped", said)
        self.metrics()  # JSON, whatever the numbers

    def test_refusals(self):
        def refused(code, message, *arguments):
            self.fails(code, message, "train", "--data", self.data, "--out", self.path("no"), *tiny(*arguments))
            self.assertFalse(os.path.exists(self.path("no/metrics.jsonl")), arguments)
        refused(2, "compressed", "--gradients", "released", "--clip", "1")
        refused(2, "accumulation", "--gradients", "released", "--accumulate", "4")
        refused(2, "use --clip", "--clip-tensor", "1")
        refused(2, "leave it out", "--accumulation", "adama")
        refused(2, "--gradient-format", "--gradients", "released", "--gradient-format", "int8")
        refused(2, "use --lr", "--set", "lr=5")
        refused(2, "lr", "--lr", "1e300")
        refused(2, "above 0", "--loss-scale", "0")
        refused(2, "multiple", "--width", "33")
        refused(2, "nosuch", "--recipe", "nosuch")
        refused(2, "nosuch", "--optimizer", "nosuch")
        refused(2, "serves", "--recipe", "lpmm")
        refused(2, "dynamic", "--loss-scale", "often")
        refused(2, "--warmup", "--warmup", "2000")
        refused(2, "above 0", "--steps", "0")
        refused(1, "MiB are free", "--width", "65536", "--heads", "16", "--layers", "1000")
        refused(1, "bytes", "--context", "100000")
        refused(2, "context", "--context", "9223372036854775807")
        refused(2, "finite", "--clip", "nan")
        refused(2, "finite", "--lr", "nan")

    def test_bad_files(self):
        def refused(message, data, out):
            self.fails(1, message, "train", "--data", data, "--out", out, *tiny())
        refused("No such file", self.path("missing"), self.path("no"))
        open(self.path("empty"), "w", encoding="utf-8").close()
        refused("0 bytes", self.path("empty"), self.path("no"))
        with open(self.path("short"), "w", encoding="utf-8") as out:
            out.write("ten bytes!")
        refused("10 bytes", self.path("short"), self.path("no"))
        refused("folder", self.data, self.data + "/below")
        refused("/proc/metrics.jsonl", self.data, "/proc")
        self.assertFalse(os.path.exists(self.path("no")))
        self.trained()
        before = self.weights()
        self.fails(1, "earlier run", "train", "--data", self.data, "--out", self.path("run"), *tiny())
        self.assertEqual(before, self.weights())


class Sample(Case):
    def test_continues_the_prompt(self):
        self.trained(steps=150)
        said = run("sample", self.path("run"), "--prompt", "The quick", "--length", "30", "--temperature", "0")
        self.assertEqual(said.returncode, 0, said.stderr)
        self.assertTrue(said.stdout.startswith("The quick"))
        self.assertEqual(len(said.stdout), len("The quick") + 30 + 1)
        draws = [run("sample", self.path("run"), "--seed", seed).stdout for seed in ("1", "1", "2")]
        self.assertEqual(draws[0], draws[1])
        self.assertNotEqual(draws[0], draws[2])

    def test_refusals(self):
        self.fails(1, "config.json", "sample", self.path("missing"))
        self.trained()
        self.fails(2, "finite", "sample", self.path("run"), "--temperature", "nan")
        self.fails(2, "--prompt", "sample", self.path("run"), "--prompt", "")
        with open(self.path("run/model.safetensors"), "r+b") as file:
            file.truncate(1000)
        self.fails(1, "model.safetensors", "sample", self.path("run"))


class Compare(Case):
    def compare(self, *arguments):
        done = run("compare", *arguments, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def test_rows(self):
        found = self.compare("--steps", "4", "--seeds", "2", "--no-hazards", *tiny())
        self.assertTrue(0 < found["entropy"] < 2)
        self.assertEqual({row["recipe"] for row in found["rows"]},
                         {"fp32", "mixed", "split", "flash", "lpmm", "scruple", "scant"})
        self.assertEqual(len(found["rows"]), 2 * 8)  # seven recipes, and fp32 SGD as lpmm's twin
        for row in found["rows"]:
            self.assertEqual(set(row), ROW_KEYS)
            twin = [r for r in found["rows"] if r["recipe"] == "fp32" and r["optimizer"] == row["optimizer"]
                    and r["seed"] == row["seed"]]
            self.assertEqual(row["gap"], row["val_loss"] - twin[0]["val_loss"])

    def test_the_twin_comes_along(self):
        rows = self.compare("--recipes", "lpmm", "--steps", "2", "--no-hazards", "--micro-batches", "2", *tiny())["rows"]
        self.assertEqual([(row["recipe"], row["optimizer"]) for row in rows], [("fp32", "sgd"), ("lpmm", "sgd")])

    def test_hazards_and_report(self):
        found = self.compare("--recipes", "fp32", "--steps", "4", "--out", self.path("out"), *tiny())
        self.assertTrue(os.path.getsize(self.path("out/report.html")) > 10000)
        self.assertEqual(len(found["hazards"]["small_learning_rate"]), 3)
        self.assertEqual(len(found["hazards"]["fp16"]), 3)

    def test_hazards_harm(self):
        """Without the recipes something is lost: a comparison in which nothing can lose shows nothing."""
        # A quarter of the batch is a quarter of the time; fp16's harm wants all of it (trainer_test shows it every day).
        smaller = () if WHOLE else ("--batch", "4")
        hazards = self.compare("--recipes", "fp32", "--gradients", "released", *smaller)["hazards"]
        learned = {kind: [run["val_loss_before"] - run["val_loss"] for run in runs] for kind, runs in hazards.items()}
        fp32, scruple, bf16 = learned["small_learning_rate"]
        self.assertAlmostEqual(scruple / fp32, 1, delta=0.1)
        self.assertLess(bf16, 0.5 * fp32)
        fp32, scaled, unscaled = learned["fp16"]
        self.assertAlmostEqual(scaled / fp32, 1, delta=0.1)
        if WHOLE:
            self.assertLess(unscaled, 0.8 * fp32)

    def test_refusals(self):
        self.fails(2, "nosuch", "compare", "--recipes", "nosuch")
        self.fails(2, "--micro-batches", "compare", "--micro-batches", "3", "--batch", "4")
        self.fails(1, "folder", "compare", "--out", self.data + "/below", "--steps", "1")
        self.fails(1, "/proc/report.html", "compare", "--out", "/proc", "--steps", "1")
        self.fails(2, "layers", "compare", "--layers", "100000000000")

    def test_measured_memory_is_the_planned(self):
        for policy in ("stored", "released", "compressed"):
            rows = self.compare(*LARGE, "--no-hazards", "--gradients", policy)["rows"]
            self.assertEqual(len(rows), 8)
            for row in rows:
                planned, measured = row["bytes_per_param_planned"], row["bytes_per_param_measured"]
                self.assertLess(abs(measured / planned - 1), 0.03, (policy, row))
                self.assertGreater(row["peak_bytes"], measured * 10e6)


if __name__ == "__main__":
    SCRUPLE = sys.argv.pop(1)
    unittest.main()
