"""The trainer's commands from outside: what they write, every way to fail, Ctrl-C.

Usage: train_test.py PATH_TO_SCRUPLE
"""
import fcntl
import json
import math
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time

import command
from command import content, run, shown, start, tiny, until


class Case(command.Case):
    def trains(self, code, message, *arguments, **options):
        """A run that ends so, maybe after other words."""
        return self.ends(code, message, *self.training(*arguments, **options))

    def values(self, out="run"):
        """The weights without their step."""
        weights = self.weights(out)
        return weights[8 + struct.unpack("<q", weights[:8])[0]:]

    def losses(self, out="run"):
        return [row for row in self.metrics(out) if "loss" in row]


class Train(Case):
    def test_writes_what_it_says(self):
        said = self.trained(steps=20)
        for name in ("metrics.jsonl", "report.html", "model.safetensors", "config.json"):
            self.assertTrue(os.path.getsize(self.path("run/" + name)) > 0, name)
            self.assertIn(name, said)
        steps = self.losses()
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

    def test_the_page_has_memory_by_kind_of_every_step(self):
        """What the table says before the start, in lines; accumulators are there within a step alone."""
        said = self.trained("--gradients", "compressed", "--memory-limit", "30MiB", steps=20)
        unit = re.search(r"^memory +(\w+) ", said, re.M)[1]
        rows = dict(re.findall(r"^([a-z_]+) +([\d.]+) +[\d.]+$", said, re.M))
        chart = self.memory_chart("run")
        self.assertEqual((chart["y_label"], chart["stacked"]), (unit, True))
        self.assertEqual({curve["name"] for curve in chart["curves"]}, set(rows) - {"total"})
        for curve in chart["curves"]:
            self.assertEqual(curve["x"], [1, 20], curve["name"])  # it stays the same, and is told once
            for amount in curve["y"]:
                self.assertEqual(f"{amount:.2f}", rows[curve["name"]], curve["name"])
        self.assertGreater(float(rows["gradients"]), 0)
        self.assertEqual(chart["levels"], [])  # 30 MiB are far away
        near = f"{1.2 * float(rows['total']):.2f}"
        self.trained("--gradients", "compressed", "--memory-limit", near + unit, out="tight")
        limit, = self.memory_chart("tight")["levels"]
        self.assertAlmostEqual(limit["value"], float(near), delta=0.01)

    def memory_chart(self, run):
        chart, = next(section for section in self.report(run)[0]["sections"] if section["title"] == "Memory")["charts"]
        return chart

    def test_the_same_bits_for_any_number_of_threads(self):
        for threads in (1, 2, 3):
            self.trained("--threads", str(threads), "--gradients", "compressed", out=f"run{threads}")
        self.assertEqual(self.metrics("run1"), self.metrics("run2"))
        self.assertEqual(self.weights("run1"), self.weights("run2"))
        self.assertEqual(self.weights("run1"), self.weights("run3"))

    def test_devices(self):
        """The first line names the device; one that is not here is refused with what is."""
        said = self.trained("--device", "cpu", "--threads", "1", "--save-every", "3")
        self.assertRegex(said.splitlines()[0], r" parameters; CPU, 1 thread$")
        resumed = run("train", "--resume", self.path("run"), "--steps", "4", "--device", "cpu", "--threads", "2")
        self.assertRegex(resumed.stdout.splitlines()[0], r" parameters; CPU, 2 threads$")
        self.assertNotIn("to the bit", resumed.stdout)
        moved = run("train", "--resume", self.path("run"), "--steps", "5", "--device", "cuda")
        if moved.returncode == 0:
            self.assertIn("on cuda after cpu: ", moved.stdout)
            self.assertNotIn("to the bit", run("train", "--resume", self.path("run"), "--steps", "6").stdout)
        else:
            self.assertRegex(moved.stderr, "^scruple: .* cpu")
            engines = {one["name"]: one for one in json.loads(run("list", "--json").stdout)["engines"]}
            words = f"scruple: there is no GPU that this build can use ({engines['cuda']['reason']}); use --device cpu\n"
            for arguments in (("train", "--data", self.path("missing"), "--out", self.path("no")), ("compare",)):
                self.fails(1, words, *arguments, "--device", "cuda", *tiny())
            self.assertEqual(len(self.losses()), 4)
        for device, words in (("tpu", "none of auto, cuda, cpu"), ("gpu", "a GPU is 'cuda' here"),
                              ("cuda:1", "set CUDA_VISIBLE_DEVICES=1")):
            self.fails(2, words, "train", "--data", self.data, "--out", self.path("no"), "--device", device)
        for arguments in (self.training(out="no", steps=1), ("sample", self.path("run"))):
            self.assertIn("none of auto, cuda, cpu", run(*arguments, env={"SCRUPLE_DEVICE": "tpu"}).stderr)

    def test_a_limit_of_memory(self):
        """Less than the table's total is refused with the table, as much is not."""
        said = self.trained("--layers", "2")
        total = float(re.search(r"^total +([\d.]+) ", said, re.M)[1])
        unit = re.search(r"^memory +(\w+) ", said, re.M)[1]
        self.trained("--layers", "2", "--memory-limit", f"{total + 0.01}{unit}", out="fits")
        for limit in (f"{total - 0.01}{unit}", "1000B", "1KiB"):
            done = self.trains(1, "the run needs ", "--layers", "2", "--memory-limit", limit, out="no")
            self.assertRegex(done.stderr, r"^scruple: the run needs .* and --memory-limit is \S+ \w+; choose a smaller model, "
                             "--batch, --context or --recipe, or --recompute block, or --gradients released or compressed\\b")
            self.assertRegex(done.stderr, r"\ntotal ")
            self.assertFalse(os.path.exists(self.path("no")))
        for wrong in ("46", "GiB", "46Gi", "46gib", "-1GiB", "0GiB", "1e9TiB", "nanGB", "1BB", "1iB", ""):
            self.trains(2, f"--memory-limit is '{wrong}'; it must be a size such as 46GiB, 48GB or 500MiB", "--memory-limit", wrong)

    def test_as_little_is_recomputed_as_fits(self):
        """Into memory, or a limit; the bits are the same."""
        model = ("--layers", "4", "--width", "64", "--batch", "8", "--context", "64", "--device", "cpu")
        totals, weights = {}, set()
        for how in ("none", "mlp", "keep-attention", "block"):
            said = self.trained(*model, "--recompute", how, out=how)
            totals[how] = float(re.search(r"^total +([\d.]+) ", said, re.M)[1])
            unit = re.search(r"^memory +(\w+) ", said, re.M)[1]
        self.assertEqual(sorted(totals.values(), reverse=True), list(totals.values()))
        for how, total in totals.items():
            said = self.trained(*model, "--recompute", "auto", "--memory-limit", f"{total + 0.01}{unit}", out="auto " + how)
            self.assertEqual(re.findall(r", recompute ([\w-]+)", said), [how] if how != "none" else [])
            self.assertEqual(float(re.search(r"^total +([\d.]+) ", said, re.M)[1]), total)
            weights |= {content(self.path(f"{out}/model.safetensors")) for out in (how, "auto " + how)}
        self.assertEqual(len(weights), 1)
        self.assertNotIn("recompute", self.trained(*model, "--recompute", "auto", out="all of it"))
        self.trains(1, "the run needs", *model, "--recompute", "auto", "--memory-limit", f"{totals['block'] - 0.01}{unit}", out="no")

    def test_what_would_take_less_is_named(self):
        """As far as the run does not have it."""
        def advice(*arguments):
            done = self.trains(1, "the run needs", "--memory-limit", "1KiB", "--device", "cpu", *arguments, out="no")
            return re.search("; (choose .*)", done.stderr)[1]
        smaller, gradients = "choose a smaller model, --batch, --context or --recipe", ", or --gradients released or compressed"
        self.assertEqual(advice(), f"{smaller}, or --recompute block{gradients}")
        self.assertEqual(advice("--recompute", "mlp"), f"{smaller}, or --recompute block{gradients}")
        self.assertEqual(advice("--recompute", "block"), f"{smaller}{gradients}")
        self.assertEqual(advice("--gradients", "compressed"), f"{smaller}, or --recompute block, or --gradients released")
        self.assertEqual(advice("--gradients", "released", "--recompute", "block", "--batch", "1"),
                         "choose a smaller model, --context or --recipe")

    def test_offloading_is_for_a_gpu(self):
        words = "--offload is for a GPU, and this run is on the CPU; leave it out, or use --device cuda"
        cpu = ("--device", "cpu", "--offload", *tiny())
        self.fails(2, words, "train", "--data", self.data, "--out", self.path("no"), *cpu)
        self.fails(2, words, "compare", *cpu)
        for what in ("state", "activations,state"):
            self.fails(2, words, "train", "--data", self.data, "--out", self.path("no"), "--device", "cpu", "--offload", what)
        self.fails(2, "--offload: 'weights' is nothing that can be offloaded; use activations, state, activations,state, auto or none",
                   "train", "--data", self.data, "--out", self.path("no"), "--offload", "state,weights")  # fmt: skip
        self.assertFalse(os.path.exists(self.path("no")))
        self.assertNotIn("activations (default", self.done("train", "--help"))
        self.assertNotIn("offload", self.trained("--device", "cpu", "--offload", "auto"), "a CPU needs none")
        done = self.trains(1, "the run needs", "--device", "cpu", "--offload", "auto", "--memory-limit", "1KiB", out="no")
        self.assertNotIn("in host memory", done.stderr)

    def test_what_fits_on_a_gpu(self):
        """Residuals and recomputing before the state; what the host has no memory for is refused before anything is taken."""
        gpu = ("--device", "cuda", "--layers", "6", "--width", "256", "--heads", "4", "--batch", "64", "--context", "64")
        done = run(*self.training(*gpu, out="none", steps=3))
        if "there is no GPU that this build can use" in done.stderr or "no trainer for GPUs" in done.stderr:
            self.skipTest("no GPU")
        self.assertRegex(done.stdout, r"\nmemory +MiB")
        most = int(float(re.search(r"^total +([\d.]+) ", done.stdout, re.M)[1]) - 1) << 20  # residuals are 8
        auto = ("--offload", "auto", "--memory-limit", f"{most}B", "--save-every", "2")
        chosen = r"activations bf16, offload activations, clip 1; lr "
        said = self.trained(*gpu, *auto, out="activations")
        self.assertRegex(said, chosen)
        self.assertRegex(said, r"\nactivations, in host memory +[\d.]+ ")
        self.assertEqual(self.values("none"), self.values("activations"))
        said = self.trained(*gpu, *auto, "--recompute", "auto", out="both")
        self.assertRegex(said, chosen)
        self.assertEqual(self.manifest("both", 2)["trainer"]["offload"], "auto")
        resumed = self.done("train", "--resume", self.path("both"), "--device", "cuda", "--steps", "4", "--memory-limit", f"{most}B")
        self.assertRegex(resumed, chosen)
        wide = ("--device", "cuda", "--width", "8192", "--heads", "64", "--recipe", "mixed", "--gradients", "released")
        said = self.trains(1, " are free on the GPU; choose a smaller model", *wide, "--layers", "4000", out="no").stderr
        free = float(re.search(r"and ([\d.]+) GiB are free on the GPU", said)[1])
        layers = str(int(free * 0.6 / 1.5))  # 1.5 GiB of weights, and 9 of state
        for offload in ("state", "auto"):
            done = run(*self.training(*wide, "--layers", layers, "--offload", offload, out="no", steps=0))
            if done.returncode == 0:
                self.skipTest("the host has six times the memory of the GPU")
            said = done.stderr
            self.assertRegex(said, r"the run's --offload \S*state needs [\d.]+ GiB, and [\d.]+ [MG]iB of host memory are free; no other "
                             r"--recompute and --offload would fit")
            self.assertRegex(said, r"\nexp_avg, in host memory +[\d.]+ ")
            self.assertFalse(os.path.exists(self.path("no")))

    def test_every_recipe_of_sgd_is_planned_for_a_gpu(self):
        """Counted only by a build with CUDA."""
        shape = {"n_layer": 1, "n_embd": 64, "n_head": 2, "n_positions": 64, "vocab_size": 256}
        config = self.write("gpu.json", json.dumps({"model_type": "gpt2", "activation_function": "gelu_new", **shape}))
        done = run("plan", config, "--optimizer", "sgd", "--batch", "1", "--context", "16", "--device", "cuda")
        if "this build has no trainer for GPUs" in done.stderr:
            self.skipTest("no CUDA in this build")
        for recipe in "fp32", "scruple", "lpmm":
            self.assertRegex(done.stdout, rf"(?m)^{recipe} ", done.stderr)

    def test_numbers_are_grouped(self):
        """Wherever people read them, and in no path."""
        small = ("--width", "4", "--heads", "1", "--context", "2", "--batch", "1")
        self.trained("--save-every", "1000", "--keep", "0", *small, steps=1100)
        self.assertIn("1,100 of 1,100 steps; validation", self.report()[0]["lead"])
        os.rename(self.step_of("run", 1100), self.path("away"))
        resumed = run("train", "--resume", self.path("run"), "--steps", "1200")
        self.assertIn(f"going on after step 1,000, from {self.path('run/checkpoints/step-00001000')}\n", resumed.stdout)
        self.assertRegex(resumed.stdout, r"from 1,100 steps to 1,200: .* at step 1,000, \S+ at step 1,001\n")
        self.assertIn("step 1,200/1,200", resumed.stderr)
        self.assertIn(": step 1,200, ", run("checkpoint", "inspect", self.path("run")).stdout)
        self.fails(2, "the run has 1,200", "train", "--resume", self.path("run"), "--steps", "9")

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
        self.assertEqual(self.losses("run6")[0]["loss_scale"], 65536)  # fp16 activations bring dynamic scaling along
        self.assertEqual({row["loss_scale"] for row in self.losses("run7")}, {128})
        self.assertEqual([row["lr"] for row in self.losses("run10")], [5e-4, 1e-3, 1e-3])

    def test_released_without_clipping_equals_stored_in_fp32(self):
        self.trained("--recipe", "fp32", "--clip", "0", out="a")
        self.trained("--recipe", "fp32", "--gradients", "released", out="b")
        self.trained("--recipe", "fp32", "--gradients", "compressed", "--gradient-format", "fp32", "--clip", "0", out="c")
        self.assertEqual(self.weights("a"), self.weights("b"))
        self.assertEqual(self.weights("a"), self.weights("c"))

    def test_adamw_over_weights_in_codes(self):
        """Rounded stochastically unless another rounding is named; of few elements in fp32, as in lpmm."""
        for more, rounding in (((), "stochastic"), (("--rounding", "weights=nearest"), "nearest")):
            self.trained("--weights", "int12", *more, "--gradients", "compressed", "--save-every", "1", "--force")
            for tensor in self.manifest("run", 3)["tensors"]:
                weight, few = tensor["arrays"][0], math.prod(tensor["shape"]) <= 4096
                wanted = ("fp32", "nearest") if few else ("int12", rounding)
                self.assertEqual((weight["format"], weight["rounding"]), wanted, tensor["name"])
                self.assertEqual(tensor["arrays"][1]["format"], "companded8")
        self.fails(2, "with adamw choose recipe scruple and weights in int12", *self.training("--recipe", "lpmm", out="b"))

    def test_steps_that_move_no_weight_are_told(self):
        said = self.trained("--weights", "int8", "--rounding", "weights=nearest", "--lr", "1e-7", "--validate-every", "2")
        steps = [row for row in self.metrics() if "loss" in row]
        self.assertEqual([row["step"] for row in steps if "unmoved" in row], [2, 3])
        last = steps[-1]
        self.assertTrue(0.9 < last["unmoved"] <= last["unmoved_most"] == 1, last)
        self.assertTrue(last["unmoved_tensor"].startswith("transformer."), last)
        share = 50 * (steps[-2]["unmoved"] + last["unmoved"])
        self.assertIn(f"\na step left {share:.1f} % of the weights as they were, mean of 2 steps\n", said)
        self.assertIn("Unmoved weights", self.report()[1])
        said = self.trained("--recipe", "fp32", out="exact")
        self.assertNotIn("a step left", said)
        self.assertFalse(any("unmoved" in row for row in self.metrics("exact")))

    def interrupt(self, number, out):
        """Starts a long run, sends it the signal after some steps, and returns its exit code and what it said."""
        process = start(*self.training(out=out, steps=1000000), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        metrics = self.path(out, "metrics.jsonl")
        until(lambda: os.path.exists(metrics) and os.path.getsize(metrics) > 1000)
        process.send_signal(number)
        said, complaints = process.communicate(timeout=60)
        self.assertIn("stopping after this step", complaints)
        return process.returncode, said

    def test_interrupted(self):
        for number, name, out in ((signal.SIGTERM, "SIGTERM", "other"), (signal.SIGINT, "SIGINT", "run")):
            code, said = self.interrupt(number, out)
            self.assertEqual(code, 128 + number, said)
            self.assertRegex(said, rf"Stopped by .*{name}.* after step [\d,]+ of 1,000,000\. To go on:\n  \S")
        # What it says of validations is of their steps, and never of the end.
        taken = int(re.search(r"after step ([\d,]+) of", said)[1].replace(",", ""))
        validations = [row["step"] for row in self.metrics() if "val_loss" in row]
        self.assertEqual(validations, [0])
        self.assertRegex(said, r"validation loss [\d.]+ \(after step 0\) nats")
        self.assertRegex(self.report()[0]["lead"], rf"{taken:,} of 1,000,000 steps; validation loss [\d.]+ \(after step 0\) nats")
        self.assertEqual(run("sample", self.path("run"), "--length", "5").returncode, 0)
        # The command that it names goes on, though no --save-every was given.
        self.assertEqual(os.listdir(self.path("run/checkpoints")), [f"step-{taken:08}"])
        command = said[said.index("To go on:") + len("To go on:"):].strip()
        resumed = subprocess.Popen(["sh", "-c", "exec " + command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.assertIn("gpt: ", resumed.stdout.readline())
        while "going on" not in (line := resumed.stdout.readline()):
            self.assertTrue(line, command)
        self.assertIn(f"going on after step {taken:,}, ", line)
        resumed.kill()
        resumed.communicate()

    def test_interrupted_before_a_step(self):
        """A new run that has taken no step leaves the old one as it was."""
        self.trained()
        before = (self.metrics(), self.weights())
        large = ("--layers", "4", "--width", "256", "--heads", "4", "--context", "1024", "--batch", "1")  # 64 of them: seconds

        def stopped(out):
            process = start("train", "--data", self.data, "--out", self.path(out), "--force", *large, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)
            while not (line := process.stdout.readline()).startswith("total"):
                self.assertTrue(line)
            process.send_signal(signal.SIGTERM)
            said = process.communicate(timeout=250)[1]
            self.assertEqual(process.returncode, 128 + signal.SIGTERM, said)
            self.assertIn("nothing was written", said)
        stopped("run")
        self.assertEqual((self.metrics(), self.weights()), before)
        os.mkdir(self.path("mine"))
        stopped("mine")
        self.assertEqual(os.listdir(self.path("mine")), [])
        stopped("new")
        self.assertFalse(os.path.exists(self.path("new")))

    def test_divergence_is_said(self):
        result = self.trains(1, "diverged", "--lr", "1e6", steps=12)
        self.assertIn("steps were skipped", result.stdout)
        self.metrics()  # JSON, whatever the numbers

    def test_a_run_that_learns_nothing_says_so_first(self):
        """Its loss is finite and above where it began: an exit code of its own, and what it wrote is whole."""
        result = self.trains(3, "the validation loss ended above where it began, ", "--lr", "1", steps=20)
        self.assertIn("choose a smaller --lr", result.stderr)
        self.assertIn("wrote", result.stdout)
        self.metrics()
        self.trained("--force", steps=20)

    def test_a_run_that_diverges_ends_with_its_last_good_state(self):
        """Not after its last step. A checkpoint of ruined weights is removed, and --keep 1 has not cost the one before."""
        for keep in ("1", "2"):
            self.trained("--lr", "0.001", "--schedule", "constant", "--warmup", "0", "--save-every", "1", "--keep", keep,
                         "--force", steps=4)
            good = self.weights()
            self.rewrite("run", 4, '"lr":"0.001"', '"lr":"1e30"')
            for _ in range(2):
                self.ends(1, "the training diverged: after step 5 its loss is not finite or above ten times the first, or its "
                          "gradients are not finite. Choose a smaller --lr or a longer --warmup, and --force or another --out; "
                          "the model in " + self.path("run") + " is that of its "
                          "checkpoint of step 4", "train", "--resume", self.path("run"), "--steps", "200")
                losses = [row["loss"] for row in self.losses()]
                self.assertTrue(all(isinstance(loss, float) and loss < 6 for loss in losses[:5]), losses)
                self.assertFalse(any(isinstance(loss, float) and loss < 60 for loss in losses[5:]), losses)
                self.assertEqual(len(losses), 15)
                self.assertEqual(self.weights(), good)
                self.assertEqual(sorted(os.listdir(self.path("run/checkpoints")))[-1], "step-00000004")

    def test_a_run_that_diverges_before_its_first_save_leaves_the_weights_that_it_began_with(self):
        self.trained(out="first")
        for rate in ("1e30", "1e5"):  # not finite; finite, and no loss that a model comes back from
            result = self.ends(1, "the model in " + self.path("run") + " is the one that the run began with", "train", "--model",
                               self.path("first"), "--data", self.data, "--out", self.path("run"), "--lr", rate, "--warmup", "0",
                               "--steps", "200", "--force")
            self.assertEqual(result.stderr.count("hoose a smaller"), 1, result.stderr)
            self.assertEqual(len(self.losses()), 11)
            self.assertEqual(self.values(), self.values("first"))
            self.assertIn(b'"step":"0"', self.weights())

    def test_two_signals_at_once_are_one(self):
        """As coreutils' timeout sends them; one that comes seconds later ends the program at once."""
        process = start(*self.training("--validation", "0", steps=10**6))
        until(lambda: os.path.exists(self.path("run/metrics.jsonl")))
        for _ in range(5):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.001)
        self.assertEqual(process.wait(60), 128 + signal.SIGTERM)
        self.assertEqual(len(os.listdir(self.path("run/checkpoints"))), 1)

    def test_stopped_after_a_few_bad_steps(self):
        """They say too little: the weights stay, with a checkpoint beside the one before."""
        large = ("--layers", "4", "--width", "256", "--heads", "4", "--context", "1024", "--batch", "2")  # seconds a step
        process = start(*self.training("--lr", "1e5", "--warmup", "0", "--validation", "0", "--keep", "1", "--save-every", "1",
                                       *large, steps=200), stderr=subprocess.PIPE, text=True)
        until(lambda: os.path.exists(self.path("run/metrics.jsonl")) and len(self.losses()) > 1)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=250)[1]
        self.assertEqual(process.returncode, 128 + signal.SIGTERM, said)
        taken = len(self.losses())
        self.assertLess(taken, 11)
        self.assertEqual(sorted(os.listdir(self.path("run/checkpoints"))), ["step-00000001", f"step-{taken:08}"])
        self.assertIn(f'"step":"{taken}"'.encode(), self.weights())

    def test_gradients_that_stay_not_finite(self):
        """Behind RMS norms huge weights give the loss of a guess, which is finite; their gradients are not."""
        os.mkdir(self.path("model"))
        config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                  "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 128, "rms_norm_eps": 1e-5,
                  "max_position_embeddings": 64, "tie_word_embeddings": False, "hidden_act": "silu"}  # fmt: skip
        with open(self.path("model/config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        with open(self.path("tokens.bin"), "wb") as file:  # llm.c's
            file.write(struct.pack("<256i", 20240520, 1, 4000, *[0] * 253) + bytes(x for i in range(4000) for x in (i * i % 113, 0)))
        for policy in ("stored", "compressed"):
            self.ends(1, "the training diverged: after step 1 ", "train", "--model", self.path("model/config.json"), "--data",
                      self.path("tokens.bin"), "--out", self.path("run"), "--batch", "4", "--context", "32", "--steps", "40", "--lr",
                      "1e30", "--warmup", "0", "--save-every", "2", "--gradients", policy, "--force")
            self.assertTrue(all(row["skipped"] for row in self.losses()[1:]))
            self.assertFalse(os.path.exists(self.path("run/checkpoints")))
            self.assertIn(b'"step":"0"', self.weights())

    def test_steps_without_a_target(self):
        """Their windows lie in a prompt. They change nothing, are told, and are no reason to end a run."""
        with open(self.path("lines.jsonl"), "w", encoding="utf-8") as file:
            file.write((json.dumps({"prompt": "p" * 400, "completion": "abcdefgh"}) + "\n") * 40)
        arguments = ("train", "--data", self.path("lines.jsonl"), "--layout", "packed", "--validation", "0", "--schedule",
                     "constant", "--warmup", "0", "--force", *tiny("--batch", "1"))
        for more in ((), ("--gradients", "released"), ("--skip-outliers", "6")):
            said = self.done(*arguments, *more, "--out", self.path("run"), "--steps", "100")
            learned = [row["step"] for row in self.losses() if row["loss"] is not None]
            self.assertTrue(0 < len(learned) < 20, learned)
            self.assertIn(f"{100 - len(learned)} of 100 steps had nothing to learn: ", said)
            last = learned[-1]
            self.done(*arguments, *more, "--out", self.path("shorter"), "--steps", str(last))
            self.assertEqual(self.values(), self.values("shorter"))

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
        for option, value, least in (("--steps", "-1", 0), ("--steps", "1e3", 0), ("--batch", "2.5", 1), ("--batch", "0", 1),
                                     ("--batch", "", 1), ("--context", "8x", 1), ("--warmup", "0.1", 0), ("--save-every", "0", 1),
                                     ("--seed", "99999999999999999999", 0), ("--validate-every", "nan", 1)):
            refused(2, f"{option}: '{value}' is not a whole number from {least} to 2^63 - 1", option, value)
        for share in ("1", "-0.5", "nan"):
            refused(2, f"--validation: '{share}' is not a number of 0 or more, and below 1", "--validation", share)
        refused(2, "--moments fp32, or use --gradients compressed",
                "--gradients", "released", "--accumulate", "4", "--accumulation", "adama")
        refused(2, "--batch", "--batch", str(2**62))
        refused(1, "bytes", "--context", "100000")
        refused(2, "context", "--context", "9223372036854775807")
        refused(2, "finite", "--clip", "nan")
        refused(2, "finite", "--lr", "nan")
        refused(2, "--lr: 'abc' is not a finite number above 0", "--lr", "abc")

    def test_words_of_other_trainers(self):
        refused = lambda message, *arguments: self.fails(2, message, "train", "--data", self.data, *arguments)
        refused("has no option --learning-rate; use --lr", "--learning-rate", "1e-3")
        refused("has no option --num-epochs; use --epochs", "--num-epochs", "3")
        self.fails(2, "has no option --epochs; use --steps N", "compare", "--epochs", "3")
        refused("has no option --gradient-accumulation-steps; use --accumulate", "--gradient-accumulation-steps", "4")
        self.fails(2, "hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B", "train", "--data", self.data,
                   "--out", self.path("no"), "--model", "meta-llama/Llama-3.2-1B")
        for name in ("table.csv", "TABLE.TSV"):
            table = self.write(name, "number,text\n" + "1,some words\n" * 2000)
            self.fails(1, "is a table", "train", "--data", table, "--out", self.path("no"), *tiny())

    def test_models_that_are_not_what_they_seem(self):
        """config.json from anywhere: brackets without end, more positions than anybody trains with, other files."""
        config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
                  "num_attention_heads": 2, "vocab_size": 256, "max_position_embeddings": 1 << 21}
        options = ("--data", self.data, "--context", "16", "--batch", "2", "--steps", "1")



        def refused(message, model):
            self.fails(1, message, "train", "--model", model, "--out", self.path("no"), *options)

        brackets = "[" * 100_000 + "]" * 100_000
        for key in ("unknown", "hidden_size"):
            deep = json.dumps({**config, key: "HERE"}).replace('"HERE"', brackets)
            refused("nested more than 32 deep", self.write("deep/config.json", deep))
        index = self.write("index/model.safetensors.index.json", '{"weight_map": ' + brackets + "}")
        self.write("index/config.json", json.dumps(config))
        refused("nested more than 32 deep", os.path.dirname(index))

        folder = os.path.dirname(self.write("pickled/config.json", json.dumps(config)))
        self.write("pickled/pytorch_model.bin", "")
        refused("it has pytorch_model.bin, which only Python reads. Convert it: python -c", folder)
        refused("give its folder", self.write("alone/model.safetensors", ""))

        long = self.write("long/config.json", json.dumps(config))  # and no --context: 1,024 of 2^21 positions
        self.assertIn("context 1,024", self.done("train", "--model", long, "--out", self.path("long-run"), "--data", self.data,
                                                 "--batch", "1", "--steps", "0"))

    def test_too_large(self):
        """Refused with the whole of what it would take, as `plan` counts it, and not with the first part that does not fit."""
        shape = tiny("--width", "65536", "--heads", "16", "--layers", "1000")
        for what, arguments in (("the run", ("train", "--data", self.data)), ("recipe fp32", ("compare", "--recipes", "scruple")),
                                ("recipe fp32", ("compare", "--recipes", "lpmm", "--no-hazards"))):
            said = self.fails(1, f"scruple: {what} needs ", *arguments, "--out", self.path("no"), *shape).stderr
            rows = {line.split()[0]: line.split()[1:] for line in said.splitlines()
                    if re.fullmatch(r"[a-z_]+ +[\d.]+ +[\d.]+", line)}
            self.assertEqual(rows["weights"][1], "2.000" if arguments[0] == "train" else "4.000")
            self.assertEqual(set(rows) - {"extra", "exp_avg", "exp_avg_sq", "momentum_buffer", "scales"},
                             {"weights", "gradients", "activations", "workspace", "total"})
            needs = re.search(r"needs ([\d.]+) TiB, and [\d.]+ [KMG]iB are free; choose a smaller model", said)
            self.assertAlmostEqual(float(needs[1]), float(rows["total"][0]), delta=0.1)
            self.assertRegex(said, r"\nmemory +TiB +B/param\n")
            self.assertFalse(os.path.exists(self.path("no")))

    def test_a_limit_of_the_process(self):
        """ulimit -v: refused with the same table."""
        def limited(mebibytes, *arguments):
            limit = ["sh", "-c", f"ulimit -v {mebibytes << 10}; exec \"$@\"", "sh"]
            return subprocess.run(limit + command.command(*arguments), capture_output=True, text=True, timeout=300)
        if limited(1500, "--version").returncode != 0:
            self.skipTest("a sanitizer takes more addresses")
        shape = tiny("--width", "1024", "--heads", "16", "--layers", "24", "--threads", "1")  # 303 M parameters
        for arguments in (("train", "--data", self.data), ("compare", "--recipes", "scruple")):
            done = limited(1500, *arguments, "--out", self.path("no"), *shape)
            self.assertEqual(done.returncode, 1, done.stdout)
            self.assertRegex(done.stderr, r"needs [\d.]+ GiB, and [\d.]+ [GM]iB are free; choose a smaller model")
            self.assertRegex(done.stderr, r"\nmemory +GiB +B/param\nweights +[\d.]+ +\d\.000\n")
            self.assertFalse(os.path.exists(self.path("no")))

    def test_force_replaces_a_run_and_nothing_else(self):
        def replaced(*arguments, out="run"):
            return self.trained("--force", "--seed", "2", *arguments, out=out)
        self.trained("--save-every", "1", "--keep", "0", steps=4)
        old = self.weights()
        for name, text in (("notes.txt", "mine"), ("checkpoints/notes.txt", "mine too")):
            self.write("run/" + name, text)
        # What cannot start replaces nothing.
        everything = {name: os.path.getmtime(self.path("run/" + name)) for name in os.listdir(self.path("run"))}
        self.fails(2, "lr", "train", "--data", self.data, "--out", self.path("run"), "--force", *tiny("--lr", "1e300"))
        self.fails(1, "No such file", "train", "--data", self.path("no"), "--out", self.path("run"), "--force", *tiny())
        self.assertEqual({name: os.path.getmtime(self.path("run/" + name)) for name in os.listdir(self.path("run"))}, everything)
        replaced()
        self.assertNotEqual(self.weights(), old)
        self.assertEqual(max(row["step"] for row in self.metrics()), 3)
        self.assertEqual(os.listdir(self.path("run/checkpoints")), ["notes.txt"])
        self.assertIn("notes.txt", os.listdir(self.path("run")))
        replaced(out="new")  # nothing to replace
        self.assertEqual(self.weights(), self.weights("new"))

        def kept(message, name, text):
            self.write(name, text)
            out = os.path.dirname(self.path(name)) if "checkpoints" not in name else self.path("run")
            said = self.fails(1, message, "train", "--data", self.data, "--out", out, "--force", *tiny()).stderr
            if "no metrics" in message:  # and nobody is sent to --force in vain
                self.assertEqual(self.fails(1, message, "train", "--data", self.data, "--out", out, *tiny()).stderr, said)
            self.assertEqual(command.content(self.path(name)).decode(), text)
        kept("no metrics.jsonl of a run", "other/model.safetensors", "weights of another program")
        kept("no metrics.jsonl of a run", "another/metrics.jsonl", '{"loss": 1}\n')
        kept("is not what a run writes", "run/checkpoints/step-00000001/notes.txt", "mine")

    def test_one_process_at_a_time(self):
        first = start(*self.training("--save-every", "1", steps=2000))
        self.addCleanup(first.kill)

        def saved():
            folder = self.path("run/checkpoints")
            return sorted(name for name in os.listdir(folder) if "partial" not in name) if os.path.exists(folder) else []
        until(saved, 120)
        # Stopped it lives, has its lock and writes nothing: whatever changes now, another has written.
        first.send_signal(signal.SIGSTOP)
        self.assertTrue(os.WIFSTOPPED(os.waitpid(first.pid, os.WUNTRACED)[1]))

        def everything():
            return {os.path.join(folder, name): os.path.getmtime(os.path.join(folder, name))
                    for folder, folders, files in os.walk(self.path("run")) for name in [".", *folders, *files]}
        before = everything()
        new = ("--data", self.data, "--out", self.path("run"), "--steps", "1", *tiny())
        one = self.path("run/checkpoints", saved()[-1])
        for arguments in (("--resume", self.path("run")), new, (*new, "--force"), ("--resume", one, "--out", self.path("run"))):
            with self.subTest(arguments):
                self.fails(1, "another process is training into", "train", *arguments)
                self.assertEqual(everything(), before)
        first.kill()
        first.wait()
        self.trained("--force")  # a kill gives the lock back

    def test_an_older_checkpoints_note_of_its_data(self):
        """data_tokens was called data_bytes."""
        self.trained("--save-every", "3")
        self.rewrite("run", 3, '"data_tokens"', '"data_bytes"')
        self.resumed("run", "--steps", "4")
        self.assertEqual(self.manifest("run", 4)["trainer"]["data_tokens"], str(os.path.getsize(self.data)))
        self.write("text", command.TEXT + "more")
        self.fails(1, "its length or checksum differs", "train", "--resume", self.path("run"), "--steps", "5")

    def test_an_older_runs_name_of_a_hyperparameter(self):
        """decay_lr was called max_lr: in the groups, and in --set."""
        self.trained("--save-every", "3", "--set", "max_lr=0.5", "--set", "weight_decay=0.05")
        saved = command.content(self.step_of("run", 3, "manifest.json")).decode()
        self.assertIn('"decay_lr":0.5', saved)
        self.assertIn("max_lr=0.5", saved)
        for _ in range(saved.count('"decay_lr":')):
            self.rewrite("run", 3, '"decay_lr":', '"max_lr":')
        self.resumed("run", "--steps", "4")
        self.assertEqual(self.manifest("run", 4)["groups"][0]["hyperparameters"]["decay_lr"], 0.5)

    def test_standard_input(self):
        self.trained(out="file")
        text = command.TEXT.encode()

        def piped(data, *arguments):
            done = run("train", *arguments, input=data, text=None, errors=None)
            return done.returncode, (done.stdout + done.stderr).decode(errors="replace")
        new = ("--data", "-", "--out", self.path("piped"), "--steps", "3", *tiny(), "--save-every", "2", "--keep", "0")
        code, said = piped(text, *new)
        self.assertEqual(code, 0, said)
        self.assertIn("standard input has", said)
        self.assertEqual(self.weights("file"), self.weights("piped"))
        os.rename(self.path("piped/checkpoints/step-00000003"), self.path("away"))
        resume = ("train", "--resume", self.path("piped"))
        self.fails(2, "has read standard input", *resume)
        self.assertEqual(piped(text[:-1], *resume[1:], "--data", "-")[0], 1)
        os.remove(self.path("piped/model.safetensors"))
        code, said = piped(text, *resume[1:], "--data", "-")
        self.assertEqual(code, 0, said)
        self.assertEqual(self.weights("file"), self.weights("piped"))
        code, said = piped(b"", "--data", "-", "--out", self.path("no"), *tiny())
        self.assertEqual((code, "standard input has 0 bytes" in said), (1, True), said)

    def terminal(self, enough, *words, columns=80, **environment):
        """What a run shows on a terminal of so many columns, until it is enough."""
        reader, writer = pty.openpty()
        self.addCleanup(os.close, reader)
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 20, columns, 0, 0))
        process = start(*words, stderr=writer, env=environment)
        os.close(writer)
        said = shown(reader, enough)
        process.kill()
        process.wait()
        return said

    def test_the_line_of_progress_fits_the_terminal(self):
        for columns, environment in ((30, {}), (0, {"COLUMNS": "25"})):
            words = self.training(out=f"run{columns}", steps=1000000)
            said = self.terminal(lambda said: said.count(b"\r") >= 3, *words, columns=columns, **environment)
            lines, limit = said.split("\r")[1:-1], columns or int(environment["COLUMNS"])
            self.assertTrue(lines[0].startswith("scruple  step "), said)
            self.assertTrue(all(len(line) < limit for line in lines), said)

    def test_a_validation_shows_its_progress(self):
        self.write("text", command.TEXT * 20)
        large = ("--layers", "4", "--width", "256", "--heads", "4", "--context", "512", "--batch", "1", "--validation", "0.5")
        said = self.terminal(lambda said: said.count(b"%") >= 2, *self.training(*large, steps=1000))
        shares = [int(share) for share in re.findall(r"\rscruple  validating, (\d+) %", said)]
        self.assertEqual(len(shares), 2, said)
        self.assertTrue(0 <= shares[0] < shares[1] <= 100, said)

    def test_bad_files(self):
        def refused(message, data, out):
            self.fails(1, message, "train", "--data", data, "--out", out, *tiny())
        refused("No such file", self.path("missing"), self.path("no"))
        refused("0 bytes", self.write("empty", ""), self.path("no"))
        refused("10 bytes", self.write("short", "ten bytes!"), self.path("no"))
        refused("folder", self.data, self.data + "/below")
        refused("/proc/metrics.jsonl", self.data, "/proc")
        self.assertFalse(os.path.exists(self.path("no")))
        self.trained()
        before = self.weights()
        self.fails(1, "earlier run", "train", "--data", self.data, "--out", self.path("run"), *tiny())
        self.assertEqual(before, self.weights())


class Help(Case):
    def test_a_gpu(self):
        said = " ".join(run("train", "--help").stdout.split())
        self.assertRegex(said, r"Examples: .* scruple train --model \S+ --data \S+ --out \S+ --device cuda ")
        self.assertIn("as the weights; on a GPU bf16 for fp32", said)


class Slips(Case):
    def test_words_that_belong_elsewhere(self):
        for word, meant in (("inspect", "checkpoint inspect"), ("export", "checkpoint export"),
                            ("verify", "checkpoint verify"), ("resume", "train --resume")):
            self.fails(2, f"; did you mean '{meant}'?\n", word, "run1")
        self.fails(2, "scruple eval takes no argument b:2; try", "eval", "run1", "--data", "a", "b:2")
        self.assertNotIn("did you mean", run("steps").stderr)  # more than one command has that option
        self.fails(2, "has no option --bf16; did you mean '--to bf16'?\n", "checkpoint", "export", "run1", "--bf16")


if __name__ == "__main__":
    command.main()
