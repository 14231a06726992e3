"""Training steps under observation: their losses, gradient norms, and the time of each phase.

The training loop itself is left alone. It is handed a loss function and an optimizer factory that take notes.
"""

from __future__ import annotations

import math
import time
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fettle.train.losses import Curve
from fettle.train.workload import TrainingWorkload
from fettle.workload import device_of, wait_for

PARTS = ("data", "forward", "backward", "optimizer", "communication", "idle")
Interval = tuple[int, int]
Range = tuple[str, int, int]
"""A phase, its begin and its end in nanoseconds."""
Train = Callable[..., Any]
"""``train(model, make_optimizer, loss, data)`` of an ``optimized.py``: an iterator of losses, one step
for each that is asked for."""
_SENT = ("gloo:", "nccl:", "ncclkernel", "nccldevkernel", "c10d::", "_c10d_functional::", "fsdp::all_gather",
         "record_param_comms")  # fmt: skip
_WRAPPERS = ("profilerstep", "autograd::engine", "torch::autograd", "distributeddataparallel", "optimizer.", "fsdp::",
             "enumerate(", "## ")  # fmt: skip
"""Ranges that hold operators and are not operators themselves."""
_WAIT = "_c10d_functional::wait_tensor"
"""Waits for what is sent, inside the operator that needs it: that one only holds operators then."""


def step_parts(ranges: Iterable[Range], busy_and_sent: tuple[list[Interval], list[Interval]]) -> dict[str, int]:
    """Nanoseconds of each of `PARTS`, from phases and the intervals of (operators, collectives).

    Every moment belongs to exactly one of them, so they add up to the wall time. A moment is communication where a
    collective is on its way and no operator runs (communication behind computing costs nothing and is not shown); idle
    where neither does: the interpreter between operators on a CPU, a device that waits on a GPU. Else it belongs to its
    phase. Waiting for data is the phase data, whatever runs meanwhile.
    """
    busy, sent = (_union(intervals) for intervals in busy_and_sent)
    parts = dict.fromkeys(PARTS, 0)
    for name, begin, end in ranges:
        if name == "data":
            parts[name] += end - begin
            continue
        working = _within(busy, begin, end)
        either = _within(_union([*busy, *sent]), begin, end)
        parts[name] += working
        parts["communication"] += either - working
        parts["idle"] += end - begin - either
    return parts


def intervals_of(events: Sequence[Any]) -> tuple[list[Interval], list[Interval]]:
    """(operators, collectives) among the profiler's events; on a GPU the kernels, not the calls that start them."""
    on_gpu = any(str(event.device_type()).endswith("CUDA") for event in events)
    busy: list[Interval] = []
    sent: list[Interval] = []
    waits: list[Interval] = []
    for event in events:
        name = event.name().lower()
        interval = (event.start_ns(), event.start_ns() + event.duration_ns())
        if name.startswith(_SENT):
            sent.append(interval)
            if name == _WAIT:
                waits.append(interval)
        elif on_gpu != str(event.device_type()).endswith("CUDA") or name.startswith(_WRAPPERS):
            continue
        else:
            busy.append(interval)
    starts = sorted(begin for begin, _ in waits)
    return [(begin, end) for begin, end in busy if bisect(starts, begin) == bisect(starts, end)], sent


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _within(intervals: Iterable[Interval], begin: int, end: int) -> int:
    return sum(max(0, min(stop, end) - max(start, begin)) for start, stop in intervals)


class Steps:
    """A training run, one step at a time."""

    def __init__(
        self,
        train: Train,
        workload: TrainingWorkload,
        data: Iterable[Any] | None = None,
        *,
        mean: Callable[[torch.Tensor], torch.Tensor] = lambda value: value,
    ) -> None:
        self._ranges: list[Range] = []
        self._workload = workload
        self._mean = mean  # of a loss over all ranks
        self._norms: list[float] | None = None
        self._phase: tuple[str, int] | None = None
        self._watching = False
        self._device = device_of(workload.model, None)
        self._run = train(workload.model, self._make_optimizer, self._loss, workload.data if data is None else data)

    def step(self) -> torch.Tensor:
        """Make one step and return its loss."""
        self._enter("data")
        value: torch.Tensor = next(self._run)
        self._leave()
        return value

    def curve(self, count: int) -> Curve:
        """Make `count` steps and keep their losses and gradient norms. Stops after a loss that is not finite."""
        norms: list[float] = []
        self._norms = norms
        losses: list[float] = []
        for _ in range(count):
            losses.append(float(self._mean(self.step())))
            if not math.isfinite(losses[-1]):
                break
        self._norms = None
        return Curve(losses, norms)

    def timeline(self, count: int) -> dict[str, float]:
        """Milliseconds of a mean step by phase, over `count` steps; they add up to the wall time. See `step_parts`.

        data: until the loss function is called; backward: from its end until the optimizer's step, clipping included;
        optimizer: the rest, with zero_grad. A GPU is waited for between phases.
        """
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self._device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._ranges = []
        with profile(activities=activities) as running:
            self._watching = True
            for _ in range(count):
                self.step()
            self._watching = False
        assert running.profiler is not None
        assert running.profiler.kineto_results is not None
        parts = step_parts(self._ranges, intervals_of(running.profiler.kineto_results.events()))
        return {name: total / count / 1e6 for name, total in parts.items()}

    def _make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        optimizer = self._workload.optimizer(parameters)
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):  # one around another, which never called __init__
            torch.optim.Optimizer.__setstate__(optimizer, {})
        optimizer.register_step_pre_hook(self._before_optimizer)
        return optimizer

    def _loss(self, model: Any, batch: Any) -> torch.Tensor:
        self._enter("forward")
        value = self._workload.loss(model, batch)
        self._enter("backward")
        return value

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._enter("optimizer")
        found_inf = getattr(optimizer, "found_inf", None)  # a fused optimizer leaves the step out by itself
        if self._norms is not None and not (found_inf is not None and bool(found_inf)):
            stepped = [p for group in optimizer.param_groups for p in group["params"]]
            gradients = [p.grad for p in stepped if p.grad is not None] or [
                # a compiled update takes them from the model's weights itself
                p.grad for p in self._workload.model.parameters() if p.grad is not None
            ]  # fmt: skip
            gradients = [g.coalesce().values() if g.is_sparse else g for g in gradients]
            norm = _whole(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
            scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer unscales inside its step
            self._norms.append(norm / float(scale) if scale is not None else norm)

    def _enter(self, phase: str) -> None:
        self._leave()
        if self._watching:
            self._phase = (phase, time.time_ns())

    def _leave(self) -> None:
        if not self._watching:
            return
        wait_for(self._device)
        if self._phase is not None:
            name, began = self._phase
            self._ranges.append((name, began, time.time_ns()))
        self._phase = None


def _whole(norm: torch.Tensor) -> float:
    """A norm as a number, of the whole where the gradients are shards of it."""
    return float(norm.full_tensor()) if hasattr(norm, "full_tensor") else float(norm)
