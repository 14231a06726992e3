"""The probe: what the first worker finds out about the workload, once a study."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from fettle.errors import UsageError
from fettle.measure import Worker, WorkerError, messages
from fettle.result import Advice, Reference
from fettle.study import Study
from fettle.techniques import Facts


@dataclass(frozen=True)
class Probed:
    """What the first worker found out about the workload."""

    facts: Facts
    fingerprint: str
    reference: Reference
    reference_path: Path
    """The reference outputs."""
    has_metric: bool
    peaks: Mapping[str, float]
    """What this machine reaches, as `fettle.machine.Machine.peaks`."""
    advice: Sequence[Advice]
    """What a first look at the workload advised, the most promising first."""
    features: Mapping[str, Any] = field(default_factory=dict)
    """What that look saw of the model, as an atlas has it; empty where there was none."""


@dataclass(frozen=True)
class _Kept:
    """The same as a note of the study."""

    facts: Facts
    has_metric: bool
    peaks: Mapping[str, float]
    advice: Sequence[Advice]
    reference: messages.Reference
    features: Mapping[str, Any] = field(default_factory=dict)


def probe(
    worker: Worker, study: Study, path: Path, fingerprint: str, allow_batch: bool, timeout_s: float, look_s: float
) -> Probed:
    """Probe the workload that `worker` has built, or recall what an earlier run of the study found.

    The reference answers are written to `path`.

    The first look, which only puts the most promising techniques first, is left out where it would take more than
    about `look_s`: it makes about twice as many calls as finding the facts does.
    """
    kept = _recalled(study) if path.is_file() else None
    if kept is None:
        began = time.monotonic()
        found = worker.ask(messages.Probe(allow_batch), messages.Probed, timeout_s)
        affordable = 2 * (time.monotonic() - began) <= look_s
        peaks = worker.ask(messages.MeasurePeaks(), messages.Peaks, timeout_s).peaks
        # before the reference, which turns the model into another dtype
        told, features = _first_look(worker) if affordable else ([], {})
        reference = worker.ask(messages.WriteReference(str(path)), messages.Reference, timeout_s)
        kept = _Kept(found.facts, found.has_metric, peaks, told, reference, features)
        study.set_note("probe", msgspec.to_builtins(kept))
    written = kept.reference
    if kept.has_metric and written.metric_problem:
        raise UsageError(f"the workload's metric does not work on the model as given: {written.metric_problem}")
    return Probed(
        facts=replace(kept.facts, allow_batch=allow_batch),
        fingerprint=fingerprint,
        reference=Reference(
            dtype=written.dtype,
            why=written.why,
            noise=written.noise,
            metric=math.nan if written.metric is None else written.metric,
            perplexity=math.nan if written.perplexity is None else written.perplexity,
            prefill_flops=written.prefill_flops,
            decode_flops=written.decode_flops,
            curves=written.curves,
            spread=math.nan if written.spread is None else written.spread,
        ),
        reference_path=path,
        has_metric=kept.has_metric,
        peaks=kept.peaks,
        advice=kept.advice,
        features=kept.features,
    )


def _recalled(study: Study) -> _Kept | None:
    try:
        return msgspec.convert(study.note("probe"), _Kept)
    except msgspec.ValidationError:  # none yet, or another version's
        return None


def _first_look(worker: Worker) -> tuple[list[Advice], Mapping[str, Any]]:
    """What the findings of a short diagnosis advise, and the model's features; nothing where it cannot be watched."""
    from fettle.atlas import model_features
    from fettle.diagnose import Evidence, advice, findings_of

    try:
        examined = worker.ask(messages.Examine("fettle.diagnose.collect:glance"), messages.Examined, 120.0)
    except (WorkerError, UsageError):
        return [], {}
    evidence = examined.read(Evidence)
    return list(advice(findings_of(evidence))), model_features(evidence)
