"""A model of two inputs in a module of its own: the processes that build it import nothing else of the tests."""

import torch
from torch import nn


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.table(ids) * mask[..., None]


def masked() -> tuple[Masked, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Masked().eval(), {"ids": torch.randint(50, (4, 8)), "mask": torch.ones(4, 8)}
