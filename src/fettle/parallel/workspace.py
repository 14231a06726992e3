"""What a convolution holds while it runs on this CPU: found by running it once, as no formula knows it.

oneDNN brings the operands of a convolution into a layout of its own, which depends on the CPU's instructions and on the
number of threads. The copies are of the size of the activations, so a plan for this CPU that leaves them out is low by
up to a fifth. Each distinct convolution is run once on zeros of its shapes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

from fettle.memory.cpu import events_in_time

_PROBED = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
_LARGEST_BYTES = 1 << 30
"""Operands above this in all are not tried: a plan should not fill the memory."""


class Workspaces:
    """Asked about every operator of a step; answers 0 for all but convolutions."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._known: dict[Any, int] = {}

    def __call__(self, func: Any, args: Any, kwargs: Any) -> int:
        """Bytes that `func` has allocated at most while it runs, its results among them."""
        if func not in _PROBED:
            return 0
        flat, _ = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        key = (func, *(_key(leaf) for leaf in flat))
        if key not in self._known:
            held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self._known[key] = 0 if held > _LARGEST_BYTES else _run(func, args, kwargs, self._threads)
        return self._known[key]


def _key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype
    return str(leaf)


def _run(func: Any, args: Any, kwargs: Any, threads: int) -> int:
    def real(tensor: torch.Tensor) -> torch.Tensor:
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return torch.empty_strided(shape, stride, dtype=tensor.dtype, device="cpu").zero_()

    before = torch.get_num_threads()
    with _disable_current_modes(), torch.no_grad():
        args, kwargs = tree_map_only(torch.Tensor, real, (args, kwargs))
        torch.set_num_threads(threads)
        try:
            func(*args, **kwargs)  # oneDNN prepares a primitive once
            with allocations() as taken:
                kept = func(*args, **kwargs)
        finally:
            torch.set_num_threads(before)
    del kept
    return taken_by(taken)


@contextmanager
def allocations() -> Iterator[list[Any]]:
    """Count what torch's CPU allocator hands out, in all threads, from here on; afterwards the list that is yielded has
    the tree of the profiler's events.

    The profiler reports each allocation and free of the threads it watches, and with each the allocator's count of what
    it has handed out in all. By itself the allocator counts only what those threads do, and gloo frees the buffers of a
    collective in threads of its own: they would look alive for ever. With c10's flag ``caffe2_report_cpu_memory_usage``
    it counts for every thread.
    """
    from torch.profiler import ProfilerActivity, profile

    _count_every_thread()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's log would go to stderr
    events: list[Any] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as running:
        yield events
    assert running.profiler is not None
    assert running.profiler.kineto_results is not None
    events += running.profiler.kineto_results.experimental_event_tree()


def taken_by(events: list[Any]) -> int:
    """How many bytes more were handed out at the peak than when the counting began."""
    timed = (event.extra_fields for kind, event in events_in_time(events) if kind == "Allocation")
    moves = [fields for fields in timed if fields.device.type == "cpu"]
    if not moves:
        return 0
    before = int(moves[0].total_allocated) - int(moves[0].alloc_size)
    return max(int(move.total_allocated) for move in moves) - before


def _count_every_thread() -> None:
    """Set the flag, where this build of torch has it under its own name; without it the count is too high at times."""
    for library in sorted((Path(torch.__file__).parent / "lib").glob("*c10.*")):
        try:
            ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_report_cpu_memory_usage").value = True
            return
        except (OSError, ValueError):
            continue
