"""The one kind of console that commands print to."""

from __future__ import annotations

import io
import os
from typing import Any

from rich.console import Console

_UNBROKEN = 1 << 16
"""Columns that no line has."""


class _Stream(io.FileIO):
    """What is written where nobody reads on, as before ``| head -1``, is lost, and ends no work."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)


def stream(descriptor: int, *, closefd: bool = False, **settings: Any) -> io.TextIOWrapper:
    """A text file that writes to a descriptor for as long as somebody reads there."""
    return io.TextIOWrapper(io.BufferedWriter(_Stream(descriptor, "w", closefd)), **settings)


def console(*, error: bool = False, **settings: Any) -> Console:
    """Standard output, or standard error. A text stays as it is: ``model.py:100:`` holds no emoji, and where no
    terminal shows it no line is broken, unless ``COLUMNS`` says where."""
    made = Console(stderr=error, highlight=False, emoji=False, **settings)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _UNBROKEN
    return made
