"""How a study is going: what runs now, the best so far, how far the budget is spent."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from fettle.page import clean
from fettle.report import _format as fmt
from fettle.report._facts import speed

if TYPE_CHECKING:
    from fettle.tuning import Event, OnProgress


_WAITS_S = 30.0
"""Between two lines that say that it waits."""


@contextmanager
def progress(*, quiet: bool = False, lines: bool = True) -> Iterator[OnProgress]:
    """Show it where a user is watching: a bar on a terminal, a changing output in a notebook.

    Where neither is, a line on standard error for each start and each trial, or nothing without `lines`.
    """
    console = Console(stderr=True, highlight=False, emoji=False)
    if quiet:
        yield lambda event: None
    elif console.is_jupyter:
        with _cell() as on_progress:
            yield on_progress
    elif console.is_terminal:
        with _bar(console) as on_progress:
            yield on_progress
    else:
        yield _lines() if lines else lambda event: None


@contextmanager
def _bar(console: Console) -> Iterator[OnProgress]:
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=18), TaskProgressColumn(),
               TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def on_progress(event: Event) -> None:
            text = f"{escape(event.doing[:60])}[dim]{_best(event)}[/]"
            bar.update(task, description=text, completed=event.elapsed_s, total=event.budget_s)
            if event.trial is not None:
                bar.console.print(trial_line(event))
            if event.note:
                bar.console.print(event.note, style="dim", markup=False)

        yield on_progress


@contextmanager
def _cell() -> Iterator[OnProgress]:
    """An output of a notebook's cell that changes in place: the trials so far, and what runs now."""
    from IPython.display import display

    def bundle(last: str) -> dict[str, Any]:
        return {"text/plain": "\n".join([*done, last])}

    done: list[str] = []
    shown = display(bundle("starting"), raw=True, display_id=True)  # type: ignore[no-untyped-call, unused-ignore]
    began = time.monotonic()

    def on_progress(event: Event) -> None:
        if event.trial is not None:
            done.append(Text.from_markup(trial_line(event), emoji=False).plain)
        if event.note:
            done.append(event.note)
        spent = fmt.seconds(event.elapsed_s) + (f" of {fmt.seconds(event.budget_s)}" if event.budget_s else "")
        shown.update(bundle(f"{event.doing}{_best(event)} | {spent}"), raw=True)

    yield on_progress
    shown.update(bundle(f"done in {fmt.seconds(time.monotonic() - began)}"), raw=True)


def _lines() -> OnProgress:
    """For a log file: nothing for the rounds of a race, and once in a while that it waits."""
    began, waits = time.monotonic(), -math.inf

    def on_progress(event: Event) -> None:
        nonlocal waits
        if event.doing.endswith("waiting for a quiet moment"):
            if time.monotonic() - waits < _WAITS_S:
                return
            waits = time.monotonic()
        if event.trial is not None:
            text = Text.from_markup(trial_line(event), emoji=False).plain
        elif event.doing.startswith("round"):
            return
        else:
            text = event.doing
        print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr)

    return on_progress


def _best(event: Event) -> str:
    best = math.nan if event.best is None else speed(event.best)
    return f" | best {fmt.times(best)}" if math.isfinite(best) else ""


def trial_line(event: Event) -> str:
    """One finished trial as a line, with rich's markup."""
    assert event.trial is not None
    trial = clean(event.trial)
    if trial.status == "failed":
        return f"[red]failed[/]    {escape(str(trial.recipe))}: {escape(trial.reason[:160])}"
    ratio = f"{fmt.times(speed(trial)) if trial.speedup else '':>7}"
    tail = f" [yellow]rejected: {escape(trial.reason)}[/]" if trial.status == "rejected" else ""
    return f"{trial.time_ms:9.3f} ms {ratio}  {escape(str(trial.recipe))}{tail}"
