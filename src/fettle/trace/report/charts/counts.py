"""How many, how large, how fast: launch delays, lengths of operators, collectives."""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from fettle.trace.report.charts.look import MAX_ROWS, TOP_PARTS, colour, main_parts, milliseconds, sized


def delay_chart(launches: pl.DataFrame) -> Any:
    """How long work waited after its launch call, counted by powers of two: columns call, delay_ns."""
    shown = (
        launches.select("call", us=pl.col("delay_ns").clip(0) / 1e3)
        .with_columns(
            power=pl.when(pl.col("us") < 1)
            .then(0)
            .otherwise(pl.col("us").log(2).floor() + 1)
            .cast(pl.Int64())
            .clip(0, 24)
        )
        .group_by("call", "power")
        .agg(work=pl.len())
        .with_columns(
            delay=pl.col("power").replace_strict({i: power_of_two_us(i) for i in range(25)}, return_dtype=pl.String())
        )
    )
    chart = (
        alt.Chart(main_parts(shown, "call", "work").group_by("call", "power", "delay").agg(pl.col("work").sum()))
        .mark_bar()
        .encode(
            x=_by_power("delay", "from the end of the launch call to the start of the work"),
            y=alt.Y("sum(work):Q", title="pieces of work"),
            color=colour(
                "call",
                shown["call"].unique().sort().to_list() + (["rest"] if shown["call"].n_unique() > TOP_PARTS else []),
            ),
            tooltip=["delay", "call", alt.Tooltip("sum(work):Q", title="pieces of work")],
        )
    )
    return sized(chart, 200)


def power_of_two_us(power: int) -> str:
    """The name of the class of durations from 2**(power-1) up to 2**power microseconds."""
    if power == 0:
        return "< 1 us"
    low = 2 ** (power - 1)
    return f"{low} us" if low < 1000 else (f"{low / 1000:.0f} ms" if low < 1_000_000 else f"{low / 1e6:.0f} s")


def _by_power(column: str, title: str) -> Any:
    """An axis of named classes, in order of the powers of two they stand for."""
    order, axis = alt.EncodingSortField("power", op="min"), alt.Axis(labelOverlap=True, labelAngle=-40)
    return alt.X(f"{column}:N", sort=order, title=title, axis=axis)


def size_chart(sizes: pl.DataFrame) -> Any:
    """Operators by their own length: columns power (see `power_of_two_us`), count, time_ns."""
    shown = sizes.with_columns(
        size=pl.col("power").replace_strict({i: power_of_two_us(i) for i in range(40)}, return_dtype=pl.String()),
        ms=pl.col("time_ns") / 1e6,
    )
    chart = (
        alt.Chart(shown.select("power", "size", "count", "ms"))
        .mark_bar(color="#1f8a99")
        .encode(
            x=_by_power("size", "an innermost operator takes at least"),
            y=alt.Y("ms:Q", title="milliseconds in all"),
            tooltip=["size", "count", alt.Tooltip("ms:Q", format=",.3f")],
        )
    )
    return sized(chart, 190)


def collective_chart(table: pl.DataFrame) -> Any:
    """Bus bandwidth against message size: columns rank, bytes, bus_gb_per_s, collective, duration_ns."""
    shown = (
        table.filter((pl.col("bytes") > 0) & (pl.col("bus_gb_per_s") > 0))
        .head(MAX_ROWS)
        .with_columns(ms=pl.col("duration_ns") / 1e6)
    )
    chart = (
        alt.Chart(shown.select("bytes", "bus_gb_per_s", "collective", "ms", "rank"))
        .mark_point(filled=True, size=36, opacity=0.6)
        .encode(
            x=alt.X(
                "bytes:Q",
                scale=alt.Scale(type="log"),
                title="bytes of the message",
                axis=alt.Axis(format="~s", tickCount=6),
            ),
            y=alt.Y("bus_gb_per_s:Q", title="bus bandwidth, GB/s"),
            color=colour("collective", shown["collective"].unique().sort().to_list()),
            tooltip=[
                "rank",
                "collective",
                "bytes",
                alt.Tooltip("bus_gb_per_s:Q", format=".2f"),
                alt.Tooltip("ms:Q", format=",.3f"),
            ],
        )
    )
    return sized(chart, 230)


def arrival_chart(arrivals: pl.DataFrame) -> Any:
    """Arrival skew of each collective over time, coloured by the rank that came last."""
    low = int(arrivals["first_ns"].min() or 0) if arrivals.height else 0  # type: ignore[arg-type]
    shown = arrivals.head(MAX_ROWS).select(
        "collective",
        ms=(pl.col("first_ns") - low) / 1e6,
        skew_ms=pl.col("skew_ns") / 1e6,
        last=pl.format("rank {} came last", "last_rank"),
    )
    chart = (
        alt.Chart(shown)
        .mark_point(filled=True, size=34, opacity=0.7)
        .encode(
            x=milliseconds("ms"),
            y=alt.Y("skew_ms:Q", title="first to last arrival, ms"),
            color=colour("last", shown["last"].unique().sort().to_list()),
            tooltip=["collective", "last", alt.Tooltip("skew_ms:Q", format=",.3f")],
        )
    )
    return sized(chart, 210)


def counter_chart(sums: pl.DataFrame, top: int = 8) -> Any:
    """Hardware counters by operator, each counter on its own scale: columns operator, counter, value."""
    by_name = sums.group_by("counter", "operator").agg(pl.col("value").sum()).filter(pl.col("value") != 0)
    shown = by_name.sort("value", descending=True).group_by("counter", maintain_order=True).head(top)
    rows = []
    for (counter,), part in shown.group_by("counter", maintain_order=True):
        bars = (
            alt.Chart(part, title=str(counter)[:120])
            .mark_bar(color="#1f8a99")
            .encode(
                x=alt.X("value:Q", title=None, axis=alt.Axis(format="~s", tickCount=4)),
                y=alt.Y("operator:N", sort=None, title=None, axis=alt.Axis(labelLimit=160)),
                tooltip=["operator", alt.Tooltip("value:Q", format=",.6~g")],
            )
        )
        rows.append(bars.properties(width=480))
    return alt.vconcat(*rows)
