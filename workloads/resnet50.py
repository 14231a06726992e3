"""ResNet-50 (He et al. 2015) for 1000 classes: 25.6 million parameters, 8 images of 224x224.

The configuration is the default of transformers' ResNetConfig, which is microsoft/resnet-50. Random weights; a few
passes in train mode give BatchNorm the statistics without which eval mode would explode.
"""

import torch
from transformers import ResNetConfig, ResNetForImageClassification
from transformers.models.resnet.modeling_resnet import ResNetBottleNeckLayer


def images(batch: int) -> torch.Tensor:
    """Coarse noise of varied contrast: unlike white noise, it keeps the images different after pooling."""
    coarse = torch.randn(batch, 3, 14, 14) * torch.rand(batch, 3, 1, 1) + torch.randn(batch, 3, 1, 1)
    return torch.nn.functional.interpolate(coarse, size=224) + 0.1 * torch.randn(batch, 3, 224, 224)


def workload() -> dict:
    torch.manual_seed(0)
    model = ResNetForImageClassification(ResNetConfig(num_labels=1000)).train()
    for block in model.resnet.encoder.modules():
        if isinstance(block, ResNetBottleNeckLayer):  # small, as training leaves it: else rounding errors pile up
            torch.nn.init.constant_(block.layer[-1].normalization.weight, 0.2)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the order of a sum depends on the threads; the statistics must not
    with torch.no_grad():
        for norm in norms:
            norm.momentum = None  # a plain average over the passes
        for _ in range(3):
            model(images(8))
        for norm in norms:
            norm.momentum = 0.1
    torch.set_num_threads(threads)
    return {
        "model": model,
        "inputs": [images(8) for _ in range(4)],
        "check_inputs": [images(8) for _ in range(2)],
        "name": "resnet50",
    }
