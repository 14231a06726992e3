"""What the page is made of: sections with charts and tables, and how values are shown to people."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import polars as pl

from fettle.page import Cell, Figure, Table, as_spec
from fettle.units import size_text

T = TypeVar("T")
CUT_CHARS = 110
_OUR_WORDS = ("category", "cause", "change")
"""Columns whose values are our own identifiers: for people, words."""
_TIME = re.compile(r"_(ns|us)(?=_|$)")


@dataclass
class Section:
    """One part of the page."""

    title: str
    text: str = ""
    charts: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    def chart(self, title: str, chart: Any) -> None:
        name = re.sub(r"\W+", "-", f"{self.title} {len(self.charts)}").lower()
        self.charts.append(Figure(name, title, title, as_spec(chart)))

    def first(self, some: list[T], most: int, what: str) -> list[T]:
        """Those that are shown one by one; where there are more, the text says so."""
        if len(some) > most:
            self.text += f" Of {len(some)} {what} the first {most} are shown one by one."
        return some[:most]

    def table(self, caption: str, frame: pl.DataFrame, rows: int = 15, keep: str = "") -> None:
        """A table of the first rows, without the columns that say nothing (see `_says_nothing`), save `keep`."""
        if not frame.height:
            return
        frame = frame.select([c for c in frame.columns if c == keep or not _says_nothing(frame[c], c)])
        self.tables.append(as_table(frame, rows, caption, _cell))


def as_table(frame: pl.DataFrame, rows: int, caption: str, show: Callable[[Any, str, str], Cell | str]) -> Table:
    """The first rows for people; `show` makes a cell of a value, its column and the column's unit."""
    units = [unit(column) for column in frame]
    cells = [list(map(show, row, frame.columns, units)) for row in frame.head(rows).iter_rows()]
    titles = [heading(column) for column in frame]
    numbers = [title for title, column in zip(titles, frame, strict=True) if column.dtype.is_numeric()]
    return Table(titles, cells, numbers, caption, max(frame.height - rows, 0))


def _says_nothing(column: pl.Series, name: str) -> bool:
    if name in ("rank", "device"):
        return column.n_unique() == 1
    return column.null_count() == len(column) or (
        column.dtype == pl.String and column.n_unique() == 1 and not column[0]
    )


def unit(column: pl.Series) -> str:
    """What a column is shown in: times in milliseconds, in microseconds where all are below one; else empty."""
    match = _TIME.search(column.name)
    if match is None:
        return ""
    largest = column.abs().max() if column.dtype.is_numeric() else 0
    small = isinstance(largest, (int, float)) and 0 < largest < 1e6
    return "µs" if match.group(1) == "us" or small else "ms"


def heading(column: pl.Series) -> str:
    unit_text, largest = unit(column), column.max() if column.dtype.is_numeric() else 0
    title = _TIME.sub("", column.name).replace("_", " ") + (f" ({unit_text})" if unit_text else "")
    beyond = column.name.endswith("share") and isinstance(largest, (int, float)) and largest > 1.0005
    return f"{title} (of several at once)" if beyond else title


def cell(value: Any, column: str, unit_text: str = "") -> str:
    """One cell for people; `unit_text` is the column's unit."""
    if value is None:
        return "-"
    if unit_text and isinstance(value, (int, float)):
        factor = 1 if "_us" in column else 1e3 if unit_text == "µs" else 1e6
        return f"{value / factor:,.3f}"
    if column.endswith("share"):
        return f"{value:.1%}"
    if isinstance(value, float):
        return f"{value:,.3f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if any(w in column for w in ("bytes", "count", "kernels", "flops")) else str(value)
    text = str(value)
    return text if len(text) <= 160 else text[:157] + "..."


def _cell(value: Any, column: str, unit_text: str) -> Cell | str:
    if column.endswith("share") and isinstance(value, (int, float)):
        return Cell(cell(value, column), bar=max(0.0, min(100.0, value * 100)))
    if isinstance(value, int) and "bytes" in column:
        return Cell(size_text(value), f"{value:,} bytes")
    text = str(value) if isinstance(value, str) else cell(value, column, unit_text)
    text = text.replace("_", " ") if column in _OUR_WORDS else text
    return text if len(text) <= CUT_CHARS else Cell(text[: CUT_CHARS - 1] + "…", text[:2000])


def ms(nanoseconds: float) -> str:
    """A time with a unit that leaves two to four digits."""
    if abs(nanoseconds) >= 1e9:
        return f"{nanoseconds / 1e9:,.2f} s"
    return f"{nanoseconds / 1e6:,.2f} ms" if abs(nanoseconds) >= 1e5 else f"{nanoseconds / 1e3:,.1f} µs"
