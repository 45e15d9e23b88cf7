"""Models and vocabularies as the commands read them: every family with every optional key of its config counted as
transformers builds it, by `plan` and by `train`; the type of the weights that come back; tokens and the way back.

Usage: models_test.py PATH_TO_SCRUPLE   (exit code 77: there is no transformers)
"""

import json
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

try:
    import torch
    from safetensors.torch import load_file
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

SCRUPLE = ""
END = "<|end|>"
TEXT = "".join(f"The number after {i} is {i + 1}.\n" for i in range(60))
# 32 heads: every family's default number of key-value heads divides it.
DECODER = {
    "hidden_size": 64,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "vocab_size": 256,
    "max_position_embeddings": 32,
}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 256}
# Every optional key that is read, and what may stand there.
OF_DECODERS = {
    "num_key_value_heads": [4, 32],
    "head_dim": [6],
    "tie_word_embeddings": [True, False],
    "attention_bias": [True, False],  # Mistral and Qwen 2 have no such key, and look past it
    "mlp_bias": [True, False],  # Llama's alone
    "rms_norm_eps": [1e-5],
    "initializer_range": [0.01],
    "rope_theta": [500.0],
    "rope_scaling": [None],
}
OF_SILU = {**OF_DECODERS, "hidden_act": ["silu"]}
NULLS = {"num_key_value_heads": [4, 32, None], "head_dim": [6, None]}
OF_QWEN = {
    "use_sliding_window": [True, False],
    "sliding_window": [None, 16],
    "layer_types": [["full_attention"] * 2],
}
TRAINED = {
    "gpt2": (
        GPT2,
        {
            "n_inner": [None, 100],
            "tie_word_embeddings": [True, False],
            "layer_norm_epsilon": [1e-6],
            "activation_function": ["gelu_new"],
            "add_cross_attention": [False],
            "scale_attn_weights": [True],
            "scale_attn_by_inverse_layer_idx": [False],
        },
    ),
    "llama": (DECODER, {**OF_SILU, **NULLS}),
    "mistral": (DECODER, {**OF_SILU, "head_dim": [6, None], "sliding_window": [None, 16]}),
    "qwen2": (DECODER, {**OF_SILU, **OF_QWEN, "num_key_value_heads": [4, 32, None]}),
    "qwen3": (DECODER, {**OF_SILU, **OF_QWEN, "num_key_value_heads": [4, 32, None]}),
}
PLANNED = {
    "gemma": (DECODER, OF_DECODERS),
    "gemma2": (DECODER, {**OF_DECODERS, "sliding_window": [None, 16]}),
}


def run(*arguments, **options):
    return subprocess.run([SCRUPLE, *map(str, arguments)], capture_output=True, timeout=900, **options)


def cases(base, optional):
    """Each key once with each of its values, the others absent; and all of them with their first."""
    yield dict(base)
    for key, values in optional.items():
        for value in values:
            yield {**base, key: value}
    yield {**base, **{key: values[0] for key, values in optional.items()}}


def built(config):
    """What transformers makes of a config, without memory for it."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)))


def header_of(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return header


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.text = self.root / "book.txt"
        self.text.write_text(TEXT)

    def done(self, *arguments, **options):
        result = run(*arguments, **options)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result

    def train(self, model, out, *more, steps=0, data=None):
        self.done("train", "--model", model, "--data", data or self.text, "--out", self.root / out, "--steps", steps,
                  "--batch", 1, "--context", 8, "--threads", 1, *more)  # fmt: skip
        return self.root / out


class Counts(Case):
    def planned(self, config):
        path = self.root / "config.json"
        path.write_text(json.dumps(config))
        found = json.loads(self.done("plan", path, "--json").stdout)
        return found["params"], found["tensors"]

    def test_plan_counts_what_transformers_builds(self):
        for family, (base, optional) in {**TRAINED, **PLANNED}.items():
            for config in cases({"model_type": family, **base}, optional):
                with self.subTest(config):
                    sizes = [p.numel() for p in built(config).parameters()]  # a tied head is counted once
                    self.assertEqual(self.planned(config), (sum(sizes), len(sizes)))

    def test_train_makes_what_plan_counts(self):
        for family, (base, optional) in TRAINED.items():
            for number, config in enumerate(cases({"model_type": family, **base}, optional)):
                with self.subTest(config):
                    params, tensors = self.planned(config)
                    out = self.train(self.root / "config.json", f"{family} {number}", "--recipe", "fp32")
                    sizes = [
                        torch.Size(t["shape"]).numel() for t in header_of(out / "model.safetensors").values()
                    ]
                    self.assertEqual((sum(sizes), len(sizes)), (params, tensors))

    def test_what_is_planned_only(self):
        for family, (base, _) in PLANNED.items():
            path = self.root / "config.json"
            path.write_text(json.dumps({"model_type": family, **base}))
            for command in (
                ("train", "--data", self.text, "--out", self.root / "no"),
                ("plan", "--batch", 1),
            ):
                refused = run(*command, "--model", path)
                self.assertEqual(refused.returncode, 1)
                self.assertIn(
                    f'model_type is "{family}"; this trainer knows gpt2, llama'.encode(), refused.stderr
                )
            self.assertIn(family.encode(), self.done("plan", "--help").stdout)

    def test_what_is_not_trained_is_planned_all_the_same(self):
        """Another arithmetic leaves the tensors as they are."""
        llama = {"model_type": "llama", **DECODER}
        for change in ({"hidden_act": "gelu"}, {"rope_scaling": {"type": "linear", "factor": 2.0}}):
            self.assertEqual(self.planned({**llama, **change}), self.planned(llama))
        path = self.root / "config.json"
        path.write_text(json.dumps({**llama, "a": json.loads("[" * 40 + "]" * 40)}))
        refused = run("plan", path)
        self.assertIn(b"is nested more than 32 deep", refused.stderr)


class Types(Case):
    def model(self, dtype, **more):
        torch.manual_seed(1)
        config = {"model_type": "llama", **DECODER, "num_key_value_heads": 8, **more}
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"].from_dict(config)).to(dtype)
        folder = self.root / str(dtype)
        model.save_pretrained(folder)
        return folder

    def check(self, out, dtype):
        found = load_file(out / "model.safetensors")
        self.assertEqual({tensor.dtype for tensor in found.values()}, {dtype})
        config = json.loads((out / "config.json").read_text())
        self.assertEqual(f"torch.{config.get('dtype', config.get('torch_dtype'))}", str(dtype))
        return found

    def test_a_folder_comes_back_in_its_type(self):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            with self.subTest(dtype):
                model = self.model(dtype)
                before = load_file(model / "model.safetensors")
                after = self.check(self.train(model, f"out {dtype}"), dtype)
                # As the model computes with it, which the recipe scruple does in bf16.
                for name, tensor in before.items():
                    self.assertTrue(torch.equal(after[name].bfloat16().to(dtype), after[name]), name)
                    torch.testing.assert_close(after[name], tensor, rtol=2**-7, atol=0)

    def test_the_weights_say_the_type_where_the_config_does_not(self):
        model = self.model(torch.float32)
        config = json.loads((model / "config.json").read_text())
        for said in ({}, {"torch_dtype": "bfloat16"}):
            config.pop("dtype", None)
            (model / "config.json").write_text(json.dumps({**config, **said}))
            self.check(self.train(model, f"out {said}"), torch.float32)

    def test_a_resumed_run_keeps_it(self):
        out = self.train(self.model(torch.float16), "run", "--save-every", 1, steps=2)
        first = self.check(out, torch.float16)
        (out / "model.safetensors").unlink()
        self.done("train", "--resume", out)
        again = self.check(out, torch.float16)
        self.assertTrue(all(torch.equal(again[name], tensor) for name, tensor in first.items()))

    def test_nothing_is_lost_by_it(self):
        """Weights that were trained in more bits than the folder has stay as they are."""
        model = self.model(torch.bfloat16)
        self.check(self.train(model, "wide", "--recipe", "fp32"), torch.float32)
        self.check(self.train(model, "half", "--weights", "fp16+8"), torch.float16)


def vocabulary():
    """Bytes, and one token for an end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    words.pre_tokenizer, words.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    words.add_special_tokens([END, "<s>", "</s>"])
    return words


def around(before, after):
    words = vocabulary()
    words.post_processor = processors.TemplateProcessing(
        single=f"{before} $A {after}".strip(),
        special_tokens=[(t, words.token_to_id(t)) for t in ("<s>", "</s>", END)],
    )
    return words


def of_characters():
    """As Llama 2's: a mark before the text, bytes where there is no character."""
    names = ["<unk>", "<s>", END] + [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *"abcdehnrstu"]
    words = Tokenizer(
        models.BPE({n: i for i, n in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    )
    words.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    words.add_special_tokens([END, "<s>"])
    return words


class Tokens(Case):
    def folder(self, words, name="words"):
        folder = self.root / name
        folder.mkdir(exist_ok=True)
        words.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
        return folder

    def tokens(self, model, text, *more):
        self.done(
            "tokenize",
            "--model",
            model,
            "-",
            "--out",
            self.root / "t.bin",
            "--form",
            "nanogpt",
            *more,
            input=text,
        )
        data = (self.root / "t.bin").read_bytes()
        return list(struct.unpack(f"<{len(data) // 2}H", data))

    def test_the_file_itself_finds_its_end_token(self):
        model = self.folder(vocabulary())
        of_folder = self.tokens(model, b"one")
        self.assertEqual(of_folder[-1], vocabulary().token_to_id(END))
        self.assertEqual(self.tokens(model / "tokenizer.json", b"one"), of_folder)

    def test_where_there_is_no_end_token_it_says_so(self):
        model = self.folder(vocabulary())
        (model / "tokenizer_config.json").unlink()
        for path in (model, model / "tokenizer.json"):
            said = self.done("tokenize", "--model", path, self.text, "--out", self.root / "t.bin").stderr
            self.assertIn(b"names an end token", said)
        said = self.done(
            "tokenize", "--model", model, self.text, "--out", self.root / "t.bin", "--end", "none"
        ).stderr
        self.assertEqual(said, b"")

    def test_the_end_token_comes_once_as_in_train(self):
        words = vocabulary()
        model, end = self.folder(words), words.token_to_id(END)
        self.assertEqual(self.tokens(model, f"ab{END}".encode()), words.encode("ab").ids + [end])
        self.assertEqual(self.tokens(model, b"ab"), words.encode("ab").ids + [end])
        (model / "config.json").write_text(json.dumps({"model_type": "llama", **DECODER, "vocab_size": 259}))
        self.text.write_text(TEXT + END)
        self.done("tokenize", "--model", model, self.text, "--out", self.root / "t.bin")
        texts, tokens = (
            (self.train(model / "config.json", name, steps=2, data=data) / "model.safetensors").read_bytes()
            for name, data in (("texts", self.text), ("tokens", self.root / "t.bin"))
        )
        self.assertEqual(texts, tokens)

    def test_the_same_bytes_come_back(self):
        kinds = {"plain": vocabulary(), "before": around("<s>", ""), "both": around("<s>", "</s>")}
        kinds |= {"ends": around("<s>", END), "characters": of_characters()}
        texts = [
            "abc",
            " a  b\n",
            "\n",
            "é 中 😀",
            f"one{END}two",
            f"<s>one{END} <s> ",
            "a" + END + END + "b",
            TEXT,
        ]
        for name, words in kinds.items():
            model = self.folder(words, name)
            for text in texts:
                for more in ((), ("--bare",), ("--end", "none"), ("--bare", "--end", "none")):
                    with self.subTest(kind=name, text=text, options=more):
                        if name == "characters" and ("<s>" in text or END in text):
                            continue  # as with the library, what follows a token comes back after a space
                        self.tokens(model, text.encode(), *more)
                        back = self.done(
                            "tokenize", "--model", model, "--decode", self.root / "t.bin", *more
                        ).stdout
                        self.assertEqual(back, text.encode())


if __name__ == "__main__":
    SCRUPLE = str(pathlib.Path(sys.argv.pop(1)).resolve())
    unittest.main()
