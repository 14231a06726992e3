"""The rules: each a function in a family file, registered by its decorator; `trace` and `snapshot` read files.

A bound is the most that mending the cause could take off the wall time: what is spent there now, less what the machine
would need at its measured peak where that is known. It is a ceiling, not a forecast.
"""

from __future__ import annotations

from dataclasses import replace

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules import compile, data, host, machine, memory, operators  # each registers its rules
from fettle.diagnose.rules._rule import RULES, Rule
from fettle.recipe import Recipe
from fettle.techniques import conflict

__all__ = ["RULES", "Rule", "compile", "data", "findings", "host", "machine", "memory", "operators"]


def findings(evidence: Evidence) -> list[Finding]:
    """What all rules say of the evidence: faults, the costliest first, then opportunities."""
    rules = [rule for rule in RULES.values() if evidence.facts.mode in rule.modes]
    findings = [finding for rule in rules if (finding := rule(evidence)) is not None]
    if evidence.facts.mode == "training":  # levels are named for inference: those a training loop has not are dropped
        findings = [
            replace(item, levels={}) if conflict(Recipe(item.levels), evidence.facts) else item for item in findings
        ]
    return sorted(findings, key=lambda finding: finding.weight, reverse=True)
