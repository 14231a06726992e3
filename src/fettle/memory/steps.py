"""Where does one step of the program end and the next begin?

Snapshots carry the marks of the profiler on the trace's own clock, among them every optimizer step. Without any mark
there is no step: the layers of one forward pass look just like a leaking loop, each leaves its activations behind.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fettle.memory.replay import Replay
from fettle.memory.snapshot import Ints, Snapshot

STEP_MARK = "fettle.step"
"""The name under which `fettle.memory.record` notes the end of a step."""


@dataclass(frozen=True)
class Steps:
    """The last event of every step (an index into the trace), and where that knowledge comes from."""

    ends: Ints
    source: str

    def __len__(self) -> int:
        return len(self.ends)

    def of_event(self, events: Ints) -> Ints:
        """The step that events belong to, from 0; events before the window count as -1."""
        step = np.searchsorted(self.ends, events, side="left")
        return np.where(events < 0, -1, step)


def find_steps(snapshot: Snapshot, replay: Replay) -> Steps:
    """The program's own marks, else optimizer steps, else profiler steps, else none."""
    trace = replay.trace
    if trace.has_times:
        ends = [mark for mark in snapshot.annotations if mark.stage == "END"]
        for source, words in (
            ("marks of fettle.memory.record", STEP_MARK),
            ("optimizer steps", "Optimizer.step"),
            ("profiler steps", "ProfilerStep"),
        ):
            names = [mark.name for mark in ends if mark.name.startswith(words)]
            if not names:
                continue
            # Several optimizers step in turn: the first one's steps mark the cycle.
            chosen = [m for m in ends if m.name.startswith(words) and (m.name == names[0] or words == "ProfilerStep")]
            times = np.array([mark.time_us for mark in chosen], np.int64)
            events = np.unique(np.searchsorted(trace.time_us, times, side="right") - 1)
            return Steps(events[events >= 0], source)
    return Steps(np.empty(0, np.int64), "no marks in the file")
