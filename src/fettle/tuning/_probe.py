"""The probe: what the first worker finds out about the workload, once a study; and the memory plan of a study on
several ranks, made before any parallel strategy is launched."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from fettle.atlas import model_features
from fettle.errors import UsageError
from fettle.measure import Worker, WorkerError, messages
from fettle.procs.limits import total_memory_bytes
from fettle.recipe import Recipe
from fettle.result import Advice, PlanRow, Reference
from fettle.study import Study
from fettle.techniques import Facts, machine_facts, uses_ranks

if TYPE_CHECKING:
    from fettle.parallel.plan import Plan

_UNUSED_S = 30 * 86400.0


@dataclass(frozen=True)
class Probed:
    """What the first worker found out about the workload; kept as a note of the study."""

    facts: Facts
    has_metric: bool
    peaks: Mapping[str, float]
    """What this machine reaches, as `fettle.machine.Machine.peaks`."""
    advice: Sequence[Advice]
    """What a first look at the workload advised, the most promising first."""
    reference: messages.Reference
    features: Mapping[str, Any] = field(default_factory=dict)
    """What that look saw of the model, as an atlas has it; empty where there was none."""
    fingerprint: str = ""
    reference_path: str = ""
    """The reference outputs."""
    look_s: float = 0.0
    """Where the first look would have taken too long, what it was thought to take; 0 where it was made."""


def probe(
    worker: Worker, study: Study, path: Path, fingerprint: str, allow_batch: bool, timeout_s: float, look_s: float
) -> Probed:
    """Probe the workload that `worker` has built, or recall what an earlier run of the study found.

    The reference answers are written to `path`.

    The first look, which only puts the most promising techniques first, is left out where it would take more than
    about `look_s`: it makes about twice as many calls as finding the facts does. With none of that, what the machine
    reaches is not measured either. A later run that has the time makes up for it.
    """
    kept = _recalled(study) if path.is_file() else None
    if kept is not None and allow_batch and kept.facts.mode == "training" and not kept.facts.largest_batch:
        kept = None  # that run did not ask how large the batch may be
    if kept is None:
        began = time.monotonic()
        probed = worker.ask(messages.Probe(allow_batch), messages.Probed, timeout_s)
        # before the reference, which turns the model into another dtype
        look = _look(worker, 2 * (time.monotonic() - began), look_s, timeout_s)
        reference = worker.ask(messages.WriteReference(str(path)), messages.Reference, timeout_s)
        kept = Probed(probed.facts, probed.has_metric, reference=reference, **look)
        study.set_note("probe", msgspec.to_builtins(kept))
    elif 0 < kept.look_s <= look_s:
        kept = replace(kept, **_look(worker, kept.look_s, look_s, timeout_s))
        study.set_note("probe", msgspec.to_builtins(kept))
    _let_go(path)
    if kept.has_metric and (problem := kept.reference.metric_problem):
        raise UsageError(f"the workload's metric does not work on the model as given: {problem}")
    facts = replace(kept.facts, allow_batch=allow_batch)
    return replace(kept, facts=facts, fingerprint=fingerprint, reference_path=str(path))


def judged_against(written: messages.Reference) -> Reference:
    """What answers are judged against, as a result has it."""
    known = {item.name: getattr(written, item.name) for item in fields(Reference)}
    numbers: dict[str, Any] = {name: math.nan if value is None else value for name, value in known.items()}
    return Reference(**numbers)


def _let_go(used: Path) -> None:
    """Note that a reference is used, and delete those beside it that nobody has used for a month: of models that have
    been edited since. Whoever wants one again computes it again."""
    with contextlib.suppress(OSError):  # another process was first
        os.utime(used)
        for path in used.parent.glob("reference-*.pt"):
            if time.time() - path.stat().st_mtime > _UNUSED_S:
                path.unlink()


def judged_by(facts: Facts, max_error: float | None, has_metric: bool) -> Facts:
    """The facts under what judges answers: an error, or the user's metric alone."""
    if max_error is None:
        parts = {name: replace(part, by_metric=has_metric) for name, part in facts.parts.items()}
        return replace(facts, by_metric=has_metric, parts=parts)
    parts = {name: replace(part, max_error=max_error) for name, part in facts.parts.items()}
    return replace(facts, max_error=max_error, parts=parts)


def _recalled(study: Study) -> Probed | None:
    """What an earlier run found, with what is installed today. What levels learned is for trials to say."""
    try:
        kept = msgspec.convert(study.note("probe"), Probed)
    except msgspec.ValidationError:  # none yet, or another version's
        return None
    here = machine_facts()

    def today(facts: Facts) -> Facts:
        parts = {name: today(part) for name, part in facts.parts.items()}
        return replace(facts, packages=here.packages, libraries=here.libraries, learned={}, parts=parts)

    return replace(kept, facts=today(kept.facts))


def _look(worker: Worker, needed_s: float, affordable_s: float, timeout_s: float) -> dict[str, Any]:
    """What a run that can afford so much finds by looking, as fields of `Probed`."""
    peaks = worker.ask(messages.MeasurePeaks(), messages.Peaks, timeout_s).peaks if affordable_s else {}
    if needed_s > affordable_s:
        return {"peaks": peaks, "advice": [], "look_s": needed_s}
    advice, features = _first_look(worker)
    return {"peaks": peaks, "advice": advice, "features": features, "look_s": 0.0}


def _first_look(worker: Worker) -> tuple[list[Advice], Mapping[str, Any]]:
    """What the findings of a short diagnosis advise, and the model's features; nothing where it cannot be watched."""
    from fettle.diagnose import Evidence, advice, findings_of

    try:
        examined = worker.ask(messages.Examine("fettle.diagnose.collect:glance"), messages.Examined, 120.0)
    except (WorkerError, UsageError):
        return [], {}
    evidence = examined.read(Evidence)
    return list(advice(findings_of(evidence))), model_features(evidence)


@dataclass(frozen=True)
class MemoryPlan:
    """What the plan predicted, and what it rules out."""

    made: Plan | None = None
    note: str = ""
    """How it was made, or why it could not be."""

    def rules_out(self, recipe: Recipe) -> str:
        """Why the plan says that a recipe cannot fit; empty where it may, or nobody knows."""
        if self.made is None or not uses_ranks(recipe):
            return ""
        from fettle.parallel.study import rules_out

        return rules_out(self.made, recipe.levels)

    def rows(self) -> tuple[PlanRow, ...]:
        """The predictions for the report."""
        if self.made is None:
            return ()
        memory = self.made.device_memory_bytes
        limit = None if memory is None else int(memory * (1 - self.made.headroom))
        return tuple(
            PlanRow(each.strategy, each.peak_bytes, each.parts, limit, each.collectives, each.sent_bytes, each.failed)
            for each in self.made.predictions
        )


def plan_memory(
    worker: Worker, study: Study, ranks: int, nodes: int, facts: Facts, device_memory_bytes: int | None,
    on_progress: Callable[[str], None],
) -> MemoryPlan:  # fmt: skip
    """Plan the parallel strategies of training over `ranks`, or recall the plan of an earlier run of the study."""
    before = study.note("ranks"), study.note("nodes") or 1
    if ranks > 1 and before[0] is not None and before != (ranks, nodes):
        held = f"{before[0]} ranks" + (f" of {before[1]} nodes" if before[1] > 1 else "")
        raise UsageError(f"the study {study.name!r} holds trials on {held}: choose another `study`")
    if ranks == 1:
        return MemoryPlan()
    study.set_note("ranks", ranks)
    study.set_note("nodes", nodes)
    if facts.mode != "training":
        if why_not := facts.tensor.why_not_over(ranks):
            raise UsageError(f"`nproc={ranks}`: the model cannot be split: {why_not}")
        if device_memory_bytes is not None:
            raise UsageError("`device_memory_bytes` is for training, and this is a workload for inference")
        return MemoryPlan()
    memory = device_memory_bytes or _memory_of_rank(facts.device, ranks // nodes)
    key = f"plan {ranks} {memory}" if device_memory_bytes else f"plan {ranks}"
    from fettle.parallel.plan import Plan

    try:
        kept = study.note(key)
        kind = Plan | None if "lasts" in kept else Plan  # earlier versions kept what had failed in passing, too
        return MemoryPlan(msgspec.convert(kept["plan"], kind), kept["note"])
    except (TypeError, KeyError, msgspec.ValidationError):  # none yet, or another version's
        on_progress(f"planning the memory of {ranks} ranks")
    try:
        planned = worker.ask(messages.MakePlan(ranks, nodes, memory), messages.Planned, 300.0)
        plan = MemoryPlan(msgspec.msgpack.decode(planned.plan, type=Plan), planned.note)
    except (WorkerError, UsageError) as error:
        plan = MemoryPlan(None, f"the memory could not be planned: {error}")
        if isinstance(error, WorkerError) and error.kind != "error":  # it ended, or took too long: this once, maybe
            return plan
    study.set_note(key, {"plan": msgspec.to_builtins(plan.made), "note": plan.note, "lasts": True})
    return plan


def _memory_of_rank(device: str, each: int) -> int:
    """Bytes that one of the ranks of a node may fill: its GPU, or its share of this machine."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    return total_memory_bytes() // each
