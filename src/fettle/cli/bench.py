"""fettle bench TARGET: compare named recipes, revisions of the code or environments in one interleaved race."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fettle.cli import _options, _show
from fettle.errors import UsageError

if TYPE_CHECKING:
    from fettle.gate import Settings

CANNOT_TELL = 3
"""Exit code of a gate that cannot tell."""


def command(
    ctx: typer.Context,
    target: _options.Target,
    recipe: Annotated[
        list[str] | None, typer.Option(help="'TECHNIQUE=LEVEL ...', 'baseline', or a recipe.toml. May be repeated")
    ] = None,
    against: Annotated[
        str, typer.Option(help="gate: the working tree's code against this git revision of it, such as main")
    ] = "",
    against_python: Annotated[
        str, typer.Option(help="gate: this environment against that of another Python, its path or folder")
    ] = "",
    bisect: Annotated[str, typer.Option(help="GOOD..BAD: find the commit in between that made it slower")] = "",
    fail_slower: Annotated[
        str | None, typer.Option(help="gate: exit code 1 if it takes this much longer; default 3%")
    ] = None,
    fail_memory: Annotated[
        str | None, typer.Option(help="gate: exit code 1 if its peak memory grows by this much, for example 5%")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="gate: processes of each side; default 4, then 8 and 16 if those do not decide")
    ] = None,
    link: Annotated[
        list[Path] | None,
        typer.Option(help="gate: a path outside git, such as weights/, that the revision needs too. May be repeated"),
    ] = None,
    same_environment: Annotated[
        bool, typer.Option("--same-environment", help="gate: build no other one for a revision whose lock file differs")
    ] = False,
    mode: _options.Mode = "auto",
    nproc: _options.Nproc = 1,
    under_load: _options.UnderLoad = False,
    polite: _options.Polite = False,
    max_error: _options.MaxError = None,
    max_metric_drop: _options.MaxMetricDrop = None,
    confidence: Annotated[float, typer.Option(help="share of intervals that hold the true ratio")] = 0.95,
    rounds: Annotated[int, typer.Option(help="most rounds of the race")] = 48,
    budget: Annotated[str, typer.Option(help="time for the whole race, for example 2m; 0 for no limit")] = "0",
    trial_timeout: _options.TrialTimeout = "15m",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="gate: folder of its history; default fettle-gate")
    ] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="gate: print Markdown, for a comment")] = False,
    as_json: _options.AsJson = False,
) -> None:
    """Compare named recipes side by side, each against the workload as given; or, as a gate, code and environments.

    Exit code 1: a recipe did not run, or its answers are off; the code is slower or bigger than a limit of the gate.
    Exit code 3: the gate, or the bisection, cannot tell; it says what would settle it.

    fettle bench model.py --recipe "precision=bf16" --recipe "precision=bf16 compile=default"
    fettle bench model.py --recipe baseline        # against itself: says "same"
    fettle bench model.py --against main --fail-slower 3% --fail-memory 5%
    fettle bench model.py --against-python old-venv/bin/python
    fettle bench model.py --bisect v1.2..HEAD --fail-slower 5%
    """
    is_gate = bool(against or against_python or bisect)
    races = ("--recipe", "--max-error", "--max-metric-drop", "--trial-timeout")
    gates = ("--fail-slower", "--fail-memory", "--processes", "--link", "--output", "--markdown", "--same-environment")
    _options.check_given(
        ctx,
        (is_gate, races, "for recipes: revisions run as they are"),
        (not is_gate, gates, "for a gate: name what to compare with, --against REVISION"),
        (bool(bisect), ("--fail-memory", "--processes"), "for --against: --bisect looks for what made it slower"),
    )
    if is_gate:
        if nproc != 1:
            raise UsageError("--nproc is for recipes: revisions run as one process")
        if bisect and (against or against_python):
            raise UsageError("--bisect compares the commits of GOOD..BAD: leave --against and --against-python out")
        if as_json and as_markdown:
            raise UsageError("choose --json or --markdown")
        if not (against or bisect) and (link or same_environment):
            raise UsageError("--link and --same-environment are for another revision: name it with --against")
        from fettle.gate import Settings

        settings = Settings(
            Settings.fail_slower if fail_slower is None else _options.share(fail_slower, "--fail-slower", below=10),
            None if fail_memory is None else _options.share(fail_memory, "--fail-memory", below=10),
            processes, confidence, rounds, _options.duration_s(budget, "--budget") or None, mode, tuple(link or ()),
            same_environment, _options.output_folder(output or Settings.output), under_load, polite,
        )  # fmt: skip
        if bisect:
            _bisect(target, bisect, settings, as_json, as_markdown)
        else:
            _gate(target, against, against_python, settings, as_json, as_markdown)
        return
    from fettle.comparing import bench, comparison_json
    from fettle.report import progress
    from fettle.result import limits_given

    with progress(quiet=as_json) as show:
        comparison = bench(
            target, recipe or ["baseline"], on_progress=show, mode=mode, nproc=nproc, confidence=confidence,
            limits=limits_given(max_error=max_error, max_metric_drop=max_metric_drop), max_rounds=rounds,
            budget_s=_options.duration_s(budget, "--budget") or None, under_load=under_load, polite=polite,
            trial_timeout_s=_options.duration_s(trial_timeout, "--trial-timeout"),
        )  # fmt: skip
    _show.answer(as_json, lambda: comparison_json(comparison), lambda out: _show.print_comparison(out, comparison))
    _show.leave(interrupted=comparison.interrupted, missed=comparison.failed)


def _gate(target: str, against: str, against_python: str, settings: Settings, as_json: bool, as_markdown: bool) -> None:
    from fettle.gate import gate, gate_json, headline, lines, markdown, table
    from fettle.report import progress

    with progress(quiet=as_json) as show:
        gated = gate(target, against, against_python=against_python, settings=settings, on_progress=show)

    def say(console: Any) -> None:
        console.print(headline(gated), markup=False, soft_wrap=True)
        if gated.judged:
            _show.print_table(console, table(gated))
        for line in lines(gated):
            console.print(line, markup=False, soft_wrap=True)

    if as_markdown:
        print(markdown(gated))
    else:
        _show.answer(as_json, lambda: gate_json(gated), say, settings.output / "gate.html")
    if gated.verdict != "within":
        raise typer.Exit(1 if gated.verdict == "worse" else CANNOT_TELL)


def _bisect(target: str, text: str, settings: Settings, as_json: bool, as_markdown: bool) -> None:
    from fettle.gate import bisect, bisection_json, bisection_lines, bisection_markdown
    from fettle.report import progress

    good, dots, bad = text.partition("..")
    if not good or not dots or bad.startswith("."):
        raise UsageError(f"--bisect {text!r}: write GOOD..BAD, for example v1.2..HEAD")
    with progress(quiet=as_json) as show:
        bisection = bisect(target, good, bad or "HEAD", settings, show)
    if as_markdown:
        print(bisection_markdown(bisection))
    else:
        said = "\n".join(bisection_lines(bisection))
        _show.answer(as_json, lambda: bisection_json(bisection), said, settings.output / "gate.html")
    if not bisection.found and bisection.steps[0].verdict != "fast":
        raise typer.Exit(CANNOT_TELL)
