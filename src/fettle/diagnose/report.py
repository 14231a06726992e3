"""The diagnosis as one HTML file that needs no network."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import altair as alt

from fettle.diagnose.diagnosis import Diagnosis
from fettle.diagnose.finding import Finding, Verified
from fettle.diagnose.roofline import Roof, Roofline
from fettle.page import Cell, Row, Still, Table, shell, still, theme
from fettle.page.theme import sized
from fettle.techniques import parts_lines

Bar = tuple[str, float, str, bool]
"""Name, width in percent, its text, and whether it was brought by a fix."""
COLOURS = (*theme.LEVERS, theme.SLATE, theme.QUIET)


def page(diagnosis: Diagnosis, checked: Sequence[Verified] = (), command: str = "") -> str:
    shares = [(name, share) for name, share in diagnosis.budget_lines if share >= 0.001]
    parts = [
        {"name": name, "share": share, "text": f"{share:.1%}", "colour": colour}
        for (name, share), colour in zip(shares, itertools.cycle(COLOURS), strict=False)
    ]
    roofs = diagnosis.roofline
    return shell.render(
        "fettle.diagnose",
        "diagnosis.html.j2",
        f"Diagnosis: {diagnosis.name}",
        d=diagnosis,
        parts=parts,
        roofs=roofs,
        pipeline=_pipeline(diagnosis),
        roofs_of=_table,
        places=_places,
        picture=_picture(diagnosis, roofs),
        before_after=_before_after(checked),
        verified={item.finding.rule: item for item in checked},
        command=command,
    )


def _pipeline(diagnosis: Diagnosis) -> list[Bar]:
    """What each part of a pipeline takes of a call."""
    lines = parts_lines(diagnosis.evidence.facts) if diagnosis.evidence is not None else []
    return [(f"{name} ({calls} calls)" if calls > 1 else name, 100 * share, f"{share:.1%}", False)
            for name, calls, _, share, _ in lines]  # fmt: skip


def _before_after(checked: Sequence[Verified]) -> list[Bar]:
    """What each fix left of the time as given, the fastest first."""
    left = sorted(
        {
            (1 / (item.before.estimate * item.speedup.estimate), item.recipe)
            for item in checked
            if item.speedup is not None
        }
    )
    return [
        ("as given", 100.0, "100%", False),
        *((name, min(100 * part, 100), f"{part:.0%}", True) for part, name in left),
    ]


def _places(finding: Finding) -> list[Bar]:
    """Drawn relative to the largest, labelled with the share of the call."""
    most = max(1e-9, *(share for _, share in finding.parts))
    return [(name, 100 * max(share, 0) / most, f"{share:.0%}", False) for name, share in finding.parts]


def _table(what: str, roofs: Sequence[Roof]) -> Table:
    columns = (what, "time", "GFLOP/s", "at the roof", "reached", "limit")
    rows: list[Row] = [
        [
            Cell(roof.name[:120], notes=[roof.kind] if roof.kind else []),
            f"{roof.seconds * 1e3:.3g} ms",
            f"{roof.flops_per_s / 1e9:.3g}" if roof.flops else "",
            f"{roof.reachable_flops_per_s / 1e9:.3g}" if roof.flops else "",
            f"{roof.reached:.0%}",
            roof.limit,
        ]
        for roof in roofs
    ]
    return Table(columns, rows, columns[1:])


def _picture(diagnosis: Diagnosis, roofs: Roofline | None) -> Still | None:
    """Operators under their roofs, FLOP/s over FLOPs a byte, both logarithmic; None where none multiplies."""
    points = [roof for roof in roofs.operators if roof.flops and roof.bytes and roof.seconds > 0][:20] if roofs else []
    if not points or diagnosis.evidence is None:
        return None
    peaks = diagnosis.evidence.peaks
    bandwidth = peaks.get("copy", 0.0)
    kinds = {roof.kind for roof in points}
    tops = {kind: peaks[f"matmul_{kind}"] for kind in sorted(kinds) if f"matmul_{kind}" in peaks}
    low, high = min(roof.intensity for roof in points) / 2, max(roof.intensity for roof in points) * 2
    ridge = [top / bandwidth for top in tops.values()] if bandwidth else []
    lines = [
        {"x": x, "y": min(top, x * bandwidth) / 1e9 if bandwidth else top / 1e9, "roof": f"{kind} peak"}
        for kind, top in tops.items()
        for x in sorted({low, high, *(edge for edge in ridge if low < edge < high)})
    ]
    dots = [
        {"x": roof.intensity, "y": roof.flops_per_s / 1e9, "name": roof.name.removeprefix("aten."),
         "ms": roof.seconds * 1e3}
        for roof in points
    ]  # fmt: skip
    x = alt.X("x:Q", scale=alt.Scale(type="log"), title="FLOPs a byte")
    y = alt.Y("y:Q", scale=alt.Scale(type="log"), title="GFLOP/s")
    roof = alt.Chart(theme.data(lines)).mark_line(strokeWidth=2).encode(x=x, y=y, color=alt.Color("roof:N", title=None))
    marks = (
        alt.Chart(theme.data(dots))
        .mark_circle(opacity=0.8, color=theme.WARN)
        .encode(x=x, y=y, size=alt.Size("ms:Q", legend=None, scale=alt.Scale(range=[40, 500])))
    )
    names = alt.Chart(theme.data(dots)).mark_text(align="left", dx=9, dy=-7).encode(x=x, y=y, text="name:N")
    chart = sized(260, roof, marks, names)
    return still("operators under their roofs", lambda narrow: chart.to_dict(), wide=640)
