"""The models that all servers serve."""

import itertools
import sys

import torch

WIDTHS = {"tiny": [64, 64, 8], "middle": [64, 4096, 4096, 4096, 8], "wide": [64, 4096, 4096, 4096, 4096, 4096, 8]}
ROWS = 8


def build(model: str) -> torch.nn.Module:
    """The model with the same random weights everywhere, one thread."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    widths, layers = WIDTHS[model], []
    for before, after in itertools.pairwise(widths):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1]).eval()


def asked() -> tuple[str, int]:
    """Model and port from the command line."""
    return sys.argv[1], int(sys.argv[2])
