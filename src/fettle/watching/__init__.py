"""Where do the steps of my own loop go?

    with fettle.watch() as steps:            # a loop over a DataLoader: nothing else to change
        for batch in loader:
            train_step(batch)

    for batch in fettle.step_timer(loader):  # any iterable
        train_step(batch)

    with fettle.watch() as steps:            # a loop without a loader, or of several batches a step: say where one ends
        while True:
            answer(queue.get())
            steps.step()

Of each step's wall time, `data` is waiting for the next batch, `sync` the host waiting for the device, `gc` Python's
garbage collector, and `host` all the rest: on a CPU the work itself, on a GPU launching it. On a GPU, NVML says
besides which share of the time no kernel ran. Nothing is profiled: a step is two reads of the clock and a
few additions. `bench/watch_overhead.py` measures what that costs.

With `slow_trace="slow.json"`, a step that has taken `slow_factor` times the median is looked at while
it is still going on: a second thread samples the loop's stack until the step ends, and writes what it saw as a trace
(Perfetto, chrome://tracing).

What it cannot see: waiting inside compiled or C++ code counts as `host`; so does data that the loop makes by itself.
"""

from __future__ import annotations

from fettle.watching.account import Steps
from fettle.watching.report import SlowStep, StepReport
from fettle.watching.watch import step_timer, watch

__all__ = ["SlowStep", "StepReport", "Steps", "step_timer", "watch"]
