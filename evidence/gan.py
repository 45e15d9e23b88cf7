"""Generated images: a DCGAN (Radford et al., 1511.06434) on handwritten digits, as Lewandowski and Kosson (2309.12381)
trained it, with Adam at the paper's rate and betas.

One step moves both networks: the generator and the discriminator take their gradients at the same weights and are
stepped together, one step each. The usual loop steps the discriminator first; this one needs one backward pass and one
optimizer for both.

--data DIR: MNIST, the four idx files, gzip. --small: four kinds of shapes, drawn here, and two tiny networks.
"""

import gzip
import pathlib

import gather
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

FILES = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
WANTED = f"--data wants MNIST, the files {', '.join(FILES)}"
NOISE = 100


class Gan(nn.Module):
    """`widths` of the layers between the image and 4 x 4 pixels, each of which halves it."""

    def __init__(self, widths):
        super().__init__()
        layers = [nn.Conv2d(1, widths[0], 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
        for a, b in zip(widths, widths[1:]):
            # Running averages are for use after training, where nobody asks a discriminator.
            norm = nn.BatchNorm2d(b, track_running_stats=False)
            layers += [nn.Conv2d(a, b, 4, 2, 1, bias=False), norm, nn.LeakyReLU(0.2)]
        self.discriminator = nn.Sequential(*layers, nn.Conv2d(widths[-1], 1, 4, bias=False), nn.Flatten(0))
        widths = widths[::-1]
        layers = [nn.ConvTranspose2d(NOISE, widths[0], 4, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
        for a, b in zip(widths, widths[1:]):
            layers += [nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        self.generator = nn.Sequential(*layers, nn.ConvTranspose2d(widths[-1], 1, 4, 2, 1, bias=False), nn.Tanh())
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
                nn.init.normal_(module.weight, 0, 0.02)
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.weight, 1, 0.02)

    def fakes(self, noise):
        return self.generator(noise.to(self.generator[0].weight.dtype)[:, :, None, None])

    def forward(self, real, noise):
        """The discriminator's scores of real images, of fakes, and of fakes as the generator sees them."""
        fakes = self.fakes(noise)
        # Its weights as constants: copies, since a row that releases gradients steps them during the backward pass.
        constant = {name: p.detach().clone() for name, p in self.discriminator.named_parameters()}
        return (
            self.discriminator(real.to(fakes.dtype)),
            self.discriminator(fakes.detach()),
            functional_call(self.discriminator, constant, fakes),
        )


class Classifier(nn.Module):
    """Whose last hidden layer measures images."""

    def __init__(self, edge, classes):
        super().__init__()
        first, second = nn.Conv2d(1, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, 2, 1)
        hidden = nn.Linear(32 * (edge // 4) ** 2, 64)
        self.body = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), hidden, nn.ReLU())
        self.head = nn.Linear(64, classes)


def mnist(folder):
    """(pixels, labels) to train with and to test with, padded to 32 x 32."""
    paths = [pathlib.Path(folder) / name for name in FILES]
    if missing := [path.name for path in paths if not path.exists()]:
        raise SystemExit(f"{folder} has no {', '.join(missing)}: {WANTED}")
    images, labels, test_images, test_labels = (gzip.decompress(path.read_bytes()) for path in paths)
    return [
        (
            functional.pad(torch.frombuffer(bytearray(pixels[16:]), dtype=torch.uint8).view(-1, 1, 28, 28), (2, 2, 2, 2)),
            torch.frombuffer(bytearray(kinds[8:]), dtype=torch.uint8).long(),
        )
        for pixels, kinds in ((images, labels), (test_images, test_labels))
    ]


def shapes(count):
    """Rings, boxes, crosses and bars, white on black, 16 x 16."""
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(4, (count,), generator=generator)
    places, size = torch.arange(16.0), 4 + 2 * torch.rand(count, 1, 1, generator=generator)
    middle = 6.5 + 2 * torch.rand(2, count, 1, 1, generator=generator)
    x, y = (places.view(1, 1, 16) - middle[0]).abs() / size, (places.view(1, 16, 1) - middle[1]).abs() / size
    far, near, radius = torch.maximum(x, y), torch.minimum(x, y), torch.hypot(x, y)
    ring, box = (radius < 1.1) & (radius > 0.7), (far < 1) & (far > 0.65)
    kinds = torch.stack([ring, box, (far < 1) & (near < 0.25), (y < 1) & (x < 0.3)])
    pixels = 255 * kinds[labels, torch.arange(count)].unsqueeze(1).byte()
    cut = count - count // 4
    return [(pixels[:cut], labels[:cut]), (pixels[cut:], labels[cut:])]


def scaled(pixels):
    """From -1 to 1, as tanh gives them."""
    return pixels.float() / 127.5 - 1


def learned(pixels, labels, steps):
    """A classifier of these images, always the same one: what it is trained with does not depend on a run."""
    with torch.random.fork_rng(), torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
        torch.manual_seed(7)
        model = Classifier(pixels.shape[-1], int(labels.max()) + 1).to(pixels.device)
        opt = torch.optim.Adam(model.parameters(), lr=2e-3)
        for _ in range(steps):
            chosen = torch.randint(len(labels), (256,)).to(pixels.device)
            functional.cross_entropy(model.head(model.body(scaled(pixels[chosen]))), labels[chosen]).backward()
            opt.step()
            opt.zero_grad()
    return model.requires_grad_(False)


def frechet(a, b):
    """Between normal distributions with the means and covariances of these rows (Heusel et al., 1706.08500), as a share
    of b's variance: one image, over and over, that has b's mean would be at 1."""
    a, b = a.double().cpu(), b.double().cpu()
    ours, theirs = a.T.cov(), b.T.cov()
    values, vectors = torch.linalg.eigh(ours)
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    shared = torch.linalg.eigvalsh(root @ theirs @ root).clamp_min(0).sqrt().sum()
    distance = (a.mean(0) - b.mean(0)).square().sum() + ours.trace() + theirs.trace() - 2 * shared
    return float(distance / theirs.trace())


def sheet(images):
    """4 x 8 images as SVG, in three greys on black, a run of equal pixels at a time."""
    edge = images.shape[-1]
    pixels = images.view(4, 8, edge, edge).transpose(1, 2).reshape(4 * edge, 8 * edge)
    runs = [[], [], [], []]
    for y, line in enumerate(((pixels + 1) * 2).floor().clamp(0, 3).int().tolist()):
        start = 0
        for x, level in enumerate(line):
            if x + 1 == len(line) or line[x + 1] != level:
                runs[level].append(f"M{start} {y}h{x + 1 - start}v1H{start}z")
                start = x + 1
    size = f"0 0 {8 * edge} {4 * edge}"
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" shape-rendering="crispEdges">']
    out.append('<path d="M0 0h9999v9999H0z"/>')
    out += [f'<path fill="{fill}" d="{"".join(runs[i])}"/>' for i, fill in ((1, "#666"), (2, "#aaa"), (3, "#fff"))]
    return "\n".join([*out, "</svg>", ""])


class Task:
    metric, optimizer, autocast = "Frechet distance", "Adam", True

    def __init__(self, data, small, device):
        self.name, self.device, self.small = "gan, small" if small else "gan, MNIST", device, small
        self.hypers = {"lr": 4e-3 if small else 2e-4, "betas": (0.5, 0.999)}
        self.steps, self.size, self.samples = (160, 32, 1000) if small else (4000, 128, 10000)
        sets = shapes(2000) if small else mnist(data)
        (self.pixels, labels), (pixels, _) = ([part.to(device) for part in parts] for parts in sets)
        self.classifier = learned(self.pixels, labels, 60 if small else 1000)
        self.noise = torch.randn(self.samples, NOISE, generator=torch.Generator().manual_seed(7)).to(device)
        self.features = self.classifier.body(scaled(pixels))

    def rate(self, step):
        return 1.0

    def model(self):
        return Gan((16, 32) if self.small else (64, 128, 256))

    def batch(self, generator):
        chosen = torch.randint(len(self.pixels), (self.size,), generator=generator)
        noise = torch.randn(self.size, NOISE, generator=generator)
        return scaled(self.pixels[chosen.to(self.device)]), noise.to(self.device, non_blocking=True)

    def loss(self, model, batch):
        """The discriminator's and the generator's, both -log of the chance of what they want."""
        real, fake, wanted = (scores.float() for scores in model(*batch))
        return sum(functional.softplus(x).mean() for x in (-real, fake, -wanted))

    @torch.no_grad()
    def drawn(self, model, noise):
        model.eval()
        images = torch.cat([model.fakes(part).float() for part in noise.split(1000)])
        model.train()
        return images

    @torch.no_grad()
    def evaluate(self, model):
        images = self.drawn(model, self.noise)
        with torch.autocast(self.device.type, enabled=False):  # the same measure for every row
            features = self.classifier.body(images)
            sure = self.classifier.head(features).softmax(1).amax(1) > 0.9
        distance = frechet(features, self.features)
        return {"Frechet distance": distance, "surely a digit, %": 100 * float(sure.float().mean())}

    def finished(self, model, row, seed):
        if seed == 0 and not self.small and row.name in (gather.REFERENCE, "scruple"):
            path = gather.HERE / "pictures" / f"gan-{row.name.replace(' ', '-')}.svg"
            path.write_text(sheet(self.drawn(model, self.noise[:32])))


def tasks(data, small, device):
    if not small and not data:
        raise SystemExit(f"gan needs data: {WANTED}; or --small, which draws its own")
    return [Task(data, small, device)]
