"""What all charts share: as wide as what holds them, the same colour for the same meaning, and ways to a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl

from fettle.errors import UsageError
from fettle.files import write_bytes
from fettle.page import as_spec, shell, theme
from fettle.page.theme import ACCENT, QUIET, coloured, pale
from fettle.trace.analyses.stacks import CAUSES_OF_HOST
from fettle.trace.analyses.waits import CAUSES

MAX_ROWS = 4000
MAX_SERIES = 20
TOP_PARTS = 8
_WORDS = {cause: cause.replace("_", " ") for cause in (*CAUSES, *CAUSES_OF_HOST)}
PARTS = ("compute", "exposed communication", "exposed copy", *(_WORDS[cause] for cause in CAUSES))
_COLOURS = {
    "compute": ACCENT,
    **dict.fromkeys(("communication", "exposed communication"), theme.VIOLET),
    "hidden communication": pale(theme.VIOLET, 0.6),
    **dict.fromkeys(("copy", "exposed copy"), theme.ORANGE),
    "operator": theme.RED,
    "python": theme.OLIVE,
    "launch call": pale(theme.RED, 0.4),
    "launch latency": pale(theme.RED, 0.6),
    "blocking call": theme.WINE,
    "data loading": theme.GREEN,
    "other rank": theme.INDIGO,
    "host untraced": QUIET,
    "between kernels": pale(QUIET),
    "queued unknown": theme.SLATE,
    "profiler": theme.PINK,
    "allocator": theme.BROWN,
    "compile or load": theme.MOSS,
    "runtime call": theme.SAND,
    "rest": pale(QUIET, 0.7),
}
# The room that a chart has, not the width that fitting leaves it: that would change the legend's rows after their
# height has been counted. Naming `width` has it looked up again when the window changes.
_ROOM = "(width ? containerSize()[0] || width : width)"
_SPARE = (theme.BLUE, theme.GREEN, theme.PINK, theme.OLIVE, *theme.MORE)


def save(chart: Any, path: Path) -> None:
    """Write a chart as self-contained HTML, PNG, SVG or JSON, by the file's suffix.

    Raises:
        UsageError: A place that cannot be written, or a chart of nothing.
    """
    kind, spec = path.suffix.lower().removeprefix("."), as_spec(chart)
    if not any(spec.get("datasets", {}).values()):
        raise UsageError(f"no {path.name}: the answer is empty, and there is nothing to draw")
    content = json.dumps(spec, default=str).encode() if kind == "json" else shell.draw(spec, kind)
    write_bytes(path, content)


def colour(field: str, values: list[str]) -> alt.Color:
    """A colour for each value, the same for the same meaning in every chart; a legend that fits a phone."""
    spare = iter(_SPARE * (1 + len(values) // len(_SPARE)))
    tones = {value: _COLOURS.get(value) or next(spare) for value in values}
    return coloured(field, tones, columns=alt.ExprRef(f"max(1, floor({_ROOM} / 200))"), labelLimit=180)


def sized(chart: Any, height: Any) -> Any:
    return chart.properties(
        width="container", height=height, autosize=alt.AutoSizeParams(type="fit-x", contains="padding")
    )


def milliseconds(field: str, title: str = "milliseconds") -> alt.X:
    return alt.X(f"{field}:Q", title=title, axis=alt.Axis(tickCount=alt.ExprRef("ceil(width / 110)")))


def words(column: str) -> pl.Expr:
    """Causes as words, anything else as it is."""
    return pl.col(column).cast(pl.String()).replace(_WORDS)


def main_parts(long: pl.DataFrame, part: str, value: str) -> pl.DataFrame:
    """The longest parts by name, all others as `rest`: nobody reads a legend of twenty causes."""
    long = long.with_columns(words(part))
    order = long.group_by(part).agg(pl.col(value).sum()).sort(value, descending=True)[part].to_list()
    return long.with_columns(
        pl.when(pl.col(part).is_in(order[:TOP_PARTS])).then(part).otherwise(pl.lit("rest")).alias(part)
    )


def ordered(phases: list[str]) -> list[str]:
    known = [p for p in (*PARTS, "rest") if p in phases]
    return [*[p for p in known if p != "rest"], *sorted(set(phases) - set(known)), *[p for p in known if p == "rest"]]
