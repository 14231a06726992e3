"""Input and output embedding are one parameter: a technique that replaces one must not leave the other behind."""

import torch
from torch import nn


class Language(nn.Module):
    def __init__(self, words: int = 100, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.mix(self.embed(tokens))))


def workload():
    torch.manual_seed(0)
    return Language(), [torch.randint(100, (4, 12)) for _ in range(3)]
