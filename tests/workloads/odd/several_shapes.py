"""Batches of several shapes, the last one of a single row: what was fitted to one shape is found out by the next."""

import torch
from torch import nn


def workload():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    shapes = [(4, 32, 32), (4, 24, 40), (7, 32, 32), (1, 17, 33)]
    return {
        "model": model,
        "inputs": [torch.randn(rows, 3, high, wide) for rows, high, wide in shapes],
        "check_inputs": [torch.randn(3, 3, 20, 20)],
    }
