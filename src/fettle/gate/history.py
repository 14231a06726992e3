"""What gates found, one line each in ``history.jsonl``, and the page that draws them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fettle.errors import UsageError, refusing
from fettle.files import plain, write_text
from fettle.measure import Interval, typed

if TYPE_CHECKING:
    from fettle.gate.gating import Gate
    from fettle.page import Figure


MOST_BYTES = 64 << 20
"""The end of a history that is read of it: more than a hundred thousand gates."""
_SHOWN = 1000
"""Gates that the page shows, the last ones."""


@dataclass(frozen=True)
class Entry:
    """One race of an old and a new state of the code."""

    when: str
    """UTC, ISO 8601."""
    target: str
    machine: str
    """`fettle.machine.Machine.id`: figures of two machines are not compared."""
    old: str
    new: str
    verdict: str
    old_ms: float
    new_ms: float
    time: Interval | None = None
    """New time over old."""
    memory: Interval | None = None
    limit: float = 0.03
    processes: int = 1
    old_commit: str = ""
    new_commit: str = ""
    bisect: str = ""
    """Where it was a step of a bisection: its range, ``GOOD..BAD`` as commits,"""
    confidence: float = 0.0
    """the confidence of the whole search, 0 where an earlier version kept it,"""
    under_load: bool = False
    """whether time was taken beside whatever else the machine did,"""
    how: str = ""
    """and in which mode, in whose environment and with which files lent; empty where all is as usual."""
    reason: str = ""


def path_of(folder: Path) -> Path:
    """The file of a folder's history."""
    return folder / "history.jsonl"


def entry_of(gate: Gate, target: str, old_commit: str) -> Entry:
    """What is kept of a gate."""
    old, new = gate.trials
    change = {one.what: one.change for one in gate.judged}
    return Entry(
        now(), target, gate.machine.id, gate.old, gate.new, gate.verdict, round(old.time_ms, 6),
        round(new.time_ms, 6), change.get("time"), change.get("memory"),
        next((one.limit for one in gate.judged if one.what == "time"), 0.0), min(old.processes, new.processes),
        old_commit, reason=gate.reason,
    )  # fmt: skip


def now() -> str:
    """The time, UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def keep(folder: Path, entry: Entry) -> None:
    """Append a line, and draw the page anew."""
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(folder)
    with refusing(f"cannot write {path}:", OSError), path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
        cut = file.read(1) not in (b"", b"\n")  # a line of a process that was killed must not take this one with it
        file.write(b"\n" * cut + json.dumps(plain(entry)).encode() + b"\n")
    write_text(folder / "gate.html", page(read(folder)))


def read(folder: Path) -> list[Entry]:
    """The history, the oldest first, of `MOST_BYTES` at most. A line that was cut when a process was killed is left
    out."""
    path = path_of(folder)
    try:
        lines = path.read_bytes()[-MOST_BYTES:].splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"cannot read the history {path}: {error.strerror}") from error
    entries = []
    for line in lines:
        try:
            entries.append(msgspec.convert(typed(json.loads(line), Entry), Entry))
        except (ValueError, RecursionError):
            continue
    return entries


def page(entries: Sequence[Entry]) -> str:
    """The page: for each target and machine the changes with their intervals, in their order, and all as a table; of a
    long history its end."""
    from fettle.gate.judging import percent
    from fettle.page import Table, clean, shell

    older, entries = max(0, len(entries) - _SHOWN), entries[-_SHOWN:]
    groups: dict[tuple[str, str], list[Entry]] = {}
    for one in entries:
        groups.setdefault((one.target, one.machine), []).append(one)
    drawn = (_figure(f"gate{n}", key, group) for n, (key, group) in enumerate(groups.items()))
    figures = [figure for figure in drawn if figure is not None]
    rows = [
        (one.when.replace("T", " ").rstrip("Z"), one.verdict, percent(one.time), percent(one.memory) if one.memory
         else "", one.new, one.old, one.target, one.machine)
        for one in reversed(entries)
    ]  # fmt: skip
    columns = ("when (UTC)", "verdict", "time", "memory", "new", "old", "target", "machine")
    kinds = ["failed" if one.verdict == "worse" else "" for one in reversed(entries)]
    table = Table(columns, clean(rows), ("time", "memory"), more=older, kinds=kinds, stack=True)
    last = f"{entries[-1].new}: {entries[-1].verdict}" if entries else "nothing was measured yet"
    return shell.render(
        "fettle.gate", "page.html.j2", "Performance gate", figures, headline=clean(last), table=table,
    )  # fmt: skip


def _figure(name: str, key: tuple[str, str], entries: Sequence[Entry]) -> Figure | None:
    """Points with their intervals in the order in which they were measured; the limit is a line."""
    import altair as alt

    from fettle.page import clean, picture, theme

    rows = [
        {
            "order": f"{number}: {one.new_commit[:8] or one.new[:32]}", "change": 100 * (one.time.estimate - 1),
            "low": _percent(one.time.low), "high": _percent(one.time.high), "verdict": one.verdict,
            "limit": 100 * one.limit, "new": one.new, "old": one.old, "when": one.when,
        }
        for number, one in enumerate(entries, start=1)
        if one.time is not None and math.isfinite(one.time.estimate)
    ]  # fmt: skip
    if not rows:
        return None
    usual = dict.fromkeys(("within", "fast"), theme.ACCENT)
    tones = {**usual, "cannot tell": theme.QUIET, "worse": theme.WARN, "slow": theme.WARN}
    seen = {row["verdict"] for row in rows}
    base = alt.Chart(theme.data(rows)).encode(
        x=alt.X("order:O", sort=None, title=None, axis=alt.Axis(labelAngle=-40, labelLimit=120)),
        color=theme.coloured("verdict", {word: tone for word, tone in tones.items() if word in seen}),
        tooltip=["new:N", "old:N", "change:Q", "low:Q", "high:Q", "verdict:N", "when:N"],
    )
    title = "time against the old code, %"
    rule = base.transform_filter("isValid(datum.low) && isValid(datum.high)").mark_rule(strokeWidth=1.6)
    words = "; ".join(f"{row['new']} {row['change']:+.1f}% {row['verdict']}" for row in rows[-20:])
    return clean(picture(
        name, f"{key[0]} on {key[1]}", f"Change of the time by gate: {words}.", 220,
        rule.encode(y=alt.Y("low:Q", title=title), y2="high:Q"),
        base.mark_point(filled=True, size=55, opacity=1).encode(y=alt.Y("change:Q", title=title)),
        base.mark_tick(thickness=1, color=theme.WARN, width=18).encode(y="limit:Q", color=alt.value(theme.WARN)),
    ))  # fmt: skip


def _percent(value: float) -> float | None:
    return 100 * (value - 1) if math.isfinite(value) else None
