"""The command line from outside: JSON keys and sums, the figures the project promises, and every way to fail.

Usage: cli_test.py PATH_TO_SCRUPLE
"""
import json
import os
import struct
import subprocess
import sys
import tempfile
import unittest

SCRUPLE = ""

PLAN_KEYS = {"recipe", "optimizer", "gradients", "bytes_per_param", "total_bytes", "parts"}
BENCH_KEYS = {"optimizer", "recipe", "params", "tensors", "threads", "engine", "params_per_s",
              "moved_bytes_per_param", "gb_per_s", "copy_gb_per_s", "copy_fraction"}


def run(*arguments):
    return subprocess.run([SCRUPLE, *arguments], capture_output=True, text=True, timeout=300)


def safetensors(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def file(self, name, content):
        path = os.path.join(self.folder, name)
        with open(path, "wb") as out:
            out.write(content if isinstance(content, bytes) else json.dumps(content).encode())
        return path

    def rows_of(self, *arguments):
        return self.json_of(*arguments)["rows"]

    def json_of(self, *arguments):
        done = run(*arguments, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr, "")
        return json.loads(done.stdout)

    def fails(self, code, message, *arguments):
        done = run(*arguments)
        self.assertEqual(done.returncode, code, f"{arguments}: {done.stdout}{done.stderr}")
        self.assertEqual(done.stdout, "", arguments)
        self.assertTrue(done.stderr.startswith("scruple: "), done.stderr)
        self.assertIn(message, done.stderr, arguments)


class List(Case):
    def test_names(self):
        found = self.json_of("list")
        for kind, some in {"optimizers": ["sgd", "adamw", "lion"],
                           "formats": ["fp32", "bf16+8", "companded8", "log4"],
                           "recipes": ["fp32", "mixed", "split", "flash", "lpmm", "scruple", "scant"],
                           "engines": ["cpu-baseline"]}.items():
            self.assertLessEqual(set(some), {one["name"] for one in found[kind]})

    def test_contents(self):
        found = self.json_of("list")
        adamw = next(one for one in found["optimizers"] if one["name"] == "adamw")
        self.assertEqual({h["name"]: h["default"] for h in adamw["hyperparameters"]}["beta2"], 0.999)
        self.assertEqual([s["name"] for s in adamw["slots"] if not s["optional"]], ["exp_avg", "exp_avg_sq"])
        for one in found["formats"]:
            self.assertGreater(one["bits_per_value"], 0)
            self.assertTrue(one["roles"] and one["roundings"])
            self.assertTrue("error" in one or "error_nonneg" in one)
        scruple = next(one for one in found["recipes"] if one["name"] == "scruple")
        self.assertEqual(scruple["bytes_per_param"],
                         {"optimizer": "adamw", "stored": 7.125, "released": 5.125, "compressed": 6.1875})
        self.assertTrue(any(one["available"] for one in found["engines"]))

    def test_text_names_everything(self):
        text = run("list").stdout
        for kind in self.json_of("list").values():
            for one in kind:
                self.assertIn(one["name"], text)


class Plan(Case):
    def check_row(self, row, params):
        self.assertLessEqual(PLAN_KEYS, set(row))
        self.assertEqual(sum(row["parts"].values()), row["total_bytes"])
        self.assertTrue(all(isinstance(part, int) and part >= 0 for part in row["parts"].values()))
        self.assertAlmostEqual(row["bytes_per_param"], row["total_bytes"] / params)

    def test_promised_figures(self):
        wanted = {("fp32", "stored"): 16, ("fp32", "released"): 12,
                  ("mixed", "stored"): 16, ("mixed", "released"): 14,
                  ("split", "stored"): 14, ("split", "released"): 12,
                  ("flash", "stored"): 7.125, ("flash", "released"): 5.125,
                  ("scruple", "stored"): 7.125, ("scruple", "released"): 5.125,
                  ("scruple", "compressed"): 6.1875,
                  ("scant", "stored"): 6.72, ("scant", "released"): 4.72}
        for (recipe, policy), bytes_per_param in wanted.items():
            (row,) = self.rows_of("plan", "--params", "8.03e9", "--optimizer", "adamw", "--recipe", recipe,
                                  "--gradients", policy)
            self.check_row(row, 8030000000)
            self.assertEqual((row["recipe"], row["optimizer"], row["gradients"]), (recipe, "adamw", policy))
            self.assertAlmostEqual(row["bytes_per_param"], bytes_per_param, delta=0.005)
        (row,) = self.rows_of("plan", "--params", "8.03e9", "--optimizer", "sgd", "--recipe", "lpmm")
        self.assertAlmostEqual(row["bytes_per_param"], 3.4375, delta=0.001)

    def test_parts(self):
        (row,) = self.rows_of("plan", "--params", "1024", "--recipe", "scruple")
        self.assertEqual(row["parts"], {"weights": 2048, "extra": 1024, "exp_avg": 1024, "exp_avg_sq": 1024,
                                        "scales": 128, "gradients": 2048})

    def test_every_optimizer_and_policy(self):
        for optimizer in self.json_of("list")["optimizers"]:
            for policy in ["stored", "released", "compressed"]:
                found = self.json_of("plan", "--params", "1e6", "--optimizer", optimizer["name"],
                                     "--gradients", policy)
                self.assertEqual(len(found["rows"]) + len(found["refused"]), 7)
                for row in found["rows"]:
                    self.check_row(row, 1000000)
                    self.assertEqual(row["parts"]["gradients"] == 0, policy == "released")

    def test_recipe_that_does_not_serve_is_named(self):
        found = self.json_of("plan", "--params", "1e6")
        self.assertEqual([one["recipe"] for one in found["refused"]], ["lpmm"])
        self.assertIn("lpmm: recipe lpmm has no format for exp_avg_sq", run("plan", "--params", "1e6").stdout)

    def test_ways_to_write_a_count(self):
        for text in ["8030000000", "8.03e9", "8.03B", "8.03G", "8030M", "8030000K"]:
            self.assertEqual(self.json_of("plan", "--params", text)["params"], 8030000000, text)

    def test_hyperparameters_decide_the_slots(self):
        (row,) = self.rows_of("plan", "--params", "1e6", "--recipe", "fp32", "--set", "amsgrad=1")
        self.assertEqual(row["parts"]["max_exp_avg_sq"], 4000000)
        sgd = ["plan", "--params", "1e6", "--recipe", "fp32", "--optimizer", "sgd"]
        self.assertIn("momentum_buffer", self.rows_of(*sgd)[0]["parts"])
        self.assertNotIn("momentum_buffer", self.rows_of(*sgd, "--set", "momentum=0")[0]["parts"])

    def test_a_device_of_the_environment_asks_for_no_batch(self):
        plan = ["plan", "--params", "64M", "--recipe", "scruple"]
        if "--batch" not in run("plan", "--help").stdout.split("Examples")[0].split("Columns")[0]:
            self.skipTest("this build leaves the trainer out")
        by_name = subprocess.run([SCRUPLE, *plan], capture_output=True, text=True, timeout=300,
                                 env={**os.environ, "SCRUPLE_DEVICE": "cpu"})
        self.assertEqual(by_name.stdout, run(*plan).stdout, by_name.stderr)
        self.assertIn("SCRUPLE_DEVICE", run("plan", "--help").stdout)
        self.fails(2, "describe a run; add its --batch", *plan, "--device", "cpu")

    def test_explicit_formats(self):
        (row,) = self.rows_of("plan", "--params", "1024", "--weights", "bf16+4", "--moments", "nf4",
                              "--second-moments", "log4")
        self.assertEqual(row["parts"], {"weights": 2048, "extra": 512, "exp_avg": 512, "exp_avg_sq": 512,
                                        "scales": 16 * 4 + 8 * 4, "gradients": 2048})


class Models(Case):
    def test_safetensors(self):
        header = {"__metadata__": {"format": "pt"}, "w": entry([100, 64], 0, 25600),
                  "b": entry([64], 25600, 25728, "BF16"), "scalar": entry([], 25728, 25732),
                  "empty": entry([0, 7], 25732, 25732),
                  "mask": entry([8], 25732, 25740, "BOOL")}
        path = self.file("tiny.safetensors", safetensors(header, bytes(25740)))
        for arguments in [[path], ["--model", path]]:
            found = self.json_of("plan", *arguments)
            self.assertEqual((found["params"], found["tensors"]), (6400 + 64 + 1, 4))
            self.assertEqual(len(found["notes"]), 1)  # the mask
        self.assertEqual(self.json_of("plan", path, path)["params"], 2 * 6465)  # shards add up
        cut = self.json_of("plan", self.file("cut.safetensors", safetensors(header, bytes(100))))  # on its way
        self.assertEqual(cut["params"], 6465)
        self.assertIn("the file is cut short", cut["notes"][1])

    def test_small_tensors_stay_fp32_in_lpmm(self):
        header = {"w": entry([64, 128], 0, 32768), "b": entry([64], 32768, 33024)}
        path = self.file("m.safetensors", safetensors(header, bytes(33024)))
        for policy in ["stored", "compressed"]:
            (row,) = self.rows_of("plan", path, "--optimizer", "sgd", "--recipe", "lpmm",
                                  "--gradients", policy)
            self.assertEqual(row["total_bytes"], 8192 * 27.5 / 8 + 64 * 12)

    def test_configs(self):
        llama = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
                 "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                 "vocab_size": 128256, "tie_word_embeddings": False, "attention_bias": False}
        mistral = {**llama, "model_type": "mistral", "vocab_size": 32000, "head_dim": None}
        qwen2 = {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
                 "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
                 "vocab_size": 152064, "tie_word_embeddings": False}
        qwen3 = {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
                 "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
                 "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True}
        gemma = {"model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384,
                 "num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
                 "vocab_size": 256000}
        gemma2 = {"model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216,
                  "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
                  "head_dim": 256, "vocab_size": 256000}
        gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
                "n_inner": None, "vocab_size": 50257}
        # The parameter counts that their publishers state.
        for config, params in [(llama, 8030261248), (mistral, 7241732096), (qwen2, 7615616512),
                               (qwen3, 596049920), (gemma, 2506172416), (gemma2, 2614341888),
                               (gpt2, 124439808),
                               ({**llama, "tie_word_embeddings": True}, 8030261248 - 128256 * 4096),
                               ({**llama, "attention_bias": True}, 8030261248 + 32 * 2 * (4096 + 1024))]:
            found = self.json_of("plan", self.file("config.json", config))
            self.assertEqual(found["params"], params, config)
        self.assertEqual(self.json_of("plan", self.file("config.json", llama))["tensors"], 291)
        self.assertEqual(self.json_of("plan", self.file("config.json", gpt2))["tensors"], 148)


    def test_folders_and_indices(self):
        """As Hugging Face lays models out: an index with its shards, one file, or a config alone."""
        def shard(elements, name):
            return safetensors({name: entry([elements], 0, 4 * elements)}, bytes(4 * elements))
        config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_positions": 4, "vocab_size": 10}
        self.file("config.json", config)
        of_config = self.json_of("plan", self.folder)["params"]
        self.assertEqual(of_config, self.json_of("plan", os.path.join(self.folder, "config.json"))["params"])
        self.file("model.safetensors", shard(7, "w"))
        self.assertEqual(self.json_of("plan", self.folder)["params"], 7)
        self.file("a.safetensors", shard(100, "a"))
        self.file("b.safetensors", shard(20, "b"))
        self.file("other.safetensors", shard(1000, "other"))  # which the index does not name
        index = {"metadata": {}, "weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
        path = self.file("model.safetensors.index.json", index)
        self.assertEqual(self.json_of("plan", self.folder)["params"], 7)  # as transformers reads it where both are there
        os.remove(os.path.join(self.folder, "model.safetensors"))
        for given in [self.folder, self.folder + "/", path]:
            found = self.json_of("plan", given)
            self.assertEqual((found["params"], found["tensors"]), (120, 2))
        for wrong, message in [({"a": "c.safetensors"}, "names c.safetensors, which is not there"), ({"a": 3}, "in the same folder"),
                               ({"a": "../a.safetensors"}, "in the same folder"), ([], "weight_map")]:
            self.fails(1, message, "plan", self.file("model.safetensors.index.json", {"weight_map": wrong}))

    def test_a_file_of_a_checkpoint_counts_its_weights(self):
        planes = {"layer/w": ("BF16", 200), "layer/w/extra": ("U8", 100), "layer/w/exp_avg": ("U8", 100),
                  "layer/w/exp_avg/scale": ("F32", 4), "b": ("F32", 40), "b/exp_avg": ("F32", 40)}
        header, at = {"__metadata__": {"scruple_checkpoint": "1"}}, 0
        for name, (dtype, size) in planes.items():
            header[name] = entry([size // {"BF16": 2, "U8": 1, "F32": 4}[dtype]], at, at + size, dtype)
            at += size
        found = self.json_of("plan", self.file("m.safetensors", safetensors(header, bytes(at))))
        self.assertEqual((found["params"], found["tensors"], found["notes"]), (110, 2, []))
        header["__metadata__"] = {}  # of another program: all of it counts
        self.assertEqual(self.json_of("plan", self.file("m.safetensors", safetensors(header, bytes(at))))["tensors"], 4)


class Bench(Case):
    def test_rows(self):
        found = self.json_of("bench", "--params", "50000", "--tensors", "7", "--threads", "2",
                             "--repeat", "1")
        self.assertEqual([row["recipe"] for row in found["rows"]],
                         ["fp32", "mixed", "split", "flash", "scruple", "scant"])
        for row in found["rows"]:
            self.assertLessEqual(BENCH_KEYS, set(row))
            self.assertEqual((row["params"], row["tensors"], row["threads"]), (50000, 7, 2))
            self.assertAlmostEqual(row["gb_per_s"], row["params_per_s"] * row["moved_bytes_per_param"] / 1e9)
            self.assertAlmostEqual(row["copy_fraction"], row["gb_per_s"] / row["copy_gb_per_s"])
            self.assertGreater(row["params_per_s"], 0)
        moved = {row["recipe"]: row["moved_bytes_per_param"] for row in found["rows"]}
        self.assertEqual(moved["fp32"], 2 * 12 + 2)
        self.assertAlmostEqual(moved["scruple"], 2 * 5.125 + 2, delta=0.01)

    def test_choices(self):
        (row,) = self.rows_of("bench", "--params", "5000", "--repeat", "1", "--optimizer", "sgd",
                              "--recipe", "lpmm", "--engine", "cpu-baseline", "--gradient-format", "int8",
                              "--rounding", "stochastic", "--set", "nesterov=1")
        self.assertEqual((row["engine"], row["optimizer"]), ("cpu-baseline", "sgd"))
        self.assertAlmostEqual(row["moved_bytes_per_param"], (2 * 19 + 8.5) / 8, delta=0.01)

    def test_device_is_another_name_for_engine(self):
        same = [self.rows_of("bench", "--params", "5000", "--repeat", "1", "--recipe", "fp32", name, "cpu")
                for name in ["--engine", "--device"]]
        self.assertEqual(*[[row["engine"] for row in rows] for rows in same])
        self.assertTrue(same[0][0]["engine"].startswith("cpu-"))

    def test_cuda(self):
        bench = ["bench", "--device", "cuda", "--params", "50000", "--tensors", "7", "--repeat", "1"]
        cuda = [one for one in self.json_of("list")["engines"] if one["name"] == "cuda"]
        if not cuda:
            self.fails(2, "known: cpu", *bench)
        elif not cuda[0]["available"]:
            done = run(*bench)
            self.assertNotEqual(done.returncode, 0)
            self.assertEqual(done.stdout, "")
            self.assertIn(cuda[0]["reason"], done.stderr)
        else:
            rows = self.rows_of(*bench)
            self.assertEqual({row["engine"][:4] for row in rows}, {"cuda"})
            self.assertTrue(all(row["params_per_s"] > 0 and row["copy_gb_per_s"] > 0 for row in rows))
            self.assertNotIn("thread", run(*bench).stdout.splitlines()[0])


class Help(Case):
    def test_help_and_version(self):
        self.assertRegex(run("--version").stdout, r"^scruple \d+\.\d+\.\d+\n$")
        for arguments in [[], ["list"], ["plan"], ["bench"]]:
            done = run(*arguments, "--help")
            self.assertEqual(done.returncode, 0)
            self.assertIn("xample", done.stdout)

    def test_help_is_a_command_too(self):
        self.assertEqual(run("help").stdout, run("--help").stdout)
        for command in ["list", "plan", "bench"]:
            done = run("help", command)
            self.assertEqual((done.returncode, done.stdout), (0, run(command, "--help").stdout))
            self.assertIn("scruple " + command, done.stdout)
        self.fails(2, "did you mean 'plan'?", "help", "pla")

    def test_no_command_shows_the_help(self):
        done = run()
        self.assertEqual((done.returncode, done.stdout, done.stderr), (2, run("--help").stdout, ""))


class Slips(Case):
    """What was perhaps meant, where it is near; nothing where it is not."""

    def test_commands(self):
        self.fails(2, "'pln' is no command of scruple; there are: ", "pln", "--params", "1e9")
        for word, meant in [("pln", "plan"), ("lsit", "list"), ("benhc", "bench"), ("hepl", "help")]:
            self.fails(2, f"did you mean '{meant}'?", word, "--params", "x")
        self.assertNotIn("did you mean", run("frob").stderr)
        self.assertNotIn("did you mean", run("p" * 1000).stderr)

    def test_options(self):
        self.fails(2, "scruple plan has no option --parms; did you mean '--params'?\n", "plan", "--parms", "1e9")
        self.fails(2, "did you mean '--params'?", "plan", "--parms=1e9", "--recipe", "scruple")
        self.fails(2, "scruple plan has no option --bogus; try 'scruple plan --help'\n", "plan", "--params", "1", "--bogus")

    def test_values(self):
        plan = ["plan", "--params", "1e6"]
        for option, slip, meant in [("--recipe", "scruble", "scruple"), ("--optimizer", "adamv", "adamw"),
                                    ("--weights", "bf16+88", "bf16+8"), ("--moments", "compnded8", "companded8"),
                                    ("--second-moments", "lgo5", "log5"), ("--gradients", "relased", "released")]:
            self.fails(2, f"'{meant}'", *plan, option, slip)
            self.assertIn("did you mean", run(*plan, option, slip).stderr)
            self.assertNotIn("did you mean", run(*plan, option, "frobnicate").stderr)
        self.fails(2, "did you mean 'adamw'?", *plan, "--optimizer", "AdamW")
        self.fails(2, "did you mean 'stochastic'?", *plan, "--rounding", "stochasic")
        self.fails(2, "did you mean 'exp_avg_sq'?", *plan, "--rounding", "exp_avgsq=wide")

    def test_values_that_are_no_options(self):
        self.fails(2, "has no option --released; did you mean '--gradients released'?\n", "plan", "--params", "1", "--released")

    def test_a_suggestion_stands_before_a_long_list(self):
        self.fails(2, "unknown format 'bf17'; did you mean 'bf16'? Known: fp32, ", "plan", "--params", "1", "--weights", "bf17")

    def test_hyperparameters(self):
        plan = ["plan", "--params", "1e6"]
        self.fails(2, "unknown hyperparameter of adamw 'wieght_decay'; did you mean 'weight_decay'? Known: lr, ", *plan,
                   "--set", "wieght_decay=1")
        self.fails(2, "did you mean 'beta1' or 'beta2'?", *plan, "--set", "beta=0.9")
        self.fails(2, "did you mean 'momentum'?", *plan, "--optimizer", "sgd", "--set", "Momentm=1")
        self.assertNotIn("did you mean", run(*plan, "--set", "frobnicate=1").stderr)

    def test_engines(self):
        for option, slip, meant in [("--engine", "cdua", "cuda"), ("--device", "cdua:0", "cuda"), ("--device", "CPU", "cpu"),
                                    ("--engine", "cpu-basline", "cpu-baseline")]:
            self.fails(2, f"did you mean '{meant}'?", "bench", "--params", "64", option, slip)
        self.assertNotIn("did you mean", run("bench", "--params", "64", "--engine", "frobnicate").stderr)
        self.fails(2, "must be a device's number", "bench", "--params", "64", "--engine", "cuda:x")


class Failures(Case):
    def test_command_line(self):
        self.fails(2, "frob", "frob")
        self.fails(2, "--params", "plan")
        self.fails(2, "--bogus", "plan", "--params", "1", "--bogus")
        self.fails(2, "--gradients", "plan", "--params", "1", "--gradients", "lost")
        self.fails(2, "NAME=VALUE", "plan", "--params", "1", "--set", "lr")
        self.fails(2, "either", "plan", "--params", "1", "x.json")

    def test_unknown_names_list_the_known(self):
        self.fails(2, "known: sgd", "plan", "--params", "1", "--optimizer", "frob")
        self.fails(2, "known: fp32", "plan", "--params", "1", "--recipe", "frob")
        self.fails(2, "known: fp32", "plan", "--params", "1", "--weights", "frob")
        self.fails(2, "known: lr", "plan", "--params", "1", "--set", "frob=1")
        self.fails(2, "known: cpu", "bench", "--engine", "frob")
        self.fails(2, "it serves: sgd", "plan", "--params", "1", "--recipe", "lpmm")
        self.fails(2, "formats that can: fp32", "plan", "--params", "1", "--weights", "linear8")
        self.fails(2, "formats that can: fp32", "plan", "--params", "1", "--moments", "int8")
        self.fails(2, "formats that can: fp32", "bench", "--params", "1", "--gradient-format", "nf4")
        self.fails(2, "no moment", "plan", "--params", "1", "--optimizer", "sgd", "--second-moments", "log4")

    def test_roundings(self):
        """The error and the help name every rounding that a weight or a moment can have."""
        known = {rounding for one in self.json_of("list")["formats"] for rounding in one["roundings"]
                 if set(one["roles"]) & {"weight", "signed", "nonneg"}} - {"dither"}
        self.assertGreater(len(known), 3)
        for said in (run("plan", "--params", "1", "--rounding", "up").stderr, run("plan", "--help").stdout):
            self.assertEqual({name for name in known if name in said}, known, said)
        self.fails(2, "--rounding is 'dither'; it must be", "plan", "--params", "1", "--rounding", "dither")

    def test_counts(self):
        for text in ["-1", "-8e9", "0", "nan", "inf", "1e30", "1e999", "0.5", "1.5", "", "8Q", "8MM", "0x10",
                     "1 000", "1125899906842625"]:
            self.fails(2, "--params", "plan", f"--params={text}")
        self.fails(2, "--tensors", "bench", "--params", "10", "--tensors", "11")

    def test_too_large_for_this_machine(self):
        self.fails(1, "fewer --params", "bench", "--params", "1e14")

    def test_safetensors(self):
        good = {"w": entry([2, 2], 0, 16)}
        huge = 2**63
        cases = {
            "no bytes": (b"", "0 bytes"),
            "half a length": (b"\x01\0\0", "begins with 8"),
            "cut header": (safetensors(good)[:20], "follow"),
            "length beyond the file": (safetensors(good, length=10**6), "follow"),
            "header over 100 MB": (safetensors(good, length=100_000_001), "the limit is 100000000"),
            "largest length": (safetensors(good, length=2**64 - 1), "the limit is 100000000"),
            "no JSON": (safetensors(b"{'w': 1}"), "a key must be a string"),
            "empty header": (safetensors(b""), "does not begin with '{'"),
            "bad UTF-8": (safetensors(b'{"\xff": 1}'), "JSON"),
            "two values": (safetensors(b"{}{}"), "JSON"),
            "deep": (safetensors(b'{"w":' * 200_000), "which has no place there"),
            "a list": (safetensors(b"[]"), "does not begin with '{'"),
            "no tensors": (safetensors({}), "no parameters"),
            "entry is a number": (safetensors({"w": 3}), "must be an object"),
            "no shape": (safetensors({"w": {"dtype": "F32", "data_offsets": [0, 4]}}), "shape"),
            "no offsets": (safetensors({"w": {"dtype": "F32", "shape": [1]}}), "data_offsets"),
            "unknown dtype": (safetensors({"w": entry([1], 0, 4, "F31")}), "F31"),
            "dtype is a list": (safetensors({"w": entry([1], 0, 4, [])}), "dtype"),
            "negative size": (safetensors({"w": entry([-4], 0, 16)}), "a dimension is -4"),
            "fractional size": (safetensors({"w": entry([1.5], 0, 6)}), "a dimension is 1.5"),
            "one huge size": (safetensors({"w": entry([huge], 0, 4)}), "a dimension is 9223372036854775808"),
            "product overflows": (safetensors({"w": entry([2**33, 2**33], 0, 4)}), "2^63"),
            "product wraps to 0": (safetensors({"w": entry([2**32, 2**32], 0, 0)}), "2^63"),
            "offsets backwards": (safetensors({"w": entry([1], 8, 4)}), "data_offsets"),
            "offsets contradict": (safetensors({"w": entry([3], 0, 16)}), "data_offsets"),
            "offsets huge": (safetensors({"w": entry([1], 2**64 - 8, 2**64 - 4)}), "an offset is"),
            "sum too large": (safetensors({str(i): entry([2**49], i * 2**51, (i + 1) * 2**51) for i in range(3)}), "2^50"),
        }
        for name, (content, message) in cases.items():
            with self.subTest(name):
                self.fails(1, message, "plan", self.file("bad.safetensors", content))
        self.fails(1, "open", "plan", os.path.join(self.folder, "absent.safetensors"))
        os.mkdir(os.path.join(self.folder, "empty"))
        self.fails(1, "no model.safetensors", "plan", os.path.join(self.folder, "empty"))

    def test_control_characters_do_not_reach_the_terminal(self):
        path = self.file("bad.safetensors", safetensors({"\x1b[31m": 1}))
        self.assertNotIn("\x1b", run("plan", path).stderr)

    def test_configs(self):
        good = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                "num_attention_heads": 4, "vocab_size": 100}
        self.json_of("plan", self.file("config.json", good))
        for change, message in [({"model_type": "frob"}, "known are gpt2, llama"),
                                ({"model_type": None}, "model_type is null"),
                                ({"hidden_size": None}, "hidden_size is null"),
                                ({"hidden_size": -1}, "hidden_size"),
                                ({"hidden_size": 2.5}, "hidden_size"),
                                ({"hidden_size": "64"}, "hidden_size"),
                                ({"vocab_size": 2**62}, "choose vocabulary from 2"),
                                ({"vocab_size": 2**39, "hidden_size": 2**39}, "choose width from 1"),
                                ({"num_attention_heads": 5}, "must divide hidden_size"),
                                ({"tie_word_embeddings": 1}, "true or false"),
                                ({"weight_map": {}}, "weight_map")]:
            with self.subTest(change):
                self.fails(1, message, "plan", self.file("config.json", {**good, **change}))
        self.fails(1, "JSON", "plan", self.file("config.json", b"{"))
        self.fails(1, "object", "plan", self.file("config.json", b"3"))

    def test_output_that_cannot_be_written(self):
        if not os.path.exists("/dev/full"):
            self.fail("this test needs /dev/full")
        with open("/dev/full", "w") as full:
            done = subprocess.run([SCRUPLE, "list"], stdout=full, stderr=subprocess.PIPE, text=True)
        self.assertEqual(done.returncode, 1)


if __name__ == "__main__":
    SCRUPLE = sys.argv.pop(1)
    unittest.main()
