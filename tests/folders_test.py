"""The trainer on Hugging Face folders, from outside: what transformers wrote is trained, resumed, sampled and loaded by
transformers again, in every family, with a tokenizer.

Usage: folders_test.py PATH_TO_SCRUPLE
"""
import hashlib
import json
import pathlib
import re
import shutil
import subprocess
import sys

try:
    import torch
    from gradients_test import LLAMA3, decoder, gpt2, random_model
    from safetensors.torch import load_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MistralConfig, PreTrainedTokenizerFast
    from transformers import Qwen2Config, Qwen3Config
    from transformers.utils import logging
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

import command
from command import run, start, until
WORDS = 320
END = "<|end|>"
FAMILIES = {
    "gpt2": gpt2(vocab_size=WORDS),
    "gpt2, untied": gpt2(vocab_size=WORDS, tie_word_embeddings=False),
    "llama, stretched": decoder(LlamaConfig, vocab_size=WORDS, rope_parameters=LLAMA3),
    "mistral": decoder(MistralConfig, vocab_size=WORDS, sliding_window=64),
    "qwen2": decoder(Qwen2Config, vocab_size=WORDS, tie_word_embeddings=True),
    "qwen3": decoder(Qwen3Config, vocab_size=WORDS),
}
TEXT = "".join(f"The number after {i} is {i + 1}, and the one after {i + 1} is {i + 2}.\n" for i in range(200))


def weights_of(folder):
    """What tells every tensor's bytes from others."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return {name: (str(x.dtype), tuple(x.shape), hashlib.sha256(x.view(torch.uint8).numpy().tobytes()).hexdigest()) for name, x in found.items()}


class Folders(command.Case):
    def setUp(self):
        super().setUp()
        self.root = pathlib.Path(self.folder)
        self.text = self.root / "book.txt"
        self.text.write_text(TEXT)

    def model(self, config, dtype=torch.bfloat16, shard="1GB", name="model"):
        """Written by transformers, with a tokenizer of its own."""
        torch.manual_seed(1)
        model = random_model(config).to(dtype)
        model.save_pretrained(self.root / name, max_shard_size=shard)
        words = Tokenizer(models.BPE())
        words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        words.train_from_iterator([TEXT], trainers.BpeTrainer(
            vocab_size=WORDS, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token=END).save_pretrained(self.root / name)
        return self.root / name

    def train(self, model, out, *more, data=None, steps=3, batch=2):
        self.done("train", "--model", model, "--data", data or self.text, "--out", self.root / out, "--steps", steps,
                  "--batch", batch, "--context", 24, *more)
        return self.root / out

    def refused(self, words, *arguments):
        done = run(*arguments)
        self.assertNotEqual(done.returncode, 0, done.stdout)
        self.assertIn(words, done.stderr)

    def test_no_steps_change_no_byte(self):
        for name, config in FAMILIES.items():
            with self.subTest(name):
                model = self.model(config, shard="20KB")
                self.assertGreater(len(list(model.glob("*.safetensors"))), 1, "shards")
                out = self.train(model, f"out {name}", steps=0)
                self.assertEqual(weights_of(out), weights_of(model))
                tokens = torch.arange(20)[None]
                theirs, ours = (AutoModelForCausalLM.from_pretrained(path) for path in (model, out))
                with torch.no_grad():
                    self.assertTrue(torch.equal(theirs(tokens).logits, ours(tokens).logits))
                self.assertEqual(AutoTokenizer.from_pretrained(out)(TEXT[:300]), AutoTokenizer.from_pretrained(model)(TEXT[:300]))
        for dtype, recipe in ((torch.float32, "fp32"), (torch.float16, "fp16+8")):
            model = self.model(FAMILIES["qwen3"], dtype, name=recipe)
            more = ("--recipe", recipe) if recipe == "fp32" else ("--weights", recipe)
            self.assertEqual(weights_of(self.train(model, f"out {recipe}", *more, steps=0)), weights_of(model))

    def test_a_resumed_run_has_the_bits_of_one_that_was_left_alone(self):
        for name, config in FAMILIES.items():
            with self.subTest(name):
                model = self.model(config)
                whole = self.train(model, f"whole {name}", steps=4)
                part = self.train(model, f"part {name}", "--save-every", 2, steps=4)
                shutil.rmtree(part / "checkpoints/step-00000004")
                (part / "model.safetensors").unlink()
                self.assertIn("going on after step 2", self.resumed(part))
                self.assertEqual(weights_of(part), weights_of(whole))
                self.assertNotEqual(weights_of(whole), weights_of(model))
                released = self.train(model, f"released {name}", "--gradients", "released", "--clip", 0, steps=4)
                stored = self.train(model, f"stored {name}", "--gradient-format", "fp32", "--clip", 0, steps=4)
                self.assertEqual(weights_of(released), weights_of(stored))

    def test_completions_are_learnt(self):
        model, data = self.model(FAMILIES["llama, stretched"]), self.root / "notes.jsonl"
        lines = [{"prompt": f"After {i} comes", "completion": f" {i + 1}."} for i in range(40)]
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        out = self.train(model, "tuned", "--lr", "1e-2", data=data, steps=60, batch=8)
        seen = [row["val_loss"] for row in self.metrics(out) if "val_loss" in row]
        self.assertLess(seen[-1], 0.5 * seen[0])
        said = run("sample", out, "--prompt", "After 7 comes", "--temperature", 0, "--length", 12).stdout
        self.assertRegex(said, r"^After 7 comes \d+\.\n$", "it ends where completions end")
        theirs, words = AutoModelForCausalLM.from_pretrained(out).float(), AutoTokenizer.from_pretrained(out)
        prompt = words("After 7 comes", return_tensors="pt").input_ids
        told = words.decode(theirs.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=words.eos_token_id,
                                            pad_token_id=words.eos_token_id)[0])
        self.assertEqual(told.replace(END, ""), said.strip())
        # Chat models have several tokens that end an answer.
        (out / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, words(".").input_ids[-1]]}))
        done = run("sample", out, "--prompt", "After 7 comes", "--temperature", 0, "--length", 12)
        self.assertEqual(done.stdout, said.replace(".", ""))
        done = run("sample", out, "--prompt", "After 7\udcff comes", "--length", 1)
        self.assertIn("--prompt: 1 place in the text was no UTF-8 and became U+FFFD", done.stderr)

    def test_plan_and_compare(self):
        model, released = self.model(FAMILIES["qwen3"]), ("--gradients", "released", "--batch", 3, "--context", 20)
        for more in ((), ("--recompute", "mlp"), ("--recompute", "block")):
            wanted = self.json_of("plan", model, "--recipe", "scruple", *released, *more)
            planned = wanted["rows"][0]["total_bytes"]
            said = self.done("train", "--model", model, "--data", self.text, "--out", self.root / "run", "--force", "--steps", 2,
                             *released, *more)
            peak, unit = re.search(r"peak ([\d.]+) ([KM])iB", said).groups()  # scratch grows with the cores
            self.assertAlmostEqual(float(peak), planned / {"K": 1 << 10, "M": 1 << 20}[unit], delta=0.06, msg="planned is measured")
        rows = self.json_of("compare", "--model", model, "--data", self.text, "--recipes", "fp32,scruple", "--steps", 3,
                            "--context", 24, "--batch", 2)["rows"]
        self.assertEqual([row["recipe"] for row in rows], ["fp32", "scruple"])
        self.assertEqual(wanted["notes"], [])
        index = model / "model.safetensors.index.json"  # where both are there, transformers reads the one file, and so do we
        index.write_text(json.dumps({"metadata": {"total_size": 8}, "weight_map": {"x": "model.safetensors"}}))
        again = self.json_of("plan", model, *released, *more, "--recipe", "scruple")
        self.assertEqual(again["rows"][0]["total_bytes"], planned)
        index.unlink()
        config = (model / "config.json").read_text()
        (model / "config.json").write_text(config.replace(f'"vocab_size": {WORDS}', '"vocab_size": 99'))
        for more in ((), ("--batch", 3, "--context", 20)):
            said = run("plan", model, *more).stdout
            self.assertRegex(said, r"'scruple train' would refuse this model: .* has shape \[320, .*, and the config asks for \[99, ")
        (model / "config.json").write_text(config)
        self.refused("needs --data", "compare", "--model", model)
        for more in (("--recompute", "mlp"), ("--activations", "bf16"), ("--offload",), ("--device", "cuda"), ("--memory-limit", "1GiB")):
            self.refused("describe a run; add its --batch", "plan", model, *more)
        self.refused("--offload is for a GPU", "plan", model, "--batch", 3, "--device", "cpu", "--offload")
        counted = run("plan", model, "--recipe", "scruple", "--batch", 3, "--device", "cpu")
        self.assertIn(", gradients stored, on the CPU; sizes in ", counted.stdout)
        for more, device in ((("--batch", 3, "--device", "cpu"), "cpu"), ((), None)):
            self.assertEqual(self.json_of("plan", model, *more)["device"], device)

        def row(*more):
            return self.json_of("plan", model, "--recipe", "scruple", "--batch", 3, *more)["rows"][0]

        bf16, fp32 = (row("--activations", kind)["parts"]["activations"] for kind in ("bf16", "fp32"))
        self.assertLess(1.5 * bf16, fp32)
        deep = self.root / "deep.json"
        deep.write_text(json.dumps({**json.loads(config), "num_hidden_layers": 12, "layer_types": None}))
        stays, waits = (run("plan", deep, "--recipe", "scruple", "--batch", 3, "--device", "cuda", *more, "--json")
                        for more in ((), ("--offload",)))
        if "this build has no trainer for GPUs" not in stays.stderr:  # no GPU is needed to count for one
            counted, waiting = (json.loads(done.stdout)["rows"][0] for done in (stays, waits))
            moved = counted["total_bytes"] - waiting["total_bytes"]
            self.assertGreater(moved, 0)
            self.assertEqual(waiting["host_parts"], {"activations": moved, **counted["host_parts"]})
            others = sum(counted["parts"][kind] for kind in ("gradients", "activations", "workspace"))
            self.assertEqual(counted["host_parts"], {"saves": counted["total_bytes"] - others})
            self.assertEqual(waiting["host_bytes"], moved + counted["host_bytes"])
            said = self.done("plan", deep, "--recipe", "scruple", "--batch", 3, "--device", "cuda")
            self.assertRegex(said, r"\ntraining goes on during a save where the host has memory for the copy, [\d.]+ [KM]iB\n")
            wide = self.root / "wide.json"
            wide.write_text(json.dumps({**json.loads(config), "hidden_size": 512, "intermediate_size": 1024}))
            here, away = (self.json_of("plan", wide, "--recipe", "scruple", "--batch", 3, "--device", "cuda", *more)["rows"][0]
                          for more in ((), ("--offload", "state")))
            self.assertEqual(here["total_bytes"] + 2**29, away["total_bytes"] + away["host_bytes"])  # the ring
            self.assertLess(away["parts"]["exp_avg"], here["parts"]["exp_avg"] / 10)
            said = self.done("plan", wide, "--recipe", "scruple", "--batch", 3, "--device", "cuda", "--offload", "state")
            self.assertRegex(said, r" host\nscruple .* [\d.]+\n\ntraining waits for each save\n")
        self.assertEqual(row("--device", "cpu")["host_bytes"], 0)
        self.assertLess(*(row("--threads", count)["total_bytes"] for count in (1, 4)))

    def test_plan_chooses_what_fits(self):
        """Of what is auto: residuals, then recomputing, leave the card before the state does."""
        config = json.loads((self.model(FAMILIES["qwen3"]) / "config.json").read_text())
        path = self.root / "large.json"
        path.write_text(json.dumps({**config, "num_hidden_layers": 12, "layer_types": None, "hidden_size": 2048,
                                    "intermediate_size": 8192}))

        def planned(*more, device="cuda"):
            return run("plan", path, "--recipe", "scruple", "--gradients", "released", "--batch", 8, "--device", device, *more)

        def row(*more, **options):
            return json.loads(planned(*more, "--json", **options).stdout)["rows"][0]

        for more in (("--offload", "auto"), ("--recompute", "auto")):
            self.refused("choose what fits; say into how much: --memory-limit", "plan", path, "--batch", 8, "--device", "cpu", *more)
        self.refused("--memory-limit is '22'; it must be a size", "plan", path, "--batch", 8, "--device", "cpu", "--memory-limit", 22)
        self.assertEqual(row("--offload", "auto", "--memory-limit", "1GiB", device="cpu")["chosen"], {"offload": "none"})
        if "this build has no trainer for GPUs" in planned().stderr:
            self.skipTest("no CUDA in this build")
        recomputes, sizes = ("none", "norms", "mlp", "keep-attention", "block"), {}
        for state in (False, True):
            for recompute in recomputes:
                for offload in ("none", "activations") if not state else ("state", "activations,state"):
                    counted = row("--recompute", recompute, "--offload", offload)
                    sizes[recompute, offload] = counted["total_bytes"]
                    self.assertTrue(counted["fits"])
        for limit in sorted(sizes.values()):
            found = row("--recompute", "auto", "--offload", "auto", "--memory-limit", f"{limit}B")
            first = next(how for how, size in sizes.items() if size <= limit)
            self.assertEqual((found["chosen"], found["total_bytes"], found["fits"]),
                             ({"recompute": first[0], "offload": first[1]}, sizes[first], True))
        for offload in ("none", "activations", "state", "activations,state"):
            found = row("--recompute", "block", "--offload", "auto", "--memory-limit", f"{sizes['block', offload]}B")
            self.assertEqual(found["chosen"], {"offload": offload})
        least = f"{min(sizes.values()) - 1}B"
        found = row("--recompute", "auto", "--offload", "auto", "--memory-limit", least)
        self.assertEqual((found["fits"], found["chosen"]), (False, {"recompute": "block", "offload": "activations,state"}))
        said = planned("--recompute", "auto", "--offload", "auto", "--memory-limit", least).stdout
        self.assertRegex(said, r"\nrecipe +recompute +offload .* host\nscruple +block +activations,state ")
        self.assertRegex(said, rf"\nscruple needs [\d.]+ [MG]iB, and --memory-limit is {least}\n")

    def test_the_table_of_cards_is_planned(self):
        root = pathlib.Path(__file__).parents[1]
        done = subprocess.run([sys.executable, root / "bench/plan_table.py", command.main.program], capture_output=True, text=True)
        if "this build has no trainer for GPUs" in done.stderr:
            self.skipTest("no CUDA in this build")
        self.assertIn("| Llama-3.1-70B |", done.stdout, done.stderr)
        self.assertIn(done.stdout, (root / "docs/gpu.md").read_text())

    def test_recomputed_bits_are_the_same(self):
        for name, config in FAMILIES.items():
            model = self.model(config)
            kept, mlp, block = (weights_of(self.train(model, f"{name} {how}", "--recompute", how)) for how in ("none", "mlp", "block"))
            self.assertEqual(kept, mlp, name)
            self.assertEqual(kept, block, name)

    def test_other_data(self):
        model = self.model(FAMILIES["qwen2"])
        self.done("tokenize", "--model", model, self.text, "--out", self.root / "tokens.bin")
        packed = self.train(model, "packed", "--lr", "1e-3")
        tokens = self.train(model, "tokens", "--lr", "1e-3", data=self.root / "tokens.bin")
        self.assertEqual(weights_of(packed), weights_of(tokens), "the same tokens, whoever made them")
        texts = self.root / "texts"
        texts.mkdir()
        for i, line in enumerate(TEXT.splitlines()[:60]):
            (texts / f"{i}.txt").write_text(line)
        together = self.train(model, "together", "--lr", "1e-3", data=texts)
        apart = self.train(model, "apart", "--lr", "1e-3", "--isolate", data=texts)
        self.assertNotEqual(weights_of(together), weights_of(apart))
        scratch = self.train(model / "config.json", "scratch")
        self.assertNotEqual(weights_of(scratch), weights_of(packed))

    def test_what_is_no_text_is_refused(self):
        model, data = self.model(FAMILIES["qwen2"]), self.root / "rows.parquet"
        data.write_bytes(b"PAR1" + bytes(100) + b"PAR1")
        for command in (("train", "--data"), ("compare", "--data"), ("tokenize",)):
            self.refused("is a Parquet file, and a text was expected; write its rows as *.jsonl", *command, data, "--model", model, "--out",
                         self.root / "no")
        for places, words in ((1, "1 place in the text was no UTF-8"), (2, "2 places in the text were no UTF-8")):
            data = self.root / "latin.txt"
            data.write_bytes(TEXT.encode() + b"\xE9 " * places)
            done = run("train", "--model", model, "--data", data, "--out", self.root / f"{places}", "--steps", 0, "--context", 24)
            self.assertIn(f"scruple: {words} and became U+FFFD\n", done.stderr)
            self.assertIn(words, run("tokenize", "--model", model, data, "--out", self.root / "t.bin").stderr)

    def test_nothing_is_replaced_that_is_read(self):
        model = self.model(FAMILIES["qwen2"])
        before = {path.name: path.read_bytes() for path in model.iterdir()}
        self.refused("--out is the folder of --model", "train", "--model", model, "--data", self.text, "--out", model, "--force")
        self.refused("--out is the folder of --model", "train", "--model", model / "config.json", "--data", self.text, "--out", model)
        self.refused("which is to be read", "tokenize", "--model", model, self.text, "--out", self.text)
        self.assertEqual({path.name: path.read_bytes() for path in model.iterdir()}, before)
        self.assertEqual(self.text.read_text(), TEXT)

    def test_the_end_token_is_found_wherever_it_is_named(self):
        model = self.model(FAMILIES["qwen2"])
        number = AutoTokenizer.from_pretrained(model).eos_token_id
        config = json.loads((model / "config.json").read_text())

        def tokens():
            self.done("tokenize", "--model", model, self.text, "--out", self.root / "t.bin", "--form", "nanogpt")
            data = (self.root / "t.bin").read_bytes()
            return [int.from_bytes(data[i : i + 2], "little") for i in range(0, len(data), 2)]

        named = tokens()
        self.assertEqual(named[-1], number)
        for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
            (model / name).unlink(missing_ok=True)
        for place, text in (("special_tokens_map.json", {"eos_token": {"content": END}}),
                            ("generation_config.json", {"eos_token_id": [number, 7]}),
                            ("config.json", {**config, "eos_token_id": number})):
            (model / place).write_text(json.dumps(text))
            self.assertEqual(tokens(), named, place)
            (model / place).unlink()
        (model / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
        self.assertEqual(tokens(), named[:-1])
        done = run("train", "--model", model, "--data", self.text, "--out", self.root / "none", "--steps", 0, "--context", 24)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("names an end token", done.stderr)

    def test_a_killed_run_has_its_tokenizer(self):
        model, out = self.model(FAMILIES["qwen2"]), self.root / "killed"
        process = start("train", "--model", model, "--data", self.text, "--out", out, "--steps", 100000, "--batch", 1, "--context", 24,
                        "--save-every", 1, "--keep", 0)
        until((out / "checkpoints/step-00000002").exists)
        process.kill()
        process.wait()
        model.rename(self.root / "moved")
        self.done("sample", out, "--prompt", "The number", "--length", 4)

    def test_a_checkpoint_finds_the_tokenizer_of_its_run(self):
        model = self.model(FAMILIES["qwen2"])
        out = self.train(model, "run", "--save-every", 3)
        words = ("--prompt", "The number", "--length", 4, "--temperature", 0)
        wanted = run("sample", out, *words).stdout
        other = json.loads((model / "tokenizer.json").read_text())
        other["model"]["merges"] = []
        model.rename(self.root / "moved")
        (self.root / "tokenizer.json").write_text(json.dumps(other))  # of another model, where the folder was
        done = run("sample", out / "checkpoints/step-00000003", *words)
        self.assertEqual((done.returncode, done.stdout), (0, wanted), done.stderr)
        for name in out.glob("tokenizer*"):
            name.unlink()
        self.refused("step-00000003 has no tokenizer.json", "sample", out / "checkpoints/step-00000003")

    def test_numbers_that_are_no_token_are_not_drawn(self):
        model = self.model(decoder(Qwen2Config, vocab_size=WORDS + 200))
        for more in (("--temperature", 9), ("--temperature", 0), ("--top-k", 5)):
            done = run("sample", model, "--length", 60, *more)
            self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_broken_files_are_named(self):
        model = self.model(FAMILIES["qwen2"])
        (model / "generation_config.json").write_text('{"eos_token_id": [1,')
        self.refused("generation_config.json is no JSON from byte 21 on (line 1 of it, where it ends)", "sample", model)
        (model / "generation_config.json").unlink()
        (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        self.refused("model.safetensors is a pointer of git-lfs, not the file itself; fetch it with 'git lfs pull'", "sample", model)
        self.refused("--seed", "sample", model, "--seed", "-1")

    def test_a_checkpoint_of_a_config_finds_its_tokenizer(self):
        model = self.model(FAMILIES["qwen2"])
        out = self.train(model / "config.json", "run", "--save-every", 3)
        said = self.done("sample", out / "checkpoints/step-00000003", "--prompt", "The number", "--length", 4)
        self.assertTrue(said.startswith("The number"), said)

    def test_what_does_not_fit_is_refused(self):
        model = self.model(FAMILIES["mistral"])
        base = ("train", "--data", self.text, "--out", self.root / "no", "--model")
        self.refused("there is no such folder or file", *base, self.root / "nowhere")
        self.refused("--layers is for --model gpt", *base, model, "--layers", 2)
        self.refused("a context of 65 was asked for", *base, model, "--context", 65)
        self.refused("the model's is 70 at most", *base, model, "--context", 71)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "model_type": "falcon"}))
        self.refused("this trainer knows gpt2, llama, mistral, qwen2, qwen3", *base, model)
        (model / "config.json").write_text(json.dumps({**config, "vocab_size": WORDS - 1}))
        self.refused("and the config asks for", *base, model)
        (model / "config.json").write_text(json.dumps(config))
        tokenizer = (model / "tokenizer.json").read_text()
        (model / "tokenizer.json").write_text(tokenizer[:200])
        self.refused("tokenizer.json is no JSON from byte 201 on (line ", *base, model)
        (model / "tokenizer.json").unlink()
        self.refused("has no tokenizer.json", *base, model)
        self.refused("has no tokenizer.json", "sample", model)
        (model / "model.safetensors").unlink()
        self.refused("no weights, neither model.safetensors nor its index", *base, model)
        self.assertFalse((self.root / "no").exists(), "nothing was made")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    command.main()
