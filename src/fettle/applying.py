"""Applying a recipe to a live model: the tuned callable, in this process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import torch

from fettle.errors import UsageError, refusing
from fettle.machine import Machine, this_machine
from fettle.recipe import Recipe
from fettle.recipe_file import RecipeFile, read_recipe
from fettle.techniques import (
    LARGEST,
    Facts,
    canonical,
    conflict,
    environment,
    keep_converted,
    load,
    probe_facts,
    run_by,
    source,
)
from fettle.train import TrainingWorkload, load_training
from fettle.train.workload import make
from fettle.workload import Target, Workload, find_target


@overload
def apply(model: TrainingWorkload, recipe: Recipe | RecipeFile | str | Path) -> Iterator[Any]: ...
@overload
def apply(
    model: Any, recipe: Recipe | RecipeFile | str | Path, inputs: Any = None, *, call: Callable[..., Any] | None = None
) -> Callable[..., Any]: ...
def apply(
    model: Any,
    recipe: Recipe | RecipeFile | str | Path,
    inputs: Any = None,
    *,
    call: Callable[..., Any] | None = None,
) -> Any:
    """Apply a recipe and return the fast callable, which takes what the call took: ``fast(*args, **kwargs)``.

    ```python
    fast = fettle.apply(model, "precision=bf16 grad=inference_mode", batches)
    answer = fast(batches[0])
    ```

    `recipe` is a `Recipe`, its text, or the path of a ``recipe.toml``. `model` and `inputs` are as for `fettle.tune`; a
    `Workload` and what ``"file.py:factory"`` makes bring their own. Of a `TrainingWorkload` the loop is returned: an
    iterator without end that makes one optimizer step each time it is asked for the next loss.

    A recipe for several ranks is applied in each of them: start the program with torchrun.

    The model is changed in place, as by ``model.eval()``; hand over a ``copy.deepcopy`` to keep the original. Load its
    weights before: what is converted, frozen or packed has its own from then on. Warns when the recipe was measured on
    another machine, or with another version of torch or of the runtime that it uses: ``fettle check recipe.toml
    TARGET`` measures it here. Raises `UsageError` when the recipe cannot work on this model or machine.
    """
    file = read_recipe(recipe)
    if text := foreign(file):
        warnings.warn(f"{text}: measure it again with `fettle check recipe.toml TARGET`", stacklevel=2)
    workload = _workload(model, inputs, call, file.recipe.parts)
    if isinstance(workload, TrainingWorkload):
        from fettle.train import training_facts

        facts = replace(training_facts(workload, allow_batch=True), largest_batch=LARGEST)
    else:
        facts = probe_facts(workload, allow_batch=True)
    ranks = _torchrun_count("WORLD_SIZE")
    nodes = max(1, ranks // _torchrun_count("LOCAL_WORLD_SIZE"))
    optimize = _compiled(file.recipe, replace(facts, learned=file.learned, ranks=ranks, nodes=nodes))
    if isinstance(workload, TrainingWorkload):
        return optimize(workload.model, workload.optimizer, workload.loss, workload.data)
    calibration = list(workload.calibration) or list(workload.inputs)
    # Weights that are made in inference mode cannot be exported.
    with torch.inference_mode(False), refusing(f"the recipe {file.recipe} cannot be applied to this model:"):
        return optimize(workload.model, calibration, *([workload.call] if workload.call is not None else []))


def _torchrun_count(name: str) -> int:
    """A count that torchrun tells its ranks; 1 where it did not start this process."""
    text = os.environ.get(name, "")
    return max(1, int(text)) if text.isdigit() else 1


def _compiled(recipe: Recipe, facts: Facts) -> Callable[..., Any]:
    """The recipe's own source, ready to be called. Raises `UsageError` where it cannot work."""
    levels = canonical(recipe, facts)
    why_not = conflict(levels, facts)
    if why_not:
        raise UsageError(f"the recipe cannot work here: {why_not}")
    for variable, value in environment(levels, facts).items():
        if os.environ.get(variable) != value:
            warnings.warn(f"{levels} takes full effect only when {variable}={value} is set before Python starts",
                          stacklevel=3)  # fmt: skip
    return keep_converted(load(source(levels, facts), str(levels)))


def _workload(
    model: Any, inputs: Any, call: Callable[..., Any] | None, parts: list[str]
) -> Workload | TrainingWorkload:
    if isinstance(model, (str, Path, Target)):
        model = _built(model if isinstance(model, Target) else find_target(str(model)))
    if isinstance(model, (Workload, TrainingWorkload)):
        if inputs is not None or call is not None:
            raise UsageError("inputs and call belong to a live model; a workload brings its own")
        return model
    if inputs is None:
        raise UsageError("give sample inputs, as in fettle.apply(model, recipe, [batch])")
    return Workload(model, inputs, call, parts=parts)


def with_inputs(
    model: Any, workload: Target | Workload | TrainingWorkload, call: Callable[..., Any] | None = None
) -> Workload | TrainingWorkload:
    """A workload of `model` with everything else from `workload`; a target's factory is called for it."""
    if isinstance(workload, Target):
        workload = _built(workload)
    if isinstance(workload, TrainingWorkload):
        return replace(workload, model=model)
    return replace(workload, model=model, call=call or workload.call, metric=None)


def _built(target: Target) -> Workload | TrainingWorkload:
    """What a target's factory makes with torch's seed 0, which leaves the caller's own random numbers alone."""
    with torch.random.fork_rng():
        built, mode = make(target)
        return load_training(target, made=built) if mode == "training" else target.load(built)


def _is_here(then: Mapping[str, Any], here: Machine) -> bool:
    """Whether a recipe was measured on a machine like this one. The threads and the quota of the process that measured
    it, by which the `id` goes as well, are not asked for: the recipe sets its own."""
    if then.get("id") in (None, here.id):
        return True
    known = (then.get("cpu"), then.get("cores"), tuple(then.get("gpus") or ()), then.get("versions", {}).get("torch"))
    return known == (here.cpu, here.cores, here.gpus, here.versions["torch"])


def foreign(recipe: RecipeFile) -> str:
    """That a recipe was measured on another machine, or with another version of torch or of what its levels run by;
    empty where it was not."""
    here, then = this_machine(), recipe.machine.get("versions", {})
    if not _is_here(recipe.machine, here):
        where = ", ".join(recipe.machine.get("gpus") or []) or recipe.machine.get("cpu", "another machine")
        return f"this recipe was measured on {where} with torch {then.get('torch')}; here is {here.summary}"
    ran_by = run_by(recipe.recipe, then)
    moved = {name: there for name, there in ran_by.items() if here.versions.get(name, there) != there}
    others = ", ".join(f"{name} {there} (here {here.versions[name]})" for name, there in moved.items())
    return f"this recipe was measured with {others}" if moved else ""
