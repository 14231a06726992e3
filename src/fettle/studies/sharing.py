"""One study on several machines: who measures what, and what others measured.

Workers on machines alike share the combinations: each claims a race's worth of them, measures those beside the workload
as given in a race of its own, and claims more. Machines that differ measure all of them each, and are the levels of a
factor. A device has one worker at a time.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from fettle.errors import UsageError
from fettle.journal import locked
from fettle.machine import Machine
from fettle.measure import Trial
from fettle.recipe import Recipe
from fettle.tuning import Session, recalled

_LOOK_S = 1.0
"""How often others' work is looked at."""


def measure_shares(session: Session, cells: Sequence[Recipe], most: int, deadline: float) -> None:
    """Measure `cells` together with whoever else is at it, `most` a race, until all are known or there is no time for
    another before `deadline` (`time.monotonic`)."""
    waiting, measured = False, -1
    while time.monotonic() < deadline:
        left = [cell for cell in cells if cell not in session.standings.known]
        if not left:
            return
        with one_at_a_time(session):
            measured_any = session.measure_share(left, most)
        if measured_any is False:
            return  # there is no time for another
        if measured_any is None:
            if not waiting:
                session.report("others measure what is left")
            time.sleep(_LOOK_S)
            before, measured = measured, len(session.study.hosts())
            if measured != before:  # reading all trials anew takes a core, which others may need for theirs
                session.refresh(anew=False)
        waiting = measured_any is None


@contextlib.contextmanager
def one_at_a_time(session: Session) -> Iterator[None]:
    """Hold the device, or all that are to be seen: of this user's workers that see one of them one measures at a
    time."""
    with contextlib.ExitStack() as ends:
        for name in _devices(session.facts.device):
            path = Path(tempfile.gettempdir()) / f"fettle-{os.getuid()}-{name}.lock"
            try:
                lock = locked(path, mode=0o600)
            except BlockingIOError:
                session.report("another worker measures on this device")
                lock = locked(path, wait=True, mode=0o600)
            except OSError as error:
                raise UsageError(f"{path}: the device cannot be taken ({error.strerror})") from None
            ends.callback(os.close, lock)
        yield


def _devices(kind: str) -> list[str]:
    """A name for each device, the same however ``CUDA_VISIBLE_DEVICES`` spells it; in one order, so that no two wait
    for each other."""
    if kind != "cuda":
        return [kind]
    import torch

    return sorted(f"{torch.cuda.get_device_properties(gpu).uuid}" for gpu in range(torch.cuda.device_count()))


def elsewhere(session: Session) -> list[tuple[Machine, list[Trial]]]:
    """What other kinds of machines measured of the same workload, each by its own races."""
    others = []
    for name, facts in session.study.machines().items():
        if name != this_one(session).id:
            own, known = session.study.on(name), session.standings
            trials = recalled(own, session.environments, known.judge, known.confidence)
            if trials:
                others.append((msgspec.convert(facts, Machine), trials))
    return others


def this_one(session: Session) -> Machine:
    """The machine as the study has it."""
    return msgspec.convert(session.study.note("machine"), Machine)


def labels(machines: Sequence[Machine]) -> dict[str, str]:
    """A short name for each, by id."""
    called = {one.id: ", ".join(one.gpus) or f"{one.cpu} x{one.cores}" for one in machines}
    names = {key: re.sub(r"[^\w.]+", "-", name).strip("-") for key, name in called.items()}
    counts = list(names.values())
    return {key: name if counts.count(name) == 1 else f"{name}-{key[:4]}" for key, name in names.items()}


def shares(name: str, workers: Mapping[str, int]) -> list[str]:
    """Who measured how much, for people; nothing where it was one."""
    if len(workers) < 2:
        return []
    each = ", ".join(f"{':'.join(worker.split(':')[:2])} {count}" for worker, count in sorted(workers.items()))
    return [f"{name}: measured by {len(workers)} workers: {each}"]
