"""Our safetensors files against the official Python library: each reads what the other wrote, and
whatever the official library refuses, we refuse. Skips (77) where numpy or safetensors is not installed.

Usage: safetensors_interop_test.py PATH_TO_SAFETENSORS_TEST
"""
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import unittest

try:
    import numpy
    import safetensors
    import safetensors.numpy
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

from command import content, write

PROGRAM = ""
BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1,
         "F8_E5M2FNUZ": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "C64": 8,
         "F64": 8, "I64": 8, "U64": 8}
NUMPY = ["bool", "uint8", "int8", "uint16", "int16", "float16", "uint32", "int32", "float32", "uint64",
         "int64", "float64"]
SHAPES = [(), (0,), (1,), (3, 5), (2, 0, 4), (1, 1, 2, 3)]


def file_of(header, data):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


class Interop(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.theirs = os.path.join(folder.name, "theirs")
        self.ours = os.path.join(folder.name, "ours")

    def copy(self):
        """Reads `theirs` and writes it again as `ours`, with our reader and our writer."""
        environment = {**os.environ, "SCRUPLE_COPY_FROM": self.theirs, "SCRUPLE_COPY_TO": self.ours}
        return subprocess.run([PROGRAM, "--gtest_filter=SafetensorsInterop.CopiesAFile"], env=environment,
                              timeout=60, capture_output=True, text=True)

    def copied(self):
        result = self.copy()
        self.assertEqual(result.returncode, 0, result.stdout)
        self.assertIn("[  PASSED  ] 1 test", result.stdout)

    def test_numpy_arrays_survive_the_trip(self):
        rng = numpy.random.default_rng(1)
        tensors = {}
        for dtype in NUMPY:
            for shape in SHAPES:
                values = rng.integers(0, 2 if dtype == "bool" else 100, shape)
                tensors[f"{dtype} {shape} \u00e9\"\n"] = numpy.asarray(values).astype(dtype)
        metadata = {"format": "np", "a \"quoted\" key": "\u4f60\u597d \\ \n"}
        safetensors.numpy.save_file(tensors, self.theirs, metadata)
        self.copied()
        back = safetensors.numpy.load_file(self.ours)
        self.assertEqual(sorted(back), sorted(tensors))
        for name, values in tensors.items():
            self.assertEqual(back[name].dtype, values.dtype, name)
            self.assertEqual(back[name].shape, values.shape, name)
            self.assertEqual(back[name].tobytes(), values.tobytes(), name)
        with safetensors.safe_open(self.ours, "np") as file:
            self.assertEqual(file.metadata(), metadata)

    def test_every_type_survives_the_trip(self):
        for dtype, size in BYTES.items():
            data = bytes(random.Random(dtype).randrange(256) for _ in range(6 * size))
            made = file_of({"t": {"dtype": dtype, "shape": [2, 3], "data_offsets": [0, 6 * size]}}, data)
            write(self.theirs, made)
            try:
                want = safetensors.deserialize(made)
            except safetensors.SafetensorError:
                continue  # an older library that has not heard of it
            self.copied()
            got = safetensors.deserialize(content(self.ours))
            self.assertEqual(got[0][0], "t")
            for field in ("dtype", "shape"):
                self.assertEqual(got[0][1][field], want[0][1][field], dtype)
            self.assertEqual(bytes(got[0][1]["data"]), data, dtype)

    def test_what_they_refuse_we_refuse(self):
        header = {"__metadata__": {"k": "v"}, "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                  "b": {"dtype": "U8", "shape": [3], "data_offsets": [8, 11]}}
        good = file_of(header, bytes(range(11)))
        rng = random.Random(7)
        pieces = [b"0", b"1", b"8", b"9", b"-", b" ", b'"', b"[", b""]
        refused = 0
        for _ in range(150):
            changed = bytearray(good)
            for _ in range(rng.choice([1, 1, 2])):
                at = rng.randrange(len(changed) - 11)
                changed[at:at + rng.choice([1, 1, 1, 0])] = rng.choice(pieces)
            write(self.theirs, changed)
            try:
                safetensors.deserialize(bytes(changed))
            except Exception:  # the library's own, or its parser's
                refused += 1
                self.assertNotEqual(self.copy().returncode, 0, bytes(changed))
        self.assertGreater(refused, 50)


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    unittest.main()
