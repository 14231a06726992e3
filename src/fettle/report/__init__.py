"""What a person sees: the page, the charts, the tables, a notebook's cell, the progress; and the result as JSON.

Everything here reads a `fettle.result.Result`, or the plain data of a search for a service level, and changes nothing.
Other rooms' pages take their look from `shell` and `theme`, and pass what came from a file through `clean`.
"""

from fettle.report import _theme as theme
from fettle.report import shell
from fettle.report._clean import clean
from fettle.report._theme import svg as chart_svg
from fettle.report._verdict import verdict
from fettle.report.charts import write_charts
from fettle.report.data import load_result, save_result, to_json
from fettle.report.html import page, write_report
from fettle.report.notebook import cell
from fettle.report.progress import progress
from fettle.report.slo import slo_page, write_slo_report
from fettle.report.tables import comparison_table, print_result, result_table

__all__ = [
    "cell", "chart_svg", "clean", "comparison_table", "load_result", "page", "print_result", "progress",
    "result_table", "save_result", "shell", "slo_page", "theme", "to_json", "verdict", "write_charts",
    "write_report", "write_slo_report",
]  # fmt: skip
