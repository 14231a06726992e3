"""What techniques need to know of a training workload."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.modules import batchnorm
from torch.nn.utils.stateless import _reparametrize_module

from fettle.techniques import Facts, probe_facts, repeated_blocks
from fettle.train.workload import TrainingWorkload, settings_of
from fettle.workload import Workload

MOST_BATCHES = 32
"""The most batches that are looked at: the first ones."""


def training_facts(workload: TrainingWorkload, *, allow_batch: bool = False) -> Facts:
    """Look at a training workload and at this machine. Raises `UsageError` where its optimizer cannot be made."""
    batches = list(itertools.islice(iter(workload.data), MOST_BATCHES))
    loss = workload.loss
    plain = Workload(workload.model, [(batch,) for batch in batches], call=lambda model, batch: loss(model, batch))
    optimizer = workload.make_optimizer(workload.trained)
    loader = workload.data if isinstance(workload.data, torch.utils.data.DataLoader) else None
    return replace(
        probe_facts(plain, allow_batch=allow_batch),
        mode="training",
        train_mode_differs=False,
        custom_call=False,
        calibration_batches=0,
        samples=workload.rows,
        normalises_rows=any(isinstance(module, batchnorm._BatchNorm) for module in workload.model.modules()),
        optimizer=type(optimizer).__name__,
        optimizer_levels=tuple(name for name in ("foreach", "fused") if name in optimizer.defaults),
        loader_workers=-1 if loader is None else loader.num_workers,
        iterable_data=loader is not None and isinstance(loader.dataset, torch.utils.data.IterableDataset),
        max_grad_norm=None if workload.max_grad_norm is None else float(workload.max_grad_norm),
        **_groups_others(workload, optimizer),
    )


def untrained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Up to 4096 values of each buffer and untrained parameter by name, but for those of norms, whose running averages
    are looked after."""
    norms = (module for module in model.modules() if isinstance(module, batchnorm._NormBase))
    theirs = {id(buffer) for norm in norms for buffer in norm.buffers()}
    return {
        name: tensor.detach().reshape(-1)[:: max(1, -(-tensor.numel() // 4096))].clone()
        for name, tensor in itertools.chain(model.named_buffers(), model.named_parameters())
        if not tensor.requires_grad and id(tensor) not in theirs
        and tensor.layout == torch.strided and not torch.nn.parameter.is_lazy(tensor)
    }  # fmt: skip


def moved_facts(model: torch.nn.Module, before: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Those fields of `Facts` that show in what of `untrained` a step has changed."""
    after = untrained(model)
    moved = dict.fromkeys(name for name, values in before.items() if not _same(values, after.get(name, values)))
    buffers = model.named_buffers()
    in_blocks = {id(buffer) for block in repeated_blocks(model) for buffer in block.buffers()}
    return {
        "moving": next((name for name in moved if after[name].is_floating_point()), ""),
        "moving_in_block": next((name for name, buffer in buffers if name in moved and id(buffer) in in_blocks), ""),
    }


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they are equal. One of another size was made anew, not moved."""
    return one.shape != other.shape or torch.equal(one, other)


def _groups_others(workload: TrainingWorkload, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Whether the factory makes the groups of `optimizer` of other parameters, too: given beside the model's own, as
    float32 masters are, and in their place, as shards are."""
    trained = workload.trained
    others = [torch.nn.Parameter(parameter.detach()) for parameter in trained]  # in the same memory

    def groups(made: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> list[Any]:
        place = {id(parameter): number for number, parameter in enumerate(parameters)}
        return [([place.get(id(p)) for p in group["params"]], settings_of(group)) for group in made.param_groups]

    def alike(parameters: Mapping[str, torch.nn.Parameter]) -> bool:
        try:
            with _reparametrize_module(workload.model, dict(parameters), tie_weights=True):
                return groups(workload.optimizer(others), others) == groups(optimizer, trained)
        except Exception:
            return False

    names = [name for name, parameter in workload.model.named_parameters() if parameter.requires_grad]
    return {"groups_masters": alike({}), "groups_shards": alike(dict(zip(names, others, strict=True)))}


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
