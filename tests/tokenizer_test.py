"""`scruple tokenize` against Hugging Face's `tokenizers`, token for token: tokenizers of every known kind are trained
here, on texts of many scripts, code and noise, and both libraries encode the same bytes.
Usage: tokenizer_test.py SCRUPLE   (exit code 77: there is no `tokenizers`)"""
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import unicodedata
import unittest

try:
    import numpy
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

import command
from command import content, write

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
SPECIAL = "<|endoftext|>"
# Assigned for many years, so that no library's tables are too old for them.
ALPHABETS = [range(0x20, 0x7F), range(0xA0, 0x180), range(0x370, 0x400), range(0x400, 0x460), range(0x5D0, 0x5EB),
             range(0x620, 0x64B), range(0x660, 0x66A), range(0x904, 0x93A), range(0x966, 0x970), range(0xE01, 0xE3B),
             range(0x10A0, 0x10C6), range(0x1100, 0x1113), range(0x1161, 0x1176), range(0x2000, 0x2030),
             range(0x2150, 0x2180), range(0x2200, 0x2300), range(0x3041, 0x3097), range(0x4E00, 0x4F00),
             range(0xAC00, 0xAD00), range(0xFF10, 0xFF1A), range(0x1D400, 0x1D454), range(0x1F600, 0x1F640)]
MARKS = range(0x300, 0x340)  # they compose with letters
SPACES = "\t\n\v\f\r \x85\xa0\u1680\u180e\u2003\u2028\u2029\u202f\u205f\u3000"
WORDS = ("the of and to in that his was with for not he she they we it's don't I'll we've you're I'd I'm " + "Don'T "
         "language model training byte pair encoding number theory für Straße naïve café ſ'ſ int main return void "
         "self def class import lambda").split()


def assigned(points):
    return [chr(p) for p in points if unicodedata.category(chr(p)) not in ("Cn", "Co", "Cs")]


def make_text(dice, size):
    """Words, code, many scripts, numbers, spaces of every kind and marks that compose."""
    scripts = [assigned(points) for points in ALPHABETS]
    out = []
    while sum(map(len, out)) < size:
        kind = dice.randrange(10)
        if kind < 4:
            out.append(" ".join(dice.choices(WORDS, k=dice.randint(1, 12))))
        elif kind == 4:
            out.append("".join(dice.choices(dice.choice(scripts), k=dice.randint(1, 20))))
        elif kind == 5:
            out.append("".join(dice.choice(dice.choice(scripts)) for _ in range(dice.randint(1, 8))))
        elif kind == 6:
            out.append(str(dice.randrange(10 ** dice.randint(1, 12))))
        elif kind == 7:
            out.append("".join(dice.choices(SPACES, k=dice.randint(1, 5))))
        elif kind == 8:
            out.append(dice.choice("aeiouyncAEIOÅ") + "".join(dice.choices(assigned(MARKS), k=dice.randint(1, 3))))
        else:
            out.append(dice.choice(["{\n    x += 1;\n}\n", "if (a && b) { }", "\r\n\r\n", "...", "!?", " '", "'S 'LL", SPECIAL,
                                    " " + SPECIAL + " ", "<pad>", " <tool>  x", "<|x|>", "abc<pad>"]))
        out.append(dice.choice(["", " ", " ", " ", "\n", "  "]))
    return "".join(out)


def trained(tokenizer, text, size=900, **more):
    tokenizer.train_from_iterator(text.splitlines(True), trainers.BpeTrainer(vocab_size=size, show_progress=False, **more))
    return tokenizer


def byte_level(cut, text, normalizer=None, **model):
    tokenizer = Tokenizer(models.BPE(**model))
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    return trained(tokenizer, text, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[SPECIAL])


def sentencepiece(text, metaspace=None):
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=metaspace, split=metaspace == "always")
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    learnt = Tokenizer(models.BPE(unk_token="<unk>"))
    learnt.pre_tokenizer = pre_tokenizers.Metaspace()
    plain = "".join(c for c in text if ord(c) < 0x460)  # so that other scripts need the bytes
    trained(learnt, plain, special_tokens=["<unk>", "<s>", "</s>", *bytes_])
    model = json.loads(learnt.to_str())["model"]
    whole = json.loads(tokenizer.to_str())
    whole["model"].update(vocab=model["vocab"], merges=model["merges"])
    whole["added_tokens"] = [{"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
                              "normalized": False, "special": True} for i, name in enumerate(("<unk>", "<s>", "</s>"))]
    tokenizer = Tokenizer.from_str(json.dumps(whole))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def kinds(text):
    level, sequence, split = pre_tokenizers.ByteLevel, pre_tokenizers.Sequence, pre_tokenizers.Split
    gpt2 = byte_level(level(add_prefix_space=False), text)
    gpt2.post_processor = processors.ByteLevel(trim_offsets=False)
    llama3 = byte_level(sequence([split(Regex(LLAMA3), "isolated"), level(add_prefix_space=False, use_regex=False)]), text,
                        ignore_merges=True)
    llama3.post_processor = processors.Sequence([processors.ByteLevel(), processors.TemplateProcessing(
        single=f"{SPECIAL} $A {SPECIAL}", special_tokens=[(SPECIAL, llama3.token_to_id(SPECIAL))])])
    return {
        "gpt2": gpt2,
        "prefixed": byte_level(level(add_prefix_space=True), text),
        "llama3": llama3,
        "qwen2": byte_level(sequence([split(Regex(QWEN2), "isolated"), level(add_prefix_space=False, use_regex=False)]), text,
                            normalizers.NFC()),
        "smollm": byte_level(sequence([pre_tokenizers.Digits(individual_digits=True), level(add_prefix_space=False)]), text),
        "digits": byte_level(sequence([pre_tokenizers.Digits(), level(add_prefix_space=False)]), text),
        "llama2": sentencepiece(text),
        "mistral": sentencepiece(text, "first"),
        "metaspace": sentencepiece(text, "always"),
    }


class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        if not hasattr(Case, "kinds"):
            Case.kinds = kinds(make_text(random.Random(1), 60_000))

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def path(self, name):
        return os.path.join(self.temporary.name, name)

    def run_scruple(self, *arguments, **options):
        return command.run("tokenize", *arguments, text=None, errors=None, **options)

    def done(self, *arguments, **options):
        result = self.run_scruple(*arguments, **options)
        self.assertEqual(result.returncode, 0, f"{arguments}: {result.stderr.decode(errors='replace')}")
        return result

    def fails(self, code, words, *arguments, **options):
        result = self.run_scruple(*arguments, **options)
        self.assertEqual((result.returncode, words in result.stderr), (code, True), result.stderr)
        return result.stderr

    def saved(self, name, tokenizer):
        path = self.path(f"{name}.json")
        tokenizer.save(path)
        return path

    def tokens(self, model, data, *more):
        """The tokens of these bytes by scruple, and the file they are in."""
        out = self.path("tokens.bin")
        self.done("--model", model, "-", "--out", out, "--end", "none", *more, input=data)
        raw = content(out)
        header = numpy.frombuffer(raw[:1024], dtype="<i4")
        self.assertEqual((header[0], header[1]), (20240520, 1))
        found = numpy.frombuffer(raw[1024:], dtype="<u2")
        self.assertEqual(header[2], len(found))
        return found.tolist()

    def compare(self, name, tokenizer, data):
        model = self.saved(name, tokenizer)
        text = data.decode(errors="replace")
        for more, special in (((), True), (("--bare",), False)):
            expected = tokenizer.encode(text, add_special_tokens=special).ids
            found = self.tokens(model, data, *more)
            if found != expected:
                at = next((i for i, (a, b) in enumerate(zip(found, expected)) if a != b), min(len(found), len(expected)))
                place = tokenizer.encode(text, add_special_tokens=special).offsets[min(at, len(expected) - 1)]
                self.fail(f"{name}: token {at} is {found[at:at + 3]}, not {expected[at:at + 3]}; near "
                          f"{text[max(place[0] - 20, 0):place[1] + 10]!r}; {len(found)} tokens and {len(expected)}")
        return found


class Encode(Case):
    def test_every_kind_on_much_text(self):
        fresh = make_text(random.Random(2), 150_000)
        for name, tokenizer in self.kinds.items():
            with self.subTest(name):
                self.compare(name, tokenizer, fresh.encode())

    def test_broken_utf8(self):
        dice = random.Random(3)
        data = bytearray(make_text(dice, 30_000).encode())
        for _ in range(3000):
            data[dice.randrange(len(data))] = dice.randrange(256)
        data += bytes(dice.randrange(256) for _ in range(20_000)) + b"\xf0\x9f\x98"
        for name in ("gpt2", "llama3", "llama2"):
            with self.subTest(name):
                self.compare(name, self.kinds[name], bytes(data))

    def test_every_character(self):
        """Alone and between letters, so that its class shows."""
        old = unicodedata.ucd_3_2_0  # assigned since 2002: in every library's tables, with the same class
        text = " ".join(f"{c} a{c}b 1{c}2 {c}{c}" for c in assigned(range(0x20000))
                        if old.category(c) == unicodedata.category(c))
        for name in ("llama3", "smollm"):  # smollm has gpt2's words
            with self.subTest(name):
                self.compare(name, self.kinds[name], text.encode())

    def test_small_texts(self):
        for name, tokenizer in self.kinds.items():
            model = self.saved(name, tokenizer)
            for text in [" ", "\n", "a", "  a", "a  ", "é", "▁", "▁▁a ▁", SPECIAL, SPECIAL + " a", "\u180e", " \u180ea", "\0", "a\0b"]:
                with self.subTest(name, text=text):
                    self.assertEqual(self.tokens(model, text.encode()), tokenizer.encode(text).ids)

    def test_one_long_word(self):
        dice = random.Random(5)
        text = "".join(dice.choices("abcde", k=50_000)) + "▁" * 3000 + " " * 5000 + "9" * 5000
        for name in ("gpt2", "llama3", "llama2", "mistral"):
            with self.subTest(name):
                self.compare(name, self.kinds[name], text.encode())

    def test_added_tokens(self):
        for name in ("gpt2", "qwen2", "llama2", "mistral"):
            tokenizer = Tokenizer.from_str(self.kinds[name].to_str())
            tokenizer.add_special_tokens([AddedToken("<pad>", lstrip=True, rstrip=True)])
            tokenizer.add_tokens([AddedToken("<tool>", rstrip=True), AddedToken("<tool>x"), AddedToken("café"),
                                  AddedToken("word", single_word=True, normalized=False), AddedToken("  ", normalized=True)])
            with self.subTest(name):
                text = make_text(random.Random(6), 40_000) + "a word, words, sword word_ <tool>x <tool>  y cafe\u0301 café   <pad>\n\t<pad> x"
                self.compare(name, tokenizer, text.encode())


class Decode(Case):
    def test_round_trip(self):
        dice = random.Random(7)
        text = make_text(dice, 100_000)
        for name, tokenizer in self.kinds.items():
            with self.subTest(name):
                model = self.saved(name, tokenizer)
                tokens = self.tokens(model, text.encode(), "--bare")
                back = self.done("--model", model, "--decode", self.path("tokens.bin")).stdout.decode()
                self.assertEqual(back, tokenizer.decode(tokens, skip_special_tokens=False))
                if name in ("gpt2", "llama3", "smollm"):
                    self.assertEqual(back, text)

    def test_a_token_that_is_not_there(self):
        model = self.saved("gpt2", self.kinds["gpt2"])
        write(self.path("far.bin"), numpy.array([1, 60000], dtype="<u2").tobytes())
        self.fails(1, b"there is no token 60000", "--model", model, "--decode", self.path("far.bin"))


class Files(Case):
    def test_documents_and_their_end(self):
        folder = self.path("model")
        os.makedirs(folder, exist_ok=True)
        tokenizer = self.kinds["gpt2"]
        tokenizer.save(os.path.join(folder, "tokenizer.json"))
        write(os.path.join(folder, "tokenizer_config.json"), json.dumps({"eos_token": {"content": SPECIAL}}))
        for name, text in (("a.txt", "one"), ("b.txt", "two words")):
            write(self.path(name), text)
        out = self.path("nano.bin")
        self.done("--model", folder, self.path("a.txt"), self.path("b.txt"), "--out", out, "--form", "nanogpt")
        end = [tokenizer.token_to_id(SPECIAL)]
        expected = tokenizer.encode("one").ids + end + tokenizer.encode("two words").ids + end
        self.assertEqual(numpy.fromfile(out, dtype="<u2").tolist(), expected)
        self.assertEqual(self.done("--model", folder, "--decode", out).stdout.decode(),
                         f"one{SPECIAL}two words")

    def test_a_large_vocabulary_takes_32_bits(self):
        whole = json.loads(self.kinds["gpt2"].to_str())
        whole["added_tokens"].append({"id": 70_000, "content": "<far>", "single_word": False, "lstrip": False,
                                      "rstrip": False, "normalized": False, "special": True})
        write(self.path("large.json"), json.dumps(whole))
        out = self.path("large.bin")
        self.done("--model", self.path("large.json"), "-", "--out", out, input=b"a<far>")
        raw = content(out)
        self.assertEqual(numpy.frombuffer(raw[:12], dtype="<i4").tolist(), [20240801, 7, 2])
        self.assertEqual(numpy.frombuffer(raw[1024:], dtype="<u4")[1], 70_000)
        self.assertEqual(self.done("--model", self.path("large.json"), "--decode", out).stdout, b"a<far>")
        self.fails(1, b"16-bit", "--model", self.path("large.json"), "-", "--out", out, "--form", "nanogpt", input=b"a")

    def test_hostile(self):
        good = json.loads(self.kinds["gpt2"].to_str())

        def changed(**members):
            return json.dumps({**good, **members})

        def model(**members):
            return changed(model={**good["model"], **members})
        deep = "[" * 100_000
        cases = {
            "": b"is no JSON from byte 1 on (line 1 of it, where it ends)", '{\n"model": {': b"byte 13 on (line 2 of it, where it ends)",
            '{\n\n"model": x}': b"byte 13 on (line 3 of it); was it cut",
            '{"model": 1e999}': b"has a number that is out of range",
            "[]": b"not a JSON object", "{}": b"vocab", deep: b"nested", '{"normalizer":' + deep: b"nested",
            changed(normalizer={"type": "Lowercase"}): b"the normalizer", changed(pre_tokenizer={"type": "Whitespace"}): b"the pre_tokenizer",
            changed(decoder={"type": "WordPiece"}): b"the decoder", changed(post_processor={"type": "BertProcessing"}): b"the post_processor",
            changed(pre_tokenizer={"type": "Sequence"}): b"without its list", changed(pre_tokenizer={"type": "Split", "behavior": "Isolated",
                    "pattern": {"Regex": "(("}}): b"regular expression",
            changed(added_tokens=[{"content": "x"}]): b"the number of token", changed(added_tokens=[{"id": 1}]): b"content",
            changed(added_tokens=[{"content": "x", "id": 1 << 40}]): b"the number of token",
            changed(pre_tokenizer={"type": "Split", "behavior": "Isolated", "pattern": {"Regex": "a\\C"}}): b"regular expression",
            changed(pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Digits"}] * 40}): b"more than 16 parts",
            changed(pre_tokenizer={"type": "Metaspace", "replacement": "__"}): b"one character",
            changed(normalizer={"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 60}):
                b"more than 1024 times as long",
            changed(post_processor={"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],
                                    "special_tokens": {"<s>": {"ids": [99999]}}}): b"adds token 99999, which is not in the vocabulary",
            model(type="Unigram"): b"only BPE", model(vocab={}): b"no \"vocab\"", model(vocab={"a": -1}): b"the number of token",
            model(vocab={"a": "b"}): b"the number of token", model(merges=[["a"]]): b"merge 0", model(merges=[["a", "ȫȫ"]]): b"merge 0",
            model(merges=["q zzzz"]): b"not in the vocabulary", model(unk_token="<none>"): b"unk_token", model(dropout=0.1): b"dropout",
            model(end_of_word_suffix="</w>"): b"end_of_word_suffix",
        }
        for text, words in cases.items():
            with self.subTest(words=words):
                write(self.path("bad.json"), text)
                said = self.fails(1, words, "--model", self.path("bad.json"), "-", "--out", self.path("none.bin"), input=b"a")
                self.assertIn(b"bad.json", said)
                self.assertNotIn(b"json.exception", said)
                self.assertFalse(os.path.exists(self.path("none.bin")))

    def test_bad_usage_and_files(self):
        model = self.saved("gpt2", self.kinds["gpt2"])
        cut = self.path("cut.bin")
        write(cut, numpy.array([20240520, 1, 10] + [0] * 253, dtype="<i4").tobytes() + b"\0\0")
        blank = self.path("blank.jsonl")
        write(blank, '\n{"text": ""}\n')
        for arguments, code, words in (
                (("--model", model), 2, b"--out"), (("--model", model, "x", "--decode", "y"), 2, b"--decode"),
                (("--model", self.path("nowhere"), "-", "--out", "x"), 1, b"nowhere"),
                (("--model", self.temporary.name, "-", "--out", "x"), 1, b"has no tokenizer.json"),
                (("--model", model, "-", "--out", "x", "--end", "<nope>"), 2, b"has no token <nope>"),
                (("--model", model, "--decode", cut), 1, b"was cut"), (("--model", model, "-", "--out", "x"), 1, b"no text"),
                (("--model", model, "-", blank, "--out", self.path("x"), "--shard-tokens", "9"), 1, b"no text")):
            with self.subTest(arguments):
                self.fails(code, words, *arguments, input=b"")
        self.assertFalse([name for name in os.listdir(self.temporary.name) if name.startswith("x")])


class Streams(Case):
    """Inputs of any size: cut into parts, encoded by many threads, written in their order."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.text = make_text(random.Random(11), 100_000)
        while len(cls.text) < 1_000_000:  # characters; parts are of a MiB
            cls.text += "x" + cls.text

    def read(self, *paths):
        """Tokens of files in llm.c's form."""
        return numpy.concatenate([numpy.frombuffer(content(path)[1024:], dtype="<u2") for path in paths])

    def lines(self, name, count=2000):
        dice = random.Random(12)
        text = "".join(json.dumps({"text": self.text[at:at + dice.randrange(1200)]}) + "\n" for at in
                       (dice.randrange(len(self.text)) for _ in range(count)))
        write(self.path(name), text)
        return text

    def test_a_text_in_parts_has_the_tokens_of_the_whole(self):
        write(self.path("long.txt"), self.text)
        for name in ("gpt2", "llama3", "qwen2", "llama2", "metaspace"):
            tokenizer = self.kinds[name]
            with self.subTest(name):
                model = self.saved(name, tokenizer)
                self.done("--model", model, self.path("long.txt"), "--out", self.path("long.bin"), "--end", "none")
                self.assertTrue((self.read(self.path("long.bin")) == tokenizer.encode(self.text).ids).all())

    def test_any_number_of_threads(self):
        model = self.saved("llama2", self.kinds["llama2"])
        folder = self.path("texts")
        os.makedirs(folder)
        write(os.path.join(folder, "a.txt"), self.text)
        write(os.path.join(folder, "b.txt"), "short")
        write(os.path.join(folder, "c.md"), "")
        self.lines("texts/d.jsonl")
        write(os.path.join(folder, "e.jsonl"), json.dumps({"prompt": "p", "completion": "c"}) + "\n")
        files = {}
        for threads in ("1", "2", "5"):
            out = self.path(f"by{threads}.bin")
            said = self.done("--model", model, folder, "--out", out, "--end", "</s>", "--threads", threads)
            files[threads] = content(out)
        self.assertEqual(files["1"][:8], numpy.array([20261119, 1], dtype="<i4").tobytes())
        self.assertEqual(files["1"], files["2"])
        self.assertEqual(files["1"], files["5"])
        self.assertRegex(said.stdout.decode(), r"wrote \S+by5.bin: [0-9,]+ tokens of [0-9,]+ bytes \(.*; [0-9.]+ MB/s, [0-9,]+ tokens/s")
        self.assertRegex(said.stderr, rb"[1-9] documents? with nothing to learn: left out")

    def test_lines_from_standard_input_and_shards(self):
        model = self.saved("gpt2", self.kinds["gpt2"])
        text, whole = self.lines("web.jsonl"), self.path("whole.bin")
        self.done("--model", model, self.path("web.jsonl"), "--out", whole, "--end", SPECIAL)
        for more in ((), ("--threads", "1")):
            out = self.path(f"web{len(more)}.bin")
            said = self.done("--model", model, "--json", "-", "--out", out, "--end", SPECIAL, "--shard-tokens", "50000", *more,
                             input=text.encode())
            shards = sorted(name for name in os.listdir(self.temporary.name) if name.startswith(f"web{len(more)}-"))
            self.assertEqual(shards, [f"web{len(more)}-{i:05}.bin" for i in range(len(shards))])
            self.assertGreater(len(shards), 5)
            self.assertIn(f"web{len(more)}-00000.bin to ".encode(), said.stdout)
            paths = [self.path(shard) for shard in shards]
            self.assertTrue((self.read(*paths) == self.read(whole)).all())
            end = self.kinds["gpt2"].token_to_id(SPECIAL)
            for path in paths:  # documents are whole
                tokens = self.read(path)
                self.assertEqual(tokens[-1], end)
                self.assertLessEqual(len(tokens), 50_000)
        self.fails(1, b"web0-00000.bin is there already, and more shards may be", "--model", model, "-", "--json", "--out",
                   self.path("web0"), "--shard-tokens", "5", input=b"")
        # A text that is longer than a shard is cut where the shard is full.
        self.done("--model", model, "-", "--out", self.path("cut"), "--shard-tokens", "7", "--end", "none", input=b"one two three " * 4)
        self.assertEqual(len(self.read(self.path("cut-00000.bin"))), 7)
        bad = text.encode() + b'{"text": 1}\n'
        said = self.fails(1, b'standard input, line 2001: "text" is a number', "--model", model, "--json", "-", "--out",
                          self.path("bad"), "--shard-tokens", "50000", input=bad)
        self.assertFalse([name for name in os.listdir(self.temporary.name) if name.startswith("bad")], said)

    def test_standard_input_goes_on_where_it_stands(self):
        model, text = self.saved("gpt2", self.kinds["gpt2"]), self.path("begun.txt")
        write(text, "a header\nand the text")
        for inputs in (("-",), ("-", "-")):  # nothing is left for a second time
            with open(text, "rb", buffering=0) as file:
                file.seek(9)
                self.done("--model", model, *inputs, "--out", self.path("begun.bin"), "--end", "none", stdin=file)
            self.assertEqual(self.read(self.path("begun.bin")).tolist(), self.kinds["gpt2"].encode("and the text").ids)

    def test_memory_is_bounded(self):
        model = self.saved("gpt2", self.kinds["gpt2"])
        line = (json.dumps({"text": "the quick brown fox " * 5000}) + "\n").encode()

        def peak(megabytes):
            """KiB that a process takes which reads so much."""
            process = subprocess.Popen([command.main.program, "tokenize", "--model", model, "--json", "-", "--threads", "2",
                                        "--out", self.path("much.bin")], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                       stderr=subprocess.DEVNULL)
            for _ in range(megabytes * 1_000_000 // len(line)):
                process.stdin.write(line)
            process.stdin.close()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = status
            self.assertEqual(status, 0)
            return usage.ru_maxrss
        few = peak(10)
        self.assertLess(peak(40), few + 10_000)

    def test_what_goes_wrong_is_named_and_leaves_nothing(self):
        model, out = self.saved("gpt2", self.kinds["gpt2"]), self.path("wrong.bin")
        write(self.path("long.txt"), self.text)
        left = lambda: [name for name in os.listdir(self.temporary.name) if name.startswith("wrong")]

        def full():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, resource.RLIM_INFINITY))
        for more in ((), ("--shard-tokens", "300000")):
            self.fails(1, b"cannot write", "--model", model, self.path("long.txt"), "--out", out, *more, preexec_fn=full)
            self.assertEqual(left(), [])
        # A file that goes while those before it are read.
        pipe, last = self.path("pipe"), self.path("last.txt")
        os.mkfifo(pipe)
        write(last, self.text)
        process = subprocess.Popen([command.main.program, "tokenize", "--model", model, pipe, last, "--out", out],
                                   stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        with open(pipe, "w") as writer:
            writer.write("first")
            os.remove(last)
        said = process.communicate()[1]
        self.assertEqual(process.returncode, 1)
        self.assertIn(b"cannot open " + last.encode() + b": No such file or directory; nothing was written", said)
        self.assertEqual(left(), [])


if __name__ == "__main__":
    command.main()
