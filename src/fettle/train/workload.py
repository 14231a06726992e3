"""The training workload: a model, an optimizer factory, a loss, data, and how many steps judge a recipe.

A factory builds it, as it builds a `fettle.Workload`, so that a fresh process can build it again. A factory that
takes an argument ``seed`` is called with the seed: other seeds show how far losses spread by themselves.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from operator import length_hint
from pathlib import Path
from typing import Any

import torch

from fettle.errors import UsageError, first_line, place, type_text
from fettle.structure import ADDRESS
from fettle.workload import (
    AUTO,
    Batch,
    Target,
    Workload,
    check_mode,
    find_target,
    fingerprint,
    rows_of,
    target_from_objects,
)

FEWEST_STEPS = 4
"""Fewer losses than this make no curve."""


@dataclass(frozen=True)
class TrainingWorkload:
    """A training loop to be made fast, with everything that is needed to measure and to judge it.

    One step is: ``loss(model, batch)``, ``backward``, clipping where asked for, ``optimizer.step()``, ``zero_grad()``.
    """

    model: torch.nn.Module
    """With the weights that training starts from, in float32, on the device it trains on."""

    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
    """``optimizer(parameters)`` makes the optimizer, for example ``functools.partial(torch.optim.AdamW, lr=3e-4)``."""

    loss: Callable[[Any, Batch], torch.Tensor]
    """``loss(model, batch)`` runs the forward pass of one batch and returns its mean loss, a tensor of one number."""

    data: Iterable[Batch]
    """Batches, any pytree each: a list or a DataLoader, gone through again and again. An iterator will not do."""

    steps: int = 20
    """How many steps the loss curves have that judge a recipe."""

    metric: Callable[[torch.nn.Module], float] | None = None
    """The user's own measure of quality after these steps, higher is better: given the model, return a number."""

    max_grad_norm: float | None = None
    """Gradients are clipped to this total norm before each optimizer step. None: they are not."""

    name: str = ""
    """Short name, shown in reports. Empty: taken from the target."""

    samples: int | None = None
    """Rows in one batch, for throughput. None: the first dimension of the first tensor of the first batch."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, torch.nn.Module):
            raise UsageError(f"the training workload's model is {type_text(self.model)}, not an nn.Module")
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise UsageError("the training workload's model has no parameter that requires a gradient")
        if isinstance(self.optimizer, torch.optim.Optimizer):
            raise UsageError(
                "the training workload's optimizer is an optimizer already: give what makes one from parameters, "
                "for example functools.partial(torch.optim.AdamW, lr=1e-3)"
            )
        for name in ("optimizer", "loss"):
            if not callable(value := getattr(self, name)):
                raise UsageError(f"the training workload's {name} is {type_text(value)}, which cannot be called")
        if self.metric is not None and not callable(self.metric):
            raise UsageError(f"the training workload's metric is {type_text(self.metric)}, not a function")
        self._check_data()
        if isinstance(self.steps, bool) or not isinstance(self.steps, Integral) or self.steps < FEWEST_STEPS:
            raise UsageError(f"the training workload's steps are {self.steps!r}: give at least {FEWEST_STEPS}")
        norm = self.max_grad_norm
        if norm is not None and (isinstance(norm, bool) or not isinstance(norm, Real) or not norm > 0):
            raise UsageError(f"the training workload's max_grad_norm is {norm!r}: give a number above 0, or None")
        if self.samples is not None and (not isinstance(self.samples, Integral) or self.samples < 1):
            raise UsageError(f"the training workload's samples are {self.samples!r}: give the rows in one batch")
        if self.samples is not None:
            object.__setattr__(self, "samples", int(self.samples))  # NumPy's own numbers are told to no other process

    def _check_data(self) -> None:
        data = self.data
        if isinstance(data, (str, bytes, Mapping)) or not isinstance(data, Iterable):
            raise UsageError("the training workload's data must be a list of batches or a DataLoader")
        if isinstance(data, Iterator):
            raise UsageError("the training workload's data is an iterator, which ends: give a list or a DataLoader")
        if length_hint(data, 1) == 0:  # a DataLoader over an iterable dataset does not know it
            raise UsageError("the training workload's data is empty: give at least one batch")

    @property
    def first(self) -> Batch:
        """The first batch; raises `UsageError` when there is none."""
        for batch in self.data:
            return batch
        raise UsageError("the training workload's data is empty: give at least one batch")

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that require a gradient, which the optimizer is given."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def make_optimizer(self, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of these parameters. Raises `UsageError` where the factory makes none."""
        try:
            made = self.optimizer(parameters)
        except Exception as error:
            raise UsageError(f"the optimizer factory raised {first_line(error)}{place(error)}") from error
        if not isinstance(made, torch.optim.Optimizer):
            raise UsageError(f"the optimizer factory returned {type_text(made)}, not a torch.optim.Optimizer")
        return made

    @property
    def rows(self) -> int:
        """Rows in one batch."""
        return self.samples or rows_of(self.first) or 1

    def stream(self, seed: int = 0) -> Iterator[Batch]:
        """Batches without end: `data` again and again, a list in another order for each seed but 0.

        A DataLoader shuffles by torch's own seed, which the caller sets.
        """
        order = random.Random(seed)
        while True:
            batches: Iterable[Batch] = self.data
            if seed and isinstance(batches, Sequence):
                batches = list(batches)
                order.shuffle(batches)
            yield from batches


def training_workload_from(made: object, where: str) -> TrainingWorkload:
    """A training workload from what a factory returned: a `TrainingWorkload` or a dict of its fields.

    The dict lets a workload file do without importing fettle. Raises `UsageError` for anything else.
    """
    if isinstance(made, TrainingWorkload):
        return made
    names = {item.name for item in dataclasses.fields(TrainingWorkload)}
    if isinstance(made, dict) and {"model", "optimizer", "loss", "data"} <= made.keys() <= names:
        return TrainingWorkload(**made)
    kind = "a workload for inference" if isinstance(made, Workload) else type_text(made)
    if isinstance(made, dict):
        lacks = sorted({"model", "optimizer", "loss", "data"} - made.keys())
        odd = sorted(map(str, made.keys() - names))
        kind = f"a dict without {', '.join(lacks)}" if lacks else f"a dict with the unknown key {odd[0]}"
    raise UsageError(
        f"the factory {where} returned {kind}: training needs fettle.TrainingWorkload(model, optimizer, loss, data), "
        f"or a dict with keys among {', '.join(sorted(names))}"
    )


def make(target: Target) -> tuple[object, str]:
    """What the factory of a target returns with torch's seed 0, and the mode that it is for."""
    torch.manual_seed(0)
    built = target.make()
    training = isinstance(built, TrainingWorkload) or (isinstance(built, dict) and "optimizer" in built)
    return built, "training" if training else "inference"


def workload_of(
    model: Any,
    inputs: Any = None,
    call: Callable[..., Any] | None = None,
    metric: Callable[[Callable[..., Any]], float] | None = None,
    mode: str = AUTO,
) -> Target | Workload | TrainingWorkload:
    """What a caller handed over: a target by its name, or live objects.

    Raises `UsageError` where inputs lack or are too many, and for another mode than that of live objects.
    """
    check_mode(mode)
    if isinstance(model, (str, Path, Target, Workload, TrainingWorkload)):
        if inputs is not None or call is not None or metric is not None:
            raise UsageError(
                "inputs, call and metric belong to a live model; a workload and the factory of a target give their own"
            )
        if isinstance(model, (str, Path, Target)):
            target = model if isinstance(model, Target) else find_target(str(model))
            return target if mode == AUTO else dataclasses.replace(target, mode=mode)
    elif mode == "training":
        raise UsageError("training needs a fettle.TrainingWorkload(model, optimizer, loss, data), or 'file.py:factory'")
    elif inputs is None:
        raise UsageError("give sample inputs with a live model, inputs=[batch]")
    else:
        model = Workload(model, inputs, call, metric)
    live: Workload | TrainingWorkload = model
    own = "training" if isinstance(live, TrainingWorkload) else "inference"
    if mode not in (AUTO, own):
        raise UsageError(f"{type_text(model)} is not for `mode='{mode}'`: leave it out, or write '{own}'")
    return live


def target_of(workload: Target | Workload | TrainingWorkload, folder: Path) -> Target:
    """The target from which worker processes build it; live objects are written to `folder`."""
    if isinstance(workload, Target):
        return workload
    mode = "training" if isinstance(workload, TrainingWorkload) else "inference"
    return dataclasses.replace(target_from_objects(workload, folder), mode=mode)


def load_training(target: Target, seed: int = 0, made: object = None) -> TrainingWorkload:
    """Build the training workload of `target`, seeding torch with `seed` first, or take what its factory just `made`.
    Raises `UsageError` in one line."""
    if made is None:  # otherwise the generators are where the factory left them: a loader that shuffles goes by them
        torch.manual_seed(seed)
        made = target.make(seed)
    workload = training_workload_from(made, target.reference)
    return workload if workload.name else dataclasses.replace(workload, name=target.name)


def training_fingerprint(workload: TrainingWorkload) -> str:
    """A short hash of the initial weights, the first batch and the optimizer's settings."""
    plain = Workload(workload.model, [(workload.first,)])
    optimizer = workload.make_optimizer(workload.trained)
    settings = settings_of(optimizer.defaults)
    text = f"{fingerprint(plain)} {type(optimizer).__name__} {settings} {workload.steps} {workload.max_grad_norm}"
    groups = [(settings_of(group), len(group["params"])) for group in optimizer.param_groups]
    if any(own != settings for own, _ in groups):
        text += f" {groups}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def settings_of(group: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The settings of a group of parameters, as texts that are alike in all processes."""
    return sorted((key, ADDRESS.sub("", repr(value))) for key, value in group.items() if key != "params")
