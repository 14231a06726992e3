"""fettle doctor: what is wrong or unsafe in this environment."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fettle.cli import _options, _quiet, _show
from fettle.doctor import (
    CHECKS,
    LEVELS,
    Advisories,
    Environment,
    Finding,
    examine,
    read_advisories,
    shipped_advisories,
    supply_chain,
    this_environment,
    this_program,
)
from fettle.errors import UsageError
from fettle.files import read_text
from fettle.units import count_text

_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def command(
    target: Annotated[
        str, typer.Argument(help="path/to/file.py:factory, to look at what the program sets and builds too")
    ] = "",
    fail_on: Annotated[
        str, typer.Option(help="exit code 1 from this level up: error, warning, note, or never")
    ] = "error",
    ignore: Annotated[list[str] | None, typer.Option(help="leave out a check by its name. May be repeated")] = None,
    advisories: Annotated[
        Path | None,
        typer.Option(help="a newer list of compromised releases, in place of the one that ships with fettle"),
    ] = None,
    lock: Annotated[
        Path | None, typer.Option(help="look at what this file pins (requirements, constraints), and at nothing else")
    ] = None,
    as_json: _options.AsJson = False,
) -> None:
    """Check the environment that a model runs in: what costs speed or is unsafe, why, and the command that fixes it.

    Versions, allocator settings, debug switches, threads, precision, data, NCCL, compile caches, and packages against a
    list of compromised releases. No package that is checked is imported.

    Exit code 1: something was found that is an error, or of the level of --fail-on.

    fettle doctor
    fettle doctor train.py:workload
    fettle doctor --fail-on warning --ignore busy-neighbour --json
    fettle doctor --lock requirements.lock
    """
    if fail_on not in (*LEVELS, "never"):
        raise UsageError(f"--fail-on {fail_on}: write {', '.join(LEVELS)} or never")
    left_out = sorted(set(ignore or ()))
    for name in left_out:
        if name not in CHECKS:
            raise UsageError(f"--ignore {name}: there is no such check; --json names those that found something")
    known = read_advisories(advisories) if advisories else shipped_advisories()
    if lock is not None:
        if target or left_out:
            raise UsageError("--lock looks at that file alone: leave out TARGET and --ignore")
        _audit(lock, known, fail_on, as_json)
        return
    with _show.status_line("looking at the environment", quiet=as_json) as show:
        here = this_environment(known)
        if target and not any(here.compromised()):  # what is compromised is not imported
            from fettle.workload import find_target

            show(f"building {target}")
            with _quiet.users_code_quiet():
                program = this_program(find_target(target).make())
            here = replace(here, program=program, variables=dict(os.environ))
            target = ""
        findings = [finding for finding in examine(here) if finding.check not in left_out]
    age = (here.today - known.checked).days
    data = {
        "findings": findings, "checks": len(CHECKS) - len(left_out), "ignored": left_out,
        "advisories": {"checked": str(known.checked), "age_days": age, "releases": len(known.advisory)},
    }  # fmt: skip
    _show.answer(as_json, lambda: data, lambda console: _print(console, findings))
    if not as_json:
        counts = [count_text(count, level) for level, count in Counter(one.level for one in findings).items()]
        summary = ", ".join(counts) or "Nothing found"
        print(f"{summary}: {data['checks']} checks; compromised releases known up to {known.checked} ({age} days ago).")
        if target:
            print(f"{target} was not built, because a compromised release is installed.")
    _leave(findings, fail_on)


def _audit(lock: Path, known: Advisories, fail_on: str, as_json: bool) -> None:
    """Hold what a lock pins against the advisories."""
    packages = supply_chain.locked(read_text(lock))
    if not packages:
        raise UsageError(f"{lock} pins nothing: it has no line such as torch==2.13.0")
    findings = list(supply_chain.pinned(Environment(packages=packages, advisories=known), str(lock)))
    data = {"findings": findings, "pins": len(packages), "advisories": {"checked": str(known.checked)}}
    _show.answer(as_json, lambda: data, lambda console: _print(console, findings))
    if not as_json:
        print(f"{lock}: {len(packages)} pins, {len(findings) or 'none'} of them compromised releases known up to "
              f"{known.checked}.")  # fmt: skip
    _leave(findings, fail_on)


def _leave(findings: list[Finding], fail_on: str) -> None:
    worst = LEVELS.index(fail_on) if fail_on != "never" else -1
    _show.leave(missed=any(LEVELS.index(finding.level) <= worst for finding in findings))


def _print(console: Console, findings: list[Finding]) -> None:
    for finding in findings:
        style = _STYLES[finding.level]
        console.print(f"[{style}]{finding.level}[/] [bold]{_shown(finding.seen)}[/]", soft_wrap=True)
        console.print(f"  {_shown(finding.why)} [dim]{finding.check}[/]", soft_wrap=True)
        console.print(f"  → {_shown(finding.mend)}\n", soft_wrap=True)


def _shown(text: str) -> str:
    """Text for a terminal, which is not to obey it: names of packages and files may be anybody's."""
    return escape("".join(letter if letter.isprintable() else "\ufffd" for letter in text))
