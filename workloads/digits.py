"""A small image classifier, trained on scikit-learn's handwritten digits when it is built (a few seconds).

Own architecture: five 3x3 convolutions with BatchNorm and a linear layer, 0.07 million parameters. The 8x8 digits are
upsampled to 24x24, 128 a call. Two thirds train, one third tests; the metric is the accuracy on the test third, of
which the check batch is a part.
"""

import os
from itertools import pairwise
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

# Trained once: every worker process builds the workload again, and four seconds each would add up.
KEPT = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fettle" / f"digits-24-{torch.__version__}.pt"


def network() -> nn.Sequential:
    widths, layers = [1, 16, 32, 32, 64, 64], []
    for position, (before, after) in enumerate(pairwise(widths)):
        stride = 2 if position in (1, 3) else 1
        layers += [nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int = 5) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    steps = epochs * -(-len(images) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
            schedule.step()


def workload() -> dict:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # rounding depends on the number of threads; images and weights must not
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    images = nn.functional.interpolate(images, size=24, mode="bilinear")
    split = train_test_split(images, torch.tensor(digits), test_size=1 / 3, random_state=0, stratify=digits)
    train_images, test_images, train_labels, test_labels = split

    torch.manual_seed(0)
    model = network()
    if KEPT.exists():
        model.load_state_dict(torch.load(KEPT, weights_only=True))
    else:
        train(model, train_images, train_labels)
        KEPT.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), KEPT.with_suffix(f".{os.getpid()}"))
        os.replace(KEPT.with_suffix(f".{os.getpid()}"), KEPT)  # whole: other processes may be reading it
    torch.set_num_threads(threads)

    def accuracy(model) -> float:
        with torch.no_grad():
            right = sum((model(x).argmax(-1) == y).sum().item() for x, y in batches(test_images, test_labels))
        return right / (len(test_labels) // 128 * 128)

    def batches(x, y):  # whole batches only, so that a compiled model sees one shape
        return [pair for pair in zip(x.split(128), y.split(128), strict=True) if len(pair[1]) == 128]

    return {
        "model": model,
        "inputs": list(train_images.split(128)[:4]),
        "check_inputs": list(test_images.split(128)[:2]),
        "metric": accuracy,
        "name": "digits",
    }
