"""What commands share: reading durations, sizes and technique lists, and the live progress display."""

from __future__ import annotations

import asyncio
import csv
import io
import os
import re
import sys
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fettle.errors import UsageError
from fettle.files import write_text

if TYPE_CHECKING:
    from fettle.tuning import Event, Tell

T = TypeVar("T")
_DURATION = re.compile(r"\s*([0-9.]+)\s*(ms|s|m|min|h)?\s*")
_SECONDS = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def duration_s(text: str, option: str) -> float:
    """``90``, ``90s``, ``10m``, ``1h``, ``100ms`` as seconds."""
    match = _DURATION.fullmatch(text)
    if not match or not _is_number(match[1]):
        raise UsageError(f"{option}: {text!r} is no duration, for example 90s, 10m, 1h, 100ms")
    return float(match[1]) * _SECONDS[match[2] or ""]


def technique_levels(options: Sequence[str]) -> dict[str, list[str]]:
    """``["precision=fp32,bf16", "compile=off"]`` as levels by technique."""
    found: dict[str, list[str]] = {}
    for option in options:
        name, equals, levels = option.partition("=")
        if not equals or not name or not levels:
            raise UsageError(
                f"--technique {option!r}: write NAME=LEVEL or NAME=LEVEL,LEVEL, for example precision=bf16"
            )
        found.setdefault(name.strip(), []).extend(level.strip() for level in levels.split(",") if level.strip())
    return found


def check_output(path: Path | None, option: str) -> None:
    """Raise `UsageError` for a file that cannot be written: before the work that would be lost, not after it."""
    if path is None:
        return
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir() or not above.is_dir() or not os.access(above, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written")


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """A table with a header. Raises `UsageError` where it cannot be written."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the fastest event loop there is."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    made: T = uvloop.run(work)
    return made


@contextmanager
def progress(quiet: bool) -> Iterator[Tell]:
    """A live line on stderr: what runs now, the best so far, how far the budget is spent. Lines only when piped."""
    console = Console(stderr=True)
    if quiet:
        yield lambda event: None
    elif not console.is_terminal:
        yield _plain_lines()
    else:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=18), TaskProgressColumn(),
                   TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())  # fmt: skip
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("starting", total=None)

            def tell(event: Event) -> None:
                best = ""
                if event.best is not None and event.best.speedup is not None:
                    best = f" [dim]| best {event.best.speedup.estimate:.2f}x[/]"
                bar.update(
                    task, description=f"{event.doing[:60]}{best}", completed=event.elapsed_s, total=event.budget_s
                )
                if event.trial is not None:
                    bar.console.print(trial_line(event), highlight=False)

            yield tell


def trial_line(event: Event) -> str:
    """One finished trial as a line."""
    trial = event.trial
    assert trial is not None
    if trial.status == "failed":
        return f"[red]failed[/]    {trial.recipe}: {trial.reason[:160]}"
    ratio = f"{trial.speedup.estimate:6.2f}x" if trial.speedup else "       "
    tail = f" [yellow]rejected: {trial.reason}[/]" if trial.status == "rejected" else ""
    return f"{trial.time_ms:9.3f} ms {ratio}  {trial.recipe}{tail}"


def _plain_lines() -> Tell:
    """Progress for a log file: a line for each trial and each start, nothing for rounds."""
    began = time.monotonic()

    def tell(event: Event) -> None:
        if event.trial is not None:
            from rich.text import Text

            print(f"[{time.monotonic() - began:6.1f} s] {Text.from_markup(trial_line(event)).plain}", file=sys.stderr)
        elif not event.doing.startswith("round"):
            print(f"[{time.monotonic() - began:6.1f} s] {event.doing}", file=sys.stderr)

    return tell


def _is_number(text: str) -> bool:
    return text.count(".") <= 1 and text != "."
