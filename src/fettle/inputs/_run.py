"""The process in which one setting runs: it answers requests until the parent goes.

Between requests the parent stops it together with its loader workers, so that a slice begins where the last one ended:
with as many batches ready as there were. The workers are stopped as soon as a slice ends: what they made while it is
summed up would be had for nothing in the next.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import signal
import statistics
import time
from typing import Any

import psutil
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from fettle.errors import UsageError, first_line
from fettle.inputs import _fetch
from fettle.inputs._messages import Asked, Describe, Faults, FindFaults, Open, TakeSlice
from fettle.inputs.pipeline import Step, batch_bytes, fetches, pipeline, with_setting
from fettle.inputs.setting import SHORT, Facts, Setting, Slice
from fettle.procs.child import Failure
from fettle.procs.parent import Parent, be_a_worker
from fettle.workload import again, wait_for

_WARM_UP = 2
_LONGEST_S = 8.0
"""A slice that has not seen enough batches ends after this time."""
_MEMORY = ("SIGKILL", "SIGBUS", "No space left", "Bus error", "allocate memory", "out of memory", "shared memory")


class Loop:
    """A pipeline under one setting, being iterated."""

    def __init__(self, loader: DataLoader[Any], step: Step | None, setting: Setting, device: str) -> None:
        self.loader, self.setting, self.device = loader, setting, device
        self.long_epochs = _length(loader) > SHORT
        self.run = step or (lambda batch: None)
        self.board = _fetch.Board(setting.num_workers + 1)
        _fetch.install(self.board)
        # Not a closure: it is sent to workers that are started and not forked.
        init = functools.partial(_fetch.worker_init, self.board, setting.keep_memory, loader.worker_init_fn)
        loader.worker_init_fn = init
        self.batches: Any = None
        self.start_s = 0.0
        self.first: Any = None

    def begin(self) -> None:
        """The first batches, unmeasured."""
        began = time.perf_counter()
        self.batches = iter(self.loader)
        try:
            self.first = next(self.batches)
        except StopIteration:
            raise UsageError("the loader gives no batch") from None
        self.start_s = time.perf_counter() - began
        self.step(again(self.first))
        for _ in range(max(_WARM_UP, self.setting.num_workers)):
            self.step(self.next()[0])
        self.board.clear()

    def next(self) -> tuple[Any, bool]:
        """The next batch, and whether a new epoch began with it."""
        try:
            return next(self.batches), False
        except StopIteration:
            self.batches = iter(self.loader)
            try:
                return next(self.batches), True
            except StopIteration:
                raise UsageError("the loader gives no batch in its second epoch: its source is used up") from None

    def ended(self) -> str:
        """The error of a worker that ended, or how it ended."""
        if error := self.board.error():
            return error
        codes = [worker.exitcode for worker in getattr(self.batches, "_workers", ()) if worker.exitcode]
        if not codes:
            return ""
        if codes[0] < 0:
            return f"a worker was killed by signal {signal.Signals(-codes[0]).name}"
        return f"a worker exited unexpectedly with code {codes[0]}"

    def step(self, batch: Any) -> None:
        """What the loop does with a batch."""
        if self.device == "cuda":
            # Whatever can be moved: tensors, and batches of classes that move themselves.
            batch = pytree.tree_map(
                lambda leaf: leaf.to("cuda", non_blocking=self.setting.non_blocking) if hasattr(leaf, "to") else leaf,
                batch,
            )
        self.run(batch)

    def measure(self, seconds: float) -> Slice:
        """Time batches and steps for at least `seconds`, in whole turns of the workers."""
        if self.batches is None:
            self.begin()
        self.signal_workers(signal.SIGCONT)
        self.board.go_on()
        turn = max(1, self.setting.num_workers)
        least = max(4, 2 * turn)
        waited = 0.0
        walls: list[float] = []
        boundaries: list[float] = []
        begin, cpu = time.perf_counter(), time.process_time()
        now = begin
        while True:
            count, spent = len(walls), now - begin
            if spent > max(_LONGEST_S, 2 * seconds) and count:
                break
            if spent >= seconds and count >= least and count % turn == 0:
                break
            batch, new = self.next()
            got = time.perf_counter()
            self.step(batch)
            after = time.perf_counter()
            if new and self.long_epochs:
                boundaries.append(got - now)
            else:
                waited += got - now
                walls.append(after - now)
            now = after
        self.board.pause()
        self.signal_workers(signal.SIGSTOP)
        began = time.perf_counter()
        wait_for(self.device)
        walls[-1] += time.perf_counter() - began
        elapsed = sum(walls)
        return Slice(
            batches=len(walls), rate=len(walls) / max(elapsed, 1e-12), waiting=waited / max(elapsed, 1e-12),
            **_fetch.summary(self.board),
            cpu_share=(time.process_time() - cpu) / max(time.perf_counter() - begin, 1e-12), start_s=self.start_s,
            boundaries_s=boundaries[:64], batch_bytes=batch_bytes(self.first), worker_bytes=_worker_bytes(),
        )  # fmt: skip

    def signal_workers(self, number: signal.Signals) -> None:
        """Stop the loader's worker processes, or let them go on."""
        for worker in getattr(self.batches, "_workers", ()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, number)

    def step_alone(self) -> float:
        """Median seconds of a step on a batch that is there already."""
        if self.batches is None:
            self.begin()
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < 5 or (time.perf_counter() - began < 0.5 and len(times) < 200):
            batch, started = again(self.first), time.perf_counter()
            self.step(batch)
            wait_for(self.device)
            times.append(time.perf_counter() - started)
        return statistics.median(times)


class Process:
    """What the requests are asked of."""

    def __init__(self) -> None:
        self.loop: Loop | None = None
        self.step: Step | None = None

    def answer(self, request: Asked) -> Facts | Slice | Faults | float | None:
        if isinstance(request, FindFaults):
            from fettle.inputs.lints import lint

            return Faults(*lint(pipeline(request.target)[0]))
        if isinstance(request, Describe | Open):
            loader, self.step = pipeline(request.target)
            setting = request.setting if isinstance(request, Open) else Setting()
            self.loop = Loop(with_setting(loader, setting), self.step, setting, request.device)
            return None if isinstance(request, Open) else _facts(loader, self.step)
        assert self.loop is not None
        if isinstance(request, TakeSlice):
            return self.loop.measure(request.seconds)
        return self.loop.step_alone() if self.step is not None else 0.0


def _facts(loader: DataLoader[Any], step: Step | None) -> Facts:
    return Facts(
        loader.num_workers, loader.prefetch_factor or 2, bool(loader.persistent_workers), bool(loader.pin_memory),
        _length(loader), isinstance(loader.dataset, IterableDataset), step is not None, torch.cuda.is_available(),
        platform.libc_ver()[0] == "glibc", *fetches(loader),
    )  # fmt: skip


def explain(error: BaseException, ended: str = "") -> Failure:
    """An error as the parent will show it: one line."""
    if isinstance(error, UsageError):
        return Failure(str(error), "usage")
    text = first_line(error)
    if isinstance(error, _fetch.ItemError) or "Original Traceback" in str(error):
        # A worker's traceback arrives as the text of an exception; its last line says what was wrong.
        text = [line for line in str(error).strip().splitlines() if line.strip()][-1].strip()
        text = text.removeprefix(f"{_fetch.ItemError.__module__}.").removeprefix("ItemError: ")
    elif ended:
        text = ended
    text = re.sub(r"\s+", " ", text)[:400]
    memory = isinstance(error, MemoryError) or any(word in text for word in _MEMORY)
    if any(word in text for word in ("No space left", "unable to allocate shared memory", "Bus error", "SIGBUS")):
        text = f"/dev/shm is full: {text}"
    elif "SIGKILL" in text:
        text = f"out of memory, or killed from outside: {text}"
    elif memory and "out of memory" not in text:
        text = f"out of memory: {text}"
    return Failure(text, "memory" if memory else "error")


def main(parent: Parent) -> None:
    process = Process()
    parent.serve(Asked, process.answer, lambda error: explain(error, process.loop.ended() if process.loop else ""))


def _length(loader: DataLoader[Any]) -> int:
    """Batches of an epoch, 0 where that is not known."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # a dataset or sampler that has no length says so by either
        return 0


def _worker_bytes() -> int:
    """The most memory of its own that a loader worker holds."""
    most = 0
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            most = max(most, child.memory_full_info().uss)
    return most


if __name__ == "__main__":
    be_a_worker()
    main(Parent())
