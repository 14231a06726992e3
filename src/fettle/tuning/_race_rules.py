"""The rules that a study's races go by."""

from __future__ import annotations

from dataclasses import replace

import psutil

from fettle.measure import Rules
from fettle.techniques import Facts
from fettle.tuning.options import Options

_ENERGY_SLICE_S = 0.5
"""A GPU's counter is renewed every 20 to 100 ms (Yang, Adamek and Armour, *Part-time Power Measurements*, 2023): in the
usual slice it may not move at all."""
_SMALL_SHARE = 1 / 32
"""Share of the memory: weights of no more than that may be built in two processes side by side."""


def rules_of(options: Options) -> Rules:
    """What the options, the goal above all, ask of every race."""
    effort = options.effort
    rules = Rules(
        effort.slice_s, effort.rounds, options.confidence, prepare_timeout_s=options.trial_timeout_s,
        under_load=options.under_load,
    )  # fmt: skip
    if options.polite:
        rules = replace(rules, may_go_first=False)
    if options.goal in ("ttft", "tpot"):
        rules = replace(rules, part=options.goal)
    if options.goal == "warm-startup":
        rules = replace(rules, replicates=2)
    if options.goal == "energy":
        rules = replace(rules, slice_s=_ENERGY_SLICE_S)
    return rules


def abreast(facts: Facts) -> int:
    """How many processes import and build side by side: two of a small workload, where there are cores for it."""
    small = facts.parameter_bytes <= _SMALL_SHARE * psutil.virtual_memory().total
    return 2 if facts.ranks == 1 and facts.physical_cores > 1 and small else 1
