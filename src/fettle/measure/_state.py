"""What a worker process holds, and what it does alike whatever its workload is."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from fettle.machine import measure_peaks
from fettle.measure import _meters
from fettle.measure._clock import Clock, warm_up
from fettle.measure._lockstep import agreed, slowest
from fettle.measure._notes import compile_cache
from fettle.measure._pace import Pace
from fettle.measure._trial import Accuracy
from fettle.measure._waits import Times, Waits, busiest, held_up_ns, one_core_each, ran_ns, waited_ns, without_waits
from fettle.measure._watch import throttled_s
from fettle.measure.messages import Examine, Examined, MeasurePeaks, Peaks, Prepared, SliceTaken, TakeSlice
from fettle.procs.forks import Imports, imports
from fettle.procs.limits import pages_fetched, resident_bytes
from fettle.techniques import Notes, state_kept
from fettle.workload import again, device_of, is_numbers, leaves, spread, tensors


@dataclass
class State:
    """What the worker holds from one request to the next."""

    workload: Any = None
    mode: str = "inference"
    made: Any = None
    """What the factory returned, where it had to be called to know the mode."""
    target: Any = None
    fingerprint: str = ""
    load_s: float = 0.0
    imported_s: float = 0.0
    """What the workload's imports took in the process that this one was forked from."""
    rows: int | float = 1
    """In a mean call, as throughput counts them."""
    derived_check: bool = False
    writes: bool = False
    """The workload writes text."""
    preparing: Iterator[Any] | None = None
    """What is left to do of `Prepare`."""
    watcher: Any = None
    """What takes the time of a text apart."""
    base_bytes: int = 0
    device: str = "cpu"
    gpus: Sequence[int] = ()
    """Those that the model and its inputs lie on, by torch's numbers."""
    run: Callable[..., Any] | None = None
    clock: Any = None
    cycle: Iterator[Any] | None = None
    calls: int = 1
    """Calls in one sample, which is the time of a mean one."""
    group: int = 1
    """What the waiting in a sample is divided by: its calls, unless only a part of each is timed."""
    call_ns: int = 0
    emptied: bool = False
    """What a GPU's allocator kept for the next call was given back: it has to be fetched again."""
    padding: Any = None
    waits: Waits = field(default_factory=Waits)
    pace: Pace = field(default_factory=lambda: Pace(Waits()))
    computing: Sequence[int] = ()
    """Threads that compute, by their number in the system."""
    is_pool: bool = False
    """They compute while the thread that calls sleeps."""
    told_s: float | None = None
    """CPU seconds of the process at the end of its last slice."""
    _variables: Mapping[str, str] = field(default_factory=dict)
    _began: float = 0.0

    def begin_to_build(self) -> None:
        """What runs from now on is the workload's own code."""
        self._variables, self._began = dict(os.environ), time.perf_counter()

    def end_of_build(self) -> Imports:
        """Take the time that building took, with the workload's imports in it, and say what these were."""
        self.load_s = self.imported_s + time.perf_counter() - self._began
        return imports(self._variables)

    def cpu_s(self) -> float:
        """CPU seconds of the process so far, and of its children, those that have ended among them."""
        ended = os.times()
        return time.process_time() + self.waits.children_s() + ended.children_user + ended.children_system


def seed_all(seed: int) -> None:
    """Seed every generator that data, a loss or a factory may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random").seed(seed)


def peaks(state: State, request: MeasurePeaks) -> Peaks:
    """The machine's peaks on the workload's device."""
    return Peaks(peaks=measure_peaks(state.device))


def examine(state: State, request: Examine) -> Examined:
    """Hand the workload to a function of another room, and return what it finds."""
    module, _, name = request.function.partition(":")
    function = getattr(importlib.import_module(module), name)
    writes = {"path": request.path} if request.path else {}
    with state_kept(state.workload.model):
        evidence = function(state.workload, seconds=request.seconds, **writes)
    return Examined(evidence=msgspec.Raw(msgspec.msgpack.encode(evidence)), load_s=state.load_s)


def locate(state: State, batch: Any = None) -> None:
    """Find out where the model and a batch lie; what is asked of the current GPU is asked of that one from now on."""
    model = state.workload.model
    state.device, state.gpus = device_of(model, batch), gpus_of(model, batch)
    if state.gpus:
        torch.cuda.set_device(state.gpus[0])


def locate_by(state: State, output: Any) -> None:
    """Find out where a callable computes whose weights nobody sees, with inputs on the CPU: its output tells."""
    if state.device == "cpu" and device_of(None, output) != "cpu":
        locate(state, output)
        state.clock = Clock(state.device, state.gpus)


def gpus_of(model: Any, batch: Any) -> list[int]:
    """The numbers of the CUDA devices that a module's parameters and buffers and a batch's tensors lie on."""
    held = itertools.chain(model.parameters(), model.buffers()) if isinstance(model, torch.nn.Module) else ()
    places = dict.fromkeys(tensor.device for tensor in itertools.chain(held, tensors(batch)))
    return [place.index for place in places if place.type == "cuda"]


def rebase(state: State) -> None:
    """Take what the process holds now, without the model's weights, as what memory is counted from."""
    _meters.trim()
    state.base_bytes = resident_bytes() - weight_bytes(state.workload.model)


def settled(
    state: State, has_peak: bool, notes: list[str], first: Callable[[], tuple[list[int], bool]] = lambda: ([], False)
) -> int | None:
    """Call until the time is steady; the peak of memory meanwhile, where it was reset and can be known.

    `first` makes the first calls: their nanoseconds, and whether they were steady already."""
    state.waits.refresh()
    before = state.waits.by_thread()
    samples, steady = first()
    samples, steady = [slowest(ns) for ns in samples], agreed(steady)
    if not steady:
        samples, steady = warm_up(lambda: state.pace.timed(lambda: one_sample(state)), samples)
    state.waits.refresh()
    state.computing = busiest(before, state.waits.by_thread())
    state.is_pool = threading.get_native_id() not in state.computing
    peak = _meters.peak_bytes(state.device) if has_peak else None
    if peak is not None:
        peak = max(0, peak - state.clock.held_bytes)
    state.call_ns = sorted(samples)[len(samples) // 2]
    if not steady:
        notes.append("the time was still falling after 10 s of warm-up")
    return peak


def prepared(
    state: State, optimize_s: float, first_call_s: float, accuracy: Accuracy, peak: int | None, samples: int | float,
    notes: Notes, phases_ms: Mapping[str, float] | None = None,
) -> Prepared:  # fmt: skip
    """What is reported of a recipe that is ready to be timed. On a CPU the peak is that above the loaded process."""
    if peak is not None and state.device != "cuda":
        peak = max(0, peak - state.base_bytes)
    state.emptied = _meters.empty(state.gpus)
    return Prepared(
        load_s=state.load_s,
        optimize_s=optimize_s,
        first_call_s=first_call_s,
        cache=compile_cache(),
        accuracy=accuracy,
        peak_bytes=peak,
        device=state.device,
        gpu=_meters.uuid_of(state.gpus[0]) if state.gpus else "",
        call_ns=state.call_ns,
        calls=state.calls,
        samples=samples,
        notes=list(dict.fromkeys(notes.lines)),
        learned=notes.learned,
        phases_ms=phases_ms or {},
    )


def one_sample(state: State) -> int:
    """Time one call; where batches differ in shape, one round through all of them, as the time of a mean call."""
    assert state.cycle is not None
    group = next(state.cycle)
    state.calls = state.group = len(group)
    total = 0
    if state.writes:
        began = time.perf_counter_ns()
        total = sum(state.watcher.sample_ns(state.run, prompt, number) for number, prompt in group)
        if total:  # of the waiting only the timed part's share is taken out of it
            state.group = max(1, round(len(group) * (time.perf_counter_ns() - began) / total))
        return slowest(total // len(group))
    for batch in map(again, group):
        total += state.clock.time_ns(lambda batch=batch: call(state.run, batch))
    return slowest(total // len(group))


def rotation(batches: Sequence[Any]) -> list[list[Any]]:
    """Batches grouped into samples: each alone where they have one shape, all together where they differ, also in their
    plain numbers or how long their texts are: a call may take as long as these say."""

    def said(batch: Any) -> tuple[Any, ...]:
        plain = (leaf for _, leaf in leaves(batch) if isinstance(leaf, (str, bytes, int, float)))
        return tuple(len(leaf) if isinstance(leaf, (str, bytes)) else leaf for leaf in plain)

    alike = same_shapes(batches) and len(set(map(said, batches))) == 1
    return [[batch] for batch in batches] if alike else [list(batches)]


def same_shapes(batches: Iterable[Any]) -> bool:
    """Whether the tensors and arrays of all batches lie at the same places and have the same shapes."""

    def shapes(batch: Any) -> tuple[Any, ...]:
        numbers = (
            (path, leaf)
            for path, leaf in leaves(batch, caches=True)
            if isinstance(leaf, torch.Tensor) or is_numbers(leaf)
        )
        return tuple((path, leaf.shape) for path, leaf in numbers)

    return len(set(map(shapes, batches))) == 1


def call(run: Callable[..., Any] | None, batch: Any) -> Any:
    """Call the tuned callable on one batch."""
    assert run is not None
    args, kwargs = spread(batch)
    return run(*args, **kwargs)


def weight_bytes(model: Any) -> int:
    """Bytes of a module's parameters and buffers, tied ones once; 0 for a plain callable."""
    if not isinstance(model, torch.nn.Module):
        return 0
    every = itertools.chain(model.parameters(), model.buffers())
    distinct = {id(t): t for t in every if not torch.nn.parameter.is_lazy(t)}
    return sum(t.numel() * t.element_size() for t in distinct.values() if t.device.type == "cpu")


_CHUNK_NS = 10_000_000
"""Calls between two looks at the scheduler's counters, which take 20 microseconds: a five hundredth."""
_FULL = 0.5
"""Share of a GPU's memory. Where more is taken the others of a race may lack what a process keeps for its next call."""


def take_slice(state: State, request: TakeSlice) -> SliceTaken:
    """Call for `request.seconds`, at least once.

    With `request.apart` the threads that compute have a core each meanwhile (`one_core_each`).
    """
    wanted_ns = int(request.seconds * 1e9)
    # CPU time since the last slice, between slices too: what is not reported here counts as other programs'.
    if state.told_s is None:
        state.waits.refresh()
        state.told_s = state.cpu_s()
    before_s = state.told_s
    # Where the allocator happens to put a buffer can change the time of a small model by half, for as long as the
    # process lives. Blocks of random sizes, held until the next slice, move the buffers of each slice elsewhere.
    sizes = random.SystemRandom()  # different in each process: torch and random are seeded alike in all
    state.padding = [torch.empty(sizes.randrange(64, 1 << 18), dtype=torch.uint8) for _ in range(16)]
    apart = one_core_each(state.computing) if request.apart and state.device == "cpu" else contextlib.nullcontext()
    samples: list[int] = []
    chunks: list[_Chunk] = []
    with apart:
        # What ran between two slices has emptied the caches: where calls are short, one unmeasured call fills them.
        # Where a GPU's memory was given back, it also fetches that again, which takes milliseconds.
        if agreed(state.call_ns < wanted_ns * (1.0 if state.emptied else 0.2)):
            one_sample(state)
        state.waits.refresh()
        energy = _meters.energy_j(state.gpus)
        waits, stopped_s, pages = state.waits.by_thread(), throttled_s(), pages_fetched()
        started = chunk = time.perf_counter_ns()
        count = 0
        while not samples or agreed(time.perf_counter_ns() - started < wanted_ns):
            samples.append(one_sample(state))
            if time.perf_counter_ns() - chunk >= _CHUNK_NS:
                before, waits = waits, state.waits.by_thread()
                chunks.append(_chunk(state, samples[count:], before, waits))
                count, chunk = len(samples), time.perf_counter_ns()
    pages = pages_fetched() - pages
    after = _meters.energy_j(state.gpus)
    if count < len(samples):
        chunks.append(_chunk(state, samples[count:], waits, state.waits.by_thread()))
    was_stopped = stopped_s is not None and (throttled_s() or 0.0) > stopped_s
    if state.call_ns > 10 * wanted_ns:  # SAM's encoder keeps 3 GiB for its next call, which the others may need now
        _meters.trim()
    state.emptied = _meters.empty(state.gpus, fullest=_FULL)
    waits_known = all(waited for _, _, waited, _ in chunks)
    delays = [
        (calls, ns, held_up_ns(ns, waited, at_once=was_stopped, neighbours=request.neighbours, ran=ran))
        for calls, ns, waited, ran in chunks if waits_known
    ]  # fmt: skip
    state.told_s = state.cpu_s()
    return SliceTaken(
        samples_ns=samples,
        unhindered_ns=without_waits(delays),
        waits=sum(sum(waited) for _, _, waited, _ in chunks) / sum(samples) if waits_known else math.nan,
        cpu_s=state.told_s - before_s,
        pages=pages / len(samples) / state.calls,
        energy_j=_meters.spent(energy, after, len(samples) * state.calls),
        gpus=[_meters.uuid_of(gpu) for gpu in state.gpus],
        texts=state.watcher.take() if state.writes else (),
    )


_Chunk = tuple[int, int, list[int], list[int]]


def _chunk(state: State, samples: list[int], before: Times, after: Times) -> _Chunk:
    """How many samples, their nanoseconds, and those that each thread waited, none where that is unknown; where the
    threads are a pool also those that each that computes ran."""
    ran = ran_ns(before, after, state.computing) if state.is_pool else []
    return (
        len(samples), sum(samples), [ns // state.group for ns in waited_ns(before, after)],
        [ns // state.group for ns in ran],
    )  # fmt: skip
