"""The one kind of console that commands print to."""

from __future__ import annotations

from typing import Any

from rich.console import Console


def console(*, error: bool = False, **settings: Any) -> Console:
    """Standard output, or standard error. A text stays as it is: ``model.py:100:`` holds no emoji."""
    return Console(stderr=error, highlight=False, emoji=False, **settings)
