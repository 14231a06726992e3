"""One chart a question. Every chart takes frames of the analyses and returns an Altair chart; none computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import altair as alt
import polars as pl

from fettle.errors import UsageError
from fettle.trace.idle import CAUSES

WIDTH = 760
MAX_POINTS = 4000


def save(chart: Any, path: Path) -> None:
    """Write a chart as self-contained HTML, PNG, SVG or JSON, by the file's suffix.

    Raises:
        UsageError: Another suffix.
    """
    if path.suffix == ".html":
        chart.save(str(path), inline=True)
    elif path.suffix in (".png", ".svg", ".json"):
        chart.save(str(path))
    else:
        raise UsageError(f"charts are .html, .png, .svg or .json files, not '{path.suffix}'")


def account_chart(account: pl.DataFrame) -> Any:
    """Stacked bars: where each step's time went."""
    parts = ["compute_ns", "exposed_communication_ns", "exposed_copy_ns", *(f"idle_{c}_ns" for c in CAUSES)]
    long = (
        _thin(account, MAX_POINTS // len(parts))
        .select("rank", "device", "step", *parts)
        .unpivot(index=["rank", "device", "step"], variable_name="part", value_name="ns")
        .filter(pl.col("ns") > 0)
        .with_columns(
            ms=pl.col("ns") / 1e6,
            part=pl.col("part").str.strip_suffix("_ns").str.replace_all("_", " "),
            where=pl.format("rank {} device {}", "rank", "device"),
        )
    )
    order = [p.removesuffix("_ns").replace("_", " ") for p in parts]
    return (
        alt.Chart(long)
        .mark_bar()
        .encode(
            x=alt.X("step:O", title="step"),
            y=alt.Y("ms:Q", title="milliseconds"),
            color=alt.Color("part:N", sort=order, scale=alt.Scale(scheme="tableau20")),
            order=alt.Order("part:N"),
            tooltip=["where", "step", "part", alt.Tooltip("ms:Q", format=".3f")],
            row=alt.Row("where:N", title=None),
        )
        .properties(width=WIDTH, height=220, title="Where each step's time went")
    )


def bar_chart(
    frame: pl.DataFrame, label: str, value_ns: str, title: str, *, color: str | None = None, top: int = 20
) -> Any:
    """Horizontal bars of a time column, longest first."""
    shown = (
        frame.sort(value_ns, descending=True)
        .head(top)
        .with_columns(ms=pl.col(value_ns) / 1e6, label=pl.col(label).fill_null("unknown").str.slice(0, 90))
    )
    encoding: dict[str, Any] = {
        "x": alt.X("ms:Q", title="milliseconds"),
        "y": alt.Y("label:N", sort="-x", title=None, axis=alt.Axis(labelLimit=420)),
        "tooltip": [alt.Tooltip("label:N"), alt.Tooltip("ms:Q", format=".3f")],
    }
    if color is not None:
        encoding["color"] = alt.Color(f"{color}:N")
    return (
        alt.Chart(shown.select(["label", "ms", *([color] if color else [])]))
        .mark_bar()
        .encode(**encoding)
        .properties(width=WIDTH - 300, title=title)
    )


def step_line(frame: pl.DataFrame, value: str, title: str, *, series: str, unit: str) -> Any:
    """A step function over time, one line a series."""
    low = int(frame["ts_ns"].min() or 0) if frame.height else 0  # type: ignore[arg-type]
    shown = _thin(frame, MAX_POINTS).with_columns(
        ms=(pl.col("ts_ns") - low) / 1e6, series=pl.col(series).cast(pl.String())
    )
    return (
        alt.Chart(shown.select("ms", value, "series"))
        .mark_line(interpolate="step-after", strokeWidth=1)
        .encode(
            x=alt.X("ms:Q", title="milliseconds"),
            y=alt.Y(f"{value}:Q", title=unit),
            color=alt.Color("series:N", title=series),
        )
        .properties(width=WIDTH, height=160, title=title)
    )


def timeline_chart(frame: pl.DataFrame, title: str) -> Any:
    """A light timeline: columns lane, name, start_ms, end_ms, kind."""
    return (
        alt.Chart(frame)
        .mark_bar(height=11)
        .encode(
            x=alt.X("start_ms:Q", title="milliseconds"),
            x2="end_ms:Q",
            y=alt.Y("lane:N", title=None, sort=None, axis=alt.Axis(labelLimit=220)),
            color=alt.Color("kind:N", title=None),
            tooltip=["name", "kind", alt.Tooltip("start_ms:Q", format=".4f"), alt.Tooltip("end_ms:Q", format=".4f")],
        )
        .properties(width=WIDTH, title=title)
        .interactive(bind_y=False)
    )


def _thin(frame: pl.DataFrame, points: int) -> pl.DataFrame:
    return frame.gather_every(max(1, -(-frame.height // max(points, 1)))) if frame.height else frame
