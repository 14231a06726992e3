"""A gate in words: a table for the terminal, and one in Markdown for the comment of a merge request."""

from __future__ import annotations

import math
from statistics import geometric_mean

from fettle.gate.bisecting import Bisection
from fettle.gate.gating import Gate
from fettle.gate.judging import Judged, percent
from fettle.measure import Trial
from fettle.page import Table, clean
from fettle.units import size_text

_SIGNS = {"worse": "❌", "within": "✅", "cannot tell": "❓"}


def headline(gate: Gate) -> str:
    """The verdict as a sentence."""
    if gate.reason:
        return f"{gate.name} does not run in the {gate.new}: {gate.reason}"
    verb = {"worse": "is worse than", "within": "is within the limit of", "cannot tell": "cannot be told from"}
    ending = "" if gate.verdict != "cannot tell" else " well enough"
    return f"{gate.name}: {gate.new} {verb[gate.verdict]} {gate.old}{ending}"


def table(gate: Gate) -> Table:
    """A row a figure."""
    rows = [
        (one.what, _value(gate.trials[0], one), _value(gate.trials[1], one), percent(one.change),
         f"{100 * one.limit:.3g}%", one.verdict)
        for one in gate.judged
    ]  # fmt: skip
    kinds = ["failed" if one.verdict == "worse" else "" for one in gate.judged]
    return Table(("", "old", "new", "change", "limit", "verdict"), clean(rows), ("old", "new", "change", "limit"),
                 kinds=kinds)  # fmt: skip


def lines(gate: Gate) -> list[str]:
    """What else should be known, a sentence each."""
    new = gate.trials[1]
    notes = [f"Cannot tell: {text}." for text in gate.settled_by]
    notes += [] if new.is_quiet else [f"The machine was busy ({new.load})."]
    return [*notes, *(f"Note: {note}." for note in gate.notes)]


def markdown(gate: Gate) -> str:
    """The same for a comment."""
    sign = _SIGNS[gate.verdict]
    head = f"{sign} **{_escaped(headline(gate))}**"
    shown = table(gate)
    body = [" | ".join(row) for row in ([str(cell) for cell in row] for row in shown.rows)]
    grid = ["| | old | new | change | limit | |", "| - | -: | -: | -: | -: | - |", *(f"| {row} |" for row in body)]
    sides = (
        f"old: `{_quoted(gate.old)}`, new: `{_quoted(gate.new)}`; {gate.trials[1].processes} processes a side, "
        f"interleaved; {_escaped(gate.machine.summary)}"
    )
    notes = [_escaped(line) for line in lines(gate)]
    return "\n".join([head, "", *(grid if body else []), "", f"<sub>{sides}</sub>", *("\n" + line for line in notes)])


def bisection_lines(bisection: Bisection) -> list[str]:
    """What a bisection found, a sentence each."""
    steps = [f"{step.name}: {percent(step.change)} against GOOD, {step.verdict}" for step in bisection.steps]
    return [*steps, "", bisection.sentence, bisection.error_rate, *(f"Note: {note}." for note in bisection.notes)]


def bisection_markdown(bisection: Bisection) -> str:
    """The same for a comment."""
    rows = [f"| `{_quoted(s.name)}` | {percent(s.change)} | {_escaped(s.verdict)} |" for s in bisection.steps]
    grid = ["| commit | time against GOOD | |", "| - | -: | - |", *rows]
    notes = [f"\nNote: {_escaped(note)}." for note in bisection.notes]
    sides = f"<sub>{bisection.error_rate}</sub>"
    return "\n".join([f"**{_escaped(bisection.sentence)}**", "", *grid, "", sides, *notes])


def _value(trial: Trial, one: Judged) -> str:
    if one.what == "memory":
        peaks = trial.peaks_bytes  # of the processes, whose mean is compared
        return size_text(geometric_mean(peaks)) if min(peaks, default=0) > 0 else "–"
    return f"{trial.time_ms:.4g} ms" if math.isfinite(trial.time_ms) else "–"


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is, on one line; a mention of somebody mentions nobody."""
    marked = "".join("\\" + letter if letter in "\\`*_{}[]<>#|~" else letter for letter in " ".join(text.split()))
    return marked.replace("@", "@&#8203;")


def _quoted(text: str) -> str:
    return " ".join(text.replace("`", "'").replace("|", "/").split())
