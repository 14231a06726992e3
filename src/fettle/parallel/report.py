"""The plan as a picture: one stacked bar a strategy, against the memory of the device. As PNG, SVG or one HTML file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fettle.errors import UsageError
from fettle.files import check_writable, whole, write_text
from fettle.page import Table, as_spec, shell, still
from fettle.parallel.plan import Plan, Prediction
from fettle.parallel.timeline import PARTS
from fettle.units import size_text

_COLOURS = ("#1f77a8", "#2f9a6c", "#7d6bc4", "#d27a22", "#8a949e")
SUFFIXES = (".html", ".png", ".svg")


def bars(made: Plan, width: int = 520) -> Any:
    """Stacked bars of the peak's parts; the line is what the headroom leaves of the device. An Altair chart.

    Where it is narrow a strategy's settings stand below each other and the legend below the bars.
    """
    import altair as alt

    longest = max(item.peak_bytes for item in made.predictions)
    unit, scale = ("GiB", 1 << 30) if longest >= 1 << 30 else ("MiB", 1 << 20)
    rows = [
        {"strategy": item.strategy, "part": part, "order": PARTS.index(part), "size_in_unit": item.parts[part] / scale,
         "size": size_text(item.parts[part]), "fits": _fits(item)}
        for item in made.predictions if not item.failed for part in PARTS
    ]  # fmt: skip
    drawn = [item.strategy for item in made.predictions if not item.failed]
    narrow = width < 400
    axis = alt.Axis(labelExpr="split(datum.label, ' ')", labelLimit=130) if narrow else alt.Axis(labelLimit=300)
    legend = alt.Legend(orient="bottom", columns=2 if narrow else 3)
    chart = (
        alt.Chart(alt.Data(values=rows))  # type: ignore[no-untyped-call]
        .mark_bar(height=18)
        .encode(
            y=alt.Y("strategy:N", sort=drawn, title=None, axis=axis),
            x=alt.X("size_in_unit:Q", title=f"peak per rank, {unit}"),
            color=alt.Color(
                "part:N",
                sort=list(PARTS),
                title=None,
                legend=legend,
                scale=alt.Scale(domain=list(PARTS), range=list(_COLOURS)),
            ),
            order="order:Q",
            tooltip=["strategy:N", "part:N", "size:N", "fits:N"],
        )
    )
    padding = {"left": 40, "right": 16, "top": 16, "bottom": 16}  # names are wider in some browsers' fonts
    size = {"width": width, "height": alt.Step(40 if narrow else 22), "padding": padding}
    most = (made.device_memory_bytes or 0) * (1 - made.headroom)
    if not most or most > 1.5 * longest:  # a line far beyond the bars would only squeeze them
        return chart.properties(**size)
    limit = alt.Data(values=[{"size_in_unit": most / scale}])  # type: ignore[no-untyped-call]
    line = alt.Chart(limit).mark_rule(strokeDash=[5, 3], size=2, color="#c24d4d").encode(x="size_in_unit:Q")
    return alt.layer(chart, line).properties(**size)


def write_plan(made: Plan, path: str | os.PathLike[str]) -> None:
    """Write the picture to `path`; its suffix says what. Raises `UsageError` where that cannot be."""
    target = Path(path)
    check_path(target)
    if target.suffix == ".html":
        write_text(target, page(made))
        return
    with whole(target) as partial:
        bars(made).save(str(partial), scale_factor=2 if target.suffix == ".png" else 1)


def check_path(path: Path) -> None:
    """Raises `UsageError` for a suffix that is not drawn, or a place that cannot be written."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path}: a plan is written as {', '.join(SUFFIXES)}")
    check_writable(path)


def page(made: Plan) -> str:
    """One HTML file without network and scripts: the bars as SVG, and the tables."""
    able = [item for item in made.predictions if not item.failed]
    failed = [(item.strategy, item.failed) for item in made.predictions if item.failed]
    peaks = ("strategy", "peak", *PARTS, "fits")
    sent = ("strategy", "sent a step", "between nodes", "collectives", "note")
    return shell.render(
        "fettle.parallel",
        "plan.html.j2",
        f"Memory plan: {made.name}",
        made=made,
        verdict=verdict(made),
        basis=basis(made),
        drawn=still(verdict(made), lambda narrow: as_spec(bars(made, 200 if narrow else 620))),
        tables=[
            Table(peaks, [_peak_texts(item) for item in able], peaks[1:-1]),
            Table(sent, [_sent_texts(item) for item in able], sent[1:3]),
            Table(("strategy", "failed"), failed),
        ],
    )


def verdict(made: Plan) -> str:
    """The plan's answer in one sentence."""
    if made.device_memory_bytes is None:
        return "Give the device's memory to learn which strategies fit."
    fitting = [item for item in made.predictions if item.fits]
    room = f"{size_text(made.device_memory_bytes)} with {made.headroom:.0%} left free"
    if not fitting:
        able = [item for item in made.predictions if not item.failed]
        least = min(able, key=lambda item: item.peak_bytes)
        return f"Nothing fits in {room}; the least is {least.strategy} with {size_text(least.peak_bytes)}."
    if not made.cheapest:
        return f"{len(fitting)} of {len(made.predictions)} fit in {room}, none of them on {made.world_size} ranks."
    return f"{len(fitting)} of {len(made.predictions)} fit in {room}; of these {made.cheapest} communicates least."


def basis(made: Plan) -> str:
    """What was assumed, for those who read the numbers."""
    return (
        f"{made.parameters:,} parameters, {made.optimizer}, {made.ranks_per_node} ranks per node, "
        f"device {made.device}. "
        "Predicted from fake tensors, nothing was launched. Not counted: the device's context, the communication "
        "library's buffers, fragmentation, and what kernels allocate inside themselves."
    )


def _peak_texts(item: Prediction) -> tuple[str, ...]:
    return (item.strategy, size_text(item.peak_bytes), *(size_text(item.parts[part]) for part in PARTS), _fits(item))


def _sent_texts(item: Prediction) -> tuple[str, ...]:
    counts = ", ".join(f"{count} {name}" for name, count in item.collectives.items()) or "none"
    return item.strategy, size_text(item.sent_bytes), size_text(item.between_nodes_bytes), counts, item.note


def _fits(item: Prediction) -> str:
    return "" if item.fits is None else "yes" if item.fits else "no"
