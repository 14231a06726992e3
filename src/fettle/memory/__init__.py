"""Allocator snapshots: who holds the memory, does it leak, is it fragmented, and what to change.

Other rooms use what is exported here: `read` a snapshot file, `analyse` it, `compare` two, `record` one in a program,
and write the `report`.
"""

from fettle.memory.analysis import Analysis, analyse, as_json, verdict
from fettle.memory.difference import Difference, compare
from fettle.memory.fragmentation import Fit, would_fit
from fettle.memory.reading import parse, read
from fettle.memory.record import record
from fettle.memory.report import write_report
from fettle.memory.snapshot import Snapshot

__all__ = [
    "Analysis", "Difference", "Fit", "Snapshot", "analyse", "as_json", "compare", "parse", "read", "record", "verdict",
    "would_fit", "write_report",
]  # fmt: skip
