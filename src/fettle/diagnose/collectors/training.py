"""A training loop as a workload: a call is one step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fettle.train import TrainingWorkload
from fettle.workload import Workload, device_of


class TrainingSteps:
    """Call it to make one step on the next batch: loss, backward, clipping, the optimizer's step.

    Its data goes on from call to call, so that workers of a loader are started once an epoch, as in the loop itself.
    """

    def __init__(self, workload: TrainingWorkload) -> None:
        self.model = workload.model.train()
        self._workload = workload
        self._optimizer = workload.optimizer(list(self.model.parameters()))
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


def trained(workload: Workload) -> Any:
    """The workload's model; of the steps of a training loop the model that they train."""
    return workload.model.model if isinstance(workload.model, TrainingSteps) else workload.model


def device_type(workload: Workload) -> str:
    """Type of the device that a call is for."""
    return device_of(trained(workload), workload.inputs[0])
