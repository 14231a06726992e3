"""Do the answers about one trace agree with each other? What must add up, as a table."""

from __future__ import annotations

import numpy as np
import polars as pl

from fettle.trace.analyses.account import account_total, device_classes, time_account
from fettle.trace.analyses.critical import CriticalPath, critical_path
from fettle.trace.analyses.idle import idle_pieces, idle_summary
from fettle.trace.analyses.kernels import CLASSES, kernel_table
from fettle.trace.analyses.launches import launched_work
from fettle.trace.analyses.operators import annotation_table, call_tree
from fettle.trace.analyses.replay import Change
from fettle.trace.analyses.steps import steps
from fettle.trace.analyses.whatif import replayed_ns, stays_with_steps
from fettle.trace.frames import frame_of
from fettle.trace.intervals import clip, merge, split, total
from fettle.trace.model import Trace

WAITING = ("between_kernels", "inside_graph", "launch_latency", "stream_event", "queued_unknown", "blocking_call")
"""Causes that are of the device's side: on the critical path they lie right before work."""


def identities(trace: Trace) -> pl.DataFrame:
    """What must hold between the answers about a trace.

    Columns: rank, holds, identity, left_ns, relation (`=` or `<=`), right_ns, allowed_ns (the difference).
    """
    path = critical_path(trace)
    rows = [*_account(trace, path), *_work(trace)]
    for device in trace.device_keys:
        rows += _idle(trace, device, path)
    if trace.device_keys:
        wall = path.wall_ns
        same = round(replayed_ns(trace, Change(), path.start_ns, path.end_ns))
        rows.append(("the unchanged replay takes the wall time", same, wall, "=", wall // 1000))
        half = np.full(len(trace.device_rows), 0.5)
        saved = same - round(replayed_ns(trace, Change(half), path.start_ns, path.end_ns))
        on_path = _work_ns(path.pieces) // 2
        if stays_with_steps(trace, path):
            what = "work half as long saves at most half of its time on the path"
            rows.append((what, saved, on_path, "<=", wall // 100))
    columns = {"identity": str, "left_ns": int, "right_ns": int, "relation": str, "allowed_ns": int}
    frame = frame_of([(trace.rank, *row) for row in rows], rank=int, **columns)
    over = pl.col("left_ns") - pl.col("right_ns")
    over = pl.when(pl.col("relation") == "=").then(over.abs()).otherwise(over)
    order = ("identity", "left_ns", "relation", "right_ns", "allowed_ns")
    return frame.select("rank", (over <= pl.col("allowed_ns")).alias("holds"), *order)


Row = tuple[str, int, int, str, int]


def _work_ns(pieces: pl.DataFrame) -> int:
    """How long some pieces of a path are device work."""
    works = pieces.filter(pl.col("category").is_in(CLASSES))
    return int((works["end_ns"] - works["start_ns"]).sum())


def _account(trace: Trace, path: CriticalPath) -> list[Row]:
    account = account_total(time_account(trace))
    parts = ("compute_ns", "exposed_communication_ns", "exposed_copy_ns", "idle_ns")
    rows: list[Row] = []
    for row in account.iter_rows(named=True):
        name = f"device {row['device']}" if row["device"] >= 0 else "host"
        rows.append((f"account of {name}: parts = wall time", sum(row[p] for p in parts), row["wall_ns"], "=", 0))
    frame = steps(trace)
    between = path.wall_ns - int(frame["wall_ns"].sum())  # steps that the caller named may lie apart
    categories = int(path.summary()["time_ns"].sum())
    what = "critical path: categories = wall time of the steps"
    return [*rows, (what, categories - between, int(frame["wall_ns"].sum()), "=", 0)]


def _idle(trace: Trace, device: int, path: CriticalPath) -> list[Row]:
    low, high = trace.span
    busy = merge(*(np.concatenate(part) for part in zip(*device_classes(trace, device), strict=True)))
    pieces = idle_pieces(trace, device)
    idle = int((pieces["end_ns"] - pieces["start_ns"]).sum())
    account = account_total(time_account(trace)).filter(pl.col("device") == device)
    by_cause = int(idle_summary(trace, device)["idle_ns"].sum())
    name = f"device {device}"
    there = path.pieces.filter(pl.col("place") == name)
    agreed, both = _agreement(there, pieces)
    busy_ns = total(clip(busy, path.start_ns, path.end_ns))
    return [
        (f"{name}: idle by cause + busy = the trace's span", idle + total(busy), high - low, "=", 0),
        (f"{name}: idle by cause = the account's, in the steps", by_cause, int(account["idle_ns"].sum()), "=", 0),
        (f"{name}: work on the critical path <= busy", _work_ns(there), busy_ns, "<=", 0),
        (f"{name}: waits on the path of work that ended a gap = idle of that cause", both, agreed, "=", both // 100),
    ]


def _agreement(there: pl.DataFrame, pieces: pl.DataFrame) -> tuple[int, int]:
    """How long the path waits for the work that ends the device's gap: with the same cause, and with any."""
    waits = there.filter(pl.col("category").is_in(WAITING)).sort("start_ns")
    idle = (pieces["start_ns"].to_numpy(), pieces["end_ns"].to_numpy())
    start, end, wait, piece = split((waits["start_ns"].to_numpy(), waits["end_ns"].to_numpy()), idle)
    on_path, on_device = waits["category"].to_numpy()[wait], pieces["cause"].cast(pl.String()).to_numpy()[piece]
    own = waits["row"].to_numpy()[wait] == pieces["next_row"].to_numpy()[piece]
    return int((end - start)[own & (on_path == on_device)].sum()), int((end - start)[own].sum())


def _work(trace: Trace) -> list[Row]:
    work, _ = launched_work(trace)
    linked, everything = int(trace.dur[work].sum()), int(trace.dur[trace.device_rows].sum())
    kernels = int(kernel_table(trace)["sum_ns"].sum())
    tree, annotations = call_tree(trace, max_depth=10_000), annotation_table(trace)
    top = int(tree.filter(pl.col("depth") == 0)["device_ns"].sum())
    names = annotations["annotation"].to_list()
    inside = tree.with_columns(name=pl.col("path").str.split(" > ").list.last(), parts=pl.col("path").str.split(" > "))
    # A range inside another of its name is counted with that one.
    inside = inside.filter(pl.col("name").is_in(names)).filter(
        pl.col("parts").list.eval(pl.element().eq(pl.element().last())).list.sum() == 1
    )
    ranges, in_tree = int(annotations["device_inclusive_ns"].sum()), int(inside["device_ns"].sum())
    return [
        ("kernel table: sum = all device work", kernels, everything, "=", 0),
        ("tree: device time at its top <= work whose launch is known", top, linked, "<=", 0),
        ("annotations: device time, inclusive = the tree's", ranges, in_tree, "=", 0),
    ]
