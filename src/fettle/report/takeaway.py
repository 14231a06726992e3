"""The four files that the user takes away."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from fettle.files import write_text
from fettle.recipe_file import RecipeFile
from fettle.report.data import save_result
from fettle.report.html import write_report
from fettle.result import Outcome


def save(result: Outcome, folder: Path) -> list[Path]:
    """Write what the user takes away: recipe.toml, optimized.py, result.json, report.html. Returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    if result.winner is not None:
        _recipe_file(result).save(folder / "recipe.toml")
        write_text(folder / "optimized.py", result.code)
        paths += [folder / "recipe.toml", folder / "optimized.py"]
    save_result(result, folder / "result.json")
    write_report(result, folder / "report.html")
    return [*paths, folder / "report.html", folder / "result.json"]


def _recipe_file(result: Outcome) -> RecipeFile:
    """The winner's recipe with its evidence."""
    winner = result.winner
    assert winner is not None
    accuracy = {k: v for k, v in msgspec.to_builtins(winner.accuracy).items() if not _is_nan(v) and v != ""}
    evidence = {
        "verdict": result.verdict,
        "goal": result.goal,
        "time_ms": winner.time_ms,
        "baseline_ms": result.baseline.time_ms if result.baseline else None,
        "speedup": winner.speedup.estimate if winner.speedup else None,
        "speedup_low": winner.speedup.low if winner.speedup else None,
        "speedup_high": winner.speedup.high if winner.speedup and math.isfinite(winner.speedup.high) else None,
        "measured_on": "a quiet machine" if winner.is_quiet else f"a busy machine: {winner.load}",
        "peak_bytes": winner.peak_bytes,
        "startup_s": winner.startup.total_s,
        "accuracy": accuracy,
        "limits": msgspec.to_builtins(result.limits),
        **result.learned,
        "created": result.created,
    }
    machine = {key: result.machine[key] for key in ("id", "cpu", "cores", "gpus", "python", "versions")}
    workload = {"name": result.name, "fingerprint": result.fingerprint, "target": result.target}
    return RecipeFile(levels=dict(winner.recipe.levels), workload=workload, machine=machine, evidence=evidence)


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)
