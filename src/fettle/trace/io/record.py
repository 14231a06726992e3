"""Record a trace with settings that the analyses can use."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fettle.errors import UsageError
from fettle.files import check_writable, whole

if TYPE_CHECKING:
    from torch.profiler import profile


@contextlib.contextmanager
def record(
    path: str | Path,
    *,
    warmup: int = 1,
    wait: int = 0,
    active: int = 0,
    shapes: bool = True,
    memory: bool = False,
    stacks: bool = False,
    device_only: bool = False,
) -> Iterator[profile]:
    """Profile what runs inside and write a trace to `path` (`.json`, or `.json.gz` to have it compressed).

    With `active` steps, call `.step()` on the profiler after each step: `wait` steps are skipped, `warmup` steps are
    run with the profiler on and thrown away (its first step is slow), and then `active` steps are kept. Without, all
    of the block is kept. A block that ends in between leaves what there is, with a warning; one that raises before it
    writes nothing.

    Stacks explain idle time down to source lines and make the trace several times larger and the program slower; memory
    adds every allocation. Both are off. With `device_only` kernels, copies and the calls that launch them are recorded
    and no operators of torch, so that the program is slowed least; shapes, memory and stacks belong to operators.

    Raises:
        UsageError: `device_only` without a device whose activity torch can record, or with `memory` or `stacks`.
    """
    check_writable(path)
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

    from fettle.workload import wait_for

    device = torch.accelerator.is_available()  # of whatever make: a build supports the activities of its own
    supported = supported_activities()  # type: ignore[no-untyped-call]
    activities = [one for one in supported if device or one == ProfilerActivity.CPU]
    if device_only:
        if memory or stacks:
            raise UsageError("memory and stacks belong to operators, which `device_only=True` leaves out")
        activities = [one for one in activities if one != ProfilerActivity.CPU]
        if not activities:
            raise UsageError("`device_only=True`: torch sees no device here whose activity it could record")
    plan = schedule(wait=wait, warmup=warmup, active=active, repeat=1) if active else None
    written, failed = [], False
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's log would go to the user's terminal

    def write(profiler: profile) -> None:
        if not failed:
            with whole(path) as partial:
                profiler.export_chrome_trace(str(partial))
            written.append(path)

    with profile(
        activities=activities,
        schedule=plan,
        record_shapes=shapes,
        profile_memory=memory,
        with_stack=stacks,
        on_trace_ready=write,
    ) as profiler:
        try:
            yield profiler
        except BaseException:
            failed = True
            raise
        wait_for()
    if not written:
        raise RuntimeError(f"no trace was written: fewer than {wait + warmup + active} steps were run")
    kept = profiler.step_num - wait - warmup
    if active and kept < active - 1:  # the last may do without its call
        said = f"{path}: {kept} of {active} steps were run; what came after them is in the trace as one more"
        warnings.warn(said, stacklevel=3)
