"""A language model from its first step: GPT-2 as FlashOptim trained it, AdamW of lr 6e-4, betas 0.9 and 0.95, decay 0.1.

--data DIR: classic_books.txt.xz, English books of the 18th and 19th century as one text of 62 MB; its last 2 % are for
validation. The shape is that of the 124 M model; with 16,384 tokens of its own, the model has 98 M parameters. 1,500 steps
of 64 x 1,024 tokens. The small form learns the alphabet.
"""

import gather
import torch
from language import KEPT, books, gpt2, keep, letters, small_gpt


class Task:
    metric, optimizer = "validation loss", "AdamW"
    autocast = compiled = True

    def __init__(self, data, small, device):
        if not small and not data:
            raise SystemExit("pretraining wants --data DIR, a folder with English books, classic_books.txt.xz")
        self.name = "pretraining" + (", small" if small else "")
        self.hypers = {"lr": 1e-2 if small else 6e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
        self.steps, self.size, self.context = (200, 16, 32) if small else (1500, 64, 1024)
        self.model = small_gpt if small else gpt2
        tokens = letters(8000) if small else books(data)
        cut = len(tokens) * 98 // 100
        self.training, self.testing = tokens[:cut].to(device), tokens[cut:].to(device)

    def batch(self, generator):
        first = torch.randint(len(self.training) - self.context, (self.size, 1), generator=generator)
        chosen = first.to(self.training.device) + torch.arange(self.context + 1, device=self.training.device)
        return (self.training[chosen].long(),)

    def loss(self, model, batch):
        return model(batch[0][:, :-1], batch[0][:, 1:])

    def evaluate(self, model):
        whole = (len(self.testing) - 1) // self.context
        rows = self.testing[: whole * self.context + 1].long()
        inputs, targets = (rows[i : i + whole * self.context].view(whole, -1) for i in (0, 1))
        parts = zip(inputs.split(16), targets.split(16))
        total = sum(float(model(x, y)) * len(x) for x, y in parts)
        return {"validation loss": total / whole}

    def needs(self, row, seed):
        """Fine-tuning starts from weights of the reference: those of the first seed that ends here."""
        return row.name == gather.REFERENCE and self.model is gpt2 and not (KEPT / "gpt2.pt").exists()

    def finished(self, model, row, seed):
        if self.needs(row, seed):
            # As models are published: what bf16 holds, so that every row of fine-tuning has the same first weights.
            weights = {name: x.bfloat16() for name, x in model.state_dict().items()}
            keep("gpt2.pt", lambda fresh: torch.save(weights, fresh))


def tasks(data, small, device):
    return [Task(data, small, device)]
