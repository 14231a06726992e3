"""`%%fettle`: a cell of a notebook with two or more snippets, raced against each other in the notebook's own process.

The snippets take turns in random order, round after round, so that what slows the machine down slows all of them; each
is told from the first by the paired rounds (`fettle.measure.log_interval`), looked at as often as a race of recipes is.
One process says nothing of how processes differ: `fettle.bench` starts several of each, and compares the answers too.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import shlex
import statistics
import sys
import textwrap
import time
import timeit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from fettle.errors import UsageError, refusing
from fettle.measure import Interval, log_interval, ratio_interval, verdict
from fettle.measure._statistics import LOOKS
from fettle.measure._watch import Surroundings
from fettle.units import count_text, seconds_text
from fettle.workload import wait_for

SLICE_S = 0.05
"""A snippet runs again and again for so long; one that takes longer is a slice of its own."""
KNOWN = 0.01
"""Half an interval's width at which nothing more is to be learned, and a difference that is none."""


@dataclass(frozen=True)
class Snippet:
    """One snippet's figures."""

    name: str
    seconds: float
    """Time of one run, the median of its slices."""
    speedup: Interval
    """Over the first snippet; above 1 is faster."""


@dataclass(frozen=True)
class Snippets:
    """How the snippets of a cell compare; a notebook shows it as a table."""

    rows: tuple[Snippet, ...]
    rounds: int
    load: str
    """What is to be said where the machine was busy; empty where it was quiet."""

    def lines(self) -> list[tuple[str, str, str, str]]:
        """Name, time, speed-up and verdict of each, as text."""
        rows = []
        for index, row in enumerate(self.rows):
            told = (row.speedup.text, verdict(row.speedup, KNOWN)) if index else ("", "as given")
            rows.append((row.name, seconds_text(row.seconds), *told))
        return rows

    def __str__(self) -> str:
        names = max(len(row.name) for row in self.rows)
        texts = [f"{name:{names}}  {spent:>8}  {speedup:18}  {verdict}".rstrip()
                 for name, spent, speedup, verdict in self.lines()]  # fmt: skip
        return "\n".join([*texts, f"{self.load}{count_text(self.rounds, 'round')} in this process"])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in line)}</tr>" for line in self.lines()
        )  # fmt: skip
        head = "".join(f"<th>{name}</th>" for name in ("snippet", "one run", "speed-up", ""))
        note = f"{self.load}{count_text(self.rounds, 'round')} in this process."
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{escape(note)}</p>"


def snippets_of(cell: str) -> dict[str, str]:
    """The snippets of a cell by name: a comment in a snippet's first line, else its first line of code.

    Lines of three dashes or more stand between them. Raises `UsageError` for fewer than two, or an empty one.
    """
    parts = [textwrap.dedent(part).strip("\n") for part in re.split(r"(?m)^-{3,}[ \t]*$\n?", cell)]
    if len(parts) < 2 or not all(part.strip() for part in parts):
        raise UsageError("give two snippets or more, with a line --- between them")
    named: dict[str, str] = {}
    for part in parts:
        first = part.strip().splitlines()[0].strip()
        name = first.lstrip("# ")[:60] or "snippet"
        while name in named:
            name += "'"
        named[name] = part
    return named


def compare(
    snippets: Mapping[str, str], names: dict[str, Any], *, seconds: float = 5.0, confidence: float = 0.95
) -> Snippets:
    """Race snippets that see `names`; what they assign stays in them. The first is what the others are compared with.

    Ends after `seconds`, or when all differences are known to within 1%. Raises `UsageError` for one that does not
    compile; what a snippet raises itself comes through.
    """
    timers = []
    for name, code in snippets.items():
        with refusing(f"the snippet {name!r} is not Python:", SyntaxError):
            timers.append(timeit.Timer(code, globals=names))
    surroundings = Surroundings()
    counts = [_runs_of_a_slice(timer) for timer in timers]
    end, taken = time.monotonic() + seconds, [list[float]() for _ in timers]
    alpha = (1 - confidence) / len(LOOKS)
    while len(taken[0]) < LOOKS[-1] and (time.monotonic() < end or len(taken[0]) < LOOKS[0]):
        for index in random.sample(range(len(timers)), len(timers)):
            taken[index].append(_slice(timers[index], counts[index]))
        if len(taken[0]) in LOOKS:
            known = [log_interval(_ratios(taken[0], of), alpha) for of in taken[1:]]
            if all((interval.high - interval.low) / 2 < KNOWN for interval in known):
                break
    rows = [
        Snippet(name, statistics.median(of), ratio_interval(_ratios(taken[0], of), alpha))
        for name, of in zip(snippets, taken, strict=True)
    ]
    return Snippets(tuple(rows), len(taken[0]), surroundings.look().under)


def _ratios(first: Sequence[float], other: Sequence[float]) -> list[float]:
    return [math.log(one / two) for one, two in zip(first, other, strict=True)]


def _slice(timer: timeit.Timer, runs: int) -> float:
    """Seconds of one run; work on an accelerator is waited for."""
    wait_for()
    began = time.perf_counter()
    timer.timeit(runs)
    wait_for()
    return (time.perf_counter() - began) / runs


def _runs_of_a_slice(timer: timeit.Timer) -> int:
    """After one run to warm up."""
    _slice(timer, 1)
    runs, spent = 1, _slice(timer, 1)
    while runs * spent < SLICE_S / 2:
        runs = max(runs + 1, min(100 * runs, int(SLICE_S / max(spent, 1e-9))))
        spent = _slice(timer, runs)
    return runs


def register(shell: Any) -> None:
    """Make `%%fettle` known to an IPython shell."""
    parser = argparse.ArgumentParser(prog="%%fettle", exit_on_error=False, add_help=False)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--confidence", type=float, default=0.95)

    def fettle(line: str, cell: str) -> Snippets | None:
        """Race snippets that are separated by a line ---: %%fettle [--seconds 5] [--confidence 0.95]"""
        try:
            try:
                options, rest = parser.parse_known_args(shlex.split(line))
            except (argparse.ArgumentError, ValueError) as error:  # here alone: a snippet raises what it likes
                raise UsageError(str(error)) from error
            if rest or not options.seconds > 0 or not 0.5 <= options.confidence < 1:
                raise UsageError("%%fettle takes --seconds above 0 and --confidence from 0.5 to below 1")
            return compare(
                snippets_of(cell), shell.user_ns, seconds=options.seconds, confidence=options.confidence
            )  # fmt: skip
        except UsageError as error:
            print(f"fettle: {error}", file=sys.stderr)
            return None

    shell.register_magic_function(fettle, magic_kind="cell", magic_name="fettle")
