"""Where does the host wait for the device? Found on a CPU, before there is a device to wait for.

    report = find_syncs(lambda: model(batch), on_device=[model, batch])
    for sync in report.syncs:
        print(sync.where, sync.code, sync.count, sync.reason)

A synchronisation makes the host wait until the device has done everything queued before it. Two modes of PyTorch see
what a program asks for: a function mode sees calls as the program wrote them (`.cpu()`, `.tolist()`, `print`), a
dispatch mode sees the operators beneath (`_local_scalar_dense`, `nonzero`). Whether a tensor would lie on the device is
tracked: those named in `on_device`, what is computed from them, and what is made on or moved to their device. To tell
that device from the host, such tensors say that their device is `cpu:0`, which PyTorch takes for the CPU everywhere.

What it cannot see is listed in docs/diagnose_collectors.md.

On a GPU, `find_cuda_syncs` asks CUDA's own checks, and `confirm` says which of the lines found they confirm;
`syncs_on` does both, and is what a diagnosis asks.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fettle.diagnose.collectors.sync_modes import Functions, Operators, SyncReport, SyncWatch, counted, here
from fettle.diagnose.evidence import Sync


def syncs_on(device: str, call: Callable[[], Any], on_device: Any) -> SyncReport:
    """What synchronises in one call on this type of device: on a CPU, what would on a GPU.

    On a GPU the modes' lines are compared with CUDA's own checks: one that they confirm keeps its reason, one that only
    they saw is added, and one that they did not see is left out. Other devices have no such checks.
    """
    estimated = find_syncs(call, on_device=on_device, real=device != "cpu")
    if device != "cuda":
        return estimated
    on_gpu = find_cuda_syncs(call)
    confirmed, _, unclaimed = confirm(estimated, on_gpu)
    return SyncReport((*confirmed, *unclaimed), 1, max(estimated.wall_s, on_gpu.wall_s), "cuda")


def find_syncs(call: Callable[[], Any], *, on_device: Any, calls: int = 1, real: bool = False) -> SyncReport:
    """Run `call` on the CPU `calls` times and find what would synchronise.

    `on_device` is any tree of modules and tensors that would be on the device: the model and its batch. With `real` the
    program runs on a GPU, and its tensors say themselves where they are. The function's own exceptions come through.
    """
    with watch_syncs(on_device, real=real) as watch:
        for _ in range(calls):
            call()
    return watch.report(calls)


@contextlib.contextmanager
def watch_syncs(on_device: Any, *, real: bool = False) -> Iterator[SyncWatch]:
    """`find_syncs` for a block of code: ask the watch for its `report()` at the end."""
    watch = SyncWatch(on_device, real)
    started = time.perf_counter()
    with torch.compiler.set_stance("force_eager"), Functions(watch), Operators(watch):
        try:
            yield watch
        finally:
            watch.wall_s = time.perf_counter() - started


def find_cuda_syncs(call: Callable[[], Any], *, calls: int = 1) -> SyncReport:
    """Run `call` on a GPU with CUDA's sync debug mode and collect its warnings with the source lines.

    The mode does not cover torch.distributed, torch.sparse and an explicit `torch.cuda.synchronize()`. Raises
    `RuntimeError` where there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device here: find_syncs finds them on a CPU")
    places: Counter[Sync] = Counter()

    def on_warning(message: Any, *args: Any, **kwargs: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            places[here("cuda", "wait", "CUDA reported a synchronising call")] += 1

    before, started = torch.cuda.get_sync_debug_mode(), time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = on_warning  # called on the warning's own stack, so the user's line is there to be found
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(calls):
                call()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return SyncReport(counted(places), calls, time.perf_counter() - started, "cuda")


def confirm(estimated: SyncReport, on_gpu: SyncReport) -> tuple[tuple[Sync, ...], tuple[Sync, ...], tuple[Sync, ...]]:
    """Compare by source line: confirmed by the GPU, claimed but not seen there, seen there but not claimed."""
    real, claimed = {sync.where for sync in on_gpu.syncs}, {sync.where for sync in estimated.syncs}
    return (
        tuple(sync for sync in estimated.syncs if sync.where in real),
        tuple(sync for sync in estimated.syncs if sync.where not in real),
        tuple(sync for sync in on_gpu.syncs if sync.where not in claimed),
    )
