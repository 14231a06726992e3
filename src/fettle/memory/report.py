"""One HTML file that shows the analysis: opens without network, stays usable at a million events.

The tables are made here; the timeline, the segment map and the flame graph are drawn in the browser (`viewer.js.j2`)
from columns packed into the page, and nothing is thinned out.
"""

from __future__ import annotations

import base64
import os
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from fettle.files import write_text
from fettle.memory.analysis import Analysis, verdict
from fettle.memory.difference import Difference
from fettle.memory.moments import segment_lives
from fettle.memory.stacks import describe


def write_report(analysis: Analysis, path: str | os.PathLike[str], *, difference: Difference | None = None) -> None:
    """Write the report to `path`, replacing what is there. `UsageError` if it cannot be written."""
    write_text(path, render(analysis, difference))


def render(analysis: Analysis, difference: Difference | None = None) -> str:
    from fettle.memory import tables
    from fettle.page import shell, theme

    facts, columns = _payload(analysis)
    colours = {"palette": (*theme.LEVERS, theme.SLATE), "other": theme.QUIET}
    return shell.render(
        "fettle.memory",
        "report.html.j2",
        f"Memory: {analysis.snapshot.name}",
        analysis=analysis,
        verdict=verdict(analysis),
        difference=difference,
        tables=tables,
        facts=shell.script_json(facts | colours),
        columns=columns,
        scripts=True,
    )


def _payload(analysis: Analysis) -> tuple[dict[str, Any], str]:
    """What the viewer draws: small facts as JSON, columns as compressed little-endian arrays in base64.

    Sizes of real devices are below 2**53, and addresses above it are multiples of 512, which a float64 holds; other
    numbers, which a hostile file may have, are merely drawn imprecisely.
    """
    window, groups, snapshot = analysis.replay, analysis.groups, analysis.snapshot
    table = window.allocations
    trace = window.trace
    time_us = np.maximum.accumulate(trace.time_us - trace.time_us[0]) if trace.has_times else np.empty(0, np.int64)
    change = np.diff(window.used_bytes, prepend=window.start_bytes)
    reserved_change = np.diff(window.reserved_bytes, prepend=window.start_reserved_bytes)
    moves = np.flatnonzero(reserved_change)
    lives = segment_lives(snapshot, window)
    columns: dict[str, tuple[str, npt.NDArray[Any]]] = {
        "change": ("f64", change),
        "time_us": ("u32", np.diff(time_us, prepend=0).clip(0, 2**32 - 1)),
        "reserved_event": ("u32", moves),
        "reserved_change": ("f64", reserved_change[moves]),
        "birth": ("i32", table.birth),
        "death": ("i32", table.death),
        "address": ("f64", table.address),
        "size": ("f64", table.size_bytes),
        "stream": ("f64", table.stream),
        "group": ("u32", groups.of_stack[table.stack]),
        # A segment that grows or shrinks by mapping pages is shown in its last extent throughout.
        "segment_address": ("f64", lives.address),
        "segment_size": ("f64", lives.total_bytes),
        "segment_birth": ("i32", lives.birth),
        "segment_death": ("i32", lives.death),
    }
    packed, layout = [], []
    for name, (kind, values) in columns.items():
        packed.append(values.astype(_KINDS[kind]).tobytes())
        layout.append([name, kind, len(values)])
    # Every column starts at a multiple of 8, as the browser's typed arrays want it.
    raw = b"".join(piece + b"\0" * (-len(piece) % 8) for piece in packed)
    used_groups = np.unique(groups.of_stack[table.stack])
    frames: dict[str, int] = {}
    stacks: dict[str, list[int]] = {}
    for number in used_groups.tolist():
        stacks[str(number)] = [frames.setdefault(describe(f), len(frames)) for f in reversed(groups.frames[number])]
    facts = {
        "events": len(trace),
        "start": window.start_bytes,
        "start_reserved": window.start_reserved_bytes,
        "peak_event": window.peak_event,
        "cached": snapshot.allocator != "cpu",
        "steps": analysis.steps.ends.tolist()[:5000],
        "layout": layout,
        "frames": list(frames),
        "stacks": stacks,
        "lines": {str(number): groups.own_line[number] for number in used_groups.tolist()},
    }
    return facts, base64.b64encode(zlib.compress(raw, 1)).decode("ascii")


_KINDS = {"f64": "<f8", "i32": "<i4", "u32": "<u4"}
