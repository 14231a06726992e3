"""One chart a question. Every chart takes frames of the analyses and returns an Altair chart; none computes.

Charts are as wide as what holds them and name no ink and no paper: the page, or `save`, brings the look. Labels stand
above their bars, so that a kernel's name of eighty characters costs no width on a phone.
"""

from fettle.trace.report.charts.bars import (
    PLACE,
    account_chart,
    bar_chart,
    change_chart,
    split_bars,
    stacked,
    step_chart,
    what_if_chart,
)
from fettle.trace.report.charts.counts import (
    arrival_chart,
    collective_chart,
    counter_chart,
    launch_charts,
    roofline_chart,
    size_chart,
    stack_of,
)
from fettle.trace.report.charts.lines import bandwidth_chart, blocks, queue_chart, step_line
from fettle.trace.report.charts.look import main_parts, save, sized

__all__ = [
    "PLACE", "account_chart", "arrival_chart", "bandwidth_chart", "bar_chart", "blocks", "change_chart",
    "collective_chart", "counter_chart", "launch_charts", "main_parts", "queue_chart", "roofline_chart", "save",
    "size_chart", "sized", "split_bars", "stack_of", "stacked", "step_chart", "step_line", "what_if_chart",
]  # fmt: skip
