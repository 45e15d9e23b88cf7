"""Tokenizing: `scruple tokenize` with one and two threads, and Hugging Face's `tokenizers` with one, on the same text
with the same tokenizer, in turns. Usage: tokenizer.py SCRUPLE TEXT [VOCABULARY]"""
import os
import re
import subprocess
import sys
import tempfile
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers  # noqa: E402

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def gpt2_like(cut, lines, size):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=size, show_progress=False,
                                                             initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def llama2_like(lines, size):
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=size, show_progress=False, special_tokens=names))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?!)"), "isolated")  # as one word, like the real one
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def main(scruple, path, size=16_000):
    with open(path, encoding="utf-8", newline="") as file:
        text = file.read()
    lines = text[:4_000_000].splitlines(True)
    level, sequence, split = pre_tokenizers.ByteLevel, pre_tokenizers.Sequence, pre_tokenizers.Split
    kinds = {
        "GPT-2": gpt2_like(level(add_prefix_space=False), lines, size),
        "Llama 3": gpt2_like(sequence([split(Regex(LLAMA3), "isolated"), level(add_prefix_space=False, use_regex=False)]),
                             lines, size),
        "Llama 2": llama2_like(lines, size),
    }
    print(f"{len(text.encode()) / 1e6:.1f} MB, vocabulary {size}; MB/s, best of 3 in turns")
    with tempfile.TemporaryDirectory() as folder:
        for name, tokenizer in kinds.items():
            model, out = os.path.join(folder, "tokenizer.json"), os.path.join(folder, "tokens.bin")
            tokenizer.save(model)
            theirs, ours = [], {1: [], 2: []}
            for _ in range(3):
                fresh = Tokenizer.from_file(model)  # without what it remembers from the round before
                begin = time.perf_counter()
                tokens = fresh.encode_batch_fast([text])[0].ids  # without offsets, which nobody asks for here
                theirs.append(len(text.encode()) / 1e6 / (time.perf_counter() - begin))
                for threads, speeds in ours.items():
                    command = [scruple, "tokenize", "--model", model, path, "--out", out, "--end", "none"]
                    said = subprocess.run([*command, "--threads", str(threads)], check=True, capture_output=True,
                                          text=True).stdout
                    speeds.append(float(re.search(r"([\d.]+) MB/s", said)[1]))
                    count = re.search(r": ([\d,]+) tokens", said)[1]
                    assert count.replace(",", "") == str(len(tokens)), "other tokens"
            one, two, other = max(ours[1]), max(ours[2]), max(theirs)
            print(f"{name:8} scruple {one:6.2f}, two threads {two:6.2f} ({two / one:.2f})  "
                  f"tokenizers {other:6.2f} (scruple {one / other:.2f})")


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
