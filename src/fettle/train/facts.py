"""What techniques need to know of a training workload."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import torch

from fettle.errors import UsageError, first_line
from fettle.techniques import Facts, probe_facts
from fettle.train.workload import TrainingWorkload
from fettle.workload import Workload

MOST_BATCHES = 32
"""The most batches that are looked at: the first ones."""


def training_facts(workload: TrainingWorkload, *, allow_batch: bool = False) -> Facts:
    """Look at a training workload and at this machine. Raises `UsageError` where its optimizer cannot be made."""
    batches = list(itertools.islice(iter(workload.data), MOST_BATCHES))
    loss = workload.loss
    plain = Workload(workload.model, [(batch,) for batch in batches], call=lambda model, batch: loss(model, batch))
    try:
        optimizer = workload.optimizer(list(workload.model.parameters()))
    except Exception as error:
        raise UsageError(f"the optimizer factory raised {first_line(error)}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"the optimizer factory returned a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    loader = workload.data if isinstance(workload.data, torch.utils.data.DataLoader) else None
    return replace(
        probe_facts(plain, allow_batch=allow_batch),
        mode="training",
        train_mode_differs=False,
        custom_call=False,
        calibration_batches=0,
        samples=workload.rows,
        optimizer=type(optimizer).__name__,
        optimizer_levels=tuple(name for name in ("foreach", "fused") if name in optimizer.defaults),
        loader_workers=-1 if loader is None else loader.num_workers,
        iterable_data=loader is not None and isinstance(loader.dataset, torch.utils.data.IterableDataset),
        max_grad_norm=None if workload.max_grad_norm is None else float(workload.max_grad_norm),
    )


def largest_that_fits(fits: Callable[[int], bool], *, most: int = 64) -> int:
    """The largest size from 1 to `most` that fits, 0 where 1 does not.

    `fits` must not become true again once it was false. It is asked about log2(most) sizes twice at most.
    """
    if not fits(1):
        return 0
    good, bad = 1, most + 1
    while good * 2 <= most:
        if not fits(good * 2):
            bad = good * 2
            break
        good *= 2
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good
