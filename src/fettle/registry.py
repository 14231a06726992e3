"""Functions that a decorator puts into a table, each under its own name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def new_name(function: Callable[..., Any], table: Mapping[str, object]) -> str:
    """The function's name with hyphens for underscores. Raises `ValueError` where the table has it already."""
    name = function.__name__.replace("_", "-")
    if name in table:
        raise ValueError(f"two functions are called {name}")
    return name
