"""What the page is made of: sections with charts and tables, and how values are shown to people."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from fettle.page import Cell, Figure, Table, as_spec
from fettle.trace.model import Trace
from fettle.units import size_text

CUT_CHARS = 110
_NANOSECONDS = re.compile(r"_ns(?=_|$)")


@dataclass
class Section:
    """One part of the page."""

    title: str
    text: str = ""
    charts: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    def chart(self, title: str, chart: Any, words: str = "") -> None:
        name = re.sub(r"\W+", "-", f"{self.title} {len(self.charts)}").lower()
        self.charts.append(Figure(name, title, words or title, as_spec(chart)))

    def table(self, caption: str, frame: pl.DataFrame, rows: int = 15, keep: str = "") -> None:
        """A table of the first rows; columns that say nothing (one value that is null, empty or the only rank) go,
        save `keep`.
        """
        if not frame.height:
            return
        frame = frame.select([c for c in frame.columns if c == keep or not _says_nothing(frame[c], c)])
        shown = frame.head(rows)
        cells = [[_cell(v, c) for v, c in zip(row, frame.columns, strict=True)] for row in shown.iter_rows()]
        numbers = [heading(c) for c in frame.columns if frame[c].dtype.is_numeric()]
        columns = [heading(c) for c in frame.columns]
        self.tables.append(Table(columns, cells, numbers, caption, frame.height - shown.height))


def _says_nothing(column: pl.Series, name: str) -> bool:
    if name in ("rank", "device"):
        return column.n_unique() == 1
    return column.null_count() == len(column) or (
        column.dtype == pl.String and column.n_unique() == 1 and not column[0]
    )


def heading(column: str) -> str:
    """A column's title: times are shown in milliseconds."""
    return _NANOSECONDS.sub("", column).replace("_", " ") + (" (ms)" if _NANOSECONDS.search(column) else "")


def cell(value: Any, column: str) -> str:
    """One cell for people."""
    if value is None:
        return "-"
    if _NANOSECONDS.search(column) and isinstance(value, (int, float)):
        return f"{value / 1e6:,.3f}"
    if column.endswith("share"):
        return f"{value:.1%}"
    if isinstance(value, float):
        return f"{value:,.3f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if "bytes" in column or "count" in column or "kernels" in column else str(value)
    text = str(value)
    return text if len(text) <= 160 else text[:157] + "..."


def _cell(value: Any, column: str) -> Cell | str:
    if column.endswith("share") and isinstance(value, (int, float)):
        return Cell(cell(value, column), bar=max(0.0, min(100.0, value * 100)))
    if isinstance(value, int) and "bytes" in column:
        return Cell(size_text(value), f"{value:,} bytes")
    text = str(value) if isinstance(value, str) else cell(value, column)
    return text if len(text) <= CUT_CHARS else Cell(text[: CUT_CHARS - 1] + "…", text[:2000])


def ms(nanoseconds: float) -> str:
    """A time with a unit that leaves two to four digits."""
    if abs(nanoseconds) >= 1e9:
        return f"{nanoseconds / 1e9:,.2f} s"
    return f"{nanoseconds / 1e6:,.2f} ms" if abs(nanoseconds) >= 1e5 else f"{nanoseconds / 1e3:,.1f} us"


def place(trace: Trace, device: int) -> str:
    """A device of a rank, as charts call it."""
    return f"rank {trace.rank} device {device}" if device >= 0 else f"rank {trace.rank} host"
