"""ViT-B/16 (Dosovitskiy et al. 2020) for 1000 classes: 86.6 million parameters, 8 images of 224x224.

The configuration is the default of transformers' ViTConfig, which is google/vit-base-patch16-224. Random weights.
"""

import torch
from transformers import ViTConfig, ViTForImageClassification


def images(batch: int) -> torch.Tensor:
    """Coarse noise of varied contrast: unlike white noise, it keeps the images different after pooling."""
    coarse = torch.randn(batch, 3, 14, 14) * torch.rand(batch, 3, 1, 1) + torch.randn(batch, 3, 1, 1)
    return torch.nn.functional.interpolate(coarse, size=224) + 0.1 * torch.randn(batch, 3, 224, 224)


def workload() -> dict:
    torch.manual_seed(0)
    return {
        "model": ViTForImageClassification(ViTConfig(num_labels=1000)),
        "inputs": [images(8) for _ in range(4)],
        "check_inputs": [images(8) for _ in range(2)],
        "name": "vit-b16",
    }
