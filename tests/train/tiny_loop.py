"""A small classifier with dropout, norms and blocks, for tests of training."""

import functools
import math
import random

import numpy as np
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 4, stride=4), nn.BatchNorm2d(32), nn.ReLU())
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(32, 4)

    def forward(self, images):
        x = self.stem(images).flatten(2).mean(-1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(x))


def loss(model, batch):
    images, labels = batch
    return nn.functional.cross_entropy(model(images).float(), labels)


def made(seed=0, **changes):
    data = torch.Generator().manual_seed(7)
    labels = torch.randint(4, (64,), generator=data)
    images = torch.randn(64, 3, 8, 8, generator=data) + labels[:, None, None, None]
    torch.manual_seed(seed)
    fields = {
        "model": Net(),
        "optimizer": functools.partial(torch.optim.AdamW, lr=1e-2),
        "loss": loss,
        "data": list(zip(images.split(16), labels.split(16), strict=True)),
        "steps": 8,
        "max_grad_norm": 1.0,
    }
    return {**fields, **changes}


def workload(seed=0):
    return made(seed)


def wide(seed=0):
    fields = made(seed)
    conv = nn.Conv2d(32, 32, 3, padding=1)
    fields["model"].stem.append(conv).append(nn.ReLU())
    fields["model"].drop.p = 0.0
    return fields


def loader(seed=0):
    fields = made(seed)
    images, labels = (torch.cat(part) for part in zip(*fields["data"], strict=True))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=16, shuffle=True)
    return {**fields, "data": data}


def short(seed=0):
    """A loader of two batches, 16 rows and 4."""
    fields = loader(seed)
    rows = torch.utils.data.Subset(fields["data"].dataset, range(20))
    return {**fields, "data": torch.utils.data.DataLoader(rows, batch_size=16, shuffle=True)}


def uneven(seed=0):
    fields = made(seed)
    return {**fields, "data": [*fields["data"], [part[:8] for part in fields["data"][0]]]}


def remembers(seed=0):
    """Data that go on where their last reader ended, noise of other generators, a metric that leaves eval mode."""
    fields = loader(seed)
    order = torch.Generator().manual_seed(0)
    data = torch.utils.data.DataLoader(fields["data"].dataset, batch_size=16, shuffle=True, generator=order)

    def noisy(model, batch):
        return loss(model, (batch[0] * random.uniform(0.5, 1.5) * np.random.uniform(0.5, 1.5), batch[1]))

    return {**fields, "data": data, "loss": noisy, "metric": lambda model: float(model.eval().training)}


def explodes(seed=0):
    return made(seed, optimizer=functools.partial(torch.optim.SGD, lr=1e30), max_grad_norm=None)


def diverges(seed=0):
    return made(seed, loss=lambda model, batch: loss(model, batch) * (math.inf if seed in (2, 4) else 1.0))


def mostly_diverges(seed=0):
    return made(seed, loss=lambda model, batch: loss(model, batch) * (math.inf if seed > 1 else 1.0))


def raises(seed=0):
    def bad(model, batch):
        raise ValueError("no such label")

    return made(seed, loss=bad)


def vector(seed=0):
    return made(seed, loss=lambda model, batch: model(batch[0]))


def ignores_seed():
    torch.manual_seed(0)
    fields = made(0)
    fields["model"].drop.p = 0.0
    return {**fields, "data": fields["data"][:1]}
