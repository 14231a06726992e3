"""The columns of a trace kept from its last opening, so that the next one is instant.

A sidecar is used only where the file is still the same: name, size, modification and change times, and a hash of its
content (whole for files up to 64 MiB, of blocks spread over larger ones). It lives in the user's cache folder, not
beside the trace, and holds plain Arrow columns: nothing in it is executed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import polars as pl

from fettle.errors import UsageError
from fettle.files import cache_folder
from fettle.kept_files import let_go, whole_folder
from fettle.trace.model import EVENT_COLUMNS, SIDE_TABLES, ReadFacts, Trace

FORMAT = 8
MOST_BYTES = 16 << 30
"""More is not kept: what was read longest ago goes first."""
_AS_JSON = ("rank", "names", "threads", "shapes", "metadata", "thread_names")
_WHOLE_BYTES = 64 << 20
_SAMPLE_BYTES = 1 << 20
_FACTS = "facts.json"
"""Its own time is when the trace was last opened."""


def folder() -> Path:
    return cache_folder("traces")


def key_of(path: Path) -> dict[str, Any] | None:
    """What identifies a file's very content; None where it cannot be read, or there is no folder to keep columns in."""
    try:
        folder()
        stat = path.stat()
        digest = hashlib.blake2b(digest_size=20)
        with path.open("rb") as file:
            if stat.st_size <= _WHOLE_BYTES:
                while block := file.read(1 << 20):
                    digest.update(block)
            else:
                for i in range(33):
                    file.seek((stat.st_size - _SAMPLE_BYTES) * i // 32)
                    digest.update(file.read(_SAMPLE_BYTES))
    except (OSError, UsageError):
        return None
    return {
        "format": FORMAT,
        "path": str(path.resolve()),
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "ctime_ns": stat.st_ctime_ns,
        "hash": digest.hexdigest(),
    }


def _place(key: dict[str, Any]) -> Path:
    return folder() / hashlib.blake2b(key["path"].encode("utf-8", "replace"), digest_size=16).hexdigest()


def read(path: Path, key: dict[str, Any]) -> Trace | None:
    """The kept columns where they belong to exactly this content; None otherwise, whatever is wrong with them."""
    place = _place(key)
    try:
        facts = json.loads((place / _FACTS).read_text())
        if facts["key"] != key:
            return None
        events = pl.read_ipc(place / "events.arrow")
        side = {table: pl.read_ipc(place / f"{table}.arrow") for table in SIDE_TABLES}
        if dict(events.schema) != EVENT_COLUMNS or any(dict(side[t].schema) != s for t, s in SIDE_TABLES.items()):
            return None
        met = ReadFacts(**{**facts["facts"], "from_sidecar": True})
        kept = {name: facts[name] for name in _AS_JSON} | {"threads": [(p, t) for p, t in facts["threads"]]}
        trace = Trace(path=path, events=events, side=side, **kept, facts=met)
    except (OSError, ValueError, KeyError, TypeError, pl.exceptions.PolarsError):
        return None
    with contextlib.suppress(OSError):
        os.utime(place / _FACTS)
    return trace


def write(trace: Trace, key: dict[str, Any]) -> None:
    """Keep the columns; a folder that cannot be written is not an error, the trace is only slower to open next time."""
    place = _place(key)
    with contextlib.suppress(OSError, ValueError, pl.exceptions.PolarsError):
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with whole_folder(place) as made:
            trace.events.write_ipc(made / "events.arrow")
            for table, frame in trace.side.items():
                frame.write_ipc(made / f"{table}.arrow")
            facts = {name: getattr(trace, name) for name in _AS_JSON} | {"key": key, "facts": asdict(trace.facts)}
            (made / _FACTS).write_text(json.dumps(facts))
        let_go(place.parent, _FACTS, MOST_BYTES)
