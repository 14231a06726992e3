"""The one kind of console that commands print to."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console

_UNBROKEN = 1 << 16
"""Columns that no line has."""


def console(*, error: bool = False, **settings: Any) -> Console:
    """Standard output, or standard error. A text stays as it is: ``model.py:100:`` holds no emoji, and where no
    terminal shows it no line is broken, unless ``COLUMNS`` says where."""
    made = Console(stderr=error, highlight=False, emoji=False, **settings)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _UNBROKEN
    return made
