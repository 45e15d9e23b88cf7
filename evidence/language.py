"""A GPT-2 and its text, for pretraining.py, finetuning.py and bits.py."""

import lzma
import math
import os
import pathlib

import torch
from torch import nn
from torch.nn import functional

KEPT = pathlib.Path(__file__).resolve().parents[1] / "build" / "evidence"  # tokens, and the weights to fine-tune
VOCABULARY = 16384


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, c))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """GPT-2 (Radford et al., 2019), its head tied to the embedding."""

    def __init__(self, vocabulary, context, layers, width, heads):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                ends_branch = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (math.sqrt(2 * layers) if ends_branch else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens, targets):
        """The mean loss over targets that are not -100."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def gpt2():
    return Gpt(VOCABULARY, 1024, 12, 768, 12)


def small_gpt():
    return Gpt(28, 32, 1, 32, 2)


def read(path, wanted):
    if not path.exists():
        raise SystemExit(f"{path} is not there: --data wants {wanted}")
    with lzma.open(path, "rt", encoding="utf-8") as text:
        return text.read()


def tokenizer():
    from tokenizers import Tokenizer

    path = KEPT / "tokenizer.json"
    if not path.exists():
        raise SystemExit("the tokenizer is not there: run make evidence TASK=pretraining DATA=DIR first")
    return Tokenizer.from_file(str(path))


def trained_tokenizer(texts, size, special=(), space=False):
    """A byte-level BPE; `space`: one stands before the first word too."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=space), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return made


def keep(name, write):
    """write(path) makes the file; who looks while it does sees none."""
    KEPT.mkdir(parents=True, exist_ok=True)
    fresh = KEPT / f"{name}.{os.getpid()}"
    write(fresh)
    fresh.replace(KEPT / name)


def books(folder):
    """The text as tokens, by a tokenizer made of it; both are kept in build/evidence/."""
    path = KEPT / "books.bin"
    if not path.exists():
        text = read(pathlib.Path(folder) / "classic_books.txt.xz", "classic_books.txt.xz, any English books as one text")
        parts = [text[i : i + 100_000] for i in range(0, len(text), 100_000)]
        made = trained_tokenizer(parts, VOCABULARY)
        tokens = [token for part in made.encode_batch_fast(parts) for token in part.ids]
        tokens = torch.tensor(tokens, dtype=torch.int32).to(torch.int16).numpy().tobytes()
        keep("tokenizer.json", lambda fresh: made.save(str(fresh)))
        keep("books.bin", lambda fresh: fresh.write_bytes(tokens))
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.int16)


LETTERS = "abcdefghijklmnopqrstuvwxyz"


def spelled(text):
    return [("\n-" + LETTERS).index(sign) for sign in text]


def letters(count):
    """Text of the small form: lines that go on in the alphabet from anywhere, `xyzab`."""
    lines = torch.randint(26, (count, 2), generator=torch.Generator().manual_seed(3)).tolist()
    return torch.tensor(spelled("".join((2 * LETTERS)[a : a + 3 + b % 8] + "\n" for a, b in lines)), dtype=torch.int16)
