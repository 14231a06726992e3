"""What `fettle.tune` hands over: the outcome of a study, which can show itself, and the four files to take away."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

import msgspec

from fettle.files import write_text
from fettle.page import clean, shell
from fettle.recipe_file import RecipeFile
from fettle.report import _facts, _format, _tables, _text, _verdict, notebook
from fettle.report.charts import figures
from fettle.report.data import read_outcome, save_result
from fettle.result import Outcome


@dataclass(frozen=True, repr=False)
class Result(Outcome):
    """A finished (or interrupted) study of one workload: its data and what can be done with it."""

    def __repr__(self) -> str:
        return f"{self.name}: {_verdict.verdict(self)}"

    def _repr_html_(self) -> str:  # what a notebook shows of a cell's last value
        return notebook.cell(self)

    def save(self, folder: str | Path) -> list[Path]:
        """Write recipe.toml, optimized.py, report.html and result.json to `folder`; returns their paths."""
        return save(self, Path(folder))


def load_result(path: str | Path) -> Result:
    """Read a ``result.json``. Raises `UsageError` in one line for anything that is not one."""
    outcome = read_outcome(path)
    return Result(**{item.name: getattr(outcome, item.name) for item in fields(outcome)})


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
    accuracy = {k: v for k, v in msgspec.to_builtins(winner.accuracy).items() if not _is_nan(v) and v != ""}
    busy = _facts.disturbed(result)
    evidence = {
        "verdict": result.verdict,
        "goal": result.goal,
        "under_load": result.under_load,
        "time_ms": winner.time_ms,
        "baseline_ms": result.baseline.time_ms if result.baseline else None,
        "speedup": winner.speedup.estimate if winner.speedup else None,
        "speedup_low": winner.speedup.low if winner.speedup else None,
        "speedup_high": winner.speedup.high if winner.speedup and math.isfinite(winner.speedup.high) else None,
        "measured_on": f"a busy machine{_facts.load_of(*busy)}" if busy else "a quiet machine",
        "peak_bytes": winner.peak_bytes,
        "startup_s": winner.startup.total_s,
        "warm_startup_s": None if _is_nan(winner.startup.warm_s) else winner.startup.warm_s,
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
