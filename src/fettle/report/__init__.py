"""What a person takes away: recipe, code and page as files, the charts, the terminal tables, the result as JSON.

Everything here reads a `fettle.result.Result`, or the plain data of a search for a service level, and changes nothing.
"""

from fettle.report.charts import write_charts
from fettle.report.data import load_result, save_result, to_json
from fettle.report.html import page, write_report
from fettle.report.slo import slo_page, write_slo_report
from fettle.report.tables import comparison_table, print_result, result_table
from fettle.report.takeaway import save

__all__ = [
    "comparison_table", "load_result", "page", "print_result", "result_table", "save", "save_result", "slo_page",
    "to_json", "write_charts", "write_report", "write_slo_report",
]  # fmt: skip
