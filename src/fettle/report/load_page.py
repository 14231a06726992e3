"""The report of load on a server: one HTML file that needs no network.

It reads what ``fettle serve load --json`` prints (`fettle.load.run.as_data`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from fettle.measure import Load
from fettle.page import Figure, Table, clean, picture, shell, theme
from fettle.page.theme import Rows, by_name, level
from fettle.report import _format as fmt

Data = Mapping[str, Any]
_MOST_LINES = 8
_KINDS = (
    ("ttft", "Time to the first token", "ttft_ms", "ttft_limit_ms"),
    ("itl", "Time between two tokens", "itl_ms", "itl_limit_ms"),
    ("latency", "Time to the whole answer", "latency_ms", "limit_ms"),
)
"""A chart's name, its title, and where its percentiles and its limit stand."""


def loads_page(runs: Sequence[Data], table: Table, url: str, machine: str) -> str:
    """The page as text; `table` has a column for each run, with its name and its figures."""
    runs, loads = [clean(run) for run in runs], table.columns[1:]
    figures = [figure for kind in _KINDS if (figure := _figure(runs, loads, *kind)) is not None]
    doubts = [f"{load}: {why}" for load, run in zip(loads, runs, strict=True) if (why := _doubt(run))]
    conclusion = headline(runs, loads)
    return shell.render(
        "fettle.report", "load_page.html.j2", f"{conclusion}: {url}", figures, headline=conclusion,
        url=url, table=table, doubts=doubts, machine=machine,
    )  # fmt: skip


def headline(runs: Sequence[Data], loads: Sequence[str]) -> str:
    """The most that was answered in time, in a few words."""
    limited = any(_part(run, key).get(key) for run in runs for *_, key in _KINDS)
    counted = [number for number, run in enumerate(runs) if not run["void"]]
    if not counted:
        return "Nothing can be concluded: every run is void"
    best = max(counted, key=lambda number: runs[number]["goodput"])
    run = runs[best]
    under = Load.from_json(run.get("load", {})).under
    words = f"{under}{run['goodput']:.3g} answers a second" + (" within the limits" if limited else "")
    if "texts" in run:
        words += f", {fmt.number(run['texts']['tokens_per_s'], 3)} tokens a second"
    return f"{words}, at {loads[best]}"


def _doubt(run: Data) -> str:
    """Why a run's figures cannot be trusted; empty where they can."""
    return str(run["void"]) or ("" if run["stable"] else "the backlog only grew: more than the server can do")


def _part(run: Data, key: str) -> Data:
    """The part of a run that has a figure: those of texts are in a part of their own."""
    return run if key in run else run.get("texts", {})


def _ends(run: Data, key: str, percent: str) -> Sequence[float | None]:
    """The ends of a percentile's interval, which only the latency of whole answers has."""
    ends = run.get("intervals_ms", {}).get(percent) if key == "latency_ms" else None
    return ends or (None, None)


def _figure(runs: Sequence[Data], loads: Sequence[str], name: str, title: str, key: str, limit: str) -> Figure | None:
    rows: Rows = [
        {"load": load, "percentile": float(percent.removeprefix("p")), "ms": value, "low": low, "high": high}
        for load, run in zip(loads[:_MOST_LINES], runs, strict=False)
        for percent, value in _part(run, key).get(key, {}).items()
        if value is not None
        for low, high in [_ends(run, key, percent)]
    ]
    if not rows:
        return None
    shown = list(dict.fromkeys(row["load"] for row in rows))
    base = alt.Chart(theme.data(rows)).encode(
        x=alt.X("percentile:O", title="percentile", axis=alt.Axis(labelAngle=0, grid=False)),
        y=alt.Y("ms:Q", title="ms", scale=alt.Scale(zero=True, nice=True)),
        color=by_name("load", shown, columns=3),
        tooltip=[alt.Tooltip("load:N"), alt.Tooltip("percentile:O"), alt.Tooltip("ms:Q", format=".4~g")],
    )  # fmt: skip
    most = _part(runs[0], limit).get(limit) or 0
    words = "; ".join(f"{row['load']} p{row['percentile']:.0f} {row['ms']:.4g} ms" for row in rows)
    whiskers = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=1.5)
    whiskers = whiskers.encode(y=alt.Y("low:Q", title="ms"), y2="high:Q")
    limits = level(most, f"limit {most:.4g} ms") if most else []
    line, dots = base.mark_line(strokeWidth=2), base.mark_point(filled=True, size=45)
    return picture(name, title, f"{words}.", 260, line, dots, whiskers, *limits)
