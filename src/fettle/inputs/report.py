"""The search as a curve: batches a second over workers."""

from __future__ import annotations

from pathlib import Path

from fettle.errors import UsageError
from fettle.inputs.search import Found


def write_curve(found: Found, path: Path) -> None:
    """Write the curve as .html (needs no network), .png or .svg. Raises `UsageError` for another ending."""
    import altair as alt

    if path.suffix not in (".html", ".png", ".svg"):
        raise UsageError(f"{path}: the curve is written as .html, .png or .svg")
    if not path.resolve().parent.is_dir():
        raise UsageError(f"{path.parent}: no such folder for the curve")
    rows = [
        {"workers": item.setting.num_workers, "batches a second": rate, "prefetch": str(item.setting.prefetch_factor),
         "setting": item.setting.code, "which": _which(item is found.given, item is found.best)}
        for item in found.settings for rate in item.rates
    ]  # fmt: skip
    base = alt.Chart(alt.Data(values=rows), title=found.verdict).encode(  # type: ignore[no-untyped-call]
        x=alt.X("workers:O", title="worker processes", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("batches a second:Q", scale=alt.Scale(zero=True)),
    )
    points = base.mark_circle(size=70, opacity=0.75).encode(
        color=alt.Color("which:N", title=None), tooltip=["setting:N", "batches a second:Q"]
    )
    line = base.mark_line(color="#8a949e").encode(y="median(batches a second):Q")
    chart = (line + points).properties(width=560, height=300)
    try:
        if path.suffix == ".html":
            chart.save(str(path), inline=True)
        else:
            chart.save(str(path), scale_factor=2)
    except OSError as error:
        raise UsageError(f"{path}: the curve could not be written ({error.strerror})") from error


def _which(given: bool, best: bool) -> str:
    return "as given, and best" if given and best else "as given" if given else "take this" if best else "tried"
