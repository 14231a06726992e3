"""The tables and lists of a result's page."""

from __future__ import annotations

from fettle.page import Cell, Row, Table
from fettle.report import _facts, _verdict
from fettle.report import _format as fmt
from fettle.result import Outcome
from fettle.techniques import parts_lines


def limits(result: Outcome) -> Table:
    """What was allowed, and what the winner came to."""
    words = {True: "kept", None: "not measured", False: "missed"}
    checks = _facts.checks(result, result.winner) if result.winner else []
    rows = [[check.name, str(check.limit), str(check.value), words[check.held]] for check in checks]
    return Table(("limit", "allowed", "found", ""), rows, numbers=("allowed", "found"))


def misses(result: Outcome) -> list[Cell]:
    """The trials that came nearest to the limits, where none kept them."""
    return [
        Cell(
            _facts.name_of(trial.recipe),
            code=True,
            rest=f": {fmt.milliseconds(trial.time_ms)}, {trial.reason or _verdict.miss_text(result, trial)}",
        )
        for trial in result.nearest
    ]


def plan(result: Outcome) -> Table:
    """Parallel strategies as they were planned."""
    rows: list[Row] = []
    for row in result.plan:
        name = Cell(row.strategy, code=True, notes=[row.failed] if row.failed else [])
        if row.failed:
            rows.append([name, "", "", "", ""])
            continue
        fits = "" if row.limit_bytes is None else "yes" if row.peak_bytes <= row.limit_bytes else "no"
        counts = ", ".join(f"{count} {kind}" for kind, count in row.collectives.items())
        rows.append([name, fmt.size(row.peak_bytes), fits, fmt.size(row.sent_bytes), counts])
    columns = ("strategy", "peak", "may fit", "sent a step", "collectives a step")
    return Table(columns, rows, numbers=("peak", "sent a step"), stack=True)


def trials(result: Outcome) -> Table:
    """Every trial that ran, in its order of rank."""
    answers = result.facts.mode != "training"
    rows: list[dict[str, Cell | str]] = []
    kinds = []
    for trial in _facts.ranked(result):
        status, accuracy = _facts.status_of(result, trial), trial.accuracy
        notes = [trial.reason, *trial.notes] if trial.reason else list(trial.notes)
        cells: dict[str, Cell | str] = {
            "recipe": Cell(_facts.name_of(trial.recipe), code=True, notes=notes),
            "time": fmt.milliseconds(trial.time_ms),
            "speed-up": fmt.interval(trial.speedup),
            "error": fmt.error(accuracy.error),
            "cosine": fmt.number(accuracy.cosine, 6),
            "max abs": fmt.error(accuracy.max_abs),
            "top-1": fmt.share(accuracy.agreement),
            "metric": fmt.number(accuracy.metric),
            "memory": fmt.size(trial.peak_bytes),
            "start-up": fmt.seconds(trial.startup.total_s),
            "status": Cell(status, tag=status),
        }
        rows.append({name: cell for name, cell in cells.items() if answers or name not in ("cosine", "top-1")})
        kinds.append(status if status == "winner" else "")
    return Table.of(rows, ("recipe", "status"), kinds, stack=True)


def advice(result: Outcome) -> Table:
    """What a first look advised, and what that brought."""
    rows: list[Row] = []
    for item in result.advice:
        levels = " ".join(f"{name}={level}" for name, level in item.levels.items())
        beside = [f"added to {_facts.name_of(item.beside)}"] if item.beside.levels else []
        kept = {True: "kept", False: "exceeded", None: "–"}[item.bound_kept]
        brought = fmt.interval(item.brought) if item.brought else "not tried alone"
        rows.append([item.says, Cell(levels, code=True, notes=beside), fmt.times(item.speedup), brought, kept])
    columns = ("finding", "answer", "at most", "brought", "bound")
    return Table(columns, rows, numbers=("at most", "brought"), stack=True)


def failures(result: Outcome) -> list[Cell]:
    """What did not run, and why."""
    return [Cell(_facts.name_of(trial.recipe), code=True, rest=f": {trial.reason}") for trial in _facts.failed(result)]


def parts(result: Outcome) -> Table:
    """What each part of a pipeline costs as given."""
    rows: list[Row] = [
        [Cell(name, code=name in result.facts.parts), str(calls), fmt.milliseconds(1e3 * seconds), f"{share:.1%}",
         fmt.size(held)]
        for name, calls, seconds, share, held in parts_lines(result.facts)
    ]  # fmt: skip
    return Table(("part", "calls", "time", "share", "weights"), rows, ("calls", "time", "share", "weights"))


def left_out(result: Outcome) -> Table:
    """Levels that were not tried, and why."""
    rows: list[Row] = [[Cell(f"{item.technique}={item.level}", code=True), item.why] for item in result.left_out]
    return Table(("level", "why"), rows)
