"""The CPU allocator's history, taken from the profiler, in the shape of a snapshot.

The profiler sees every allocation and free of the CPU allocator with its address, size and call stack. What it cannot
see is memory from before it started: of that, only tensors that operators touched are known (as blocks without a
stack), and their frees are not reported. The CPU has no caching allocator, so each block stands for a segment of its
own, and questions about reserved memory do not arise.
"""

from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fettle.errors import UsageError

if TYPE_CHECKING:
    from torch.profiler import profile

_DEEPEST_STACK = 64


class CpuTimeline:
    """Profiles in pieces of about `max_events` events, and keeps the last so many."""

    allocator = "cpu"

    def __init__(self, max_events: int) -> None:
        self.max_events = max_events
        self.events: deque[dict[str, Any]] = deque(maxlen=max_events)
        self.annotations: deque[dict[str, Any]] = deque(maxlen=max_events)
        self.alive: dict[int, dict[str, Any]] = {}
        self.recorded = 0
        self._begun, self._steps, self._events_per_step = 0, 0, 0.0
        self._running: profile | None = None

    def start(self) -> None:
        """Begin to record a piece."""
        import torch  # late: reading a snapshot must not wait for torch
        from torch.profiler import ProfilerActivity, profile

        # Two profilers at once do not fail: the one that began first silently loses what it had.
        if torch._C._autograd._profiler_enabled():
            raise UsageError("a profiler is running already: memory on a CPU is recorded through it, end it first")
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's log would go to the user's terminal
        self._running = profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=True
        )
        self._running.start()
        self._begun, self._steps = self.recorded, 0

    def step(self) -> None:
        """The profiler has no ring: end the piece once it may hold as many events as the ring takes."""
        self._steps += 1
        if self._events_per_step and self._steps * self._events_per_step < self.max_events:
            return
        collects = gc.isenabled()
        gc.disable()  # what it freed while no profiler runs would be in use ever after
        try:
            self._end()
            self._events_per_step = max((self.recorded - self._begun) / self._steps, 1.0)
            self.start()
        finally:
            if collects:
                gc.enable()

    def stop(self, error: BaseException | None) -> dict[str, Any]:
        """The history, as a snapshot holds it."""
        self._end()
        segments = [
            {
                "device": 0,
                "address": block["address"],
                "total_size": block["size"],
                "allocated_size": block["size"],
                "active_size": block["size"],
                "requested_size": block["size"],
                "stream": 0,
                "segment_type": "large",
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "blocks": [block],
            }
            for block in sorted(self.alive.values(), key=lambda block: int(block["address"]))
        ]
        return {
            "segments": segments,
            "device_traces": [list(self.events)],
            "external_annotations": list(self.annotations),
            "allocator_settings": {},
        }

    def _end(self) -> None:
        """End the profiler and take over what it saw."""
        running, self._running = self._running, None
        if running is None:
            return
        running.stop()
        results = running.profiler.kineto_results if running.profiler is not None else None
        if results is None:
            return
        categories = _Categories(running)
        for address, size, category in categories.preexisting():
            self.alive.setdefault(address, _block(address, size, [], category))
        for kind, event in events_in_time(results.experimental_event_tree()):
            self._take(kind, event, categories)

    def _take(self, kind: str, event: Any, categories: _Categories) -> None:
        if kind == "TorchOp" and event.name.startswith(("Optimizer.", "ProfilerStep")):
            for stage, at_ns in (("START", event.start_time_ns), ("END", event.end_time_ns)):
                self.annotations.append({"stage": stage, "name": event.name, "device": 0, "time_us": at_ns // 1000})
        if kind != "Allocation":  # of one that failed, the profiler tells Python neither size nor device
            return
        fields = event.extra_fields
        if fields.device.type != "cpu":
            return
        self.recorded += 1
        size, time_us = int(fields.alloc_size), event.start_time_ns // 1000
        entry = {"size": abs(size), "stream": 0, "time_us": time_us, "frames": _frames(event)}
        address = int(fields.ptr)
        if size >= 0:
            category = categories.of(fields)
            if (before := self.alive.get(address)) is not None:  # freed unseen, as by another thread
                gone = {"action": "free_completed", "addr": address, **entry, "size": before["size"], "frames": []}
                self.events.append(gone)
            self.events.append({"action": "alloc", "addr": address, "category": category, **entry})
            self.alive[address] = _block(address, size, entry["frames"], category)
        else:
            self.events.append({"action": "free_completed", "addr": address, **entry})
            self.alive.pop(address, None)


class _Categories:
    """What the profiler took each tensor for, from its private tables: where they fail, nothing is said."""

    def __init__(self, running: profile) -> None:
        self._profile: Any = None
        try:
            self._profile = running._memory_profile()
        except Exception:
            return

    def of(self, fields: Any) -> str:
        from torch.profiler._memory_profiler import TensorKey

        key = TensorKey.from_allocation(fields) if self._profile is not None else None
        return "" if key is None else self._named(key)

    def preexisting(self) -> Iterator[tuple[int, int, str]]:
        """(address, bytes, category) of tensors from before the profiler started that operators touched."""
        if self._profile is None:
            return
        from torch.profiler._memory_profiler import Action, TensorKey

        for _, action, (key, _), size in self._profile.timeline:
            if action == Action.PREEXISTING and isinstance(key, TensorKey) and key.device.type == "cpu":
                yield int(key.storage.ptr), int(size), self._named(key)

    def _named(self, key: Any) -> str:
        for version in range(3):  # a tensor may be nameless when new and known after its first update
            category = self._profile._categories.get(key, version)
            if category is not None:
                return str(category.name).lower()
        return ""


def events_in_time(roots: list[Any]) -> list[tuple[str, Any]]:
    """All events of a profiler's tree by their starts, each with its kind: ``TorchOp``, ``Allocation``, ..."""
    events: list[Any] = []
    left = list(reversed(roots))
    while left:
        events.append(left.pop())
        left.extend(reversed(events[-1].children))
    return [(_kind(event), event) for event in sorted(events, key=lambda event: event.start_time_ns)]


def _kind(event: Any) -> str:
    return str(event.tag).rsplit(".", 1)[-1]


def _block(address: int, size: int, frames: list[dict[str, Any]], category: str) -> dict[str, Any]:
    return {
        "address": address,
        "size": size,
        "requested_size": size,
        "state": "active_allocated",
        "frames": frames,
        "category": category,
    }


def _frames(event: Any) -> list[dict[str, Any]]:
    """The stack of an event, innermost first: operators by name, Python by the line that made the call."""
    frames: list[dict[str, Any]] = []
    parent, in_python = event.parent, False
    while parent is not None and len(frames) < _DEEPEST_STACK:
        kind = _kind(parent)
        if kind in ("PyCall", "PyCCall"):
            calls = parent.extra_fields
            if not in_python and kind == "PyCall":
                # Only calls are traced, so of the innermost function the first line is known, not the one it is on.
                frames.append(_python_frame(calls.callsite))
            in_python = True
            caller = _python_frame(calls.caller)
            if not frames or frames[-1] != caller:
                frames.append(caller)
        elif not in_python:
            frames.append({"name": str(parent.name), "filename": "??", "line": 0})
        parent = parent.parent
    return frames


def _python_frame(state: Any) -> dict[str, Any]:
    return {"name": str(state.function_name), "filename": str(state.file_name), "line": int(state.line_number)}
