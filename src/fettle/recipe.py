"""The recipe: one level for each technique. An empty recipe is the baseline.

A recipe is data: levels by name, which the catalogue of `fettle.techniques` gives a meaning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w

from fettle.errors import UsageError
from fettle.files import write_text

FORMAT = 1
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
                raise UsageError(f"{part!r} is not TECHNIQUE=LEVEL, for example precision=bf16")
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
        write_text(Path(path), tomli_w.dumps({"format": FORMAT, "levels": dict(self.levels)}))

    def __str__(self) -> str:
        return " ".join(f"{name}={level}" for name, level in self.levels.items()) or "baseline"

    def __hash__(self) -> int:
        return hash(tuple(self.levels.items()))
