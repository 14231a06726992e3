"""Over time: step functions, and blocks as in a timeline or a flame graph."""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from fettle.trace.report.charts.look import MAX_ROWS, MAX_SERIES, colour, milliseconds, ordered, sized, words


def step_line(frame: pl.DataFrame, value: str, *, series: str, unit: str, area: bool = False) -> Any:
    """A step function over time (columns rank, ts_ns), one line a series; peaks and troughs survive the thinning."""
    every = frame.group_by(series).len().sort("len", descending=True)[series]
    since = pl.col("ts_ns") - pl.col("ts_ns").min().over("rank")  # ranks may have clocks of their own
    frame = frame.filter(pl.col(series).is_in(every.head(MAX_SERIES).implode())).with_columns(since)
    names = frame[series].cast(pl.String()).unique(maintain_order=True).to_list()
    thin = thin_steps(frame, value, series)
    chart = alt.Chart(thin.select(value, ms=pl.col("ts_ns") / 1e6, series=pl.col(series).cast(pl.String())))
    filled = chart.mark_area(interpolate="step-after", opacity=0.75)
    marked = filled if area else chart.mark_line(interpolate="step-after", strokeWidth=1)
    y = alt.Y(f"{value}:Q", title=unit, stack=None)
    few = f": {MAX_SERIES} of {len(every)} series, those with the most points" if len(every) > MAX_SERIES else ""
    x = milliseconds("ms", f"milliseconds{few}")
    return sized(marked.encode(x=x, y=y, color=colour("series", names)), 190)


def bandwidth_chart(frame: pl.DataFrame) -> Any:
    """Bandwidth of copies over time, one line a name and device: columns of `copy_bandwidth`."""
    named = frame.with_columns(name=pl.format("{}, {}", "name", place_of(frame, "device")))
    return step_line(named, "gb_per_s", series="name", unit="GB/s")


def queue_chart(frame: pl.DataFrame) -> Any:
    """Length of each queue over time: columns of `queue_length`."""
    named = frame.with_columns(name=place_of(frame, "device", "stream"))
    return step_line(named, "length", series="name", unit="launched, not started")


def place_of(frame: pl.DataFrame, *columns: str) -> pl.Expr:
    """What these columns say, in words, and of several ranks also which."""
    columns = ("rank", *columns) if frame["rank"].n_unique() > 1 else columns
    return pl.format(" ".join(f"{column} {{}}" for column in columns), *columns)


def thin_steps(frame: pl.DataFrame, value: str, series: str) -> pl.DataFrame:
    """At most four points a series and slice of time: the first, the lowest, the highest and the last."""
    if frame.height <= MAX_ROWS:
        return frame
    slices = MAX_ROWS // 4 // frame[series].n_unique()
    low, high = frame["ts_ns"].min(), frame["ts_ns"].max()
    span = max(int(high) - int(low), 1)  # type: ignore[arg-type]
    numbered = frame.with_row_index("at").with_columns(slice=(pl.col("ts_ns") - low) * slices // (span + 1))
    kept = numbered.group_by(series, "slice").agg(
        a=pl.col("at").first(),
        b=pl.col("at").sort_by(value).first(),
        c=pl.col("at").sort_by(value).last(),
        d=pl.col("at").last(),
    )
    rows = pl.concat([kept["a"], kept["b"], kept["c"], kept["d"]]).unique().sort()
    return frame[rows]


def blocks(frame: pl.DataFrame, unit: str) -> Any:
    """Blocks in rows, as in a timeline or a flame graph: columns row, name, start, end, kind, and titles of groups of
    rows as blocks of kind `title`."""
    frame = frame.with_columns(words("kind"), length=pl.col("end") - pl.col("start"))
    real, titles = frame.filter(pl.col("kind") != "title"), frame.filter(pl.col("kind") == "title")
    rows = pl.concat([real["row"], titles["row"]]).unique().sort().to_list()
    y = alt.Y("row:O", axis=None, scale=alt.Scale(domain=rows))
    zoom = alt.selection_interval(bind="scales", encodings=["x"])
    wide = "scale('x', datum.end) - scale('x', datum.start)"
    bars = alt.Chart(real).mark_bar(height=12, stroke="white", strokeWidth=alt.ExprRef(f"{wide} > 4 ? 0.4 : 0")).encode(
        x=alt.X("start:Q", title=unit, axis=alt.Axis(tickCount=alt.ExprRef("ceil(width / 110)"))), x2="end:Q", y=y,
        color=colour("kind", ordered(real["kind"].unique().to_list())),
        tooltip=["name", "kind", alt.Tooltip("start:Q", format=",.4f"), alt.Tooltip("length:Q", format=",.4f")],
    ).add_params(zoom)  # fmt: skip
    labels = alt.Chart(real.sort(pl.col("length"), descending=True).head(400)).mark_text(
        align="left", fontSize=9, dx=2, color="white", clip=True,
        limit=alt.ExprRef(f"max(1, {wide} - 4)"), opacity=alt.ExprRef(f"{wide} > 24 ? 1 : 0"),
    ).encode(x="start:Q", y=y, text="name:N")  # fmt: skip
    heads = (
        alt.Chart(titles)
        .mark_text(align="left", fontSize=11, fontWeight="bold", limit=alt.ExprRef("width"))
        .encode(x=alt.value(0), y=y, text="name:N")
    )
    return sized(bars + labels + heads, alt.Step(14)).properties(usermeta={"embedOptions": {"renderer": "canvas"}})
