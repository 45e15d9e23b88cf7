"""Shards a transformer over several processes with FSDP2, trains it, and saves it with
torch.distributed.checkpoint, from where any number of processes can go on.

    torchrun --nproc-per-node 2 examples/fsdp2.py --save checkpoint
    torchrun --nproc-per-node 3 examples/fsdp2.py --load checkpoint --steps 80

The first prints

    step    0  loss 3.7635
    step   10  loss 2.7086
    step   20  loss 2.0560
    step   30  loss 1.7365
    step   39  loss 1.2010
    saved checkpoint
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from scruple.torch import AdamW, cast_model, release_gradients

TOKENS, LENGTH, WIDTH = 32, 16, 64


class Model(nn.Module):
    """Reads tokens and says what comes next."""

    def __init__(self, depth=2):
        super().__init__()
        self.token, self.place = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens):
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def batch_of(step, rank, device, size=8):
    """Counting in steps of 1 to 5; every rank has rows of its own."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    first = torch.randint(0, TOKENS, (size, 1), generator=generator)
    stride = torch.randint(1, 6, (size, 1), generator=generator)
    rows = (first + stride * torch.arange(LENGTH + 1)) % TOKENS
    return rows[:, :-1].to(device), rows[:, 1:].to(device)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="steps to take in all (40)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate (2e-3)")
    parser.add_argument(
        "--gradients",
        choices=("stored", "compressed", "released"),
        default="compressed",
        help="what becomes of a rank's share of the gradients; stored and compressed are clipped by the norm "
        "over all ranks",
    )
    parser.add_argument(
        "--save", metavar="FOLDER", help="write a checkpoint at the end, each rank its own part"
    )
    parser.add_argument("--load", metavar="FOLDER", help="go on from a checkpoint of any number of ranks")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    rank = dist.get_rank()

    torch.manual_seed(0)
    model = Model().to(device)
    cast_model(model, torch.bfloat16)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = AdamW(model.parameters(), lr=args.lr)  # after fully_shard, which makes new parameters

    first = 0
    if args.load:  # before release_gradients
        weights, state = get_state_dict(model, opt)
        saved = {"model": weights, "optimizer": state, "step": 0}
        dcp.load(saved, checkpoint_id=args.load)
        set_state_dict(model, opt, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        first = saved["step"]
    if args.gradients != "stored":
        release_gradients(
            model, opt, policy=args.gradients, max_norm=1.0 if args.gradients == "compressed" else None
        )

    for step in range(first, args.steps):
        tokens, following = batch_of(step, rank, device)
        loss = F.cross_entropy(model(tokens).float().flatten(0, 1), following.flatten())
        loss.backward()
        opt.step(max_norm=1.0 if args.gradients == "stored" else None)
        opt.zero_grad()
        if step % 10 == 0 or step == args.steps - 1:
            dist.all_reduce(loss.detach_())
            if rank == 0:
                print(f"step {step:4d}  loss {loss.item() / dist.get_world_size():.4f}", flush=True)

    if args.save:
        weights, state = get_state_dict(model, opt)
        dcp.save({"model": weights, "optimizer": state, "step": args.steps}, checkpoint_id=args.save)
        if rank == 0:
            print(f"saved {args.save}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # The model's cycles hold the process group. It must end while Python runs: later, its threads would abort when they
    # want the interpreter's lock (pytorch/pytorch issue 190489).
    gc.collect()
