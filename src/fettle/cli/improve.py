"""fettle improve TARGET: the whole workflow, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fettle.cli import _options, _quiet, _show

if TYPE_CHECKING:
    from fettle.improve import Improvement


def command(
    target: _options.Target,
    data: Annotated[
        str, typer.Option(help="target of the loop's DataLoader, dataset or (loader, step), as for fettle data")
    ] = "",
    skip: Annotated[
        list[str] | None,
        typer.Option(help="leave out a step: measure, diagnose, data, tune, verify or package. May be repeated"),
    ] = None,
    budget: Annotated[str, typer.Option(help="time for tuning, for example 10m; 0 for no limit")] = "15m",
    max_error: _options.MaxError = None,
    max_metric_drop: _options.MaxMetricDrop = None,
    max_kl: _options.MaxKl = None,
    technique: _options.Techniques = None,
    atlas: Annotated[Path | None, typer.Option(help="begin tuning with what this atlas expects")] = None,
    mode: _options.Mode = "auto",
    output: Annotated[Path, typer.Option("--output", "-o", help="folder for what is found")] = Path("fettle-improve"),
    as_json: _options.AsJson = False,
) -> None:
    """Measure, diagnose, find the loader's setting, tune, verify and package; each step's finding feeds the next.

    Writes improve.html with what each step brought, and what the single commands write. Killed or interrupted, the same
    command goes on where it was. Exit code 1: a step could not be done.

    fettle improve model.py
    fettle improve train.py:workload --data train.py:loader --skip package --budget 10m
    """
    from fettle.improve import Settings, improve
    from fettle.report import progress
    from fettle.result import limits_given

    settings = Settings(
        data=data, skip=tuple(skip or ()), budget_s=_options.duration_s(budget, "--budget"),
        limits=limits_given(max_error=max_error, max_metric_drop=max_metric_drop, max_kl=max_kl),
        techniques=_options.levels(technique, "--technique"), atlas=atlas, mode=mode,
        output=_options.output_folder(output),
    )  # fmt: skip
    with progress(quiet=as_json) as show:
        improvement = improve(target, settings, show, quietly=_quiet.users_code_quiet,
                              command=_show.command_line())  # fmt: skip
    shown = {name: getattr(improvement, name) for name in ("target", "headline", "interrupted", "steps")}
    _show.answer(
        as_json, lambda: shown, lambda console: _print(improvement, console), improvement.folder / "improve.html"
    )
    _show.leave(interrupted=improvement.interrupted, missed=improvement.failed)


def _print(improvement: Improvement, console: Console) -> None:
    from fettle.improve.page import TITLES, gain_text

    for number, step in enumerate(improvement.steps, 1):
        gain = f"  [green]{escape(gain_text(step))}[/]" if gain_text(step) else ""
        style = "bold red" if step.status == "failed" else "bold"
        console.print(f"[{style}]{number}. {TITLES[step.name]}[/]{gain}")
        console.print(f"   {escape(step.says)}")
        for line in step.lines:
            console.print(f"   {escape(line)}", style="dim")
        if step.passes_on:
            console.print(f"   → {escape(step.passes_on)}")
    console.print(f"\n[bold]{escape(improvement.headline)}[/]")
