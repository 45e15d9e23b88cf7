"""Writes conversations as tokens for `scruple train --data`, by transformers, which renders any chat template.

    python examples/chats.py --model ./base chats.jsonl --out chats.bin

prints

    wrote chats.bin: 4,096 tokens of 37 conversations, of which 1,213 count; 3 were left out

It is the way out where `scruple` refuses a template. What counts: the template's {% generation %} blocks; without them,
what each message of the assistant adds to the text, from where a model would go on.
"""

import argparse
import json

import numpy as np
from transformers import AutoTokenizer


SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"}


def messages_of(line):
    """Of "messages", or of "conversations" with "from" and "value". What is null is not there."""
    messages = [{key: value for key, value in message.items() if value is not None} for message in
                line.get("messages") or line.get("conversations", [])]
    for message in messages:
        if "from" in message:
            speaker = message.pop("from")
            message.setdefault("role", SPEAKERS.get(speaker, speaker))
            message.setdefault("content", message.pop("value", None))
    return messages


def spans_of(tokenizer, messages, train_on, **more):
    """Characters that the assistant says, by rendering the messages before and after each of its turns."""
    whole = tokenizer.apply_chat_template(messages, tokenize=False, **more)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True, **more)
        after = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False, **more)
        if not (whole.startswith(before) and whole.startswith(after)):
            raise SystemExit("turns change with what follows them; put {% generation %} into the template")
        end = after.rstrip()  # white space behind the end of a turn is not the assistant's
        ends = [mark for mark in tokenizer.get_added_vocab() if end.endswith(mark)]
        spans.append((len(before), len(end) if ends else len(after)))
    return whole, spans[-1:] if train_on == "last" else spans


def tokens_and_mask(tokenizer, line, train_on):
    messages = messages_of(line)
    more = {"tools": line.get("tools")}
    if not any(message["role"] == "assistant" for message in messages):
        return [], np.zeros(0, bool)  # left out
    if train_on == "all":
        tokens = tokenizer.apply_chat_template(messages, return_dict=True, **more)["input_ids"]
        return tokens, np.ones(len(tokens), bool)
    if "endgeneration" in tokenizer.get_chat_template(tools=more["tools"]):
        found = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True, **more)
        mask = np.array(found["assistant_masks"], bool)
        if train_on == "last":  # the last run of tokens that count
            mask[: np.flatnonzero(~mask[: np.flatnonzero(mask)[-1]])[-1] + 1] = False
        return found["input_ids"], mask
    text, spans = spans_of(tokenizer, messages, train_on, **more)
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [any(a < end and b > begin for begin, end in spans) for a, b in found["offset_mapping"]]
    return found["input_ids"], np.array(mask, bool)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chats", help='JSON lines: {"messages": [{"role": ..., "content": ...}, ...]}')
    parser.add_argument("--model", required=True, metavar="FOLDER", help="with a tokenizer and its chat template")
    parser.add_argument("--out", required=True, metavar="FILE", help="file of tokens to write: *.bin")
    parser.add_argument("--train-on", choices=("all", "assistant", "last"), default="assistant", help="what counts")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokens, flags, left_out = [], [], 0
    with open(args.chats, encoding="utf-8") as lines:
        for line in filter(str.strip, lines):
            found, mask = tokens_and_mask(tokenizer, json.loads(line), args.train_on)
            if not mask.any():
                left_out += 1
                continue
            tokens += found
            flags.append(mask.astype(np.uint8))  # bit 0: it counts; bit 1: it begins a document
            flags[-1][0] |= 2
    if not flags:
        raise SystemExit(f"{args.chats} has no conversation with an answer; nothing was written")
    size = 2 if len(tokenizer) <= 1 << 16 else 4
    header = np.zeros(256, "<u4")
    header[:5] = 20261119, 1, len(tokens) & 0xFFFFFFFF, len(tokens) >> 32, size
    flags = np.concatenate(flags)
    with open(args.out, "wb") as file:
        file.write(header.tobytes() + np.array(tokens, f"<u{size}").tobytes() + flags.tobytes())
    print(f"wrote {args.out}: {len(tokens):,} tokens of {(flags >> 1).sum():,} conversations, of which {(flags & 1).sum():,} "
          f"count; {left_out:,} were left out")


if __name__ == "__main__":
    main()
