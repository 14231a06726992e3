"""The main job, from a workload to a verified recipe. Read `tune` and you know the system.

probe (facts, reference) -> space of recipes -> design -> races -> trials in the study -> a last, fresh race -> result
"""

from __future__ import annotations

import datetime
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from fettle.errors import UsageError
from fettle.machine import Machine, this_machine
from fettle.measure import Entry, Held, Judge, Progress, Rules, Trial, Worker, WorkerError, close_all, race, verdict
from fettle.recipe import Recipe, RecipeFile, write_text
from fettle.result import Advice, Goal, LeftOut, Limits, PlanRow, Reference, Result, Rung, Verdict
from fettle.search import DESIGNS, Space, auto
from fettle.study import Study, storage_url
from fettle.techniques import CATALOGUE, Facts, bundles, conflict, find, normal, source
from fettle.workload import Target, Workload, as_batches, find_target, target_from_objects

SCREENING_ROUNDS = 20
"""Most rounds of a race of the search. The last race, which is the one that is announced, may go on for longer."""
MODES = ("inference", "training")
GOALS: tuple[Goal, ...] = ("throughput", "latency", "memory", "energy", "startup")


@dataclass(frozen=True)
class Event:
    """What a study tells while it runs, for a progress display."""

    doing: str
    """What runs now, for people."""
    trial: Trial | None = None
    """A trial that has just become known."""
    best: Trial | None = None
    elapsed_s: float = 0.0
    budget_s: float | None = None


Tell = Callable[[Event], None]


@dataclass(frozen=True)
class Probed:
    """What the first worker found out about the workload."""

    facts: Facts
    fingerprint: str
    reference: Reference
    has_metric: bool
    peaks: Mapping[str, float] = field(default_factory=dict)


def tune(
    model: Any,
    inputs: Any = None,
    *,
    call: Callable[..., Any] | None = None,
    metric: Callable[[Callable[..., Any]], float] | None = None,
    goal: Goal = "throughput",
    max_error: float | None = 0.02,
    min_agreement: float | None = None,
    max_metric_drop: float | None = None,
    max_latency_ms: float | None = None,
    max_memory_bytes: int | None = None,
    min_throughput: float | None = None,
    budget_s: float | None = 900.0,
    techniques: Mapping[str, Sequence[str]] | None = None,
    allow_batch: bool = False,
    mode: str = "inference",
    max_spread: float = 1.0,
    nproc: int = 1,
    device_memory_bytes: int | None = None,
    design: str = "auto",
    output: str | Path = "fettle-out",
    storage: str | None = None,
    study: str | None = None,
    confidence: float = 0.95,
    trial_timeout_s: float = 900.0,
    tell: Tell = lambda event: None,
    command: str = "",
) -> Result:
    """Find the fastest recipe for a workload that keeps its answers and the user's limits.

    `model` is a module (or any callable) with `inputs`, a `Workload`, or the text ``"file.py:factory"``. The limits
    are those of `fettle.result.Limits`; `techniques` allows levels by technique, one level pins it. Trials are kept in
    the study under `output` (or at `storage`), so the same call goes on after an interrupt.

    With ``mode="training"`` the workload is a `fettle.TrainingWorkload` and one call is one optimizer step. The
    guard is then on its losses: their mean distance from the baseline's may be `max_spread` times the typical
    distance of two seeds; with `max_metric_drop` the workload's metric after these steps decides instead. With `nproc`
    parallel strategies over so many ranks of this machine are tried as well; the memory plan leaves out what does not
    fit into `device_memory_bytes` (a GPU's own memory, or a rank's share of this machine's, unless given).

    Returns a `Result`; ``result.apply(model, inputs)`` gives the tuned callable. Raises `UsageError` for bad input.
    """
    started = time.monotonic()
    folder = _writable(Path(output))
    target = _target(model, inputs, call, metric, folder, mode)
    if mode == "training":
        max_error = max_spread if max_metric_drop is None else None
    limits = Limits(max_error, min_agreement, max_metric_drop, max_latency_ms, max_memory_bytes, min_throughput)
    _check_limits(limits, goal, budget_s, design)
    _check_ranks(nproc, device_memory_bytes, mode)
    allowed = check_techniques(techniques or {})
    machine = this_machine()

    session = Session(target, folder, limits, goal, budget_s, started, tell, confidence, trial_timeout_s,
                      nproc=nproc, device_memory_bytes=device_memory_bytes)  # fmt: skip
    try:
        session.tell("building the workload and its reference")
        session.open(study or target.name, storage_url(storage, folder), machine, allow_batch)
        space, left_out = space_for(session.facts, allowed, session.ruled_out)
        interrupted = False
        try:
            session.measure([Recipe()])
            if design == "auto":
                auto(space, session, first=_techniques(session.advice))
            else:
                DESIGNS[design](space, session)
        except KeyboardInterrupt:
            interrupted = True  # what is done is kept, and shown
        last = [] if interrupted else session.last_race(space)
        result = session.result(last, left_out, replace(machine, peaks=session.probed.peaks), command, interrupted)
    finally:
        close_all()
    return result


class Session:
    """One run of a study: measures recipes in heats, remembers trials, watches the budget.

    It is what a design of `fettle.search` measures with.
    """

    def __init__(
        self,
        target: Target,
        folder: Path,
        limits: Limits,
        goal: Goal,
        budget_s: float | None,
        started: float,
        tell: Tell,
        confidence: float = 0.95,
        trial_timeout_s: float = 900.0,
        *,
        nproc: int = 1,
        device_memory_bytes: int | None = None,
    ) -> None:
        self.target, self.folder, self.limits, self.goal = target, folder, limits, goal
        self._budget_s, self._started, self._tell = budget_s, started, tell
        self.rules = Rules(confidence=confidence, prepare_timeout_s=trial_timeout_s)
        self._nproc, self._device_memory_bytes = nproc, device_memory_bytes
        self.memory_plan: Mapping[str, Any] | None = None
        self._known: dict[Recipe, Trial] = {}
        self._heat = 0
        self._baseline = Held()
        self._earlier_s = 0.0
        self.advice: list[Advice] = []
        """What a first look at the workload advised, the most promising first."""
        self._notes: list[str] = []

    # -- the design's view ------------------------------------------------------------------------------------------

    def measure(self, recipes: Sequence[Recipe]) -> list[Trial]:
        """Race those of `recipes` that are not known yet beside the baseline; answer for all that are known then."""
        wanted = list(dict.fromkeys(normal(recipe) for recipe in recipes))
        missing = [recipe for recipe in wanted if recipe not in self._known]
        if missing and not self.spent():
            self._race(missing)
        return [self._known[recipe] for recipe in wanted if recipe in self._known]

    def score(self, trial: Trial) -> float:
        """The goal as a number, smaller is better; infinite where the trial may not win."""
        if not trial.ok or trial.speedup is None or self.misses(trial):
            return math.inf
        if self.goal == "memory":
            return math.log(trial.peak_bytes) if trial.peak_bytes else math.inf
        if self.goal == "energy":
            return math.log(trial.energy_j / trial.samples) if trial.energy_j else math.inf
        if self.goal == "startup":
            return math.log(trial.startup.total_s)
        return -math.log(trial.speedup.estimate)

    def spent(self) -> bool:
        """Whether the budget is used up, but for the last race."""
        return self._budget_s is not None and self._elapsed_s() > self._budget_s - self._reserve_s()

    # -- from the start to the result --------------------------------------------------------------------------------

    def open(self, name: str, storage: str, machine: Machine, allow_batch: bool) -> None:
        """Probe the workload, compute its reference, and open or resume its study."""
        (self.folder / "cache").mkdir(exist_ok=True)
        with self._worker() as worker:
            try:
                built = worker.ask("build", self.rules.prepare_timeout_s, target=msgspec.to_builtins(self.target))
                self.study = Study.open(name, storage, built["fingerprint"], machine.id)
                self.probed = self._probe(worker, built["fingerprint"], allow_batch)
                self._plan(worker)
            except WorkerError as error:
                raise UsageError(f"the workload could not be probed: {error}") from error
        self.facts = replace(self.probed.facts, ranks=self._nproc)
        if self.limits.max_metric_drop is not None and not self.probed.has_metric:
            raise UsageError("--max-metric-drop needs a metric: give the workload one, Workload(..., metric=function)")
        for trial in self.study.trials():
            self._known[trial.recipe] = self._judged(trial)
            self._heat = max(self._heat, trial.heat)
        self._earlier_s = float(self.study.note("seconds") or 0.0)

    def last_race(self, space: Space) -> list[Trial]:
        """Measure the best again in fresh processes, beside the baseline and the cheap rungs of the leader's ladder.

        What was best in many races is likely to have been lucky in its own: only this race is announced.
        """
        leader = self.best()
        if leader is None or not leader.recipe.levels:
            return []
        kept = self.study.note("last race")
        if kept:
            trials = [self._judged(Trial.from_json(item)) for item in kept]
            if any(trial.recipe == leader.recipe for trial in trials):
                return trials
        rungs = [recipe for recipe in _climb(leader.recipe, space) if recipe != leader.recipe]
        cheap = [recipe for recipe in rungs if space.cost(recipe) == 1 and recipe not in self._known]
        finalists = [trial.recipe for trial in self._finalists(leader)]
        self.tell(f"last race: the best {len(finalists)} in fresh processes")
        self._baseline.close()
        share_s = 60.0 if self._budget_s is None else min(60.0, 0.1 * self._budget_s)
        rules = replace(self.rules, deadline=math.inf, precision=0.05, replicates=3, replicate_s=share_s)
        trials = self.run([Recipe(), *finalists, *cheap], rules)
        for trial in trials:
            if trial.recipe in cheap and trial.recipe not in self._known:
                self._keep(trial)
        if self._budget_s is None or self._elapsed_s() < self._budget_s:
            dear = [recipe for recipe in rungs if recipe not in self._known]
            if dear and self._affordable(dear):
                self._race(dear)
        self.study.set_note("last race", [trial.to_json() for trial in trials])
        return trials

    def result(
        self, last: Sequence[Trial], left_out: Sequence[LeftOut], machine: Machine, command: str, interrupted: bool
    ) -> Result:
        """Everything that was found, the winner judged by the last race alone."""
        leader = self.best()
        baseline = self._known.get(Recipe())
        winner = leader
        said: Verdict = "cannot tell"
        if leader is not None and not leader.recipe.levels:
            said = "same"
        elif leader is not None:
            finalists = {trial.recipe for trial in self._finalists(leader)}
            again = [trial for trial in last if trial.recipe in finalists]
            able = [trial for trial in again if math.isfinite(self.score(trial))]
            if able:
                winner = min(able, key=lambda trial: (self.score(trial), len(trial.recipe.levels)))
                said = _verdict(winner, self.rules.indifference)
            elif again:
                winner = None  # they held once and not again: nothing to hand out with a good conscience
        if winner is not None and said != "faster" and self.goal in ("throughput", "latency") and last:
            # Nothing was gained that can be shown: change no more than the answers need.
            winner = next((t for t in self._fallbacks() if math.isfinite(self.score(t))), winner)
            said = "same" if winner.recipe != (leader.recipe if leader else None) else said
        self.study.set_note("seconds", self._earlier_s + self._elapsed_s())
        trials = list(self._known.values())
        found = Result(
            name=self.target.name,
            target=self.target.reference,
            fingerprint=self.probed.fingerprint,
            facts=self.facts,
            machine=msgspec.to_builtins(machine),
            goal=self.goal,
            limits=self.limits,
            reference=self.probed.reference,
            trials=trials,
            winner=winner,
            verdict=said,
            advice=self._brought(trials),
            left_out=left_out,
            nearest=() if winner else self._nearest(trials),
            seconds=self._earlier_s + self._elapsed_s(),
            command=command,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            interrupted=interrupted,
            notes=tuple(self._notes),
            plan=_plan_rows(self.memory_plan),
        )
        ladder = self._ladder(found, baseline)
        return replace(found, ladder=ladder, code=self.code(found.recipe, found) if winner else "")

    def _brought(self, trials: Sequence[Trial]) -> list[Advice]:
        from fettle.diagnose import brought

        return brought(self.advice, trials)

    def best(self) -> Trial | None:
        """The trial with the best score, the simpler recipe where two are equal within noise; None if none may win."""
        able = [trial for trial in self._known.values() if math.isfinite(self.score(trial))]
        return min(able, key=lambda trial: (self.score(trial), len(trial.recipe.levels)), default=None)

    def misses(self, trial: Trial) -> str:
        """Which limit on time or memory a trial breaks, as a phrase; empty when it keeps them."""
        latency, memory = self.limits.max_latency_ms, self.limits.max_memory_bytes
        if latency is not None and not trial.time_ms <= latency:
            return f"{trial.time_ms:.3g} ms is above {latency:g} ms"
        if memory is not None and not (trial.peak_bytes is not None and trial.peak_bytes <= memory):
            return f"{(trial.peak_bytes or 0) / 2**20:.0f} MiB is above {memory / 2**20:.0f} MiB"
        least = self.limits.min_throughput
        if least is not None and not trial.throughput >= least:
            return f"{trial.throughput:.3g} samples a second are below {least:g}"
        if not trial.recipe.levels:
            return self._baseline_wrong()
        return ""

    def code(self, recipe: Recipe, result: Result | None = None) -> str:
        """``optimized.py`` of a recipe."""
        location, _, factory = self.target.reference.rpartition(":")
        heading = f"{self.target.name}, optimised for {self.facts.mode}: {recipe}."
        if result is not None and result.winner is not None and result.winner.speedup is not None:
            off = f"relative error {result.winner.accuracy.error:.2g}"
            if self.facts.mode == "training":
                off = f"losses off by {result.winner.accuracy.error:.2g} of what two seeds are apart"
            heading += (
                f"\n\nMeasured {result.winner.speedup.estimate:.2f}x as given on {this_machine().summary}, {off}.\n"
            )
        return source(
            recipe,
            self.facts,
            heading=heading,
            target=None if self.target.is_live else (location, factory),
            calibration=max(1, self.facts.calibration_batches),
        )

    def tell(self, doing: str, trial: Trial | None = None) -> None:
        """Pass on what happens."""
        self._tell(Event(doing, trial, self.best() if self._known else None, self._elapsed_s(), self._budget_s))

    # -- how ---------------------------------------------------------------------------------------------------------

    def _probe(self, worker: Worker, fingerprint: str, allow_batch: bool) -> Probed:
        path = self.folder / "cache" / f"reference-{fingerprint}.pt"
        kept = self.study.note("probe")
        if kept and path.is_file():
            found = msgspec.convert(kept, dict[str, Any])
        else:
            timeout_s = self.rules.prepare_timeout_s
            found = worker.ask("probe", timeout_s, allow_batch=allow_batch)
            found["peaks"] = worker.ask("peaks", timeout_s)
            found["advice"] = _advice(worker)  # before the reference, which turns the model into another dtype
            found["reference"] = worker.ask("reference", timeout_s, path=str(path))
            self.study.set_note("probe", found)
        written = found["reference"]
        if found["has_metric"] and written["metric_problem"]:
            raise UsageError(f"the workload's metric does not work on the model as given: {written['metric_problem']}")
        self._reference_path = path
        self.advice = msgspec.convert(found.get("advice", []), list[Advice])
        facts = replace(msgspec.convert(found["facts"], Facts), allow_batch=allow_batch)
        reference = Reference(
            dtype=written["dtype"],
            why=written["why"],
            noise=written["noise"] or 0.0,
            metric=math.nan if written["metric"] is None else written["metric"],
            curves=written.get("curves", ()),
            spread=written.get("spread", math.nan),
        )
        return Probed(facts, fingerprint, reference, found["has_metric"], found["peaks"])

    def ruled_out(self, recipe: Recipe) -> str:
        """Why the memory plan says that a recipe cannot fit; empty where it may, or nobody knows."""
        if recipe.levels.get("parallel", "single") == "single":
            return ""
        from fettle.train.study_plan import rules_out

        return rules_out(self.memory_plan, recipe.levels)

    def _plan(self, worker: Worker) -> None:
        """Plan the memory of the parallel strategies before any of them is launched."""
        measured_with = self.study.note("ranks")
        if self._nproc > 1 and measured_with not in (None, self._nproc):
            raise UsageError(
                f"the study {self.study.name!r} holds trials on {measured_with} ranks: choose another --study"
            )
        if self._nproc == 1:
            return
        self.study.set_note("ranks", self._nproc)
        memory = self._device_memory_bytes or _memory_of_rank(self.probed.facts.device, self._nproc)
        key = f"plan {self._nproc} {memory}" if self._device_memory_bytes else f"plan {self._nproc}"
        kept = self.study.note(key)
        if kept is None:
            self.tell(f"planning the memory of {self._nproc} ranks")
            try:
                kept = worker.ask("plan", 300.0, factor=self._nproc, device_memory_bytes=memory)
            except (WorkerError, UsageError) as error:
                kept = {"plan": None, "note": f"the memory could not be planned: {error}"}
            self.study.set_note(key, kept)
        self.memory_plan = kept["plan"]
        self._notes = [kept["note"]] if kept["note"] else []

    def _race(self, recipes: Sequence[Recipe]) -> None:
        """Race unknown recipes in one heat and keep their trials."""
        entries = [Recipe(), *(recipe for recipe in recipes if recipe.levels)]
        deadline = math.inf
        if self._budget_s is not None:
            deadline = self._started + self._budget_s - self._reserve_s()
        rules = replace(self.rules, deadline=deadline, max_rounds=SCREENING_ROUNDS)
        for trial in self.run(entries, rules, self._baseline):
            if trial.recipe not in self._known:
                self._keep(trial)

    def run(self, recipes: Sequence[Recipe], rules: Rules, held: Held | None = None) -> list[Trial]:
        """Race `recipes` as they are, known or not, in fresh processes (but for what is `held`), and keep nothing."""
        self._heat += 1
        entries = [self._entry(recipe) for recipe in recipes]
        return race(
            msgspec.to_builtins(self.target),
            self.probed.fingerprint,
            entries,
            self._judge(),
            rules,
            log_folder=_made(self.folder / "logs"),
            environment=self._environment(),
            tell=self._pass_on,
            heat=self._heat,
            held=held,
        )

    def _entry(self, recipe: Recipe) -> Entry:
        environment: dict[str, str] = {}
        calibrated = False
        for name, level in recipe.levels.items():
            technique = find(name)
            environment |= technique.code(level, recipe, self.facts).environment
            calibrated |= level in technique.calibrated
        batch = recipe.levels.get("batch", "")
        factor = int(batch[1:]) if batch.startswith("x") else 1
        ranks = self._nproc if recipe.levels.get("parallel", "single") != "single" else 1
        return Entry(recipe, source(recipe, self.facts), environment, factor, calibrated, ranks)

    def _judge(self) -> Judge:
        return Judge(
            str(self._reference_path),
            self.limits.max_error,
            self.limits.min_agreement,
            self.limits.max_metric_drop,
            self.probed.reference.metric,
        )

    def _judged(self, trial: Trial) -> Trial:
        """A trial of an earlier run under today's limits on accuracy."""
        from fettle.measure import judge

        if trial.status == "failed" or not trial.recipe.levels:
            return trial
        found = self._judge()
        reason = judge(
            trial.accuracy,
            max_error=found.max_error,
            min_agreement=found.min_agreement,
            max_metric_drop=found.max_metric_drop,
            reference_metric=found.reference_metric,
        )
        return replace(trial, status="rejected" if reason else "measured", reason=reason)

    def _baseline_wrong(self) -> str:
        """Why the workload as given may not win, although it is always measured."""
        from fettle.measure import judge

        baseline = self._known.get(Recipe())
        if baseline is None or baseline.status == "failed":
            return ""
        found = self._judge()
        return judge(
            baseline.accuracy,
            max_error=found.max_error,
            min_agreement=found.min_agreement,
            max_metric_drop=found.max_metric_drop,
            reference_metric=found.reference_metric,
        )

    def _keep(self, trial: Trial) -> None:
        self.study.add(trial)
        self._known[trial.recipe] = trial
        self.study.set_note("seconds", self._earlier_s + self._elapsed_s())
        self.tell(f"measured {trial.recipe}", trial)

    def _pass_on(self, progress: Progress) -> None:
        if progress.stage == "start":
            self.tell(f"starting {progress.recipe}")
        elif progress.stage == "round":
            self.tell(f"round {progress.round}, {progress.live} in the race")

    def _worker(self) -> Worker:
        return Worker(self._environment(), _made(self.folder / "logs") / "probe.log")

    def _environment(self) -> dict[str, str]:
        cache = _made(self.folder / "cache" / "inductor").resolve()
        return {
            # One compile cache a study, so that the last race and a resumed study find what was compiled.
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        }

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def _reserve_s(self) -> float:
        """What the last race will take: starting baseline and leader again, and their rounds."""
        leader, baseline = self.best(), self._known.get(Recipe())
        cost = sum(trial.startup.load_s + trial.startup.total_s + 3.0 for trial in (leader, baseline) if trial)
        rounds = sum(trial.time_ms / 1e3 for trial in (leader, baseline) if trial and trial.ok) * 4
        return min(cost + rounds + 5.0, 0.5 * (self._budget_s or math.inf))

    def _affordable(self, recipes: Iterable[Recipe]) -> bool:
        if self._budget_s is None:
            return True
        dear = [trial.seconds for trial in self._known.values() if trial.startup.total_s > 5] or [30.0]
        cost = sorted(dear)[len(dear) // 2] * len(list(recipes))
        return self._elapsed_s() + cost < self._budget_s

    def _finalists(self, leader: Trial) -> list[Trial]:
        """The leader and up to two others that came within 5% of it."""
        near = [
            trial
            for trial in self._known.values()
            if trial.recipe.levels and self.score(trial) <= self.score(leader) + math.log(1.05)
        ]
        return sorted(near, key=lambda trial: (self.score(trial), len(trial.recipe.levels)))[:3]

    def _fallbacks(self) -> list[Trial]:
        """Change nothing, or no more than the answers need."""
        plain = [Recipe(), Recipe({"mode": "eval"})]
        return [self._known[recipe] for recipe in plain if recipe in self._known]

    def _nearest(self, trials: Sequence[Trial]) -> list[Trial]:
        """The trials that miss the limits by least, at most three."""

        def distance(trial: Trial) -> float:
            far = 0.0
            limits, accuracy = self.limits, trial.accuracy
            if limits.max_error is not None:
                over = accuracy.error / limits.max_error if not math.isnan(accuracy.error) else math.inf
                far = max(far, math.log(max(over, 1.0)))
            if limits.max_latency_ms is not None:
                far = max(far, math.log(max(trial.time_ms / limits.max_latency_ms, 1.0)))
            if limits.min_throughput is not None and trial.throughput > 0:
                far = max(far, math.log(max(limits.min_throughput / trial.throughput, 1.0)))
            if limits.max_memory_bytes is not None:
                far = max(far, math.log(max((trial.peak_bytes or 1) / limits.max_memory_bytes, 1.0)))
            return far

        ran = [trial for trial in trials if trial.status != "failed" and trial.recipe.levels]
        return sorted(ran, key=lambda trial: (distance(trial), trial.time_ms))[:3]

    def _ladder(self, result: Result, baseline: Trial | None) -> tuple[Rung, ...]:
        """The rungs from the baseline to the winner that were measured."""
        if baseline is None or result.winner is None:
            return ()
        rungs, last = [Rung("as given", baseline)], Recipe()
        for recipe in _climb(result.recipe, None):
            trial = result.winner if recipe == result.recipe else self._known.get(recipe)
            if trial is None or trial.status == "failed":
                continue
            added = {name: level for name, level in recipe.levels.items() if last.levels.get(name) != level}
            rungs.append(Rung(" ".join(f"{name}={level}" for name, level in added.items()), trial))
            last = recipe
        return tuple(rungs)


def space_for(
    facts: Facts,
    allowed: Mapping[str, Sequence[str]],
    ruled_out: Callable[[Recipe], str] = lambda recipe: "",
) -> tuple[Space, list[LeftOut]]:
    """The space of recipes that can work here and that the user allows, and what was left out with the rule.

    `ruled_out` knows of more recipes that cannot work, beyond what the catalogue's own rules say.
    """
    choices: dict[str, tuple[str, ...]] = {}
    left_out: list[LeftOut] = []
    required: dict[str, str] = {"mode": "eval"} if facts.train_mode_differs else {}
    for technique in CATALOGUE:
        usable = [technique.given]
        if facts.mode not in technique.modes:
            if technique.name in allowed:
                raise UsageError(f"--technique {technique.name} is for {' and '.join(technique.modes)} only")
            continue
        for level in technique.levels(facts):
            permitted = technique.name not in allowed or level.name in allowed[technique.name]
            if level.name == technique.given:
                continue
            if level.why_not:
                left_out.append(LeftOut(technique.name, level.name, level.why_not))
            elif not permitted:
                left_out.append(LeftOut(technique.name, level.name, "not among the levels allowed by --technique"))
            else:
                usable.append(level.name)
                if why := ruled_out(Recipe({technique.name: level.name})):
                    left_out.append(LeftOut(technique.name, level.name, f"{why}, unless another technique saves it"))
        if technique.name in allowed:
            _pin(technique.name, technique.given, allowed[technique.name], usable, left_out, required)
        choices[technique.name] = tuple(usable)
    useful = [
        recipe
        for recipe in (normal(bundle) for bundle in bundles(facts))
        if all(level in choices[name] for name, level in recipe.levels.items())
    ]

    def why_not(recipe: Recipe) -> str:
        for name, level in required.items():
            if recipe.levels and recipe.levels.get(name, find(name).given) != level:
                return f"{name}={level} is required"
        return conflict(recipe, facts) or ruled_out(recipe)

    space = Space(
        choices=choices,
        conflict=why_not,
        needs={technique.name: technique.needs for technique in CATALOGUE if technique.needs},
        required=normal(Recipe(required)),
        cost=lambda recipe: max((find(n).level_cost(level) for n, level in recipe.levels.items()), default=1),
        bundles=[normal(Recipe({**recipe.levels, **required})) for recipe in useful],
    )
    return space, left_out


def check_techniques(allowed: Mapping[str, Sequence[str]]) -> Mapping[str, Sequence[str]]:
    """The user's choice of levels; raises `UsageError` for a name that the catalogue does not have."""
    from fettle.techniques import check_names

    for name, levels in allowed.items():
        for level in levels:
            check_names(Recipe({name: level}))
    return allowed


def save(result: Result, folder: Path) -> list[Path]:
    """Write what the user takes away: recipe.toml, optimized.py, result.json, report.html. Returns the paths."""
    from fettle.report import save_result, write_report

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    if result.winner is not None:
        recipe_file(result).save(folder / "recipe.toml")
        write_text(folder / "optimized.py", result.code)
        paths += [folder / "recipe.toml", folder / "optimized.py"]
    save_result(result, folder / "result.json")
    write_report(result, folder / "report.html")
    return [*paths, folder / "report.html", folder / "result.json"]


def recipe_file(result: Result) -> RecipeFile:
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
        "peak_bytes": winner.peak_bytes,
        "startup_s": winner.startup.total_s,
        "accuracy": accuracy,
        "limits": msgspec.to_builtins(result.limits),
        "created": result.created,
    }
    machine = {key: result.machine[key] for key in ("id", "cpu", "cores", "gpus", "python", "versions")}
    workload = {"name": result.name, "fingerprint": result.fingerprint, "target": result.target}
    return RecipeFile(levels=dict(winner.recipe.levels), workload=workload, machine=machine, evidence=evidence)


def _climb(recipe: Recipe, space: Space | None) -> list[Recipe]:
    """The recipe's levels added one at a time in catalogue order, leaving out steps that cannot stand alone."""
    steps, levels = [], dict[str, str]()
    for technique in sorted(CATALOGUE, key=lambda technique: (technique.rung, CATALOGUE.index(technique))):
        if technique.name in recipe.levels:
            levels[technique.name] = recipe.levels[technique.name]
            step = Recipe(levels)
            if space is None or not space.conflict(step):
                steps.append(step)
    return steps


def _pin(
    name: str, given: str, levels: Sequence[str], usable: list[str], left_out: list[LeftOut], required: dict[str, str]
) -> None:
    """Take the user's choice for one technique: it is an error when none of the levels can be had; a lone one is
    required. Of several, those that cannot be had are among `left_out` already."""
    if name == "threads":
        usable += [level for level in levels if level.isdigit() and level not in usable]
    possible = [level for level in levels if level in usable]
    if not possible:
        why = next((item.why for item in left_out if item.technique == name and item.level == levels[0]), "unknown")
        raise UsageError(f"--technique {name}={levels[0]} cannot be had here: {why}")
    if len(possible) == 1:
        required[name] = possible[0]
        usable[:] = list(dict.fromkeys([given, possible[0]]))
    elif given not in possible:
        required.setdefault(name, possible[0])


def _advice(worker: Worker) -> list[dict[str, Any]]:
    """What the findings of a short diagnosis advise, as plain data; nothing where the workload cannot be watched."""
    from fettle.diagnose import Evidence, advice, findings_of

    try:
        answer = worker.ask("examine", 120.0, label="fettle.diagnose.collect:glance")
    except (WorkerError, UsageError):
        return []
    found = findings_of(msgspec.convert(answer["found"], Evidence, strict=False))
    return [msgspec.to_builtins(item) for item in advice(found)]


def _techniques(advised: Sequence[Advice]) -> list[str]:
    """The techniques that advice names, the most promising first."""
    return list(dict.fromkeys(name for item in advised for name in item.levels))


def _verdict(trial: Trial, indifference: float) -> Verdict:
    return verdict(trial.speedup, indifference)  # type: ignore[return-value]


def _target(
    model: Any,
    inputs: Any,
    call: Callable[..., Any] | None,
    metric: Callable[[Callable[..., Any]], float] | None,
    folder: Path,
    mode: str = "inference",
) -> Target:
    from fettle.train import TrainingWorkload

    if mode not in MODES:
        raise UsageError(f"unknown mode {mode!r}: there are {', '.join(MODES)}")
    if isinstance(model, TrainingWorkload):
        if mode != "training":
            raise UsageError("a TrainingWorkload is tuned with mode='training'")
        return replace(target_from_objects(model, folder / "cache"), mode=mode)
    if mode == "training" and not isinstance(model, (str, Target)):
        raise UsageError("training needs a fettle.TrainingWorkload(model, optimizer, loss, data), or 'file.py:factory'")
    if isinstance(model, Target):
        return replace(model, mode=mode)
    if isinstance(model, str):
        if inputs is not None:
            raise UsageError("inputs belong to a live model; the factory of a target gives its own")
        return replace(find_target(model), mode=mode)
    if not isinstance(model, Workload):
        if inputs is None:
            raise UsageError("give sample inputs: fettle.tune(model, [batch])")
        model = Workload(model, as_batches(inputs), call, metric)
    return target_from_objects(model, folder / "cache")


def _check_limits(limits: Limits, goal: str, budget_s: float | None, design: str) -> None:
    if goal not in GOALS:
        raise UsageError(f"unknown goal {goal!r}: there are {', '.join(GOALS)}")
    if design not in DESIGNS:
        raise UsageError(f"unknown design {design!r}: there are {', '.join(DESIGNS)}")
    checks = {
        "max error": limits.max_error, "max latency": limits.max_latency_ms, "max memory": limits.max_memory_bytes,
        "budget": budget_s, "min throughput": limits.min_throughput,
    }  # fmt: skip
    for name, value in checks.items():
        if value is not None and not value > 0:
            raise UsageError(f"an impossible limit: {name} must be above 0, and is {value:g}")
    if limits.min_agreement is not None and not 0 <= limits.min_agreement <= 1:
        raise UsageError(f"an impossible limit: min agreement is a share between 0 and 1, not {limits.min_agreement:g}")
    if limits.max_metric_drop is not None and not limits.max_metric_drop >= 0:
        raise UsageError(f"an impossible limit: max metric drop must not be below 0, and is {limits.max_metric_drop:g}")


def _check_ranks(nproc: int, device_memory_bytes: int | None, mode: str) -> None:
    if isinstance(nproc, bool) or not 1 <= nproc <= 1024:
        raise UsageError(f"--nproc {nproc}: give the number of ranks on this machine, 1 to 1024")
    if nproc > 1 and mode != "training":
        raise UsageError("--nproc is for training: add --mode training")
    if device_memory_bytes is not None and device_memory_bytes <= 0:
        raise UsageError("an impossible limit: device memory must be above 0")


def _memory_of_rank(device: str, nproc: int) -> int:
    """Bytes that one rank may fill: its GPU, or its share of this machine."""
    import psutil
    import torch

    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    return int(psutil.virtual_memory().total) // nproc


def _plan_rows(made: Mapping[str, Any] | None) -> tuple[PlanRow, ...]:
    if not made:
        return ()
    memory = made["device_memory_bytes"]
    limit = None if memory is None else int(memory * (1 - made["headroom"]))
    return tuple(
        PlanRow(
            item["strategy"],
            item["peak_bytes"],
            item["parts"],
            limit,
            item["collectives"],
            item["sent_bytes"],
            item["failed"],
        )
        for item in made["predictions"]
    )


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to the output folder {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write to the output folder {folder}: permission denied")
    return folder.resolve()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)
