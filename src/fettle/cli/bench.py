"""fettle bench TARGET: compare named recipes in one interleaved race."""

from __future__ import annotations

from typing import Annotated

import typer

from fettle.cli import _options, _show


def command(
    target: Annotated[str, typer.Argument(help="path/to/file.py:factory or package.module:factory")],
    recipe: Annotated[
        list[str] | None, typer.Option(help="'TECHNIQUE=LEVEL ...', 'baseline', or a recipe.toml. May be repeated")
    ] = None,
    mode: Annotated[str, typer.Option(help=_options.MODE)] = "auto",
    under_load: Annotated[bool, typer.Option(help="time elapsed beside whatever else this machine does")] = False,
    polite: Annotated[bool, typer.Option(help="never go before other processes' work")] = False,
    max_error: Annotated[
        float | None,
        typer.Option(help="largest relative L2 error of the outputs, 0.02; in training, of the losses in spreads, 1"),
    ] = None,
    confidence: Annotated[float, typer.Option(help="share of intervals that hold the true ratio")] = 0.95,
    rounds: Annotated[int, typer.Option(help="most rounds of the race")] = 48,
    budget: Annotated[str, typer.Option(help="time for the whole race, for example 2m; 0 for no limit")] = "0",
    as_json: Annotated[bool, typer.Option("--json", help="print the trials as JSON")] = False,
) -> None:
    """Compare named recipes side by side, each against the workload as given.

    Exit code 1: a recipe did not run, or its answers are off.

    [bold]Examples[/]

      fettle bench model.py --recipe "precision=bf16" --recipe "precision=bf16 compile=default"

      fettle bench model.py --recipe baseline        # against itself: says "same"
    """
    from fettle.comparing import bench, comparison_json
    from fettle.errors import UsageError
    from fettle.report import progress
    from fettle.result import Limits

    if not 0.5 <= confidence < 1:
        raise UsageError(f"--confidence is a share from 0.5 to below 1, not {confidence:g}")
    if rounds < 3:
        raise UsageError("--rounds must be 3 or more: an interval needs them")
    with progress(quiet=as_json) as show:
        comparison = bench(
            target,
            recipe or ["baseline"],
            mode=mode,
            limits=None if max_error is None else Limits(max_error=max_error),
            confidence=confidence,
            max_rounds=rounds,
            budget_s=_options.duration_s(budget, "--budget") or None,
            under_load=under_load,
            polite=polite,
            on_progress=show,
        )
    _show.answer(
        as_json,
        lambda: comparison_json(comparison),
        lambda console: _show.print_comparison(console, comparison, under_load),
    )
    _show.leave(missed=comparison.failed)
