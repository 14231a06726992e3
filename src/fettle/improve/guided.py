"""The guided run. Read `improve` and you know the order of things.

measure -> diagnose -> input pipeline -> tune -> verify -> package
"""

from __future__ import annotations

import re
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fettle.atlas import read_atlas
from fettle.comparing import Comparison, bench, check
from fettle.diagnose import Finding, diagnose
from fettle.diagnose.report import page as diagnosis_page
from fettle.errors import UsageError
from fettle.files import write_text
from fettle.improve.page import page
from fettle.improve.state import Step, forget, recall
from fettle.inputs import PipelineResult, measure_and_search
from fettle.inputs.kept import content_hash
from fettle.inputs.report import write_report as write_pipeline
from fettle.journal import Journal
from fettle.machine import this_machine
from fettle.measure import Worker, WorkerError, messages
from fettle.package.export import write_package
from fettle.package.manifest import name_for
from fettle.recipe_file import load_recipe
from fettle.report import Result, elapsed, interval, save, under, verdict
from fettle.result import Limits
from fettle.train.workload import make
from fettle.tuning import Event, OnProgress, Options, check_options, check_techniques, tune, writable
from fettle.units import seconds_text, size_text
from fettle.workload import AUTO, check_mode, find_target

STEPS = ("measure", "diagnose", "data", "tune", "verify", "package")
_MOST_LINES = 5
_ROUNDS = 12
_DIAGNOSE_S = 6.0
_LETS_THROUGH = 0.95
"""Share of a speed-up below which it is said that a loader holds up the rest."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a guided run."""

    data: str = ""
    """Target whose factory returns the loop's DataLoader, a dataset, or (loader, step); empty where there is none."""
    skip: Sequence[str] = ()
    """Steps that are left out."""
    budget_s: float = 900.0
    """For tuning; the other steps take a minute or two each."""
    limits: Limits = field(default_factory=Limits)
    techniques: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    atlas: Path | None = None
    mode: str = AUTO
    output: Path = Path("fettle-improve")


@dataclass(frozen=True)
class Improvement:
    """What the run came to."""

    target: str
    steps: Sequence[Step]
    folder: Path
    interrupted: bool = False

    @property
    def headline(self) -> str:
        """What all of it brought, one sentence."""
        steps = {step.name: step for step in self.steps}
        tuned, verified = steps.get("tune"), steps.get("verify")
        if tuned is None or tuned.status != "done":
            return "Interrupted before anything was tuned." if self.interrupted else "Nothing was tuned."
        if tuned.speedup is None:
            return tuned.says
        if verified is None or verified.status == "skipped":
            return f"{tuned.under}{interval(tuned.speedup)} as fast as given, not verified."
        if verified.status == "failed":
            found = f"{tuned.under}Tuning found {interval(tuned.speedup)}"
            return f"{found}, which a race of its own did not confirm: {verified.says}"
        ratio = verified.speedup or tuned.speedup
        if ratio.low <= 1:
            found = f"{verified.under}Tuning found {interval(tuned.speedup)}"
            return f"{found}; a race of its own, {interval(ratio)}, leaves that open."
        return f"{verified.under}{interval(ratio)} as fast as given, verified in a race of its own."

    @property
    def failed(self) -> bool:
        """Whether a step could not be done."""
        return any(step.status == "failed" for step in self.steps)


def improve(
    target: str,
    settings: Settings,
    on_progress: OnProgress = lambda event: None,
    *,
    quietly: Callable[[], AbstractContextManager[object]] = nullcontext,
    command: str = "",
) -> Improvement:
    """Take a workload (``file.py:factory``) through all steps, and write one page with what each brought.

    A step that cannot be done says why, and the others go on without its results; only a workload that
    does not run at all ends the run. `quietly` is entered where the workload is built in this process. Raises
    `UsageError` for bad input.
    """
    if unknown := [name for name in settings.skip if name not in STEPS]:
        raise UsageError(f"`skip={unknown[0]}`: there are {', '.join(STEPS)}")
    check_mode(settings.mode)
    check_techniques(settings.techniques)
    check_options(Options(limits=settings.limits, budget_s=settings.budget_s))
    if settings.atlas is not None:
        read_atlas(settings.atlas)
    where = find_target(target).reference
    loader = find_target(settings.data).reference if settings.data else ""
    run = _Run(target, settings, writable(settings.output), on_progress, quietly, command)
    made_for = {"target": target, "content": content_hash(where), "data": settings.data, "mode": settings.mode,
                "loader": content_hash(loader), "limits": repr(settings.limits), "budget": settings.budget_s,
                "techniques": settings.techniques, "atlas": str(settings.atlas),
                "machine": this_machine().id, "versions": this_machine().versions}  # fmt: skip
    steps: list[Step] = []
    interrupted = False
    with closing(Journal(run.folder / "improve.jsonl", "fettle improve", made_for)) as journal:
        known = {name: step for name, step in recall(journal).items()
                 if all((run.folder / file).exists() for file in step.files)}  # fmt: skip
        if (kept := known.get("measure")) is not None and _workload_changed(kept, run):
            known = {}
        forget(journal, known.keys())
        for name in STEPS:
            before = known.pop(name, None)
            try:
                step = before if before is not None and name not in settings.skip else _step(name, run, steps)
            except KeyboardInterrupt:
                interrupted = True
                break
            steps.append(step)
            if step is not before and _results_changed(step, before):
                known = {}  # later steps went by this one's earlier results
                forget(journal, {done.name for done in steps})
            if step is not before:  # otherwise it is in the journal
                journal.put(name, step)
    improvement = Improvement(target, steps, run.folder, interrupted)
    write_text(run.folder / "improve.html", page(improvement.headline, target, steps))
    return improvement


def _results_changed(step: Step, before: Step | None) -> bool:
    """Whether the steps after it had other results of this step to go by; a step that was not done has none. A recipe
    that was packaged without `verify` must not stay packaged once that fails."""
    earlier = before.results if before is not None else {}
    if step.name in ("measure", "data"):  # later steps only report these
        return False
    return step.results != earlier or (step.name == "verify" and step.status == "failed")


@dataclass(frozen=True)
class _Run:
    """What every step is handed."""

    target: str
    settings: Settings
    folder: Path
    on_progress: OnProgress
    quietly: Callable[[], AbstractContextManager[object]]
    command: str

    def say(self, text: str) -> None:
        self.on_progress(Event(text))


def _step(name: str, run: _Run, before: Sequence[Step]) -> Step:
    """One step, with what those before it said."""
    if name in run.settings.skip:
        return Step(name=name, status="skipped", says="left out, as it was asked for")
    began = time.monotonic()
    run.say(f"{name}")
    results: dict[str, Any] = {}
    for step in before:
        results |= step.results
    try:
        made = _DOES[name](run, results)
    except UsageError as error:
        if name == "measure":  # the workload does not run: no other step could either
            raise
        made = Step(name=name, status="failed", says=str(error))
    return replace(made, seconds=time.monotonic() - began)


def _workload_changed(measured: Step, run: _Run) -> bool:
    """Whether the workload has other weights or inputs than when it was measured, or cannot be built any more."""
    if "fingerprint" not in measured.results:
        return False
    run.say("building the workload: is it the one that was measured?")
    with Worker() as worker:
        try:
            target = replace(find_target(run.target), mode=run.settings.mode)
            built = worker.ask(messages.Build(target), messages.Built, Options.trial_timeout_s)
        except WorkerError:
            return True  # measuring it anew says why
    return bool(built.fingerprint != measured.results["fingerprint"])


def _go_on(found: Comparison | PipelineResult | Result) -> None:
    """What was interrupted ends the run: a single command would show what it knows, and the next step goes by it."""
    if found.interrupted:
        raise KeyboardInterrupt


def _measure(run: _Run, results: Mapping[str, Any]) -> Step:
    """What a call takes as given."""
    race = bench(
        run.target, [], mode=run.settings.mode, max_rounds=_ROUNDS, settle=False, on_progress=run.on_progress,
        limits=run.settings.limits,
    )  # fmt: skip
    _go_on(race)
    trial = race.trials[0]
    if trial.status == "failed":
        raise UsageError(f"the workload does not run as given: {trial.reason}")
    first = seconds_text(trial.startup.total_s)
    unit = "text" if trial.generation else "step" if trial.accuracy.losses else "call"
    lines = [f"90% of {unit}s are below {seconds_text(trial.p90_ms / 1e3)}; the first takes {first}"]
    if trial.peak_bytes:
        lines.append(f"peak memory {size_text(trial.peak_bytes)}")
    rate = f"{trial.throughput:,.0f}" if trial.throughput >= 1000 else f"{trial.throughput:.3g}"
    samples = "tokens" if trial.generation else "samples"
    says = f"{trial.load.under}A {unit} takes {seconds_text(trial.time_ms / 1e3)}, {rate} {samples} a second."
    return Step(name="measure", says=says, lines=lines, results={"fingerprint": race.fingerprint})


def _diagnose(run: _Run, results: Mapping[str, Any]) -> Step:
    """Why it is slow, and which techniques answer that."""
    diagnosis = diagnose(run.target, seconds=_DIAGNOSE_S, mode=run.settings.mode, on_progress=run.say)
    write_text(run.folder / "diagnosis.html", diagnosis_page(diagnosis, (), run.command))
    every = [*diagnosis.findings, *diagnosis.opportunities]
    first = _first(every, run.settings.techniques)
    lines = [_line(one, diagnosis.verdict) for one in every[:_MOST_LINES]]
    waits_s = diagnosis.evidence.loading.seconds if diagnosis.evidence is not None else 0.0
    share = waits_s / diagnosis.wall_s if diagnosis.wall_s > 0 else 0.0
    return Step(
        name="diagnose", says=diagnosis.verdict, lines=lines, files=["diagnosis.html"],
        results={"first": first, "loading": share},
        passes_on=f"to tune: try {', '.join(first)} first" if first else "",
    )  # fmt: skip


def _line(finding: Finding, verdict: str) -> str:
    """What to do about a finding, after what it says unless the verdict does already."""
    is_code = re.match(r"\w+[.=(]", finding.advice)  # torch.compile, fused=True
    advice = finding.advice if is_code else f"{finding.advice[:1].upper()}{finding.advice[1:]}"
    if finding.says in verdict:
        return advice
    return f"{finding.says} {advice}{f' (could save {finding.most})' if finding.most else ''}"


def _first(findings: Sequence[Finding], techniques: Mapping[str, str | Sequence[str]]) -> list[str]:
    """Techniques that findings name, the one that could save most first, but those that `techniques` pins."""
    pinned = {name for name, levels in check_techniques(techniques).items() if len(levels) == 1}
    ranked = sorted((one for one in findings if one.levels), key=lambda one: -one.bound)
    return list(dict.fromkeys(name for one in ranked for name in one.levels if name not in pinned))


def _data(run: _Run, results: Mapping[str, Any]) -> Step:
    """The setting of the loop's loader."""
    if not run.settings.data:
        share = results.get("loading", 0.0)
        waits = f"; a call spends {share:.0%} in a DataLoader: name its factory, --data" if share >= 0.01 else ""
        return Step(name="data", status="skipped", says=f"no input pipeline was named{waits}")
    pipeline = measure_and_search(run.settings.data, keep=run.folder / "data.journal",
                                  on_progress=lambda doing, done, of: run.say(doing))  # fmt: skip
    _go_on(pipeline)
    write_pipeline(pipeline, run.folder / "data.html")
    better = pipeline.best.setting != pipeline.before.setting
    lines = [*(lint.says for lint in pipeline.lints), *pipeline.notes,
             *(pipeline.code.splitlines() if better else ())]  # fmt: skip
    return Step(
        name="data", status="failed" if pipeline.raises else "done", says=pipeline.verdict, lines=lines,
        files=["data.html"],
        results={"loop": _loop(pipeline)} if pipeline.step_s and pipeline.best.slices else {},
        passes_on=f"to your loop: {pipeline.best.setting.arguments}" if better else "",
    )  # fmt: skip


def _loop(pipeline: PipelineResult) -> dict[str, float]:
    """Seconds of one turn of the loop with its best loader: waiting for a batch, the step, and what workers take to
    make one, 0 where there are none."""
    best, turn_s = pipeline.best, 1 / pipeline.best.rate
    workers = best.setting.num_workers
    return {"wait_s": best.waiting * turn_s, "step_s": (1 - best.waiting) * turn_s,
            "made_s": best.last.fetch_mean_s / workers if workers else 0.0}  # fmt: skip


def _through(loop: Mapping[str, float], speedup: float) -> float:
    """How much of a faster step reaches the loop at most: workers go on while it runs, and without them it waits."""
    step_s = loop["step_s"] / speedup
    turn_s = max(loop["made_s"], step_s) if loop["made_s"] else loop["wait_s"] + step_s
    return max(1.0, (loop["wait_s"] + loop["step_s"]) / turn_s)


def _tune(run: _Run, results: Mapping[str, Any]) -> Step:
    """The fastest recipe within the limits, beginning with what the diagnosis named."""
    settings = run.settings
    options = Options(
        limits=settings.limits, budget_s=settings.budget_s, techniques=settings.techniques, mode=settings.mode,
        output=run.folder / "tune", first=tuple(results.get("first", ())), atlas=settings.atlas,
    )  # fmt: skip
    result = tune(run.target, options=options, on_progress=run.on_progress, command=run.command)
    paths = save(result, run.folder / "tune")
    _go_on(result)
    winner = result.winner
    changed = winner is not None and bool(winner.recipe.levels)
    lines = list(result.notes)
    speedup = winner.known_speedup if winner is not None and winner.recipe.levels else None
    if "loop" in results and speedup is not None:
        most = _through(results["loop"], speedup.estimate)
        if most < _LETS_THROUGH * speedup.estimate:
            lines.append(f"the loop that was measured with its loader gains {most:.2f}x of it at most: data is late")
    return Step(
        name="tune", says=verdict(result), lines=lines, files=[f"tune/{path.name}" for path in paths],
        speedup=speedup, under=under(winner, given=result.baseline) if winner is not None else "",
        results={"recipe": str(result.recipe)} if changed else {},
        passes_on=f"to verify and package: {result.recipe}" if changed else "",
    )  # fmt: skip


def _verify(run: _Run, results: Mapping[str, Any]) -> Step:
    """The recipe again, in fresh processes and a race of its own, on the workload as it is now."""
    if "recipe" not in results:
        return Step(name="verify", status="skipped", says="there is no recipe to verify")
    compared = check(
        run.target, run.folder / "tune" / "recipe.toml", mode=run.settings.mode, on_progress=run.on_progress
    )
    _go_on(compared)
    trial = compared.trials[1]
    if trial.status != "measured":
        return Step(name="verify", status="failed", says=f"{trial.recipe} is {trial.status}: {trial.reason}")
    known = trial.known_speedup is not None
    kept = known and compared.verdicts[1] != "slower"
    holds = "it holds" if compared.verdicts[1] == "faster" else "whether it is faster is open"
    pace = f"is {interval(trial.speedup)} as fast as given" if known else (
        "could not be compared with the workload as given, as others had too much of the machine"
    )  # fmt: skip
    beside = under(trial, given=compared.trials[0])
    says = f"{beside}{trial.recipe} {pace}, with {trial.accuracy.distance or 'answers that were not compared'}."
    return Step(name="verify", status="done" if kept else "failed", says=f"{says} {elapsed(trial)}".rstrip(),
                speedup=trial.speedup, under=beside,
                results={"verified": kept}, passes_on=f"to package: {holds}" if kept else "")  # fmt: skip


def _package(run: _Run, results: Mapping[str, Any]) -> Step:
    """The model with its recipe, ready to be served."""
    target = replace(find_target(run.target), mode=run.settings.mode)
    if "recipe" not in results or not results.get("verified", "verify" in run.settings.skip):
        return Step(name="package", status="skipped", says="there is no recipe that held")
    tuned = load_recipe(run.folder / "tune" / "recipe.toml")
    path = run.folder / "package"
    with run.quietly():
        made, mode = make(target)
        if mode == "training":
            return Step(name="package", status="skipped", says="a training loop is not served")
        workload = target.load(made)
        if workload.parts:
            says = "a pipeline is not served as one model: 'fettle serve package' takes the part that is"
            return Step(name="package", status="skipped", says=says)
        if (path / "manifest.json").is_file():  # of an earlier run, for another recipe; any other folder is the user's
            shutil.rmtree(path, ignore_errors=True)
        written = write_package(workload, tuned.recipe, path, name=name_for(target.name), evidence=tuned.evidence,
                                on_progress=run.say)  # fmt: skip
    error = written.manifest.accuracy["relative_error"]
    size = sum(item.stat().st_size for item in path.rglob("*") if item.is_file())
    says = f"A package of {size_text(size)} is written, with a relative error of {error:.2g}."
    return Step(name="package", says=says, lines=[f"fettle serve {shlex.quote(str(path))}"], files=["package"])


_DOES: Mapping[str, Callable[[_Run, Mapping[str, Any]], Step]] = {
    "measure": _measure, "diagnose": _diagnose, "data": _data, "tune": _tune, "verify": _verify, "package": _package,
}  # fmt: skip
