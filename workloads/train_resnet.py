"""Training a ResNet-18 (He et al. 2015, transformers' ResNetConfig) on scikit-learn's handwritten digits.

The 8 x 8 digits are upsampled to 64 x 64, 64 a batch, from a DataLoader that shuffles. SGD with momentum.
"""

import functools

import torch
from sklearn.datasets import load_digits
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification


def loss(model, batch):
    images, labels = batch
    return nn.functional.cross_entropy(model(images).logits, labels)


def workload(seed: int = 0) -> dict:
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    images = nn.functional.interpolate(images, size=64)
    torch.manual_seed(seed)
    config = ResNetConfig(
        num_channels=1, embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic",
        num_labels=10,
    )  # fmt: skip
    data = torch.utils.data.TensorDataset(images, torch.tensor(digits))
    return {
        "model": ResNetForImageClassification(config),
        "optimizer": functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=5e-4),
        "loss": loss,
        "data": torch.utils.data.DataLoader(data, batch_size=64, shuffle=True, drop_last=True),
        "steps": 12,
        "name": "train_resnet",
    }
