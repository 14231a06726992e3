"""Open a trace or a folder of ranks: from the columns kept from its last opening, or from its text."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fettle.errors import UsageError
from fettle.procs.limits import granted_cores
from fettle.trace.io import sidecar
from fettle.trace.io.assemble import assemble
from fettle.trace.io.decode import Columns
from fettle.trace.io.parallel import read_in_parallel
from fettle.trace.io.stream import Counted, NoMemoryLeft, begin, feed, parse_metadata, text_of
from fettle.trace.model import Trace

PARALLEL_ABOVE_BYTES = 160 << 20
DEFAULT_MAX_EVENTS = 200_000_000


def load(
    path: str | Path,
    *,
    rank: int | None = None,
    use_sidecar: bool = True,
    processes: int | None = None,
    max_events: int = DEFAULT_MAX_EVENTS,
    on_progress: Callable[[float], None] | None = None,
) -> Trace:
    """Open one profiler trace (JSON or gzipped JSON).

    Args:
        path: The file.
        rank: Which rank it is; None takes it from the file's `distributedInfo`, its name, or else 0.
        use_sidecar: Read the columns kept from an earlier opening of the very same bytes, and keep them otherwise.
        processes: How many processes decode a large uncompressed file; None chooses.
        max_events: Refuse files with more events than this.
        on_progress: Told the share of the file that has been read, again and again.

    Raises:
        UsageError: The file is missing, unreadable, or holds no events that PyTorch's profiler writes.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"no such trace file: {path}")
    key = sidecar.key_of(path) if use_sidecar else None
    if key is not None:
        kept = sidecar.read(path, key)
        if kept is not None:
            return kept if rank is None else replace(kept, rank=rank)
    try:
        columns, metadata = _read(path, processes, max_events, on_progress)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    except UsageError as error:
        raise type(error)(f"{path.name}: {error}") from error
    trace = assemble(path, columns, metadata)
    if not (trace.is_host.any() or trace.is_device.any() or trace.side["memory"].height):
        raise UsageError(
            f"{path.name}: none of its {trace.facts.events_seen} events is a complete one (ph X) with a category of "
            "PyTorch's profiler (cpu_op, kernel, ...); traces of JAX and TensorFlow, and begin/end pairs, are not read"
        )
    if key is not None and trace.facts.file_bytes > 1 << 20:
        sidecar.write(trace, key)
    return trace if rank is None else replace(trace, rank=rank)


def load_all(
    path: str | Path, *, own_end: bool = False, on_progress: Callable[[float], None] | None = None, **options: Any
) -> list[Trace]:
    """Open a file, or every trace in a folder (`*.json`, `*.json.gz`), one trace a rank, ordered by rank.

    Two files that claim one rank get different ones, and a file that cannot be read is left out: the health report says
    so. With `own_end` steps end with their own annotations. Raises `UsageError` where none can be read, or not all fit
    into memory together.
    """
    path = Path(path)
    if not path.is_dir():
        return [replace(load(path, on_progress=on_progress, **options), own_end=own_end)]
    files = sorted(p for p in path.iterdir() if p.is_file() and p.name.endswith((".json", ".json.gz", ".gz")))
    if not files:
        raise UsageError(f"no *.json or *.json.gz traces in {path}")
    traces: list[Trace] = []
    unreadable: list[str] = []
    for number, file in enumerate(files):

        def one(share: float, number: int = number) -> None:
            if on_progress is not None:
                on_progress((number + share) / len(files))

        try:
            traces.append(replace(load(file, on_progress=one, **options), own_end=own_end))
        except NoMemoryLeft:
            raise
        except UsageError as error:
            unreadable.append(str(error))
    if not traces:
        raise UsageError(unreadable[0])
    claimed = {trace.rank for trace in traces}
    for i, trace in enumerate(traces):
        if trace.rank in {other.rank for other in traces[:i]}:
            free = next(rank for rank in itertools.count() if rank not in claimed)
            claimed.add(free)
            note = f"rank {trace.rank} is claimed by another file too; called {free} here"
            traces[i] = _noted(replace(trace, rank=free), note)
    first, *rest = sorted(traces, key=lambda t: t.rank)
    return [_noted(first, *(f"left out of the folder: {line}" for line in unreadable)), *rest]


def _noted(trace: Trace, *notes: str) -> Trace:
    return replace(trace, facts=replace(trace.facts, notes=[*trace.facts.notes, *notes]))


def _read(
    path: Path, processes: int | None, max_events: int, on_progress: Callable[[float], None] | None
) -> tuple[Columns, dict[str, Any]]:
    size, columns = path.stat().st_size, Columns()
    facts = columns.facts
    facts.file_bytes = size
    with path.open("rb") as file:
        source = text_of(file)
        if source is file and size > PARALLEL_ABOVE_BYTES and processes != 1:
            count = min(processes or min(granted_cores()[0], 8), max(1, size // (64 << 20)))
            if count > 1:
                return read_in_parallel(path, size, count, max_events, on_progress=on_progress)
        on_read = None if on_progress is None else lambda: on_progress(file.tell() / max(size, 1))
        counted = Counted(source, on_read=on_read)
        header, text, boundary = begin(counted)
        feed(counted, text, boundary, columns, max_events)
    facts.truncated |= counted.broken
    metadata = parse_metadata(header, columns.trailer, facts)
    if facts.events_seen == 0:
        raise UsageError("no trace events in it: is it a profiler trace in Chrome JSON format?")
    return columns, metadata
