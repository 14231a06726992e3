"""A study as data: JSON for machines, one long table for CSV and Parquet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars

from fettle.files import plain, whole
from fettle.studies.analysis import Analysis
from fettle.studies.outcome import Done
from fettle.studies.table import MACHINE, Experiment, Table


def analysis_json(analyses: Sequence[Analysis]) -> list[dict[str, Any]]:
    """What the fits say, as plain data."""
    return [
        plain({
            "group": one.group, "response": one.response.name, "larger_is_better": one.response.larger_is_better,
            "experiments": one.experiments, "missing": one.missing, "why_not": one.why_not,
            "dominant": one.dominant, "pooling": one.pooling,
            "spreads": {"=".join(level): spread for level, spread in one.spreads.items()},
            "effects": one.effects, "importance": one.importance,
            "shares": [{"factors": names, "share": share} for names, share in one.shares.items()],
            "sentences": [{"kind": sentence.kind, "text": sentence.text, "surprise": sentence.is_surprise,
                           "levels": sentence.levels, "ratios": sentence.ratios}
                          for sentence in one.sentences],
            "checks": None if one.checks is None else {**plain(one.checks), "believed": one.checks.believed},
        })
        for one in analyses
    ]  # fmt: skip


def study_json(
    table: Table, analyses: Sequence[Analysis], done: Done | None = None, published: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """A whole study as plain data; `done` where it was measured here, `published` a ladder beside its own."""
    data: dict[str, Any] = {
        "factors": table.factors,
        "experiments": rows(table),
        "analyses": analysis_json(analyses),
        "notes": table.notes,
    }
    if done is not None:
        data |= {
            "design": done.design, "seconds": done.seconds, "interrupted": done.interrupted,
            "machine": done.machine, "notes": [*table.notes, *done.notes], "steps": done.steps,
        }  # fmt: skip
    if published:
        data["published"] = published
    return plain(data)  # type: ignore[no-any-return]


def rows(table: Table) -> list[dict[str, Any]]:
    """One flat row an experiment; what is missing is None, never zero. A factor may be named as a column of ours is."""
    came_out = _came_out(table)
    taken = {*table.factors, *came_out.values()}
    group, reason = (f"{name}_" if name in taken else name for name in ("group", "reason"))
    return [
        {
            group: row.group, **row.levels, **_where(table, row),
            **{column: row.value(name) for name, column in came_out.items()}, reason: row.reason,
        }
        for row in table.experiments
    ]  # fmt: skip


def _came_out(table: Table) -> dict[str, str]:
    """The columns of responses, by their names."""
    return {one.name: f"{one.name}_" if one.name in table.factors else one.name for one in table.responses}


def _where(table: Table, row: Experiment) -> dict[str, str]:
    """Which machine it was, in studies of fettle's own, as far as no factor says it."""
    if not any(one.machine for one in table.experiments):
        return {}
    kind = {} if MACHINE in table.factors else {MACHINE: row.machine}
    return {**kind, "host_" if "host" in table.factors else "host": row.host}


def write_table(table: Table, path: Path) -> None:
    """Write the experiments to `path`, as CSV or as Parquet by its suffix. Raises `UsageError` where it cannot be."""
    written, numbers = rows(table), _came_out(table).values()
    schema = {name: polars.Float64 if name in numbers else polars.String for name in (written[0] if written else {})}
    frame = polars.DataFrame(written, schema=schema)
    with whole(path) as partial:
        frame.write_parquet(partial) if path.suffix.lower() == ".parquet" else frame.write_csv(partial)
