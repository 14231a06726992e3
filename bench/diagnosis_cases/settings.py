"""Programs that are right and run under the wrong settings; training steps.

Each case is a factory `name()` and its mended twin `name_fixed()`; CASES gives the cause and what was planted.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import nn

_CORES = len(os.sched_getaffinity(0))


class Step:
    """Call it with a batch for one training step."""

    def __init__(self, width=128, depth=8, before=None, after=None, optimizer=None) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.net, self.before, self.after = nn.Sequential(*layers), before, after
        self.optimizer = (optimizer or torch.optim.SGD)(self.net.parameters(), lr=0.01)

    def __call__(self, x):
        if self.before:
            self.before()
        with torch.enable_grad():
            self.optimizer.zero_grad()
            loss = self.net(x).square().mean()
            loss.backward()
            self.optimizer.step()
        if self.after:
            self.after(loss)


def _batch():
    return [torch.randn(32, 128) for _ in range(3)]


def too_many_threads(fixed=False):
    return Step(before=lambda: torch.set_num_threads(_CORES if fixed else 8 * _CORES)), _batch()


def one_thread(fixed=False):
    step = Step(1024, 2, before=lambda: torch.set_num_threads(_CORES if fixed else 1))
    return step, [torch.randn(256, 1024)]


def anomaly_detection(fixed=False):
    return Step(before=lambda: torch.autograd.set_detect_anomaly(not fixed)), _batch()


def one_tensor_at_a_time(fixed=False):
    def adam(parameters, lr):
        return (
            torch.optim.AdamW(parameters, lr=lr, fused=True)
            if fixed
            else torch.optim.AdamW(parameters, lr=lr, foreach=False)
        )

    return Step(64, 40, optimizer=adam), [torch.randn(8, 64)]


def graph_kept_alive(fixed=False):
    losses = []

    def keep(loss):
        losses.append(loss.detach() if fixed else loss)

    class Kept(Step):
        def __call__(self, x):
            with torch.enable_grad():
                loss = self.net(x).square().mean()
            keep(loss)

    return Kept(256, 4), [torch.randn(256, 256)]


def grad_in_inference(fixed=False):
    net = Step(64, 30).net.eval()
    if fixed:
        return torch.inference_mode()(net.__call__), [torch.randn(4, 64)]

    def model(x):
        with torch.enable_grad():
            return net(x)

    return model, [torch.randn(4, 64)]


def train_mode_in_inference(fixed=False):
    net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Dropout(0.5))))
    return net.train(not fixed), [torch.randn(256, 256)]


def model_built_every_call(fixed=False):
    kept = Step(256, 4).net.eval()

    def model(x):
        net = kept if fixed else Step(256, 4).net.eval()
        with torch.no_grad():
            return net(x)

    return model, [torch.randn(8, 256)]


def clip_norm_by_item(fixed=False):
    step = Step(64, 20)

    def clip(loss):
        if fixed:
            torch.nn.utils.clip_grad_norm_(step.net.parameters(), 1.0)
            return
        total = sum(parameter.grad.norm().item() ** 2 for parameter in step.net.parameters()) ** 0.5
        for parameter in step.net.parameters():
            parameter.grad.mul_(min(1.0, 1.0 / (total + 1e-6)))

    step.after = clip
    return step, [torch.randn(8, 64)]


CASES = {
    "too_many_threads": ("threads", "eight threads for each core"),
    "one_thread": ("threads", "one thread for a large matrix product on several cores"),
    "anomaly_detection": ("debug-setting", "anomaly detection left on"),
    "one_tensor_at_a_time": ("optimizer", "AdamW with foreach=False on 80 small tensors"),
    "graph_kept_alive": ("leak", "losses kept with their graphs"),
    "grad_in_inference": ("grad", "inference with gradients on"),
    "train_mode_in_inference": ("train-mode", "dropout on in inference"),
    "model_built_every_call": ("start-up", "the model is built in every call"),
    "clip_norm_by_item": ("sync", "gradient norms read one by one"),
}


globals().update({f"{name}_fixed": functools.partial(globals()[name], fixed=True) for name in CASES})
