"""Applying a recipe to a live model: the tuned callable, in this process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fettle.errors import UsageError
from fettle.machine import this_machine
from fettle.recipe import Recipe
from fettle.recipe_file import RecipeFile, load_recipe
from fettle.techniques import check_names, conflict, find, load, normal, probe_facts, source
from fettle.workload import Workload, as_batches


def apply(
    model: Callable[..., Any],
    recipe: Recipe | RecipeFile | str | Path,
    inputs: Any,
    *,
    call: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Apply a recipe and return the fast callable, which takes what the call took: ``fast(*args, **kwargs)``.

    The model is changed in place, as by ``model.eval()``; hand over a ``copy.deepcopy`` to keep the original.
    `recipe` is a `Recipe` or a path to ``recipe.toml``; `inputs` are sample batches as for `fettle.tune`. Warns when
    the recipe was measured on another machine or another version of torch: ``fettle apply recipe.toml TARGET``
    measures it here.
    Raises `UsageError` when the recipe cannot work on this model or machine.
    """
    levels, int8_layers = _levels(recipe)
    check_names(levels)
    workload = Workload(model, as_batches(inputs), call)
    facts = replace(probe_facts(workload, allow_batch=True), int8_layers=int8_layers)
    levels = normal(levels if facts.training else levels.without("mode"))  # in eval mode already: nothing to do
    why_not = conflict(levels, facts)
    if why_not:
        raise UsageError(f"the recipe cannot work here: {why_not}")
    for name, level in levels.levels.items():
        for variable, value in find(name).code(level, levels, facts).environment.items():
            if os.environ.get(variable) != value:
                warnings.warn(f"{name}={level} takes full effect only when {variable}={value} is set before Python "
                              "starts", stacklevel=2)  # fmt: skip
    optimize = load(source(levels, facts), str(levels))
    calibration = list(workload.calibration) or list(workload.inputs)
    return optimize(model, calibration) if call is None else optimize(model, calibration, call)


def _levels(recipe: Recipe | RecipeFile | str | Path) -> tuple[Recipe, tuple[int, ...]]:
    """The recipe, and the layers that it has chosen."""
    if isinstance(recipe, Recipe):
        return recipe, ()
    found = recipe if isinstance(recipe, RecipeFile) else load_recipe(recipe)
    warn_if_foreign(found)
    return found.recipe, found.int8_layers


def warn_if_foreign(recipe: RecipeFile) -> str:
    """Warn, and return the text, when a recipe was measured on another machine or version of torch."""
    here = this_machine()
    then = recipe.machine.get("versions", {}).get("torch")
    text = ""
    if recipe.machine.get("id") not in (None, here.id):
        where = ", ".join(recipe.machine.get("gpus") or []) or recipe.machine.get("cpu", "another machine")
        text = f"this recipe was measured on {where} with torch {then}; here is {here.summary}"
        warnings.warn(f"{text}: measure it again with `fettle apply recipe.toml TARGET`", stacklevel=3)
    return text
