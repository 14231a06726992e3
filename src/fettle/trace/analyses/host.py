"""The host's side: how threads were used, what operators cost besides their work, conversions, data loading.

For a trace without a device this is the whole answer; with one it explains the idle time.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from fettle.trace.analyses.ancestry import in_no_other
from fettle.trace.analyses.stacks import CAUSES_OF_HOST, host_stacks
from fettle.trace.analyses.steps import step_windows, steps
from fettle.trace.analyses.stops import main_thread
from fettle.trace.frames import frame_of, names_of_rows, with_rank
from fettle.trace.intervals import length_within, levels, merge, total
from fettle.trace.kinds import Kind
from fettle.trace.model import Ints, Trace
from fettle.trace.ordering import in_groups

SMALL_NS = 10_000
CONVERSIONS = (
    "aten::to",
    "aten::_to_copy",
    "aten::copy_",
    "aten::contiguous",
    "aten::clone",
    "aten::type_as",
    "aten::item",
    "aten::_local_scalar_dense",
)


def threads(trace: Trace) -> pl.DataFrame:
    """How each host thread spent the trace.

    Columns: rank, thread, label, events, busy_ns (any event), busy_share (of the trace's span), operators_ns (inside
    any operator), and <cause>_ns: time whose innermost event stands for that cause.
    """
    stacks = host_stacks(trace)
    low, high = trace.span
    host = np.flatnonzero(trace.is_host)
    rows = []
    length = stacks.segment_end - stacks.segment_start
    cause = stacks.cause[stacks.segment_row] if len(length) else np.zeros(0, np.int64)
    for thread, at in in_groups(trace.column("thread")[host]):
        part, mine = stacks.thread_slice(thread), host[at]
        operators = mine[trace.kind[mine] == Kind.OPERATOR]
        sums = np.bincount(cause[part], weights=length[part], minlength=len(CAUSES_OF_HOST)).astype(np.int64)
        busy = int(length[part].sum())
        inside = total(merge(trace.ts[operators], trace.end[operators]))
        share = busy / max(high - low, 1)
        rows.append((trace.rank, thread, trace.thread_label(thread), len(mine), busy, share, inside, *sums.tolist()))
    columns = {"label": str, "events": int, "busy_ns": int, "busy_share": float, "operators_ns": int}
    causes = dict.fromkeys((f"{name}_ns" for name in CAUSES_OF_HOST), int)
    return frame_of(rows, rank=int, thread=int, **columns, **causes).sort("busy_ns", descending=True)


def parallel_operators(trace: Trace) -> pl.DataFrame:
    """How many threads were inside operators at once: columns rank, threads, time_ns, share of the trace's span."""
    operators = np.flatnonzero(trace.kind == Kind.OPERATOR)
    if not len(operators):
        return frame_of([], rank=int, threads=int, time_ns=int, share=float)
    rows = [operators[at] for _, at in in_groups(trace.column("thread")[operators])]
    starts, ends = map(np.concatenate, zip(*(merge(trace.ts[mine], trace.end[mine]) for mine in rows), strict=True))
    (start, end), level = levels(starts, ends, np.ones(len(starts), dtype=np.int64))
    low, high = trace.span
    sums = np.bincount(level, weights=end - start, minlength=1)
    sums[0] = (high - low) - sums[1:].sum()
    cells = [(trace.rank, n, int(ns), float(ns) / max(high - low, 1)) for n, ns in enumerate(sums)]
    return frame_of(cells, rank=int, threads=int, time_ns=int, share=float)


def outermost_operators(trace: Trace) -> Ints:
    """Rows of operators that no other operator called."""
    return in_no_other(trace, trace.kind == Kind.OPERATOR)


def innermost_operators(trace: Trace) -> tuple[Ints, Ints]:
    """Rows of operators that call no other operator or runtime function, and of those that do."""
    operators = np.flatnonzero(trace.kind == Kind.OPERATOR)
    calls = np.zeros(trace.events.height, dtype=bool)
    parents = host_stacks(trace).parent[trace.is_host]
    calls[parents[parents >= 0]] = True
    return operators[~calls[operators]], operators[calls[operators]]


def operator_sizes(trace: Trace) -> pl.DataFrame:
    """Innermost operators by their length, in powers of two.

    Columns: rank, power (0: under 1 us; n: from 2**(n-1) up to 2**n us), below_us (2**n), count, time_ns.
    """
    leaf, _ = innermost_operators(trace)
    us = trace.dur[leaf] // 1000
    power = np.where(us > 0, np.floor(np.log2(np.maximum(us, 1))) + 1, 0).astype(np.int64)
    frame = pl.DataFrame({"power": power, "below_us": 2**power, "dur": trace.dur[leaf]})
    frame = frame.group_by("power", "below_us").agg(count=pl.len(), time_ns=pl.col("dur").sum())
    return with_rank(trace, frame.sort("power"))


def small_operators(trace: Trace) -> pl.DataFrame:
    """Innermost operators under `SMALL_NS`, by name: what fusing or compiling would save most calls of.

    Columns: rank, operator, count, time_ns, mean_ns, share (of all such operators' time). Longest first.
    """
    leaf, _ = innermost_operators(trace)
    return _by_name(trace, leaf[trace.dur[leaf] < SMALL_NS])


def conversions(trace: Trace) -> pl.DataFrame:
    """Conversions, copies and reads of single values (`CONVERSIONS`), the outermost of each chain, by name.

    Columns as `small_operators`.
    """
    return _by_name(trace, in_no_other(trace, (trace.kind == Kind.OPERATOR) & trace.named(CONVERSIONS.__contains__)))


def data_loading(trace: Trace) -> pl.DataFrame:
    """Host time in data loading, by thread and outermost event.

    Columns: rank, thread (its label), main (bool: the thread that runs the steps), operator (the event's name), count,
    time_ns, share (of the trace's span). Longest first.
    """
    loads = host_stacks(trace).cause == CAUSES_OF_HOST.index("data_loading")
    rows = np.flatnonzero(trace.is_host & loads)
    parent = host_stacks(trace).parent[rows]
    rows = rows[(parent < 0) | ~loads[np.maximum(parent, 0)]]
    thread = trace.column("thread")[rows].astype(np.int64)
    low, high = trace.span
    frame = pl.DataFrame({"thread": thread, "operator": names_of_rows(trace, rows), "dur": trace.dur[rows]})
    grouped = frame.group_by("thread", "operator").agg(count=pl.len(), time_ns=pl.col("dur").sum())
    named = grouped.select(
        pl.Series("thread", [trace.thread_label(t) for t in grouped["thread"]], dtype=pl.String()),
        (pl.col("thread") == main_thread(trace)).alias("main"),
        "operator",
        "count",
        "time_ns",
        share=pl.col("time_ns") / max(high - low, 1),
    )
    return with_rank(trace, named.sort("time_ns", "operator", descending=[True, False]))


def loader_waits(trace: Trace) -> pl.DataFrame:
    """How long the main thread is in a DataLoader's own range, waiting for the next batch, in each step.

    Columns: step, wall_ns, wait_ns. No rows where the trace has no such range.
    """
    loader = trace.is_host & trace.named(lambda name: name.startswith("enumerate(DataLoader)"))
    mine = loader & (trace.column("thread") == main_thread(trace))  # a thread that prefetches holds nobody up
    frame = steps(trace) if loader.any() else steps(trace).clear()
    waits = length_within(merge(trace.ts[mine], trace.end[mine]), *step_windows(trace))[: frame.height]
    return frame.select("step", "wall_ns", wait_ns=pl.Series(waits, dtype=pl.Int64()))


def _by_name(trace: Trace, rows: Ints) -> pl.DataFrame:
    frame = pl.DataFrame({"operator": names_of_rows(trace, rows), "dur": trace.dur[rows]})
    grouped = frame.group_by("operator").agg(count=pl.len(), time_ns=pl.col("dur").sum(), mean_ns=pl.col("dur").mean())
    shares = grouped.with_columns(share=pl.col("time_ns") / pl.max_horizontal(pl.col("time_ns").sum(), 1))
    return with_rank(trace, shares.sort("time_ns", "operator", descending=[True, False]))


def host_summary(trace: Trace) -> pl.DataFrame:
    """The questions of a slow host, one row each.

    Columns: rank, question, count, time_ns, share (of the trace's span), means. Times are the main costs' own: nested
    operators are not counted twice.
    """
    low, high = trace.span
    span = max(high - low, 1)
    stacks = host_stacks(trace)
    length = stacks.self_ns
    operators, top = np.flatnonzero(trace.kind == Kind.OPERATOR), outermost_operators(trace)
    leaf, inner = innermost_operators(trace)
    small = leaf[trace.dur[leaf] < SMALL_NS]
    converted = conversions(trace)
    loads = trace.is_host & (stacks.cause == CAUSES_OF_HOST.index("data_loading"))
    data = np.flatnonzero(loads & (trace.column("thread") == main_thread(trace)))
    cover, some = total(merge(trace.ts[operators], trace.end[operators])), ", ".join(CONVERSIONS[:4]) + ", ..."
    changed, changed_ns = (int(n) for n in converted.select(pl.col("count", "time_ns").sum()).row(0))
    calling = "dispatch and checks, and the work of some: aten::mm"
    rows = [
        ("outermost operators", len(top), int(trace.dur[top].sum()), "what the program asked for"),
        ("innermost operators", len(leaf), int(length[leaf].sum()), "where work is done (or launched)"),
        ("operators that call others, without those", len(inner), int(length[inner].sum()), calling),
        (f"innermost operators under {SMALL_NS // 1000} µs", len(small), int(length[small].sum()), "fuse or compile"),
        ("conversions and copies", changed, changed_ns, some),
        ("data loading on the main thread", len(data), int(length[data].sum()), "the loop waits for input"),
        ("no operator on any thread", 1, span - cover, "Python, other libraries, or waiting"),
    ]
    cells = [(trace.rank, question, count, ns, ns / span, means) for question, count, ns, means in rows]
    return frame_of(cells, rank=int, question=str, count=int, time_ns=int, share=float, means=str)
