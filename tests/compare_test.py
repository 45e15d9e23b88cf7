"""`scruple compare` from outside: its rows, what it says of noise, Ctrl-C, and memory against the plan.

Usage: compare_test.py PATH_TO_SCRUPLE
"""
import json
import os
import pty
import re
import signal
import subprocess

import command
from command import run, shown, start, tiny

WHOLE = os.environ.get("SCRUPLE_TEST_WHOLE", "0") != "0"
ROW_KEYS = {"recipe", "optimizer", "seed", "activations", "bytes_per_param_planned", "bytes_per_param_measured",
            "peak_bytes", "ms_per_step", "steps", "unmoved", "val_loss", "gap"}
# 10.8 million parameters, and nothing to compute.
LARGE = ("--layers", "6", "--width", "384", "--heads", "6", "--context", "8", "--batch", "16", "--steps", "1")


class Compare(command.Case):
    def compare(self, *arguments):
        return self.json_of("compare", *arguments)

    def test_rows(self):
        found = self.compare("--steps", "4", "--seeds", "2", "--no-hazards", *tiny())
        self.assertTrue(0 < found["floor"] < 2)
        self.assertEqual(found["second_seed"], [])
        self.assertEqual({row["recipe"] for row in found["rows"]},
                         {"fp32", "mixed", "split", "flash", "lpmm", "scruple", "scant"})
        self.assertEqual(len(found["rows"]), 2 * 8)  # seven recipes, and fp32 SGD as lpmm's twin
        for row in found["rows"]:
            self.assertEqual(set(row), ROW_KEYS)
            twin = [r for r in found["rows"] if r["recipe"] == "fp32" and r["optimizer"] == row["optimizer"]
                    and r["seed"] == row["seed"]]
            self.assertEqual(row["gap"], row["val_loss"] - twin[0]["val_loss"])

    def test_the_reference_is_fp32_on_every_device(self):
        found = self.compare("--recipes", "fp32,scruple,lpmm", "--no-hazards", "--steps", "2", *tiny())
        self.assertEqual({(row["recipe"], row["activations"]) for row in found["rows"] + found["second_seed"]},
                         {("fp32", "fp32"), ("scruple", "bf16"), ("lpmm", "fp32")})

    def test_the_twin_comes_along(self):
        rows = self.compare("--recipes", "lpmm", "--steps", "2", "--no-hazards", "--micro-batches", "2", *tiny())["rows"]
        self.assertEqual([(row["recipe"], row["optimizer"]) for row in rows], [("fp32", "sgd"), ("lpmm", "sgd")])

    def test_a_gap_that_rounds_to_zero_has_no_minus(self):
        done = run("compare", "--steps", "1", "--lr", "1e-12", "--no-hazards", "--seeds", "1", *tiny("--width", "16"))
        gaps = [line.split()[-1] for line in done.stdout.splitlines() if " adamw " in line]
        self.assertIn("+0.0000", gaps)
        self.assertNotIn("-0.0000", gaps)

    def test_a_second_seed_shows_the_noise(self):
        arguments = ["--steps", "3", "--no-hazards", "--recipes", "fp32,lpmm", *tiny()]
        found, both = self.compare(*arguments), self.compare(*arguments, "--seeds", "2")
        losses = {(row["recipe"], row["optimizer"], row["seed"]): row["val_loss"] for row in both["rows"]}
        self.assertEqual([(row["optimizer"], row["seed"]) for row in found["second_seed"]], [("adamw", 2), ("sgd", 2)])
        for row in found["second_seed"]:
            first, second = (losses["fp32", row["optimizer"], seed] for seed in (1, 2))
            self.assertEqual((row["val_loss"], row["gap"]), (second, second - first))

    def test_the_table_says_what_is_noise(self):
        def printed(*more):
            return self.done("compare", "--steps", "2", "--no-hazards", "--recipes", "fp32,scruple", *more, *tiny())
        self.assertRegex(printed(), r"(?s)fp32, seed 2 .*[+-]0\.\d{4} with adamw\. Gaps of that size are noise")
        self.assertIn("One seed: nothing here tells a gap from noise", printed("--seeds", "1"))
        several = printed("--seeds", "2")
        self.assertRegex(several, r"val loss +sd of loss +gap to fp32 +sd of gap\n")
        self.assertIn("A gap that is not well above its sd is noise", several)

    def stopped(self, *arguments, after, terminal):
        """A comparison that is sent SIGTERM once its progress matches `after`, and what it leaves: text, page. A terminal
        sees the progress at once; elsewhere the last step's is sure to come."""
        reader, writer = pty.openpty() if terminal else os.pipe()
        process = start("compare", "--out", self.path("out"), *tiny(*arguments), stdout=subprocess.PIPE, stderr=writer, text=True)
        os.close(writer)
        self.addCleanup(os.close, reader)
        progress = shown(reader, lambda said: re.search(after, said.decode(errors="replace"), re.DOTALL), 120)
        self.assertRegex(progress, re.compile(after, re.DOTALL))
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[0]
        self.assertEqual(process.returncode, 128 + signal.SIGTERM, said)
        return said, *self.report("out")

    def test_stopped_in_the_first_run(self):
        said, report, page = self.stopped("--steps", "1000000000", "--recipes", "scruple", after="fp32  step ", terminal=True)
        self.assertRegex(said, r"\nfp32 +adamw +.* [\d.]+ \(after step 0\) +-\n")
        self.assertIn("Stopped before fp32 had run from a second seed: nothing here tells a gap from noise", said)
        stop = r"Stopped by SIGTERM in the run 'fp32', after step [\d,]+ of 1,000,000,000: that run is not complete"
        self.assertRegex(said, stop)
        self.assertRegex(report["lead"], stop)
        self.assertIn("(after step 0)", page)

    def test_stopped_among_seeds(self):
        """The first seed is complete: its figures are shown, and the stopped run is in no mean."""
        one = self.compare("--steps", "300", "--recipes", "fp32", "--seeds", "1", "--no-hazards", *tiny())["rows"][0]
        said, _, _ = self.stopped("--steps", "300", "--recipes", "fp32", "--seeds", "1000", "--no-hazards", after="300/300.*300/300",
                               terminal=False)
        whole, stopped = (re.split(r" {2,}", line) for line in said.splitlines() if line.startswith("fp32, "))
        count = int(re.fullmatch(r"fp32, (\d+) of 1,000 seeds", whole[0])[1])
        if count == 1:
            self.assertEqual(whole[-4:], [f"{one['val_loss']:.4f}", "-", "-", "-"])
            self.assertIn("Stopped before any recipe had run from two seeds", said)
        else:  # the signal came late
            self.assertIn("Means over 1,000 seeds, or as many as were finished", said)
        self.assertEqual((stopped[0], stopped[-3:]), (f"fp32, seed {count + 1}", ["-", "-", "-"]))
        self.assertRegex(said, rf"Stopped by SIGTERM in the run 'fp32, seed {count + 1}', after step \d+ of 300")

    def test_ones_own_text(self):
        found = self.compare("--data", self.data, "--steps", "3", "--recipes", "scruple", *tiny())
        self.assertIsNone(found["floor"])
        self.assertEqual([row["recipe"] for row in found["rows"]], ["fp32", "scruple"])
        self.trained("--recipe", "fp32", "--lr", "0.01", "--warmup", "1", "--weight-decay", "0.1", "--validate-every", "1", out="same")
        last = [row for row in self.metrics("same") if "val_loss" in row][-1]
        self.assertEqual(found["rows"][0]["val_loss"], last["val_loss"])  # the same windows, held out and not
        self.fails(1, "short has 5 bytes", "compare", "--data", self.write("short", "short"))
        self.fails(1, "nosuch", "compare", "--data", self.path("nosuch"))

    def test_data_is_cut_as_in_train(self):
        lines = (json.dumps({"text": f"After {i} comes {i + 1}, said the dog."}) + "\n" for i in range(40))
        self.write("notes.jsonl", "".join(lines))
        for number, more in enumerate((("--layout", "padded"), ("--isolate", "--validation", "0.2", "--recompute", "block"))):
            arguments = ("--data", self.path("notes.jsonl"), "--steps", "2", *more, *tiny())
            found = self.compare(*arguments, "--recipes", "fp32", "--seeds", "1")  # with hazards, which see the same windows
            self.done("train", *arguments, "--out", self.path(f"same{number}"), "--recipe", "fp32", "--lr", "0.01", "--warmup", "1",
                      "--weight-decay", "0.1")
            last = [row for row in self.metrics(f"same{number}") if "val_loss" in row][-1]
            self.assertEqual(found["rows"][0]["val_loss"], last["val_loss"], more)
        for more in (("--layout", "packed"), ("--isolate",), ("--validation", "0.1")):
            self.fails(2, more[0] + " is for --data", "compare", *more)
        said = run("compare", "--data", self.path("notes.jsonl"), "--steps", "1", "--recipes", "fp32", "--seeds", "1", "--no-hazards",
                   "--layout", "padded", "--isolate", *tiny()).stderr
        self.assertIn("scruple: --isolate changes nothing here: only packed documents see each other\n", said)
        self.assertIn("scruple: 40 documents longer than --context: cut there, ", said)

    def test_hazards_and_report(self):
        found = self.compare("--recipes", "fp32", "--steps", "4", "--out", self.path("out"), *tiny())
        page = self.report("out")[1]
        self.assertIn(f'"the grammar\'s own loss","value":{found["floor"]!r}', page)
        self.assertGreater(len(page), 10000)
        self.assertEqual(len(found["hazards"]["small_learning_rate"]), 3)
        self.assertEqual(len(found["hazards"]["fp16"]), 3)

    def test_charts_say_what_their_gaps_can_tell(self):
        def notes(*more):
            self.compare("--recipes", "scruple", "--steps", "2", "--out", self.path("out"), *more, *tiny())
            return [chart["note"] for section in self.report("out")[0]["sections"] for chart in section["charts"]]
        alone = "One seed: nothing here tells a small gap from noise."
        self.assertEqual(notes(), ["What is no further from fp32 than its second seed is noise.", alone, alone])
        self.assertEqual(notes("--seeds", "2"), ["Seed 1 of 2: the gaps in the legend are of this seed alone.", alone, alone])
        self.assertEqual(notes("--seeds", "1"), [alone] * 3)

    def test_hazards_harm(self):
        """Without the recipes something is lost: a comparison in which nothing can lose shows nothing."""
        # A smaller model, context and batch are a tenth of the time; fp16's harm wants all of them (trainer_test shows it
        # every day).
        smaller = () if WHOLE else ("--batch", "4", "--width", "32", "--context", "64")
        hazards = self.compare("--recipes", "fp32", "--gradients", "released", "--seeds", "1", *smaller)["hazards"]
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
            rows = self.compare(*LARGE, "--seeds", "1", "--no-hazards", "--gradients", policy)["rows"]
            self.assertEqual(len(rows), 8)
            for row in rows:
                planned, measured = row["bytes_per_param_planned"], row["bytes_per_param_measured"]
                self.assertLess(abs(measured / planned - 1), 0.03, (policy, row))
                self.assertGreater(row["peak_bytes"], measured * 10e6)


if __name__ == "__main__":
    command.main()
