"""fettle diagnose TARGET: where the time and memory go, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fettle.cli import _options, _show
from fettle.cli._console import console
from fettle.errors import UsageError
from fettle.files import write_text

if TYPE_CHECKING:
    from fettle.diagnose import Diagnosis, Finding, Verified

_MOST = 8


def command(
    ctx: typer.Context,
    target: Annotated[
        str,
        typer.Argument(help="path/to/file.py:factory, a trace (.json, .json.gz), a snapshot (.pickle), or a folder"),
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="race each finding's fix, and compare it with its bound")
    ] = False,
    fail_on: Annotated[
        str | None,
        typer.Option(help="most that is allowed, by rule: graph-breaks=0,recompiles=0,syncs=0; more is exit code 1"),
    ] = None,
    seconds: Annotated[str, typer.Option(help="time for the timed collectors")] = "6s",
    max_metric_drop: _options.MaxMetricDrop = None,
    budget: Annotated[str, typer.Option(help="time for --verify")] = "3m",
    mode: _options.Mode = "auto",
    no_compile: Annotated[bool, typer.Option("--no-compile", help="do not trace with torch.compile")] = False,
    no_record: Annotated[
        bool, typer.Option("--no-record", help="record no profiler trace and no allocator history")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="write the report to this HTML file, and what was recorded beside it"),
    ] = None,
    as_json: _options.AsJson = False,
) -> None:
    """Say why it is slow or big: the causes that cost most, the most that mending each could bring, and what to do.

    fettle diagnose model.py
    fettle diagnose model.py:classifier --verify --output diagnosis.html
    fettle diagnose loop.py
    fettle diagnose trace.json.gz
    fettle diagnose model.py --fail-on graph-breaks=0,recompiles=0,syncs=0
    """
    from fettle.diagnose import diagnose, diagnosis_json
    from fettle.diagnose.recordings import traces_and_snapshots

    others = _options.given(ctx, "target", "verify", "fail_on", "budget", "max_metric_drop", "output", "as_json")
    if others and traces_and_snapshots(Path(target)):
        raise UsageError(f"{others[0]} goes with a workload: what was recorded is only read")
    allowed, budget_s = _allowed(fail_on), _options.duration_s(budget, "--budget")
    if max_metric_drop is not None and not verify:
        raise UsageError("--max-metric-drop is what a fix may cost: give --verify, which races the fixes")
    if not verify and "--budget" in _options.given(ctx):
        raise UsageError("--budget is the time for racing fixes: give --verify, which races them")
    _options.check_file(output, ".html")
    with _show.status_line("starting", quiet=as_json) as show:
        diagnosis = diagnose(
            target,
            seconds=_options.duration_s(seconds, "--seconds"),
            compile_check=not no_compile,
            record=not no_record,
            beside=output,
            mode=mode,
            on_progress=show,
        )
        checked: list[Verified] = []
        interrupted, trouble = False, None
        try:
            if verify:
                checked, interrupted = _verified(diagnosis, target, max_metric_drop, budget_s, show)
        except UsageError as error:  # what was found is told first
            trouble = error
        if output is not None:
            from fettle.diagnose.report import page

            write_text(output, page(diagnosis, checked, _show.command_line()))
    over = _over(diagnosis, allowed)
    more = {"verified": [_verified_json(item) for item in checked], "over_the_limit": over}
    _show.answer(as_json, lambda: diagnosis_json(diagnosis) | more, lambda out: _print(diagnosis, checked, out), output)
    for line in () if as_json else over:
        console(error=True).print(f"[bold red]limit not kept[/]: {line}")
    if trouble is not None:
        raise trouble
    _show.leave(interrupted=interrupted, missed=bool(over))


def _allowed(text: str | None) -> dict[str, int]:
    """``graph-breaks=0,syncs=2`` as numbers by rule."""
    known = ("graph-breaks", "recompiles", "syncs")
    allowed: dict[str, int] = {}
    for item in () if text is None else text.split(","):
        name, _, number = item.strip().partition("=")
        if name not in known or name in allowed or not re.fullmatch("[0-9]{1,9}", number):
            raise UsageError(f"--fail-on {text!r}: write NAME=NUMBER,... with each name of {', '.join(known)} once")
        allowed[name] = int(number)
    return allowed


def _over(diagnosis: Diagnosis, allowed: Mapping[str, int]) -> list[str]:
    """The limits that are not kept. What was not looked for has not passed."""
    counts = {rule: diagnosis.count(rule) for rule in allowed}
    return [
        f"{rule}: {'not known' if count is None else count}, allowed {allowed[rule]}"
        for rule, count in counts.items()
        if count is None or count > allowed[rule]
    ]


def _verified(
    diagnosis: Diagnosis, target: str, max_metric_drop: float | None, budget_s: float, show: Callable[[str], None]
) -> tuple[list[Verified], bool]:  # fmt: skip
    """Race the fix of each finding; whether that was interrupted. Raises `UsageError` for what cannot be run again."""
    from fettle.verifying import verify

    if diagnosis.evidence is None:
        raise UsageError("--verify needs a workload: a trace or a snapshot cannot be run again")
    facts = diagnosis.evidence.facts
    if facts.mode == "training":
        raise UsageError("--verify is for inference: for a training loop, fettle tune tries what is named here")
    findings = [*diagnosis.findings, *diagnosis.opportunities]
    return verify(target, findings, facts, max_metric_drop=max_metric_drop, budget_s=budget_s, on_progress=show)


def _verified_json(item: Verified) -> dict[str, object]:
    names = ("recipe", "beside", "speedup", "saved", "bound_kept", "also", "problem", "is_quiet", "load",
             "elapsed_speedup")  # fmt: skip
    own = {name: getattr(item, name) for name in names}
    return {"rule": item.finding.rule, "speedup_at_most": item.finding.speedup, **own}


def _print(diagnosis: Diagnosis, checked: Sequence[Verified], console: Console) -> None:
    console.print(f"[bold]{escape(diagnosis.verdict)}[/]\n")
    for note in diagnosis.notes:
        console.print(f"[yellow]note:[/] {escape(note)}")
    _print_times(diagnosis, console)
    fixes = {item.finding.rule: _checked(item) for item in checked}
    _print_findings("Faults", diagnosis.findings, fixes, console)
    tried = ": fettle tune tries them" if diagnosis.evidence else ""
    _print_findings(f"Opportunities{tried}", diagnosis.opportunities, fixes, console)
    _print_watching(diagnosis, console)


def _print_times(diagnosis: Diagnosis, console: Console) -> None:
    if diagnosis.budget:
        wall = f" ({diagnosis.wall_s * 1e3:.4g} ms a call)" if diagnosis.wall_s == diagnosis.wall_s else ""
        console.print(f"Where the time goes{wall}:")
        for name, share in diagnosis.budget_lines:
            if share >= 0.005:
                console.print(f"  {share:6.1%} [cyan]{'█' * round(share * 40)}[/] {escape(name)}")
    if diagnosis.evidence is not None and diagnosis.evidence.facts.parts:
        from fettle.techniques import parts_lines

        console.print("What each part of the pipeline takes:")
        for name, calls, seconds, share, _ in parts_lines(diagnosis.evidence.facts):
            often = f", {calls} calls" if calls > 1 else ""
            console.print(f"  {share:6.1%} {escape(name)}: {seconds * 1e3:.4g} ms{often}")
    roofs = diagnosis.roofline
    if roofs is not None and roofs.mfu_text:
        console.print(f"  {roofs.mfu_text}")


def _print_findings(title: str, findings: Sequence[Finding], fixes: Mapping[str, str], console: Console) -> None:
    if findings:
        console.print(f"\n[bold underline]{title}[/]")
    for place, finding in enumerate(findings[:_MOST], 1):
        console.print(f"\n[bold]{place}. {escape(finding.says)}[/]  [yellow]{finding.most}[/]")
        for line in finding.evidence[: 3 if finding.opportunity else 5]:
            console.print(f"   {escape(line)}", style="dim")
        fix = " ".join(f"{name}={level}" for name, level in finding.levels.items())
        console.print(f"   → {escape(finding.advice)}" + (f"  [green]{escape(fix)}[/]" if fix else ""))
        if finding.rule in fixes:
            console.print(f"   {fixes[finding.rule]}")
    if len(findings) > _MOST:
        console.print(f"\n{len(findings) - _MOST} smaller ones: see --json or the report")


def _print_watching(diagnosis: Diagnosis, console: Console) -> None:
    if diagnosis.watching:
        console.print("\n[bold underline]How the evidence was gathered[/]\n")
    for item in diagnosis.watching:
        console.print(f"{item.what}: {item.cost}", style="dim")
        for line in (item.says, item.command):
            if line:  # a command in one line, to be copied
                console.print(f"   {escape(line)}", style="dim", soft_wrap=line == item.command)


def _checked(item: Verified) -> str:
    from fettle.report import interval

    if item.speedup is None:
        return f"[red]not verified:[/] {escape(item.problem)}"
    bound = "the bounds of all that it answers" if item.also else "the bound"
    words = {
        True: f"[green]within {bound}[/]",
        False: f"[bold red]beyond {bound}: the rule is wrong[/]"
        if item.is_quiet
        else f"[yellow]beyond {bound}: diagnose again on a quiet machine[/]",
        None: f"[yellow]too uncertain to compare with {bound}: give a longer --budget[/]",
    }
    word = words[item.bound_kept]
    over = f" over {escape(item.beside)}" if item.beside else ""
    measured = f"measured {interval(item.speedup)} with {escape(item.recipe)}{over}"
    return f"{item.under}{measured}{item.elapsed}: {word}"
