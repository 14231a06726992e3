"""The probe: what the first worker finds out about the workload, once a study."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from fettle.errors import UsageError
from fettle.measure import Worker, WorkerError
from fettle.result import Advice, Reference
from fettle.study import Study
from fettle.techniques import Facts

_NEEDED = {"facts", "has_metric", "peaks", "reference"}


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


def probe(
    worker: Worker, study: Study, path: Path, fingerprint: str, allow_batch: bool, timeout_s: float, look_s: float
) -> Probed:
    """Probe the workload that `worker` has built, or recall what an earlier run of the study found.

    The reference answers are written to `path`.

    The first look, which only puts the most promising techniques first, is left out where it would take more than
    about `look_s`: it makes about twice as many calls as finding the facts does.
    """
    kept = study.note("probe")
    if isinstance(kept, dict) and kept.keys() >= _NEEDED and path.is_file():
        found = msgspec.convert(kept, dict[str, Any])
    else:
        began = time.monotonic()
        found = worker.ask("probe", timeout_s, allow_batch=allow_batch)
        affordable = 2 * (time.monotonic() - began) <= look_s
        found["peaks"] = worker.ask("peaks", timeout_s)
        found["advice"] = (
            _first_look(worker) if affordable else []
        )  # before the reference, which turns the model into another dtype
        found["reference"] = worker.ask("reference", timeout_s, path=str(path))
        study.set_note("probe", found)
    written = found["reference"]
    if found["has_metric"] and written["metric_problem"]:
        raise UsageError(f"the workload's metric does not work on the model as given: {written['metric_problem']}")
    reference = Reference(
        dtype=written["dtype"],
        why=written["why"],
        noise=written["noise"] or 0.0,
        metric=math.nan if written["metric"] is None else written["metric"],
        perplexity=math.nan if written.get("perplexity") is None else written["perplexity"],
        prefill_flops=written.get("prefill_flops", 0),
        decode_flops=written.get("decode_flops", 0),
        curves=written.get("curves", ()),
        spread=written.get("spread", math.nan),
    )
    return Probed(
        facts=replace(msgspec.convert(found["facts"], Facts), allow_batch=allow_batch),
        fingerprint=fingerprint,
        reference=reference,
        reference_path=path,
        has_metric=found["has_metric"],
        peaks=found["peaks"],
        advice=msgspec.convert(found.get("advice", []), list[Advice]),
    )


def _first_look(worker: Worker) -> list[dict[str, Any]]:
    """What the findings of a short diagnosis advise, as plain data; nothing where the workload cannot be watched."""
    from fettle.diagnose import Evidence, advice, findings_of

    try:
        answer = worker.ask("examine", 120.0, label="fettle.diagnose.collect:glance")
    except (WorkerError, UsageError):
        return []
    found = findings_of(msgspec.convert(answer["found"], Evidence, strict=False))
    return [msgspec.to_builtins(item) for item in advice(found)]
