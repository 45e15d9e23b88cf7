"""What the tests of the command line share: running the program, its exit code and words, temporary folders, tiny
models and texts."""

import json
import os
import re
import select
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import zlib

TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n" * 60
TINY = {"--layers": "1", "--width": "32", "--heads": "2", "--context": "16", "--batch": "4"}


def tiny(*arguments, **more):
    """The options of a tiny model, but those that are given."""
    options = {**TINY, **{"--" + name: value for name, value in more.items()}}
    return [word for pair in options.items() if pair[0] not in arguments for word in pair] + list(arguments)


def command(*arguments):
    return [main.program, *map(str, arguments)]


def run(*arguments, env={}, **options):
    given = {"text": True, "errors": "replace", "timeout": 900, **options}
    return subprocess.run(command(*arguments), capture_output=True, env={**os.environ, **env}, **given)


def start(*arguments, env={}, **options):
    """A program that goes on beside the test; what it says is dropped unless options take it."""
    given = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **options}
    return subprocess.Popen(command(*arguments), env={**os.environ, **env}, **given)


def until(found, seconds=60):
    """Waits for something to be so."""
    deadline = time.time() + seconds
    while time.time() < deadline and not found():
        time.sleep(0.02)


def shown(reader, enough, seconds=60):
    """What comes from a descriptor until it is enough."""
    said, deadline = b"", time.time() + seconds
    while time.time() < deadline and not enough(said):
        if select.select([reader], [], [], 1)[0]:
            said += os.read(reader, 4096)
    return said.decode(errors="replace")


def content(path):
    with open(path, "rb") as file:
        return file.read()


def write(path, data):
    with open(path, "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)


def tensors_of(path):
    """A safetensors file's header, and a function from its entries to their bytes."""
    raw = content(path)
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    return (
        json.loads(raw[8:start]),
        lambda x: raw[start + x["data_offsets"][0] : start + x["data_offsets"][1]],
    )


class Case(unittest.TestCase):
    batch = "4"

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.data = self.write("text", TEXT)

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def write(self, name, data):
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        write(self.path(name), data)
        return self.path(name)

    def done(self, *arguments, **options):
        """What a command says that must succeed."""
        result = run(*arguments, **options)
        self.assertEqual(result.returncode, 0, f"{arguments}: {result.stdout}{result.stderr}")
        return result.stdout

    def json_of(self, *arguments):
        return json.loads(self.done(*arguments, "--json"))

    def ends(self, code, message, *arguments, **options):
        result = run(*arguments, **options)
        self.assertEqual(result.returncode, code, f"{arguments}: {result.stdout}{result.stderr}")
        self.assertIn(message, result.stderr, arguments)
        return result

    def fails(self, code, message, *arguments, **options):
        """The same, before any other word."""
        result = self.ends(code, message, *arguments, **options)
        self.assertTrue(result.stderr.startswith("scruple: "), result.stderr)
        return result

    def training(self, *more, out="run", steps=3):
        """The words of a tiny run."""
        shape = tiny(*more, batch=self.batch)
        return ["train", "--data", self.data, "--out", self.path(out), "--steps", str(steps), *shape]

    def trained(self, *more, **options):
        return self.done(*self.training(*more, **options))

    def resumed(self, out="run", *more, **options):
        return self.done("train", "--resume", self.path(out), *more, **options)

    def metrics(self, out="run", times=False, saves=False):
        """Without times and saves, unless they are asked for: no two runs share them. A kill may have cut the last line."""
        rows = [json.loads(line) for line in content(self.path(out, "metrics.jsonl")).rpartition(b"\n")[0].splitlines()]
        return [
            {key: value for key, value in row.items() if times or key != "time"}
            for row in rows
            if saves or "saved_step" not in row
        ]

    def weights(self, out="run"):
        return content(self.path(out, "model.safetensors"))

    def step_of(self, out, step, *names):
        return self.path(out, "checkpoints", f"step-{step:08}", *names)

    def manifest(self, out, step):
        return json.loads(content(self.step_of(out, step, "manifest.json")))

    def rewrite(self, out, step, old, new):
        """Changes a manifest's text, and makes its checksum right again."""
        path = self.step_of(out, step, "manifest.json")
        text = content(path).decode()
        self.assertIn(old, text)
        saved = f'"crc32":"{json.loads(text)["crc32"]}"'
        text = text.replace(old, new, 1).replace(saved, '"crc32":"00000000"', 1)
        write(path, text.replace('"crc32":"00000000"', f'"crc32":"{zlib.crc32(text.encode()):08x}"', 1))

    def report(self, out="run"):
        """What a page draws, and its text."""
        page = content(self.path(out, "report.html")).decode()
        return json.loads(re.search(r'id="data"[^>]*>(.*?)</script>', page, re.DOTALL)[1]), page


def main():
    main.program = os.path.abspath(sys.argv.pop(1))
    unittest.main("__main__")
