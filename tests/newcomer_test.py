"""A newcomer's path: every command and every Python block of README.md, in its order, in a copy of the repository.

Usage: newcomer_test.py BUILD   (the folder of the build under test, which stands for the clone's build/; exit code 77: there
is no torch or no transformers)

In README.md a block of code without a language is of the shell. Lines that begin with "$ " are commands; in a block that has
none, those that begin with the name of a program (PROGRAMS). The rest is what they print; a block without a command repeats
lines that one above has printed. "..." stands for lines that are left out. Numbers, units and engines may be others, all
else is as printed. A command must succeed, unless the first line that it prints begins with "scruple: ". Python blocks run
one after the other, where `torch`, `model`, `data` (pairs of inputs and targets) and `criterion` are there; one that
computes gradients must change the weights.

Commands in NOT_RUN are not run; `make demo` finds the build made. book.txt, notes.jsonl and the folders of models are made
here, the models tiny with random weights; ./Llama-3.1-8B is its config.json alone.
"""
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time
import unittest

try:
    import folders_test
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
    from transformers.utils import logging
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

import command
from docs_test import files

logging.disable_progress_bar()
BUILD = pathlib.Path(sys.argv[1]).resolve()
ROOT = pathlib.Path(__file__).resolve().parents[1]
PROGRAMS = ("make", "pip", "python", "torchrun", "build/scruple", "git")
SHELL = ("", "console", "sh", "bash", "shell", "text")
NOT_RUN = {
    r"git clone\b": "the test's copy is the clone",
    r"make build\b": "the build under test is there",
    r"make test\b": "it is what runs this test",
    r"pip install\b": "the test `wheel` installs the package",
    r".* (--device cuda|ARCHITECTURES=|CUDA=)": "there may be no GPU and no toolkit",
}
LLAMA_8B = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
            "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "vocab_size": 128256, "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}

# What a reader of the six lines has before them, and what must come of them.
PRELUDE = """
import json, sys
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.EmbeddingBag(50, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 10))
data = [(torch.randint(50, (16, 8)), torch.randint(10, (16,))) for _ in range(8)]
criterion = torch.nn.CrossEntropyLoss()
names = globals()
for number, block in enumerate(json.load(sys.stdin), 1):
    before = [p.detach().float().clone() for p in model.parameters()]
    exec(compile(block, f"README.md, Python block {number}", "exec"), names)
    if "release_gradients(" in block and ".backward(" not in block:  # the loop comes after it
        for x, y in data:
            criterion(model(x), y).backward()
            names["opt"].step(), names["opt"].zero_grad()
    if "release_gradients(" in block or ".backward(" in block:
        after = [p.detach().float() for p in model.parameters()]
        assert all(torch.isfinite(p).all() for p in after), f"block {number} leaves weights that are not finite"
        assert any((a != b).any() for a, b in zip(after, before)), f"block {number} changes no weight"
"""


def blocks(text):
    """(language, lines) of every fenced block."""
    return [(match[1], match[2].splitlines()) for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]


def commands(lines):
    """(command, what it is said to print) of a block; the first command is "" where it begins with output."""
    found, marked = [], any(line.startswith("$ ") for line in lines)
    for line in lines:
        if found and found[-1][0].endswith("\\"):
            found[-1][0] = found[-1][0][:-1] + line.removeprefix("> ").strip()
        elif line.startswith("$ ") or not marked and line.split(" ")[0] in PROGRAMS:
            found.append([line.removeprefix("$ "), []])
        else:
            found = found or [["", []]]
            found[-1][1].append(line)
    return found


def words(command):
    return shlex.split(command, comments=True)


def shape(line):
    """What stays the same on another machine, with another text."""
    line = re.sub(r"\b[KMGT]i?B\b", "B", re.sub(r"\bcpu-[\w-]+", "cpu", line))
    return " ".join(re.sub(r"[-+]?\d[\d,.:]*(e[-+]?\d+)?", "0", line).split())


def shapes(lines):
    return [shape(line) for line in lines if line.strip()]


def missing(printed, said, anywhere=False):
    """What of the printed lines was not said; None if they were, in their order and alone or, with `anywhere`, among others."""
    printed, said = shapes(printed), shapes(said)
    pattern = "".join(r"(?:.*\n)*?" if line == "..." else re.escape(line + "\n") for line in printed)
    text = "".join(line + "\n" for line in said)
    if re.search(f"^{pattern}", text, re.MULTILINE) if anywhere else re.fullmatch(pattern, text):
        return None
    return next((line for line in printed if line not in ("...", *said)), "such lines in this order, alone")


class Newcomer(command.Case):
    model = folders_test.Folders.model  # of Hugging Face's, with a tokenizer

    def setUp(self):
        super().setUp()
        self.root = pathlib.Path(self.folder)
        self.clone = self.root / "scruple"
        for path in files():
            (self.clone / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, self.clone / path)
        (self.clone / "build").symlink_to(BUILD)
        self.env = {**os.environ, "SCRUPLE_LIBRARY": str(BUILD / "libscruple.so"), "PYTHONPATH": str(self.clone / "python"),
                    "PATH": os.pathsep.join([str(pathlib.Path(sys.executable).parent), str(BUILD), os.environ["PATH"]]),
                    "SCRUPLE_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"}
        self.text = (ROOT / "README.md").read_text(encoding="utf-8")

    def shell(self, command):
        """What is seen: both streams, but the line of progress, which a terminal writes over."""
        done = subprocess.run(["bash", "-c", command], cwd=self.clone, env=self.env, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace", timeout=1200)
        lines = [line for line in done.stdout.splitlines() if not re.search(r"^\S.*?  (step \d+/\d+  loss|validating, )", line)]
        return done.returncode, lines

    def as_run(self, command):
        """The command, or why it is not run."""
        reason = next((reason for pattern, reason in NOT_RUN.items() if re.match(pattern, command)), None)
        return (None, reason) if reason else (re.sub(r"^make\b", "make --old-file build", command), None)

    def make_what_is_named(self, every):
        (self.clone / "book.txt").write_text(folders_test.TEXT)
        notes = [{"prompt": f"After {i} comes", "completion": f" {i + 1}."} for i in range(40)]
        (self.clone / "notes.jsonl").write_text("".join(json.dumps(note) + "\n" for note in notes))
        for name in sorted({name for command in every for name in re.findall(r" \./([\w.-]+)", command)}):
            if (self.clone / name).exists():
                continue
            if name == "Llama-3.1-8B":
                (self.clone / name).mkdir()
                (self.clone / name / "config.json").write_text(json.dumps(LLAMA_8B))
            else:
                tiny = folders_test.decoder(LlamaConfig, vocab_size=folders_test.WORDS, max_position_embeddings=256)
                shutil.move(self.model(tiny, name=name), self.clone / name)

    def check_what_is_left(self, command):
        """Every run leaves its report and a model that transformers loads."""
        said = words(command)
        if said[:1] != ["build/scruple"] or "--out" not in said or "--help" in said:
            return
        out = self.clone / said[said.index("--out") + 1]
        if said[1] in ("train", "compare"):
            page = (out / "report.html").read_text(encoding="utf-8")
            report = json.loads(re.search(r'id="data"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
            self.assertTrue(any(section["charts"] for section in report["sections"]), f"{command}: a report without curves")
        if said[1] == "train":
            AutoModelForCausalLM.from_pretrained(out)
            if "--model" in said:
                AutoTokenizer.from_pretrained(out)

    def test_the_shell(self):
        every = [part for language, lines in blocks(self.text) if language in SHELL for part in commands(lines)]
        self.make_what_is_named([command for command, _ in every])
        ran, heard = 0, []
        for command, printed in every:
            with self.subTest(command or printed[0]):
                if not command:
                    told = any(missing(printed, said, anywhere=True) is None for said in heard)
                    self.assertTrue(told, "no command has printed this")
                    continue
                runs, reason = self.as_run(command)
                if not runs:
                    print(f"not run: {command}: {reason}", flush=True)
                    continue
                began = time.monotonic()
                code, said = self.shell(runs)
                print(f"{time.monotonic() - began:6.1f} s: {runs}", flush=True)
                heard.append(said)
                shown, ran = "\n".join(said), ran + 1
                self.assertEqual(code == 0, not (printed and printed[0].startswith("scruple: ")), shown)
                if words(runs)[:2] == ["build/scruple", "sample"]:  # what follows is chance
                    self.assertTrue(shown.startswith(words(runs)[words(runs).index("--prompt") + 1]), shown)
                elif any(line.strip() for line in printed):
                    lacks = missing(printed, said)
                    self.assertIsNone(lacks, f"it printed no {lacks}, but\n{shown}")
                self.check_what_is_left(runs)
        self.assertGreater(ran, 3)

    def test_python(self):
        every = ["\n".join(lines) for language, lines in blocks(self.text) if language == "python"]
        self.assertTrue(every)
        done = subprocess.run([sys.executable, "-c", PRELUDE], input=json.dumps(every), cwd=self.clone, env=self.env,
                              text=True, capture_output=True, timeout=600)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_how_the_page_is_read(self):
        self.assertEqual(commands(["$ a \\", "  --b  # c", "make 1"]), [["a --b  # c", ["make 1"]]])
        self.assertEqual(commands(["make demo", "out"]), [["make demo", ["out"]]])
        said = ["a 1.5 MiB", "", "b  -2", "c 3 s", "d"]
        self.assertIsNone(missing(["a 22 GiB", "b +0.1", "c 1 s", "d"], said))
        self.assertIsNone(missing(["a 0 KiB", "...", "d"], said))
        self.assertIsNone(missing(["...", "c 9 s", "..."], said))
        self.assertIsNone(missing(["b 1", "c 9 s"], said, anywhere=True))
        for wrong in (["a 0 KiB", "d"], ["b 1", "..."], ["...", "c 1 s"], ["d", "...", "a 1 MiB"], ["...", "e"]):
            self.assertIsNotNone(missing(wrong, said), wrong)

    def test_no_block_is_left_out(self):
        self.assertEqual({language for language, _ in blocks(self.text)} - {*SHELL, "python"}, set())
        self.assertEqual(self.text.count("\n```"), 2 * len(blocks(self.text)), "a fence that is not closed or stands further right")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
