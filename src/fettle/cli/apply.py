"""fettle apply RECIPE TARGET: check a recipe on this machine."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def command(
    recipe: Annotated[Path, typer.Argument(help="a recipe.toml")],
    target: Annotated[str, typer.Argument(help="path/to/file.py:factory or package.module:factory")],
    force: Annotated[bool, typer.Option("--force", help="also for a workload with other weights or inputs")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the trials as JSON")] = False,
) -> None:
    """Measure a recipe again on this machine: is it still faster, are the answers still right?

    Exit code 1: it is slower than the model as given, did not run, or its answers are off.

    [bold]Example[/]

      fettle apply fettle-out/recipe.toml model.py
    """
    from fettle.applying import warn_if_foreign
    from fettle.comparing import bench, comparison_json
    from fettle.recipe_file import load_recipe
    from fettle.report import comparison_table, load_lines, progress
    from fettle.result import Limits

    found = load_recipe(recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        foreign = warn_if_foreign(found)
    if foreign and not as_json:
        Console(stderr=True).print(f"[yellow]{foreign}; measuring it here[/]", highlight=False)
    kept = found.evidence.get("limits", {})
    limits = Limits(
        max_error=kept.get("max_error"),
        min_agreement=kept.get("min_agreement"),
        max_metric_drop=kept.get("max_metric_drop"),
    )
    with progress(quiet=as_json) as tell:
        comparison = bench(
            target,
            [found.recipe],
            limits=limits,
            fingerprint="" if force else found.workload.get("fingerprint", ""),
            int8_layers=found.int8_layers,
            tell=tell,
        )
    if as_json:
        print(json.dumps(comparison_json(comparison)))
    else:
        console = Console()
        console.print(comparison_table(comparison.trials, comparison.verdicts))
        for line in load_lines(comparison.trials):
            console.print(line)
    if comparison.failed or comparison.verdicts[1] == "slower":
        raise typer.Exit(1)
