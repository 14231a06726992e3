"""Memory over time, joined to the operators that took and gave it back."""

from __future__ import annotations

from collections import Counter

import numpy as np
import polars as pl

from fettle.trace.analyses.ancestry import ancestors
from fettle.trace.analyses.stacks import host_stacks
from fettle.trace.frames import frame_of, names_of_rows, with_rank
from fettle.trace.model import Trace

# In the order of c10::DeviceType, whose numbers the profiler writes.
DEVICE_TYPES = (
    *("cpu", "cuda", "mkldnn", "opengl", "opencl", "ideep", "hip", "fpga", "maia", "xla", "vulkan", "metal", "xpu"),
    *("mps", "meta", "hpu", "ve", "lazy", "ipu", "mtia", "privateuseone"),
)


def memory_timeline(trace: Trace) -> pl.DataFrame:
    """One row an allocation (bytes > 0) or release (< 0), in order of time.

    Columns: rank, ts_ns, device (such as `cuda:0`), bytes, address (-1: unknown), allocated_bytes and reserved_bytes
    (totals of the allocator after it; -1: unknown), operator, top_operator (null: outside any), held_bytes
    (allocated_bytes where a device's are recorded, else what was taken since the trace began and not released).
    """
    frame = trace.side["memory"].sort("ts_ns", maintain_order=True)
    up = ancestors(trace)
    row = host_stacks(trace).innermost(frame["thread"].to_numpy().astype(np.int64), frame["ts_ns"].to_numpy())
    operator, top = (names_of_rows(trace, np.append(rows, -1)[row]) for rows in (up.operator, up.top_operator))
    device = pl.Series(
        "device",
        [
            (DEVICE_TYPES[t] if 0 <= t < len(DEVICE_TYPES) else f"device type {t}")
            + ("" if t == 0 or d < 0 else f":{d}")
            for t, d in zip(frame["device_type"], frame["device"], strict=True)
        ],
        dtype=pl.String(),
    )
    timeline = frame.select("ts_ns", device, "bytes", "address", "allocated_bytes", "reserved_bytes")
    owners = timeline.with_columns(operator=operator, top_operator=top)
    total = pl.col("allocated_bytes")
    has_totals, since_begin = (total >= 0).all().over("device"), pl.col("bytes").cum_sum().over("device")
    return with_rank(trace, owners.with_columns(held_bytes=pl.when(has_totals).then(total).otherwise(since_begin)))


def memory_peak(trace: Trace) -> pl.DataFrame:
    """What was held at each device's peak, by the operator that had taken it.

    Only memory taken inside the trace has an owner; what was there before is the row with operator null. Columns:
    rank, device, operator, bytes, allocations, peak_bytes (the device's), peak_at_ns (from the trace's start).
    """
    timeline = memory_timeline(trace)
    times = [*timeline["ts_ns"].head(1).to_list(), *([trace.span[0]] if trace.span[0] else [])]
    begin = min(times, default=0)
    rows: list[tuple[int, str, str | None, int, int, int, int]] = []
    for key, part in timeline.group_by("device", maintain_order=True):
        running = part["held_bytes"].to_numpy()
        at = int(running.argmax())
        peak, when = int(running[at]), int(part["ts_ns"][at]) - begin
        held: dict[int, tuple[str | None, int]] = {}
        for address, size, operator in part[: at + 1].select("address", "bytes", "operator").iter_rows():
            if size > 0:
                held[address] = (operator, size)
            else:
                held.pop(address, None)
        sizes, counts = Counter[str | None](), Counter[str | None]()
        # Without addresses releases cannot be matched, and nothing is said about owners.
        for operator, size in held.values() if (part["address"] != -1).all() else ():
            sizes[operator] += size
            counts[operator] += 1
        sizes[None] += max(peak - sizes.total(), 0)
        rows += [(trace.rank, str(key[0]), name, size, counts[name], peak, when) for name, size in sizes.items()]
    texts, numbers = {"device": str, "operator": str}, ("bytes", "allocations", "peak_bytes", "peak_at_ns")
    frame = frame_of(rows, rank=int, **texts, **dict.fromkeys(numbers, int))
    return frame.sort("device", "bytes", descending=[False, True])
