"""The report of a search for a service level: its tiles, tables and charts, in one HTML file that needs no network.

It reads the plain data of the search (`fettle.slo.outcome.as_data`), which is also what ``result.json`` holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import altair as alt

from fettle.measure import Load
from fettle.page import Cell, Figure, Row, Table, clean, picture, shell, theme
from fettle.page.theme import ACCENT, LEVERS, QUIET, WARN, Rows, by_name, coloured, level, rule
from fettle.report import _format as fmt
from fettle.units import count_text, rate_text

Data = Mapping[str, Any]
_HEIGHT = 300


def slo_page(data: Data) -> str:
    """The page as text."""
    data = clean(data)
    chosen = best_of(data)
    limit = fmt.milliseconds(data["limit_ms"])
    conclusion = headline(data, limit, lambda rate: f"{rate_text(rate)} requests a second")
    return shell.render(
        "fettle.report",
        "slo.html.j2",
        f"{conclusion}: {data['name']}",
        [figure for figure in (capacity(data), cost(data), prediction(data), front(data)) if figure is not None],
        data=data,
        best=chosen,
        headline=conclusion,
        lead=lead(data),
        fmt=fmt,
        tiles=tiles(data, chosen) if chosen else [],
        settings=settings(data),
        tests=tests(data),
        branches=branches(data),
        failures=[f"{failure['what']}: {failure['why']}" for failure in data["failures"]],
    )


def lead(data: Data) -> str:
    """One paragraph: the setting, how it was predicted, and what is left."""
    point = best_of(data)
    if point is None:
        return " ".join(f"{why[:1].upper()}{why[1:]}." for why in data["why"][:2])
    text = f"{point['setting']}. Predicted before any load test: {rate_text(point['predicted'])} requests a second."
    if data["rate"]:
        text += f" Asked for: {data['rate']:.4g}"
        text += f", with {data['headroom']:.0%} of the capacity to be left." if data["headroom"] else "."
    return text


def best_of(data: Data) -> dict[str, Any] | None:
    """The point that was chosen."""
    return None if data["best"] is None else data["points"][data["best"]]


def headline(data: Data, limits: str, words: Callable[[float], str]) -> str:
    """What came of it: the best setting's rate in `words`, within the `limits`."""
    point = best_of(data)
    if data["interrupted"]:
        return "A search that was interrupted"
    under = Load.from_json(data["load"]).under
    if point is None:
        return f"{under}No setting keeps {limits}"
    return f"{under}{'' if data['met'] else 'Not met: '}{words(point['measured'])} within {limits}"


def tiles(data: Data, best: Data) -> list[tuple[str, str, str]]:
    """The figures of the setting that was chosen."""
    many = "s" if best["workers"] > 1 else ""
    held = max((test for test in best["tests"] if test["held"]), key=lambda test: test["rate"], default=None)
    figures = [("capacity", fmt.rate(best["measured"]), f"predicted {fmt.rate(best['predicted'])}")]
    if held is not None:
        p99 = fmt.milliseconds(held["run"]["latency_ms"]["p99"])
        figures.append((f"p99 at {held['rate']:.4g}/s", p99, f"limit {fmt.milliseconds(data['limit_ms'])}"))
    figures.append(("memory of the workers", fmt.size(best["memory_bytes"]), f"{best['workers']} worker{many}"))
    if best["cost_per_million"] is not None:
        figures.append(("a million requests cost", f"{best['cost_per_million']:.3g}", "in the price's unit"))
    return [*figures, ("error of the answers", fmt.error(best["error"]), "against the model as given")]


def settings(data: Data, most: int | None = None) -> Table:
    """The settings that were measured, and those that no other beats."""
    points = [point for point in data["points"] if point["tests"] or point["front"]][:most]
    best = best_of(data)
    p99 = f"p99 at {data['reference_rate']:.4g}/s" if data["reference_rate"] else "p99"
    hidden = set()
    if all(point["cost_per_million"] is None for point in points):
        hidden.add("per million")
    if len({point["error"] for point in points}) < 2:
        hidden.add("error")
    rows: list[dict[str, Cell | str]] = []
    kinds = []
    for point in points:
        cells: dict[str, Cell | str] = {
            "setting": point["setting"],
            "predicted": fmt.rate(point["predicted"]),
            "measured": _measured(point),
            p99: fmt.milliseconds(point["p99_ms"]),
            "memory": fmt.size(point["memory_bytes"]),
            "per million": fmt.number(point["cost_per_million"], 3),
            "error": fmt.error(point["error"]),
            "": Cell("chosen", tag="winner") if point is best else Cell("front", tag="front") if point["front"] else "",
        }
        rows.append({name: cell for name, cell in cells.items() if name not in hidden})
        kinds.append("winner" if point is best else "")
    return Table.of(rows, ("setting", ""), kinds, stack=True)


def tests(data: Data) -> Table:
    """Every load test."""
    columns = ("setting", "requests/s", "p50", "p99", "predicted p99", "queue p99", "batch p99", "model p99", "Little",
               "limit")  # fmt: skip
    rows: list[Row] = []
    for point in data["points"]:
        for test in point["tests"]:
            run = test["run"]
            notes = [run["void"]] if run["void"] else []
            notes += [] if run["stable"] else ["the backlog only grew"]
            if run["failed"] or run["shed"]:
                notes.append(f"{run['failed']} failed, {run['shed']} refused")
            interval = run.get("p99_interval_ms")
            between = [f"{interval[0]:.3g} to {interval[1]:.3g}"] if interval else []
            stages = [fmt.milliseconds(test[name]["p99"]) for name in ("queue_ms", "join_ms", "model_ms")]
            kept = Cell("kept", tag="winner") if test["held"] else Cell("missed", tag="over")
            rows.append([
                Cell(point["setting"], notes=notes), f"{test['rate']:.4g}", fmt.milliseconds(run["latency_ms"]["p50"]),
                Cell(fmt.milliseconds(run["latency_ms"]["p99"]), notes=between),
                fmt.milliseconds(test["predicted_p99_ms"]), *stages, fmt.number(run["little"], 3), kept,
            ])  # fmt: skip
    return Table(columns, rows, columns[1:-1], stack=True)


def branches(data: Data) -> Table:
    """What calls cost, by workers."""
    rows: list[dict[str, Cell | str]] = []
    for branch in data["branches"]:
        first, last = branch["curve"][0], branch["curve"][-1]
        scaled = [f"costs multiplied by {branch['scale']:.3g} after load tests"] * (branch["scale"] != 1)
        rows.append({
            "workers": Cell(branch["branch"], notes=scaled), "one row": fmt.milliseconds(first["median_ms"]),
            "most rows": str(last["rows"]), "that call": fmt.milliseconds(last["median_ms"]),
            "a request adds": fmt.milliseconds(branch["request_ms"]),
            "a batch adds": fmt.milliseconds(branch["batch_ms"]), "these two were": branch["overheads"],
        })  # fmt: skip
    return Table.of(rows, ("workers", "these two were"), stack=True)


def _measured(point: Data) -> str:
    """The measured capacity; below the lowest rate that was tested where none was kept."""
    if point["measured"] == 0 and point["tests"]:
        return f"under {fmt.rate(min(test['rate'] for test in point['tests']))}"
    return fmt.rate(point["measured"])


def _branch_of(point: Data) -> tuple[Any, ...]:
    return (point["workers"], point["threads"], point["device"], point["variant"])


def _main_branch(data: Data) -> tuple[Any, ...] | None:
    """The branch of the best point, or of the best predicted one."""
    point = best_of(data) or next(iter(data["points"]), None)
    return None if point is None else _branch_of(point)


def capacity(data: Data) -> Figure | None:
    """Capacity under the limit against the rows of a batch, a line with and one without delay."""
    main = _main_branch(data)
    rows: Rows = [
        {"rows": point["max_rows"], "capacity": point.get("simulated", point["predicted"]),
         "kind": "with delay" if point["delay_s"] else "at once", "setting": point["setting"],
         "measured": point["measured"]}
        for point in data["points"] if _branch_of(point) == main
    ]  # fmt: skip
    if not any(row["capacity"] for row in rows):
        return None
    kinds = {row["kind"] for row in rows}
    colours = {kind: tone for kind, tone in (("at once", ACCENT), ("with delay", LEVERS[1])) if kind in kinds}
    sizes = sorted({row["rows"] for row in rows})
    x = alt.X("rows:Q", title="most rows a batch (log)",
              scale=alt.Scale(type="log", base=2, domain=[sizes[0] / 1.1, sizes[-1] * 1.1], nice=False),
              axis=alt.Axis(values=sizes, format="d", grid=False))  # fmt: skip
    y = alt.Y("capacity:Q", title="requests a second under the limit", scale=alt.Scale(zero=True, nice=True))
    colour = coloured("kind", colours, columns=2)
    tooltip = [alt.Tooltip("setting:N"), alt.Tooltip("capacity:Q", title="predicted", format=".4~g")]
    base = alt.Chart(theme.data(rows)).encode(x=x, y=y, color=colour, tooltip=tooltip)
    layers: list[alt.Chart] = [base.mark_line(strokeWidth=2), base.mark_point(filled=True, size=45)]
    proven = [{**row, "capacity": row["measured"]} for row in rows if row["measured"]]
    if proven:
        layers.append(
            alt.Chart(theme.data(proven)).mark_point(shape="diamond", size=190, strokeWidth=2.5).encode(
                x=x, y=y, color=colour,
                tooltip=[alt.Tooltip("setting:N"), alt.Tooltip("capacity:Q", title="measured", format=".4~g")],
            )
        )  # fmt: skip
    at_once = (row for row in rows if row["kind"] == "at once")
    listed = "; ".join(f"up to {count_text(row['rows'], 'row')} {row['capacity']:.4g}/s" for row in at_once)
    return picture("capacity", "Capacity by rows of a batch", f"Lines: {listed}.", _HEIGHT, *layers)


def cost(data: Data) -> Figure | None:
    """Milliseconds of a call against its rows: the median of every branch, and for the best one where 90% lie."""
    best_branch = _main_branch(data)
    rows: Rows = [
        {"branch": branch["branch"], **entry, "row_ms": entry["median_ms"] / entry["rows"],
         "main": _branch_of(branch) == best_branch}
        for branch in data["branches"] for entry in branch["curve"]
    ]  # fmt: skip
    if not rows:
        return None
    names = list(dict.fromkeys(row["branch"] for row in sorted(rows, key=lambda row: not row["main"])))[:8]
    rows = [row for row in rows if row["branch"] in names]
    x = alt.X("rows:Q", title="rows", scale=alt.Scale(zero=True, nice=False), axis=alt.Axis(grid=False, format="d"))
    colour = by_name("branch", names, columns=1, labelLimit=330, symbolOpacity=1)
    base = alt.Chart(theme.data(rows)).encode(
        x=x, y=alt.Y("median_ms:Q", title="ms a call"), color=colour,
        tooltip=[alt.Tooltip("branch:N"), alt.Tooltip("rows:Q"), alt.Tooltip("median_ms:Q", format=".4~g"),
                 alt.Tooltip("row_ms:Q", title="ms a row", format=".4~g"), alt.Tooltip("calls:Q")],
    )  # fmt: skip
    band = base.transform_filter("datum.main").mark_area(opacity=0.18).encode(y="low_ms:Q", y2="high_ms:Q")
    limit = level(data["limit_ms"], f"limit {fmt.milliseconds(data['limit_ms'])}")
    line, dots = base.mark_line(strokeWidth=2), base.mark_point(filled=True, size=42)
    main = (row for row in rows if row["main"])
    listed = "; ".join(f"{count_text(row['rows'], 'row')} {fmt.milliseconds(row['median_ms'])}" for row in main)
    return picture("cost", "What a call costs, by rows", f"Line: {listed}.", _HEIGHT, band, line, dots, *limit)


def prediction(data: Data) -> Figure | None:
    """Every load test: its p99 by simulation and as measured; on the line they are equal."""
    rows: Rows = [
        {"setting": point["setting"], "rate": test["rate"], "predicted": test["predicted_p99_ms"],
         "measured": test["run"]["latency_ms"]["p99"], "held": "limit kept" if test["held"] else "limit missed",
         **dict(zip(("low", "high"), test["run"].get("p99_interval_ms") or (None, None), strict=True))}
        for point in data["points"] for test in point["tests"]
        if test["predicted_p99_ms"] and test["run"]["latency_ms"]["p99"]
    ]  # fmt: skip
    if not rows:
        return None
    values = [row[name] for row in rows for name in ("predicted", "measured", "low", "high") if (row[name] or 0) > 0]
    values.append(data["limit_ms"])
    ends = [min(values) / 1.15, max(values) * 1.15]
    scale = alt.Scale(type="log", domain=ends, nice=False)
    axis = alt.Axis(values=_nice(*ends), format="~g")
    x = alt.X("predicted:Q", title="predicted p99, ms (log)", scale=scale, axis=axis)
    y = alt.Y("measured:Q", title="measured p99, ms (log)", scale=scale, axis=axis)
    line = alt.Chart(theme.data([{"v": ends[0]}, {"v": ends[1]}])).mark_line(color=QUIET, strokeDash=[3, 3])
    line = line.encode(x=alt.X("v:Q", scale=scale, title="predicted p99, ms (log)"), y=alt.Y("v:Q", scale=scale))
    base = alt.Chart(theme.data(rows)).encode(
        x=x, y=y,
        color=coloured("held", {"limit kept": ACCENT, "limit missed": WARN}),
        tooltip=[alt.Tooltip("setting:N"), alt.Tooltip("rate:Q", title="requests/s", format=".4~g"),
                 alt.Tooltip("predicted:Q", format=".4~g"), alt.Tooltip("measured:Q", format=".4~g")],
    )  # fmt: skip
    dots = base.mark_point(filled=True, size=90, opacity=0.85)
    whiskers = base.transform_filter("datum.low > 0").mark_rule(strokeWidth=1.5)
    whiskers = whiskers.encode(y=alt.Y("low:Q", scale=scale, axis=axis, title="measured p99, ms (log)"), y2="high:Q")
    limit = rule("y", data["limit_ms"], scale=scale)
    off = sorted(abs(row["measured"] / row["predicted"] - 1) for row in rows)
    middle = off[len(off) // 2]
    words = f"{count_text(len(rows), 'load test')}; the median distance from the prediction is {middle:.0%}."
    return picture("prediction", "Predicted against measured p99", words, _HEIGHT, dots, whiskers, line, limit)


def front(data: Data) -> Figure | None:
    """Capacity against the p99 at one common rate; memory as size. What is beaten in all respects stays in the back."""
    rows: Rows = []
    for number, point in enumerate(data["points"]):
        reached = point["predicted"] if point["measured"] is None else point["measured"]
        if reached and point["p99_ms"] is not None and point["p99_ms"] <= 3 * data["limit_ms"]:
            rows.append({
                "setting": point["setting"], "capacity": reached, "p99": point["p99_ms"], "front": point["front"],
                "memory": point["memory_bytes"] / 2**20, "error": fmt.error(point["error"]),
                "kind": "measured" if point["measured"] else "predicted", "best": number == data["best"],
            })  # fmt: skip
    if not any(row["front"] for row in rows):
        return None
    x = alt.X("capacity:Q", title="requests a second under the limit", scale=alt.Scale(zero=False, nice=True))
    y = alt.Y("p99:Q", title=f"p99 at {data['reference_rate']:.4g}/s, ms", scale=alt.Scale(zero=False, nice=True))
    base = alt.Chart(theme.data(rows)).encode(x=x, y=y)
    dots = theme.front_dots(base).encode(
        size=alt.Size("memory:Q", title="memory, MiB", scale=alt.Scale(range=[50, 420], zero=True),
                      legend=alt.Legend(tickCount=3)),
        shape=alt.Shape("kind:N", title=None, scale=alt.Scale(domain=["measured", "predicted"],
                                                              range=["diamond", "circle"])),
        tooltip=[alt.Tooltip("setting:N"), alt.Tooltip("capacity:Q", format=".4~g"), alt.Tooltip("kind:N"),
                 alt.Tooltip("p99:Q", title="p99, ms", format=".4~g"),
                 alt.Tooltip("memory:Q", title="memory, MiB", format=".0f"), alt.Tooltip("error:N")],
    )  # fmt: skip
    label = base.transform_filter("datum.best").mark_text(dy=-14, fontWeight=600).encode(text=alt.value("chosen"))
    unbeaten = [row for row in rows if row["front"]]
    listed = "; ".join(f"{row['setting']}: {row['capacity']:.4g}/s" for row in unbeaten[:8])
    words = f"{count_text(len(unbeaten), 'setting')} that no other beats in every respect: {listed}."
    return picture("front", "The Pareto front", words, _HEIGHT, dots, label)


def _nice(low: float, high: float) -> list[float]:
    bases = (1, 2, 5) if high > 20 * low else (1, 1.5, 2, 3, 5, 7)
    ticks = [base * 10.0**power for power in range(-3, 7) for base in bases]
    return [tick for tick in ticks if low <= tick <= high] or [low, high]
