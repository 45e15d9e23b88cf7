"""Models for the tests of compress_weights, and what they do with them."""

import copy

import torch
from torch import nn
from torch.nn import functional

from scruple.torch import coded
from support import DEVICE, FP32, st, tensor

LPMM = dict(recipe="lpmm", momentum=0.9)


class Odd(nn.Module):
    """Weights that are used twice, by views, in a product of three, and by hand."""

    def __init__(self):
        super().__init__()
        self.matrix, self.table = nn.Parameter(torch.randn(80, 80) / 9), nn.Parameter(torch.randn(90, 80))

    def forward(self, x):
        x = functional.linear(torch.tanh(x @ self.matrix), self.matrix.t())
        x = x + torch.einsum("bi,ij->bj", x, self.matrix[:, :80].reshape(80, 80))
        rows = functional.embedding(torch.arange(len(x), device=x.device), self.table)
        return (x * rows) @ self.table.transpose(0, 1)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(100, 64), nn.Linear(64, 100, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding((x.abs().sum(-1) * 10).long() % 100))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x):
        x = x.view(2, -1, 64)
        return self.attention(x, x, x)[0]


class Split(nn.Module):
    """Attention to something else, whose weight torch cuts in two; views of several results."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.both = nn.Linear(64, 128, bias=False)

    def forward(self, x):
        x = x.view(2, -1, 64)
        x = self.attention(x, x.flip(1), x.flip(1))[0]
        up, gate = self.both.weight.chunk(2)
        first, *_ = self.both.weight.unbind()
        return functional.linear(x, up).sigmoid() * functional.linear(x, gate) + first


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.LSTM(64, 64, 2)

    def forward(self, x):
        return self.layers(x.view(3, -1, 64))[0]


def image(x):
    return x.view(-1, 8, 4, 4)


class Image(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(image(x))


# A model and the width of its inputs.
MODELS = {
    "linear": lambda: (nn.Sequential(nn.Linear(96, 80), nn.ReLU(), nn.Linear(80, 64)), 96),
    "convolution": lambda: (Image(nn.Conv2d(8, 96, 3), nn.ReLU(), nn.Conv2d(96, 20, 2)), 128),
    "grouped": lambda: (Image(nn.Conv2d(8, 64, 1), nn.Conv2d(64, 128, 3, groups=2, padding=1)), 128),
    "transposed": lambda: (Image(nn.ConvTranspose2d(8, 64, 3), nn.ConvTranspose2d(64, 8, 3, groups=1)), 128),
    "tied": lambda: (Tied(), 64),
    "attention": lambda: (Attention(), 64),
    "split": lambda: (Split(), 64),
    "recurrent": lambda: (Recurrent(), 64),
    "odd": lambda: (Odd(), 80),
}


def made(name="linear", dtype=FP32):
    torch.manual_seed(3)
    model, width = MODELS[name]()
    return model.to(DEVICE, dtype), tensor(12, width, seed=5).to(dtype)


def compressed(name="linear", kind=st.SGD, dtype=FP32, how=None, **options):
    model, x = made(name, dtype)
    opt = kind(model.parameters(), **{"lr": 0.02, **(LPMM if kind is st.SGD else {}), **options})
    return model, x, opt, st.compress_weights(model, opt, **(how or {}))


def loss_of(model, x):
    return model(x).float().square().mean()


def train(model, x, opt, steps, parts=1):
    for _ in range(steps):
        for i in range(parts):
            loss_of(model, x[i::parts]).backward()
        opt.step()
        opt.zero_grad()


def coded_of(model):
    return [p for p in model.parameters() if coded.form_of(p)]


def plain_twin(model):
    """An ordinary model with the decoded weights."""
    twin = copy.deepcopy(model)
    assert not coded_of(twin)
    return twin


def everything(model, opt):
    return copy.deepcopy([model.state_dict(), opt.state_dict()])
