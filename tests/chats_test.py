"""Chat templates against transformers, token for token and mask for mask. The templates (chat_forms.py) have the forms
of ChatML, Qwen 2 and 3, Llama 3, Mistral, Gemma, Zephyr, Phi and plain text; each also with {% generation %} around what
the assistant says, of which transformers knows the mask.

With files of templates as arguments it compares those as well, by their text alone.
Usage: chats_test.py SCRUPLE CHATS [TEMPLATE...]   (CHATS: tests/chats.cpp; exit code 77: there is no transformers)"""
import json
import os
import random
import subprocess
import sys
import unittest

try:
    import numpy
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import chat_template_utils, logging
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

import command
from chat_forms import EXPRESSIONS, FORMS, MARKS, SAMPLE, TEXTS, TOOLS, WITH_CALLS, WITHOUT_SYSTEM, marked, plain
from command import content, write

logging.set_verbosity_error()
# From 5.23 on, or a little before, transformers gives what an assistant thinks all of its names, as we do.
REASONING = {"reasoning": "r"} if hasattr(chat_template_utils, "_REASONING_FIELDS") else {}
CHATS, TEMPLATES = sys.argv.pop(2), [word for word in sys.argv if word.endswith(".jinja")]
sys.argv = [word for word in sys.argv if word not in TEMPLATES]


def byte_level():
    """As Qwen 2's: NFC, bytes, words by a regular expression."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                                   r"|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.train_from_iterator([SAMPLE], trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    return tokenizer


def sentencepiece():
    """As Llama 2's: a mark before each word and before each text, bytes for what is unknown."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    tokenizer.train_from_iterator(SAMPLE.split(" "), trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>"] + [f"<0x{byte:02X}>" for byte in range(256)], show_progress=False))
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    return tokenizer


def conversation(dice, form):
    messages = []
    if form not in WITHOUT_SYSTEM and dice.random() < 0.4:
        messages.append({"role": "system", "content": dice.choice(TEXTS)})
    for turn in range(dice.randint(1, 4)):
        messages.append({"role": "user", "content": dice.choice(TEXTS)})
        if form in WITH_CALLS and dice.random() < 0.3:
            calls = [{"id": f"call{turn:05}", "type": "function", "function": {"name": "weather", "arguments": {
                "city": dice.choice(TEXTS), "days": dice.choice([1, 2.5, -0.0, 1e22, 1e-7, True, None, [], {}, [1, {"a": "é"}]])}}}]
            messages.append({"role": "assistant", "tool_calls": calls, **({"content": None} if dice.random() < 0.5 else {})})
            messages.append({"role": "tool", "content": dice.choice(TEXTS), "tool_call_id": calls[0]["id"]})
        messages.append({"role": "assistant", "content": dice.choice(TEXTS),
                         **({"reasoning_content": dice.choice(TEXTS)} if dice.random() < 0.2 else {})})
    if dice.random() < 0.3:
        messages.pop()
    return {"messages": messages, **({"tools": TOOLS} if form in WITH_CALLS and dice.random() < 0.4 else {})}


class Case(command.Case):
    @classmethod
    def setUpClass(cls):
        cls.kinds = {"bytes": byte_level(), "sentencepiece": sentencepiece()}
        cls.kinds["begins"] = begins = byte_level()
        begin = begins.token_to_id("<s>")
        begins.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", begin)])

    def saved(self, kind, template, **config):
        """A model's folder, and the same tokenizer in transformers."""
        folder = self.path(f"{kind}-{abs(hash(template))}")
        os.makedirs(folder, exist_ok=True)
        self.kinds[kind].save(os.path.join(folder, "tokenizer.json"))
        write(os.path.join(folder, "tokenizer_config.json"),
              json.dumps({"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "chat_template": template, **config}))
        theirs = PreTrainedTokenizerFast(tokenizer_object=self.kinds[kind], bos_token="<s>", eos_token="</s>")
        theirs.chat_template = template
        return folder, theirs

    def ours(self, folder, lines, date=""):
        """What tests/chats.cpp makes of each line."""
        done = subprocess.run([CHATS, folder, date], input="".join(json.dumps(line) + "\n" for line in lines),
                              capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return [json.loads(line) for line in done.stdout.split("\n")[:-1]]


def mask_of(spans, count):
    mask = [0] * count
    for begin, end in spans:
        mask[begin:end] = [1] * (end - begin)
    return mask


def render(theirs, line, **more):
    more.setdefault("return_dict", more.get("tokenize", True))  # the default from 5.0 on
    return theirs.apply_chat_template(line["messages"], tools=line.get("tools"), **more)


class Templates(Case):
    def compare(self, form, kind, lines):
        date = {"date_string": "01 Jan 2024"} if form == "llama3.1" else {}
        unmarked, theirs = self.saved(kind, plain(form))
        with_marks, teacher = self.saved(kind, marked(form))
        refused = compared = 0
        for line, found, twin in zip(lines, self.ours(unmarked, lines), self.ours(with_marks, lines), strict=True):
            with self.subTest(form=form, kind=kind, line=line):
                try:
                    prompt = render(theirs, line, tokenize=False, add_generation_prompt=True, **date)
                    wanted = render(theirs, line, **date)["input_ids"]
                except Exception as error:  # the template's own word
                    self.assertIn("the chat template", found.get("error", ""), repr(error))
                    refused += 1
                    continue
                self.assertEqual(found.get("prompt"), prompt, found)
                speaks = any(message["role"] == "assistant" for message in line["messages"])
                if not speaks:
                    self.assertEqual((found["tokens"], found["assistant"]), ([], []))
                    continue
                self.assertEqual(found["tokens"], wanted)
                taught = render(teacher, line, return_dict=True, return_assistant_tokens_mask=True, **date)
                self.assertEqual(taught["input_ids"], twin["tokens"])
                mask = mask_of(twin["assistant"], len(twin["tokens"]))
                self.assertEqual(mask, taught["assistant_masks"])
                if wanted == taught["input_ids"]:  # a mark may take white space away
                    compared += 1
                    self.assertEqual(mask_of(found["assistant"], len(wanted)), mask)
                for one in (found, twin):  # another role stands between two answers, so each is a span
                    self.assertEqual(one["last"], one["assistant"][-1:])
        self.assertLess(refused, len(lines) / 2)
        self.assertGreater(compared, len(lines) / 4, (form, kind))

    def test_every_form(self):
        dice = random.Random(1)
        for form in FORMS:
            lines = [conversation(dice, form) for _ in range(60)]
            for kind in ("bytes", "sentencepiece"):
                self.compare(form, kind, lines)

    def test_a_tokenizer_that_begins_texts_itself(self):
        """What a template writes has no other <s> than the template's own."""
        line = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}
        begin = self.kinds["bytes"].token_to_id("<s>")
        for form, count in (("llama3", 1), ("chatml", 0)):
            folder, theirs = self.saved("begins", plain(form))
            found, = self.ours(folder, [line])
            wanted = render(theirs, line)["input_ids"]
            self.assertEqual(theirs("Hi")["input_ids"][0], begin, "else there is nothing to see here")
            self.assertEqual((found["tokens"], wanted.count(begin)), (wanted, count))
            taught = render(self.saved("begins", marked(form))[1], line, return_dict=True, return_assistant_tokens_mask=True)
            self.assertEqual(mask_of(found["assistant"], len(wanted)), taught["assistant_masks"])

    def test_expressions(self):
        """Every operator, filter, test and method, and white space around every mark."""
        line = {"messages": [{"role": "user", "content": " Tëxt, with words ", "n": 7, "x": -2.5, "none": [], "list": [3, "b", None, True, 1e16],
                              "map": {"b": 1, "A": "two", "c": [1, {"d": False}]}, "name": "weather", **REASONING},
                             {"role": "assistant", "content": "é"}]}
        for source in EXPRESSIONS:
            template = "{% set m = messages[0] %}{% set t = m.content %}" + source + "{% for m in messages %}{% endfor %}"
            with self.subTest(source):
                folder, theirs = self.saved("bytes", template)
                found, = self.ours(folder, [{"messages": line["messages"][:1]}])
                wanted = render(theirs, {"messages": line["messages"][:1]}, tokenize=False, add_generation_prompt=True)
                self.assertEqual(found.get("prompt"), wanted, found)

    def test_the_date(self):
        folder, theirs = self.saved("bytes", plain("llama3.1"))
        line = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}
        found, = self.ours(folder, [line], "2026-11-09")
        self.assertEqual(found["tokens"], render(theirs, line, date_string="09 Nov 2026")["input_ids"])
        folder, theirs = self.saved("bytes", "{{ strftime_now('%Y-%m-%d %A') }}{% for m in messages %}{{ m.content }}{% endfor %}")
        found, = self.ours(folder, [line])
        self.assertIn("--chat-date", found["error"])
        found, = self.ours(folder, [line], "2026-11-09")
        self.assertEqual(found["prompt"], "2026-11-09 MondayHiHo")

    def test_several_templates_and_a_file_of_one(self):
        line = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}
        named = [{"name": "other", "template": "{{ 1 }}"}, {"name": "default", "template": plain("chatml")}]
        folder, theirs = self.saved("bytes", plain("chatml"), chat_template=named)
        wanted = render(theirs, line)["input_ids"]
        self.assertEqual(self.ours(folder, [line])[0]["tokens"], wanted)
        folder, _ = self.saved("bytes", "{{ 2 }}")
        write(os.path.join(folder, "chat_template.jinja"), plain("chatml"))
        self.assertEqual(self.ours(folder, [line])[0]["tokens"], wanted)

    def test_templates_that_were_given(self):
        dice = random.Random(2)
        for path in TEMPLATES:
            with open(path, encoding="utf-8") as file:
                template = file.read()
            try:
                folder, theirs = self.saved("bytes", template)
                lines = [conversation(dice, "qwen2") for _ in range(60)]
                found = self.ours(folder, lines, "2026-11-19")
            except AssertionError as refused:
                print(f"{path}: {str(refused)[:300]}")
                continue
            same, both, cannot = 0, 0, {}
            for line, one in zip(lines, found):
                if all(message["role"] != "assistant" for message in line["messages"]):
                    continue
                try:
                    wanted = render(theirs, line)["input_ids"]
                except Exception as error:
                    if "type generator" in str(error):  # lists are lists here
                        continue
                    both += "error" in one
                    self.assertIn("error", one, path)
                    continue
                if "error" in one:
                    cannot[one["error"][one["error"].find(":"):][:100]] = 1
                else:
                    same += wanted == one["tokens"]
                    if wanted != one["tokens"] and "strftime" not in template:
                        self.fail(f"{path}: {line}")
            print(f"{os.path.basename(path)}: {same} the same, {both} refused by both; {list(cannot)}")


def flags_of(path):
    """Tokens, whether each counts, and whether it begins a document."""
    raw = content(path)
    magic, version, low, high, size = numpy.frombuffer(raw[:20], dtype="<i4").tolist()
    assert (magic, version, high) == (20261119, 1, 0) and len(raw) == 1024 + low * (size + 1)
    tokens = numpy.frombuffer(raw[1024:1024 + low * size], dtype=f"<u{size}")
    flags = numpy.frombuffer(raw[1024 + low * size:], dtype="u1")
    return tokens.tolist(), (flags & 1).tolist(), (flags >> 1 & 1).tolist()


class Commands(Case):
    def setUp(self):
        super().setUp()
        self.model, self.theirs = self.saved("bytes", plain("chatml"), eos_token="<|im_end|>")
        dice = random.Random(3)
        lines = [line for line in (conversation(dice, "chatml") for _ in range(40)) if any(m["role"] == "assistant" for m in line["messages"])]
        self.lines = lines
        self.chats = self.write("chats.jsonl", "".join(json.dumps(line) + "\n" for line in lines) + '{"messages": []}\n{"messages": [{"role": "user", "content": "?"}]}\n')

    def trained_model(self):
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        torch.manual_seed(1)
        size = self.kinds["bytes"].get_vocab_size()
        LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
                                     vocab_size=size, max_position_embeddings=256)).save_pretrained(self.model)
        return self.model

    def test_files_of_tokens_and_every_train_on(self):
        """A file of tokens says what the lines say, and the script makes the same one."""
        out, by_script = self.path("chats.bin"), self.path("script.bin")
        script = os.path.join(os.path.dirname(__file__), "..", "examples", "chats.py")
        for train_on in ("all", "assistant", "last"):
            said = command.run("tokenize", "--model", self.model, self.chats, "--out", out, "--train-on", train_on)
            self.assertIn(f"wrote {out}", said.stdout)
            self.assertIn("2 documents with nothing to learn: left out", said.stderr)
            tokens, counts, begins = flags_of(out)
            wanted = [render(self.theirs, line)["input_ids"] for line in self.lines]
            self.assertEqual(tokens, sum(wanted, []))
            self.assertEqual(sum(begins), len(wanted))
            found = self.ours(self.model, self.lines)
            masks = {"all": [[1] * len(one) for one in wanted]}
            for name in ("assistant", "last"):
                masks[name] = [mask_of(a[name], len(b)) for a, b in zip(found, wanted)]
            self.assertEqual(counts, sum(masks[train_on], []))
            made = subprocess.run([sys.executable, script, "--model", self.model, self.chats, "--out", by_script, "--train-on", train_on],
                                  check=True, capture_output=True, text=True)
            self.assertEqual(flags_of(by_script), (tokens, counts, begins))
            self.assertIn(f"of which {sum(counts):,} count; 2 were left out", made.stdout)

    def test_the_script_reads_conversations_and_refuses_none(self):
        script = os.path.join(os.path.dirname(__file__), "..", "examples", "chats.py")
        names = {"user": "human", "assistant": "gpt", "system": "system"}
        others = self.write("others.jsonl", "".join(json.dumps({"conversations": [
            {"from": names[message["role"]], "value": message["content"]} for message in line["messages"]]}) + "\n" for line in self.lines))
        found = []
        for chats in (self.chats, others):
            subprocess.run([sys.executable, script, "--model", self.model, chats, "--out", self.path("out.bin")], check=True, capture_output=True)
            found.append(flags_of(self.path("out.bin")))
        self.assertEqual(found[0], found[1])
        none = self.write("none.jsonl", '{"messages": [{"role": "user", "content": "?"}]}\n')
        made = subprocess.run([sys.executable, script, "--model", self.model, none, "--out", self.path("none.bin")], capture_output=True, text=True)
        self.assertEqual((made.returncode, made.stderr), (1, f"{none} has no conversation with an answer; nothing was written\n"))
        self.assertFalse(os.path.exists(self.path("none.bin")))

    def test_lines_of_texts_and_prompts(self):
        end = self.kinds["bytes"].token_to_id("<|im_end|>")
        words = self.kinds["bytes"].encode
        out, texts = self.path("out.bin"), self.write("texts.jsonl", '{"text": "one"}\n{"text": "two words"}\n')
        self.done("tokenize", "--model", self.model, texts, "--out", out)
        found = numpy.frombuffer(content(out)[1024:], dtype="<u2").tolist()
        self.assertEqual(found, words("one").ids + [end] + words("two words").ids + [end])
        prompts = self.write("prompts.jsonl", '{"prompt": "one", "completion": " two"}\n')
        self.done("tokenize", "--model", self.model, texts, prompts, "--out", out)
        tokens, counts, begins = flags_of(out)
        prompt, completion = words("one").ids, words(" two").ids + [end]
        self.assertEqual(tokens, found + prompt + completion)
        self.assertEqual(counts, [1] * len(found) + [0] * len(prompt) + [1] * len(completion))
        self.assertEqual(sum(begins), 3)

    def test_the_script_by_marks(self):
        folder, _ = self.saved("bytes", marked("qwen3"))
        ours, theirs = self.path("a.bin"), self.path("b.bin")
        script = os.path.join(os.path.dirname(__file__), "..", "examples", "chats.py")
        for train_on in ("assistant", "last"):
            self.done("tokenize", "--model", folder, self.chats, "--out", ours, "--train-on", train_on)
            subprocess.run([sys.executable, script, "--model", folder, self.chats, "--out", theirs, "--train-on", train_on], check=True,
                           capture_output=True)
            self.assertEqual(flags_of(ours), flags_of(theirs))

    def test_train_and_sample(self):
        model = self.trained_model()
        shape = ["--context", "64", "--batch", "2", "--steps", "3", "--threads", "2", "--lr", "1e-3"]
        result = command.run("train", "--model", model, "--data", self.chats, "--out", self.path("run"), *shape, "--save-every", "2")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("whole and isolated", result.stdout)
        self.assertRegex(result.stderr, r"\d+ documents longer than --context: cut there, [\d,]+ tokens are not used")
        self.assertRegex(result.stderr, r"\d+ documents with nothing to learn in the context: left out")
        tokens = self.path("chats.bin")
        self.done("tokenize", "--model", model, self.chats, "--out", tokens)
        other = command.run("train", "--model", model, "--data", tokens, "--out", self.path("other"), *shape, "--save-every", "2")
        self.assertEqual(other.returncode, 0, other.stderr)
        self.assertEqual(content(self.path("run", "model.safetensors")), content(self.path("other", "model.safetensors")))
        flags = bytearray(content(tokens))
        flags[-1] ^= 1  # whether the last token counts
        write(tokens, bytes(flags))
        self.ends(1, "its length or checksum differs", "train", "--resume", self.path("other"), "--steps", "5")
        last = command.run("train", "--model", model, "--data", self.chats, "--out", self.path("last"), *shape, "--train-on", "last")
        self.assertEqual(last.returncode, 0, last.stderr)
        self.assertNotEqual(content(self.path("run", "model.safetensors")), content(self.path("last", "model.safetensors")))
        fewer = self.write("fewer.jsonl", content(self.chats)[:4000].rsplit(b"\n", 1)[0])
        self.ends(1, "its length or checksum differs", "train", "--resume", self.path("run"), "--steps", "5", "--data", fewer)
        self.done("train", "--resume", self.path("run"), "--steps", "4")

        ask = ["sample", self.path("run"), "--chat", "--length", "12", "--temperature", "0"]
        answer = self.done(*ask, "--prompt", "Hi")
        self.assertEqual(self.done(*ask, input="Hi\n\n"), answer)
        two = self.done(*ask, input="Hi\nAnd more?\n")
        self.assertTrue(two.startswith(answer))
        self.assertGreater(len(two), len(answer))
        self.assertNotEqual(self.done(*ask, "--prompt", "Hi", "--system", "Sing. " * 9), "")
        # The same as going on from the text that the template makes.
        prompt = render(self.theirs, {"messages": [{"role": "user", "content": "Hi"}]}, tokenize=False, add_generation_prompt=True)
        plain_words = self.done("sample", self.path("run"), "--length", "12", "--temperature", "0", "--prompt", prompt)
        self.assertEqual(plain_words, prompt + answer)

    def speaker(self, kind, template, first, stop, behind):
        """A model that answers `first`, and then `stop`, whatever it is asked; behind that it would say `behind`."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        folder, theirs = self.saved(kind, template)
        number = self.kinds[kind].token_to_id
        model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                                             vocab_size=self.kinds[kind].get_vocab_size(), max_position_embeddings=256))
        with torch.no_grad():
            for weight in model.parameters():
                weight.fill_(0.0 if weight.dim() > 1 else 1.0)
            for token in range(self.kinds[kind].get_vocab_size()):
                model.model.embed_tokens.weight[token, 0] = 1.0
            for place, (token, follows) in enumerate(((None, first), (first, stop), (stop, behind), (behind, behind))):
                if token:
                    model.model.embed_tokens.weight[number(token), 0] = 0.0
                    model.model.embed_tokens.weight[number(token), place] = 1.0
                model.lm_head.weight[number(follows), place] = 1.0
        model.save_pretrained(folder)
        return folder

    def test_an_answer_ends_where_a_turn_does(self):
        """The template ends turns in <|im_end|>, and the folder's end token is another one."""
        model = self.speaker("bytes", plain("chatml"), "H", "<|im_end|>", "i")
        ask = ["--length", "6", "--temperature", "0"]
        self.assertEqual(self.done("sample", model, *ask, "--prompt", "x"), "xH<|im_end|>iiii\n", "a text goes on")
        self.assertEqual(self.done("sample", model, "--chat", *ask, "--prompt", "x"), "H\n")
        self.assertEqual(self.done("sample", model, "--chat", *ask, input="x\n\ny\n"), "H\nH\n")
        unlike = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ 'You: ' if add_generation_prompt }}"
        model = self.speaker("bytes", unlike, "H", "<|im_end|>", "i")
        self.assertEqual(self.done("sample", model, "--chat", *ask, "--prompt", "x"), "H<|im_end|>iiii\n", "nothing says where a turn ends")
        # A template that refuses an answer does not say it either. A tokenizer that fails on what the template writes is told.
        refuses = unlike.replace("{% for", "{% if messages | length > 1 %}{{ raise_exception('One!') }}{% endif %}{% for", 1)
        model = self.speaker("bytes", refuses, "H", "<|im_end|>", "i")
        self.assertEqual(self.done("sample", model, "--chat", *ask, "--prompt", "x"), "H<|im_end|>iiii\n")
        model = self.speaker("bytes", plain("chatml") + "{{ '%sc' if messages | length > 1 }}" % ("a" * 64), "H", "<|im_end|>", "i")
        found = json.loads(content(os.path.join(model, "tokenizer.json")))
        found["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "Split", "pattern": {"Regex": "(?:a+)+[bd]"},
                                                           "behavior": "Isolated", "invert": False})
        write(os.path.join(model, "tokenizer.json"), json.dumps(found))
        self.fails(1, "splitting a text", "sample", model, "--chat", *ask, "--prompt", "x")

    def test_a_question_has_one_begin_and_what_was_said_before(self):
        """A tokenizer that begins texts with <s> does not begin the template's text with another one. A context that is one
        token too short tells the length of what the model is given."""
        model = self.speaker("begins", plain("llama3"), "H", "<|eot_id|>", "i")
        ask, theirs = ["sample", model, "--chat", "--length", "2", "--temperature", "0"], self.saved("begins", plain("llama3"))[1]
        said = [{"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "H"), ("user", "Ho"))]
        for messages, lines in ((said[:1], "Hi\n"), (said, "Hi\nHo\n")):
            count = len(render(theirs, {"messages": messages}, add_generation_prompt=True)["input_ids"])
            found = command.run(*ask, "--context", str(count), input=lines)
            self.assertEqual((found.stdout, found.stderr), ("H\n" * lines.count("\n"), ""))
            self.ends(0, "does not see its first 1\n", *ask, "--context", str(count - 1), input=lines)

    def test_what_is_refused(self):
        text = self.write("a.txt", "some text " * 9)
        for code, words, arguments in (
                (2, "--form", ("tokenize", "--model", self.model, self.chats, "--out", self.path("x.bin"), "--form", "nanogpt")),
                (2, "no date", ("tokenize", "--model", self.model, self.chats, "--out", self.path("x.bin"), "--chat-date", "2026-02-30")),
                (2, "is none of", ("train", "--data", self.chats, "--train-on", "user")),
                (1, "bytes have no chat template", ("train", "--data", self.chats, "--out", self.path("gpt"), *command.tiny())),
                (2, "for --chat", ("sample", self.path("nowhere"), "--system", "x"))):
            with self.subTest(arguments):
                self.assertIn(words, command.run(*arguments).stderr)
                self.assertEqual(command.run(*arguments).returncode, code)
        self.done("train", "--data", text, "--out", self.path("gpt"), "--steps", "0", *command.tiny("--context", "4"))
        self.fails(1, "have no chat template", "sample", self.path("gpt"), "--chat", "--prompt", "x")


if __name__ == "__main__":
    command.main()
