"""The packages that a search chooses among: one target with several recipes, each packaged in a process of its own.

A recipe that cannot be packaged, or answers too differently, is a failure with its reason; the search goes on with the
others. Packages are kept, so that a search that was stopped does not make them again.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fettle.errors import UsageError
from fettle.inputs.kept import content_hash
from fettle.package.export import as_served
from fettle.package.manifest import open_package
from fettle.procs.process import Process, how_it_ended
from fettle.recipe import Recipe
from fettle.slo.points import Failure, Variant
from fettle.slo.stopping import Stopped
from fettle.workload import Target

AS_GIVEN = "as given"
PACKAGE_S = 1800.0


def package_all(
    text: str, target: Target, recipes: Sequence[Recipe], folder: Path, *, max_rows: int, max_error: float,
    on_progress: Callable[[str], None] = lambda text: None, stopped: Callable[[], bool] = lambda: False,
) -> tuple[list[Variant], list[Failure]]:  # fmt: skip
    """A package in `folder` for each recipe that differs once served, and what failed. Raises `Stopped`."""
    variants: list[Variant] = []
    failures: list[Failure] = []
    for recipe in distinct(recipes):
        name = str(recipe) if recipe.levels else AS_GIVEN
        path = folder / _digest(target, recipe, max_rows)
        on_progress(f"packaging {name}")
        why = "" if path.is_dir() else _package(text, target, recipe, path, max_rows, stopped)
        if why:
            failures.append(Failure(f"the recipe {name}", why))
            continue
        variant = Variant(name, open_package(path))
        if not variant.error <= max_error:
            error = f"its answers have a relative error of {variant.error:.2g}, above the limit of {max_error:g}"
            failures.append(Failure(f"the recipe {name}", error))
            continue
        variants.append(variant)
    if len(variants) == 1:
        variants = [Variant("", variants[0].package)]
    return variants, failures


def distinct(recipes: Sequence[Recipe]) -> list[Recipe]:
    """What is left of each recipe when it is served, every one once, in the given order."""
    return list(dict.fromkeys(as_served(recipe) for recipe in recipes))


def _package(text: str, target: Target, recipe: Recipe, path: Path, max_rows: int, stopped: Callable[[], bool]) -> str:
    """Run ``fettle serve package``; why it failed, or nothing."""
    with tempfile.TemporaryDirectory() as scratch:  # a target that is none leaves nothing behind
        levels = Path(scratch) / "recipe.toml"
        recipe.save(levels)
        run = "from fettle.procs.parent import die_with_parent; die_with_parent(); from fettle.cli import main; main()"
        command = ["-c", run, "serve", "package", text, "--recipe", str(levels), "--output", str(path),
                   "--max-rows", str(max_rows), "--json"]  # fmt: skip
        with Process(command) as process:
            deadline = time.monotonic() + PACKAGE_S
            while (code := process.wait(0.25)) is None:
                if stopped():
                    raise Stopped
                if time.monotonic() > deadline:
                    return f"packaging it took longer than {PACKAGE_S:.0f} s"
            reason = process.last_words().removeprefix("fettle:").strip()
    return "" if code == 0 else reason or f"packaging it {how_it_ended(code)}"


def _digest(target: Target, recipe: Recipe, max_rows: int) -> str:
    """Equal for the same recipe of the same target, as far as its own file and those beside it say."""
    facts = json.dumps([target.reference, str(recipe), max_rows, content_hash(target.reference)])
    return f"{target.name}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"


def study_recipes(target: Target, storage: str, name: str, most: int) -> list[Recipe]:
    """The recipes of a study that kept their limits on this machine: as given, then the fastest, at most `most` more.

    Raises `UsageError` where the study is not there, is another workload's, or has none on this machine.
    """
    from fettle.machine import this_machine
    from fettle.measure import Worker
    from fettle.storage import storage_url
    from fettle.study import Study

    if "://" not in storage and not Path(storage).is_file():
        raise UsageError(f"no such study: {storage}")
    with Worker() as worker:  # builds the workload as it was built when the study was made
        built = worker.build(target, PACKAGE_S)
    study = Study.open(
        name or target.name, storage_url(storage, Path.cwd()), built.fingerprint, this_machine().id,
        structure=built.structure, beside=not name,
    )  # fmt: skip
    trials = sorted((trial for trial in study.trials() if trial.ok), key=lambda trial: -trial.throughput)
    if not trials:
        raise UsageError(f"{storage} has no trial of {study.name} on this machine that kept its limits")
    return distinct([Recipe(), *(trial.recipe for trial in trials)])[: most + 1]
