"""The diagnosis as one HTML file that needs no network."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import jinja2

from fettle.diagnose.diagnosis import Diagnosis
from fettle.diagnose.verify import Verified
from fettle.recipe import write_text

COLOURS = ("#1f77a8", "#d27a22", "#2f9a6c", "#b4588e", "#7d6bc4", "#a48a17", "#c24d4d", "#5b7083", "#8a949e")


def write_report(diagnosis: Diagnosis, checked: Sequence[Verified], path: Path, command: str = "") -> None:
    """Write the page, whole or not at all. Raises `UsageError` when it cannot be written."""
    write_text(path, page(diagnosis, checked, command))


def page(diagnosis: Diagnosis, checked: Sequence[Verified] = (), command: str = "") -> str:
    """The page as text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    parts = [
        {"name": name, "share": share, "colour": COLOURS[index % len(COLOURS)]}
        for index, (name, share) in enumerate(sorted(diagnosis.budget.items(), key=lambda item: -item[1]))
        if share >= 0.001
    ]
    template = environment.get_template("diagnosis.html.j2")
    return template.render(
        d=diagnosis, parts=parts, verified={item.finding.rule: item for item in checked}, command=html.unescape(command)
    )
