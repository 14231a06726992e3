"""``recipe.toml``: a recipe with the evidence for it.

Reading one parses it and checks its names against the catalogue; it never runs code.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fettle.errors import UsageError
from fettle.files import write_text
from fettle.recipe import FORMAT, Recipe
from fettle.techniques import check_names

_MAX_BYTES = 1 << 20


class RecipeFile(BaseModel):
    """What ``recipe.toml`` holds: the levels, and the evidence for them."""

    model_config = ConfigDict(extra="forbid")

    format: int = FORMAT
    levels: dict[str, str] = Field(default_factory=dict)
    workload: dict[str, Any] = Field(default_factory=dict)
    """name, fingerprint, target."""
    machine: dict[str, Any] = Field(default_factory=dict)
    """The machine's fingerprint and facts (`fettle.machine`)."""
    evidence: dict[str, Any] = Field(default_factory=dict)
    """speedup, its interval, times in ms, peak bytes, accuracy measures, the limits that held."""

    @property
    def recipe(self) -> Recipe:
        """The levels as a `Recipe`."""
        return Recipe(self.levels)

    @property
    def int8_layers(self) -> tuple[int, ...]:
        """Layers that the recipe has in int8 where it chose some, by their place in the graph; else empty."""
        return tuple(self.evidence.get("int8_layers", ()))

    def save(self, path: str | Path) -> None:
        """Write the file whole or not at all."""
        write_text(Path(path), tomli_w.dumps(_without_none(self.model_dump())))


class _Workload(BaseModel):
    name: str = ""
    fingerprint: str = ""
    target: str = ""


class _Machine(BaseModel):
    id: str | None = None
    cpu: str = ""
    gpus: list[str] = []
    versions: dict[str, str] = {}


class _Limits(BaseModel):
    max_error: float | None = None
    min_agreement: float | None = None
    max_metric_drop: float | None = None


class _Evidence(BaseModel):
    limits: _Limits = _Limits()
    int8_layers: list[Annotated[int, Field(ge=0, lt=1 << 20)]] = Field(default=[], max_length=1 << 16)


_SHAPES: dict[str, type[BaseModel]] = {"workload": _Workload, "machine": _Machine, "evidence": _Evidence}
"""What fettle reads of these tables, and so must have this type. The rest of them is for people."""


def load_recipe(path: str | Path) -> RecipeFile:
    """Read a ``recipe.toml``. Raises `UsageError` in one line for anything that is not one."""
    path = Path(path)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{path} is too large to be a recipe")
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the recipe {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no recipe: {error}") from error
    if "levels" not in data:
        raise UsageError(f"{path} is no fettle recipe: it has no [levels] table")
    where = ""
    try:
        found = RecipeFile.model_validate(data)
        for where, shape in _SHAPES.items():
            shape.model_validate(getattr(found, where))
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, ([where] if where else []) + list(problem["loc"])))
        raise UsageError(f"{path} is no fettle recipe: {place}: {problem['msg']}") from error
    if found.format != FORMAT:
        raise UsageError(f"{path} has recipe format {found.format}; this fettle reads format {FORMAT}")
    check_names(found.recipe)
    return found


def read_recipe(recipe: Recipe | RecipeFile | str | Path) -> RecipeFile:
    """A recipe however it was given: as it is, as text (``precision=bf16``), or as the path of a ``recipe.toml``.

    Raises `UsageError` for a text or file that is none, and for what the catalogue does not have.
    """
    if isinstance(recipe, RecipeFile):
        return recipe
    if isinstance(recipe, str) and not recipe.endswith(".toml"):
        recipe = Recipe.parse(recipe)
    if not isinstance(recipe, Recipe):
        return load_recipe(recipe)
    check_names(recipe)
    return RecipeFile(levels=dict(recipe.levels))


def _without_none(value: Any) -> Any:
    """TOML has no null: leave such keys out, and write NaN-free plain data."""
    if isinstance(value, Mapping):
        return {str(key): _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(item) for item in value if item is not None]
    return value
