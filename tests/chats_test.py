"""Chat templates against transformers, token for token and mask for mask. The templates are written here, in the forms of
ChatML, Qwen 2 and 3, Llama 3, Mistral, Gemma, Zephyr, Phi and plain text; each also with {% generation %} around what the
assistant says, of which transformers knows the mask.

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
    from transformers.utils import logging
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

import command
from command import content, write

logging.set_verbosity_error()
CHATS, TEMPLATES = sys.argv[2], sys.argv[3:]
del sys.argv[2:]

# «» stands for {% generation %} and {% endgeneration %}, which the plain form of a template does not have.
FORMS = {
    "chatml": """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message.role == 'assistant' %}«{{ message['content'] + '<|im_end|>' }}»{{ '\\n' }}{% else %}{{ message['content'] + '<|im_end|>' + '\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
""",
    "qwen2": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You answer shortly.' }}
    {%- endif %}
    {{- "\\n\\nTools:\\n" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou answer shortly.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\\n' }}«
        {%- if message.content %}
            {{- message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}»{{ '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "qwen3": """{%- set ns = namespace(looking=true, last_question=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.looking and message.role == "user" and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.looking = false %}
        {%- set ns.last_question = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role != "assistant" %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- else %}
        {%- set text = message.content or '' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in text %}
            {%- set thought = text.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' }}«
        {%- if loop.index0 > ns.last_question and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + text.lstrip('\\n') }}
        {%- else %}
            {{- text }}
        {%- endif %}
        {{- '<|im_end|>' }}»{{ '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    "llama3": """{% set loop_messages = messages %}{% for message in loop_messages %}{% set head = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}{% if loop.index0 == 0 %}{% set head = bos_token + head %}{% endif %}{{ head }}{% if message.role == 'assistant' %}«{{ message['content'] | trim + '<|eot_id|>' }}»{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
""",
    "llama3.1": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "01 Jan 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today: " + date_string + "\\n\\n" }}
{#- the functions come first #}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {%- if message.role == 'assistant' %}«{{ message['content'] | trim + '<|eot_id|>' }}»
        {%- else %}
            {{- message['content'] | trim + '<|eot_id|>' }}
        {%- endif %}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("One call at a time!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}«
        {{- '{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}»
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "mistral": """{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must take turns!') }}{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}«{{ message['content'] + eos_token }}»{{ ' ' }}{% else %}{{ raise_exception('Only user and assistant speak!') }}{% endif %}{% endfor %}""",
    "nemo": """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set questions = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.tool_calls is defined) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("Roles must take turns!") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == questions[-1]) %}
            {{- "[TOOLS][" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{ ", " }}{% endif %}
                {%- endfor %}
                {{- "}" if loop.last else "}, " }}
            {%- endfor %}
            {{- "][/TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST]" + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST]" + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined %}«
        {{- "[TOOL_CALLS][" }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function|tojson %}
            {{- out[:-1] }}
            {{- ', "id": "' ~ call.id ~ '"}' ~ (']' ~ eos_token if loop.last else ', ') }}
        {%- endfor %}»
    {%- elif message["role"] == "assistant" %}«
        {{- message["content"] + eos_token}}»
    {%- else %}
        {{- '[RESULT]{"content": ' + message.content|string + '}[/RESULT]' }}
    {%- endif %}
{%- endfor %}
""",
    "gemma": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('There is no system here') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\\n' }}{% if role == 'model' %}«{{ message['content'] | trim + '<end_of_turn>' }}»{{ '\\n' }}{% else %}{{ message['content'] | trim + '<end_of_turn>\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}""",
    "zephyr": """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n' }}«{{ message['content'] + eos_token }}»{{ '' }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "phi": """{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'assistant' %}{{'<|assistant|>\\n' }}«{{ message['content'] + '<|end|>' }}»{{ '\\n'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}""",
    "plain": """{%- macro title(role) -%}
### {{ 'Question' if role == 'user' else role | capitalize }}:
{% endmacro -%}
{%- for message in messages if message.role != 'tool' -%}
{%- if message.role == 'assistant' -%}
### Answer:
«{{ message.content + '\\n\\n' }}»{%- else -%}
{{ title(message.role) }}{{ message.content }}

{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
### Answer:
{% endif -%}
""",
}
WITHOUT_SYSTEM, WITH_CALLS = {"mistral", "gemma"}, {"qwen2", "llama3.1", "nemo"}
MARKS = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]",
         "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|system|>", "<|end|>", "<think>", "</think>", "<tool_call>",
         "</tool_call>", "[TOOL_CALLS]", "<s>", "</s>"]
TEXTS = ["Hi", "", "  two spaces \n", "Grüße, 你好 😀!", "\n\nlines\n\n", "<think>\nhm\n</think>\n\nYes.", "half</think> of it", "\u3000wide\u00a0",
         "it's \"quoted\" \\ \t", "<|im_end|>", "1234567 [INST] x", "{\"a\": 1}", "e\u0301 composes", "word " * 40, "<b>html</b> & more", "."]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Says <b>it</b> & more", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1}}, "required": ["city"]}}}]
SAMPLE = "\n".join(TEXTS) + " the quick brown fox answers questions about the weather in Paris and Zürich. " * 20


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

    def saved(self, kind, template, **config):
        """A model's folder, and the same tokenizer in transformers."""
        folder = self.path(f"{kind}-{abs(hash(template))}")
        os.makedirs(folder, exist_ok=True)
        self.kinds[kind].save(os.path.join(folder, "tokenizer.json"))
        write(os.path.join(folder, "tokenizer_config.json"),
              json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template, **config}))
        theirs = PreTrainedTokenizerFast(tokenizer_object=self.kinds[kind], bos_token="<s>", eos_token="</s>")
        theirs.chat_template = template
        return folder, theirs

    def ours(self, folder, lines, date=""):
        done = subprocess.run([CHATS, folder, date], input="".join(json.dumps(line) + "\n" for line in lines),
                              capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return [json.loads(line) for line in done.stdout.splitlines()]


def marked(form):
    return FORMS[form].replace("«", "{% generation %}").replace("»", "{% endgeneration %}")


def plain(form):
    return FORMS[form].replace("«", "").replace("»", "")


def mask_of(spans, count):
    mask = [0] * count
    for begin, end in spans:
        mask[begin:end] = [1] * (end - begin)
    return mask


def render(theirs, line, **more):
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
                last = mask_of(found["last"], len(wanted))
                self.assertLessEqual(sum(last), sum(mask))
                self.assertTrue(all(a <= b for a, b in zip(last, mask_of(found["assistant"], len(wanted)))))
        self.assertLess(refused, len(lines) / 2)
        self.assertGreater(compared, len(lines) / 4, (form, kind))

    def test_every_form(self):
        dice = random.Random(1)
        for form in FORMS:
            lines = [conversation(dice, form) for _ in range(60)]
            for kind in self.kinds:
                self.compare(form, kind, lines)

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


if __name__ == "__main__":
    command.main()
