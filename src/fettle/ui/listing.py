"""What lies in a folder that fettle knows: studies, reports, load, traces, snapshots, packages.

Files are recognised by a few bytes of each: nothing is unpickled, and no code of theirs runs. Symbolic links are not
followed and not listed, so that what is found lies in the folder.
"""

from __future__ import annotations

import contextlib
import html
import itertools
import math
import os
import re
import shlex
import sqlite3
import stat
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from time import monotonic, time
from typing import Any
from urllib.parse import quote

import msgspec

from fettle.errors import UsageError
from fettle.estimates import Interval
from fettle.units import count_text, rate_text

RUNNING_S = 180.0
"""A study whose storage or logs changed within so many seconds, and after its result was written, is taken to run."""
MOST_FILES = 20_000
"""Files that are looked at; a folder with more is shown in part, which is said."""
_PEEK = 8192
_MOST_SQL_S, _MOST_RESULT = 2.0, 8 << 20
_SETTLED_S = 1.0
_SKIP = {"__pycache__", "node_modules", "site-packages", "cache"}
TYPES = {".html": "text/html", ".svg": "image/svg+xml", ".png": "image/png"} | dict.fromkeys(
    (".json", ".jsonl", ".toml", ".csv", ".py", ".md", ".txt", ".log"), "text/plain"
)
"""What may be shown in a browser, by suffix, as what; of anything else its path is all that is shown."""
KINDS = ("study", "report", "load", "trace", "snapshot", "package", "results")


@dataclass(frozen=True)
class Item:
    """One thing in the folder."""

    kind: str
    """One of `KINDS`."""
    path: str
    """From the folder, with slashes."""
    says: str
    """One line on what is in it."""
    changed: float
    """Seconds since 1970."""
    size_bytes: int
    running: bool = False
    command: str = ""
    """What shows more of it, where a browser cannot."""


@dataclass(frozen=True)
class Contents:
    """What a folder holds, and the files of it that may be shown."""

    folder: Path
    items: Sequence[Item]
    files: Mapping[str, Path]
    """By the path from the folder: nothing else is ever opened for a reader."""
    cut: bool = False
    """Whether there were more than `MOST_FILES`."""


def inventory(folder: Path) -> Contents:
    """What `folder` and the folders in it hold, by kind, what changed last first. Raises `UsageError` for no folder."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder" if folder.exists() else f"there is no folder {folder}")
    folder = folder.resolve()
    items: list[Item] = []
    files: dict[str, Path] = {}
    entries = list(itertools.islice(_below(folder), MOST_FILES + 1))
    for path in entries[:MOST_FILES]:
        try:
            about = path.lstat()
        except OSError:
            continue
        if not stat.S_ISREG(about.st_mode):
            continue
        place = path.relative_to(folder).as_posix()
        if path.suffix.lower() in TYPES:
            files[place] = path
        kind, says = _known(path, about)
        if path.name == "study.db":
            says += _best(path.with_name("result.json"))
        if kind:
            running = path.name == "study.db" and _runs(path)
            items.append(Item(kind, place, says, about.st_mtime, about.st_size, running, _command(kind, path)))
    items.sort(key=lambda item: (KINDS.index(item.kind), -item.changed, item.path))
    return Contents(folder, items, files, len(entries) > MOST_FILES)


def _below(folder: Path) -> Iterator[Path]:
    """Folders and files below, but those that are hidden."""
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIP and not name.startswith("."))
        yield from (Path(here, name) for name in (*folders, *sorted(names)) if not name.startswith("."))


def _known(path: Path, about: os.stat_result) -> tuple[str, str]:
    """A file's kind and its line; empty where it is not ours."""
    # One that has just changed may change once more within one tick of the file system's clock.
    look = _seen if time() - about.st_mtime >= _SETTLED_S else _seen.__wrapped__
    return look(path, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=2 * MOST_FILES)
def _seen(path: Path, changed: int, size: int) -> tuple[str, str]:
    """The same; what did not change is not read again, and what cannot be read is not there."""
    try:
        return _look(path)
    except Exception:  # anything may lie there
        return "", ""


def _look(path: Path) -> tuple[str, str]:
    name = path.name.lower()
    if name.endswith(".db"):
        return _study(path)
    if name.endswith(".html"):
        title = re.search("<title>(.*?)</title>", _head(path).decode("utf-8", "replace"), re.DOTALL)
        heading = html.unescape(title.group(1)) if title else ""
        return ("report", heading.removesuffix(" – fettle")) if heading.endswith(" – fettle") else ("", "")
    if name.endswith((".json", ".json.gz")):
        return _json(path, name)
    if name.endswith(".csv"):
        rows = _head(path).startswith(b"Benchmark,TS failed requests,")
        return ("load", "load tests in TorchServe's columns") if rows else ("", "")
    if name in _OTHERS:
        return "results", _OTHERS[name]
    if name.endswith((".pickle", ".pkl")):
        is_snapshot = _head(path).startswith((b"\x80", b"(")) and any(
            word in _head(path, 1 << 16) for word in (b"device_traces", b"segments")
        )
        return ("snapshot", "an allocator's snapshot") if is_snapshot else ("", "")
    return "", ""


def _json(path: Path, name: str) -> tuple[str, str]:
    head = _head(path)
    if b'"traceEvents"' in head or b'"deviceProperties"' in head:
        return "trace", "a profiler's trace"
    if name == "manifest.json" and path.with_name("samples.safetensors").exists():
        return "package", "a model that fettle serves"
    of_load = b'"latency_ms"' in head and b'"goodput"' in head
    if of_load or (b'limit_ms"' in head and b'"met"' in head):
        return "load", _under_load(path)
    return ("results", "the same for machines") if name in _RESULTS else ("", "")


_BY_STATE = "SELECT state, count(*) FROM trials GROUP BY state"
_STATUS = "SELECT value_json FROM trial_user_attributes WHERE key = 'status' LIMIT 1000000"
_RESULTS = {"result.json", "study.json"}
_OTHERS = {
    "recipe.toml": "the recipe, for fettle.apply",
    "optimized.py": "the same as plain PyTorch",
    "improve.jsonl": "what a guided run has done, for the same command to go on",
    "history.jsonl": "what the gate found, one race a line",
    "measured.jsonl": "what a search under load measured, for the same command to go on",
}


def _head(path: Path, size: int = _PEEK) -> bytes:
    """The first bytes of a file, unpacked where it is compressed."""
    with path.open("rb") as file:
        head = file.read(size)
    return zlib.decompressobj(wbits=31).decompress(head, size) if path.name.endswith(".gz") else head


def _study(path: Path) -> tuple[str, str]:
    """The studies of an Optuna storage and their trials, read with nothing but SQL, and without a lock for long."""
    address = f"file:{quote(os.fsencode(path))}?mode=ro"
    with contextlib.closing(sqlite3.connect(address, uri=True, timeout=1.0)) as base:
        until = monotonic() + _MOST_SQL_S
        base.set_progress_handler(lambda: monotonic() > until, 10_000)  # a view may ask for more than there is,
        base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_RESULT)  # or a text of a gigabyte
        names = [str(name) for (name,) in base.execute("SELECT study_name FROM studies ORDER BY study_id LIMIT 50")]
        states = {str(state): int(count) for state, count in base.execute(_BY_STATE)}
        judged = Counter(msgspec.json.decode(value, type=str) for (value,) in base.execute(_STATUS))
    if not names:
        return "", ""
    counts = [f"{count} {status}" for status, count in sorted(judged.items())]
    if waiting := states.get("RUNNING", 0):
        counts.append(f"{waiting} being measured")
    line = ", ".join(names) + f": {count_text(sum(states.values()), 'trial')}"
    return "study", line + (f" ({', '.join(counts)})" if counts else "")


def _under_load(path: Path) -> str:
    """The line of load tests, or of a search for the best setting under a limit; raises where it is neither."""
    with path.open("rb") as file:
        data = msgspec.json.decode(file.read(_MOST_RESULT))
    if "met" in data:
        return _searched(data)
    runs = data["runs"] if isinstance(data, dict) else data
    told = [run for run in runs if not run.get("void")]
    most = max(told or runs, key=lambda run: float(run["throughput"]))
    p99 = most["latency_ms"].get("p99")
    line = f"{count_text(len(runs), 'load test')}: at most {most['throughput']:.4g} answers/s"
    line += f", p99 {p99:.4g} ms" if p99 is not None else ""
    marks = {
        "void": len(runs) - len(told),
        "with more than the server can do": sum(not run.get("stable", True) for run in told),
        "not within the limit": sum(map(_is_late, told)),
    }
    return line + "".join(f"; {count} {mark}" for mark, count in marks.items() if count)


def _is_late(run: dict[str, Any]) -> bool:
    """Whether a run had a limit and did not keep it."""
    texts = run.get("texts") or {}
    limited = run.get("limit_ms") or texts.get("ttft_limit_ms") or texts.get("itl_limit_ms")
    return bool(limited) and (run.get("within_limit") or 0.0) < 0.99


def _searched(search: dict[str, Any]) -> str:
    """The line of a search for the best setting, of ``fettle serve slo``."""
    limits = {"limit_ms": "p99", "ttft_limit_ms": "first token", "itl_limit_ms": "tokens apart"}
    kept = ", ".join(f"{text} within {search[name]:.4g} ms" for name, text in limits.items() if search.get(name))
    place, points = search.get("best"), search["points"]
    best = points[place] if place is not None and 0 <= place < len(points) else {}
    if not best.get("measured"):
        return f"{search['name']}: no setting was shown to keep {kept}"
    line = f"{search['name']}: {rate_text(best['measured'])} requests/s with {kept}: {best['setting']}"
    return line if search["met"] else f"{line}; not met"


def _best(path: Path) -> str:
    """What a result says of its winner, as more of a study's line; empty where there is none."""
    with contextlib.suppress(Exception):
        about = path.lstat()
        if stat.S_ISREG(about.st_mode) and about.st_size < _MOST_RESULT:
            return _winner(path, about.st_mtime_ns, about.st_size)
    return ""


@lru_cache(maxsize=1024)
def _winner(path: Path, changed: int, size: int) -> str:
    winner = msgspec.json.decode(path.read_bytes())["winner"]
    speedup = winner and winner["speedup"]
    if not speedup:
        return ""
    low, high = speedup.get("low") or 0.0, speedup.get("high") or math.inf
    recipe = " ".join(f"{name}={level}" for name, level in winner["recipe"].items())
    return f"; {Interval(speedup['estimate'], low, high).text} with {recipe or 'nothing changed'}"


def _runs(path: Path) -> bool:
    """Whether a study's storage or logs changed lately, and after its result."""

    def last(*places: Path) -> float:
        times = [0.0]
        for place in places:
            with contextlib.suppress(OSError):
                times.append(place.stat().st_mtime)
        return max(times)

    logs = path.parent / "logs"
    lines: list[Path] = []
    with contextlib.suppress(OSError):
        lines += [] if logs.is_symlink() else itertools.islice(logs.iterdir(), MOST_FILES)
    changed = last(path, path.with_name("study.db-journal"), logs, *lines)
    ended = last(path.with_name("result.json"), path.with_name("study.json"))
    return changed > ended and time() - changed < RUNNING_S


def _command(kind: str, path: Path) -> str:
    commands = {"trace": ["trace", "report", path], "snapshot": ["memory", path], "package": ["serve", path.parent]}
    return shlex.join(["fettle", *map(str, commands[kind])]) if kind in commands else ""
