"""What `fettle.tune` hands over: the outcome of a study, which can show itself; ``result.json``, how fettle keeps it on
disk; and the four files to take away.

A file is hostile until it is parsed: its size is bounded, every field is checked against the type it must have, and
nothing in it is ever run.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from fettle.errors import UsageError
from fettle.files import plain, read_bytes, write_text
from fettle.measure import Trial, typed
from fettle.page import clean, shell
from fettle.recipe import Recipe
from fettle.recipe_file import RecipeFile
from fettle.report import _facts, _format, _tables, _text, _verdict
from fettle.report.charts import figures, ladder
from fettle.result import Outcome
from fettle.techniques import learned_types

FORMAT = 1
_MAX_TRIALS = 20_000
_ROWS = 8
"""Trials that a notebook's cell shows."""


@dataclass(frozen=True, repr=False)
class Result(Outcome):
    """A finished (or interrupted) study of one workload: its data and what can be done with it."""

    def __repr__(self) -> str:
        return f"{self.name}: {_verdict.verdict(self)}"

    def _repr_html_(self) -> str:  # what a notebook shows of a cell's last value
        return cell(self)

    def save(self, folder: str | Path) -> list[Path]:
        """Write recipe.toml, optimized.py, report.html and result.json to `folder`; returns their paths."""
        return save(self, Path(folder))


def to_json(result: Outcome) -> dict[str, Any]:
    """The result as data that any JSON writer takes: a recipe is a mapping, a number that is not finite is None."""
    data: dict[str, Any] = plain(result, {Recipe: lambda recipe: dict(recipe.levels)})
    return {"format": FORMAT, **data}


def from_json(data: Any) -> Result:
    """The inverse of `to_json`. Raises `UsageError` for anything else."""
    if not isinstance(data, dict) or "format" not in data:
        raise UsageError("it has no format number, so it is not a fettle result")
    if data["format"] != FORMAT:
        raise UsageError(f"it has result format {str(data['format'])[:40]}; this fettle reads format {FORMAT}")
    body = {key: value for key, value in data.items() if key != "format"}
    try:
        result = msgspec.convert(typed(body, Result, _unknown), Result)
        _check(result)
    except (msgspec.ValidationError, UsageError) as error:
        raise UsageError(f"it is not a fettle result: {' '.join(str(error).split())[:200]}") from error
    return result


def save_result(result: Outcome, path: str | Path) -> None:
    """Write ``result.json`` whole or not at all."""
    write_text(Path(path), json.dumps(to_json(result), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def load_result(path: str | Path) -> Result:
    """Read a ``result.json``. Raises `UsageError` in one line for anything that is not one."""
    raw = read_bytes(path, what="the result ")
    try:
        return from_json(msgspec.json.decode(raw))
    except UsageError as error:
        raise UsageError(f"cannot use {path}: {error}") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not JSON: give the folder that fettle tune wrote, or its result.json") from error


def _unknown(name: str) -> None:  # such a field may carry meaning: say so, do not drop it
    raise UsageError(f"unknown field {name[:60]!r}")


class _Machine(TypedDict, total=False):
    """What a page shows of a machine, as far as it is there."""

    cpu: str
    cores: int
    memory_bytes: int
    gpus: list[str]
    platform: str
    python: str
    versions: dict[str, Any]
    peaks: dict[str, float]


def _check(result: Outcome) -> None:
    """What types cannot say, and what the arithmetic of a report relies on."""
    msgspec.convert(result.machine, _Machine)
    trials: list[Trial] = [*result.trials, *result.nearest, *(rung.trial for rung in result.ladder)]
    trials += [trial for trial in (result.winner, result.baseline_again) if trial is not None]
    if len(trials) > _MAX_TRIALS:
        raise UsageError(f"it has {len(trials)} trials, more than any study")
    if (result.limits.max_error or 0) < 0 or not result.reference.noise >= 0:
        raise UsageError("what is allowed of an error is no number from 0 on")
    for learned in (result.facts.learned, *(trial.learned for trial in trials)):
        for key, kind in learned_types(learned).items():
            msgspec.convert(learned[key], kind)
    for trial in trials:
        if trial.samples < 1:
            raise UsageError(f"a trial has {trial.samples} samples in a call")
        if trial.time_ms <= 0 or trial.p90_ms <= 0 or (trial.peak_bytes or 0) < 0:
            raise UsageError("a trial has a time or a memory figure that is not positive")
        if trial.accuracy.error < 0:
            raise UsageError("a trial has an error below 0")
        if trial.speedup and not 0 <= trial.speedup.low <= trial.speedup.estimate <= trial.speedup.high:
            # NaN anywhere fails this comparison too; a result that fettle wrote may hold NaN, so let only that pass
            ends = (trial.speedup.low, trial.speedup.estimate, trial.speedup.high)
            if not any(math.isnan(end) for end in ends):
                raise UsageError("a trial has a speed-up outside its own interval")


def save(result: Outcome, folder: Path) -> list[Path]:
    """Write what the user takes away: recipe.toml, optimized.py, result.json, report.html. Returns the paths.

    Without a winner there are no first two, and those of an earlier run are renamed to ``earlier-...``."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    to_use = [folder / "recipe.toml", folder / "optimized.py"]
    if result.winner is not None:
        _recipe_file(result).save(to_use[0])
        write_text(to_use[1], result.code)
        paths += to_use
    elif not result.interrupted:  # those of an earlier run do not keep the limits of this one
        for path in filter(Path.exists, to_use):
            path.replace(folder / f"earlier-{path.name}")
    save_result(result, folder / "result.json")
    write_text(folder / "report.html", page(result))
    return [*paths, folder / "report.html", folder / "result.json"]


def _recipe_file(result: Outcome) -> RecipeFile:
    """The winner's recipe with its evidence."""
    winner = result.winner
    assert winner is not None
    accuracy = {name: value for name, value in plain(winner.accuracy).items() if value not in (None, "")}
    busy = _facts.disturbed(result)
    evidence = {
        "verdict": result.verdict,
        "goal": result.goal,
        "under_load": result.under_load,
        "time_ms": winner.time_ms,
        "baseline_ms": result.baseline.time_ms if result.baseline else None,
        "speedup": winner.speedup.estimate if winner.speedup else None,
        "speedup_low": winner.speedup.low if winner.speedup else None,
        "speedup_high": plain(winner.speedup.high) if winner.speedup else None,
        "measured_on": f"a busy machine{_facts.load_of(*busy)}" if busy else "a quiet machine",
        "peak_bytes": winner.peak_bytes,
        "startup_s": winner.startup.total_s,
        "warm_startup_s": plain(winner.startup.warm_s),
        "accuracy": accuracy,
        "limits": msgspec.to_builtins(result.limits),
        **result.learned,
        "created": result.created,
    }
    machine = {key: result.machine[key] for key in ("id", "cpu", "cores", "gpus", "python", "versions")}
    workload = {"name": result.name, "fingerprint": result.fingerprint, "target": result.target}
    return RecipeFile(levels=dict(winner.recipe.levels), workload=workload, machine=machine, evidence=evidence)


def page(result: Outcome) -> str:
    """The page as text: every chart once as data for a screen and once as SVG for paper, the library once for all."""
    result = clean(result)
    title = f"{_verdict.headline(result)}: {result.name}"
    return shell.render(
        "fettle.report",
        "page.html.j2",
        title,
        figures(result),
        result=result,
        fmt=_format,
        facts=_facts,
        say=_verdict,
        tables=_tables,
        text=_text,
    )


def cell(result: Outcome) -> str:
    """A result as the output of a notebook's cell: the verdict, the ladder as a picture, the fastest trials.

    HTML without scripts or styles of its own, so that it looks like the notebook it is in.
    """
    result = clean(result)
    picture = ladder(result)
    rows = [
        "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in (
            _format.milliseconds(trial.time_ms), _format.interval(trial.speedup), _format.error(trial.accuracy.error),
            _facts.status_of(result, trial), _facts.name_of(trial.recipe),
        )) + "</tr>"
        for trial in _facts.ranked(result)[:_ROWS]
    ]  # fmt: skip
    head = "".join(f"<th>{name}</th>" for name in ("time", "speed-up", "error", "status", "recipe"))
    more = len(result.trials) - len(rows)
    return "\n".join(
        [
            f"<p><b>{escape(_verdict.verdict(result))}</b> {escape(_verdict.payback(result))}</p>",
            picture.svg() if picture else "",
            f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>",
            f"<p>and {more} more; result.save(folder) writes the report</p>" if more > 0 else "",
        ]
    )
