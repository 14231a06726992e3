"""Bars of time: accounts, causes, answers to what-if, the way from one step time to another."""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from fettle.trace.analyses.waits import CAUSES
from fettle.trace.report.charts.look import colour, main_parts, milliseconds, ordered, sized, words


def account_parts(account: pl.DataFrame) -> pl.DataFrame:
    """A time account with a row a part: columns rank, device, step, where, part, ms."""
    columns = {
        "compute_ns": "compute",
        "exposed_communication_ns": "exposed communication",
        "exposed_copy_ns": "exposed copy",
    }
    columns |= {f"idle_{c}_ns": c.replace("_", " ") for c in CAUSES}
    long = account.select("rank", "device", "step", *columns).unpivot(
        index=["rank", "device", "step"], variable_name="part", value_name="ns"
    )
    return long.with_columns(
        ms=pl.col("ns") / 1e6,
        part=pl.col("part").replace_strict(columns, return_dtype=pl.String()),
        where=pl.when(pl.col("device") < 0)
        .then(pl.format("rank {} host", "rank"))
        .otherwise(pl.format("rank {} device {}", "rank", "device")),
    ).filter(pl.col("ns") > 0)


def account_chart(account: pl.DataFrame) -> Any:
    """Where the time went: a bar a step where there is one device, else a bar a device (its mean step)."""
    places = account.select("rank", "device").unique().height
    long = main_parts(account_parts(account), "part", "ms")
    if places > 1:
        steps = account.group_by("rank", "device").agg(steps=pl.len())
        mean = (
            long.join(steps, on=["rank", "device"])
            .group_by("where", "part", "rank", "device")
            .agg(ms=pl.col("ms").sum() / pl.col("steps").first())
        )
        return stacked(mean.sort("rank", "device"), "where", "part", "ms")
    order = ordered(long["part"].unique().to_list())
    thinned = max(1, -(-account.height // 300))
    shown = long.filter(pl.col("step").rank("dense") % thinned == 0).group_by("step", "part").agg(pl.col("ms").sum())
    shown = shown.with_columns(
        order=pl.col("part").replace_strict({p: i for i, p in enumerate(order)}, return_dtype=pl.Int64())
    )
    if account.height == 1:
        return stacked(long, "where", "part", "ms")
    chart = (
        alt.Chart(shown)
        .mark_bar()
        .encode(
            x=alt.X("step:O", title="step", axis=alt.Axis(labelOverlap=True, labelAngle=0)),
            y=alt.Y("ms:Q", title="milliseconds"),
            color=colour("part", order),
            order=alt.Order("order:Q"),
            tooltip=["step", "part", alt.Tooltip("ms:Q", format=",.3f")],
        )
    )
    return sized(chart, 260)


def stacked(frame: pl.DataFrame, place: str, part: str, value_ms: str) -> Any:
    """One horizontal bar a place, cut into parts: columns `place`, `part`, `value_ms`."""
    frame = frame.with_columns(words(part))
    order = ordered(frame[part].unique().to_list()) if frame.height else []
    summed = frame.group_by(place, part, maintain_order=True).agg(pl.col(value_ms).sum())
    numbered = summed.with_columns(
        order=pl.col(part).replace_strict({p: i for i, p in enumerate(order)}, return_dtype=pl.Int64())
        if order
        else pl.lit(0)
    )
    bars = (
        alt.Chart(numbered)
        .mark_bar(height=16, yOffset=6)
        .encode(
            x=alt.X(
                f"sum({value_ms}):Q", title="milliseconds", axis=alt.Axis(tickCount=alt.ExprRef("ceil(width / 110)"))
            ),
            y=alt.Y(f"{place}:N", sort=None, title=None, axis=None),
            color=colour(part, order),
            order=alt.Order("order:Q"),
            tooltip=[place, part, alt.Tooltip(f"sum({value_ms}):Q", title="ms", format=",.3f")],
        )
    )
    labels = (
        alt.Chart(numbered.select(place).unique(maintain_order=True))
        .mark_text(align="left", yOffset=-10, fontSize=11, limit=alt.ExprRef("width"))
        .encode(x=alt.value(0), y=alt.Y(f"{place}:N", sort=None), text=f"{place}:N")
    )
    return sized(bars + labels, alt.Step(40))


def bar_chart(
    frame: pl.DataFrame,
    label: str,
    value_ns: str,
    title: str = "milliseconds",
    *,
    color: str | None = None,
    top: int = 15,
) -> Any:
    """Horizontal bars of a time column, longest first, each under its label. Negative values point to the left."""
    shown = (
        frame.filter(pl.col(value_ns) != 0)
        .sort(pl.col(value_ns).abs(), descending=True)
        .head(top)
        .with_columns(ms=pl.col(value_ns) / 1e6, label=words(label).fill_null("unknown").str.slice(0, 200))
        .with_row_index("at")
    )
    whole = float(frame[value_ns].abs().sum() or 1)
    shown = shown.with_columns(
        text=pl.format(
            "{}  ·  {} ms, {}%", "label", pl.col("ms").round(3), (pl.col(value_ns).abs() * 100 / whole).round(1)
        )
    )
    base = alt.Chart(shown.select("at", "label", "ms", "text", *([color] if color else []))).encode(
        y=alt.Y("at:O", axis=None)
    )
    encoding: dict[str, Any] = {
        "x": alt.X("ms:Q", title=title, axis=alt.Axis(tickCount=alt.ExprRef("ceil(width / 110)"))),
        "tooltip": [alt.Tooltip("label:N"), alt.Tooltip("ms:Q", format=",.3f")],
    }
    if color is not None:
        encoding["color"] = colour(color, ordered(shown[color].unique().to_list()))
        bars = base.mark_bar(height=9, yOffset=7).encode(**encoding)
    else:
        bars = base.mark_bar(height=9, yOffset=7, color="#1f8a99").encode(**encoding)
    labels = base.mark_text(align="left", yOffset=-6, fontSize=11, limit=alt.ExprRef("width")).encode(
        x=alt.value(0), text="text:N"
    )
    return sized(bars + labels, alt.Step(31))


def what_if_chart(answers: pl.DataFrame) -> Any:
    """Estimates, bounds and what was measured: columns question, wall_ns, estimate_ns, low_ns, high_ns."""
    shown = answers.select(
        "question",
        low=pl.col("low_ns") / 1e6,
        high=pl.col("high_ns") / 1e6,
        estimate=pl.col("estimate_ns") / 1e6,
        now=pl.col("wall_ns") / 1e6,
    ).with_row_index("at")
    base = alt.Chart(shown).encode(y=alt.Y("at:O", axis=None))
    bounds = base.mark_rule(strokeWidth=3, opacity=0.5, yOffset=8).encode(
        x=alt.X(
            "low:Q",
            title="milliseconds",
            scale=alt.Scale(zero=True),
            axis=alt.Axis(tickCount=alt.ExprRef("ceil(width / 110)")),
        ),
        x2="high:Q",
    )
    points = base.mark_point(filled=True, size=90, color="#1f8a99", opacity=1, yOffset=8).encode(
        x="estimate:Q",
        tooltip=["question", *(alt.Tooltip(f"{c}:Q", format=",.3f") for c in ("now", "estimate", "low", "high"))],
    )
    now = base.mark_tick(color="#c2562d", thickness=2, height=16, yOffset=8).encode(x="now:Q")
    labels = base.mark_text(align="left", yOffset=-8, fontSize=11, limit=alt.ExprRef("width")).encode(
        x=alt.value(0), text="question:N"
    )
    return sized(bounds + now + points + labels, alt.Step(38))


def change_chart(parts: pl.DataFrame, before_ns: float, after_ns: float, top: int = 12) -> Any:
    """A waterfall from one mean step to the other: columns part, change_ns."""
    ranked = parts.filter(pl.col("change_ns") != 0).sort(pl.col("change_ns").abs(), descending=True)
    rows = [(p, c) for p, c in ranked.select("part", "change_ns").head(top).iter_rows()]
    rest = after_ns - before_ns - sum(c for _, c in rows)
    rows += [("all other changes", rest)] if abs(rest) > 0.5 else []
    bars, at = [("mean step before", 0.0, before_ns, "step")], before_ns
    for name, change in rows:
        bars.append((name, at, at + change, "slower" if change > 0 else "faster"))
        at += change
    bars.append(("mean step after", 0.0, after_ns, "step"))
    shown = (
        pl.DataFrame(bars, schema=["part", "start", "end", "kind"], orient="row")
        .with_row_index("at")
        .with_columns(pl.col("start", "end") / 1e6, change=(pl.col("end") - pl.col("start")) / 1e6)
    )
    shown = shown.with_columns(text=pl.format("{}  ·  {} ms", "part", pl.col("change").round(3)))
    scale = alt.Scale(domain=["step", "slower", "faster"], range=["#8a949e", "#c2562d", "#2f9a6c"])
    base = alt.Chart(shown).encode(y=alt.Y("at:O", axis=None))
    chart = base.mark_bar(height=10, yOffset=7).encode(
        x=milliseconds("start"), x2="end:Q", color=alt.Color("kind:N", title=None, scale=scale),
        tooltip=["part", alt.Tooltip("change:Q", format="+,.3f")],
    )  # fmt: skip
    labels = base.mark_text(align="left", yOffset=-6, fontSize=11, limit=alt.ExprRef("width")).encode(
        x=alt.value(0), text="text:N"
    )
    return sized(chart + labels, alt.Step(31))


def step_chart(steps: pl.DataFrame, outliers: pl.DataFrame) -> Any:
    """Wall times of the steps in their order: columns rank, step, wall_ns; of the outliers rank and step."""
    thinned = max(1, -(-steps.height // 300))
    far = steps.join(outliers, on=["rank", "step"], how="semi").with_columns(kind=pl.lit("outlier"))
    near = steps.join(outliers, on=["rank", "step"], how="anti").with_columns(kind=pl.lit("usual"))
    near = near.filter(pl.col("step").rank("dense") % thinned == 0)
    shown = pl.concat([near, far]).select("rank", "step", "kind", ms=pl.col("wall_ns") / 1e6).sort("rank", "step")
    scale = alt.Scale(domain=["usual", "outlier"], range=["#1f8a99", "#c2562d"])
    chart = (
        alt.Chart(shown)
        .mark_bar()
        .encode(
            x=alt.X("step:O", title="step", axis=alt.Axis(labelOverlap=True, labelAngle=0)),
            xOffset="rank:O",
            y=alt.Y("ms:Q", title="milliseconds"),
            color=alt.Color("kind:N", title=None, scale=scale),
            tooltip=["rank", "step", alt.Tooltip("ms:Q", format=",.3f")],
        )
    )
    return sized(chart, 220)
