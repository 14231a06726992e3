"""What commands share: reading options, saying what is going on, writing tables."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from fettle.errors import UsageError
from fettle.files import write_text

_DURATION = re.compile(r"\s*([0-9]{1,9}(?:\.[0-9]*)?|\.[0-9]+)\s*(ms|s|m|min|h)?\s*")
_SECONDS = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def duration_s(text: str, option: str) -> float:
    """``90``, ``90s``, ``10m``, ``1h``, ``100ms`` as seconds."""
    match = _DURATION.fullmatch(text)
    if not match:
        raise UsageError(f"{option}: {text!r} is no duration, for example 90s, 10m, 1h, 100ms")
    return float(match[1]) * _SECONDS[match[2] or ""]


def technique_levels(options: Sequence[str]) -> dict[str, list[str]]:
    """``["precision=fp32,bf16", "compile=off"]`` as levels by technique."""
    found: dict[str, list[str]] = {}
    for option in options:
        name, equals, levels = option.partition("=")
        if not equals or not name.strip() or not levels.strip(" ,"):
            raise UsageError(
                f"--technique {option!r}: write NAME=LEVEL or NAME=LEVEL,LEVEL, for example precision=bf16"
            )
        found.setdefault(name.strip(), []).extend(level.strip() for level in levels.split(",") if level.strip())
    return found


@contextmanager
def telling(first: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A line that says what is going on, and changes in place: on standard error, where that is a terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda text: None
        return
    with console.status(escape(first)) as status:
        yield lambda text: status.update(escape(text))


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """A table with a header. Raises `UsageError` where it cannot be written."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())
