"""A dataclass goes in and a dataclass comes out; one field of each is None."""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor
    weight: torch.Tensor | None = None


@dataclass
class Match:
    score: torch.Tensor
    parts: list[torch.Tensor]
    note: str | None = None


class Matcher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(32, 16)

    def forward(self, pair: Pair) -> Match:
        left, right = self.encode(pair.left), self.encode(pair.right)
        return Match((left * right).sum(-1), [left, right])


def workload():
    torch.manual_seed(0)
    return Matcher(), [Pair(torch.randn(8, 32), torch.randn(8, 32)) for _ in range(3)]
