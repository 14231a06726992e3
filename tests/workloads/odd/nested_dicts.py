"""The output is nested: dicts, a list, a named tuple, a number, a text and None beside the tensors."""

from typing import NamedTuple

import torch
from torch import nn


class Box(NamedTuple):
    centre: torch.Tensor
    size: torch.Tensor


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.box, self.label = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> dict:
        hidden = torch.relu(self.shared(x))
        box = self.box(hidden)
        return {
            "heads": {"box": Box(box[:, :2], box[:, 2:]), "label": {"logits": self.label(hidden)}},
            "levels": [hidden, {0: hidden.mean()}],
            "rows": len(x),
            "note": "as is",
            "loss": None,
        }


def workload():
    torch.manual_seed(0)
    return Detector(), [torch.randn(8, 16) for _ in range(3)]
