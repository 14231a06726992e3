"""The race of a gate: the same target in revisions of its code or in two environments, side by side."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import fettle
from fettle.errors import UsageError, refusing
from fettle.files import for_compilers
from fettle.gate import environments
from fettle.gate.judging import Judged, judge, more_memory, overall, slowdown
from fettle.gate.revisions import Repository, at, repository_of, unfollowed
from fettle.measure import (
    Candidate,
    Judge,
    Patience,
    Progress,
    Rules,
    Trial,
    close_all,
    may_go_first,
    race,
)
from fettle.procs.interpreter import Interpreter
from fettle.recipe import Recipe
from fettle.tuning import Event, OnProgress
from fettle.workload import AUTO, Target, check_mode, find_target

PROCESSES = (4, 8, 16)
"""Processes of each side, and how many where those before do not decide."""
_WAIT_S, _LONGEST_WAIT_S = 10.0, 1.0
"""How long a race waits for a quiet machine, all its slices together and at once: what others do to a slice is done to
both sides, so that little is won by sitting it out."""
_SLICE_S = 0.04
"""Of two processes that take turns twice as often, what a shared machine does to them cancels twice as often; each
slice costs 15 ms beside it. Beside a busy process 40 slices of 0.03 s in 14 s were worth as much each as 20 of 0.08 s
in 17 s (four processes a side, spread of a slice about its process 0.9% and 1.0%)."""
_START_S = 300.0
"""What starting the processes may take in all."""
_KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""glibc as it is where its thresholds have grown as far as they do by themselves and nothing is given back at the end
of the heap. Whether anything is, is chance: an LSTM takes 26 ms in one process and 35 in the next for it."""


@dataclass(frozen=True)
class Settings:
    """How a gate measures."""

    fail_slower: float = 0.03
    """Largest increase of time that passes, as a share."""
    fail_memory: float | None = None
    """The same of peak memory; None: not judged."""
    processes: int | None = None
    """Processes of each side; None for as many of `PROCESSES` as it takes."""
    confidence: float = 0.95
    max_rounds: int = 48
    budget_s: float | None = None
    """Time of one race."""
    mode: str = AUTO
    links: Sequence[Path] = ()
    """Paths that git does not know, such as weights, which another revision is given as well."""
    same_environment: bool = False
    """No environment of its own for a revision whose lock file differs."""
    output: Path = Path("fettle-gate")
    under_load: bool = False
    polite: bool = False

    @property
    def how(self) -> str:
        """What is run beside the usual; a race of another mode or with other files answers another question."""
        words = [self.mode] * (self.mode != AUTO) + ["same environment"] * self.same_environment
        return ", ".join([*words, *sorted(map(str, self.links))])

    def __post_init__(self) -> None:
        check_mode(self.mode)
        if not 0.5 <= self.confidence < 1:
            raise UsageError(f"`confidence` is a share from 0.5 to below 1, not {self.confidence:g}")
        if self.max_rounds < 3:
            raise UsageError("`rounds` must be 3 or more: an interval needs them")
        for name, limit in (("fail_slower", self.fail_slower), ("fail_memory", self.fail_memory)):
            if limit is not None and not 0.001 <= limit < 10:
                raise UsageError(f"`{name}` is a share from 0.1% to below 1000%, for example 3%")
        if self.processes is not None and not 2 <= self.processes <= 64:
            raise UsageError("`processes` of each side are 2 to 64")


@dataclass(frozen=True)
class Side:
    """What one side of a race runs: a revision of the code, in an environment."""

    label: str
    target: Target
    commit: str = ""
    """Empty for the working tree."""
    interpreter: Interpreter | None = None
    """Of another environment; None for ours."""


@dataclass
class Ground:
    """A target whose revisions are raced, and how."""

    target: Target
    settings: Settings
    on_progress: OnProgress
    folder: Path
    name: str = ""
    notes: list[str] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _races: int = 0

    def say(self, doing: str) -> None:
        """Tell what runs now."""
        self.on_progress(Event(doing, elapsed_s=time.monotonic() - self._began))

    def note(self, text: str) -> None:
        """Something that the outcome should say."""
        if text not in self.notes:
            self.notes.append(text)

    def race(self, sides: Sequence[Side], rules: Rules) -> list[Trial]:
        """Race the sides; the first is what the others are compared with. Raises `UsageError` where one cannot be
        built, with its label before the reason."""
        self._races += 1
        candidates = [
            Candidate(
                Recipe(), None, label=side.label, target=replace(side.target, mode=self.settings.mode),
                python=side.interpreter.path if side.interpreter else "",
                environment=side.interpreter.variables if side.interpreter else {},
            )
            for side in sides
        ]  # fmt: skip
        budget_s = self.settings.budget_s
        if budget_s:
            rules = replace(rules, deadline=time.monotonic() + budget_s)
        wait_s = min(_WAIT_S, budget_s / 4) if budget_s else _WAIT_S
        logs = self.folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        patience = Patience(wait_s, longest_s=_LONGEST_WAIT_S)
        try:
            trials = race(
                self.target, "", candidates, Judge(), rules, log_folder=logs,
                environment=self.environment, on_progress=self._pass_on, number=self._races,
                seed=os.getpid(), patience=patience,
            )  # fmt: skip
        finally:
            close_all()
        if len(trials) < len(sides):
            raise UsageError("there was no time to start all sides: give the race a larger `budget`")
        first = trials[0]
        if first.status == "failed":
            raise UsageError(f"{sides[0].label}: {first.reason}")
        for side, trial in zip(sides[1:], trials[1:], strict=True):
            if trial.ok and trial.fingerprint != first.fingerprint:
                self.note(
                    f"{side.label} builds other weights or inputs than {sides[0].label}: its time may differ for that"
                )
        return trials

    def gate_rules(self) -> Rules:
        """How a gate's race is run: in the number of processes that the settings ask for, or in a few and, where those
        do not decide, in more. Each step is a look at what the race says, with its share of the error rate."""
        first, *further = self._steps
        return replace(
            self.rules(first), further=tuple(further), confidence=1 - self._alpha, narrow=self.settings.fail_slower / 2,
            is_enough=lambda trials: overall(self.judged(trials)) != "cannot tell",
        )  # fmt: skip

    def judged(self, trials: Sequence[Trial]) -> list[Judged]:
        """What the two sides' trials say; nothing where the new one did not run."""
        old, new = trials
        if new.status == "failed":
            return []
        settings, processes = self.settings, min(old.processes, new.processes)
        judged = [judge("time", slowdown(new.speedup), settings.fail_slower, processes)]
        if settings.fail_memory is not None:
            change = more_memory(old, new, self._alpha)
            judged.append(judge("memory", change, settings.fail_memory, processes))
        return judged

    @property
    def _alpha(self) -> float:
        """Error rate of one look of a gate: Bonferroni."""
        return (1 - self.settings.confidence) / len(self._steps)

    @property
    def _steps(self) -> tuple[int, ...]:
        return (self.settings.processes,) if self.settings.processes else PROCESSES

    def rules(self, processes: int) -> Rules:
        """How a race of so many processes of each side is run."""
        settings = self.settings
        return Rules(
            confidence=settings.confidence, settle_verdicts=True, max_rounds=settings.max_rounds, slice_s=_SLICE_S,
            indifference=min(Rules.indifference, settings.fail_slower / 3), replicates=processes,
            replicate_s=max(_START_S, settings.budget_s or 0.0), abreast=2 if (os.cpu_count() or 1) > 1 else 1,
            under_load=settings.under_load, may_go_first=may_go_first() and not settings.polite,
        )  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        """Variables of every process: what is compiled is kept from one gate to the next, and freed memory for the
        next call unless the user has set the allocator."""
        is_set = any(name in os.environ for name in (*_KEEPS_MEMORY, "GLIBC_TUNABLES"))
        return {"TORCHINDUCTOR_CACHE_DIR": for_compilers(self.folder / "cache" / "inductor"),
                "TORCHINDUCTOR_FX_GRAPH_CACHE": "1", **({} if is_set else _KEEPS_MEMORY)}  # fmt: skip

    def _pass_on(self, progress: Progress) -> None:
        self.name = progress.name or self.name
        if progress.doing:
            self.say(progress.doing)


def ground_for(target: str, settings: Settings, on_progress: OnProgress) -> Ground:
    """The ground that a target is raced on. Raises `UsageError` for a target that is not there."""
    for path in settings.links:
        if not path.exists():
            raise UsageError(f"`link`: there is no {path}")
    named = find_target(target)
    return Ground(named, settings, on_progress, settings.output, named.name)


def repository_for(ground: Ground) -> Repository:
    """The repository of a target's file, or the one that we are in for a module."""
    location = ground.target.reference.rpartition(":")[0]
    repository = repository_of(Path(location) if location.endswith(".py") else Path.cwd())
    for path in ground.settings.links:
        if repository.root not in unfollowed(path).parents:
            raise UsageError(f"`link`: {path} does not lie in {repository.root}")
    if repository.root in Path(fettle.__file__).resolve().parents:
        ground.note("fettle itself measures, and is the same on both sides: its own code is not compared")
    return repository


@contextlib.contextmanager
def revision(
    ground: Ground, repository: Repository, commit: str, interpreter: Interpreter | None = None
) -> Iterator[Side]:
    """A side that runs a commit, in a worktree of its own until the block ends; in the environment of `interpreter`, or
    in one that is built where its lock file differs from the working tree's."""
    location = Path(ground.target.reference.rpartition(":")[0])
    label = repository.name(commit)
    lent = {path.resolve() for path in ground.settings.links}
    inside = [one for one in (location, *location.parents) if repository.root in one.parents]
    is_lent = any(one in lent and not repository.holds(commit, one) for one in inside)  # what the revision has stays
    if location.suffix == ".py" and not is_lent and not repository.holds(commit, location):
        name = location.relative_to(repository.root)
        raise UsageError(f"{name} is not there at {label!r}: lend it today's, `link={name}`")
    with repository.checkout(commit, ground.folder / "worktrees", ground.settings.links) as place:
        if missing := repository.add_submodules(commit, place):
            ground.note(
                f"{label!r} has submodules whose commits are not in this clone ({', '.join(missing[:3])}): it runs "
                "without them; git submodule update --init fetches those of a revision that is checked out"
            )
        changed = repository.changed_locks(commit)
        listed = ", ".join(changed[:3])
        there = [name for name in changed if (place / name).exists()]  # those that the revision has, too
        may_build = interpreter is None and not ground.settings.same_environment
        if there and may_build and environments.can_build(there):
            locks = environments.installed_from(there, repository.locks_beside(there, place))
            with refusing(f"{label}:", UsageError):
                interpreter = environments.build(place, locks, ground.folder, ground.say)
            ground.note(f"{label!r} has another {listed}, and runs in the environment that it asks for")
        elif changed and interpreter is None:
            ground.note(f"{listed} differ{'s' * (len(changed) == 1)} from {label!r}, and all run in this environment")
        yield Side(label, at(ground.target, repository, place), commit, interpreter)
