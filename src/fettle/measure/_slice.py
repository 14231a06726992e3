"""A slice of a race, in the worker: calls for so many seconds, and how long their threads waited for a core."""

from __future__ import annotations

import contextlib
import math
import random
import time

from fettle.measure._state import State, one_sample
from fettle.measure._waits import one_core_each, without_waits
from fettle.measure.messages import SliceTaken, TakeSlice

_CHUNK_NS = 10_000_000
"""Calls between two looks at the scheduler's counters, which take 20 microseconds: a five hundredth."""


def take_slice(state: State, request: TakeSlice) -> SliceTaken:
    """Call for `request.seconds`, at least once.

    With `request.apart` the threads that compute have a core each meanwhile (`one_core_each`).
    """
    import torch

    from fettle.measure import _meters
    from fettle.measure._lockstep import agreed

    wanted_ns = int(request.seconds * 1e9)
    # Where the allocator happens to put a buffer can change the time of a small model by half, for as long as the
    # process lives. Blocks of random sizes, held until the next slice, move the buffers of each slice elsewhere.
    state.padding = [torch.empty(random.randrange(64, 1 << 18), dtype=torch.uint8) for _ in range(16)]
    apart = one_core_each(state.computing) if request.apart and state.device == "cpu" else contextlib.nullcontext()
    samples: list[int] = []
    chunks: list[tuple[int, int, int | None]] = []
    with apart:
        # What ran between two slices has emptied the caches: where calls are short, one call settles them unmeasured.
        if state.call_ns * 5 < wanted_ns:
            one_sample(state)
        state.waits.refresh()
        energy = _meters.energy_j(state.device)
        cpu_s = time.process_time() + state.waits.children_s()
        waited_ns = state.waits.total_ns()
        started = chunk = time.perf_counter_ns()
        count = 0
        while not samples or agreed(time.perf_counter_ns() - started < wanted_ns):
            samples.append(one_sample(state))
            if time.perf_counter_ns() - chunk >= _CHUNK_NS:
                before, waited_ns = waited_ns, state.waits.total_ns()
                chunks.append(_chunk(state, samples[count:], before, waited_ns))
                count, chunk = len(samples), time.perf_counter_ns()
    after = _meters.energy_j(state.device)
    if count < len(samples):
        chunks.append(_chunk(state, samples[count:], waited_ns, state.waits.total_ns()))
    if state.call_ns > 10 * wanted_ns:  # SAM's encoder keeps 3 GiB for its next call, which the others may need now
        _meters.trim()
    waited = [chunk[2] for chunk in chunks if chunk[2] is not None]
    return SliceTaken(
        samples_ns=samples,
        unhindered_ns=without_waits(chunks),
        waits=sum(waited) / sum(samples) if len(waited) == len(chunks) else math.nan,
        cpu_s=time.process_time() + state.waits.children_s() - cpu_s,
        energy_j=(after - energy) / len(samples) if energy is not None and after is not None else None,
        texts=state.watcher.take() if state.writes else (),
    )


def _chunk(
    state: State, samples: list[int], before_ns: int | None, after_ns: int | None
) -> tuple[int, int, int | None]:
    known = before_ns is not None and after_ns is not None
    waited = max(0, after_ns - before_ns) // state.group if known else None  # type: ignore[operator]
    return len(samples), sum(samples), waited
