"""The plan as a picture: one stacked bar a strategy, against the memory of the device. As PNG, SVG or one HTML file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from fettle.errors import UsageError
from fettle.files import check_writable, whole, write_text
from fettle.train.plan import Plan, Prediction
from fettle.train.plan_timeline import PARTS
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
    legend = alt.Legend(orient="bottom", columns=2) if narrow else alt.Legend()
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
    size = {"width": width, "height": alt.Step(40 if narrow else 22)}
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
    """One HTML file without network: the bars as SVG, so that it needs no script, and the table."""
    import vl_convert

    wide, narrow = (vl_convert.vegalite_to_svg(json.dumps(bars(made, width).to_dict())) for width in (760, 200))
    title = f"Memory plan: {made.name}, {made.world_size} ranks"
    able = [item for item in made.predictions if not item.failed]
    failed = [("strategy", "failed"), *((item.strategy, item.failed) for item in made.predictions if item.failed)]
    peaks = [("strategy", "peak", *PARTS, "fits"), *map(_peak_texts, able)]
    sent = [("strategy", "sent a step", "between nodes", "collectives", "note"), *map(_sent_texts, able)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>memory plan: {escape(made.name)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1><p class='verdict'>{escape(verdict(made))}</p>"
        f"<p class='soft'>{escape(basis(made))}</p>"
        f"<div class='scroll wide'>{wide}</div><div class='scroll narrow'>{narrow}</div>"
        f"{_table(peaks)}{_table(sent, 'words')}{_table(failed, 'words') if len(failed) > 1 else ''}</body></html>"
    )


def _table(rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """Rows as HTML, the first one its head; of the kind ``words`` the last two columns are text."""
    lines = [
        "<tr>" + "".join(f"<{cell}>{escape(text)}</{cell}>" for text in row) + "</tr>"
        for row, cell in zip(rows, ("th", *["td"] * (len(rows) - 1)), strict=True)
    ]
    return f"<div class='scroll'><table class='{kind}'>{''.join(lines)}</table></div>"


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


_STYLE = """
:root{--ink:#1d2733;--soft:#5b6b7c;--line:#d7dee6}*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:24px;background:#fff;color:var(--ink);font:15px/1.5 system-ui,sans-serif}
h1{font-size:20px;margin:0;overflow-wrap:anywhere}.verdict{font-size:17px}.soft{color:var(--soft)}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:14px;margin-top:16px}
th,td{text-align:right;padding:4px 12px 4px 0;border-bottom:1px solid var(--line);white-space:nowrap;
vertical-align:top;font-variant-numeric:tabular-nums}
th:first-child,td:first-child,.words th:nth-last-child(-n+2),.words td:nth-last-child(-n+2){text-align:left}
.words td:nth-last-child(-n+2){white-space:normal;min-width:130px}
.narrow{display:none}@media(max-width:760px){.wide{display:none}.narrow{display:block}body{padding:16px}
td:first-child{white-space:normal}}
"""
