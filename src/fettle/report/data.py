"""A result as JSON and back: ``result.json`` is how fettle keeps a result on disk.

A file is hostile until it is parsed: its size is bounded, every field is checked against the type it must have, and
nothing in it is ever run.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec

from fettle.errors import UsageError
from fettle.files import plain, read_bytes, write_text
from fettle.measure import Trial, typed
from fettle.recipe import Recipe
from fettle.result import Outcome
from fettle.techniques import learned_types

FORMAT = 1
_MAX_TRIALS = 20_000


def to_json(result: Outcome) -> dict[str, Any]:
    """The result as data that any JSON writer takes: a recipe is a mapping, a number that is not finite is None."""
    data: dict[str, Any] = plain(result, {Recipe: lambda recipe: dict(recipe.levels)})
    return {"format": FORMAT, **data}


def from_json(data: Any) -> Outcome:
    """The inverse of `to_json`. Raises `UsageError` for anything else."""
    if not isinstance(data, dict) or "format" not in data:
        raise UsageError("it has no format number, so it is not a fettle result")
    if data["format"] != FORMAT:
        raise UsageError(f"it has result format {str(data['format'])[:40]}; this fettle reads format {FORMAT}")
    body = {key: value for key, value in data.items() if key != "format"}
    try:
        result = msgspec.convert(typed(body, Outcome, _unknown), Outcome)
        _check(result)
    except (msgspec.ValidationError, UsageError) as error:
        raise UsageError(f"it is not a fettle result: {' '.join(str(error).split())[:200]}") from error
    return result


def save_result(result: Outcome, path: str | Path) -> None:
    """Write ``result.json`` whole or not at all."""
    write_text(Path(path), json.dumps(to_json(result), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_outcome(path: str | Path) -> Outcome:
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


def _check(result: Outcome) -> None:
    """What types cannot say, and what the arithmetic of a report relies on."""
    trials: list[Trial] = [*result.trials, *result.nearest, *(rung.trial for rung in result.ladder)]
    trials += [trial for trial in (result.winner, result.baseline_again) if trial is not None]
    if len(trials) > _MAX_TRIALS:
        raise UsageError(f"it has {len(trials)} trials, more than any study")
    for learned in (result.facts.learned, *(trial.learned for trial in trials)):
        for key, kind in learned_types(learned).items():
            msgspec.convert(learned[key], kind)
    for trial in trials:
        if trial.samples < 1:
            raise UsageError(f"a trial has {trial.samples} samples in a call")
        if trial.time_ms <= 0 or trial.p90_ms <= 0 or (trial.peak_bytes or 0) < 0:
            raise UsageError("a trial has a time or a memory figure that is not positive")
        if trial.speedup and not 0 <= trial.speedup.low <= trial.speedup.estimate <= trial.speedup.high:
            # NaN anywhere fails this comparison too; a result that fettle wrote may hold NaN, so let only that pass
            ends = (trial.speedup.low, trial.speedup.estimate, trial.speedup.high)
            if not any(math.isnan(end) for end in ends):
                raise UsageError("a trial has a speed-up outside its own interval")
