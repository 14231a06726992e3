"""One self-contained HTML page about a trace or a folder of ranks: evidence first, no network, nothing executed from
the trace. `page` writes it; each other module holds a few of its sections, `section` what a section is made of.
"""

from fettle.trace.report.page import write_report

__all__ = ["write_report"]
