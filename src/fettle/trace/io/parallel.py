"""Several processes decode one large file, a span of whole events each at a time.

The spans are planned once and claimed one by one, by this process and by helpers of its own, whoever is free: a claim
is a file that only one can create. Helpers are plain interpreters that import this module and nothing of the caller's
program (multiprocessing would run the caller's main script again, which fails where that is not guarded). A span whose
helper died is decoded here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fettle.errors import UsageError
from fettle.procs.process import Process
from fettle.trace.io.decode import Columns
from fettle.trace.io.stream import BLOCK_BYTES, Counted, begin, feed, parse_metadata

SPAN_BYTES = 16 << 20
_PROBE_BYTES = max(BLOCK_BYTES, 8 << 20)
_HELPER = (
    "import sys; sys.path[:] = sys.argv[2:]; from fettle.trace.io.parallel import help_with as run; run(sys.argv[1])"
)


def read_in_parallel(
    path: Path,
    size: int,
    count: int,
    max_events: int,
    span_bytes: int = SPAN_BYTES,
    on_progress: Callable[[float], None] | None = None,
) -> tuple[Columns, dict[str, Any]]:
    """Decode an uncompressed file with `count` processes, this one included: its columns and its metadata."""
    with path.open("rb") as file:
        header, text, boundary = begin(Counted(file))
        start = size if not text else file.tell() - len(text)
        cuts = [start]
        wanted = max(count, (size - start) // span_bytes)
        for i in range(1, wanted):
            at = start + (size - start) * i // wanted
            file.seek(at)
            event_at = _event_start(file.read(_PROBE_BYTES), boundary)
            if event_at is not None and at + event_at > cuts[-1]:
                cuts.append(at + event_at)
    cuts.append(size)
    plan = {"path": str(path.resolve()), "cuts": cuts, "pattern": boundary.pattern.hex(), "max_events": max_events}
    plan["reader"] = os.getpid()
    with tempfile.TemporaryDirectory(prefix="fettle-trace-") as scratch:
        (Path(scratch) / "plan.json").write_text(json.dumps(plan))
        helpers: list[Process] = []
        try:
            with contextlib.suppress(OSError):  # there may be no more processes: then this one reads the more
                for _ in range(count - 1 if sys.executable else 0):
                    helpers.append(Process(["-c", _HELPER, scratch, *sys.path]))
            parts = {}
            for i in _claims(Path(scratch), len(cuts) - 1):  # in order: what comes before i is taken
                if on_progress is not None:
                    on_progress(i / (len(cuts) - 1))
                parts[i] = _decode(plan, i)
            for helper in helpers:
                helper.wait()
        finally:
            for helper in helpers:
                helper.close()
        spans = range(len(cuts) - 1)
        columns = _join([parts.get(i) or _fetch(Path(scratch), i) or _decode(plan, i) for i in spans])
    if columns.facts.events_seen > max_events:
        raise UsageError(f"more than {max_events} events: cut the trace, or raise max_events")
    columns.facts.file_bytes = size
    return columns, parse_metadata(header, columns.trailer, columns.facts)


def help_with(scratch: str) -> None:
    """What a helper does: decode spans as long as there are any, and leave their columns in files. Of a reader that was
    killed nothing is left."""
    folder = Path(scratch)
    plan = json.loads((folder / "plan.json").read_text())
    for i in _claims(folder, len(plan["cuts"]) - 1):
        if os.getppid() != plan["reader"]:
            break
        (folder / f"{i}.writing").write_bytes(pickle.dumps(_decode(plan, i)))
        (folder / f"{i}.writing").rename(folder / f"{i}.part")  # last, and at once: what is there is whole
    if os.getppid() != plan["reader"]:
        shutil.rmtree(folder, ignore_errors=True)


def _claims(folder: Path, count: int) -> Iterator[int]:
    for i in range(count):
        try:
            os.close(os.open(folder / f"{i}.claim", os.O_CREAT | os.O_EXCL))
        except OSError:  # another has it; or the folder is gone, because nobody waits any more
            continue
        yield i


def _fetch(folder: Path, i: int) -> Columns | None:
    """What a helper left of a span; None where it did not finish. The folder is this process's own."""
    left = folder / f"{i}.part"
    return pickle.loads(left.read_bytes()) if left.exists() else None


def _decode(plan: dict[str, Any], i: int) -> Columns:
    start, stop = plan["cuts"][i : i + 2]
    columns, boundary = Columns(), re.compile(bytes.fromhex(plan["pattern"]))
    with open(plan["path"], "rb") as file:
        file.seek(start)
        at_end = i == len(plan["cuts"]) - 2  # and not where the file ends, which may have grown since
        feed(Counted(file, stop - start), b"", boundary, columns, plan["max_events"], at_end)
    columns.side.settled()
    return columns


def _event_start(text: bytes, boundary: re.Pattern[bytes]) -> int | None:
    """Where an event starts in a piece of the file: a boundary behind which an event can be read."""
    decoder = json.JSONDecoder(strict=False)
    for match in itertools.islice(boundary.finditer(text), 1000):
        try:
            event, _ = decoder.raw_decode(text[match.end() : match.end() + (1 << 17)].decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and "ph" in event and "pid" in event:
            return match.end()
    return None


def _join(parts: list[Columns]) -> Columns:
    """The spans' columns behind one another, their text numbers translated into common ones."""
    joined = Columns()
    for mine in parts:
        names = np.array([joined.names[n] for n in mine.names], dtype=np.uint32)
        threads = np.array([joined.threads[t] for t in mine.threads.texts], dtype=np.int32)
        shapes = np.array([joined.shapes[s] for s in mine.shapes], dtype=np.uint32)
        for chunk in mine.chunks:
            chunk["name"] = names[chunk["name"]]
            chunk["thread"] = threads[chunk["thread"]]
            chunk["shape"] = shapes[chunk["shape"]]
            joined.chunks.append(chunk)
        for table, frames in mine.side.frames.items():
            for frame in frames:
                if "row" in frame.columns:
                    frame = frame.with_columns(pl.col("row") + joined.rows)
                if "thread" in frame.columns:
                    frame = frame.with_columns(thread=pl.Series(threads[frame["thread"].to_numpy()], dtype=pl.Int32()))
                joined.side.frames.setdefault(table, []).append(frame)
        joined.rows += mine.rows
        joined.thread_names.update(mine.thread_names)
        joined.facts.add(mine.facts)
        joined.trailer = mine.trailer or joined.trailer
    return joined
