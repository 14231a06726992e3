"""fettle check RECIPE TARGET: is a recipe still faster, and still right, here?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fettle.cli import _options, _show
from fettle.cli._console import console


def command(
    recipe: Annotated[Path, typer.Argument(help="a recipe.toml")],
    target: _options.Target,
    mode: _options.Mode = "auto",
    nproc: _options.Nproc = 1,
    force: Annotated[bool, typer.Option("--force", help="even if the workload has other weights or inputs")] = False,
    budget: Annotated[str, typer.Option(help="time for the whole race, for example 2m; 0 for no limit")] = "0",
    under_load: _options.UnderLoad = False,
    polite: _options.Polite = False,
    as_json: _options.AsJson = False,
) -> None:
    """Measure a recipe again on this machine: is it still faster, are the answers still right?

    It is judged by the goal that it was tuned for, and beside other work if it was tuned --under-load.

    Exit code 1: it is slower than the model as given (tuned for memory: needs no less; and so on), did not run, or its
    answers are off.

    fettle check fettle-out/recipe.toml model.py
    """
    from fettle.applying import foreign
    from fettle.comparing import check, comparison_json
    from fettle.recipe_file import load_recipe
    from fettle.report import progress

    loaded = load_recipe(recipe)
    if (text := foreign(loaded)) and not as_json:
        console(error=True).print(f"[yellow]{escape(text)}; measuring it here[/]")
    limit_s = _options.duration_s(budget, "--budget") or None
    with progress(quiet=as_json) as show:
        comparison = check(
            target, loaded, mode=mode, nproc=nproc, force=force, budget_s=limit_s, under_load=under_load,
            polite=polite, on_progress=show,
        )  # fmt: skip
    _show.answer(as_json, lambda: comparison_json(comparison), lambda out: _show.print_comparison(out, comparison))
    _show.leave(interrupted=comparison.interrupted, missed=comparison.failed or comparison.gains_nothing)
