"""What `fettle.tune` hands over: the outcome of a study, which can show and save itself."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from fettle.report import _verdict, notebook, takeaway
from fettle.report.data import read_outcome
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
        return takeaway.save(self, Path(folder))


def load_result(path: str | Path) -> Result:
    """Read a ``result.json``. Raises `UsageError` in one line for anything that is not one."""
    outcome = read_outcome(path)
    return Result(**{item.name: getattr(outcome, item.name) for item in fields(outcome)})
