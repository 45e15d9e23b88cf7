"""Classification of images: a ResNet-18 (He et al., 1512.03385) in its form for small images, a stem of 3 x 3 and no
max pool, on CIFAR-10 with SGD and with AdamW. Micikevicius et al. (1710.03740) and FlashOptim (2602.23349) show
ResNets on ImageNet, with the same rules; this is the size that fits 50 runs.

--data DIR: CIFAR-10 as JPEG files, train/CLASS/NAME.jpg and test/CLASS/NAME.jpg, or one cifar10_jpeg.tar (or .tar.xz)
with the same inside. --small: four kinds of shapes, drawn here, and a ResNet of 8 layers.
"""

import io
import math
import pathlib
import tarfile

import torch
from torch import nn
from torch.nn import functional

WANTED = (
    "--data wants CIFAR-10 as JPEG files, 50,000 train/CLASS/NAME.jpg and 10,000 test/CLASS/NAME.jpg, "
    "or cifar10_jpeg.tar with the same inside"
)


class Block(nn.Module):
    def __init__(self, before, width, stride):
        super().__init__()
        self.first = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.across = nn.Sequential()
        if stride > 1 or before != width:
            self.across = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        inside = self.norm2(self.second(torch.relu(self.norm1(self.first(x)))))
        return torch.relu(inside + self.across(x))


class ResNet(nn.Module):
    """Each of `widths` has `depth` blocks of two layers, and halves the image but for the first."""

    def __init__(self, widths, depth, classes):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0])
        blocks, before = [], widths[0]
        for width in widths:
            for i in range(depth):
                blocks.append(Block(before, width, 2 if i == 0 and width != widths[0] else 1))
                before = width
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(before, classes)

    def forward(self, pixels):
        x = torch.relu(self.norm(self.stem(pixels.to(self.stem.weight.dtype))))
        return self.head(self.blocks(x).mean((2, 3)))


def jpegs(folder):
    """(name, bytes) of each file: train/CLASS/NAME.jpg or test/CLASS/NAME.jpg."""
    for path in sorted(folder.glob("cifar10_jpeg.tar*")):
        with tarfile.open(path) as tar:
            yield from ((part.name, tar.extractfile(part).read()) for part in tar if part.name.endswith(".jpg"))
        return
    for path in folder.glob("*/*/*.jpg"):
        yield path.relative_to(folder).as_posix(), path.read_bytes()


def cifar10(folder):
    """(pixels, labels) to train with and to test with; pixels are uint8, image x row x column x colour."""
    try:
        from PIL import Image
    except ImportError:
        raise SystemExit("Pillow is not installed, and the images are JPEG files: pip install pillow") from None
    found = {"train": [], "test": []}
    for name, data in jpegs(pathlib.Path(folder)):
        part, label = pathlib.PurePosixPath(name).parts[-3:-1]
        if part in found:
            found[part].append((name, label, data))
    counts = [len(found[part]) for part in found]
    if counts != [50000, 10000]:
        raise SystemExit(f"{folder} holds {counts[0]:,} training and {counts[1]:,} test images: {WANTED}")
    classes = {label: i for i, label in enumerate(sorted({label for _, label, _ in found["train"]}))}
    sets = []
    for files in found.values():
        files.sort()  # a folder has no order, and the batches must be the same everywhere
        pixels = bytearray().join(Image.open(io.BytesIO(data)).convert("RGB").tobytes() for _, _, data in files)
        pixels = torch.frombuffer(pixels, dtype=torch.uint8).view(-1, 32, 32, 3)
        sets.append((pixels, torch.tensor([classes[label] for _, label, _ in files])))
    return sets


def shapes(count):
    """Discs, squares, rings and crosses, 12 x 12, in bright colours on dark ones, with noise."""
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(4, (count,), generator=generator)

    def draw(low, high, *shape):
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    places, size = torch.arange(12.0), draw(3, 5, 1, 1)
    x, y = ((places.view(shape) - draw(4.5, 6.5, 1, 1)).abs() / size for shape in ((1, 1, 12), (1, 12, 1)))
    far, near, radius = torch.maximum(x, y), torch.minimum(x, y), torch.hypot(x, y)
    kinds = torch.stack([radius < 1, far < 0.9, (radius < 1) & (radius > 0.6), (far < 1) & (near < 0.35)])
    mask = kinds[labels, torch.arange(count)].unsqueeze(3)
    pixels = torch.where(mask, draw(0.6, 1, 1, 1, 3), draw(0, 0.4, 1, 1, 3)) + draw(-0.4, 0.4, 12, 12, 3)
    pixels = (pixels.clamp(0, 1) * 255).byte()
    cut = count - count // 4
    return [(pixels[:cut], labels[:cut]), (pixels[cut:], labels[cut:])]


class Task:
    metric, autocast = "test accuracy", True

    def __init__(self, sets, optimizer, hypers, small, device):
        self.name = f"images, {optimizer}" + (", small" if small else "")
        self.optimizer, self.hypers, self.device, self.small = optimizer, hypers, device, small
        self.size, epochs = (32, 3) if small else (512, 30)
        (pixels, self.labels), self.testing = ([part.to(device) for part in parts] for parts in sets)
        self.steps = epochs * (len(pixels) // self.size)
        self.mean, self.spread = (f(pixels.float().flatten(0, 2), 0) / 255 for f in (torch.mean, torch.std))
        self.edge = pixels.shape[1]
        around = self.edge // 8
        self.pixels = functional.pad(pixels, (0, 0, around, around, around, around))
        self.generator = self.order = None

    def rate(self, step):
        """Up over a twentieth of the steps, and a cosine down to zero."""
        return min(1, 20 * (step + 1) / self.steps) * (1 + math.cos(math.pi * step / self.steps)) / 2

    def model(self):
        return ResNet((8, 16, 32), 1, 4) if self.small else ResNet((64, 128, 256, 512), 2, 10)

    def images(self, pixels):
        """As a network takes them; the colours of a pixel stay neighbours in memory, which convolutions like."""
        return ((pixels.float() / 255 - self.mean) / self.spread).permute(0, 3, 1, 2)

    def batch(self, generator):
        """The next of an epoch, each image cropped at random from a black frame of an eighth, and half of them flipped."""
        if generator is not self.generator or len(self.order) < self.size:
            self.generator, self.order = generator, torch.randperm(len(self.pixels), generator=generator)
        chosen, self.order = self.order[: self.size], self.order[self.size :]
        corners = torch.randint(2 * (self.edge // 8) + 1, (2, self.size), generator=generator)
        flips = torch.randint(2, (1, self.size), generator=generator)
        chosen, down, right, flip = torch.cat([chosen[None], corners, flips]).to(self.device, non_blocking=True)
        places = torch.arange(self.edge, device=self.device)
        rows = down[:, None] + places
        columns = right[:, None] + torch.where(flip[:, None] > 0, places.flip(0), places)
        return self.images(self.pixels[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]), self.labels[chosen]

    def loss(self, model, batch):
        images, labels = batch
        return functional.cross_entropy(model(images).float(), labels)

    @torch.no_grad()
    def evaluate(self, model):
        pixels, labels = self.testing
        model.eval()
        scores = torch.cat([model(self.images(part)).float() for part in pixels.split(2000)])
        model.train()
        right = (scores.argmax(1) == labels).float().mean()
        return {"test accuracy": 100 * float(right), "test loss": float(functional.cross_entropy(scores, labels))}


def tasks(data, small, device):
    if not small and not data:
        raise SystemExit(f"images needs data: {WANTED}; or --small, which draws its own")
    sets = shapes(1600) if small else cifar10(data)
    # The rate of SGD is 0.1 for a batch of 128, by the linear rule for 512; the small form takes batches of 32.
    sgd = {"lr": 0.05 if small else 0.4, "momentum": 0.9, "weight_decay": 5e-4}
    adamw = {"lr": 5e-3 if small else 1e-3, "weight_decay": 0.05}
    return [Task(sets, kind, hypers, small, device) for kind, hypers in (("SGD", sgd), ("AdamW", adamw))]
