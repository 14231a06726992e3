"""What a check is: a small function that looks at an environment, registered by its decorator; and what it says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from fettle.doctor.environment import Environment

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")
"""An error does not work, answers wrongly or is unsafe; a warning costs speed, or will fail one day; a note is good to
know."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with an environment."""

    check: str
    level: Level
    seen: str
    """What was seen, as a sentence."""
    why: str
    """Why that costs speed or safety."""
    mend: str
    """The command that fixes it."""


error = functools.partial(Finding, "", "error")
warning = functools.partial(Finding, "", "warning")
note = functools.partial(Finding, "", "note")
"""A finding without its check's name, which `check` adds."""

Look = Callable[[Environment], Iterator[Finding]]


@dataclass(frozen=True)
class Check:
    """One check. Call it with an environment: it says what it finds."""

    name: str
    look: Look
    is_quick: bool
    """Whether it says of measurements that they would not be true, and looks at variables and small files alone."""

    def __call__(self, here: Environment) -> Iterator[Finding]:
        return (replace(finding, check=self.name) for finding in self.look(here))


CHECKS: dict[str, Check] = {}
"""By the name that `Finding.check` has."""


def check(*, quick: bool = False) -> Callable[[Look], Check]:
    """Register a function as the check of its own name, underscores as hyphens."""

    def register(look: Look) -> Check:
        name = look.__name__.replace("_", "-")
        CHECKS[name] = Check(name, look, quick)
        return CHECKS[name]

    return register
