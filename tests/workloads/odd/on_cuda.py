"""A model and batches that live on a CUDA device. Without one the factory raises, as a user's would."""

import torch
from torch import nn


def workload():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).cuda()
    return model, [torch.randn(8, 64).cuda() for _ in range(3)]
