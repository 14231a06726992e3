"""How many, how large, how fast: launch delays, lengths of operators, collectives."""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from fettle.page.theme import ACCENT, QUIET
from fettle.trace.analyses.flops import Limits
from fettle.trace.analyses.launches import LATE_NS, LONG_CALL_NS
from fettle.trace.report.charts.look import MAX_ROWS, colour, main_parts, milliseconds, ordered, sized


def histogram(durations: pl.DataFrame, title: str, *, by: str = "") -> Any:
    """How many durations there are in each power of two microseconds: columns ns, and `by`, which colours them."""
    us = pl.col("ns").clip(0) / 1e3
    parts = main_parts(durations, by, "ns") if by else durations
    counted = (
        parts.with_columns(power=pl.when(us < 1).then(0).otherwise(us.log(2).floor() + 1).cast(pl.Int64()))
        .group_by("power", *([by] if by else []))
        .agg(work=pl.len())
        .with_columns(length=_named_powers())
    )
    colours = {"color": colour(by, ordered(counted[by].unique().to_list()))} if by else {}
    return (
        alt.Chart(counted)
        .mark_bar(color=ACCENT)
        .encode(
            x=_by_power("length", title),
            y=alt.Y("sum(work):Q", title="how many"),
            tooltip=["length", *([by] if by else []), alt.Tooltip("sum(work):Q", title="how many")],
            **colours,
        )
    )


def launch_charts(launches: pl.DataFrame) -> dict[str, Any]:
    """Charts of `launch_stats`: all delays, and what stands out: short work, long calls, late work. By caption."""
    long = (pl.col("call_ns") > LONG_CALL_NS) & pl.col("call_row").is_first_distinct()
    late, start = pl.col("delay_ns") > LATE_NS, "from the end of the launch call to the start of the work"
    charts = {
        "Delay from launch to start": (launches.select("call", ns="delay_ns"), start, "call"),
        "Work shorter than its launch call": (launches.filter("short").select(ns="duration_ns"), "length of work", ""),
        "Launch calls over 50 µs": (launches.filter(long).select(ns="call_ns"), "length of the call", ""),
        "Work that starts over 100 µs after its call": (launches.filter(late).select(ns="delay_ns"), start, ""),
    }
    return {caption: histogram(frame, title, by=by) for caption, (frame, title, by) in charts.items() if frame.height}


def stack_of(charts: dict[str, Any]) -> Any:
    """Charts under their captions, one below the other."""
    parts = [chart.properties(width=480, height=140, title=caption) for caption, chart in charts.items()]
    for part in parts:
        part.autosize = alt.Undefined  # only the whole may fit itself to its place
    return alt.vconcat(*parts).resolve_scale(color="independent")  # one colour may mean two things in two charts


def _named_powers() -> pl.Expr:
    """Durations from 2**(power-1) up to 2**power microseconds, by name."""

    def name(power: int) -> str:
        low = 2 ** (power - 1)
        return f"{low} µs" if low < 1000 else f"{low / 1000:.0f} ms" if low < 1_000_000 else f"{low / 1e6:.0f} s"

    names = {0: "< 1 µs", **{power: name(power) for power in range(1, 60)}}
    return pl.col("power").replace_strict(names, return_dtype=pl.String())


def _by_power(column: str, title: str) -> Any:
    """An axis of named classes, in order of the powers of two they stand for."""
    order, axis = alt.EncodingSortField("power", op="min"), alt.Axis(labelOverlap=True, labelAngle=-40)
    return alt.X(f"{column}:N", sort=order, title=title, axis=axis)


def size_chart(sizes: pl.DataFrame) -> Any:
    """Operators by their own length: columns power (0: under 1 µs), count, time_ns."""
    shown = sizes.select("power", "count", size=_named_powers(), ms=pl.col("time_ns") / 1e6)
    chart = (
        alt.Chart(shown)
        .mark_bar(color=ACCENT)
        .encode(
            x=_by_power("size", "an innermost operator takes at least"),
            y=alt.Y("ms:Q", title="milliseconds in all"),
            tooltip=["size", "count", alt.Tooltip("ms:Q", format=",.3f")],
        )
    )
    return sized(chart, 190)


def roofline_chart(products: pl.DataFrame, limits: Limits | None) -> Any:
    """Rate against intensity, both logarithmic, and the device's roof where it is known: columns of `product_table`."""
    shown = (
        products.filter((pl.col("tflop_per_s") > 0) & pl.col("intensity").is_not_null())
        .head(MAX_ROWS)
        .with_columns(ms=pl.col("time_ns") / 1e6)
        .select("operator", "shapes", "types", "count", "intensity", "tflop_per_s", "ms")
    )
    x = alt.X("intensity:Q", scale=alt.Scale(type="log"), title="FLOPs a byte of operands and result")
    y = alt.Y("tflop_per_s:Q", scale=alt.Scale(type="log"), title="TFLOP/s")
    points = (
        alt.Chart(shown)
        .mark_point(filled=True, opacity=0.7)
        .encode(
            x=x,
            y=y,
            size=alt.Size("ms:Q", title="milliseconds", legend=None),
            color=colour("operator", shown["operator"].unique().sort().to_list()),
            tooltip=["operator", "shapes", "types", "count", alt.Tooltip("intensity:Q", format=",.1f"),
                     alt.Tooltip("tflop_per_s:Q", title="TFLOP/s", format=",.2f"), alt.Tooltip("ms:Q", format=",.3f")],
        )
    )  # fmt: skip
    if limits is None or not shown.height:
        return sized(points, 260)
    least, most = (float(value) for value in (shown["intensity"].min(), shown["intensity"].max()))  # type: ignore[arg-type]
    roof = [
        (f"{width} bytes", at, min(peak, at * limits.gb_per_s / 1e3))
        for width, peak in limits.tflop_per_s.items()
        for at in (least / 2, peak / limits.gb_per_s * 1e3, max(most, peak / limits.gb_per_s * 1e3) * 2)
    ]
    lines = alt.Chart(pl.DataFrame(roof, schema=["elements", "intensity", "tflop_per_s"], orient="row")).mark_line(
        color=QUIET, strokeDash=[4, 3]
    )
    return sized(lines.encode(x=x, y=y, detail="elements:N", tooltip=["elements"]) + points, 260)


def collective_chart(table: pl.DataFrame) -> Any:
    """Bus bandwidth against message size: columns rank, bytes, bus_gb_per_s, collective, duration_ns."""
    known = table.filter((pl.col("bytes") > 0) & (pl.col("bus_gb_per_s") > 0))
    known = known.gather_every(max(1, -(-known.height // MAX_ROWS)))
    shown = known.select("bytes", "bus_gb_per_s", "collective", "rank", ms=pl.col("duration_ns") / 1e6)
    axis, rate = alt.Axis(format="~s", tickCount=6), "bus bandwidth, GB/s"
    x = alt.X("bytes:Q", scale=alt.Scale(type="log"), title="bytes of the message", axis=axis)
    bus, duration = alt.Tooltip("bus_gb_per_s:Q", title=rate, format=".2f"), alt.Tooltip("ms:Q", format=",.3f")
    return _points(shown, x, alt.Y("bus_gb_per_s:Q", title=rate), "collective", ["rank", "bytes", bus, duration])


def arrival_chart(arrivals: pl.DataFrame) -> Any:
    """Arrival skew of each collective over time, coloured by the rank that came last."""
    shown = arrivals.top_k(MAX_ROWS, by="skew_ns").select(
        "collective",
        ms=(pl.col("first_ns") - pl.col("first_ns").min()) / 1e6,
        skew_ms=pl.col("skew_ns") / 1e6,
        last=pl.format("rank {} came last", "last_rank"),
    )
    y = alt.Y("skew_ms:Q", title="first to last arrival, ms")
    skew = alt.Tooltip("skew_ms:Q", title="skew, ms", format=",.3f")
    return _points(shown, milliseconds("ms"), y, "last", ["collective", skew])


def _points(shown: pl.DataFrame, x: alt.X, y: alt.Y, by: str, tooltip: list[Any]) -> Any:
    chart = alt.Chart(shown).mark_point(filled=True, size=36, opacity=0.65)
    colours = colour(by, shown[by].unique().sort().to_list())
    return sized(chart.encode(x=x, y=y, color=colours, tooltip=[by, *tooltip]), 220)


def counter_chart(sums: pl.DataFrame) -> Any:
    """Hardware counters by operator, each counter on its own scale: columns operator, counter, value."""
    shown = sums.filter(pl.col("value") != 0).group_by("counter", maintain_order=True).head(8)
    rows = []
    for (counter,), part in shown.group_by("counter", maintain_order=True):
        bars = (
            alt.Chart(part, title=str(counter)[:120])
            .mark_bar(color=ACCENT)
            .encode(
                x=alt.X("value:Q", title=None, axis=alt.Axis(format="~s", tickCount=4)),
                y=alt.Y("operator:N", sort=None, title=None, axis=alt.Axis(labelLimit=160)),
                tooltip=["operator", alt.Tooltip("value:Q", format=",.6~g")],
            )
        )
        rows.append(bars.properties(width=480))
    return alt.vconcat(*rows)
