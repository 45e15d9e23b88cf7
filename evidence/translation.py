"""Translation: a small T5 (Raffel et al., 1910.10683) from scratch. Its embedding is its output too; most rows of it
are rare words, whose gradient is small but in few steps, and its position biases are 32 numbers per head.

--data DIR: Multi30k, English to German (train, val and test_2016_flickr, each .en.gz and .de.gz): 29,000 pairs to
train with, byte-level BPE of 8,000 tokens made of them. --small: sentences of a toy language of 30 words, whose
translations have adjectives behind their nouns and verbs at the end.
"""

import collections
import gzip
import math
import pathlib
import re

import torch
import transformers
from language import trained_tokenizer
from torch.nn import functional

PAD, END = 0, 1
SETS = ("train", "val", "test_2016_flickr")
KIND = 10  # toy words of a kind: nouns, adjectives, verbs


def bleu(hypotheses, references):
    """Of a corpus, by n-grams of up to 4 words, in percent (Papineni et al., 2002); punctuation marks are words."""
    right, all_, lengths = [0] * 4, [0] * 4, [0, 0]
    for pair in zip(hypotheses, references):
        words = [re.findall(r"\w+|[^\w\s]", text) for text in pair]
        lengths = [total + len(more) for total, more in zip(lengths, words)]
        for n in range(4):
            ours, theirs = (collections.Counter(zip(*(w[i:] for i in range(n + 1)))) for w in words)
            right[n] += (ours & theirs).total()
            all_[n] += ours.total()
    if min(right) == 0:
        return 0.0
    brevity = min(0.0, 1 - lengths[1] / lengths[0])
    return 100 * math.exp(brevity + sum(math.log(a / b) for a, b in zip(right, all_)) / 4)


def padded(sentences, length):
    """Each with END behind it, the longest cut, as one tensor."""
    rows = [[*ids[: length - 1], END] for ids in sentences]
    return torch.tensor([row + [PAD] * (length - len(row)) for row in rows], dtype=torch.int16)


def multi30k(folder, length):
    """(English, German) of each set as ids, the German of the test set as text, and what makes text of ids."""
    texts = []
    for path in (pathlib.Path(folder) / f"{name}.{language}.gz" for name in SETS for language in ("en", "de")):
        if not path.exists():
            raise SystemExit(
                f"{path} is not there: --data wants the data set Multi30k (English, German), "
                f"{', '.join(SETS)}, each .en.gz and .de.gz"
            )
        with gzip.open(path, "rt", encoding="utf-8") as text:
            texts.append(text.read().splitlines())
    tokenizer = trained_tokenizer(texts[0] + texts[1], 8000, ("<pad>", "<end>"), space=True)
    ids = [padded([line.ids for line in tokenizer.encode_batch(lines)], length) for lines in texts]
    return list(zip(ids[::2], ids[1::2])), texts[-1], tokenizer.decode_batch


def toy(count, length):
    """The same of a toy language: noun phrase, verb, noun phrase; word w is w + 3 KIND in the other language."""
    generator = torch.Generator().manual_seed(7)
    words = torch.randint(KIND, (count, 5), generator=generator) + torch.tensor([0, KIND, 2 * KIND, 0, KIND]) + 2
    with_adjective = torch.rand(count, 2, generator=generator) < 0.5
    pairs = []
    for (noun, adjective, verb, noun2, adjective2), (first, second) in zip(words.tolist(), with_adjective.tolist()):
        ours = [adjective] * first + [noun, verb] + [adjective2] * second + [noun2]
        theirs = [noun] + [adjective] * first + [noun2] + [adjective2] * second + [verb]
        pairs.append((ours, [word + 3 * KIND for word in theirs]))
    sides = [padded(side, length) for side in zip(*pairs)]
    cuts = (slice(count - 256), slice(count - 256, count - 128), slice(count - 128, count))

    def text(rows):
        return [" ".join(map(str, row)) for row in rows]

    return [tuple(side[cut] for side in sides) for cut in cuts], text([pair[1] for pair in pairs[cuts[2]]]), text


class Task:
    metric, optimizer = "BLEU", "AdamW"
    autocast = compiled = True

    def __init__(self, data, small, device):
        self.device = device
        if small:
            self.name, self.steps, self.size, self.length = "translation, small", 200, 32, 6
            self.hypers = {"lr": 3e-3, "betas": (0.9, 0.98), "weight_decay": 0.01}
            self.sizes = dict(vocab_size=6 * KIND + 2, d_model=64, d_kv=16, num_heads=4, d_ff=128, num_layers=1)
            sets, self.references, self.text = toy(4096 + 256, self.length)
        elif data:
            self.name, self.steps, self.size, self.length = "translation, Multi30k", 3000, 256, 40
            # The peak of 1706.03762's schedule at this width, and its betas.
            self.hypers = {"lr": 1e-3, "betas": (0.9, 0.98), "weight_decay": 0.01}
            self.sizes = dict(vocab_size=8000, dropout_rate=0.1, d_model=256, d_kv=32, num_heads=8, d_ff=1024, num_layers=4)
            sets, self.references, self.text = multi30k(data, self.length)
        else:
            raise SystemExit("translation wants --data with the data set Multi30k (English, German), or --small")
        self.training, self.validation, self.testing = ([side.to(device) for side in sides] for sides in sets)

    def model(self):
        config = transformers.T5Config(
            **{"dropout_rate": 0.0, **self.sizes},
            num_decoder_layers=self.sizes["num_layers"],
            pad_token_id=PAD,
            eos_token_id=END,
            decoder_start_token_id=PAD,
        )
        config._attn_implementation = "eager"  # the same sums on every device, and the biases get their gradient
        model = transformers.T5ForConditionalGeneration(config)
        # The same logits at first as by T5's own embedding of 1, which is for Adafactor: its steps are relative.
        width = config.d_model**0.5
        torch.nn.init.normal_(model.shared.weight, std=1 / width)
        torch.nn.init.constant_(model.decoder.final_layer_norm.weight, width)
        return model

    def batch(self, generator):
        chosen = torch.randint(len(self.training[0]), (self.size,), generator=generator).to(self.device)
        return [side[chosen].long() for side in self.training]

    def loss(self, model, batch):
        source, target = batch
        begun = functional.pad(target[:, :-1], (1, 0), value=PAD)
        logits = model(input_ids=source, attention_mask=source != PAD, decoder_input_ids=begun, use_cache=False).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), target.flatten(), ignore_index=PAD)

    def translate(self, model, source):
        """The likeliest word after another. Without a cache: at these lengths a pass over all is as quick."""
        mask = source != PAD
        hidden = model.get_encoder()(input_ids=source, attention_mask=mask).last_hidden_state
        ids = torch.full((len(source), 1), PAD, device=self.device)
        for _ in range(self.length):
            logits = model(
                encoder_outputs=(hidden,), attention_mask=mask, decoder_input_ids=ids, use_cache=False
            ).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(1, keepdim=True)], 1)
        rows = ids[:, 1:].tolist()
        return self.text([row[: row.index(END)] if END in row else row for row in rows])

    @torch.no_grad()
    def evaluate(self, model):
        model.eval()
        lost = words = 0.0
        for pair in zip(*(side.long().split(256) for side in self.validation)):
            count = float((pair[1] != PAD).sum())
            lost, words = lost + count * float(self.loss(model, pair)), words + count
        texts = [text for part in self.testing[0].long().split(256) for text in self.translate(model, part)]
        model.train()
        return {"BLEU": bleu(texts, self.references), "validation loss": lost / words}


def tasks(data, small, device):
    return [Task(data, small, device)]
