"""Diagnose: why is it slow, why is it big, what to do about it, and was the advice right.

Evidence is gathered in worker processes (`collect`, by the functions of `collectors`; `compile_worker`) or read from
traces and snapshots; `rules` turn it into findings, the costliest first. A finding states the most that mending it
could bring, and `fettle.verifying` compares that bound with what the fix then brought.
"""

from __future__ import annotations

import sys
from types import ModuleType

from fettle.diagnose.collectors.compile_watch import watch_compile
from fettle.diagnose.collectors.sync_modes import SyncReport
from fettle.diagnose.collectors.syncs import confirm, find_cuda_syncs, find_syncs, watch_syncs
from fettle.diagnose.compile_health import CompileHealth
from fettle.diagnose.compile_worker import compile_health
from fettle.diagnose.diagnosis import Diagnosis, diagnose, diagnosis_json
from fettle.diagnose.evidence import Evidence, Operation, Sync
from fettle.diagnose.finding import Finding, Verified, advice, with_gains
from fettle.diagnose.roofline import Roof, Roofline, roofline
from fettle.diagnose.rules import RULES
from fettle.diagnose.rules import findings as findings_of

__all__ = [
    "RULES", "CompileHealth", "Diagnosis", "Evidence", "Finding", "Operation", "Roof", "Roofline", "Sync",
    "SyncReport", "Verified", "advice", "compile_health", "confirm", "diagnose", "diagnosis_json",
    "find_cuda_syncs", "find_syncs", "findings_of", "roofline", "watch_compile", "watch_syncs", "with_gains",
]  # fmt: skip


class _Room(ModuleType):
    """`fettle.diagnose(model, inputs)` is `fettle.diagnose.diagnose`, as `fettle.tune` is called by its name."""

    __call__ = staticmethod(diagnose)


sys.modules[__name__].__class__ = _Room
