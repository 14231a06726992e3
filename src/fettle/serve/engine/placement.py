"""Where workers run: cores, given out so that no two workers get the same one."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fettle.procs.limits import affinity


def usable_cores() -> list[int]:
    """Cores that this process may use; empty where the system does not let processes be bound."""
    return sorted(affinity())


def cores_for(workers: int, threads: int, usable: Sequence[int], taken: Collection[int]) -> list[list[int]]:
    """Cores for each of `workers`, `threads` apiece (0: as many as there are for all), beside those `taken`.

    Empty where there are not enough for that, or only one worker: then none is bound and the system schedules them.
    """
    free = [core for core in usable if core not in taken]
    each = threads or len(free) // workers
    if workers < 2 or each < 1 or each * workers > len(free):
        return []
    return [free[each * index : each * (index + 1)] for index in range(workers)]
