"""How long the threads of this process were ready to run and had no core, in nanoseconds.

The kernel's scheduler counts that for each thread (`/proc/<pid>/task/<tid>/schedstat`, second field; the kernel's
*Scheduler Statistics*). It is what a busy neighbour does to a call, and needs no guess at who the neighbour is.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

Times = dict[int, tuple[int, int]]
"""Nanoseconds that each thread has run and has waited."""


class Waits:
    """How long this process's threads have waited for a core, from its own files in /proc."""

    def __init__(self, folder: Path = Path("/proc/self/task")) -> None:
        self._folder = folder
        self._files: dict[int, int] = {}

    def refresh(self) -> None:
        """Look which threads there are."""
        try:
            threads = {int(name) for name in os.listdir(self._folder)}
        except OSError:
            threads = set()
        for thread in self._files.keys() - threads:
            os.close(self._files.pop(thread))
        for thread in threads - self._files.keys():
            with contextlib.suppress(OSError):
                self._files[thread] = os.open(self._folder / str(thread) / "schedstat", os.O_RDONLY)

    def children_s(self) -> float:
        """CPU seconds that the processes begun by these threads have had: a loader's workers are not strangers."""
        total = 0.0
        for thread in self._files:
            with contextlib.suppress(OSError, ValueError, IndexError):
                for child in _text(f"{self._folder}/{thread}/children").split():
                    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                    total += sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")
        return total

    def by_thread(self) -> Times:
        """Nanoseconds that each thread has run and has waited."""
        times = {}
        for thread, file in self._files.items():
            with contextlib.suppress(OSError, ValueError, IndexError):
                run, waited = os.pread(file, 96, 0).split()[:2]
                times[thread] = (int(run), int(waited))
        return times


def _text(path: str) -> str:
    """What a short file says; `Path.read_text` takes twice as long, and there is one of these for each thread."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, 1 << 16).decode()
    finally:
        os.close(file)


@contextlib.contextmanager
def one_core_each(threads: Sequence[int]) -> Iterator[None]:
    """Pin each of these threads to one core, where there are at least as many threads as cores.

    Beside a busy neighbour the kernel may put two threads that wait for each other on one core, and then the time
    says nothing of the model. Pinned, only the thread that shares its core with the neighbour waits, and its waiting
    can be taken out.
    """
    try:
        allowed = sorted(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        allowed = []
    held = threads if 1 < len(allowed) <= len(threads) else ()
    for number, thread in enumerate(held):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(thread, {allowed[number % len(allowed)]})
    try:
        yield
    finally:
        for thread in held:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, allowed)


def busiest(before: Times, after: Times) -> list[int]:
    """The threads that computed between two readings of `Waits.by_thread`, the busiest first."""
    ran = {thread: run - before.get(thread, (0, 0))[0] for thread, (run, _) in after.items()}
    most = max(ran.values(), default=0)
    return sorted((thread for thread in ran if ran[thread] > 0.2 * most), key=lambda thread: -ran[thread])


def ran_ns(before: Times, after: Times, threads: Sequence[int]) -> list[int]:
    """Nanoseconds that each of these threads ran between two readings of `Waits.by_thread`."""
    return [max(0, after[thread][0] - before[thread][0]) for thread in threads if thread in before and thread in after]


def waited_ns(before: Times, after: Times) -> list[int]:
    """Nanoseconds that each thread waited between two readings of `Waits.by_thread`; empty where the kernel does not
    say."""
    return [max(0, waited - before[thread][1]) for thread, (_, waited) in after.items() if thread in before]


def held_up_ns(
    ns: int, waited: Sequence[int], *, at_once: bool = False, neighbours: int = 1, ran: Sequence[int] = ()
) -> int:
    """How long a call of `ns` was held up by what its threads `waited`, which work on one operator and so wait for the
    slowest of them (docs/measuring.md).

    Beside one neighbour one of them waits at a time, and all of it counts. Threads that are stopped `at_once`, by a
    quota, hold up as long as one of them waits. Beside several neighbours each waits whatever the others do.

    Those are threads of OpenMP, with the one that calls among them. Threads of a pool, to which the one that calls
    leaves the work (OpenVINO's), take over what one that waits would have done, and sleep where there is nothing to do:
    what each of them `ran` is what the call takes.
    """
    if ran:
        return max(0, min(sum(waited), round(ns - sum(ran) / len(ran))))
    if at_once:
        return max(waited)
    if neighbours <= 1:
        return sum(waited)
    return round(ns * (1 - math.prod(1 - min(1.0, one / max(1, ns)) for one in waited)))


def without_waits(chunks: Sequence[tuple[int, int, int]]) -> float:
    """Nanoseconds of a call had its threads not waited, from chunks of (calls, nanoseconds, nanoseconds held up).

    Chunks in which nothing waited say so themselves, where a few of them did; else the waiting is taken out of each
    (`held_up_ns`). NaN where hardly anything is left.
    """
    clean = sorted(ns / calls for calls, ns, waited in chunks if waited <= 0.01 * ns)
    if len(clean) >= 3:
        return clean[len(clean) // 2]
    if not chunks:
        return math.nan
    left = sorted((ns - waited) / calls for calls, ns, waited in chunks)
    whole = sorted(ns / calls for calls, ns, _ in chunks)
    middle = left[len(left) // 2]
    return middle if middle > 0.2 * whole[len(whole) // 2] else math.nan
