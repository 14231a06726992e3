"""Bars of time: accounts, causes, answers to what-if, the way from one step time to another."""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from fettle.page.theme import ACCENT, GREEN, QUIET, WARN, coloured
from fettle.trace.analyses.waits import CAUSES
from fettle.trace.report.charts.look import colour, main_parts, milliseconds, ordered, sized, words

PLACE = (
    pl.when(pl.col("device") < 0)
    .then(pl.format("rank {} host", "rank"))
    .otherwise(pl.format("rank {} device {}", "rank", "device"))
)
"""A device of a rank, or its host, in words."""


def split_bars(frame: pl.DataFrame, where: pl.Expr, parts: dict[str, str]) -> Any:
    """One bar a row, under `where`, cut into the parts that columns in ns hold; `parts` has their words."""
    return stacked(main_parts(_long(frame, where, parts), "part", "ms"), "where", "part", "ms")


def _long(frame: pl.DataFrame, where: pl.Expr, parts: dict[str, str]) -> pl.DataFrame:
    long = frame.select(where.alias("where"), *parts).unpivot(list(parts), index="where", value_name="ns")
    part = pl.col("variable").replace_strict(parts, return_dtype=pl.String())
    return long.filter(pl.col("ns") > 0).select("where", part=part, ms=pl.col("ns") / 1e6)


def account_chart(account: pl.DataFrame) -> Any:
    """Where the time went: a bar a step where there is one device, else a bar a device (its mean step)."""
    parts = {f"{name.replace(' ', '_')}_ns": name for name in ("compute", "exposed communication", "exposed copy")}
    parts |= {f"idle_{cause}_ns": cause for cause in CAUSES}
    mean = account.group_by("rank", "device").agg(pl.col(*parts).mean()).sort("rank", "device")
    if account.height == 1 or mean.height > 1:
        return split_bars(mean, PLACE, parts)
    long = main_parts(_long(account, pl.col("step"), parts), "part", "ms")
    order, thinned = ordered(long["part"].unique().to_list()), max(1, -(-account.height // 300))
    shown = long.filter(pl.col("where").rank("dense") % thinned == 0).group_by("where", "part").agg(pl.col("ms").sum())
    bars = _by_step(shown.rename({"where": "step"}).with_columns(order=_place_in(order, "part")))
    tooltip = ["step", "part", alt.Tooltip("ms:Q", format=",.3f")]
    return sized(bars.encode(color=colour("part", order), order=alt.Order("order:Q"), tooltip=tooltip), 260)


def _by_step(frame: pl.DataFrame) -> Any:
    """A bar a step: columns step, ms."""
    x = alt.X("step:O", title="step", axis=alt.Axis(labelOverlap=True, labelAngle=0))
    return alt.Chart(frame).mark_bar().encode(x=x, y=alt.Y("ms:Q", title="milliseconds"))


def stacked(frame: pl.DataFrame, place: str, part: str, value_ms: str) -> Any:
    """One horizontal bar a place, cut into parts: columns `place`, `part`, `value_ms`."""
    frame = frame.with_columns(words(part))
    parts = ordered(frame[part].unique().to_list())
    summed = frame.group_by(place, part, maintain_order=True).agg(pl.col(value_ms).sum())
    y = alt.Y(f"{place}:N", sort=None, title=None, axis=None)
    bars = (
        alt.Chart(summed.with_columns(order=_place_in(parts, part)))
        .mark_bar(height=16, yOffset=6)
        .encode(
            x=milliseconds(f"sum({value_ms})"),
            y=y,
            color=colour(part, parts),
            order=alt.Order("order:Q"),
            tooltip=[place, part, alt.Tooltip(f"sum({value_ms}):Q", title="ms", format=",.3f")],
        )
    )
    labels = _labels(alt.Chart(summed.select(place).unique(maintain_order=True)).encode(y=y), place, -10)
    return sized(bars + labels, alt.Step(40))


def _place_in(parts: list[str], part: str) -> pl.Expr:
    """A number for each part, in their order."""
    numbers = {name: number for number, name in enumerate(parts)}
    return pl.col(part).replace_strict(numbers, default=0, return_dtype=pl.Int64())


def _labels(base: Any, column: str, above: int) -> Any:
    """A line of text over each bar."""
    text = base.mark_text(align="left", yOffset=above, fontSize=11, limit=alt.ExprRef("width"))
    return text.encode(x=alt.value(0), text=f"{column}:N")


def bar_chart(frame: pl.DataFrame, label: str, value_ns: str, *, color: str | None = None) -> Any:
    """Horizontal bars of a time column, longest first, each under its label: what has the same one, as on several
    ranks, is added up. Negative values point to the left."""
    frame = frame.group_by(label, *([color] if color else []), maintain_order=True).agg(pl.col(value_ns).sum())
    whole = float(frame[value_ns].abs().sum() or 1)
    shown = (
        frame.filter(pl.col(value_ns) != 0)
        .sort(pl.col(value_ns).abs(), descending=True)
        .head(15)
        .with_columns(ms=pl.col(value_ns) / 1e6, label=words(label).fill_null("unknown").str.slice(0, 200))
        .with_columns(share=(pl.col("ms").abs() * 1e8 / whole).round(1))
        .with_columns(text=pl.format("{}  ·  {} ms, {}%", "label", pl.col("ms").round(3), "share"))
        .with_row_index("at")
        .select("at", "label", "ms", "text", *([color] if color else []))
    )
    base = alt.Chart(shown).encode(y=alt.Y("at:O", axis=None))
    colours = {"color": colour(color, ordered(shown[color].unique().to_list()))} if color else {}
    bars = base.mark_bar(height=9, yOffset=7, color=ACCENT).encode(
        x=milliseconds("ms"), tooltip=["label", alt.Tooltip("ms:Q", format=",.3f")], **colours
    )
    return sized(bars + _labels(base, "text", -6), alt.Step(31))


def what_if_chart(answers: pl.DataFrame) -> Any:
    """Estimates, bounds and what was measured: columns question, wall_ns, estimate_ns, low_ns, high_ns."""
    names = {"low": "low_ns", "high": "high_ns", "estimate": "estimate_ns", "now": "wall_ns"}
    shown = answers.select("question", **{n: pl.col(c) / 1e6 for n, c in names.items()}).with_row_index("at")
    base = alt.Chart(shown).encode(y=alt.Y("at:O", axis=None))
    bounds = base.mark_rule(strokeWidth=3, opacity=0.5, yOffset=8).encode(
        x=milliseconds("low", "milliseconds (point: estimate; line: its bounds; tick: as measured)"), x2="high:Q"
    )
    points = base.mark_point(filled=True, size=90, color=ACCENT, opacity=1, yOffset=8).encode(
        x="estimate:Q",
        tooltip=["question", *(alt.Tooltip(f"{c}:Q", format=",.3f") for c in ("now", "estimate", "low", "high"))],
    )
    now = base.mark_tick(color=WARN, thickness=2, height=16, yOffset=8).encode(x="now:Q")
    return sized(bounds + now + points + _labels(base, "question", -8), alt.Step(38))


def change_chart(parts: pl.DataFrame, before_ns: float, after_ns: float) -> Any:
    """A waterfall from one mean step to the other: columns part, change_ns."""
    ranked = parts.filter(pl.col("change_ns") != 0).sort(pl.col("change_ns").abs(), descending=True)
    rows = [(p, c) for p, c in ranked.select("part", "change_ns").head(12).iter_rows()]
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
    colours = {"step": QUIET, "slower": WARN, "faster": GREEN}
    base = alt.Chart(shown).encode(y=alt.Y("at:O", axis=None))
    chart = base.mark_bar(height=10, yOffset=7).encode(
        x=milliseconds("start"), x2="end:Q", color=coloured("kind", colours),
        tooltip=["part", alt.Tooltip("change:Q", format="+,.3f")],
    )  # fmt: skip
    return sized(chart + _labels(base, "text", -6), alt.Step(31))


def step_chart(steps: pl.DataFrame, outliers: pl.DataFrame) -> Any:
    """Wall times of the steps in their order: columns rank, step, wall_ns; of the outliers rank and step."""
    thinned = max(1, -(-steps.height // 300))
    far = steps.join(outliers, on=["rank", "step"], how="semi").with_columns(kind=pl.lit("outlier"))
    near = steps.join(outliers, on=["rank", "step"], how="anti").with_columns(kind=pl.lit("usual"))
    near = near.filter(pl.col("step").rank("dense") % thinned == 0)
    shown = pl.concat([near, far]).select("rank", "step", "kind", ms=pl.col("wall_ns") / 1e6).sort("rank", "step")
    kind = coloured("kind", {"usual": ACCENT, "outlier": WARN})
    tooltip = ["rank", "step", alt.Tooltip("ms:Q", format=",.3f")]
    return sized(_by_step(shown).encode(xOffset="rank:O", color=kind, tooltip=tooltip), 220)
