"""The image encoder of SAM ViT-B (Kirillov et al. 2023): 89.7 million parameters, one image of 1024x1024.

The configuration is the default of transformers' SamVisionConfig, which is facebook/sam-vit-base, but for the spread of
the random weights: its 1e-10 stands for weights that are loaded, and would give zeros.
"""

import torch
from transformers import SamVisionConfig, SamVisionModel


def image() -> torch.Tensor:
    coarse = torch.randn(1, 3, 32, 32) * torch.rand(1, 3, 1, 1) + torch.randn(1, 3, 1, 1)
    return torch.nn.functional.interpolate(coarse, size=1024) + 0.1 * torch.randn(1, 3, 1024, 1024)


def workload() -> dict:
    torch.manual_seed(0)
    model = SamVisionModel(SamVisionConfig(initializer_range=0.02))
    for name, weight in model.named_parameters():
        if "pos" in name:  # absolute and relative positions start at zero, and would not be tested
            torch.nn.init.normal_(weight, std=0.02)
    return {
        "model": model,
        "inputs": [image() for _ in range(3)],
        "check_inputs": [image()],
        "name": "sam-vit-b",
    }
