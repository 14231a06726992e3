"""The rounds behind the announced figure: each slice of the workload as given and of the winner, and which of them
others' work disturbed."""

from __future__ import annotations

from dataclasses import replace

import altair as alt

from fettle.measure import Slice
from fettle.page import Figure, picture, theme
from fettle.page.theme import ACCENT, QUIET, WARN, coloured
from fettle.report import _format as fmt
from fettle.report._facts import unit_name
from fettle.result import Outcome

GIVEN, WINNER, BUSY = "as given", "winner", "taken while others were busy"


def rounds(result: Outcome) -> Figure | None:
    """Time of a call by round, a line for each process; slices that others disturbed are rings."""
    shown = _shown(result)
    if not shown:
        return None
    rows = [
        {
            "round": one.round, "ms": one.ms, "series": name, "process": f"{name} {one.process}",
            "kind": "quiet" if one.quiet else BUSY,
            "others": "not known" if one.others is None else f"{one.others:.0%} of the cores",
        }
        for name, timed in shown.items()
        for one in sorted(timed, key=lambda one: one.round)
    ]  # fmt: skip
    base = alt.Chart(theme.data(rows)).encode(
        x=alt.X("round:Q", title="round", scale=alt.Scale(nice=False, padding=8), axis=alt.Axis(tickMinStep=1)),
        y=alt.Y("ms:Q", title=f"ms a {unit_name(result)} (log)", scale=alt.Scale(type="log"),
                axis=alt.Axis(format="~g", tickCount=5)),
        color=coloured("series", {GIVEN: QUIET, WINNER: ACCENT}),
        detail="process:N",
        tooltip=["series:N", "round:Q", alt.Tooltip("ms:Q", format=".4~g", title="ms"),
                 alt.Tooltip("others:N", title="others took"), "kind:N"],
    )  # fmt: skip
    quiet, busy = (base.transform_filter(f"datum.kind {sign} '{BUSY}'") for sign in ("!=", "=="))
    ring = busy.mark_point(filled=False, size=44, strokeWidth=1.6).encode(color=alt.value(WARN))
    line, dots = base.mark_line(strokeWidth=1, opacity=0.4), quiet.mark_point(filled=True, size=30)
    parts = []
    for name, timed in shown.items():
        low, high = min(one.ms for one in timed), max(one.ms for one in timed)
        disturbed = sum(not one.quiet for one in timed) or "none"
        span = f"{fmt.milliseconds(low)} to {fmt.milliseconds(high)} a {unit_name(result)}"
        parts.append(f"{name} {span} in {len(timed)} slices, {disturbed} of them {BUSY} (rings)")
    words = f"Time of a {unit_name(result)} by round: {'; '.join(parts)}."
    return picture("rounds", "The final race, round by round", words, 220, line, dots, ring)


def _shown(result: Outcome) -> dict[str, list[Slice]]:
    """The slices of the two whose ratio is announced, in the time of as many rows as the workload has as given; nothing
    where no recipe won or nobody kept the rounds."""
    baseline, winner = result.baseline, result.winner
    if baseline is None or winner is None or not winner.recipe.levels:
        return {}
    both = {
        name: [replace(one, ms=one.ms * (baseline.samples / trial.samples)) for one in trial.slices if one.ms > 0]
        for name, trial in ((GIVEN, baseline), (WINNER, winner))
    }
    return both if all(len(timed) > 1 for timed in both.values()) else {}
