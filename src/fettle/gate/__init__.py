"""The performance gate: the same target in two revisions of its code, or in two environments, raced side by side."""

from fettle.gate.bisecting import Bisection, bisect, bisection_json
from fettle.gate.gating import Gate, gate, gate_json
from fettle.gate.judging import Judged, judge
from fettle.gate.racing import Settings
from fettle.gate.words import bisection_lines, bisection_markdown, headline, lines, markdown, table

__all__ = [
    "Bisection", "Gate", "Judged", "Settings", "bisect", "bisection_json", "bisection_lines", "bisection_markdown",
    "gate", "gate_json", "headline", "judge", "lines", "markdown", "table",
]  # fmt: skip
