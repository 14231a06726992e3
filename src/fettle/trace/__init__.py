"""Profiler traces: open them, ask them where the time went, compare them.

Open with `load` (a file) or `load_all` (a folder of ranks). Every analysis is a function over the loaded trace that
returns a polars frame whose columns its docstring names; times are integer nanoseconds. Other rooms use what is
exported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fettle.trace.account import account_total, time_account
from fettle.trace.arrival import arrival, stragglers
from fettle.trace.attribution import attribute_kernels, kernels_under
from fettle.trace.check import identities
from fettle.trace.communication import collective_table, collectives, overlap
from fettle.trace.compare import Comparison, compare
from fettle.trace.critical import CriticalPath, critical_path, path_events, path_shares
from fettle.trace.critical_ranks import critical_path_of_ranks
from fettle.trace.health import Health, trace_health
from fettle.trace.host import (
    conversions,
    data_loading,
    host_summary,
    loader_waits,
    operator_sizes,
    parallel_operators,
    small_operators,
    threads,
)
from fettle.trace.idle import idle_pieces, idle_summary
from fettle.trace.kernels import kernel_classes, kernel_table, kernels_across_ranks
from fettle.trace.kinds import Kind
from fettle.trace.launches import call_table, launch_stats
from fettle.trace.memory_timeline import memory_peak, memory_timeline
from fettle.trace.model import Trace
from fettle.trace.operators import (
    annotation_table,
    call_tree,
    counters_by_operator,
    kernel_sequences,
    operator_table,
)
from fettle.trace.perfetto import augment
from fettle.trace.queue import bandwidth_summary, copy_bandwidth, queue_length, queue_summary
from fettle.trace.reader import load, load_all
from fettle.trace.record import record
from fettle.trace.sql import query
from fettle.trace.stacks import CAUSES_OF_HOST
from fettle.trace.steps import step_summary, steps
from fettle.trace.waits import CAUSES
from fettle.trace.whatif import WhatIf, what_if

if TYPE_CHECKING:
    from fettle.trace.report import write_report

__all__ = [
    "CAUSES",
    "CAUSES_OF_HOST",
    "Comparison",
    "CriticalPath",
    "Health",
    "Kind",
    "Trace",
    "WhatIf",
    "account_total",
    "annotation_table",
    "arrival",
    "attribute_kernels",
    "augment",
    "bandwidth_summary",
    "call_table",
    "call_tree",
    "collective_table",
    "collectives",
    "compare",
    "conversions",
    "copy_bandwidth",
    "counters_by_operator",
    "critical_path",
    "critical_path_of_ranks",
    "data_loading",
    "host_summary",
    "identities",
    "idle_pieces",
    "idle_summary",
    "kernel_classes",
    "kernel_sequences",
    "kernel_table",
    "kernels_across_ranks",
    "kernels_under",
    "launch_stats",
    "load",
    "load_all",
    "loader_waits",
    "memory_peak",
    "memory_timeline",
    "operator_sizes",
    "operator_table",
    "overlap",
    "parallel_operators",
    "path_events",
    "path_shares",
    "query",
    "queue_length",
    "queue_summary",
    "record",
    "small_operators",
    "step_summary",
    "steps",
    "stragglers",
    "threads",
    "time_account",
    "trace_health",
    "what_if",
    "write_report",
]


def __getattr__(name: str) -> Any:
    # The report loads the chart library, which costs more than all the rest: only on use.
    if name == "write_report":
        from fettle.trace.report import write_report

        return write_report
    raise AttributeError(f"module 'fettle.trace' has no attribute '{name}'")
