"""The gate: is the working tree slower than another revision of it, or than it is in another environment?"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fettle.errors import UsageError
from fettle.files import check_writable, plain
from fettle.gate import environments, history
from fettle.gate.judging import Judged, Verdict, overall
from fettle.gate.racing import Ground, Settings, Side, ground_for, repository_for, revision
from fettle.machine import Machine, this_machine
from fettle.measure import Trial
from fettle.tuning import OnProgress


@dataclass(frozen=True)
class Gate:
    """What a gate found."""

    name: str
    old: str
    new: str
    machine: Machine
    trials: Sequence[Trial]
    """The old code, then the new."""
    judged: Sequence[Judged]
    notes: Sequence[str]
    seconds: float
    reason: str = ""
    """Why the new code did not run; empty where it did."""

    @property
    def verdict(self) -> Verdict:
        """Worse also where the new code did not run."""
        return "worse" if self.reason else overall(self.judged)

    @property
    def settled_by(self) -> list[str]:
        """What would settle what it cannot tell, with the time that it should take."""
        reasons = []
        for one in self.judged:
            if text := one.settled_by:
                minutes = self.seconds * one.needs / one.processes / 60
                how = f" (about {minutes:.1f} minutes)" if one.needs else ""
                reasons.append(f"{one.what}: {text}{how}")
        return reasons


def gate(
    target: str,
    against: str = "",
    *,
    against_python: str = "",
    settings: Settings | None = None,
    on_progress: OnProgress = lambda event: None,
) -> Gate:
    """Race the target in the working tree against the revision `against` of it, or against the environment of
    `against_python`, or both, and judge the change.

    The revision lies in a git worktree below the output folder while it runs. What was found is appended to
    ``history.jsonl`` there, and drawn in ``gate.html``. Raises `UsageError` for what cannot be compared: no repository,
    an unknown revision, a target that is not there or does not run.
    """
    settings = settings or Settings()
    if not against and not against_python:
        raise UsageError("a gate needs `against`, a revision, or `against_python`, an environment")
    ground = ground_for(target, settings, on_progress)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        old, new = _sides(ground, against, against_python, stack)
        check_writable(history.path_of(settings.output))
        trials = ground.race([old, new], ground.gate_rules())
    result = Gate(
        ground.name, old.label, new.label, this_machine(), trials, ground.judged(trials), ground.notes,
        time.monotonic() - began, trials[1].reason if trials[1].status == "failed" else "",
    )  # fmt: skip
    history.keep(settings.output, history.entry_of(result, target, old.commit))
    return result


def _sides(ground: Ground, against: str, against_python: str, stack: contextlib.ExitStack) -> tuple[Side, Side]:
    interpreter = environments.named(against_python, ground.folder) if against_python else None
    if not against:
        new = Side("this environment", ground.target)
        return Side(f"environment {against_python}", ground.target, interpreter=interpreter), new
    repository = repository_for(ground)
    old = stack.enter_context(revision(ground, repository, repository.resolve(against), interpreter))
    return old, Side(repository.working_tree(), ground.target)


def gate_json(result: Gate) -> dict[str, Any]:
    """A gate as plain data."""
    told = plain(result, {Trial: Trial.to_json})
    return {"verdict": result.verdict, "settled_by": result.settled_by, **told, "seconds": round(result.seconds, 1)}
