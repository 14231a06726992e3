"""fettle techniques: the catalogue, and what of it can be used here."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fettle.cli import _options, _show


def command(
    target: Annotated[
        str | None, typer.Argument(help="a workload to judge availability for; without it the machine alone")
    ] = None,
    mode: _options.Mode = "auto",
    as_json: _options.AsJson = False,
) -> None:
    """List the techniques with their levels, and why a level cannot be used here.

    fettle techniques
    fettle techniques model.py:classifier --json
    """
    from fettle.errors import refusing
    from fettle.measure import Worker, WorkerError, messages
    from fettle.techniques import CATALOGUE, machine_facts
    from fettle.workload import check_mode, find_target

    check_mode(mode)
    if target is None:
        facts = machine_facts("training" if mode == "training" else "inference")
    else:
        named = replace(find_target(target), mode=mode)
        with refusing("the workload could not be probed:", WorkerError), Worker() as worker:
            worker.ask(messages.Build(named), messages.Built, 600)
            facts = worker.ask(messages.Probe(), messages.Probed, 600).facts
    catalogue = [technique for technique in CATALOGUE if facts.mode in technique.modes]
    rows = [{"technique": t.name, "title": t.title, "default": t.default, "levels": t.levels(facts)} for t in catalogue]
    table = Table("technique", "level", "what it does", "here", box=None, header_style="bold", pad_edge=False)
    for technique in catalogue:
        for index, level in enumerate(technique.levels(facts)):
            state = "as given" if level.name == technique.default else level.why_not or "yes"
            style = "dim" if level.why_not else None
            texts = (technique.name if index == 0 else "", level.name, level.summary, state)
            table.add_row(*map(escape, texts), style=style)
    data = {"facts": facts, "techniques": rows}
    _show.answer(as_json, lambda: data, lambda console: console.print(table))
