"""`watch` and `step_timer`: an account around a loop, and everything put back when it ends."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar

from fettle.errors import UsageError
from fettle.files import check_writable, write_text
from fettle.patches import replaced
from fettle.watching.account import Steps
from fettle.watching.report import StepReport
from fettle.watching.slow import Sampler

T = TypeVar("T")
_ONE = threading.Lock()
# What makes the host wait for the device when its tensor is there. `.to` and operators that wait inside are not among
# them: they are called too often, or cannot be told from those that do not wait.
_WAITING_METHODS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero")


@contextlib.contextmanager
def watch(
    *,
    slow_trace: str | os.PathLike[str] | None = None,
    slow_factor: float = 2.0,
    json_to: str | os.PathLike[str] | None = None,
    to: TextIO | Literal["stderr"] | None = "stderr",
) -> Iterator[Steps]:
    """Watch the loop inside the block and print where its steps went when it ends, also with an exception.

    A step ends where the loop asks a `torch.utils.data.DataLoader` for the next batch; in a loop that says `step()`,
    there alone. Of several loaders that are asked in turn, all batches are of one step.
    `json_to` writes the report as JSON, `to` is the file that the summary goes to (None: nowhere). A step that has
    taken `slow_factor` times the median is sampled until it ends, and what was seen goes to `slow_trace`, for Perfetto.
    The report is in `.report` afterwards. One watch at a time, in the thread of the loop.

    Raises `UsageError` if a file cannot be written, `slow_factor` is not above 1, or a watch is running.
    """
    check_writable(slow_trace, json_to)
    if not slow_factor > 1:
        raise UsageError(f"slow_factor must be above 1, not {slow_factor}")
    if not _ONE.acquire(blocking=False):
        raise UsageError("a watch is running already: one at a time")
    steps = Steps(Path(slow_trace) if slow_trace is not None else None, slow_factor)
    try:
        with contextlib.ExitStack() as stack:
            if steps.slow_trace is not None:
                steps._sampler = stack.enter_context(Sampler(steps._lateness, steps._thread))
            stack.enter_context(_patched(steps))
            busy = stack.enter_context(_utilisation(steps._on_gpu))
            steps._end(time.perf_counter_ns())  # the first begins
            try:
                yield steps
            finally:
                steps.report = steps.summary(1 - busy[0] / busy[1] if busy[1] else None)
    finally:
        _ONE.release()
        if steps.report is not None:
            _hand_out(steps.report, sys.stderr if to == "stderr" else to, json_to, failed=sys.exception() is not None)


def _hand_out(report: StepReport, to: TextIO | None, json_to: str | os.PathLike[str] | None, failed: bool) -> None:
    """Print and write the report. Where the loop has `failed`, no error in here may hide that one."""
    try:
        if to is not None:
            with contextlib.suppress(*((OSError, ValueError) if failed else ())):
                print(report, file=to)
    finally:
        if json_to is not None:
            try:
                write_text(json_to, report.to_json())
            except UsageError as error:
                if not failed:
                    raise
                warnings.warn(str(error), stacklevel=4)


def step_timer(iterable: Iterable[T], **options: Any) -> Iterator[T]:
    """Iterate and time: getting the next item is `data`, the loop's body a step. Options as for `watch`."""
    with watch(**options) as steps:
        steps._said = True  # what a loader in the body ends is no step
        source = iter(iterable)
        while True:
            with steps.waiting("data"):
                try:
                    item = next(source)
                except StopIteration:
                    return
            yield item
            steps.step()


@contextlib.contextmanager
def _utilisation(on_gpu: bool) -> Iterator[list[float]]:
    """NVML's utilisation, asked twice a second: the sum of the shares of its last period in which a kernel ran, and how
    often it said one; never without NVML."""
    shares = [0.0, 0]
    if not on_gpu:
        yield shares
        return
    import torch

    # This thread's; another begins with the first.
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    stop = threading.Event()

    def ask() -> None:
        with contextlib.suppress(Exception):  # no NVML, or no right to ask it: the rest of the account stands without
            while not stop.wait(0.5):
                shares[0] += torch.cuda.utilization(gpu) / 100
                shares[1] += 1

    thread = threading.Thread(target=ask, name="fettle-nvml", daemon=True)
    thread.start()
    try:
        yield shares
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def _patched(steps: Steps) -> Iterator[None]:
    """Take note where loops over loaders and waiting for the device pass through Python."""
    with contextlib.ExitStack() as stack:
        gc.callbacks.append(steps._collected)
        stack.callback(gc.callbacks.remove, steps._collected)
        torch = sys.modules.get("torch")  # a loop that has not imported it has neither loader nor tensors
        if torch is not None:
            from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter

            # Between epochs the loader starts its workers anew: that is waiting for data too.
            stack.enter_context(replaced(DataLoader, "__iter__", functools.partial(_loader_iter, steps)))
            stack.enter_context(replaced(_BaseDataLoaderIter, "__next__", functools.partial(_loader_next, steps)))
            if torch.cuda.is_available():
                steps._on_gpu = True
                for name in _WAITING_METHODS:
                    stack.enter_context(replaced(torch.Tensor, name, functools.partial(_waits, steps, True)))
                for owner in (torch.cuda.Event, torch.cuda.Stream):
                    stack.enter_context(replaced(owner, "synchronize", functools.partial(_waits, steps, False)))
                stack.enter_context(replaced(torch.cuda, "synchronize", functools.partial(_waits, steps, False)))
        yield


def _loader_iter(steps: Steps, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        with steps.waiting("data"):
            iterator = original(self)
        with contextlib.suppress(AttributeError):  # a loader of the user's own may return anything that iterates
            iterator._fettle_asked = None  # one with workers that persist has been through an epoch
        return iterator

    return iterate


def _loader_next(steps: Steps, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def next_batch(self: Any) -> Any:
        if steps._in is not None or threading.get_ident() != steps._thread:
            return original(self)
        started = time.perf_counter_ns()
        if not steps._said:
            if getattr(self, "_fettle_asked", None) == steps._count:  # for the second time in this step, which ends
                steps._end(started)
            elif steps._count == 0 and (steps._first is None or steps._first() in (None, self)):
                steps._begin_again(started)  # what ran before the loop is not a step of it
                steps._first = weakref.ref(self)
        self._fettle_asked = steps._count
        steps._in, collecting = "data", steps._gc
        try:
            return original(self)
        finally:
            steps._in = None
            steps._data += time.perf_counter_ns() - started - (steps._gc - collecting)

    return next_batch


def _waits(steps: Steps, of_tensor: bool, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def waiting(*args: Any, **kwargs: Any) -> Any:
        if of_tensor and not args[0].is_cuda:
            return original(*args, **kwargs)
        if threading.get_ident() == steps._thread and steps._in is None:
            steps._syncs += 1
        with steps.waiting("sync"):
            return original(*args, **kwargs)

    return waiting
