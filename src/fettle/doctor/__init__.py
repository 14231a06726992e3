"""What is wrong or unsafe in the environment that a model runs in.

A check is a small function in a family file, registered by its decorator: it looks at an `Environment`, plain facts
that `this_environment` reads from the machine and a test makes up, and yields findings. No package that is examined is
imported.
"""

from __future__ import annotations

from fettle.doctor import (  # each registers its checks
    allocator,
    caches,
    cpu,
    distributed,
    input,
    precision,
    supply_chain,
    variables,
    versions,
)
from fettle.doctor._check import CHECKS, LEVELS, Check, Finding, Level
from fettle.doctor.advisories import Advisories, read_advisories, shipped_advisories
from fettle.doctor.environment import Environment, Files, Gpu, Package, this_environment
from fettle.doctor.program import Loader, Model, Program, this_program

__all__ = [
    "CHECKS", "LEVELS", "Advisories", "Check", "Environment", "Files", "Finding", "Gpu", "Level", "Loader", "Model",
    "Package", "Program", "allocator", "caches", "cpu", "distributed", "examine", "input",
    "precision", "read_advisories", "shipped_advisories", "spoilers", "supply_chain", "this_environment",
    "this_program", "variables", "versions",
]  # fmt: skip


def examine(here: Environment, *, quick: bool = False) -> list[Finding]:
    """What all checks find, or the quick ones, errors first."""
    findings = [finding for check in CHECKS.values() if check.is_quick or not quick for finding in check(here)]
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def spoilers(here: Environment | None = None) -> list[Finding]:
    """What would spoil the figures of a measurement in this environment, by the quick checks: errors and warnings."""
    findings = examine(here or this_environment(quick=True), quick=True)
    return [finding for finding in findings if finding.level != "note"]
