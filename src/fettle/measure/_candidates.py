"""How the processes of a race are started: built, made ready, and paused."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from fettle.errors import UsageError
from fettle.measure._load import gpu_memory
from fettle.measure._priority import READY, prefer
from fettle.measure._process import Worker, WorkerError, close_each
from fettle.measure._rules import Candidate, Judge, OnProgress, Progress, Rules
from fettle.measure._runners import Held, Runner, Started
from fettle.measure._trial import Trial
from fettle.measure.messages import (
    Build,
    Built,
    Judged,
    MeasureRows,
    Prepare,
    Prepared,
    Probe,
    Probed,
    RowsMeasured,
    Settle,
)
from fettle.procs.forks import ForkServer
from fettle.procs.limits import granted_memory_bytes, total_memory_bytes
from fettle.procs.nodes import Nodes
from fettle.techniques import source
from fettle.units import size_text
from fettle.workload import Target

_ROWS_TURNS = 2
"""Slices of one row that a few texts of several rows take about as long as."""


@dataclass(frozen=True)
class WithWorkload:
    """A process with the workload in it, perhaps judged, or why there is none."""

    worker: Worker
    took_s: float
    """Its share of the time that building took, and what it was judged in, if it was."""
    failure: WorkerError | None = None
    is_judged: bool = False


@dataclass(frozen=True)
class Start:
    """What every worker of a race is started with."""

    target: Target
    fingerprint: str
    judging: Judge
    rules: Rules
    log_folder: Path | None
    environment: Mapping[str, str]
    race: int
    held: Held | None
    nodes: Nodes | None = None
    forks: ForkServer | None = None
    on_progress: OnProgress = lambda progress: None
    workers: list[Worker] = field(default_factory=list)
    """Those that end with the race: all that are not `held`."""
    logs_before: int = 0
    """Logs are numbered from here: a race of what memory was short for leaves those of the first one."""

    def line_up(self, candidates: Sequence[Candidate]) -> list[Started | Trial]:
        """Start the workers one after the other, or say in a trial why one failed. Stops at the deadline, and when
        memory runs short or out beside the others: the candidates after those of the answer have not been begun."""
        begun: list[Started | Trial] = []
        running: list[Started] = []
        held = [self.held.take(one.recipe) if self.held is not None else None for one in candidates]
        queue = [(one, self._log(index)) for index, one in enumerate(candidates) if held[index] is None]
        with closing(self._built(queue, self.rules.judges_abreast == "all")) as line:
            for index, candidate in enumerate(candidates):
                if index and time.monotonic() > self.rules.deadline:
                    break
                if (waiting := held[index]) is not None:
                    running.append(Started([waiting], elapsed=self.rules.under_load, number=index))
                    begun.append(running[-1])
                    continue
                self.on_progress(_starting(candidate))
                began = time.monotonic()
                try:
                    runner = self._ready(next(line), candidate)
                except WorkerError as error:
                    if self._is_late(error) or (error.kind == "memory" and len(running) > 1):
                        break  # not the fault of the recipe: beside fewer processes it may fit
                    reason = f"{error}{_beside(running) if error.kind == 'memory' else ''}"
                    failed = Trial(
                        candidate.recipe,
                        "failed",
                        reason,
                        seconds=time.monotonic() - began,
                        race=self.race,
                        too_slow=error.kind == "slow",
                    )
                    begun.append(failed)
                    continue
                running.append(Started([runner], elapsed=self.rules.under_load, number=index))
                begun.append(running[-1])
                self.on_progress(Progress(name=runner.worker.name))
                if self.held is not None:
                    self.held.runners[candidate.recipe] = runner
                else:
                    self.workers.append(runner.worker)
                if _memory_is_short(running) and len(running) > 1:
                    break
        return begun

    def replicate(self, running: Sequence[Started], wanted: int) -> None:
        """Start the further processes of each candidate that may win, a whole set at a time, until each has `wanted`,
        as far as time and memory allow."""
        able = [started for started in running if not (started.rejected or started.first.candidate.once)]
        left_s = min(self.rules.replicate_s, self.rules.deadline - time.monotonic())
        for copy in range(min((len(started.runners) for started in able), default=wanted), wanted):
            cost_s = sum(started.first.started_s for started in able)
            if len(able) < 2 or cost_s > left_s:
                return
            began = time.monotonic()
            queue = [(started.first.candidate, self._log(started.number, f"-{copy}")) for started in able]
            with closing(self._built(queue, self.rules.judges_abreast != "none")) as line:
                for started in able:
                    candidate = started.first.candidate
                    if self.rules.is_stopped or _memory_is_short(running):
                        return
                    self.on_progress(_starting(candidate))
                    try:
                        runner = self._ready(next(line), candidate)
                    except WorkerError as error:
                        if self._is_late(error) or error.kind == "memory":
                            return  # those that run already go on
                        started.first.failure, started.live = f"its process {copy + 1}: {error}", False
                        continue
                    self.workers.append(runner.worker)
                    started.runners.append(runner)
            able = [started for started in able if started.live]
            left_s -= time.monotonic() - began

    def _log(self, number: int, copy: str = "") -> Path | None:
        name = f"{self.race:03d}-{self.logs_before + number:02d}{copy}.log"
        return self.log_folder / name if self.log_folder else None

    def _built(
        self, queue: Sequence[tuple[Candidate, Path | None]], judges: bool
    ) -> Generator[WithWorkload, None, None]:
        """The processes of `queue` in its order, each with the workload built and paused, `Rules.abreast` of them built
        side by side, and their recipes judged where it `judges`. Those that were never asked for are ended when the
        iterator is closed."""
        for begin in range(0, len(queue), self.rules.abreast):
            group = queue[begin : begin + self.rules.abreast]
            built = self._build(group)
            try:
                if judges and len(group) > 1:
                    built = self._judged(built, [candidate for candidate, _ in group])
                while built:
                    yield built.pop(0)
            finally:
                close_each(one.worker for one in built)

    def _build(self, group: Sequence[tuple[Candidate, Path | None]]) -> list[WithWorkload]:
        servers = [self._server(candidate) for candidate, _ in group]
        for server, (candidate, _) in zip(servers, group, strict=True):
            if server is not None:
                server.spare(candidate.imports)
        began = time.monotonic()
        workers: list[Worker] = []
        try:
            for server, (candidate, log) in zip(servers, group, strict=True):
                worker = Worker(
                    {**self.environment, **candidate.environment}, log, ranks=candidate.ranks, nodes=self.nodes,
                    python=candidate.python, forks=server,
                )  # fmt: skip
                workers.append(worker)
                if self.rules.may_go_first and not self.rules.under_load:
                    prefer(worker.pid, READY)
            failures = [_failure(partial(worker.send, Build(candidate.target or self.target)))
                        for worker, (candidate, _) in zip(workers, group, strict=True)]  # fmt: skip
            failures = [failure or _failure(partial(self._finish, worker, candidate))
                        for worker, failure, (candidate, _) in zip(workers, failures, group, strict=True)]  # fmt: skip
        except BaseException:
            close_each(workers)
            raise
        took_s = (time.monotonic() - began) / len(group)
        return [WithWorkload(worker, took_s, failure) for worker, failure in zip(workers, failures, strict=True)]

    def _server(self, candidate: Candidate) -> ForkServer | None:
        """What the candidate's processes may be forked from."""
        alone = candidate.ranks == 1 and not candidate.python
        return self.forks.beside(candidate.environment) if self.forks is not None and alone else None

    def _judged(self, built: list[WithWorkload], candidates: Sequence[Candidate]) -> list[WithWorkload]:
        """The same with the recipes applied and judged, side by side."""
        for number, (one, candidate) in enumerate(zip(built, candidates, strict=True)):
            failure = one.failure or _failure(partial(self._ask_to_judge, one.worker, candidate))
            built[number] = replace(one, failure=failure, is_judged=True)
        began, timeout_s = time.monotonic(), self._timeout_s()
        return [self._heard(*each, began, timeout_s) for each in zip(built, candidates, strict=True)]

    def _ask_to_judge(self, worker: Worker, candidate: Candidate) -> None:
        with _usage_as_failure(candidate):
            worker.send(self._request(candidate, in_two=True))

    def _heard(self, one: WithWorkload, candidate: Candidate, began: float, timeout_s: float) -> WithWorkload:
        try:
            if one.failure is None:
                with _usage_as_failure(candidate):
                    judged = one.worker.finish(Judged, max(0.0, began + timeout_s - time.monotonic()))
                one.worker.pause()
                return replace(one, took_s=one.took_s + judged.seconds)
        except WorkerError as error:
            if error.kind == "timeout":
                error = WorkerError(
                    f"timed out after {timeout_s:.0f} s in {str(error).partition(' in ')[2]}", "timeout"
                )
            return replace(one, failure=error)
        return one

    def _finish(self, worker: Worker, candidate: Candidate) -> None:
        with _usage_as_failure(candidate):
            built = worker.finish(Built, self._timeout_s())
        worker.fingerprint, worker.name = built.fingerprint, built.name
        worker.pause()
        if self.fingerprint and built.fingerprint != self.fingerprint:
            raise WorkerError(
                "the factory builds other weights or inputs in that environment"
                if candidate.python
                else "the factory built other weights or inputs than before: make it deterministic "
                "(seed every generator; fettle calls torch.manual_seed(0) first)"
            )

    def row_rates(self, started: Started) -> Mapping[str, float]:
        """Tokens a second at other numbers of rows, where the race reports them and there is time for it; no process of
        these runs any more."""
        runner, left_s = started.first, self.rules.deadline + self.rules.grace_s - time.monotonic()
        known = runner.answer.generation
        able = not (started.rejected or started.failure or self.rules.is_stopped)
        if known is None or not able or runner.candidate.once or not runner.turns_s:
            return {}
        wanted = tuple(count for count in self.rules.rows if count != known.rows)
        if _ROWS_TURNS * len(wanted) * statistics.fmean(runner.turns_s) > left_s:
            return {}
        try:
            measured = runner.worker.ask(MeasureRows(wanted), RowsMeasured, self._timeout_s())
            runner.worker.pause()
        except WorkerError:  # it has been timed already, and too many rows may end it
            return {}
        return measured.tokens_per_s

    def _is_late(self, error: WorkerError) -> bool:
        """Whether it was the budget that ended a process, and not its own time limit."""
        return error.kind == "timeout" and time.monotonic() >= self.rules.deadline

    def _longest_ms(self, candidate: Candidate) -> float | None:
        """What a call of it may take; any time in several ranks, which must end together."""
        limit_ms = self.rules.longest_ms if candidate.ranks == 1 and candidate.recipe.levels else None
        return None if limit_ms is None else limit_ms * candidate.factor

    def _timeout_s(self) -> float:
        left_s = self.rules.deadline - time.monotonic() + self.rules.grace_s
        return max(10.0, min(self.rules.prepare_timeout_s, left_s))

    def _request(self, candidate: Candidate, *, in_two: bool = False) -> Prepare:
        return Prepare(
            candidate.source or "", str(candidate.recipe), self.judging.path, candidate.factor, candidate.calibrated,
            self.rules.part, self.judging.exact, as_given=not candidate.recipe.levels,
            longest_ms=self._longest_ms(candidate), in_two=in_two,
        )  # fmt: skip

    def _ready(self, built: WithWorkload, candidate: Candidate) -> Runner:
        """Apply the recipe in a process that was built, and pause it. Raises `WorkerError`, the process gone."""
        began, worker = time.monotonic() - built.took_s, built.worker
        try:
            if built.failure is not None:
                raise built.failure
            with _usage_as_failure(candidate):
                if candidate.source is None:
                    facts = worker.ask(Probe(), Probed, self._timeout_s()).facts
                    candidate = replace(candidate, source=source(candidate.recipe, facts))
                request = Settle() if built.is_judged else self._request(candidate)
                answer = worker.ask(request, Prepared, self._timeout_s())
        except BaseException:
            worker.close()
            raise
        worker.pause()
        saved_s = 0.0  # what a process that is no fork, as in the final race, would take longer
        server = self._server(candidate)
        if server is not None and worker.is_fork:
            spared = server.spare(candidate.imports)
            saved_s = server.saved_s / self.rules.abreast + spared.seconds
            peak = None if answer.peak_bytes is None else answer.peak_bytes + spared.size
            answer = msgspec.structs.replace(answer, optimize_s=answer.optimize_s + spared.seconds, peak_bytes=peak)
        judged = self.judging.path and candidate.recipe.levels  # the workload as given is measured whatever it answers
        rejected = self.judging.reason(answer.accuracy) if judged else ""
        return Runner(candidate, worker, answer, rejected, began, process=f"{self.race}:{worker.pid}",
                      started_s=saved_s + time.monotonic() - began)  # fmt: skip


@contextmanager
def _usage_as_failure(candidate: Candidate) -> Iterator[None]:
    """An error that the user should fix, with the candidate's label if it has one; in another environment it is only
    the reason why the candidate cannot run there."""
    try:
        yield
    except UsageError as error:
        if candidate.label:
            raise UsageError(f"{candidate.label}: {error}") from error
        raise (WorkerError(str(error)) if candidate.python else error) from None


def _starting(candidate: Candidate) -> Progress:
    return Progress(f"starting {candidate.label or candidate.recipe}")


def _failure(do: Callable[[], None]) -> WorkerError | None:
    try:
        do()
    except WorkerError as error:
        return error
    return None


def _beside(running: Iterable[Started]) -> str:
    """What else needs memory of the GPU while a candidate is started, as the end of a sentence."""
    others = [one.first for one in running if one.first.answer.gpu and one.first.answer.peak_bytes]
    return "".join(
        f", beside {one.candidate.recipe if one.candidate.recipe.levels else 'the workload as given'}, which needs "
        f"{size_text(one.answer.peak_bytes or 0)} of the GPU" for one in others
    )  # fmt: skip


def _memory_is_short(running: Iterable[Started]) -> bool:
    """Whether one more process might not fit beside these: the one that runs needs its peak again, the others rest."""
    answers = [started.first.answer for started in running]
    peaks = {gpu: max(one.peak_bytes or 0 for one in answers if one.gpu == gpu) for gpu in {one.gpu for one in answers}}
    ours = (granted_memory_bytes(), total_memory_bytes(), peaks.pop("", 0))
    room = [ours, *((*gpu_memory(gpu), peaks[gpu]) for gpu in peaks)]
    return any(free < max(0.25 * total, 1.1 * peak) for free, total, peak in room)
