"""How do I get a snapshot of my own program, also when it dies?

    with fettle.memory.record("run.pickle") as recorder:
        for batch in loader:
            train_step(batch)
            recorder.step()

On a GPU the allocator's own recorder runs with a bounded ring, and an out-of-memory error writes the snapshot at the
moment of failure, before the stack unwinds and frees the evidence. On a CPU the profiler's memory events are kept in
the same form. The file is written in one go when the block ends, whether or not it ended well.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import psutil

from fettle.errors import UsageError, first_line
from fettle.files import check_writable, whole
from fettle.memory.cpu import CpuTimeline
from fettle.memory.steps import STEP_MARK

_MOST_STEPS = 100_000


class Recorder:
    """Given to the body of `record`: call `step()` at the end of every step of the loop."""

    def __init__(self, source: _CudaHistory | CpuTimeline) -> None:
        self._source = source
        self._steps: deque[tuple[int, int]] = deque(maxlen=_MOST_STEPS)
        self._process = psutil.Process()

    def step(self) -> None:
        """Mark the end of a step. Steps are what growth is measured by; the process's memory is noted too."""
        self._steps.append((time.time_ns() // 1000, int(self._process.memory_info().rss)))
        self._source.step()


@contextlib.contextmanager
def record(
    path: str | os.PathLike[str],
    *,
    max_events: int = 100_000,
    stacks: Literal["python", "all"] = "python",
    device: Literal["cuda", "cpu"] | None = None,
) -> Iterator[Recorder]:
    """Record allocations while the body runs and write a snapshot to `path` when it ends, also with an exception.

    `max_events` bounds the ring: the last so many events are kept. `stacks="all"` adds C++ frames, which name the
    cause of churn and cost time and space. `device` None takes the GPU if there is one. Costs: on a GPU a few
    microseconds an allocation; on a CPU the profiler with stacks, which slows small operators severalfold, and
    between steps a pause whenever the ring has filled. A process killed by the system leaves no file.

    Raises `UsageError` if `path` cannot be written, `max_events` is below 1, or there is no such device.
    """
    target = Path(path)
    if max_events < 1:
        raise UsageError("max_events must be at least 1")
    if stacks not in ("python", "all"):
        raise UsageError(f"stacks must be 'python' or 'all', not {stacks!r}")
    kind = str(device).partition(":")[0]  # of cuda:1, too: all devices are recorded
    if kind not in ("None", "cuda", "cpu"):
        raise UsageError(f"device must be 'cuda' or 'cpu', not {device!r}")
    check_writable(target)
    import torch  # late: reading a snapshot must not wait for torch

    if device is None:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError("no CUDA device here: record with device='cpu'")

    def write(data: dict[str, Any]) -> None:
        steps = list(recorder._steps)
        marks = [{"stage": "END", "name": STEP_MARK, "device": 0, "time_us": time_us} for time_us, _ in steps]
        data["external_annotations"] = [*data.get("external_annotations", []), *marks]
        data["fettle"] = {"version": 1, "allocator": source.allocator, "host_memory": steps}
        with whole(target) as partial, partial.open("wb") as file:
            pickle.dump(data, file, protocol=4)

    source = CpuTimeline(max_events) if kind == "cpu" else _CudaHistory(max_events, stacks, target, write)
    recorder = Recorder(source)
    source.start()
    error: BaseException | None = None
    try:
        yield recorder
    except BaseException as raised:
        error = raised
        raise
    finally:
        with _warned(target) if error is not None else contextlib.nullcontext():
            data = source.stop(error)
            if data is not None:
                write(data)


@contextlib.contextmanager
def _warned(target: Path) -> Iterator[None]:
    """What fails inside is a warning: the program's own exception must not be hidden by it."""
    try:
        yield
    except Exception as failure:
        is_ours = isinstance(failure, UsageError)
        said = str(failure) if is_ours else f"{target}: no snapshot could be taken ({first_line(failure)})"
        warnings.warn(said, stacklevel=2)


class _CudaHistory:
    """The recorder of the CUDA caching allocator. `write` writes a snapshot at the moment a request fails."""

    allocator = "cuda"

    def __init__(self, max_events: int, stacks: str, target: Path, write: Callable[[dict[str, Any]], None]) -> None:
        self.max_events, self.stacks, self.target, self.write = max_events, stacks, target, write
        self.active = False
        self.written_at_oom = False

    def start(self) -> None:
        import torch

        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(
            enabled="all",
            context="all",
            stacks=self.stacks,
            max_entries=self.max_events,
            clear_history=True,
            global_record_annotations=True,
        )
        self.active = True

        def out_of_memory(device: int, alloc: int, device_alloc: int, device_free: int) -> None:
            # Observers cannot be removed, so this one stops by itself. Only the first failure is
            # written: a program that catches it and goes on has its snapshot at the end.
            if self.active and not self.written_at_oom:
                with _warned(self.target):
                    self.write(torch.cuda.memory._snapshot())
                    self.written_at_oom = True

        attach = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]  # absent in CPU builds
        attach(out_of_memory)

    def step(self) -> None:
        pass

    def stop(self, error: BaseException | None) -> dict[str, Any] | None:
        import torch

        self.active = False
        try:
            if self.written_at_oom and isinstance(error, torch.OutOfMemoryError):
                return None  # what is left by now no longer shows why
            return dict(torch.cuda.memory._snapshot())
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
