"""The page of a study: one HTML file that needs no network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fettle.page import Cell, Figure, Table, clean, shell
from fettle.studies import table as studied
from fettle.studies.analysis import Analysis
from fettle.studies.checks import HeldOut
from fettle.studies.outcome import Rung
from fettle.studies.sentences import between, times
from fettle.units import count_text

_MOST = 60
MISSING = "–"


def page(
    name: str,
    table: studied.Table,
    analyses: Sequence[Analysis],
    drawn: Sequence[Figure],
    notes: Sequence[str] = (),
    steps: Mapping[str, Sequence[Rung]] | None = None,
) -> str:
    sections = [_section(place, table, analysis) for place, analysis in enumerate(analyses)]
    lost = [row for row in table.experiments if row.reason and not row.values]
    failed = [Cell(table.label(row), rest=f": {row.reason}") for row in lost]
    placed = {name for section in sections for name in section["figures"]}
    conclusion = _best_step(steps) if steps else headline(analyses)
    return shell.render(
        "fettle.studies", "page.html.j2", clean(name), drawn, name=clean(name), headline=clean(conclusion),
        sections=clean(sections), loose=[figure.name for figure in drawn if figure.name not in placed],
        notes=clean(list(notes)), machines=clean(machines_table(table)),
        failed=clean(failed[:_MOST]), experiments=len(table.experiments),
    )  # fmt: skip


def machines_table(table: studied.Table) -> Table:
    """Who measured how much: a row a machine."""
    claims: dict[tuple[str, str], list[bool]] = {}
    for row in table.experiments:
        if row.machine:
            claims.setdefault((row.machine, row.host), []).append(bool(row.values))
    rows = [(Cell(kind, code=True), host or MISSING, str(len(ran)), str(ran.count(False)))
            for (kind, host), ran in sorted(claims.items())]  # fmt: skip
    return Table(("kind of machine", "host", "experiments", "failed"), rows, numbers=("experiments", "failed"))


def headline(analyses: Sequence[Analysis]) -> str:
    """The surest surprise in the first response that has any, or its largest gain where nothing is surprising, of fits
    that are to be believed. Where it is not the first of all responses, what its ratios count."""
    said = [analysis for analysis in analyses if analysis.sentences]
    believed = [analysis for analysis in said if analysis.checks is None or analysis.checks.believed]
    if not believed:
        return "What was measured" + (": these effects are not to be believed" if said else "")
    sentence, analysis = max(
        ((sentence, analysis) for analysis in believed if analysis.response == believed[0].response
         for sentence in analysis.sentences), key=lambda item: (item[0].is_surprise, item[0].size),
    )  # fmt: skip
    response = analysis.response
    counted = response.name if response.better == "better" else response.better
    of = [analysis.group, counted if response != analyses[0].response else ""]
    return sentence.text + (f" ({', '.join(filter(None, of))})" if any(of) else "")


def _best_step(steps: Mapping[str, Sequence[Rung]]) -> str:
    """What the fastest step of all ladders came to, of those whose answers are right and that a ladder kept."""
    ran = [(rung.speedup.estimate, rung, name) for name, rungs in steps.items() for rung in rungs
           if rung.speedup and rung.speedup.is_known]  # fmt: skip
    right = [(ratio, rung, name) for ratio, rung, name in ran if rung.status == "measured"
             and (rung.kept or rung.label.startswith("without "))]  # fmt: skip
    if not right:
        return "No step keeps the limit on the error" if ran else "No step ran"
    ratio, rung, name = max(right, key=lambda item: item[0])
    where = f" ({name})" if len(steps) > 1 else ""
    return f"{rung.recipe}: {ratio:.2f}x as fast as given, the best of {count_text(len(steps[name]), 'step')}{where}"


def _section(place: int, table: studied.Table, analysis: Analysis) -> dict[str, Any]:
    """One response of one group, as text and tables."""
    group = table.groups.index(analysis.group)
    response = table.responses.index(analysis.response)
    names = [f"forest-{group}-{response}", f"matrix-{group}-{response}"]
    if response == 0:
        names = [f"scatter-{group}", *names, *(f"across-{group}-{factor}" for factor in table.factors)]
    if response == len(table.responses) - 1:
        names += [f"front-{group}", f"runs-{group}"]
    return {
        "title": analysis.title, "lead": lead(analysis),
        "warnings": [doubt.text for doubt in analysis.checks.doubts] if analysis.checks else [],
        "surprises": [sentence.text for sentence in analysis.surprises],
        "helps": [sentence.text for sentence in analysis.sentences if not sentence.is_surprise],
        "numbers": effects_table(analysis), "shares": shares_table(analysis), "figures": names,
    }  # fmt: skip


def lead(analysis: Analysis) -> str:
    """How good the fit is, in a sentence or two."""
    if analysis.checks is None:
        return f"No fit: {analysis.why_not}."
    checks = analysis.checks
    believed = "" if checks.believed else "Do not believe these effects: see what is wrong with the fit. "
    missing = f" ({analysis.missing} more have none)" if analysis.missing else ""
    return (
        f"{believed}{analysis.experiments} experiments{missing}; effects and pairs explain {checks.explained:.1%} of "
        f"the variance of log {analysis.response.name}. {_held_out(checks.held_out)}"
        + (f" {analysis.pooling}" if analysis.pooling else "")
    )


def _held_out(held: HeldOut) -> str:
    if not held.cells:
        return "No combination can be predicted without having been measured."
    alone = f"; {held.alone} combinations cannot be predicted without being measured" if held.alone else ""
    return (
        f"Held out in turn, {held.cells} combinations are predicted to within {held.off:.3g}x (root mean square), "
        f"where the mean of the others is {held.mean_off:.3g}x off{alone}."
    )


def effects_table(analysis: Analysis) -> Table:
    """Every effect with its interval; what is unknown with the reason."""
    ordered = sorted(analysis.effects, key=lambda one: (-one.certain, one.ratio is None, len(one.levels)))
    rows = []
    for effect in ordered[:_MOST]:
        ratio = effect.ratio
        known = ratio is not None and ratio.low > 0 and math.isfinite(ratio.high)
        interval = between(ratio) if ratio is not None and known else MISSING
        estimate = times(ratio.estimate) if ratio is not None else MISSING
        p = f"{effect.p:.2g}" if math.isfinite(effect.p) else MISSING
        reading = effect.reading + (f": {effect.why}" if effect.why else "")
        rows.append((Cell(effect.label, code=True), estimate, interval, p, str(effect.experiments), reading))
    columns = ("effect", f"times {analysis.response.better}", "95% interval", "p (Holm)", "experiments", "reading")
    return Table(columns, rows, numbers=columns[1:5], more=max(0, len(ordered) - _MOST), stack=True)


def shares_table(analysis: Analysis) -> Table:
    """What each factor and pair explains of the variance, and how important Optuna holds each factor."""
    shown: Mapping[tuple[str, ...], float] = dict(list(analysis.shares.items())[:12])
    other = analysis.importance
    rows: list[tuple[Cell | str, ...]] = []
    for names, share in shown.items():
        if share >= 0.0005:
            alone = f"{other[names[0]]:.1%}" if len(names) == 1 and names[0] in other else MISSING
            rows.append((Cell(" × ".join(names), code=True), Cell(f"{share:.1%}", bar=100 * min(1.0, share)),
                         *([alone] if other else [])))  # fmt: skip
    columns = ("share of variance", *(["importance (fANOVA)"] if other else []))
    return Table(("factor or pair", *columns), rows, numbers=columns)
