"""``recipe.toml``: a recipe with the evidence for it.

Reading one parses it and checks its names against the catalogue; it never runs code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tomli_w

from fettle.errors import UsageError, refusing, type_text
from fettle.files import read_toml, write_text
from fettle.recipe import FORMAT, Recipe
from fettle.techniques import check_names, handed_on, learned_types, respelled

_MAX_BYTES = 1 << 20
T = TypeVar("T")


class RecipeFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What ``recipe.toml`` holds: the levels, and the evidence for them."""

    format: int = FORMAT
    levels: dict[str, str] = {}  # msgspec copies mutable defaults
    workload: dict[str, Any] = {}
    """name, fingerprint, target."""
    machine: dict[str, Any] = {}
    """The machine's fingerprint and facts (`fettle.machine`)."""
    evidence: dict[str, Any] = {}
    """speedup, its interval, times in ms, peak bytes, accuracy measures, the limits that held; what levels learned."""

    @property
    def recipe(self) -> Recipe:
        """The levels as a `Recipe`."""
        return Recipe(self.levels)

    @property
    def learned(self) -> dict[str, Any]:
        """What its levels found out when it was tuned and go by, see `fettle.techniques.Learned`."""
        return handed_on(self.recipe, self.evidence)

    def save(self, path: str | Path) -> None:
        """Write the file whole or not at all."""
        write_text(Path(path), tomli_w.dumps(_without_none(msgspec.to_builtins(self))))


class _Workload(msgspec.Struct):
    name: str = ""
    fingerprint: str = ""
    target: str = ""


class _Machine(msgspec.Struct):
    id: str | None = None
    cpu: str = ""
    gpus: list[str] = []
    versions: dict[str, str] = {}


class _Limits(msgspec.Struct, frozen=True):
    max_error: float | None = None
    min_agreement: float | None = None
    max_metric_drop: float | None = None
    max_latency_ms: float | None = None
    max_memory_bytes: int | None = None
    min_throughput: float | None = None
    max_ttft_ms: float | None = None
    max_tpot_ms: float | None = None
    exact: bool = False


class _Evidence(msgspec.Struct):
    goal: str = ""
    under_load: bool = False
    limits: _Limits = _Limits()


_TABLES: dict[str, type[msgspec.Struct]] = {"workload": _Workload, "machine": _Machine, "evidence": _Evidence}
"""What fettle reads of these tables, and so must have this type. The rest of them is for people."""


def load_recipe(path: str | Path) -> RecipeFile:
    """Read a ``recipe.toml``. Raises `UsageError` in one line for anything that is not one."""
    path = Path(path)
    with refusing(f"{path} is not a recipe:", (ValueError, RecursionError)):
        data = read_toml(path, _MAX_BYTES, "the recipe ")
    if isinstance(kept := data.get("format"), int) and kept != FORMAT:  # before what its version may have besides
        raise UsageError(f"{path} has recipe format {kept}; this fettle reads format {FORMAT}")
    if "levels" not in data:
        raise UsageError(f"{path} is not a fettle recipe: it has no [levels] table")
    with refusing(f"{path} is not a fettle recipe:", UsageError):
        for name, level in data["levels"].items() if isinstance(data["levels"], dict) else ():
            _typed(level, str, f"levels.{name}")
        file = _typed(data, RecipeFile)
        for name, kind in _TABLES.items():
            _typed(getattr(file, name), kind, name)
        for name, kind in learned_types(file.evidence).items():
            _typed(file.evidence[name], kind, f"evidence.{name}")
    with refusing(f"{path}:", UsageError):
        return _checked(file)


def _typed(value: Any, kind: type[T], where: str = "") -> T:
    """The value as `kind`. Raises `UsageError` with the place of what is something else."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$")
        place = f"{where}{place.rstrip('`').replace('[', '.').replace(']', '')}".strip(".")
        raise UsageError(f"{place}: {problem}" if place else problem) from error


def _checked(file: RecipeFile) -> RecipeFile:
    """The file in today's spelling. Raises `UsageError` for what the catalogue does not have."""
    file.levels = dict(respelled(file.levels))
    check_names(file.recipe)
    return file


def read_recipe(recipe: Recipe | RecipeFile | str | Path) -> RecipeFile:
    """A recipe however it was given: as it is, as text (``precision=bf16``), or as the path of a ``recipe.toml``.

    Raises `UsageError` for a text or file that is not a recipe, and for what the catalogue does not have.
    """
    if isinstance(recipe, RecipeFile):
        return recipe
    if not isinstance(recipe, (Recipe, str, Path)):
        raise UsageError(
            f"{type_text(recipe)} is not a recipe: give a fettle.Recipe, its text, such as 'precision=bf16', or "
            "the path of a recipe.toml, and the inputs after it"
        )
    if isinstance(recipe, str) and not (recipe.endswith(".toml") or os.path.isfile(recipe)):
        recipe = Recipe.parse(recipe)
    if not isinstance(recipe, Recipe):
        return load_recipe(recipe)
    return _checked(RecipeFile(levels=dict(recipe.levels)))


def _without_none(value: Any) -> Any:
    """TOML has no null: leave such keys out, and write NaN-free plain data."""
    if isinstance(value, Mapping):
        return {str(key): _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(item) for item in value if item is not None]
    return value
