"""A buffer changes in forward, in eval mode too: an answer depends on the calls before it."""

import torch
from torch import nn


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean.lerp_(x.mean(0), 0.1)
        return self.linear(x - self.mean)


def workload():
    torch.manual_seed(0)
    return Centred(), [torch.randn(8, 16) + 1 for _ in range(3)]
