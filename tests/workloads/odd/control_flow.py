"""The number of steps depends on the data: a whole-graph compiler or an exporter must give up or break the graph."""

import torch
from torch import nn


class Settle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(32, 32, bias=False)
        nn.init.orthogonal_(self.step.weight)  # keeps the length, so that each step halves it and the loop ends

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while x.norm() > 1:
            x = 0.5 * torch.tanh(self.step(x))
        return x if x.sum() > 0 else -x


def workload():
    torch.manual_seed(0)
    return Settle(), [scale * torch.randn(8, 32) for scale in (0.1, 1.0, 10.0)]
