"""The page of a guided run: what each step found, what it brought, and what it handed to the next."""

from __future__ import annotations

from collections.abc import Sequence

from fettle.improve.state import Step
from fettle.page import Table, clean, shell
from fettle.report import interval
from fettle.units import seconds_text

TITLES = {
    "measure": "Measure", "diagnose": "Diagnose", "data": "Input pipeline", "tune": "Tune", "verify": "Verify",
    "package": "Package",
}  # fmt: skip


def page(headline: str, target: str, steps: Sequence[Step]) -> str:
    """The page as text."""
    return shell.render(
        "fettle.improve", "page.html.j2", clean(f"Improve {target}"), target=clean(target), headline=clean(headline),
        table=table(steps), steps=clean(steps), titles=TITLES,
    )  # fmt: skip


def table(steps: Sequence[Step]) -> Table:
    """A row a step."""
    rows = [
        (TITLES[step.name], step.status, gain_text(step),
         "" if step.status == "skipped" else seconds_text(step.seconds), step.passes_on)
        for step in steps
    ]  # fmt: skip
    kinds = ["failed" if step.status == "failed" else "" for step in steps]
    return Table(("step", "", "brought", "took", "handed on"), rows, ("brought", "took"), kinds=kinds, stack=True)


def gain_text(step: Step) -> str:
    """The ratio with its interval, where there is one."""
    return "" if step.speedup is None else interval(step.speedup)
