"""A result as the output of a notebook's cell: the verdict, the ladder as a picture, the fastest trials."""

from __future__ import annotations

from html import escape

from fettle.page import clean
from fettle.report import _facts, _verdict
from fettle.report import _format as fmt
from fettle.report.charts import ladder
from fettle.result import Outcome

ROWS = 8


def cell(result: Outcome) -> str:
    """HTML without scripts or styles of its own, so that it looks like the notebook it is in."""
    result = clean(result)
    picture = ladder(result)
    rows = [
        "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in (
            fmt.milliseconds(trial.time_ms), fmt.interval(trial.speedup), fmt.error(trial.accuracy.error),
            _facts.status_of(result, trial), _facts.name_of(trial.recipe),
        )) + "</tr>"
        for trial in _facts.ranked(result)[:ROWS]
    ]  # fmt: skip
    head = "".join(f"<th>{name}</th>" for name in ("time", "speed-up", "error", "status", "recipe"))
    more = len(result.trials) - len(rows)
    return "\n".join(
        [
            f"<p><b>{escape(_verdict.verdict(result))}</b> {escape(_verdict.payback(result))}</p>",
            picture.svg() if picture else "",
            f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>",
            f"<p>and {more} more; result.save(folder) writes the report</p>" if more > 0 else "",
        ]
    )
