"""Profiler traces: open them, ask them where the time went, compare them.

Open with `load` (a file) or `load_all` (a folder of ranks). Every analysis is a function over the loaded trace that
returns a polars frame whose columns its docstring names; times are integer nanoseconds. Other rooms use what is
exported here.
"""

from __future__ import annotations

from fettle.trace.analyses.account import account_total, time_account
from fettle.trace.analyses.arrival import arrival, stragglers
from fettle.trace.analyses.attribution import attribute_kernels, kernels_under
from fettle.trace.analyses.check import identities
from fettle.trace.analyses.communication import collective_table, collectives, overlap
from fettle.trace.analyses.compare import Comparison, compare
from fettle.trace.analyses.critical import (
    CriticalPath,
    critical_path,
    critical_path_of_ranks,
    path_events,
    path_shares,
)
from fettle.trace.analyses.flops import product_summary, product_table
from fettle.trace.analyses.health import Health, trace_health
from fettle.trace.analyses.host import (
    conversions,
    data_loading,
    host_summary,
    loader_waits,
    operator_sizes,
    outermost_operators,
    parallel_operators,
    small_operators,
    threads,
)
from fettle.trace.analyses.idle import idle_pieces, idle_streams, idle_summary
from fettle.trace.analyses.kernels import kernel_classes, kernel_table, kernels_across_ranks
from fettle.trace.analyses.launches import call_table, launch_stats
from fettle.trace.analyses.memory_timeline import memory_peak, memory_timeline
from fettle.trace.analyses.occupancy import kernels_by_sm, sm_efficiency
from fettle.trace.analyses.operators import (
    annotation_table,
    call_tree,
    counters_by_operator,
    kernel_sequences,
    operator_table,
)
from fettle.trace.analyses.queue import bandwidth_summary, copy_bandwidth, queue_length, queue_summary
from fettle.trace.analyses.sql import query
from fettle.trace.analyses.stacks import CAUSES_OF_HOST, host_stacks
from fettle.trace.analyses.steps import step_summary, steps
from fettle.trace.analyses.waits import CAUSES
from fettle.trace.analyses.whatif import WhatIf, what_if
from fettle.trace.io.reader import load, load_all
from fettle.trace.io.record import record
from fettle.trace.kinds import Kind
from fettle.trace.model import Trace
from fettle.trace.report.page import write_report
from fettle.trace.report.perfetto import augment

__all__ = [
    "CAUSES", "CAUSES_OF_HOST", "Comparison", "CriticalPath", "Health", "Kind", "Trace", "WhatIf", "account_total",
    "annotation_table", "arrival", "attribute_kernels", "augment", "bandwidth_summary", "call_table", "call_tree",
    "collective_table", "collectives", "compare", "conversions", "copy_bandwidth", "counters_by_operator",
    "critical_path", "critical_path_of_ranks", "data_loading", "host_stacks", "host_summary", "identities",
    "idle_pieces", "idle_streams", "idle_summary", "kernel_classes", "kernel_sequences", "kernel_table",
    "kernels_across_ranks", "kernels_by_sm", "kernels_under", "launch_stats", "load", "load_all", "loader_waits",
    "memory_peak", "memory_timeline", "operator_sizes", "operator_table", "outermost_operators", "overlap",
    "parallel_operators", "path_events", "path_shares", "product_summary", "product_table", "query", "queue_length",
    "queue_summary", "record", "sm_efficiency", "small_operators", "step_summary", "steps", "stragglers", "threads",
    "time_account", "trace_health", "what_if", "write_report",
]  # fmt: skip
