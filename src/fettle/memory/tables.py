"""The tables of the report."""

from __future__ import annotations

from collections.abc import Sequence

from fettle.memory.analysis import Analysis
from fettle.memory.difference import Difference
from fettle.memory.leaks import Leak
from fettle.memory.snapshot import Frame
from fettle.memory.stacks import describe
from fettle.page import Cell, Row, Table
from fettle.units import size_text


def holders(analysis: Analysis) -> Table:
    """Who holds the peak: how many of the blocks were there before the window, and how many still are at its end."""
    columns = ("bytes", "share", "blocks", "before", "at end", "lives", "phase", "where")
    rows: list[Row] = [
        [size_text(row.bytes), f"{row.share:.1%}", str(row.count), str(row.from_before), str(row.until_end),
         _ms(row.median_lifetime_ms), row.category or row.phase, _place(row.own_line, row.frames)]
        for row in analysis.holders
    ]  # fmt: skip
    return Table(columns, rows, columns[:-1])


def spikes(analysis: Analysis) -> Table:
    """Short peaks above the plateau, and what they are made of."""
    columns = ("times", "above plateau", "top", "duration", "made of")
    rows: list[Row] = []
    for row in analysis.spikes:
        first, *rest = [f"{size_text(who.bytes)} {who.own_line}" for who in row.contributors[:3]] or [""]
        made_of = Cell(first, notes=rest)
        rows.append(
            [str(row.count), size_text(row.height_bytes), size_text(row.top_bytes), _ms(row.duration_ms), made_of]
        )
    return Table(columns, rows, columns[:-1])


def survivors(leak: Leak) -> Table:
    columns = ("each", "count", "steps in a row", "phase", "where")
    rows: list[Row] = [
        [size_text(row.size_bytes), str(row.count), str(row.steps), row.phase, _place(row.own_line, row.frames)]
        for row in leak.survivors
    ]
    return Table(columns, rows, columns[:-1])


def pools(analysis: Analysis) -> Table:
    columns = ("pool", "segments", "reserved", "in use", "releasable", "stuck", "largest free", "external index",
               "rounding")  # fmt: skip
    rows: list[Row] = [
        [row.name, str(row.segments), size_text(row.reserved_bytes), f"{row.utilisation:.0%}",
         size_text(row.releasable_bytes), size_text(row.non_releasable_bytes), size_text(row.largest_free_bytes),
         f"{row.external:.2f}", f"{row.internal:.1%}"]
        for row in analysis.pools
    ]  # fmt: skip
    return Table(columns, rows, columns[1:])


def changes(difference: Difference) -> list[Table]:
    """What changed between two snapshots: at the peak, and at the end."""
    columns = ("change", "before", "after", "blocks", "where")
    tables = []
    for title, before, after, sites in (
        ("At the peak", difference.peak_before_bytes, difference.peak_after_bytes, difference.at_peak),
        ("At the end", difference.end_before_bytes, difference.end_after_bytes, difference.at_end),
    ):
        rows: list[Row] = [
            [size_text(row.change_bytes), size_text(row.before_bytes), size_text(row.after_bytes),
             f"{row.before_count} to {row.after_count}", _place(row.own_line, row.frames)]
            for row in sites
        ]  # fmt: skip
        caption = f"{title}: {size_text(before)} to {size_text(after)} ({size_text(after - before)})"
        tables.append(Table(columns, rows, columns[:-1], caption))
    return tables


def _place(line: str, frames: Sequence[Frame]) -> Cell:
    return Cell(line, stack=[describe(frame) for frame in frames])


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} ms"
