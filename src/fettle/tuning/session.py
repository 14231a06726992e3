"""One run of a study: it measures recipes in races, remembers trials, and watches the budget."""

from __future__ import annotations

import math
import os
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from fettle.errors import UsageError, refusing
from fettle.files import for_compilers
from fettle.machine import Machine
from fettle.measure import (
    READY,
    Candidate,
    Held,
    Judge,
    Patience,
    Progress,
    Rules,
    Stop,
    Trial,
    Worker,
    WorkerError,
    fetching,
    fork_server,
    messages,
    prefer,
    race,
)
from fettle.procs.forks import ForkServer, Imports
from fettle.procs.interpreter import Interpreter
from fettle.procs.nodes import Nodes
from fettle.recipe import Recipe
from fettle.techniques import (
    PYTHON,
    batch_factor,
    canonical,
    environment,
    imports_of,
    is_calibrated,
    run_by,
    source,
    uses_ranks,
)
from fettle.tuning._baseline import how_it_swings
from fettle.tuning._budget import Budget
from fettle.tuning._costs import Costs
from fettle.tuning._events import Event, OnProgress
from fettle.tuning._opening import OF_A_START, check_metric, hold, limits_of, open_study, remarks, side_by_side
from fettle.tuning._probe import Probed, judged_against, judged_by, plan_memory, probe
from fettle.tuning.model import PRIOR_SPREAD, Races
from fettle.tuning.options import Options, rules_of
from fettle.tuning.standings import Standings
from fettle.workload import Target

WAITING = 0.25
"""Share of the budget that the races may wait for a quiet machine. Where slices may go before others' work, all of it
is for the final race, else two fifths."""
_UNLIMITED_WAIT_S = 120.0
_SCREENING_INDIFFERENCE = PRIOR_SPREAD
"""Rounds tell two processes of the same code apart as well as two recipes: what is closer than this is for the final
race, which has more processes."""
SHARED_RACES = 10_000
"""Races of a study that several work at are numbered from here, by the place of their first trial."""
_KEPT = "cache/kept"
"""What trials have converted, for their further processes: it is large, and goes when the study ends."""


class Session:
    """One run of a study. It is what a design of `fettle.search` measures with."""

    def __init__(
        self, target: Target, options: Options, on_progress: OnProgress, *, nodes: Nodes | None = None,
        started: float | None = None,
    ) -> None:  # fmt: skip
        if not callable(on_progress):
            raise UsageError(f"on_progress is a function of one fettle.Event, not {on_progress!r:.80}")
        self.target, self.options, self.folder = target, options, options.output
        self.budget = Budget(options.budget_s or None, time.monotonic() if started is None else started)
        self.rules = rules_of(options)
        self.standings = Standings(options.goal, options.limits, Races(options.under_load), options.confidence)
        self.costs = Costs(self.standings, self.budget)
        self.held = Held()
        """The processes of the workload as given and of the leader, which run in every race but the last."""
        self.forks: ForkServer | None = None
        """What the processes of the search are forked from. Those of the final race, and of all races whose figures are
        announced as they are, start by themselves: forks of one server share what their memory was like after its
        imports, and differ less than processes do."""
        self._may_wait_s = WAITING * options.budget_s if options.budget_s else _UNLIMITED_WAIT_S
        self.patience = Patience(0.0 if self.rules.may_go_first else 0.6 * self._may_wait_s)
        self.environments: Mapping[str, Interpreter] = {}
        """Environments that a recipe may run in beside ours, by the level of `PYTHON` that says so."""
        self.notes: list[str] = []
        """What the result should say of how the study was made."""
        self._on_progress, self._nodes = on_progress, nodes
        self._node_count = nodes.count if nodes is not None else 1
        self._ranks = options.nproc * self._node_count
        # Others may be at a study of a storage that was named, and what has one number is taken for one race.
        self._race = 0 if options.storage is None else SHARED_RACES * (1 + secrets.randbelow(1 << 30))
        self._earlier_s = 0.0
        self._lock = -1

    def open(self, machine: Machine, fingerprint: str = "", *, searches: bool = True) -> None:
        """Probe the workload, compute its reference, and open or resume its study, by default the workload's own.

        `fingerprint`, when given, is what the workload must be for the recipe that is to run on it. Only one that
        `searches` has a first look at what may help and at what the machine reaches.
        """
        timeout_s = self.rules.prepare_timeout_s
        with Worker(self._environment(), self._folder("logs") / "probe.log") as worker:
            if self.rules.may_go_first and not self.rules.under_load:
                prefer(worker.pid, READY)
            with refusing("the workload could not be probed:", WorkerError):
                built = worker.ask(messages.Build(self.target), messages.Built, timeout_s)
                if fingerprint and built.fingerprint != fingerprint:
                    raise UsageError(
                        "the recipe is for another workload: its weights or inputs differ from this one's; tune again, "
                        "or check it all the same with `force`"
                    )
                self._take(built, machine)
                path = self._folder("cache") / f"reference-{built.fingerprint}-{built.structure[:8]}.pt"
                allow_batch = self.options.allow_batch and self.options.goal != "latency"
                affordable_s = math.inf if self.budget.seconds is None else 0.1 * self.budget.seconds
                look_s = affordable_s if searches else 0.0
                probed = probe(worker, self.study, path, built.fingerprint, allow_batch, timeout_s, look_s)
                self.plan = plan_memory(
                    worker, self.study, self._ranks, self._node_count, probed.facts,
                    self.options.device_memory_bytes, self.report,
                )  # fmt: skip
        if self.forks is not None:
            self.forks.imports = built.imports
        self.study.set_note("machine", msgspec.to_builtins(machine))
        self.study.set_note("goal", self.options.goal)
        self.study.set_note("under load", self.options.under_load)
        self.probed_as(probed)
        check_metric(self.standings.limits, probed)
        self.refresh()
        self._earlier_s = self.study.seconds

    def search_in_forks(self) -> None:
        """Fork the processes of the races that search, where a final race follows. Call it before `open`, beside whose
        imports those of the forks are made."""
        if self.options.goal not in OF_A_START and not torch.accelerator.is_available():
            self.forks = fork_server(self._environment(), Imports())
            self.forks.begin()

    def _take(self, built: messages.Built, machine: Machine) -> None:
        """Take what the workload is for what it is judged by, and open its study."""
        self.target = replace(self.target, mode=built.mode)
        self.standings.limits = limits_of(built, self.options)
        if built.inputs:
            self.note(f"inputs: {built.inputs}")
        for text in remarks(built, self.budget.seconds):
            self.remark(text)
        self.study, elsewhere = open_study(self.target, built, self.options, machine)
        if self.options.storage is None:
            self._lock = hold(self.study, self._folder("cache"))
        if elsewhere:
            self.remark(elsewhere)

    def remark(self, text: str) -> None:
        """Say something now and in the result."""
        self.notes.append(text)
        self.note(text)

    def probed_as(self, probed: Probed) -> None:
        """Take what the first worker found for what this session measures by."""
        limits = self.standings.limits
        for note in [*probed.reference.notes, *limits.drowned(probed.reference.noise)]:
            self.remark(note)
        if probed.facts.train_mode_differs:
            self.remark("the model is in train mode and answers otherwise in eval mode: every recipe has mode=eval")
        allowed = limits.above(probed.reference.noise).max_error
        facts = replace(probed.facts, ranks=self._ranks, nodes=self._node_count)
        self.study.packages = facts.packages
        self.probed, self.facts = probed, judged_by(facts, allowed, limits.max_metric_drop is not None)
        self.rules = side_by_side(self.rules, self.facts, self.options.goal)
        metric = judged_against(probed.reference).metric
        self.standings.judge = Judge(probed.reference_path, allowed, limits.min_agreement, limits.max_metric_drop,
                                     metric, limits.exact)  # fmt: skip

    def refresh(self, *, anew: bool = True) -> None:
        """Know what the study knows by now, no more and no less; see `Standings.recall` for `anew`."""
        self.standings.known.clear()
        self.standings.races = Races(self.options.under_load)
        timeout_s = self.rules.prepare_timeout_s
        for trial in self.standings.recall(self.study, self.environments, anew=anew, timeout_s=timeout_s):
            self._recall(trial)
        if self.options.storage is None:
            self._race = max([self._race, *self.standings.races.trials])

    # -- what a design asks ------------------------------------------------------------------------------------------

    def measure(self, recipes: Sequence[Recipe]) -> list[Trial]:
        """Race those of `recipes` that are not known yet beside the baseline; answer for all that are known then."""
        wanted = list(dict.fromkeys(canonical(recipe) for recipe in recipes))
        missing = [recipe for recipe in wanted if recipe not in self.standings.known]
        if missing and not (Recipe() in self.standings.known and self.spent()):
            self.race_unknown(missing)
        return [self.standings.known[recipe] for recipe in wanted if recipe in self.standings.known]

    def measure_share(self, recipes: Sequence[Recipe], most: int) -> bool | None:
        """Claim at most `most` of `recipes` that no worker on a machine like this one has measured or is about to, and
        measure them: whether there was time for any. None where there is none to claim."""
        try:  # an interrupt in the middle of claiming gives back what was claimed by then
            mine, place = self.study.claim([canonical(recipe) for recipe in recipes], most, self.facts)
            if mine:
                self.refresh(anew=False)  # whoever measured a recipe first has measured it for all
                self._race = SHARED_RACES + place  # no two workers have a race of the same number
                self.measure(mine)
        finally:
            self.study.give_back()
        return any(recipe in self.standings.known for recipe in mine) if mine else None

    def score(self, trial: Trial) -> float:
        """The goal as a number, smaller is better; infinite where the trial may not win."""
        return self.standings.score(trial)

    def noise(self, one: Trial, other: Trial) -> float:
        """Half the confidence interval of the difference of two scores."""
        return self.standings.noise(one, other)

    def spent(self) -> bool:
        """Whether the budget is used up, but for the final race."""
        return self.costs.left_s() < 0

    # -- what is known -----------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """What the study has taken, earlier runs of it included."""
        return self._earlier_s + self.budget.elapsed_s

    # -- measuring ---------------------------------------------------------------------------------------------------

    def race_unknown(self, recipes: Sequence[Recipe], deadline: float | None = None) -> None:
        """Race recipes that are not known in one race, beside the baseline, and keep their trials. Those that do not
        fit before the `deadline` (default: when the final race must begin) are left out."""
        if deadline is None:  # the workload as given comes first, and is measured
            deadline = self.costs.deadline() if Recipe() in self.standings.known else math.inf
        for recipe in recipes:
            if problem := self._problem(recipe):
                self.keep([Trial(recipe, "failed", problem, race=self._race, versions=self._versions(recipe))])
        candidates = [recipe for recipe in recipes if recipe.levels and not self._problem(recipe)]
        can_judge_abreast = self.rules.judges_abreast != "none"
        saved_s = self.forks.saved_s / self.rules.abreast if self.forks is not None else 0.0
        self.costs = replace(self.costs, saved_s=saved_s, abreast=self.rules.abreast if can_judge_abreast else 1)
        candidates = candidates[: self.costs.how_many_fit(candidates, self.costs.left_s(deadline))]
        if candidates or Recipe() not in self.standings.known:
            stop = Stop()
            compares = not self.rules.equal_rounds and self.options.storage is None  # nor where machines share it
            # The first steps of a training loop say nothing where its batches differ in shape.
            compares = compares and not (self.facts.mode == "training" and self.facts.num_input_shapes > 1)
            rules = replace(self.rules, deadline=deadline, grace_s=0.0, stop=stop,
                            longest_ms=self.standings.longest_ms if compares else None,
                            judges_abreast="all" if can_judge_abreast else "none",
                            indifference=max(self.rules.indifference, _SCREENING_INDIFFERENCE))  # fmt: skip
            leader = self.standings.best()
            again = [leader.recipe] if leader is not None and leader.recipe.levels else []
            field = list(dict.fromkeys([Recipe(), *again, *candidates]))
            self.keep(self.run(field, rules, self.held, forks=self.forks))
            if stop.asked:
                raise KeyboardInterrupt
            leader = self.standings.best()
            self.held.keep({Recipe()} | ({leader.recipe} if leader is not None else set()))

    def run(
        self, recipes: Sequence[Recipe], rules: Rules, held: Held | None = None, *, once: Sequence[Recipe] = (),
        forks: ForkServer | None = None,
    ) -> list[Trial]:  # fmt: skip
        """Race `recipes` as they are, known or not, in fresh processes (but for what is `held`), and keep nothing.
        Those in `once` have one process whatever the rules say."""
        self._race += 1
        candidates = [replace(self._candidate(recipe), once=recipe in once) for recipe in recipes]
        trials = race(
            self.target, self.probed.fingerprint, candidates, self.standings.judge, rules,
            log_folder=self._folder("logs"), environment=self._environment(), on_progress=self._pass_on,
            number=self._race, held=held, nodes=self._nodes, forks=forks, patience=self.patience,
        )  # fmt: skip
        return [self._with_first_start(replace(trial, versions=self._versions(trial.recipe))) for trial in trials]

    def _with_first_start(self, trial: Trial) -> Trial:
        """With the start of the recipe's first process of all; those that a later race started are warm ones."""
        known = self.standings.known.get(trial.recipe)
        if known is None or known.status == "failed" or not trial.slices:
            return trial
        warm_s = trial.startup.warm_s
        if math.isnan(warm_s):
            is_new = trial.slices[0].process.startswith(f"{trial.race}:")
            warm_s = trial.startup.total_s if is_new else known.startup.warm_s
        startup = replace(known.startup, warm_s=warm_s)
        self.standings.known[trial.recipe] = replace(known, startup=startup)
        return replace(trial, startup=startup)

    def keep(self, trials: Sequence[Trial]) -> None:
        """Keep a race's trials: in the study those whose recipes were not known, and what the others add to the fit."""
        new = [trial for trial in trials if trial.recipe not in self.standings.known]
        again = [trial.to_json() for trial in trials if trial.recipe in self.standings.known and trial.slices]
        if again:
            self.study.set_note(f"again in race {self._race}", again)
        for trial in new:
            self.remember(trial)
        self.standings.add(trials)
        for trial in new:
            self.report(f"measured {trial.recipe}", self.standings.known[trial.recipe])

    def look_at_baseline(self) -> None:
        """Say so at once where the time of the workload as given swings, before minutes are spent."""
        baseline = self.standings.known.get(Recipe())
        if baseline is not None and (swings := how_it_swings(baseline)):
            say = self.note if fetching(baseline.slices) else self.remark  # the result itself says what memory does
            say(swings)

    def be_patient(self, spare_s: float) -> None:
        """The final race may wait for a quiet machine for what is left of the share; where slices may go before others'
        work no longer than `spare_s`, as further processes tell more than waiting does."""
        left_s = max(0.0, self._may_wait_s - self.patience.waited_s)
        self.patience.left_s = min(left_s, spare_s) if self.rules.may_go_first else left_s

    def remember(self, trial: Trial) -> None:
        """Keep the trial of a recipe that was not known."""
        self.study.add(trial, self.facts)
        self.standings.known[trial.recipe] = trial
        self._recall(trial)
        self.study.set_note("seconds", self.seconds)

    def _recall(self, trial: Trial) -> None:
        """What a trial chose is chosen: the final race, ``optimized.py`` and a resumed study go by it."""
        if trial.learned and trial.ok:
            self.facts = replace(self.facts, learned={**trial.learned, **self.facts.learned})

    def note(self, text: str) -> None:
        """Pass on a line that stays."""
        self._on_progress(Event(text, elapsed_s=self.budget.elapsed_s, budget_s=self.budget.seconds, note=text))

    def report(self, doing: str, trial: Trial | None = None) -> None:
        """Pass on what happens."""
        best = self.standings.best() if self.standings.known else None
        self._on_progress(Event(doing, trial, best, self.budget.elapsed_s, self.budget.seconds))

    def _pass_on(self, progress: Progress) -> None:
        if progress.doing:
            self.report(progress.doing)

    def _candidate(self, recipe: Recipe) -> Candidate:
        ranks, variables = self._ranks if uses_ranks(recipe) else 1, environment(recipe, self.facts)
        lines, factor = source(recipe, self.facts), batch_factor(recipe)
        interpreter = self._where(recipe)
        if interpreter is not None:
            cache = for_compilers(self._folder(f"cache/inductor-{interpreter.name}"))
            variables = {**variables, **interpreter.variables, "TORCHINDUCTOR_CACHE_DIR": cache}
        return Candidate(recipe, lines, variables, factor, is_calibrated(recipe), imports_of(recipe), ranks,
                         python=interpreter.path if interpreter is not None else "")  # fmt: skip

    def _versions(self, recipe: Recipe) -> Mapping[str, str]:
        """Of the packages that a recipe runs by here."""
        return run_by(recipe, self.facts.packages)

    def _where(self, recipe: Recipe) -> Interpreter | None:
        """The environment that a recipe runs in; None for ours."""
        return self.environments.get(recipe.levels.get(PYTHON.name, PYTHON.default))

    def _problem(self, recipe: Recipe) -> str:
        """Why a recipe fails, as is known without trying it; empty where it may run."""
        where = self._where(recipe)
        return f"{where.path}: {where.problem}" if where and where.problem else self.standings.foreseen_failure(recipe)

    def _environment(self) -> dict[str, str]:
        return {
            # One compile cache a study, so that the final race and a resumed study find what was compiled.
            "TORCHINDUCTOR_CACHE_DIR": for_compilers(self._folder("cache/inductor")),
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
            "FETTLE_CACHE": str(self._folder(_KEPT).resolve()),
        }

    def let_go(self) -> None:
        """Delete what trials have converted, and leave the study to others."""
        if self._lock >= 0 or self.options.storage is not None:  # else another has it
            shutil.rmtree(self.folder / _KEPT, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _folder(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder
