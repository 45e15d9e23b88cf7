"""What `scruple train` does over its steps, from outside: schedules, rates by name; and what `scruple eval` measures.

Usage: loop_test.py PATH_TO_SCRUPLE
"""

import glob
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import command
from command import content, run, start, tiny, until


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
        self.fails(2, "--warmup is 9, and the run has 6 steps", "train", "--data", self.data, "--out", self.path("no"),
                   *tiny("--warmup", "9", "--epochs", "0.1"))  # fmt: skip

    def test_what_does_not_go_together_is_refused_before_data_is_read(self):
        self.data = self.path("missing")
        self.refused(2, "--warmup is 9, and the run has 3 steps", "--warmup", "9")
        self.refused(2, "use --clip-tensor", "--gradients", "released", "--clip", "1")
        self.refused(2, "--skip-outliers and a dynamic loss scale", "--skip-outliers", "6", "--loss-scale", "dynamic")
        self.refused(2, "no parameter of the model", "--lr-for", "no=1")


class Sources(Case):
    """Several files behind --data, one after another or mixed by weights."""

    def setUp(self):
        super().setUp()
        lines = [json.dumps({"text": f"{n:03}" + "abcdefghijklmnop"[: n % 9]}) + "\n" for n in range(120)]
        self.files = [self.write(f"part-{i}.jsonl", "".join(lines[40 * i : 40 * i + 40])) for i in range(3)]
        self.whole = self.write("all.jsonl", "".join(lines))

    def train(self, out, *data, steps="6", **more):
        return self.done("train", "--data", *data, "--out", self.path(out), "--recipe", "fp32", "--batch", "4", "--layers", "1",
                         "--width", "32", "--heads", "2", "--context", "16", "--layout", "whole", "--save-every", "2", "--keep",
                         "0", "--steps", steps, *more)  # fmt: skip

    def test_files_and_patterns_are_as_one(self):
        said = self.train("a", self.whole)
        self.assertIn(f"; {self.whole} has ", said)
        said = self.train("b", *self.files)
        self.assertIn(f"; {self.files[0]} and 2 more have ", said)
        self.train("c", self.path("part-*.jsonl"))
        for out in "bc":
            self.assertEqual(self.weights(out), self.weights("a"))
        # The pattern is what the run goes on with; and a file that has come, gone or changed is named.
        self.assertEqual(self.manifest("c", 6)["trainer"]["data"], self.path("part-*.jsonl"))
        resume = ("train", "--resume", self.path("c"), "--steps", "7")
        new = self.write("part-3.jsonl", json.dumps({"text": "more"}) + "\n")
        self.fails(1, f"{new} (4 tokens, CRC-32 ", *resume)
        self.fails(1, "is new in --data, and the run was started without it; take it out", *resume)
        os.remove(new)
        os.rename(self.files[1], self.path("away"))
        self.fails(1, f"{self.files[1]} (", *resume)
        self.fails(1, "is missing in --data, and the run was started with it; put it back", *resume)
        changed = content(self.path("away")).replace(b"041a", b"041b")
        command.write(self.files[1], changed)
        self.fails(1, "is not what the run was started with: there was ", *resume)
        os.rename(self.path("away"), self.files[1])
        os.truncate(self.files[2], os.path.getsize(self.files[2]) // 2)
        self.fails(1, "part-2.jsonl, line 20: it is no JSON", *resume)

    def test_a_mixture_goes_on_to_the_bit(self):
        mixed = [f"{path}:{weight}" for path, weight in zip(self.files, (0.7, 0.2, 0.1))]
        said = self.train("a", *mixed)
        steps = re.search(r"an epoch is (\d+) steps", said)[1]
        for step in (2, 4):
            self.done("train", "--resume", self.step_of("a", step), "--out", self.path(f"from{step}"))
            self.assertEqual(self.weights(f"from{step}"), self.weights("a"))
        self.train("e", *self.files, steps="6")
        self.assertNotEqual(self.weights("e"), self.weights("a"))
        self.assertGreater(int(steps), 1)
        # Other weights would be another run.
        self.fails(1, "weight 0.7) is not what the run was started with", "train", "--resume", self.path("a"), "--steps", "7",
                   "--data", f"{self.files[1]}:0.7", f"{self.files[0]}:0.2", f"{self.files[2]}:0.1")  # fmt: skip
        self.fails(1, "weight 0.5) is not what the run was started with", "train", "--resume", self.path("a"), "--steps", "7",
                   "--data", f"{self.files[0]}:0.5", f"{self.files[1]}:0.2", f"{self.files[2]}:0.1")  # fmt: skip

    def test_refusals(self):
        a, b, _ = self.files
        for words, *data in (
                (f"{a}:0: there is no such file, and '0' is no weight above 0", f"{a}:0", f"{b}:1"),
                (f"{a}:-1: there is no such file, and '-1' is no weight", f"{a}:-1", f"{b}:1"),
                (f"{a}:much: there is no such file, and 'much' is no weight", f"{a}:much"),
                (f"{b} has no weight, and others have", f"{a}:1", b), ("no*.bin: there is no such file", self.path("no*.bin")),
                ("cannot open " + self.path("no.txt"), a, self.path("no.txt"))):
            with self.subTest(words):
                self.fails(1, words, "train", "--data", *data, "--out", self.path("no"), "--steps", "1", "--context", "8")
        self.trained(steps=1)
        self.fails(2, "weights change nothing", "eval", self.path("run"), "--data", f"{a}:0.5", "--data", f"{b}:0.5")
        both = self.json_of("eval", self.path("run"), "--data", a, "--data", b, "--layout", "packed")
        self.assertEqual(both["data"], f"{a} {b}")


class Validation(Case):
    def losses(self, out="run"):
        return [row["val_loss"] for row in self.metrics(out) if "val_loss" in row]

    def test_a_file_of_its_own(self):
        """All of --data is trained on, and the losses are those that eval finds in that file."""
        lines = [json.dumps({"prompt": "count:", "completion": "abcdefg"[: n % 7 + 1]}) + "\n" for n in range(40)]
        data, held = self.write("a.jsonl", "".join(lines[:30])), self.write("held.jsonl", "".join(lines[30:]))
        more = ("--data", data, "--recipe", "fp32", "--layers", "2", "--width", "32", "--heads", "2", "--context", "16",
                "--batch", "2", "--steps", "6", "--save-every", "3", "--keep", "0")  # fmt: skip
        said = self.done("train", *more, "--validation-data", held, "--out", self.path("a"))
        self.assertRegex(said, rf"; {re.escape(data)} has 295 in 30 documents, whole and isolated; an epoch is 10 steps; validation on {re.escape(held)}, 100\n")
        found = self.json_of("eval", self.path("a"), "--data", held, "--context", "16")
        self.assertAlmostEqual(found["loss"], self.losses("a")[-1], places=5)
        # Without validation the training is the same.
        said = self.done("train", *more, "--validation", "0", "--out", self.path("b"))
        self.assertEqual(self.weights("a"), self.weights("b"))
        self.assertEqual(self.losses("b"), [])
        self.assertIn("; no validation\n", said)
        steps = [row["loss"] for row in self.metrics("b")]
        mean = sum(steps) / len(steps)
        self.assertIn(f"\nno validation; training loss {mean:.4f} nats per byte, mean of the last 6 steps; ", said)
        # Of a run that began with a checkpoint, those that it has seen.
        self.trained("--validation", "0", "--save-every", "3", out="first")
        said = self.done("train", "--resume", self.step_of("first", 3), "--out", self.path("then"), "--steps", "5")
        self.assertRegex(said, r"\nno validation; training loss \d\.\d+ nats per byte, mean of the last 2 steps; ")
        charts = self.report("b")[0]["sections"][0]["charts"]
        self.assertEqual([curve["name"] for curve in charts[0]["curves"]], ["training"])
        self.assertIn("There was no validation.", self.report("b")[1])
        # Both go on to the bit, and --validation-data only says where the file has gone.
        for out, resume in (("a", ("--validation-data", self.path("moved.jsonl"))), ("b", ())):
            before = self.metrics(out)
            self.assertIn("is complete", self.resumed(out))
            os.rename(self.step_of(out, 6), self.path("away" + out))
            if resume:
                os.rename(held, resume[1])
            self.resumed(out, *resume)
            self.assertEqual(self.metrics(out), before)
            self.assertEqual(self.weights(out), self.weights("a"))
        os.rename(self.step_of("a", 6), self.path("gone"))
        self.fails(1, "is not the file that the run was validated with", "train", "--resume", self.path("a"),
                   "--validation-data", data)  # fmt: skip
        self.fails(2, "the run validates on a share of its --data", "train", "--resume", self.path("b"), "--steps", "7",
                   "--validation-data", data)  # fmt: skip

    def test_refusals(self):
        self.refused(2, "--validation is a share of --data, and --validation-data a file of its own",
                     "--validation", "0.1", "--validation-data", self.data)  # fmt: skip
        self.refused(2, "--validation-data cannot be standard input", "--validation-data", "-")
        self.refused(2, "--stop-when counts validations, and --validation is 0", "--validation", "0", "--stop-when", "3")
        self.refused(1, "No such file", "--validation-data", self.path("missing"))
        self.fails(2, "--validation: '0' is not a number above 0", "compare", "--data", self.data, "--validation", "0")
        self.refused(2, "has no option --patience; use --stop-when", "--patience", "3")

    def test_a_run_that_gets_no_better_ends(self):
        """What is learnt is not what is validated."""
        held = self.write("held", "".join(chr(33 + n * n % 90) for n in range(400)))
        more = ("--validation-data", held, "--validate-every", "5", "--save-every", "5", "--keep", "0", "--lr", "0.01",
                "--schedule", "constant", "--recipe", "fp32")  # fmt: skip
        done = run(*self.training(*more, "--stop-when", "3", out="a", steps=1000))
        self.assertIn(done.returncode, (0, 3), done.stderr)
        losses = self.losses("a")
        best = losses.index(min(losses))
        self.assertEqual(len(losses), best + 1 + 3)
        taken = 5 * (len(losses) - 1)
        self.assertIn(f"Ended by --stop-when after step {taken} of 1,000: the best validation loss, {min(losses):.4f}, is that of "
                      f"step {5 * best}; its checkpoint is {self.step_of('a', 5 * best)}.\n", done.stdout)
        self.assertTrue(os.path.exists(self.step_of("a", taken)))
        self.assertIn(f"ended by --stop-when after {taken} steps", self.resumed("a"))
        # Stopped on the way it ends where it would have.
        whole = (self.weights("a"), self.metrics("a"))
        for step in range(5 * best + 5, taken + 1, 5):
            os.rename(self.step_of("a", step), self.path(f"away{step}"))
        self.assertEqual(run("train", "--resume", self.path("a")).returncode, done.returncode)
        self.assertTrue((self.weights("a"), self.metrics("a")) == whole)
        # More patience goes on.
        run("train", "--resume", self.path("a"), "--stop-when", "4")
        self.assertEqual(len(self.losses("a")), len(losses) + 1)
        done = run(*self.training("--stop-when", "2", "--lr", "1e-30", "--validate-every", "1", out="c", steps=9))
        self.assertIn("is that of step 0: no step made it less.\n", done.stdout)
        more = [word if word != "0" else "1" for word in more]  # --keep
        done = run(*self.training(*more, "--stop-when", "3", out="b", steps=1000))
        self.assertIn(f"of step {5 * best}, of which no checkpoint was kept: --save-every and --keep do.\n", done.stdout)


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
        self.refused(2, "like 'wte'; did you mean '*wte*'? Names:", "--lr-for", "wte=0")
        for wrong in ("-1", "nan", "inf"):
            self.refused(2, f"--lr-for: the number of '*={wrong}' is '{wrong}'; it must be finite, and 0 or more", "--lr-for", f"*={wrong}")
        for wrong in ("x", "", "1x"):
            self.refused(2, f"--weight-decay-for: the number of '*={wrong}' is '{wrong}'; it must be a number", "--weight-decay-for",
                         f"*={wrong}")  # fmt: skip


def byte_level(merges=()):
    """A tokenizer.json of bytes, and what these pairs of letters make."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # as GPT-2 writes bytes
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    letters.update({chr(256 + n): byte for n, byte in enumerate(others)})
    letters.update({a + b: 256 + n for n, (a, b) in enumerate(merges)})
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end = {"id": 256 + len(merges), "content": "<end>", "special": True, "single_word": False, "lstrip": False,
           "rstrip": False, "normalized": False}  # fmt: skip
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None,
            "pre_tokenizer": level, "post_processor": None, "decoder": level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": letters,
                      "merges": [f"{a} {b}" for a, b in merges]}}  # fmt: skip


class Metrics(Case):
    def test_time_tokens_and_epoch(self):
        """Of every step, also of those of an earlier session; what is not known is null or not there."""
        begin = time.time()
        self.trained("--save-every", "2", "--keep", "0", "--validation", "0", steps=4)
        rows = self.metrics(times=True)
        self.assertEqual([row["tokens"] for row in rows], [32, 64, 96, 128])
        self.assertEqual([row["skipped_steps"] for row in rows], [0] * 4)
        times = [row["time"] for row in rows]
        self.assertEqual(times, sorted(times))
        self.assertTrue(begin - 1 <= times[0] <= times[-1] <= time.time() + 1)
        stretches, rest = divmod(len(command.TEXT) - 1, 33 * 16)
        windows = 32 * stretches + rest // 16 - 1
        self.assertEqual([row["epoch"] for row in rows], [2 * step / windows for step in range(1, 5)])
        os.rename(self.step_of("run", 4), self.path("away"))
        self.resumed("run")
        again = self.metrics(times=True)
        self.assertEqual(again[:2], rows[:2])
        self.assertEqual([row["tokens"] for row in again], [32, 64, 96, 128])
        self.done("train", "--resume", self.step_of("run", 2), "--out", self.path("new"))
        self.assertEqual([row["tokens"] for row in self.metrics("new")], [None, None])
        data = self.write("a.jsonl", "".join(json.dumps({"text": f"{n:05}"}) + "\n" for n in range(8)))
        self.done("train", "--data", data, "--out", self.path("padded"), "--layout", "padded", "--steps", "6", "--validation",
                  "0", *tiny(batch="2"))  # fmt: skip
        self.assertEqual([row["epoch"] for row in self.metrics("padded")], [0.25, 0.5, 0.75, 1, 1.25, 1.5])

    def test_the_page_smooths_long_losses_and_says_what_a_step_is(self):
        for out, steps, names in (("a", 99, ["training", "validation"]),
                                  ("b", 100, ["training", "training, smoothed", "validation"])):  # fmt: skip
            self.trained("--accumulate", "2", out=out, steps=steps)
            sections = self.report(out)[0]["sections"]
            curves = sections[0]["charts"][0]["curves"]
            self.assertEqual([curve["name"] for curve in curves], names)
            rows = dict(row[:2] for section in sections for table in section["tables"] for row in table["rows"])
            self.assertEqual((rows["batch"], rows["layout"]), ("2 windows of 16, 2 micro-batches", "packed"))
            self.assertEqual(rows["epochs taken"], f"{self.metrics(out)[-2]['epoch']:.2f}")
        noise, smoothed = [[abs(a - b) for a, b in zip(curve["y"], curve["y"][1:])] for curve in curves[:2]]
        self.assertEqual(curves[0]["y"][0], curves[1]["y"][0])
        self.assertLess(sum(smoothed), 0.5 * sum(noise))

    def test_saves_are_told(self):
        """Each with its time, also those of an earlier session; training on the CPU waits for all of it."""
        self.trained("--save-every", "2", "--validation", "0", "--device", "cpu", steps=5)
        rows = [row for row in self.metrics(saves=True) if "saved_step" in row]
        self.assertEqual([(row["step"], row["saved_step"]) for row in rows], [(2, 2), (4, 4), (5, 5)])
        for row in rows:
            self.assertTrue(0 < row["save_seconds"] <= row["save_waited"] < 60, row)
            size = os.path.getsize(self.step_of("run", 5, "model.safetensors"))
            self.assertTrue(0.5 * size < row["save_bytes"] < size, (row, size))
        self.assertIn("saves", dict(self.report()[0]["sections"][1]["tables"][1]["rows"]))
        os.rename(self.step_of("run", 5), self.path("away"))
        self.resumed("run")
        again = [row for row in self.metrics(saves=True) if "saved_step" in row]
        self.assertEqual((again[:2], again[2]["saved_step"], len(again)), (rows[:2], 5, 3))

    STUBS = {"torch/__init__.py": "", "torch/utils/__init__.py": "",  # what examples/watch.py calls of the two libraries, with their parameters' names; each call becomes a line
        "wandb.py": """
import json
def init(*, project, name): print(json.dumps(["init", project, name]), flush=True)
def log(data, step=None): print(json.dumps(["log", step, data]), flush=True)
""",
        "torch/utils/tensorboard.py": """
import json
class SummaryWriter:
    def __init__(self, log_dir): print(json.dumps(["init", str(log_dir)]), flush=True)
    def add_scalar(self, tag, scalar_value, global_step=None, walltime=None):
        print(json.dumps(["log", global_step, {tag: scalar_value}, walltime]), flush=True)
    def flush(self): print(json.dumps(["flush"]), flush=True)
"""}  # fmt: skip

    def watch(self, *more):
        for name, text in self.STUBS.items():
            self.write(os.path.join("stubs", name), text)
        example = os.path.join(os.path.dirname(__file__), "../examples/watch.py")
        return subprocess.Popen([sys.executable, example, self.path("run"), *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                text=True, env={**os.environ, "PYTHONPATH": self.path("stubs")})  # fmt: skip

    def watched(self, *more):
        said, problems = self.watch(*more, "--once").communicate(timeout=60)
        self.assertEqual(problems, "")
        return said

    def test_the_example_follows_them(self):
        """Into each of the two libraries, here stubs, goes every number of every line, at its step."""
        self.trained("--validation", "0.1", steps=3)
        rows = self.metrics(times=True, saves=True)
        left_out = ("step", "time", "unmoved_tensor")  # a name
        numbers = [{key: float(value) for key, value in row.items() if value is not None and key not in left_out} for row in rows]
        said = self.watched("--print")
        self.assertEqual(len(said.splitlines()), len(rows))
        self.assertRegex(said, r"(?m)^3 .*loss [\d.]+")
        self.assertRegex(said, r"(?m)^3 val_loss [\d.]+$")

        calls = [json.loads(line) for line in self.watched("--wandb").splitlines()]
        self.assertEqual(calls[0], ["init", "scruple", "run"])
        self.assertEqual(calls[1:], [["log", row["step"], values] for row, values in zip(rows, numbers)])

        calls = [json.loads(line) for line in self.watched().splitlines()]
        self.assertEqual(calls[0], ["init", os.path.realpath(self.path("run", "tensorboard"))])
        wanted = [["log", row["step"], {key: value}, row.get("time")] for row, values in zip(rows, numbers) for key, value in values.items()]
        self.assertEqual(calls[1:], wanted + [["flush"]])

    def test_the_example_waits_for_whole_lines_and_logs_none_twice(self):
        """A line comes in two parts; then a resumed run begins the file anew, and is longer than before."""
        rows = [json.dumps({"step": step, "loss": step / 2}) + "\n" for step in range(1, 7)]
        file = self.write("run/metrics.jsonl", rows[0] + rows[1][:9])
        process = self.watch("--wandb")
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        next_call = lambda: json.loads(process.stdout.readline())
        self.assertEqual([next_call(), next_call()], [["init", "scruple", "run"], ["log", 1, {"loss": 0.5}]])
        self.write("run/metrics.jsonl", "".join(rows[:3]))
        self.assertEqual([next_call(), next_call()], [["log", 2, {"loss": 1}], ["log", 3, {"loss": 1.5}]])
        again = [row.replace("}", ', "tokens": 9}') for row in rows]  # other bytes
        self.write("run/metrics.jsonl.new", "".join(again) + '{"step": 6, "val_loss": 1}\n')
        os.replace(self.path("run/metrics.jsonl.new"), file)
        said = [next_call() for _ in range(4)]
        self.assertEqual([call[1] for call in said], [4, 5, 6, 6])
        self.assertEqual(said[-1][2], {"val_loss": 1})


class Saves(Case):
    def test_killed_in_the_middle(self):
        """On a GPU training goes on meanwhile: `make test-gpu` runs this there."""
        dice, kills, device = random.Random(2), 8, os.environ.get("SCRUPLE_TEST_DEVICE", "cpu")
        # A save takes longer than a step.
        more = ("--layers", "4", "--width", "256", "--validation", "0", "--device", device)
        self.trained(*more, out="unsaved", steps=40)
        self.trained(*more, "--save-every", "2", "--keep", "0", out="whole", steps=40)
        self.is_as_whole("unsaved")
        self.assertTrue(self.weights("unsaved") == self.weights("whole"))
        arguments, folder = self.training(*more, "--save-every", "2", steps=40), self.path("run/checkpoints")
        found = lambda: os.listdir(folder) if os.path.exists(folder) else []
        for kill in range(kills):
            before = set(found())
            process = start(*arguments)
            until(lambda: process.poll() is not None or any("partial" in name for name in set(found()) - before))
            time.sleep(dice.uniform(0, 0.1))
            process.send_signal(signal.SIGKILL)
            process.wait()
            if any("partial" not in name for name in found()):
                self.done("checkpoint", "verify", self.path("run"))
                self.is_as_whole("run", f"kill {kill} of a process that found {sorted(before)}")
                # The device is named again: the environment's SCRUPLE_DEVICE would move the run.
                arguments = ["train", "--resume", self.path("run"), "--device", device]
            else:
                shutil.rmtree(self.path("run"))
        self.assertNotIn("a run that had not moved", self.done(*arguments))
        self.is_as_whole("run", f"the last process, which found {sorted(before)}")
        self.assertEqual(len(self.metrics()), 40)
        self.assertTrue(self.weights() == self.weights("whole"))
        self.assertEqual(sorted(found()), ["step-00000038", "step-00000040"])

    def is_as_whole(self, out, where=""):
        """Every step so far, and every tensor of each checkpoint."""
        for row, other in zip(self.metrics(out), self.metrics("whole")):
            self.assertEqual(row, other, where)
        for path in sorted(glob.glob(self.path(out, "checkpoints", "step-????????", "model.safetensors"))):
            (tensors, data), (others, other_data) = map(command.tensors_of, (path, path.replace(self.path(out), self.path("whole"))))
            for name in set(others) - {"__metadata__"}:
                self.assertTrue(data(tensors[name]) == other_data(others[name]), f"{where}: {name} in {path}")


class Outliers(Case):
    def test_they_are_skipped_counted_and_told(self):
        """A limit that is met often: what is noted agrees, and the run goes on to the bit."""
        more = ("--skip-outliers", "0.1", "--save-every", "30", "--keep", "0", "--schedule", "constant", "--recipe", "fp32")
        said = self.trained(*more, out="a", steps=60)
        rows = [row for row in self.metrics("a") if "loss" in row]
        outliers = [row["step"] for row in rows if row.get("outlier")]
        self.assertTrue(0 < len(outliers) < 30 and min(outliers) > 20, outliers)
        self.assertEqual(rows[-1]["skipped_steps"], len(outliers))
        self.assertTrue(all(row["skipped"] and row["norm"] > 0 for row in rows if row.get("outlier")))
        words = "was" if len(outliers) == 1 else "were"
        self.assertIn(f"\n{len(outliers)} of 60 steps {words} skipped: the loss or the norm was more than 0.1 deviations above "
                      "its running mean.\n", said)  # fmt: skip
        self.assertIn("skipped, their loss or norm an outlier", self.report("a")[1])
        whole = self.weights("a"), self.metrics("a")
        os.rename(self.step_of("a", 60), self.path("away"))
        self.resumed("a")
        self.assertTrue((self.weights("a"), self.metrics("a")) == whole)
        self.trained(*more[2:], out="plain", steps=60)
        self.assertFalse(self.weights("plain") == self.weights("a"))
        self.trained("--skip-outliers", "1e9", *more[2:], out="none", steps=60)
        self.assertTrue(self.weights("plain") == self.weights("none"))

    def test_refusals(self):
        self.refused(2, "--skip-outliers judges a step by its loss, which --accumulate 2", "--skip-outliers", "6", "--gradients",
                     "released", "--accumulate", "2", "--accumulation", "adama", "--moments", "fp32")  # fmt: skip
        self.refused(2, "--skip-outliers and a dynamic loss scale do not go together", "--skip-outliers", "6",
                     "--activations", "fp16", "--device", "cpu")  # fmt: skip
        self.refused(2, "--skip-outliers: '0' is not a finite number above 0", "--skip-outliers", "0")


class Averages(Case):
    MORE = ("--ema", "0.9", "--lr", "0.01", "--schedule", "constant")

    def test_a_run_with_an_average(self):
        said = self.trained(*self.MORE, out="a", steps=30)
        self.assertIn(", clip 1, ema 0.9; lr ", said)
        rows = {line.split()[0]: float(line.split()[2]) for line in said.splitlines()
                if re.fullmatch(r"[a-z_]+ +[\d.]+ +[\d.]+", line)}  # fmt: skip
        self.assertEqual(rows["ema"], 3)
        planned, measured = map(float, re.search(r"([\d.]+) bytes per parameter planned, ([\d.]+) measured", said).groups())
        self.assertEqual(planned, measured)
        one = self.step_of("a", 30)  # without --save-every too: the averages are nowhere else
        kinds = self.json_of("checkpoint", "inspect", one)["bytes"]
        self.assertEqual(kinds["ema"], 3 * kinds["weights"] // 2)
        self.done("checkpoint", "verify", one)
        # It is another model than the weights, and the training is that of a run without one.
        self.trained(*self.MORE[2:], out="plain", steps=30)
        self.assertTrue(self.weights("a") == self.weights("plain"))
        losses = [self.json_of("eval", self.path("a"), "--data", self.data, *more)["loss"] for more in ((), ("--ema",))]
        self.assertNotEqual(*losses)
        self.assertAlmostEqual(*losses, delta=0.5)
        self.assertEqual(self.json_of("eval", one, "--data", self.data, "--ema")["loss"], losses[1])
        words = ("--prompt", "The quick", "--length", "30")
        self.assertNotEqual(*[self.done("sample", one, *words, *more) for more in ((), ("--ema",))])
        # Exported they have the names of the weights.
        names = []
        for more in ((), ("--ema",)):
            out = self.path("out" + "".join(more))
            self.done("checkpoint", "export", one, "--out", out, "--to", "bf16", *more)
            names.append(set(command.tensors_of(out)[0]) - {"__metadata__"})
        self.assertEqual(*names)
        self.assertFalse(content(self.path("out")) == content(self.path("out--ema")))
        # Another recipe leaves them as they are, and the run goes on from it.
        self.done("checkpoint", "convert", one, "--recipe", "scant", "--out", self.path("converted"))
        self.assertEqual(self.json_of("eval", self.path("converted"), "--data", self.data, "--ema")["loss"], losses[1])
        self.done("train", "--resume", self.path("converted"), "--out", self.path("scant"), "--steps", "31")

    def test_it_goes_on(self):
        """Of weights in codes too, which are decoded for it."""
        for more in ((), ("--recipe", "lpmm", "--optimizer", "sgd", "--width", "64")):
            self.goes_on(*more)

    def goes_on(self, *more):
        self.trained(*self.MORE, "--device", "cpu", "--save-every", "3", "--keep", "0", "--force", *more, out="a", steps=6)
        last = content(self.step_of("a", 6, "model.safetensors"))
        os.rename(self.step_of("a", 6), self.path("away" + "".join(more)))
        self.resumed("a")
        self.assertTrue(content(self.step_of("a", 6, "model.safetensors")) == last)
        self.assertGreater(self.json_of("eval", self.path("a"), "--data", self.data, "--ema")["loss"], 0)
        self.fails(2, "--resume takes --ema from the run", "train", "--resume", self.path("a"), "--ema", "0.5")

    def test_the_plan_has_its_bytes(self):
        for row in self.json_of("plan", "--params", "1e6", "--ema")["rows"]:
            self.assertEqual(row["parts"]["ema"], 3_000_000)
        for row in self.json_of("plan", "--params", "1e6")["rows"]:
            self.assertNotIn("ema", row["parts"])
        # Of coded weights a piece is decoded.
        codes = ("--optimizer", "sgd", "--recipe", "lpmm", "--threads", "2", "--ema")
        said = self.trained(*codes, "0.9", out="run", steps=1)
        row = self.json_of("plan", self.path("run"), "--batch", "2", "--context", "16", "--device", "cpu", *codes)["rows"][0]
        self.assertEqual(f"{row['total_bytes'] / 2**10:.2f}", re.search(r"\ntotal +([\d.]+)", said)[1])

    def test_refusals(self):
        self.refused(2, "--ema: '1' is not a number above 0 and below 1", "--ema", "1")
        self.trained("--save-every", "3")
        for command_ in (("sample", "--ema"), ("eval", "--data", self.data, "--ema")):
            self.fails(1, "has no averages of the weights: its run was trained without --ema", command_[0], self.path("run"),
                       *command_[1:])  # fmt: skip
        self.fails(1, "has no averages of the weights", "checkpoint", "export", self.path("run"), "--ema", "--out",
                   self.path("no"))  # fmt: skip
        self.trained(out="none")
        self.fails(1, "has no complete checkpoint, where the averages of --ema are", "sample", self.path("none"), "--ema")


class Eval(Case):
    def evaluated(self, *arguments):
        return self.json_of("eval", *arguments)

    def test_a_run_and_its_checkpoint(self):
        self.trained("--save-every", "20", steps=20)
        found = self.evaluated(self.path("run"), "--data", self.data)
        size = os.path.getsize(self.data)
        self.assertEqual((found["targets"], found["bytes"], found["context"]), (size - 1, size - 1, 16))
        self.assertEqual(found["windows"], math.ceil((size - 1) / 16))
        self.assertEqual(found["windows_in_data"], found["windows"])
        self.assertAlmostEqual(found["perplexity"], math.exp(found["loss"]))
        self.assertAlmostEqual(found["bits_per_byte"], found["loss"] / math.log(2))
        self.assertAlmostEqual(found["loss"], self.metrics()[-1]["val_loss"], delta=0.05)
        for more in (("--threads", "1"), ("--threads", "2"), ("--batch", "3"), ("--activations", "fp32")):
            again = self.evaluated(self.path("run"), "--data", self.data, *more)
            delta = 0 if "--threads" in more else 0.01
            self.assertAlmostEqual(again["loss"], found["loss"], delta=delta, msg=str(more))
        one = self.step_of("run", 20)
        self.assertEqual(self.evaluated(one, "--data", self.data)["loss"], found["loss"])
        said = self.done("eval", one, "--data", self.data)
        self.assertIn(f"\nloss {found['loss']:.4f} nats per byte, perplexity ", said)
        self.assertRegex(said, rf", {found['bits_per_byte']:.4f} bits per byte\n4,079 bytes predicted in 255 windows of 16, ")
        some = self.evaluated(one, "--data", self.data, "--windows", "10")
        self.assertEqual((some["windows"], some["windows_in_data"], some["targets"]), (10, 255, 160))
        self.assertIn(" in 10 of 255 windows of 16", self.done("eval", one, "--data", self.data, "--windows", "10"))

    def test_a_tokenizer(self):
        """Bits per byte count the bytes of the text: a token has several, an end token none."""
        config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
                  "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 300, "rms_norm_eps": 1e-5,
                  "max_position_embeddings": 64, "tie_word_embeddings": False, "hidden_act": "silu"}  # fmt: skip
        self.write("model/config.json", json.dumps(config))
        self.write("model/tokenizer.json", json.dumps(byte_level([("t", "h"), ("o", "g"), ("d", "og")][:2])))
        self.write("model/tokenizer_config.json", json.dumps({"eos_token": "<end>"}))
        self.done("train", "--model", self.path("model/config.json"), "--data", self.data, "--out", self.path("run"),
                  "--steps", "3", "--batch", "2", "--context", "16")  # fmt: skip
        data = self.write("notes.jsonl", "".join(
            json.dumps({"prompt": "the dog", "completion": completion}) + "\n" for completion in ("a thing", "other")))
        found = self.evaluated(self.path("run"), "--data", data, "--context", "16")
        self.assertEqual(found["bytes"], len("a thing") + len("other"))
        self.assertEqual(found["targets"], len("a") + 1 + len("thing") - 1 + len("other") - 1 + 2)
        self.assertAlmostEqual(found["bits_per_byte"] * found["bytes"], found["loss"] * found["targets"] / math.log(2))
        self.assertEqual(found["windows"], 2)
        self.done("tokenize", "--model", self.path("model"), self.data, "--out", self.path("tokens.bin"))
        of_tokens = self.evaluated(self.path("run"), "--data", self.path("tokens.bin"))
        self.assertEqual(of_tokens["loss"], self.evaluated(self.path("run"), "--data", self.data)["loss"])
        # Without the tokenizer nothing says how long tokens are.
        os.remove(self.path("run/tokenizer.json"))
        alone = self.evaluated(self.path("run"), "--data", self.path("tokens.bin"))
        self.assertEqual((alone["bits_per_byte"], alone["bytes"], alone["loss"]), (None, None, of_tokens["loss"]))
        said = self.done("eval", self.path("run"), "--data", self.path("tokens.bin"))
        self.assertIn("bits per byte not known: no tokenizer says what the tokens stand for", said)

    def test_refusals(self):
        self.trained("--save-every", "3")
        one = self.step_of("run", 3)
        self.fails(2, "--data is required", "eval", one)
        self.fails(1, "there is nothing at", "eval", self.path("no"), "--data", self.data)
        self.fails(2, "--context is 8, and the checkpoint's model sees 16 tokens", "eval", one, "--data", self.data,
                   "--context", "8")  # fmt: skip
        self.fails(1, "it takes at least 17 at --context 16", "eval", one, "--data", self.write("short", "x" * 16))
        self.fails(2, "--windows: '0' is not a whole number", "eval", one, "--data", self.data, "--windows", "0")
        prompts = self.write("prompts.jsonl", json.dumps({"prompt": "p" * 100, "completion": "c"}))
        self.ends(1, "nothing is to be predicted in 2 windows of 7", "eval", one, "--data", prompts, "--layout", "packed",
                  "--windows", "2")  # fmt: skip
        os.remove(self.path("run/model.safetensors"))
        self.fails(1, "has a config.json and no weights", "eval", self.path("run"), "--data", self.data)

    def test_a_stop_says_nothing_of_the_rest(self):
        self.trained("--context", "256", "--width", "128")
        self.write("long", command.TEXT * 400)
        process = start("eval", self.path("run"), "--data", self.path("long"), "--batch", "4", stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE, text=True)  # fmt: skip
        while not process.stdout.readline().endswith("packed\n"):
            pass
        process.send_signal(signal.SIGINT)
        said, complaints = process.communicate(timeout=60)
        self.assertEqual((process.returncode, said), (130, ""), complaints)
        self.assertIn("stopped by Ctrl-C (SIGINT) after ", complaints)


if __name__ == "__main__":
    command.main()
