"""The rules that a study's races go by."""

from __future__ import annotations

import torch

from fettle.measure import Rules, may_go_first
from fettle.procs.limits import total_memory_bytes
from fettle.techniques import Facts
from fettle.tuning.options import Options

_ENERGY_SLICE_S = 0.5
"""A GPU's counter is renewed every 20 to 100 ms (Yang, Adamek and Armour, *Part-time Power Measurements*, 2023): in the
usual slice it may not move at all."""
_SMALL_SHARE = 1 / 32
"""Share of the memory: weights of no more than that may be built in two processes side by side."""


def rules_of(options: Options) -> Rules:
    """What the options, the goal above all, ask of every race."""
    effort, goal = options.effort, options.goal
    return Rules(
        slice_s=_ENERGY_SLICE_S if goal == "energy" else effort.slice_s,
        max_rounds=effort.rounds,
        confidence=options.confidence,
        prepare_timeout_s=options.trial_timeout_s,
        may_go_first=may_go_first() and not options.polite,
        under_load=options.under_load,
        part=goal if goal in ("ttft", "tpot") else "",
        replicates=2 if goal == "warm-startup" else 1,
    )


def abreast(facts: Facts) -> int:
    """How many processes import and build side by side: two of a small workload, where there are cores for it."""
    memory = total_memory_bytes()
    if facts.device == "cuda" and torch.cuda.is_available():
        memory = min(memory, torch.cuda.get_device_properties(0).total_memory)
    small = facts.parameter_bytes <= _SMALL_SHARE * memory
    return 2 if facts.ranks == 1 and facts.physical_cores > 1 and small else 1
