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
_FACTOR = re.compile(r"([a-z0-9][a-z0-9_:.+-]{0,63})(?:\[([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})\])?")


def factor_name(technique: str, part: str) -> str:
    """How a recipe spells a technique for one part of a pipeline: ``precision[image_encoder]``."""
    return f"{technique}[{part}]" if part else technique


def technique_and_part(name: str) -> tuple[str, str]:
    """The two that `factor_name` put together; the part is empty for the whole call."""
    technique, _, part = name.partition("[")
    return technique, part.removesuffix("]")


@dataclass(frozen=True)
class Recipe:
    """Levels by technique; a technique that is absent stays as the workload was given.

    In a pipeline the techniques of a module are set for each part: ``precision[image_encoder]=bf16``."""

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
            if not equals or not _FACTOR.fullmatch(name) or not _NAME.fullmatch(level):
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

    @property
    def parts(self) -> list[str]:
        """The parts of a pipeline that it names."""
        names = (technique_and_part(name)[1] for name in self.levels)
        return list(dict.fromkeys(part for part in names if part))

    def of_part(self, part: str) -> Recipe:
        """As one part sees it: its own levels under their plain names, beside those of the whole call."""
        seen = {}
        for name, level in self.levels.items():
            technique, of = technique_and_part(name)
            if of in ("", part):
                seen[technique] = level
        return Recipe(seen)

    def save(self, path: str | Path) -> None:
        """Write the levels alone as a recipe file; ``result.save(folder)`` writes them with their evidence."""
        write_text(Path(path), tomli_w.dumps({"format": FORMAT, "levels": dict(self.levels)}))

    def __str__(self) -> str:
        return " ".join(f"{name}={level}" for name, level in self.levels.items()) or "baseline"

    def __hash__(self) -> int:
        return hash(tuple(self.levels.items()))
