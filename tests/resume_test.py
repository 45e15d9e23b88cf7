"""Checkpoints from outside: runs that are killed and go on, the tools, and a reader that knows the specification alone.

Usage: resume_test.py PATH_TO_SCRUPLE
"""
import fcntl
import json
import math
import os
import random
import re
import resource
import signal
import struct
import subprocess
import zlib

import command
from command import content, run, start, tensors_of, until, write
KILLS = 50
# Every kind of state that a run has: each policy, AdaGC's norms, a loss scale that moves, random numbers, small codes.
RUNS = (
    ("--gradients", "compressed", "--accumulate", "2", "--rounding", "stochastic"),
    ("--gradients", "released", "--adagc", "1.05"),
    ("--weights", "fp16+8", "--activations", "fp16", "--lr", "0.01"),
    ("--recipe", "lpmm", "--optimizer", "sgd", "--lr", "0.1", "--set", "momentum=0.8", "--set", "weight_decay=0.01"),
    ("--recipe", "scant", "--schedule", "linear"),
)


def local(path):
    """Whether a lock on this file system is seen by everyone: elsewhere nothing is taken for dead."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True).stdout.strip()
    return kind in ("ext2/ext3", "xfs", "btrfs", "tmpfs", "overlayfs", "f2fs", "zfs")


class Case(command.Case):
    batch = "2"

    def arguments(self, out, *more, steps=6):
        return self.training(*more, out=out, steps=steps)

    def trained(self, out, *more, **options):
        return self.done(*self.arguments(out, *more, **options))

    def checkpoint(self, *arguments):
        return self.json_of("checkpoint", *arguments)

    def checkpoints(self, out):
        return sorted(os.listdir(self.path(out, "checkpoints")))

    def without_last(self, out="a", last=6):
        """As a run that was killed before its last save."""
        os.rename(self.step_of(out, last), self.path(f"away{last}"))

    def same_run(self, a, b):
        for name in ("model.safetensors", "config.json"):
            self.assertEqual(content(self.path(a, name)), content(self.path(b, name)), name)
        self.assertEqual(self.metrics(a), self.metrics(b))

    def ends_as_if_left_alone(self, *more, resume=()):
        """Run a goes on, and ends with the files of one that nothing befell."""
        self.resumed("a", *resume)
        self.trained("b", *more)
        self.same_run("a", "b")

    def flip(self, path, at=-1):
        data = bytearray(content(path))
        data[at] ^= 1
        write(path, data)


class Killed(Case):
    def kill_once(self, arguments, seconds, engine):
        """Starts a session, kills it after so long, and says whether it was still running."""
        process = start(*arguments, env={"SCRUPLE_ENGINE": engine})
        try:
            process.wait(seconds)
            self.assertEqual(process.returncode, 0, arguments)
            return False
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return True

    def test_at_any_moment(self):
        dice = random.Random(1)
        kills = in_a_save = runs = 0
        while kills < KILLS:
            runs += 1
            number = kills // (KILLS // len(RUNS)) % len(RUNS)
            settings, steps = RUNS[number], 40
            whole, out = f"whole{number}", f"run{runs}"
            if not os.path.exists(self.path(whole)):
                self.trained(whole, *settings, steps=steps)
            arguments = self.arguments(out, *settings, "--save-every", "1", "--keep", "2", steps=steps)
            running = True
            while running:
                running = self.kill_once(arguments, dice.uniform(0.02, 0.4), dice.choice(("cpu", "cpu-baseline")))
                folder = self.path(out, "checkpoints")
                found = os.listdir(folder) if os.path.exists(folder) else []
                if running and not any(name.startswith("step-") and "partial" not in name for name in found):
                    subprocess.run(["rm", "-rf", self.path(out)], check=True)  # killed before there was anything to save
                    continue
                if running:
                    kills += 1
                    in_a_save += any("partial" in name for name in found)
                    self.done("checkpoint", "verify", self.path(out))
                arguments = ["train", "--resume", self.path(out), "--threads", str(dice.randint(1, 3))]
            self.same_run(out, whole)
            self.assertEqual(self.checkpoints(out), ["step-00000039", "step-00000040"])
        print(f"{kills} kills of {runs} runs, {in_a_save} of them inside a save")  # save_failures_test aims

    def test_after_the_last_save_and_before_the_old_ones_go(self):
        """The save of the last step stands, the run is complete, and one checkpoint too many is there."""
        self.trained("a", "--save-every", "1", "--keep", "3")
        self.resumed("a", "--keep", "2")
        self.assertEqual(self.checkpoints("a"), ["step-00000005", "step-00000006"])

    def test_by_hand_after_any_step(self):
        """Every step of every kind of run, without the dice."""
        for number, settings in enumerate(RUNS):
            whole = f"whole{number}"
            self.trained(whole, *settings, "--save-every", "1", "--keep", "0")
            for step in range(1, 7):
                out = f"run{number}-{step}"
                self.done("train", "--resume", self.step_of(whole, step), "--out", self.path(out), "--threads", "1",
                          env={"SCRUPLE_ENGINE": "cpu-baseline"})
                self.assertEqual(self.weights(out), self.weights(whole))
                if step < 6:
                    self.done("checkpoint", "diff", self.path(out), self.path(whole))


class Train(Case):
    def test_saves_and_keeps(self):
        self.trained("a", "--save-every", "2", "--keep", "0", steps=7)
        self.assertEqual(self.checkpoints("a"), ["step-00000002", "step-00000004", "step-00000006", "step-00000007"])
        self.trained("b", "--save-every", "2", steps=7)
        self.assertEqual(self.checkpoints("b"), ["step-00000006", "step-00000007"])
        self.trained("c", "--save-every", "1", "--keep", "1")
        self.assertEqual(self.checkpoints("c"), ["step-00000006"])
        self.trained("d")
        self.assertFalse(os.path.exists(self.path("d/checkpoints")))

    def test_a_scale_that_moves_and_norms_are_kept(self):
        self.trained("a", *RUNS[2], "--save-every", "3")
        scale = self.checkpoint("inspect", self.path("a"))["loss_scale"]
        self.assertEqual(scale["interval"], 2000)
        self.assertGreater(scale["clean"], 0)
        self.trained("b", *RUNS[1], "--save-every", "3")
        self.assertTrue(all(t["adagc_norm"] > 0 for t in self.checkpoint("inspect", self.path("b"))["tensors"]))

    def interrupted_and_resumed(self, *more):
        process, metrics = start(*self.arguments("a", *more, steps=3000)), self.path("a/metrics.jsonl")
        until(lambda: os.path.exists(metrics) and os.path.getsize(metrics) > 1000)
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(60), 128 + signal.SIGTERM)
        self.assertEqual(len(self.checkpoints("a")), 1)
        self.assertIn("going on after step", self.resumed("a"))
        self.trained("b", steps=3000)
        self.same_run("a", "b")
        # A run that was stopped once has a checkpoint of its end too: it is complete, and can be extended.
        if not more:
            self.assertIn("step-00003000", self.checkpoints("a"))
            self.assertIn("is complete", self.resumed("a"))

    def test_interrupted_and_resumed(self):
        self.interrupted_and_resumed("--save-every", "1000")

    def test_interrupted_and_resumed_without_save_every(self):
        self.interrupted_and_resumed()

    def test_a_finished_run_stays_what_it_is(self):
        self.trained("a", "--save-every", "2")
        os.rename(self.data, self.path("away"))  # not even that is needed

        def files():
            return {os.path.join(folder, name): os.stat(os.path.join(folder, name)).st_mtime_ns
                    for folder, _, names in os.walk(self.path("a")) for name in names}
        before = files()
        said = self.resumed("a")
        self.assertIn("is complete", said)
        self.assertNotIn("ms per step", said)
        self.assertEqual(files(), before)

    def test_what_a_kill_kept_from_a_finished_run_is_written(self):
        """The last checkpoint stands, and weights, report or the last validation are missing or of an earlier step."""
        self.trained("whole", "--save-every", "3")
        self.trained("half", steps=3)

        def old_weights(run):
            for name in ("model.safetensors", "config.json"):
                write(self.path(run, name), content(self.path("half", name)))

        def no_last_validation(run):
            lines = content(self.path(run, "metrics.jsonl")).splitlines(keepends=True)
            write(self.path(run, "metrics.jsonl"), b"".join(lines[:-1]))
        for number, harm in enumerate((old_weights, no_last_validation, lambda run: os.remove(self.path(run, "report.html")))):
            run_again = f"run{number}"
            self.trained(run_again, "--save-every", "3")
            harm(run_again)
            self.assertNotIn("ms per step", self.resumed(run_again))
            self.same_run(run_again, "whole")
            self.assertIn("is complete", self.resumed(run_again))

    def test_more_steps(self):
        """A finished run becomes longer: a constant schedule goes on as if it had been meant to."""
        constant = ("--schedule", "constant", "--warmup", "2", "--validate-every", "3", "--save-every", "2")
        self.trained("a", *constant, steps=6)
        said = self.resumed("a", "--steps", "9")
        self.assertIn("from 6 steps to 9: the constant schedule spans all of them; learning rate 0.001 at step 6, "
                      "0.001 at step 7", said)
        self.trained("b", *constant, steps=9)
        self.same_run("a", "b")
        self.ends(2, "never shorter", "train", "--resume", self.path("a"), "--steps", "8")
        # The others span all steps from there on; what followed from the first number of steps stays.
        self.trained("c", "--save-every", "10", steps=40)
        said = self.resumed("c", "--steps", "80")
        self.assertRegex(said, "from 40 steps to 80: the cosine schedule spans all of them; learning rate .* at step 40, .* at step 41")
        rates = [row["lr"] for row in self.metrics("c") if "lr" in row]
        validated = [row["step"] for row in self.metrics("c") if "val_loss" in row]
        self.assertEqual(len(rates), 80)
        self.assertEqual(rates.index(max(rates)), 1)  # a warmup of 40 / 20 steps, then the peak
        self.assertAlmostEqual(rates[40], 0.5e-3 * (1 + math.cos(math.pi * 39 / 79)))
        self.assertEqual(validated, list(range(0, 81, 2)))
        # Interrupted it ends with the bits of the same run left alone.
        self.trained("d", "--save-every", "10", "--keep", "0", steps=40)
        self.resumed("d", "--steps", "80")
        for step in (70, 80):
            self.without_last("d", step)
        self.assertIn("going on after step 60", self.resumed("d"))
        self.same_run("c", "d")

    def test_more_epochs(self):
        """As many steps as see the data so often, whatever their number was; more of them make a run longer."""
        wide = ("--schedule", "constant", "--warmup", "2", "--validate-every", "100", "--context", "64", "--save-every", "99")
        run = lambda out, *more: self.ends(0, "", "train", "--data", self.data, "--out", self.path(out), *command.tiny(*wide, *more))
        run("a", "--epochs", "1")
        stretches, rest = divmod(len(command.TEXT) - len(command.TEXT) // 20 - 1, 33 * 64)
        windows = 32 * stretches + rest // 64 - 1
        found = [row["epoch"] for row in self.metrics("a") if "loss" in row]
        self.assertEqual(found, [4 * (i + 1) / windows for i in range(math.ceil(windows / 4))])
        self.fails(2, "--epochs makes", "train", "--resume", self.path("a"), "--epochs", "0.5")
        self.resumed("a", "--epochs", "2.5")
        run("b", "--steps", str(math.ceil(2.5 * windows / 4)))
        self.assertEqual(content(self.path("a", "model.safetensors")), content(self.path("b", "model.safetensors")))
        self.fails(2, "leave one of them out", "train", "--data", self.data, "--out", self.path("c"), "--epochs", "1",
                   "--steps", "3")

    def test_refusals(self):
        self.trained("a", "--save-every", "2")
        a = self.path("a")
        self.without_last()
        for code, words, *arguments in (
                (2, "--lr", "--resume", a, "--lr", "0.1"), (2, "leave it out", "--resume", a, "--batch", "100"),
                (2, "--force replaces", "--resume", a, "--force"), (2, "--out", "--resume", a, "--out", self.path("b")),
                (2, "--out", "--resume", self.step_of("a", 4)), (2, "there is no such folder", "--resume", self.path("nowhere")),
                (1, "'scruple train --save-every N' saves them", "--resume", self.folder),
                (2, "--data is required", "--steps", "1"), (2, "--out is required", "--data", self.data, "--steps", "1"),
                (1, "earlier run", *self.arguments("a", "--save-every", "2")[1:])):
            with self.subTest(arguments):
                self.ends(code, words, "train", *arguments)
        self.write("text", command.TEXT + "x")
        self.ends(1, "not the file that the run was started with", "train", "--resume", a)
        os.remove(self.data)
        self.ends(1, "No such file", "train", "--resume", a)
        self.resumed("a", "--data", self.write("moved", command.TEXT))

    def test_offloading_is_free(self):
        """It changes no bit: a run takes it up, or leaves it where there is no GPU to offload from."""
        self.trained("a", "--save-every", "2", "--device", "cpu")
        self.without_last()
        self.ends(2, "--offload is for a GPU", "train", "--resume", self.path("a"), "--offload")
        self.assertNotIn("offload", self.manifest("a", 4)["trainer"])
        self.rewrite("a", 4, '"program":', '"offload":"true","program":')  # as of a run on a GPU
        self.assertEqual(self.manifest("a", 4)["trainer"]["offload"], "true")
        self.ends_as_if_left_alone("--device", "cpu", resume=("--device", "cpu"))
        self.assertNotIn("offload", self.manifest("a", 6)["trainer"])
        self.done("train", "--resume", self.path("a"), "--steps", "8", "--offload", "none")

    def test_recomputation_is_free(self):
        """It changes no bit; and where memory is short, a run that goes on is told what it can still choose."""
        self.trained("a", "--save-every", "2", "--device", "cpu")
        self.without_last()
        for more, words in (((), "choose --recompute block, or a machine with more memory"),
                            (("--recompute", "block"), "choose a machine with more memory")):
            self.ends(1, f"; a run that goes on keeps its sizes and formats; {words}\n", "train", "--resume", self.path("a"),
                       "--memory-limit", "1KiB", *more)
        self.ends_as_if_left_alone("--device", "cpu", resume=("--recompute", "block"))
        self.assertEqual(self.manifest("a", 6)["trainer"]["recompute"], "block")

    def test_the_page_draws_the_steps_that_are_known(self):
        """Steps of another folder, or of metrics that are lost, are no points: they were finite when they were taken."""
        self.trained("a", "--save-every", "2", "--keep", "0", "--loss-scale", "dynamic")
        self.done("train", "--resume", self.step_of("a", 4), "--out", self.path("b"))
        os.remove(self.path("a/metrics.jsonl"))
        self.without_last()
        self.resumed("a")
        for out in ("a", "b"):
            report, page = self.report(out)
            curves = {curve["name"]: curve for section in report["sections"] for chart in section["charts"]
                      for curve in chart["curves"]}
            kinds = {"weights", "extra", "exp_avg", "exp_avg_sq", "scales", "gradients", "activations", "workspace"}
            self.assertEqual(set(curves), {"training", "validation", "Gradient norm", "Learning rate", "Loss scale",
                                           "all weights", "the tensor with the most", "Throughput"} | kinds)
            del curves["validation"]
            for name, curve in curves.items():
                self.assertEqual(curve["x"], [5, 6], name)
                self.assertNotIn(None, curve["y"], name)
            self.assertIn("time of the last session's steps", page)

    def test_a_finished_run_without_a_checkpoint(self):
        self.trained("a", steps=3)
        before = self.weights("a")
        for more in ((), ("--steps", "9")):
            self.ends(1, self.path("a") + " has its weights after step 3 and no checkpoint to go on from: --save-every N "
                       "keeps them", "train", "--resume", self.path("a"), *more)
        self.assertEqual(self.weights("a"), before)

    def test_a_damaged_checkpoint_is_named_and_not_used(self):
        self.trained("a", "--save-every", "2")
        os.remove(self.path("a/report.html"))  # a kill came before it was written
        self.flip(self.step_of("a", 6, "model.safetensors"))
        said = self.ends(1, "its checksum is", "train", "--resume", self.path("a"))
        self.assertIn("transformer.", said.stderr)
        self.assertIn("step-00000006", said.stderr)
        self.without_last()
        self.ends_as_if_left_alone()

    def test_a_full_disk_and_a_missing_permission(self):
        self.trained("a", "--save-every", "3", "--keep", "0")
        before = {name: content(self.step_of("a", 3, name)) for name in ("manifest.json", "model.safetensors")}
        self.without_last()
        said = self.ends(1, "was not saved", "train", "--resume", self.path("a"), preexec_fn=full_at(50000))
        self.assertIn("those before it are as they were", said.stderr)
        self.assertIn("goes on after step 3", said.stderr)
        self.assertEqual(self.checkpoints("a"), ["step-00000003"])
        if os.getuid() != 0:  # whom no permission stops
            os.chmod(self.path("a/checkpoints"), 0o500)
            self.ends(1, "permissions", "train", "--resume", self.path("a"))
            os.chmod(self.path("a/checkpoints"), 0o700)
        self.assertEqual(before, {name: content(self.step_of("a", 3, name)) for name in before})
        self.ends_as_if_left_alone()

    def test_others_files_and_live_writers_are_left_alone(self):
        self.trained("a", "--save-every", "3")
        mine = self.write("a/checkpoints/x.partial-notes", "mine")
        halves = [self.write(f"a/checkpoints/step-00000009.partial-{n}-0/model.safetensors", "half") for n in (1, 2)]
        dead, live = map(os.path.dirname, halves)
        writer = os.open(live, os.O_RDONLY)
        self.addCleanup(os.close, writer)
        fcntl.flock(writer, fcntl.LOCK_EX)
        said = run("train", "--resume", self.path("a"))
        self.assertEqual(said.returncode, 0, said.stderr)
        self.assertEqual((content(mine), content(halves[1])), (b"mine", b"half"))
        self.assertRegex(said.stderr, re.escape(live) + ".*was left as it is")
        if local(self.folder):
            self.assertFalse(os.path.exists(dead))
            self.assertNotIn(dead, said.stderr)


def full_at(size):
    """A limit on the size of files is a full disk for the large ones."""
    def little_room():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    return little_room

class FullDisk(Case):
    """A save that fails does not end the run, and what there is at its end is written somewhere."""

    def test_in_the_middle_and_room_again(self):
        steps, every = 3000, 100
        process = start(*self.arguments("a", "--save-every", every, steps=steps), text=True, stderr=subprocess.PIPE,
                        preexec_fn=full_at(30000))
        said = []
        for line in process.stderr:  # checkpoints are larger, and the metrics are after some 150 steps
            said.append(line)
            if "lines wait" in line:
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        process.stderr.close()
        self.assertEqual(process.wait(300), 0, said)
        self.assertRegex("".join(said), "step-00000100 was not saved.*the run goes on, and the next save tries again")
        self.assertEqual(self.checkpoints("a"), ["step-00002900", "step-00003000"])
        self.trained("b", steps=steps)
        self.same_run("a", "b")
        self.done("checkpoint", "verify", self.path("a"))

    def test_to_the_end(self):
        """Nothing takes the weights: there is no other file system, as far as the limit goes."""
        said = self.ends(1, "could not be written anywhere", *self.arguments("a", "--save-every", "2"),
                          preexec_fn=full_at(20000), cwd=self.folder)
        self.assertEqual(said.stderr.count("the next save tries again"), 2, said.stderr)
        self.assertIn("step-00000006 was not saved", said.stderr)
        self.assertNotIn("--resume", said.stderr)  # from nothing
        self.assertNotIn("model.safetensors", said.stdout)
        self.assertEqual(os.listdir(self.path("a/checkpoints")), [])
        self.assertEqual([name for name in os.listdir(self.folder) if name.startswith("scruple-")], [])
        self.assertEqual(self.metrics("a")[-1]["step"], 6)

    def test_weights_go_elsewhere(self):
        self.trained("whole")
        self.trained("a", "--save-every", "6")
        os.remove(self.path("a/model.safetensors"))
        os.makedirs(self.path("a/model.safetensors/in the way"))
        os.mkdir(self.path("elsewhere"))
        said = self.ends(1, "are in " + self.path("elsewhere"), "train", "--resume", self.path("a"),
                          env={"TMPDIR": self.path("elsewhere")})
        [made] = os.listdir(self.path("elsewhere"))
        self.assertIn("not in " + self.path("a"), said.stderr)
        self.assertEqual(self.weights(f"elsewhere/{made}"), self.weights("whole"))
        self.done("sample", self.path("elsewhere", made), "--prompt", "The", "--length", "4")

    def test_a_small_file_system(self):
        """Every save fails, and the weights go to another file system."""
        shape = ("--width", "128", "--save-every", "2")  # weights of 460 kB where 290 are free
        small = self.path("small")
        os.mkdir(small)
        mount = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c",
                 'mount -t tmpfs -o size=2m tmpfs "$0" && head -c 1800000 /dev/zero > "$0/filler" && "$@"; '
                 'code=$?; ls -R "$0" >&2; exit $code', small]
        if subprocess.run(mount + ["true"], capture_output=True).returncode != 0:
            self.skipTest("no file system can be mounted here")
        os.mkdir(self.path("elsewhere"))
        said = subprocess.run(mount + command.command(*self.arguments("small/a", *shape)), capture_output=True,
                              text=True, timeout=300, env={**os.environ, "TMPDIR": self.path("elsewhere")})
        self.assertEqual(said.returncode, 1, said.stderr)
        self.assertIn("No space left on device", said.stderr)
        self.trained("whole", *shape[:2])
        found = [self.weights(f"elsewhere/{name}") for name in os.listdir(self.path("elsewhere"))]
        self.assertEqual(found, [self.weights("whole")], said.stderr)
        self.assertNotIn("partial", said.stderr[said.stderr.index(small + ":"):])  # what ls found


class Tools(Case):
    def test_inspect(self):
        self.trained("a", "--save-every", "6")
        found = self.checkpoint("inspect", self.path("a"), "--histogram", "transformer.wte.weight")
        self.assertEqual((found["version"], found["step"], found["recipe"], found["files"]), (1, 6, "scruple", 1))
        self.assertEqual(found["groups"][0]["optimizer"], "adamw")
        size = sum(os.path.getsize(self.step_of("a", 6, name)) for name in ("manifest.json", "model.safetensors"))
        self.assertEqual(found["bytes"]["total"], size)
        self.assertEqual(sum(n for kind, n in found["bytes"].items() if kind != "total"), size)
        histogram = found["tensors"][0]["arrays"][0]["histogram"]
        self.assertEqual(histogram["zeros"] + histogram["not_finite"] + sum(histogram["by_exponent"].values()), 256 * 32)
        said = self.done("checkpoint", "inspect", self.path("a"), "--histogram", "all")
        self.assertIn("bf16+8, companded8, companded8", said)
        self.assertIn("2^-", said)
        self.ends(2, "no tensor of that name", "checkpoint", "inspect", self.path("a"), "--histogram", "nosuch")

    def test_verify(self):
        self.trained("a", "--save-every", "3", "--keep", "0")
        self.assertTrue(self.checkpoint("verify", self.path("a"))["ok"])
        broken = self.step_of("a", 3)
        self.flip(os.path.join(broken, "model.safetensors"))
        said = self.ends(1, "1 problem", "checkpoint", "verify", broken, "--json")
        found = json.loads(said.stdout)
        self.assertFalse(found["ok"])
        self.assertRegex(found["problems"][0], r'tensor "transformer\.[^"]+": its checksum is')
        self.flip(os.path.join(broken, "manifest.json"))
        said = self.ends(1, "1 problem", "checkpoint", "verify", broken).stdout
        self.assertIn("manifest is damaged; of its run step-00000006 can be opened: check one with 'scruple checkpoint verify " +
                      self.step_of("a", 6) + "'", said)
        self.without_last()
        self.ends(1, "take another copy of this one", "checkpoint", "inspect", self.path("a"))
        os.rename(self.path("away6"), self.step_of("a", 6))
        self.ends(1, "1 problem", "checkpoint", "verify", self.path("nowhere"))
        # A step that no gradient check guards makes its weights NaN, visibly.
        self.trained("b", "--recipe", "fp32", "--gradients", "released", "--lr", "1e20", "--weight-decay", "1e30", "--validation", "0", "--save-every", "1",
                     steps=1)
        self.assertIn("not finite", self.ends(1, "problem", "checkpoint", "verify", self.path("b")).stdout)

    def test_verify_says_what_can_be_saved(self):
        self.trained("a", "--save-every", "6")
        one, file = self.step_of("a", 6), self.step_of("a", 6, "model.safetensors")
        places = {name: entry["data_offsets"][0] for name, entry in tensors_of(file)[0].items() if name != "__metadata__"}
        begin = 8 + struct.unpack("<Q", content(file)[:8])[0]

        def damaged(name):
            self.flip(file, begin + places[name])
            said = self.ends(1, "1 problem", "checkpoint", "verify", one).stderr
            out = self.path(name.replace("/", "_"))
            exported = run("checkpoint", "export", one, "--out", out).returncode
            self.flip(file, begin + places[name])
            return "its weights are whole, and 'scruple checkpoint export " + one in said, exported == 0
        moment = next(name for name in places if "exp_avg" in name)
        weight = next(name for name in places if "exp_avg" not in name)
        self.assertEqual(damaged(moment), (True, True))
        self.assertEqual(damaged(weight), (False, False))

    def test_convert_there_and_back(self):
        self.trained("a", "--recipe", "fp32", "--save-every", "6")
        self.trained("b", "--recipe", "scruple", "--save-every", "3")
        for recipe in ("fp32", "mixed", "split", "flash", "scruple", "scant"):
            found = self.checkpoint("convert", self.path("a"), "--recipe", recipe, "--out", self.path(recipe))
            self.assertEqual(found["error"]["weight"]["relative_rms"] > 0, recipe not in ("fp32", "mixed", "split"), recipe)
            self.assertLess(found["error"]["weight"]["relative_rms"], 1e-4)
            self.done("checkpoint", "verify", self.path(recipe))
        self.done("checkpoint", "diff", self.path("a"), self.path("fp32"))
        # What an fp32 checkpoint can hold exactly comes back exactly.
        self.checkpoint("convert", self.path("b"), "--recipe", "fp32", "--out", self.path("wide"))
        self.checkpoint("convert", self.path("wide"), "--recipe", "scruple", "--out", self.path("back"))
        found = json.loads(run("checkpoint", "diff", self.path("b"), self.path("back"), "--json").stdout)
        self.assertEqual([row for row in found["tensors"] if row["array"] == "weight"], [])
        self.done("train", "--resume", self.path("scant"), "--out", self.path("on"))
        self.ends(1, "is there already", "checkpoint", "convert", self.path("a"), "--recipe", "scant", "--out", self.path("scant"))
        self.ends(2, "nosuch", "checkpoint", "convert", self.path("a"), "--recipe", "nosuch", "--out", self.path("no"))
        self.ends(2, "lpmm", "checkpoint", "convert", self.path("a"), "--recipe", "lpmm", "--out", self.path("no"))
        self.assertFalse(os.path.exists(self.path("no")))

    def test_export(self):
        self.trained("a", "--save-every", "6")
        self.checkpoint("export", self.path("a"), "--fp32", "--out", self.path("w"))
        header, data = tensors_of(self.path("w"))
        self.assertEqual(header["transformer.wte.weight"]["dtype"], "F32")
        # bf16+8 is the visible half and what it is off by at most half a step of.
        visible, bits = tensors_of(self.step_of("a", 6, "model.safetensors"))
        for name, entry in header.items():
            if name != "__metadata__":
                wide = struct.unpack(f"<{len(data(entry)) // 4}f", data(entry))
                half = struct.unpack(f"<{len(wide)}H", bits(visible[name]))
                half = struct.unpack(f"<{len(wide)}f", struct.pack(f"<{len(wide)}I", *(h << 16 for h in half)))
                self.assertTrue(all(abs(w - h) <= abs(h) / 256 for w, h in zip(wide, half)), name)
        self.checkpoint("export", self.path("a"), "--out", self.path("w2"))
        self.assertEqual(content(self.path("w")), content(self.path("w2")))
        self.ends(2, "did you mean 'bf16'?", "checkpoint", "export", self.path("a"), "--to", "bf61", "--out", self.path("x"))

    def test_export_to_bf16(self):
        """The visible weights to the bit where there are some; otherwise the nearest, ties to even."""
        for name, settings in (("a", ()), ("b", ("--recipe", "mixed")), ("c", ("--recipe", "fp32")), ("d", RUNS[2]), ("e", RUNS[3])):
            self.trained(name, *settings, "--save-every", "6")
            self.assertEqual(self.checkpoint("export", self.path(name), "--to", "bf16", "--out", self.path(name + "16"))["dtype"], "bf16")
            self.checkpoint("export", self.path(name), "--to", "fp32", "--out", self.path(name + "32"))
            narrow, halves = tensors_of(self.path(name + "16"))
            wide, words = tensors_of(self.path(name + "32"))
            stored, visible = tensors_of(self.step_of(name, 6, "model.safetensors"))
            self.assertEqual(set(narrow), set(wide))
            for tensor in set(narrow) - {"__metadata__"}:
                self.assertEqual((narrow[tensor]["dtype"], narrow[tensor]["shape"]), ("BF16", wide[tensor]["shape"]))
                if name in "ab":
                    self.assertEqual(halves(narrow[tensor]), visible(stored[tensor]), tensor)
                    continue
                bits = struct.unpack(f"<{len(words(wide[tensor])) // 4}I", words(wide[tensor]))
                rounded = [(x + 0x7FFF + (x >> 16 & 1)) >> 16 for x in bits]
                self.assertEqual(halves(narrow[tensor]), struct.pack(f"<{len(bits)}H", *rounded), (name, tensor))

    def test_export_reads_weights_alone(self):
        self.trained("a", "--save-every", "6")
        self.checkpoint("export", self.path("a"), "--out", self.path("before"))
        file = self.step_of("a", 6, "model.safetensors")
        header, _ = tensors_of(file)
        start = os.path.getsize(file) - max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        for name in ("transformer.wte.weight/exp_avg", "transformer.wte.weight/exp_avg_sq/scale"):
            self.flip(file, start + header[name]["data_offsets"][0])
        self.ends(1, "2 problems", "checkpoint", "verify", self.path("a"))
        self.checkpoint("export", self.path("a"), "--out", self.path("after"))
        self.assertEqual(content(self.path("before")), content(self.path("after")))
        # The extra bits are the master's, not the visible weights'.
        self.flip(file, start + header["transformer.wte.weight/extra"]["data_offsets"][0])
        self.checkpoint("export", self.path("a"), "--to", "bf16", "--out", self.path("visible"))
        self.ends(1, "wte.weight/extra", "checkpoint", "export", self.path("a"), "--out", self.path("no"))
        self.assertFalse(os.path.exists(self.path("no")))

    def test_plan_counts_weights(self):
        """A run, its checkpoints, their files: each has the parameters of the model, and nothing else has."""
        for name, settings in (("a", ()), ("b", RUNS[3])):
            self.trained(name, *settings, "--save-every", "3")
            header, step = tensors_of(self.path(name, "model.safetensors"))[0], self.step_of(name, 6)
            params = sum(math.prod(entry["shape"]) for key, entry in header.items() if key != "__metadata__")
            self.checkpoint("reshard", step, "--shards", "3", "--out", self.path(name + "3"))
            for path in (self.path(name), step, self.path(name + "3"), self.path(name, "model.safetensors")):
                self.assertEqual(self.json_of("plan", path)["params"], params, path)
            os.remove(self.path(name, "model.safetensors"))  # as in a run that was killed
            found = self.json_of("plan", self.path(name))
            self.assertEqual((found["params"], found["notes"]), (params, [f"{self.path(name)}: its last checkpoint is {step}"]))
            file = os.path.join(step, "model.safetensors")
            if name == "a":
                self.assertEqual(self.json_of("plan", file)["params"], params)
            else:  # int10: only the manifest says how many
                self.assertIn("the checkpoint's folder says", self.done("plan", file))

    def test_slips(self):
        self.ends(2, "did you mean 'train'?", "tain", "--data", "x")
        self.ends(2, "'inspct' is no command of scruple checkpoint; there are: inspect, verify", "checkpoint", "inspct")
        self.ends(2, "did you mean '--shards'?", "checkpoint", "reshard", self.folder, "--shard", "3", "--out", self.path("x"))
        self.ends(2, "did you mean 'scant'?", "checkpoint", "convert", self.folder, "--recipe", "scan", "--out", self.path("x"))
        self.ends(2, "did you mean 'cosine'?", *self.arguments("x", "--schedule", "cosin"))
        self.ends(2, "did you mean 'eps'?", *self.arguments("x", "--set", "esp=1"))
        bare = run("checkpoint")
        self.assertEqual((bare.returncode, bare.stdout, bare.stderr), (2, self.done("checkpoint", "--help"), ""))
        self.assertEqual(self.done("help", "checkpoint", "diff"), self.done("checkpoint", "diff", "--help"))

    def test_diff(self):
        self.trained("a", "--save-every", "6")
        self.trained("b", "--save-every", "6", "--threads", "3")
        self.trained("c", "--save-every", "6", "--seed", "2")
        self.assertTrue(self.checkpoint("diff", self.path("a"), self.path("b"))["same"])
        found = json.loads(self.ends(1, "differ", "checkpoint", "diff", self.path("a"), self.path("c"), "--json").stdout)
        self.assertIn("groups", [row["name"] for row in found["settings"]])
        self.assertGreater(found["tensors"][0]["differing"], 0)

    def test_diff_in_words(self):
        """Which setting differs, from what to what; of the arrays those that differ, and how many."""
        self.trained("a", "--save-every", "6")
        self.trained("b", "--save-every", "6", "--seed", "2", "--set", "weight_decay=0.05")
        said = self.ends(1, "differ", "checkpoint", "diff", self.path("a"), self.path("b")).stdout
        self.assertIn("group 0 seed: 1 -> 2\n", said)
        self.assertRegex(said, r"group 0 weight_decay: 0\.\d+ -> 0\.05\n")
        self.assertNotIn("lr:", said)
        self.assertNotIn("{", said)
        arrays = len(said[said.index("tensor "):].split("\n\n")[0].splitlines()) - 1
        self.assertRegex(said, rf"\n{arrays} of \d+ arrays differ in their values\n$")
        # Formats that hold the same values are a line, and no row.
        self.checkpoint("convert", self.path("a"), "--recipe", "fp32", "--out", self.path("c"))
        said = self.ends(1, "differ", "checkpoint", "diff", self.path("a"), self.path("c")).stdout
        self.assertIn("recipe: scruple -> fp32\n", said)
        self.assertIn("\n16 tensors: weight bf16+8 (wide) -> fp32 (nearest)\n", said)
        self.assertTrue(said.endswith("\n0 of 48 arrays differ in their values\n"), said)
        self.assertNotIn("relative RMS", said)
        self.trained("d", "--save-every", "3", "--keep", "0")
        said = self.ends(1, "differ", "checkpoint", "diff", self.step_of("d", 3), self.step_of("d", 6)).stdout
        self.assertTrue(said.startswith("step: 3 -> 6\n"), said)
        self.assertEqual(said.count("step 4 -> 7"), 1, said)

    def test_shards(self):
        self.trained("a", *RUNS[3], "--save-every", "3", "--keep", "0")
        whole = self.step_of("a", 3)
        self.checkpoint("reshard", whole, "--shards", "5", "--out", self.path("five"))
        self.assertEqual(sorted(os.listdir(self.path("five"))),
                         ["manifest.json"] + [f"model-{i:05}-of-00005.safetensors" for i in range(1, 6)])
        self.checkpoint("reshard", self.path("five"), "--shards", "3", "--out", self.path("three"))
        self.checkpoint("merge", self.path("three"), "--out", self.path("one"))
        for name in ("manifest.json", "model.safetensors"):
            self.assertEqual(content(self.path("one", name)), content(os.path.join(whole, name)), name)
        self.assertTrue(self.checkpoint("diff", self.path("five"), whole)["same"])
        self.done("train", "--resume", self.path("three"), "--out", self.path("b"))
        self.assertEqual(self.weights("a"), self.weights("b"))
        self.ends(1, "choose fewer", "checkpoint", "reshard", self.path("one"), "--shards", "256", "--out", self.path("no"))

    def test_size(self):
        """Of the models of demo and train: at most 0.45 of the same with fp32 weights and moments."""
        for name, layers, width in (("demo", "2", "64"), ("train", "4", "128")):
            shape = ("--layers", layers, "--width", width, "--heads", "4", "--context", "128", "--batch", "1")
            size = {}
            for recipe in ("fp32", "scruple"):
                self.trained(name + recipe, "--recipe", recipe, *shape, "--save-every", "1", "--validate-every", "1000", steps=1)
                size[recipe] = self.checkpoint("inspect", self.path(name + recipe))["bytes"]["total"]
            print(name, size, size["scruple"] / size["fp32"])
            self.assertLess(size["scruple"], 0.45 * size["fp32"])


class Specification(Case):
    """What docs/checkpoint.md says, and nothing else, is enough to read a checkpoint."""

    def check(self, folder):
        text = content(os.path.join(folder, "manifest.json"))
        manifest = json.loads(text)
        self.assertEqual(manifest["scruple_checkpoint"], 1)
        zeroed = text.replace(b'"crc32":"' + manifest["crc32"].encode() + b'"', b'"crc32":"00000000"', 1)
        self.assertEqual(f"{zlib.crc32(zeroed):08x}", manifest["crc32"])
        files = []
        for entry in manifest["files"]:
            path = os.path.join(folder, entry["name"])
            raw = content(path)
            self.assertEqual(len(raw), entry["bytes"])
            self.assertEqual(f"{zlib.crc32(raw[:8 + struct.unpack('<Q', raw[:8])[0]]):08x}", entry["header_crc32"])
            files.append(tensors_of(path))
        read = {}
        for tensor in manifest["tensors"]:
            for array in tensor["arrays"]:
                for plane in array["planes"]:
                    name = tensor["name"] + ("" if array["name"] == "weight" else "/" + array["name"])
                    name += "" if plane["kind"] == "codes" else "/" + plane["kind"]
                    read[name] = b""
                    for file, first, end, crc in plane["pieces"]:
                        header, data = files[file]
                        piece = data(header[name])
                        self.assertEqual(f"{zlib.crc32(piece):08x}", crc, name)
                        self.assertEqual(len(read[name]), first // 128 * plane["block_bytes"])
                        read[name] += piece
        return manifest, read

    def test_is_enough(self):
        self.trained("a", "--save-every", "6")
        manifest, whole = self.check(self.step_of("a", 6))
        self.assertEqual(manifest["step"], 6)
        self.assertEqual(set(name for name in whole if name.startswith("transformer.wte.weight")),
                         {"transformer.wte.weight" + suffix for suffix in
                          ("", "/extra", "/exp_avg", "/exp_avg/scale", "/exp_avg_sq", "/exp_avg_sq/scale")})
        self.done("checkpoint", "reshard", self.path("a"), "--shards", "7", "--out", self.path("seven"))
        self.assertEqual(self.check(self.path("seven"))[1], whole)
        # The visible weights are the tensors that the exported model has.
        header, data = tensors_of(self.path("a/model.safetensors"))
        for name in header:
            if name != "__metadata__":
                self.assertEqual(data(header[name]), whole[name], name)


if __name__ == "__main__":
    command.main()
