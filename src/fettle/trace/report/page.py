"""The page: its sections in their order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import polars as pl

from fettle.errors import UsageError
from fettle.files import write_text
from fettle.trace.model import Trace


def write_report(traces: list[Trace], target: Path, *, before: Trace | None = None) -> list[str]:
    """Write the page, whole or not at all.

    Args:
        before: Another trace, compared with the first one in a section of its own.

    Returns:
        What could not be computed, one line each (also on the page).
    """
    from fettle.page import clean, shell  # the chart library takes longer to load than all the rest
    from fettle.trace.report import device, host, overview, path
    from fettle.trace.report.section import Section

    builders: list[Callable[[list[Trace]], Section | None]] = [
        overview.health,
        *([] if before is None else [path.against(before)]),
        overview.account,
        overview.idle,
        path.critical,
        path.slow_steps,
        device.kernels,
        device.products,
        device.launches,
        device.communication,
        device.queues,
        host.operators,
        host.host,
        path.timeline,
        path.memory,
    ]
    sections: list[Section] = []
    failed: list[str] = []
    for build in builders:
        # A part that cannot be made must not cost the others; what failed is said on the page.
        try:
            section = build(traces)
        except (ArithmeticError, ValueError, KeyError, IndexError, UsageError, pl.exceptions.PolarsError) as error:
            failed.append(f"{build.__name__.replace('_', ' ')}: {type(error).__name__}: {error}")
            continue
        if section is not None:
            sections.append(section)
    sections = clean(sections)
    name = clean(", ".join(sorted({t.path.name for t in traces})[:4]))
    page = shell.render(
        "fettle.trace.report",
        "page.html.j2",
        f"fettle trace: {name}",
        [chart for section in sections for chart in section.charts],
        stills=False,  # as many as these would make the page too large
        name=name,
        ranks=len(traces),
        tiles=clean(overview.tiles(traces)),
        verdict=clean(overview.verdict(traces)),
        sections=sections,
        failed=clean(failed),
    )
    write_text(target, page)
    return failed
