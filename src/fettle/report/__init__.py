"""What a person sees: progress, tables, a notebook's cell, page and charts; and takes away: recipe, code, JSON.

Everything here reads a `fettle.result.Outcome`, or the plain data of a search for a service level, and changes nothing.
"""

from fettle.report._facts import elapsed, load_lines, under
from fettle.report._format import interval
from fettle.report._verdict import goal_kept, verdict
from fettle.report.charts import write_charts
from fettle.report.load_page import loads_page
from fettle.report.progress import progress
from fettle.report.result import Result, cell, load_result, page, save, save_result, to_json
from fettle.report.slo import settings as slo_table
from fettle.report.slo import slo_page
from fettle.report.slo_texts import texts_page, texts_table, texts_words
from fettle.report.terminal import comparison_table, print_result

__all__ = [
    "Result", "cell", "comparison_table", "elapsed", "goal_kept", "interval", "load_lines", "load_result", "loads_page",
    "page", "print_result", "progress", "save", "save_result", "slo_page", "slo_table", "texts_page", "texts_table",
    "texts_words", "to_json", "under", "verdict", "write_charts",
]  # fmt: skip
