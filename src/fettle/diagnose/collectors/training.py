"""A training loop as a workload: a call is one step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from fettle.techniques import Facts, probe_facts
from fettle.train import TrainingWorkload
from fettle.workload import Workload, device_of


class TrainingSteps:
    """Call it to make one step on the next batch: loss, backward, clipping, the optimizer's step.

    Its data goes on from call to call, so that workers of a loader are started once an epoch, as in the loop itself.
    """

    def __init__(self, workload: TrainingWorkload) -> None:
        self.model = workload.model.train()
        self._workload = workload
        self._optimizer = workload.make_optimizer(workload.trained)
        self._batches: Iterator[Any] = iter(())

    def __call__(self) -> torch.Tensor:
        """The step's loss, without its graph."""
        with torch.enable_grad():
            loss = self._workload.loss(self.model, self._next())
            loss.backward()  # type: ignore[no-untyped-call]
            if self._workload.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._workload.max_grad_norm)
            self.update()
            self._optimizer.zero_grad()
            return loss.detach()

    def update(self) -> None:
        """The optimizer's step alone: operators are told by the function that they are called from."""
        self._optimizer.step()

    def _next(self) -> Any:
        for batch in self._batches:
            return batch
        self._batches = iter(self._workload.data)
        return next(self._batches)


def as_workload(workload: Workload | TrainingWorkload) -> Workload:
    """The workload itself, or the steps of a training loop as one."""
    if isinstance(workload, Workload):
        return workload
    rows = workload.rows
    return Workload(TrainingSteps(workload), [()], name=workload.name, samples=rows)


def facts_of(workload: Workload | TrainingWorkload) -> Facts:
    """What rules and techniques need to know; of a training loop that of its model, by the loss of its first batch."""
    if isinstance(workload, Workload):
        return probe_facts(workload)
    loss = workload.loss
    plain = Workload(
        workload.model, [(workload.first,)], call=lambda model, batch: loss(model, batch), samples=workload.samples
    )
    return replace(probe_facts(plain), mode="training", training=True, train_mode_differs=False, custom_call=False)


def trained(workload: Workload) -> Any:
    """The workload's model; of the steps of a training loop the model that they train."""
    return workload.model.model if isinstance(workload.model, TrainingSteps) else workload.model


def device_type(workload: Workload, answer: Any = None) -> str:
    """Type of the device that a call is for, as the model and its inputs say; where these lie on the CPU, as its answer
    does, or a module that a program of another kind holds."""
    model = trained(workload)
    held = [] if isinstance(model, torch.nn.Module) else list(getattr(model, "__dict__", {}).values())
    kinds = [device_of(one, (workload.inputs[0], answer)) for one in (model, *held)]
    return next((kind for kind in kinds if kind != "cpu"), "cpu")
