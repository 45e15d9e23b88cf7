"""Trains a small GPT in bf16 on sentences that it makes up, with AdamW in 5 to 7 bytes per parameter.

    python examples/gpt.py --gradients released --save gpt.pt
    python examples/gpt.py --gradients released --resume gpt.pt --steps 250

The first prints

    step    0  loss 3.2440  lr 4.00e-04
    step   50  loss 0.7247  lr 3.74e-03
    step  100  loss 0.3495  lr 2.48e-03
    step  150  loss 0.2263  lr 1.02e-03
    bytes per parameter: weights 2.00, optimizer 3.13, gradients 0.00 (torch, fp32: 4 + 8 + 4)
    step  199  loss 0.1903  lr 4.00e-04
    after friday comes saturday.
    saved gpt.pt
"""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F

from scruple.torch import AdamW, cast_model, release_gradients

DAYS = "monday tuesday wednesday thursday friday saturday sunday".split()
LETTERS = sorted(set("".join(DAYS) + "after comes.\n "))


def sentences(count, generator):
    """Lines such as "after monday comes tuesday.", as numbers of letters."""
    days = torch.randint(0, 7, (count,), generator=generator).tolist()
    text = "".join(f"after {DAYS[day]} comes {DAYS[(day + 1) % 7]}.\n" for day in days)
    return torch.tensor([LETTERS.index(letter) for letter in text])


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width=64, depth=2, heads=4, context=48):
        super().__init__()
        self.context = context
        self.token, self.place = nn.Embedding(len(LETTERS), width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(LETTERS))

    def forward(self, letters):
        places = torch.arange(letters.shape[1], device=letters.device)
        return self.head(self.norm(self.blocks(self.token(letters) + self.place(places))))


def batch_of(step, size, context, device):
    """The batch of a step follows from its number, so that a resumed run sees what the first would have
    seen."""
    generator = torch.Generator().manual_seed(step)
    text = sentences(size * context // 8, generator)
    begins = torch.randint(0, len(text) - context, (size,), generator=generator)
    rows = torch.stack([text[begin : begin + context + 1] for begin in begins]).to(device)
    return rows[:, :-1], rows[:, 1:]


def warmup_then_cosine(step, warmup, total):
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))


def report_bytes(model, opt):
    """What is there between backward and step; compressed gradients (1.06) are gone by then."""
    count = sum(p.numel() for p in model.parameters())
    weights = sum(p.nbytes for p in model.parameters())
    state = sum(
        plane.nbytes for planes in opt.state.values() for plane in planes.values() if torch.is_tensor(plane)
    )
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    print(
        f"bytes per parameter: weights {weights / count:.2f}, optimizer {state / count:.2f}, gradients "
        f"{gradients / count:.2f} (torch, fp32: 4 + 8 + 4)"
    )


@torch.no_grad()
def continue_text(model, prompt, count, device):
    letters = [LETTERS.index(letter) for letter in prompt]
    for _ in range(count):
        logits = model(torch.tensor([letters[-model.context :]], device=device))
        letters.append(int(logits[0, -1].argmax()))
    return "".join(LETTERS[i] for i in letters)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="steps to take in all (200)")
    parser.add_argument("--lr", type=float, default=4e-3, help="largest learning rate (4e-3)")
    parser.add_argument(
        "--recipe",
        default="scruple",
        help="how weights and moments are stored: scruple (5.1 bytes), flash (5.1), scant (4.6), split (12), "
        "mixed (14), fp32 (14)",
    )
    parser.add_argument(
        "--gradients",
        choices=("stored", "compressed", "released"),
        default="compressed",
        help="stored: p.grad until the step; compressed: 8-bit accumulators, clipped by the norm of all; "
        "released: stepped with inside backward, nothing is kept, no norm of all is known",
    )
    parser.add_argument("--clip", type=float, default=1.0, help="limit of the norm of all gradients (1.0)")
    parser.add_argument("--save", metavar="FILE", help="write a checkpoint at the end")
    parser.add_argument("--resume", metavar="FILE", help="go on from a checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = GPT().to(args.device)
    cast_model(model, torch.bfloat16)
    opt = AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, recipe=args.recipe)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: warmup_then_cosine(step, 20, args.steps))
    first = 0
    if args.resume:  # before release_gradients, which begins with the state it finds
        saved = torch.load(args.resume, map_location=args.device)
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        first = saved["step"]

    if args.gradients == "compressed":
        release_gradients(model, opt, policy="compressed", max_norm=args.clip)
    elif args.gradients == "released":
        release_gradients(model, opt, policy="released")

    for step in range(first, args.steps):
        letters, following = batch_of(step, 8, model.context, args.device)
        loss = F.cross_entropy(model(letters).float().flatten(0, 1), following.flatten())
        loss.backward()
        if step == args.steps - 1:
            report_bytes(model, opt)
        if args.gradients == "stored":
            opt.step(max_norm=args.clip)
        else:
            opt.step()  # backward took the step; the scheduler wants to see this call
        opt.zero_grad()
        schedule.step()
        if step % 50 == 0 or step == args.steps - 1:
            print(f"step {step:4d}  loss {loss.item():.4f}  lr {schedule.get_last_lr()[0]:.2e}", flush=True)

    print(continue_text(model, "after friday comes ", 10, args.device).splitlines()[0])
    if args.save:
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": opt.state_dict(),
                "schedule": schedule.state_dict(),
                "step": args.steps,
            },
            args.save,
        )
        print(f"saved {args.save}")


if __name__ == "__main__":
    main()
