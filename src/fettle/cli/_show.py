"""What commands share in what they show: how far they are, and tables."""

from __future__ import annotations

import json
import shlex
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as RichTable

from fettle.cli._console import console
from fettle.files import plain
from fettle.units import seconds_text

if TYPE_CHECKING:
    from fettle.comparing import Comparison
    from fettle.page import Table

_MOST_OF_A_WORD = 24
_EVERY_S = 20.0
_STYLES = {"winner": "green", "failed": "red", "rejected": "yellow"}


@contextmanager
def status_line(first: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A line that says what is going on and for how long, and changes in place, on standard error; where that is no
    terminal a line of its own every 20 seconds."""
    out = console(file=sys.stderr)  # the same one also while a factory has replaced it
    if quiet:
        yield lambda text: None
    elif out.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=out, transient=True) as progress:
            task = progress.add_task(escape(first), total=None)
            yield lambda text: progress.update(task, description=escape(text))
    else:
        began, doing, done = time.monotonic(), first, threading.Event()

        def now_and_then() -> None:
            while not done.wait(_EVERY_S):
                took = seconds_text(time.monotonic() - began)
                out.print(f"{doing} ({took} by now)", markup=False, soft_wrap=True)

        def now(text: str) -> None:
            nonlocal doing
            doing = text

        threading.Thread(target=now_and_then, daemon=True).start()
        try:
            yield now
        finally:
            done.set()


def after_spoilers(show: Callable[[Any], None]) -> Callable[[Any], None]:
    """`show`, which says first, on standard error, what in the environment would spoil what is measured: once the work
    begins, so that bad input stays one line."""
    warned = False

    def on_event(event: Any) -> None:
        nonlocal warned
        if not warned:
            warned = True
            from fettle.doctor import spoilers

            for finding in spoilers():
                print(f"fettle: {finding.seen} {finding.why} Fix: {finding.mend}", file=sys.stderr)
        show(event)

    return on_event


@contextmanager
def bar(first: str, *, quiet: bool = False, lines: bool = False) -> Iterator[Callable[[str, float, float], None]]:
    """What runs now, how much is done, of how much, and the time left: on standard error, where that is a terminal.

    Elsewhere nothing, or with `lines` one for each.
    """
    out = console(file=sys.stderr)
    if quiet or not (out.is_terminal or lines):
        yield lambda doing, done, of: None
    elif not out.is_terminal:
        yield lambda doing, done, of: out.print(f"[{done}/{of}] {doing}", markup=False)
    else:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=18), TimeElapsedColumn(), TextColumn("left"),
                   TimeRemainingColumn())  # fmt: skip
        with Progress(*columns, console=out, transient=True) as progress:
            task = progress.add_task(escape(first), total=None)
            yield lambda doing, done, of: progress.update(
                task, description=escape(doing[:70]), completed=done, total=of
            )


def answer(
    as_json: bool,
    data: Callable[[], Any],
    say: Callable[[Console], object] | str,
    report: Path | None = None,
    wrote: Sequence[Path] = (),
) -> None:
    """What a command found: as JSON for machines, else said to people, with the place of its report or all it wrote."""
    if as_json:
        print(json.dumps(plain(data())))
        return
    out = console()
    if isinstance(say, str):
        out.print(say, markup=False, soft_wrap=True)
    else:
        say(out)
    if report is not None:
        out.print(f"\nreport: {report}", markup=False, soft_wrap=True)
    if wrote:
        out.print(f"\nwrote {', '.join(map(str, wrote))}", markup=False, soft_wrap=True)


def command_line() -> str:
    """The command as it was typed, for what is written."""
    return shlex.join(["fettle", *sys.argv[1:]])


def leave(*, interrupted: bool = False, missed: bool = False) -> None:
    """Leave with exit code 130 where a command was interrupted, and 1 where its limits were not met."""
    if interrupted or missed:
        raise typer.Exit(130 if interrupted else 1)


def print_comparison(console: Console, comparison: Comparison) -> None:
    """What other programs took of the machine, and the recipes beside the workload as given."""
    from fettle.measure import fetching
    from fettle.report import comparison_table, goal_kept, load_lines

    if comparison.interrupted:
        console.print("[yellow]Interrupted: this is what had been measured until then.[/]")
    given, *others = comparison.trials
    for line in load_lines(comparison.trials, comparison.under_load):
        console.print(line, markup=False)
    console.print(comparison_table(comparison.trials, comparison.verdicts, comparison.goal))
    if others and (kept := goal_kept(comparison.goal, given, others[0])):
        console.print(kept)
    for recipe in comparison.left_out:
        console.print(f"There was no time for {recipe}: give a larger --budget.", markup=False)
    if (wider := comparison.another_hour) is not None:
        console.print(f"The intervals are of these minutes: where others share the machine, another hour may say "
                      f"{wider.low:.2f}x to {wider.high:.2f}x of the fastest.", markup=False)  # fmt: skip
    if fetched := fetching(given.slices):
        console.print(f"The model as given takes {fetched}.", markup=False)


def print_table(console: Console, table: Table, title: str = "", without: Collection[str] = ()) -> None:
    """A page's table for the terminal, `without` some of its columns.

    Columns that hold no text are left out, and so are the last ones where there is no room: no number is cut in two.
    """
    blank = [""] * len(table.columns)
    rows = [[cell if isinstance(cell, str) else cell.text for cell in (*row, *blank[len(row) :])] for row in table.rows]
    columns = [(name, [row[i] for row in rows]) for i, name in enumerate(table.columns) if name not in without]
    columns = [(name, texts) for name, texts in columns if any(texts)] or columns
    needed = [_least_width(name, texts, name in table.numbers) for name, texts in columns]
    gap = 2 if sum(needed) + 2 * len(needed) <= console.width else 1
    shown = RichTable(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")
    fit = max(1, sum(sum(needed[: i + 1]) + gap * i < console.width for i in range(len(columns))))
    room = console.width - sum(needed[:fit]) - gap * fit
    for (name, texts), width in zip(columns[:fit], needed, strict=False):  # what room is left goes to them in order
        more = max(0, min(room, max(map(len, (name, *texts))) - width))
        room -= more
        right = name in table.numbers
        shown.add_column(escape(name), justify="right" if right else "left", overflow="fold", width=width + more)
    for number, kind in enumerate(table.kinds or [""] * len(rows)):
        shown.add_row(*(escape(texts[number]) for _, texts in columns[:fit]), style=_STYLES.get(kind, ""))
    console.print()
    if heading := title or table.caption:  # not the table's own title, which wraps where that is narrow
        console.print(heading, style="bold", markup=False)
    console.print(shown)
    if fit < len(columns):
        left = ", ".join(name for name, _ in columns[fit:])
        console.print(f"no room for: {left} (a wider window, or --json)", markup=False)


def _least_width(name: str, texts: Sequence[str], is_number: bool) -> int:
    """The width of a number, or of a text's longest word up to 24 characters."""
    longest = max((len(word) for text in texts for word in ([text] if is_number else text.split())), default=0)
    return max(1, *map(len, name.split()), longest if is_number else min(longest, _MOST_OF_A_WORD))
