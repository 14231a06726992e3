"""Where in the program? What a call stack says to its reader: the line of theirs, the phase, the name of a group.

Snapshots interleave Python and C++ frames. Two allocations belong together when their Python frames agree; C++ frames
are used only where there is no Python (autograd's own threads).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fettle.memory.snapshot import Frame, Ints, Snapshot

NO_STACK = "(no stack recorded)"
_AUTOGRAD_NODE = re.compile(r"[A-Za-z]\w*Backward\d*|AccumulateGrad")
_NATIVE = (".cpp", ".cc", ".c", ".h", ".hpp", ".cu", ".cuh", ".so")
_LIBRARY = ("/site-packages/", "/dist-packages/", "/lib/python3", "/Lib/")
_LIBRARY_STARTS = ("torch/", "fettle/", str(Path(__file__).parents[1]), "<frozen", "<eval_with_key")
"""Starts of names that the profiler has cut short; and this package, which calls the program while it records."""
_PLUMBING = (
    "torch::unwind",
    "CapturedTraceback",
    "gather_with_cpp",
    "CachingAllocator",
    "c10::alloc_cpu",
    "aten::empty",
    "at::detail::empty",
    "at::native::empty",
    "at::_ops::",
    "c10::impl::",
    "c10::Dispatcher",
    "_start",
    "__libc_start",
    "clone",
    "pthread_",
    "__xmknodat",
    "execute_native_thread_routine",
    "PyEval_",
    "PyObject_",
)


@dataclass(frozen=True)
class StackGroups:
    """Stacks that look the same to a reader, under one number."""

    of_stack: Ints
    """For each stack of the snapshot the number of its group."""
    frames: tuple[tuple[Frame, ...], ...]
    """For each group the frames that matter, innermost first."""
    own_line: tuple[str, ...]
    """For each group the innermost line outside libraries, ``train.py:41 in step``; empty stacks say so."""
    phase: tuple[str, ...]
    """forward, backward, optimizer, data, other or unknown (no stack)."""


def group_stacks(snapshot: Snapshot) -> StackGroups:
    """Put stacks with the same Python frames in one group."""
    numbers: dict[tuple[Frame, ...], int] = {}
    of_stack = np.empty(len(snapshot.stacks), np.int64)
    phases: list[str] = []
    for index, stack in enumerate(snapshot.stacks):
        of_stack[index] = numbers.setdefault(readable(stack), len(numbers))
        if len(numbers) > len(phases):
            phases.append(phase(stack))
    frames = tuple(numbers)
    return StackGroups(of_stack, frames, tuple(own_line(stack) for stack in frames), tuple(phases))


def is_python(frame: Frame) -> bool:
    """A frame of Python code, TorchScript or generated code."""
    return frame.filename.endswith(".py") or (frame.filename.startswith("<") and not frame.filename.startswith("<?"))


def readable(stack: Sequence[Frame]) -> tuple[Frame, ...]:
    """The Python frames; where there are none, the C++ frames without the allocator's and the dispatcher's own."""
    python = tuple(frame for frame in stack if is_python(frame))
    return python or tuple(frame for frame in stack if not any(word in frame.name for word in _PLUMBING))


def own_line(stack: Sequence[Frame]) -> str:
    """The innermost frame of the user's own code, else the innermost frame, as ``file.py:12 in function``."""
    if not stack:
        return NO_STACK
    own = next((frame for frame in stack if is_python(frame) and not _is_library(frame)), None)
    if own is None:
        own = next((frame for frame in stack if _AUTOGRAD_NODE.search(frame.name)), stack[0])
    return describe(own)


def describe(frame: Frame) -> str:
    """``file.py:12 in function``; for C++ the function alone."""
    if frame.filename in ("", "??", "none") or (frame.filename.endswith(_NATIVE) and frame.line == 0):
        node = _AUTOGRAD_NODE.search(frame.name)
        # A C++ name with all its parameter types is a paragraph; the function alone says as much.
        short = frame.name.replace("(anonymous namespace)::", "").split("(")[0].strip()
        return f"{node.group() if node else short or frame.name} (C++)"
    return f"{frame.filename.rsplit('/', 1)[-1]}:{frame.line} in {frame.name}"


def phase(stack: Sequence[Frame]) -> str:
    """In which part of a step an allocation was made, from the names on its stack (C++ frames help)."""
    if not stack:
        return "unknown"
    files = [frame.filename for frame in stack]
    names = [frame.name for frame in stack]
    if any("torch/optim/" in file for file in files) or any("Optimizer.step" in name for name in names):
        return "optimizer"
    if any(
        "Backward" in n or "autograd::Engine" in n or "autograd::engine" in n or "_run_backward" in n for n in names
    ):
        return "backward"
    if any("torch/utils/data/" in file for file in files):
        return "data"
    if any(name in ("forward", "_call_impl", "_wrapped_call_impl") for name in names):
        return "forward"
    return "other"


def _is_library(frame: Frame) -> bool:
    file = frame.filename
    return file.startswith(_LIBRARY_STARTS) or any(part in file for part in _LIBRARY)
