"""The tiles and tables of a service level's page, of the plain data of its search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fettle.page import Cell, Row, Table
from fettle.report import _format as fmt

Data = Mapping[str, Any]


def best_of(data: Data) -> dict[str, Any] | None:
    """The point that was chosen."""
    return None if data["best"] is None else data["points"][data["best"]]


def headline(data: Data, limits: str, words: Callable[[float], str]) -> str:
    """What came of it: the best setting's rate in `words`, within the `limits`."""
    point = best_of(data)
    if data["interrupted"]:
        return "A search that was interrupted"
    if point is None:
        return f"No setting keeps {limits}"
    return f"{'' if data['met'] else 'Not met: '}{words(point['measured'])} within {limits}"


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
