"""The loaded trace: columns, and what reading it cost.

One `Trace` is one file, which is one rank. Times are integer nanoseconds on that file's own clock. Events are rows of a
polars frame; text that repeats (names, threads, shapes) is kept once and referred to by number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl

from fettle.trace.kinds import DEVICE_KINDS, HOST_KINDS, Kind, host_cause, is_collective_name

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
P = ParamSpec("P")
R = TypeVar("R")

EVENT_COLUMNS: dict[str, pl.DataType] = {
    "ts_ns": pl.Int64(),  # start, on the file's clock
    "dur_ns": pl.Int64(),
    "name": pl.UInt32(),  # index into Trace.names
    "kind": pl.UInt8(),  # a fettle.trace.kinds.Kind
    "thread": pl.Int32(),  # index into Trace.threads: process and thread, or device and stream
    "device": pl.Int16(),  # -1: no device
    "stream": pl.Int64(),  # as the profiler wrote it; -1: none
    "correlation": pl.Int64(),  # ties a launch to its kernels; -1: none
    "external": pl.Int64(),  # ties runtime calls and kernels to the operator; -1: none
    "shape": pl.UInt32(),  # index into Trace.shapes; 0: not recorded
}

# Sparse facts: few events have them, so they live in tables of their own, keyed by the event's row.
SIDE_TABLES: dict[str, dict[str, pl.DataType]] = {
    "autograd": {"row": pl.Int64(), "sequence": pl.Int64()},
    "copies": {"row": pl.Int64(), "bytes": pl.Int64(), "gb_per_s": pl.Float64()},
    "collectives": {
        "row": pl.Int64(),
        "collective": pl.String(),
        "group": pl.String(),
        "group_size": pl.Int64(),
        "in_elements": pl.Int64(),
        "out_elements": pl.Int64(),
        "dtype": pl.String(),
    },
    "syncs": {"row": pl.Int64(), "sync": pl.String(), "wait_on_stream": pl.Int64(), "wait_on_record": pl.Int64()},
    "launches": {"row": pl.Int64(), "blocks_per_sm": pl.Float64(), "occupancy": pl.Float64()},
    "generated": {"row": pl.Int64(), "file": pl.String()},
    "products": {"row": pl.Int64(), "types": pl.String(), "values": pl.String()},  # of its inputs, as JSON
    "stacks": {"row": pl.Int64(), "stack": pl.String()},
    "counters": {"row": pl.Int64(), "counter": pl.String(), "value": pl.Float64()},
    "memory": {
        "ts_ns": pl.Int64(),
        "thread": pl.Int32(),
        **dict.fromkeys(("device_type", "device", "bytes", "address", "allocated_bytes", "reserved_bytes"), pl.Int64()),
    },
}


@dataclass
class ReadFacts:
    """What reading the file met: every count is of events or bytes that are not, or not exactly, in the columns."""

    file_bytes: int = 0
    events_seen: int = 0
    truncated: bool = False
    skipped_events: int = 0
    repaired_bytes_chunks: int = 0
    negative_durations: int = 0
    absurd_times: int = 0
    missing_duration: int = 0
    wide_clock_chunks: int = 0
    begin_end: int = 0
    uncategorised: int = 0
    unknown_categories: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    from_sidecar: bool = False

    def add(self, other: ReadFacts) -> None:
        """Take in what reading another part of the file met."""
        for name, theirs in vars(other).items():
            mine = getattr(self, name)
            setattr(self, name, type(mine)(mine + theirs))


@dataclass(frozen=True)
class Trace:
    """One rank's trace in columns; see `EVENT_COLUMNS` and `SIDE_TABLES` for what they hold."""

    path: Path
    rank: int
    events: pl.DataFrame
    names: list[str]
    threads: list[tuple[str, str]]
    shapes: list[str]
    side: dict[str, pl.DataFrame]
    metadata: dict[str, Any] = field(default_factory=dict)
    thread_names: dict[str, str] = field(default_factory=dict)
    facts: ReadFacts = field(default_factory=ReadFacts)
    own_end: bool = False
    """Whether a step ends with its own annotation, not where the next one begins."""

    def column(self, name: str) -> npt.NDArray[Any]:
        """One column of the events as a numpy array, without a copy."""
        return self.events[name].to_numpy()

    @cached_property
    def ts(self) -> Ints:
        return self.column("ts_ns")

    @cached_property
    def dur(self) -> Ints:
        return self.column("dur_ns")

    @cached_property
    def end(self) -> Ints:
        return self.ts + self.dur

    @cached_property
    def kind(self) -> npt.NDArray[np.uint8]:
        return self.column("kind")

    @cached_property
    def is_device(self) -> Bools:
        """Kernels, copies and memory sets: what keeps a device busy. Sync events and annotations do not."""
        return np.isin(np.arange(256), DEVICE_KINDS)[self.kind]

    @cached_property
    def is_host(self) -> Bools:
        return np.isin(np.arange(256), HOST_KINDS)[self.kind]

    @cached_property
    def device_rows(self) -> Ints:
        """Rows of device work, by start time."""
        rows = np.flatnonzero(self.is_device)
        return rows[np.argsort(self.ts[rows], kind="stable")]

    def lane(self, rows: Ints) -> Ints:
        """A number for the device and stream of each row."""
        device, stream = self.column("device")[rows].astype(np.int64), self.column("stream")[rows]
        return np.unique(device * 2**40 + stream % 2**40, return_inverse=True)[1].astype(np.int64)

    @cached_property
    def is_collective(self) -> Bools:
        """Kernels that communicate: known by the profiler's collective arguments, by the operator, or by their name."""
        flags = self.named(is_collective_name)
        flags[self.side["collectives"]["row"].to_numpy()] = True
        flags &= self.kind == Kind.KERNEL
        return flags

    @cached_property
    def cause_of_name(self) -> dict[tuple[int, int], str]:
        """Idle cause of each (name, kind) pair on the host: classified once for each, not for each event."""
        host = self.is_host
        met = np.zeros(len(self.names) * 256, dtype=bool)
        met[self.column("name")[host].astype(np.int64) * 256 + self.kind[host]] = True
        pairs = [(int(p) // 256, int(p) % 256) for p in np.flatnonzero(met)]
        return {(name, kind): host_cause(self.names[name], Kind(kind)) for name, kind in pairs}

    @cached_property
    def kept(self) -> dict[Any, Any]:
        """Answers of the functions under `per_trace`."""
        return {}

    @cached_property
    def span(self) -> tuple[int, int]:
        """First start and last end of host and device work, ns; (0, 0) for an empty trace."""
        keep = self.is_device | self.is_host
        if not keep.any():
            return (0, 0)
        return int(self.ts[keep].min()), int(self.end[keep].max())

    @cached_property
    def device_keys(self) -> list[int]:
        """Devices that did work, in order."""
        return sorted(int(d) for d in np.unique(self.column("device")[self.is_device]))

    def named(self, test: Callable[[str], object], rows: Ints | None = None) -> Bools:
        """Whether the name of each event, or of each of some rows, passes a test, which is asked once for each name."""
        passes = np.fromiter((bool(test(name)) for name in self.names), dtype=bool, count=len(self.names))
        code = self.column("name")
        flags: Bools = passes[code if rows is None else code[rows]]
        return flags

    def name_of(self, rows: Ints) -> list[str]:
        names = self.names
        return [names[code] for code in self.column("name")[rows]]

    def thread_label(self, thread: int) -> str:
        process, tid = self.threads[thread]
        label = self.thread_names.get(f"{process}/{tid}", "")
        return label or f"process {process} thread {tid}"


def per_trace(analysis: Callable[Concatenate[Trace, P], R]) -> Callable[Concatenate[Trace, P], R]:
    """Answer once for each trace and arguments, and keep the answer with the trace."""

    @wraps(analysis)
    def answered(trace: Trace, /, *args: P.args, **kwargs: P.kwargs) -> R:
        key = (analysis, args, tuple(kwargs.items()))
        if key not in trace.kept:
            trace.kept[key] = analysis(trace, *args, **kwargs)
        answer: R = trace.kept[key]
        return answer

    return answered
