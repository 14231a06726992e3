"""ConvNeXt-tiny (Liu et al. 2022) for 1000 classes: 28.6 million parameters, 8 images of 224x224.

The configuration is the default of transformers' ConvNextConfig, which is facebook/convnext-tiny-224, but for the
layer scale. Random weights.
"""

import torch
from transformers import ConvNextConfig, ConvNextForImageClassification


def images(batch: int) -> torch.Tensor:
    """Coarse noise of varied contrast: unlike white noise, it keeps the images different after pooling."""
    coarse = torch.randn(batch, 3, 14, 14) * torch.rand(batch, 3, 1, 1) + torch.randn(batch, 3, 1, 1)
    return torch.nn.functional.interpolate(coarse, size=224) + 0.1 * torch.randn(batch, 3, 224, 224)


def workload() -> dict:
    torch.manual_seed(0)
    # training starts at a layer scale of 1e-6, at which a block does nothing and no error in it would be seen
    config = ConvNextConfig(num_labels=1000, layer_scale_init_value=1.0)
    return {
        "model": ConvNextForImageClassification(config),
        "inputs": [images(8) for _ in range(4)],
        "check_inputs": [images(8) for _ in range(2)],
        "name": "convnext-tiny",
    }
