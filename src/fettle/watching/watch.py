"""`watch` and `step_timer`: an account around a loop, and everything put back when it ends."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar

from fettle.errors import UsageError
from fettle.files import check_writable, write_text
from fettle.watching.account import Steps
from fettle.watching.hooks import patched
from fettle.watching.slow import Sampler

T = TypeVar("T")
_ONE = threading.Lock()


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
            stack.enter_context(patched(steps))
            busy = stack.enter_context(_utilisation(steps._on_gpu))
            steps._end(time.perf_counter_ns())  # the first begins
            try:
                yield steps
            finally:
                steps.report = steps.summary(1 - busy[0] / busy[1] if busy[1] else None)
    finally:
        failed = sys.exception() is not None
        _ONE.release()
        try:
            if steps.report is not None and to is not None:
                hidden = (OSError, ValueError) if failed else ()  # a closed file must not hide the program's own error
                with contextlib.suppress(*hidden):
                    print(steps.report, file=sys.stderr if to == "stderr" else to)
        finally:
            if steps.report is not None and json_to is not None:
                try:
                    write_text(json_to, steps.report.to_json())
                except UsageError as error:
                    if not failed:
                        raise
                    warnings.warn(str(error), stacklevel=2)  # nor must this one


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
