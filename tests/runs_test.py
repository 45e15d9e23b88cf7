"""Runs of `scruple train` from outside: old checkpoints, what is counted and said, failures in the middle, moves.

Usage: runs_test.py PATH_TO_SCRUPLE
"""

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import unittest
import zlib

SCRUPLE = ""
TINY = {"--layers": "1", "--width": "32", "--heads": "2", "--context": "16", "--batch": "4"}
TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n" * 60


def run(*arguments, **options):
    return subprocess.run(
        [SCRUPLE, *arguments], capture_output=True, text=True, timeout=300, errors="replace", **options
    )


def content(path):
    with open(path, "rb") as file:
        return file.read()


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.data = self.path("text")
        with open(self.data, "w", encoding="utf-8") as out:
            out.write(TEXT)

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def arguments(self, out, *more, steps=6, data=None):
        tiny = [word for pair in TINY.items() if pair[0] not in more for word in pair]
        where = ["train", "--data", data or self.data, "--out", self.path(out), "--steps", str(steps)]
        return [*where, *tiny, *more]

    def ends(self, code, *arguments, **options):
        done = run(*arguments, **options)
        self.assertEqual(done.returncode, code, f"{arguments}: {done.stdout}{done.stderr}")
        return done

    def trained(self, out, *more, **options):
        return self.ends(0, *self.arguments(out, *more, **options)).stdout

    def notes(self, out, step):
        return json.loads(content(self.path(out, f"checkpoints/step-{step:08}/manifest.json")))["trainer"]

    def edit_notes(self, out, step, edit):
        """Another `trainer` in a checkpoint's manifest, with the checksum that fits."""
        path = self.path(out, f"checkpoints/step-{step:08}/manifest.json")
        text = content(path).decode()
        begin = text.index('"trainer":') + len('"trainer":')
        notes, end = json.JSONDecoder().raw_decode(text, begin)
        text = text[:begin] + json.dumps(edit(notes)) + text[end:]
        text = text.replace(json.loads(text)["crc32"], "00000000", 1)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text.replace("00000000", f"{zlib.crc32(text.encode()):08x}", 1))

    def cut_back(self, out, last, step):
        """As if the run had been killed after the step."""
        for gone in range(step + 1, last + 1):
            folder = self.path(out, f"checkpoints/step-{gone:08}")
            if os.path.exists(folder):
                os.rename(folder, self.path(f"{out}-{gone}"))

    def losses(self, out):
        return [row["loss"] for row in self.metrics(out) if "loss" in row]

    def metrics(self, out):
        """Without times and saves, which no two runs share."""
        rows = [json.loads(line) for line in content(self.path(out, "metrics.jsonl")).splitlines()]
        return [
            {key: value for key, value in row.items() if key != "time"} for row in rows if "saved_step" not in row
        ]

    def same_run(self, a, b):
        for name in ("model.safetensors", "config.json"):
            self.assertEqual(content(self.path(a, name)), content(self.path(b, name)), name)
        self.assertEqual(self.metrics(a), self.metrics(b))


class Options(Case):
    MORE = (
        "--set",
        "beta1=0.8",
        "--set",
        "eps=1e-7",
        "--isolate",
        "--rounding",
        "stochastic",
        "--weight-decay",
        "0.03",
    )

    def test_old_spellings_resume(self):
        """Checkpoints once noted options as they are typed, and tokens as bytes."""
        self.trained("whole", *self.MORE, "--clip", "0.5", "--warmup", "3")
        self.trained("a", *self.MORE, "--clip", "0.5", "--warmup", "3", "--save-every", "2", "--keep", "0")
        self.cut_back("a", 6, 4)
        others = {"program": "program", "data_crc32": "data_crc32", "data_tokens": "data_bytes"}

        def old(notes):
            return {others.get(key, "--" + key): value for key, value in notes.items()}

        self.edit_notes("a", 4, old)
        self.assertEqual(self.notes("a", 4)["--set"], "beta1=0.8\neps=1e-7")
        self.assertIn("going on after step 4", self.ends(0, "train", "--resume", self.path("a")).stdout)
        self.same_run("a", "whole")
        self.assertEqual([key for key in self.notes("a", 6) if key.startswith("--")], [])
        self.assertEqual(self.notes("a", 6)["set"], "beta1=0.8\neps=1e-7")
        # sample reads them too, and so does convert.
        for name in ("config.json", "model.safetensors"):
            os.remove(self.path("a", name))
        self.edit_notes("a", 6, old)
        self.ends(0, "sample", self.path("a"), "--prompt", "The", "--length", "2")
        self.ends(0, "checkpoint", "convert", self.path("a"), "--recipe", "scant", "--out", self.path("b"))
        converted = json.loads(content(self.path("b/manifest.json")))["trainer"]
        self.assertEqual((converted["recipe"], converted.get("rounding")), ("scant", None))

    def test_every_setting_comes_back(self):
        """What was given and what was not: the second session notes what the first did."""
        self.trained(
            "a", *self.MORE, "--save-every", "2", "--keep", "0", "--lr", "0.0123456789", "--validation", "0.1"
        )
        self.cut_back("a", 6, 4)
        first = self.notes("a", 4)
        self.assertEqual(
            (first["lr"], first["validation"], first["isolate"]), ("0.0123456789", "0.1", "true")
        )
        self.ends(0, "train", "--resume", self.path("a"))
        self.assertEqual(self.notes("a", 6), first)

    def test_older_runs_draw_their_windows_as_before(self):
        self.trained("a", "--save-every", "2", "--keep", "0")
        losses = self.losses("a")
        self.cut_back("a", 6, 4)
        self.assertEqual(self.notes("a", 4)["order"], "epochs")
        self.edit_notes("a", 4, lambda notes: {key: value for key, value in notes.items() if key != "order"})
        self.ends(0, "train", "--resume", self.path("a"))
        self.assertNotIn("order", self.notes("a", 6))
        again = self.losses("a")
        self.assertEqual(losses[:4], again[:4])
        self.assertNotEqual(losses[4:], again[4:])

    def test_what_is_not_known_is_not_ignored(self):
        self.trained("a", "--save-every", "2", "--keep", "0")
        self.cut_back("a", 6, 4)
        self.edit_notes("a", 4, lambda notes: {**notes, "dropout": "0.1"})
        self.assertIn("has a setting 'dropout'", self.ends(1, "train", "--resume", self.path("a")).stderr)

    def test_the_session_s_own_are_asked_again(self):
        self.trained("a", "--save-every", "2", "--keep", "0", "--threads", "1", "--memory-limit", "1GiB")
        self.assertEqual(
            set(self.notes("a", 4)) & {"threads", "memory-limit", "out", "force", "resume"}, set()
        )
        for more in (("--seed", "2"), ("--clip", "1"), ("--isolate",), ("--set", "eps=1")):
            said = self.ends(2, "train", "--resume", self.path("a"), *more).stderr
            self.assertIn(f"--resume takes {more[0]} from the run", said)


class Counted(Case):
    def report(self, out):
        page = content(self.path(out, "report.html")).decode()
        return json.loads(re.search(r'<script[^>]* id="data"[^>]*>(.*?)</script>', page, re.DOTALL)[1])

    def rows(self, out):
        tables = [table for section in self.report(out)["sections"] for table in section["tables"]]
        return {row[0]: row[1] for table in tables for row in table["rows"]}

    def test_padding_is_no_token(self):
        """Documents of 5 bytes in windows of 64: 4 tokens have a target, and 60 are nothing."""
        data = self.path("short.jsonl")
        with open(data, "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": f"{n:05}"}) + "\n" for n in range(200))
        said = self.trained("a", "--layout", "padded", "--context", "64", data=data)
        self.assertIn("\n6 steps of 4 documents; ", said)
        rows = self.rows("a")
        self.assertEqual(rows["steps"], "6 of 4 documents")
        rate, each = (float(rows[name].replace(",", "")) for name in ("tokens per second", "ms per step"))
        self.assertAlmostEqual(rate * each / 1000 / (4 * 4), 1, delta=0.35)  # ms are rounded
        # Nothing is padded where documents follow each other.
        said = self.trained("b", "--layout", "packed", "--context", "64", data=data)
        self.assertIn("\n6 steps of 256 bytes; ", said)
        rows = self.rows("b")
        rate, each = (float(rows[name].replace(",", "")) for name in ("tokens per second", "ms per step"))
        self.assertAlmostEqual(rate * each / 1000 / 256, 1, delta=0.35)
        said = run("compare", "--data", data, "--layout", "padded", "--recipes", "fp32", "--steps", "2", "--layers", "1",
                   "--width", "32", "--context", "64", "--batch", "4")  # fmt: skip
        self.assertIn("2 steps of 4 documents", said.stdout, said.stderr)


class Failures(Case):
    def started(self, out, *arguments, saved, **options):
        """A long run that has saved the checkpoint of that step."""
        words = self.arguments(out, "--save-every", "5", *arguments, steps=100000)
        process = subprocess.Popen(
            [SCRUPLE, *words], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
        )
        deadline = time.time() + 60
        while time.time() < deadline and not os.path.exists(self.path(out, f"checkpoints/step-{saved:08}")):
            time.sleep(0.01)
        return process

    def ended(self, process):
        said, problem = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 1, said + problem)
        self.assertRegex(
            problem,
            r"\nThe run ended after step \d+, in the middle of the next: its weights are not written\. "
            r"'\S+ train --resume \S+' goes on after step \d+\.\n$",
        )
        self.assertRegex(said, r"\nwrote \S+/: metrics\.jsonl.*, checkpoints/\n")
        self.assertFalse(os.path.exists(self.path("a/model.safetensors")))
        self.ends(0, "checkpoint", "verify", self.path("a"))
        return said, problem

    def test_in_the_middle_of_a_step(self):
        """Tokens that become none of the model's: what was seen until then is written, and the run goes on from there."""
        self.data = self.path("text.bin")
        tokens = b"".join(bytes([byte, 0]) for byte in TEXT.encode())
        with open(self.data, "wb") as file:
            file.write(tokens)
        process = self.started("a", saved=10)
        with open(self.data, "r+b") as file:
            file.write(b"\xff\xff" * len(TEXT))
        said, problem = self.ended(process)
        self.assertIn("metrics.jsonl, report.html, checkpoints/", said)
        self.assertRegex(problem, r"^(.*\n)*scruple: .*65535")
        self.assertRegex(problem, r"ended after step (\d+), .* goes on after step \1\.")
        self.assertIn("Throughput", content(self.path("a/report.html")).decode())

    def test_memory_runs_out_in_a_step(self):
        """In an accumulator, which the library asks for: the words say what would take less."""
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "4096", "MALLOC_TOP_PAD_": "0"}
        process = self.started("a", "--gradients", "compressed", "--width", "64", saved=10, env=environment)
        used = int(content(f"/proc/{process.pid}/statm").split()[0]) * resource.getpagesize()
        limit = used - (8 << 20)  # less than it has: what it has stays, and nothing new comes
        resource.prlimit(process.pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        self.assertIn(
            "scruple: out of memory; choose a smaller model, --batch, --context or --recipe, or --recompute block",
            self.ended(process)[1],
        )

    def test_a_damaged_checkpoint_names_the_whole_ones(self):
        self.trained("a", "--save-every", "2", "--keep", "0")
        os.remove(self.path("a/report.html"))
        path = self.path("a/checkpoints/step-00000006/model.safetensors")
        data = bytearray(content(path))
        data[-1] ^= 1
        with open(path, "wb") as file:
            file.write(data)
        said = self.ends(1, "train", "--resume", self.path("a")).stderr
        self.assertIn("its checksum is", said)
        self.assertIn("of its run step-00000004, step-00000002 can be opened: check one with 'scruple checkpoint verify " +
                      self.path("a/checkpoints/step-00000004"), said)  # fmt: skip

    def test_most_steps_skipped(self):
        """A loss scale that fp16 cannot hold: every gradient is infinite, and nothing is learnt."""
        done = self.ends(3, *self.arguments("a", "--activations", "fp16", "--loss-scale", "1e30"))
        self.assertIn("6 of 6 steps were skipped, because a gradient was not finite; choose a smaller --lr or --loss-scale",
                      done.stderr)  # fmt: skip
        self.assertIn("6 of 6 steps were skipped", done.stdout)
        self.assertIn("wrote ", done.stdout)

    def test_no_better_than_at_the_start(self):
        """What is true of a rate that is too high and of a model that overfits."""
        with open(self.data, "w", encoding="utf-8") as file:
            file.write("abcdefgh" * 200 + "".join(chr(33 + n * n % 90) for n in range(400)))
        for more in (("--lr", "1"), ("--validation", "0.19", "--lr", "0.01")):
            done = self.ends(3, *self.arguments("a", *more, "--force", steps=60))
            self.assertRegex(done.stderr, r"the validation loss ended above where it began, [\d.]+ -> [\d.]+: the training "
                             "diverged, or the model overfitted; choose a smaller --lr")  # fmt: skip
            self.assertNotIn("learnt", done.stderr)


class Tokenizers(Case):
    def test_its_files_are_among_those_that_were_written(self):
        """A model of a config.json whose folder has a tokenizer."""
        os.mkdir(self.path("model"))
        config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
                  "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 260, "rms_norm_eps": 1e-5,
                  "max_position_embeddings": 64, "tie_word_embeddings": False, "hidden_act": "silu"}  # fmt: skip
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # as GPT-2 writes bytes
        others = [byte for byte in range(256) if byte not in printable]
        letters = {chr(byte): byte for byte in printable}
        letters.update({chr(256 + n): byte for n, byte in enumerate(others)})
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
                     "pre_tokenizer": level, "post_processor": None, "decoder": level,
                     "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                               "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                               "vocab": letters, "merges": []}}  # fmt: skip
        for name, value in (("config.json", config), ("tokenizer.json", tokenizer)):
            with open(self.path("model", name), "w", encoding="utf-8") as file:
                json.dump(value, file)
        arguments = (
            "train",
            "--model",
            self.path("model/config.json"),
            "--data",
            self.data,
            "--steps",
            "2",
            "--batch",
            "2",
        )
        said = self.ends(0, *arguments, "--context", "16", "--out", self.path("a")).stdout
        self.assertIn(
            "a/: model.safetensors, config.json, the tokenizer's files, metrics.jsonl, report.html\n", said
        )
        self.assertTrue(os.path.exists(self.path("a/tokenizer.json")))
        self.assertNotIn("tokenizer's files", self.trained("b"))


class Moves(Case):
    """Products decide the bits: those of a GPU and its cuBLAS, or of OpenBLAS and the CPU that it is for."""

    MOVED = ": its losses are those of a run that had not moved within rounding, not to the bit\n"

    def check(self, device, others):
        out = "on " + device
        saving = ("--save-every", "2", "--keep", "0", "--device", device)
        self.ends(0, *self.arguments(out, *saving))
        now = self.notes(out, 4).get("arithmetic")
        if now is None:
            self.skipTest("products are plain loops here")
        resume = ("train", "--resume", self.path(out, "checkpoints/step-00000004"), "--out", self.path("b"))
        self.assertNotIn(self.MOVED, self.ends(0, *resume, "--force", "--device", device).stdout)
        for other in others(now):
            self.edit_notes(out, 4, lambda notes, other=other: {**notes, "arithmetic": other})
            said = self.ends(0, *resume, "--force", "--device", device).stdout
            self.assertIn(f"on {now} after {other}{self.MOVED}", said)
        # Old checkpoints do not say.
        self.edit_notes(out, 4, lambda notes: {key: notes[key] for key in notes if key != "arithmetic"})
        self.assertNotIn(self.MOVED, self.ends(0, *resume, "--force", "--device", device).stdout)
        return resume

    def test_another_cpu_or_openblas_is_told(self):
        self.check("cpu", lambda now: ("OpenBLAS 0.0.1 for" + now.split("for")[-1], now + "ish"))

    def test_another_gpu_or_cublas_is_told(self):
        try:
            subprocess.run(["nvidia-smi"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            self.skipTest("no GPU")
        resume = self.check("cuda", lambda now: ("NVIDIA Another, " + now.split(", ")[-1], now + "0"))
        self.assertIn(
            "on cpu after cuda" + self.MOVED, self.ends(0, *resume, "--force", "--device", "cpu").stdout
        )


if __name__ == "__main__":
    SCRUPLE = os.path.abspath(sys.argv.pop(1))
    unittest.main()
