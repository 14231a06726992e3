"""The recipe: one level for each technique. An empty recipe is the baseline.

A recipe is data. Reading one parses and checks names against the catalogue; it never runs code.
"""

from __future__ import annotations

import os
import re
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fettle.errors import UsageError

FORMAT = 1
_MAX_BYTES = 1 << 20
_NAME = re.compile(r"[a-z0-9][a-z0-9_:.+-]{0,63}")


@dataclass(frozen=True)
class Recipe:
    """Levels by technique; a technique that is absent stays as the workload was given."""

    levels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", dict(sorted(self.levels.items())))

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """Read ``"precision=bf16 compile=default"``; commas or blanks separate, ``baseline`` is the empty recipe."""
        levels: dict[str, str] = {}
        if text.strip() in ("", "baseline"):
            return cls()
        for part in re.split(r"[,\s]+", text.strip()):
            name, equals, level = part.partition("=")
            if not equals or not _NAME.fullmatch(name) or not _NAME.fullmatch(level):
                raise UsageError(f"{part!r} is no TECHNIQUE=LEVEL, for example precision=bf16")
            if name in levels:
                raise UsageError(f"{name} is given twice in {text!r}")
            levels[name] = level
        return cls(levels)

    def with_levels(self, **levels: str) -> Recipe:
        """The same recipe with some levels changed."""
        return Recipe({**self.levels, **levels})

    def without(self, *names: str) -> Recipe:
        """The same recipe with some techniques as given."""
        return Recipe({name: level for name, level in self.levels.items() if name not in names})

    def save(self, path: str | Path) -> None:
        """Write the levels alone as a recipe file; ``result.save(folder)`` writes them with their evidence."""
        RecipeFile(levels=dict(self.levels)).save(path)

    def __str__(self) -> str:
        return " ".join(f"{name}={level}" for name, level in self.levels.items()) or "baseline"

    def __hash__(self) -> int:
        return hash(tuple(self.levels.items()))


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

    def save(self, path: str | Path) -> None:
        """Write the file whole or not at all."""
        write_text(Path(path), tomli_w.dumps(_without_none(self.model_dump())))


def load_recipe(path: str | Path) -> RecipeFile:
    """Read a ``recipe.toml``. Raises `UsageError` in one line for anything that is not one."""
    from fettle.techniques import check_names

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
    try:
        found = RecipeFile.model_validate(data)
    except ValidationError as error:
        problem = error.errors()[0]
        raise UsageError(
            f"{path} is no fettle recipe: {'.'.join(map(str, problem['loc']))}: {problem['msg']}"
        ) from error
    if found.format != FORMAT:
        raise UsageError(f"{path} has recipe format {found.format}; this fettle reads format {FORMAT}")
    check_names(found.recipe)
    return found


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically; raises `UsageError` when the folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except OSError:  # a full disk must not fill up further with halves
            os.unlink(temporary)
            raise
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def _without_none(value: Any) -> Any:
    """TOML has no null: leave such keys out, and write NaN-free plain data."""
    if isinstance(value, Mapping):
        return {str(key): _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(item) for item in value if item is not None]
    return value
