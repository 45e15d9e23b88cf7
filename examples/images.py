"""Trains a small convolutional network with batch normalisation on shapes that it draws, in bf16 and
channels_last, with SGD.

    python examples/images.py

prints

    step    0  loss 1.4311
    step   40  loss 0.7029
    step   80  loss 0.4923
    step  120  loss 0.2470
    step  160  loss 0.2577
    step  199  loss 0.2319
    right on images it has not seen: 91.4%

With --recipe lpmm weights live in 10 bits, momentum in 8, and gradients are added up in 8: compress_weights.
With --graph a step is one CUDA graph: the GPU does not wait for Python.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

from scruple.torch import SGD, cast_model, compress_weights, release_gradients

SHAPES = "disc", "square", "ring", "cross"


def draw(count, generator, size=20):
    """Noisy images of one shape each, somewhere and of some colour; and which shape it is."""
    kinds = torch.randint(0, len(SHAPES), (count,), generator=generator)
    centre = size * (0.35 + 0.3 * torch.rand(count, 2, 1, 1, generator=generator))
    radius = size * (0.15 + 0.15 * torch.rand(count, 1, 1, generator=generator))
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    dy, dx = (y - centre[:, 0]).abs(), (x - centre[:, 1]).abs()
    distance = (dy.square() + dx.square()).sqrt()
    masks = torch.stack(
        [
            distance < radius,
            (dy < radius) & (dx < radius),
            (distance - radius).abs() < 1.5,
            ((dy < 1.5) | (dx < 1.5)) & (distance < radius),
        ]
    )
    shape = masks[kinds, torch.arange(count)].unsqueeze(1).float()
    colour = torch.rand(count, 3, 1, 1, generator=generator) + 0.5
    return shape * colour + 0.3 * torch.randn(count, 3, size, size, generator=generator), kinds


def network(width=16):
    def stage(inputs, outputs):
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
        )

    return nn.Sequential(
        stage(3, width),
        stage(width, 2 * width),
        stage(2 * width, 4 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, len(SHAPES)),
    )


@torch.no_grad()
def accuracy(model, device, count=256):
    model.eval()
    images, kinds = draw(count, torch.Generator().manual_seed(12345))
    images = images.to(device, torch.bfloat16, memory_format=torch.channels_last)
    right = (model(images).argmax(1).cpu() == kinds).float().mean().item()
    model.train()
    return right


def captured(train, batch):
    """`train` as a CUDA graph. Its inputs stay where they are, so each batch is copied there."""
    held, graph = [x.clone() for x in batch], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = train(*held)

    def replay(*batch):
        for place, x in zip(held, batch):
            place.copy_(x)
        graph.replay()
        return loss

    return replay


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="batches of 32 images (200)")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate (0.1)")
    parser.add_argument("--recipe", default="scruple", help="formats of weights and momentum: scruple (default), lpmm")
    parser.add_argument(
        "--keep-gradients",
        action="store_true",
        help="keep them until opt.step(); else each is stepped with inside backward and freed",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--graph", action="store_true", help="on a GPU: a step is a CUDA graph, from the fourth on")
    args = parser.parse_args()
    if args.graph and args.device == "cpu":
        parser.error("--graph needs a GPU")

    torch.manual_seed(0)
    model = network().to(args.device, memory_format=torch.channels_last)
    cast_model(model, torch.bfloat16)  # the normalisations and their statistics stay fp32
    # Decay for what multiplies inputs, none for normalisations and biases.
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    opt = SGD(
        [{"params": matrices, "weight_decay": 5e-4}, {"params": vectors}],
        lr=torch.tensor(args.lr, device=args.device) if args.graph else args.lr,  # a graph reads it from the GPU
        momentum=0.9,
        nesterov=True,
        recipe=args.recipe,
        capturable=args.graph,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.steps)
    if args.recipe == "lpmm":
        compress_weights(model, opt)
    elif not args.keep_gradients:
        release_gradients(model, opt)

    def train(images, kinds):
        loss = F.cross_entropy(model(images).float(), kinds)
        loss.backward()
        opt.step()  # does nothing to gradients that backward has taken; the scheduler wants to see it
        opt.zero_grad()
        return loss.detach()

    with torch.cuda.stream(torch.cuda.Stream() if args.graph else None):
        for step in range(args.steps):
            images, kinds = draw(32, torch.Generator().manual_seed(step))
            images = images.to(args.device, torch.bfloat16, memory_format=torch.channels_last)
            batch = images, kinds.to(args.device)
            if args.graph and step == 3:
                train = captured(train, batch)
            loss = train(*batch)
            schedule.step()
            if step % 40 == 0 or step == args.steps - 1:
                print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
    print(f"right on images it has not seen: {accuracy(model, args.device):.1%}")


if __name__ == "__main__":
    main()
