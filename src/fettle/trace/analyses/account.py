"""Where did the time go? Every nanosecond of a step, on every device, booked exactly once.

Compute comes first; communication and copies count only where nothing computes (they are exposed); what is left is
idle, by cause. The columns of a row add up to its wall time, which is asserted, not hoped for.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from fettle.trace.analyses.idle import idle_pieces
from fettle.trace.analyses.stacks import CAUSES_OF_HOST, host_stacks
from fettle.trace.analyses.steps import steps
from fettle.trace.analyses.stops import main_thread
from fettle.trace.analyses.waits import CAUSES
from fettle.trace.frames import frame_of
from fettle.trace.intervals import Intervals, length_within, merge, split
from fettle.trace.kinds import Kind
from fettle.trace.model import Ints, Trace, per_trace


@per_trace
def device_classes(trace: Trace, device: int) -> tuple[Intervals, Intervals, Intervals]:
    """Compute, communication and copies (with memory sets) of one device: each disjoint in itself."""
    on_device, kernels = (trace.column("device") == device) & trace.is_device, trace.kind == Kind.KERNEL
    classes = (kernels & ~trace.is_collective, kernels & trace.is_collective, ~kernels)
    work = (np.flatnonzero(on_device & one) for one in classes)
    compute, communication, copies = (merge(trace.ts[rows], trace.end[rows]) for rows in work)
    return compute, communication, copies


def time_account(trace: Trace, annotation: str | None = None) -> pl.DataFrame:
    """The time account: one row a step and device; for a trace without device work one row a step and device -1, the
    host.

    Columns, all in ns unless said: rank, device, step, start_ns, wall_ns, compute_ns, exposed_communication_ns,
    exposed_copy_ns, idle_ns, and idle_<cause>_ns for every cause in `fettle.trace.CAUSES`. compute + exposed
    communication + exposed copies + idle = wall, and the causes add up to idle, exactly.

    On the host row, compute is time inside operators of the main thread, idle what the host did besides.
    """
    windows = steps(trace, annotation)
    low, high = windows["start_ns"].to_numpy(), windows["end_ns"].to_numpy()
    parts = [_device_rows(trace, device, low, high, windows) for device in trace.device_keys]
    frame = pl.concat(parts or [_host_rows(trace, low, high, windows)])
    check_account(frame)
    return frame


def _device_rows(trace: Trace, device: int, low: np.ndarray, high: np.ndarray, windows: pl.DataFrame) -> pl.DataFrame:
    compute, comm, copy = device_classes(trace, device)
    compute_or_comm = merge(np.concatenate([compute[0], comm[0]]), np.concatenate([compute[1], comm[1]]))
    busy = merge(np.concatenate([compute_or_comm[0], copy[0]]), np.concatenate([compute_or_comm[1], copy[1]]))
    compute_ns = length_within(compute, low, high)
    comm_ns = length_within(compute_or_comm, low, high) - compute_ns
    busy_ns = length_within(busy, low, high)
    pieces = idle_pieces(trace, device)
    start, end = pieces["start_ns"].to_numpy(), pieces["end_ns"].to_numpy()
    begins, stops, piece, window = split((start, end), (low, high))
    cause = pieces["cause"].to_physical().to_numpy()[piece].astype(np.int64)
    by_cause = _by_cause(tuple(CAUSES), cause, stops - begins, window, len(low))
    return _rows(device, windows, compute_ns, comm_ns, busy_ns - compute_ns - comm_ns, by_cause)


def _host_rows(trace: Trace, low: np.ndarray, high: np.ndarray, windows: pl.DataFrame) -> pl.DataFrame:
    start, end, row, window = host_stacks(trace).over(main_thread(trace), low, high)
    cause = np.append(host_stacks(trace).cause, 0).astype(np.int64)[row]
    did = _by_cause(CAUSES_OF_HOST, cause, end - start, window, len(low))
    compute, zero = did.pop("operator"), np.zeros(len(low), dtype=np.int64)
    return _rows(-1, windows, compute, zero, zero, dict.fromkeys(CAUSES, zero) | did)


def _by_cause(causes: tuple[str, ...], cause: Ints, ns: Ints, window: Ints, windows: int) -> dict[str, Ints]:
    """The time of pieces by cause, in each window."""
    # Sums below 2**53 ns (104 days) are exact in the float64 that `bincount` adds in.
    sums = np.bincount(cause * windows + window, ns, len(causes) * windows).astype(np.int64)
    return dict(zip(causes, sums.reshape(len(causes), -1), strict=True))


def _rows(
    device: int, windows: pl.DataFrame, compute: Ints, comm: Ints, copy: Ints, by_cause: dict[str, Ints]
) -> pl.DataFrame:
    parts = {"compute_ns": compute, "exposed_communication_ns": comm, "exposed_copy_ns": copy}
    parts["idle_ns"] = np.sum(list(by_cause.values()), axis=0)
    parts |= {f"idle_{cause}_ns": ns for cause, ns in by_cause.items()}
    place = windows.select("rank", pl.lit(device, dtype=pl.Int64()).alias("device"), "step", "start_ns", "wall_ns")
    return place.with_columns(**{name: pl.Series(ns, dtype=pl.Int64()) for name, ns in parts.items()})


def check_account(frame: pl.DataFrame) -> None:
    """Raise AssertionError where a row's parts do not add up to its wall time to the nanosecond."""
    parts = pl.col("compute_ns") + pl.col("exposed_communication_ns") + pl.col("exposed_copy_ns") + pl.col("idle_ns")
    causes = pl.sum_horizontal([pl.col(f"idle_{cause}_ns") for cause in CAUSES])
    wrong = frame.filter((parts != pl.col("wall_ns")) | (causes != pl.col("idle_ns")))
    if wrong.height:
        raise AssertionError(f"the time account of {wrong.height} steps does not add up to the wall time")


def account_total(frame: pl.DataFrame) -> pl.DataFrame:
    """The account summed over steps: one row a rank and device, same columns without step and start_ns."""
    return frame.drop("step", "start_ns").group_by("rank", "device").sum().sort("rank", "device")


_BUSY = {
    "compute": "kernels ran",
    "operators": "the host was in an operator: on a CPU, the work itself",
    "exposed communication": "collectives ran, and nothing computed",
    "exposed copy": "copies ran, and neither of these",
}


def account_parts(total: pl.DataFrame) -> pl.DataFrame:
    """`account_total` as one row a part that is not 0: columns rank, device, part, time_ns, share (of the wall time),
    meaning. On the host's row (device -1) compute is called operators."""
    names = ["compute_ns", "exposed_communication_ns", "exposed_copy_ns", *(f"idle_{cause}_ns" for cause in CAUSES)]
    parts = []
    for row in total.iter_rows(named=True):
        for column in names:
            name = column.removesuffix("_ns")
            if row[column]:
                cause = name.removeprefix("idle_")
                part = "operators" if row["device"] == -1 and name == "compute" else name.replace("_", " ")
                meaning = CAUSES[cause] if name.startswith("idle_") else _BUSY.get(part, "")
                share = row[column] / max(row["wall_ns"], 1)
                parts.append((row["rank"], row["device"], part, row[column], share, meaning))
        parts.append((row["rank"], row["device"], "wall time", row["wall_ns"], 1.0, "the sum of the above"))
    return frame_of(parts, rank=int, device=int, part=str, time_ns=int, share=float, meaning=str)
