"""Why is this trace slower than that one? The change of the step time, booked to causes that add up to it.

Each step of each trace has a time account that adds up to its wall time, so the difference of the means does too. The
change of compute (and of communication and copies) is split further by matching work: the same work that takes
longer, more or fewer launches of it, work that only one side has. Work is matched by operator path and shapes first,
so that a kernel which only changed its name still matches; then by operator; then by kernel name.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from fettle.errors import UsageError
from fettle.trace.analyses.account import time_account
from fettle.trace.analyses.attribution import attribute_kernels
from fettle.trace.analyses.kernels import class_names
from fettle.trace.analyses.stacks import host_stacks
from fettle.trace.analyses.waits import CAUSES
from fettle.trace.frames import frame_of, names_of_rows
from fettle.trace.intervals import Intervals, length_within
from fettle.trace.kinds import Kind, short_kernel_name
from fettle.trace.model import Bools, Ints, Trace

RESAMPLES = 2000


@dataclass(frozen=True)
class Comparison:
    """`parts` add up to the change of the mean step time; `work` and `operators` list what changed."""

    before_ns: float
    after_ns: float
    low_ns: float
    high_ns: float
    steps_before: int
    steps_after: int
    parts: pl.DataFrame
    work: pl.DataFrame
    operators: pl.DataFrame
    notes: tuple[str, ...]

    @property
    def change_ns(self) -> float:
        return self.after_ns - self.before_ns


def compare(
    before: Trace,
    after: Trace,
    *,
    skip: int = 0,
    steps_before: list[int] | None = None,
    steps_after: list[int] | None = None,
) -> Comparison:
    """Compare two traces, or two sets of steps of one trace.

    Args:
        skip: Leave out that many first steps of each.
        steps_before, steps_after: Step numbers to use; None takes all.

    Returns:
        parts: part, change_ns (of the mean step), low_ns and high_ns (95% bootstrap over steps; null with fewer than 3
        steps on a side). work: matched device work with counts and time per step on both sides. operators: likewise
        for host operators.
    """
    notes: list[str] = []
    a, b = _account(before, skip, steps_before), _account(after, skip, steps_after)
    columns = ["wall_ns", *_CLASS_OF, *(f"idle_{c}_ns" for c in CAUSES)]
    one, two = (side.select(columns).to_numpy().astype(float) for side in (a, b))
    if min(len(one), len(two)) < 3:
        notes.append("fewer than three steps on a side: no intervals")
    if len(before.device_keys) > 1 or len(after.device_keys) > 1:
        notes.append("several devices in one trace: the busiest one is compared")
    work = _match_work(before, after, a, b)
    changes = np.column_stack([two.mean(axis=0) - one.mean(axis=0), *_intervals(one, two)]).tolist()
    parts = _parts(columns[1:], changes[1:], work if before.device_keys or after.device_keys else None)
    _, low, high = changes[0]
    return Comparison(
        float(one[:, 0].mean()),
        float(two[:, 0].mean()),
        low,
        high,
        len(one),
        len(two),
        parts,
        work,
        _match_operators(before, after, a, b),
        tuple(notes),
    )


def _account(trace: Trace, skip: int, wanted: list[int] | None) -> pl.DataFrame:
    frame = time_account(trace)
    busiest = frame.group_by("device").agg(pl.col("compute_ns").sum()).sort("compute_ns", descending=True)["device"][0]
    frame = frame.filter(pl.col("device") == busiest).sort("start_ns")
    known = frame["step"].to_list()
    if wanted is not None:
        frame = frame.filter(pl.col("step").is_in(wanted))
    frame = frame[skip:]
    if not frame.height or not set(wanted or ()) <= set(known):
        raise UsageError(f"no such steps in {trace.path.name}: it has {known[:20]}")
    return frame


def _intervals(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """95% bootstrap intervals of the difference of columns' means, as lows and highs; NaN below three steps a side."""
    if min(len(a), len(b)) < 3:
        return np.full((2, a.shape[1]), np.nan)
    random = np.random.default_rng(0)
    # How often each resample takes each step: nothing here is larger than the steps themselves.
    left, right = (
        np.array([np.bincount(random.integers(0, n, n), minlength=n) @ side / n for _ in range(RESAMPLES)])
        for side, n in ((a, len(a)), (b, len(b)))
    )
    ends: npt.NDArray[np.float64] = np.percentile(right - left, [2.5, 97.5], axis=0)
    return ends


def _parts(columns: list[str], changes: list[list[float]], work: pl.DataFrame | None) -> pl.DataFrame:
    """The change of each column of the account with its interval, split further where there is device work to match."""
    rows: list[tuple[str, float, float | None, float | None]] = []
    for column, (change, low, high) in zip(columns, changes, strict=True):
        if column in _CLASS_OF and work is not None:
            mine = work.filter(pl.col("class") == _CLASS_OF[column])
            labels = ("slower or faster", "more or fewer launches", "only before or after")
            values = mine.select(pl.col("slower_ns", "launches_ns", "only_ns").sum()).row(0)
            split = dict(zip(labels, map(float, values), strict=True))
            name = column.removesuffix("_ns").replace("_", " ")
            rows += [(f"{name}: {label}", value, None, None) for label, value in split.items()]
            # Work that ran beside other work is in the sums above and not in the exposed time: the rest is overlap.
            rows.append((f"{name}: overlap gained or lost", change - sum(split.values()), None, None))
            rows.append((f"{name} (sum of the above)", change, low, high))
        else:
            # On the host, what the account calls compute is time inside operators.
            part = "operators" if column == "compute_ns" else column.removesuffix("_ns").replace("_", " ")
            rows.append((part, change, low, high))
    frame = frame_of(rows, part=str, change_ns=float, low_ns=float, high_ns=float)
    sums = pl.col("part").str.ends_with("(sum of the above)").alias("sums")
    return frame.with_columns(sums, pl.col("low_ns", "high_ns").fill_nan(None))


_CLASS_OF = {"compute_ns": "compute", "exposed_communication_ns": "communication", "exposed_copy_ns": "copy"}


def _match_work(before: Trace, after: Trace, a: pl.DataFrame, b: pl.DataFrame) -> pl.DataFrame:
    """Device work per step, matched; slower_ns + launches_ns + only_ns is the change of its time per step."""
    left, right = _work(before, a), _work(after, b)
    matched = []
    # From the most certain key to the least; what has matched leaves the pool.
    for level in ("path_kernel", "path", "operator_kernel", "operator", "kernel"):
        common = set(left[level].to_list()) & set(right[level].to_list())
        common.discard(None)
        mine, yours = left.filter(pl.col(level).is_in(list(common))), right.filter(pl.col(level).is_in(list(common)))
        matched.append(_paired(mine, yours, level, level))
        rest = ~pl.col(level).is_in(list(common)).fill_null(False)
        left, right = left.filter(rest), right.filter(rest)
    matched.append(_paired(left, right, "kernel", "nothing"))
    numbers = ["count", "time_ns", "count_after", "time_ns_after"]
    frame = pl.concat(matched).with_columns(pl.col(numbers).fill_null(0.0))
    names = ("name", "kernel_after", "renamed", "operator", "class", "matched_by")
    changes = ("change_ns", "slower_ns", "launches_ns", "only_ns")
    before_n, after_n = pl.col("count"), pl.col("count_after")
    both = (before_n > 0) & (after_n > 0)
    mean_a, mean_b = pl.col("time_ns") / before_n, pl.col("time_ns_after") / after_n
    return (
        frame.with_columns(
            change_ns=pl.col("time_ns_after") - pl.col("time_ns"),
            # Slower at the launches that both have in common on average, more launches at the mean length of both.
            slower_ns=pl.when(both).then((mean_b - mean_a) * (before_n + after_n) / 2).otherwise(0.0),
            launches_ns=pl.when(both).then((after_n - before_n) * (mean_a + mean_b) / 2).otherwise(0.0),
            only_ns=pl.when(both).then(0.0).otherwise(pl.col("time_ns_after") - pl.col("time_ns")),
            name=pl.coalesce("kernel", "kernel_after"),
            renamed=both & (pl.col("kernel") != pl.col("kernel_after")),
        )
        .sort(pl.col("change_ns").abs(), "name", "key", descending=[True, False, False], nulls_last=True)
        .select(*names, "count", "count_after", "time_ns", "time_ns_after", *changes)
    )


def _work(trace: Trace, account: pl.DataFrame) -> pl.DataFrame:
    """The compared device's work, clipped to the compared steps, with keys from most to least certain."""
    frame = attribute_kernels(trace).filter(pl.col("device") == account["device"][0])
    rows = frame["row"].to_numpy()
    windows = _windows(account)
    inside, begins = length_within(windows, trace.ts[rows], trace.end[rows]), _begin_in(windows, trace.ts[rows])
    kernel = pl.Series("kernel", [short_kernel_name(n) for n in frame["name"]], dtype=pl.String())
    frame = frame.with_columns(
        kernel=kernel,
        inside=pl.Series(inside / account.height),
        launches=pl.Series(begins / account.height),
        **{"class": class_names(trace, rows)},
    ).filter((pl.col("inside") > 0) | (pl.col("launches") > 0))
    path = pl.concat_str(
        pl.col("top_operator"), pl.lit(" > "), pl.col("operator"), pl.lit(" "), pl.col("shapes").fill_null("")
    )
    return frame.with_columns(
        path_kernel=pl.concat_str(path, pl.lit(" "), pl.col("kernel")),
        path=path,
        operator_kernel=pl.concat_str(pl.col("operator"), pl.lit(" "), pl.col("kernel")),
    )


def _paired(left: pl.DataFrame, right: pl.DataFrame, level: str, matched_by: str) -> pl.DataFrame:
    both, on = [_per_key(side, level) for side in (left, right)], ["key", "class"]
    joined = both[0].join(both[1], on=on, how="full", coalesce=True, suffix="_after")
    return joined.with_columns(matched_by=pl.lit(matched_by))


def _per_key(frame: pl.DataFrame, level: str) -> pl.DataFrame:
    return (
        frame.with_columns(operator_name=pl.col("operator"), key=pl.col(level).fill_null(""))
        .group_by("key", "class")
        .agg(
            kernel=pl.col("kernel").sort_by("inside", descending=True).first(),
            operator=pl.col("operator_name").first(),
            count=pl.col("launches").sum(),
            time_ns=pl.col("inside").sum(),
        )
    )


def _match_operators(before: Trace, after: Trace, a: pl.DataFrame, b: pl.DataFrame) -> pl.DataFrame:
    """Host operators by name: calls and self time per step on both sides.

    Columns: operator, count, count_after, self_ns, self_ns_after, change (added, removed, changed, same: by count).
    """
    left, right = _host(before, a), _host(after, b)
    frame = left.join(right, on="operator", how="full", coalesce=True, suffix="_after").with_columns(
        pl.col("count", "self_ns", "count_after", "self_ns_after").fill_null(0.0)
    )
    left_n, right_n = pl.col("count"), pl.col("count_after")
    one_sided = pl.when(left_n == 0).then(pl.lit("added")).when(right_n == 0).then(pl.lit("removed"))
    change = one_sided.when((left_n - right_n).abs() > 1e-9).then(pl.lit("changed")).otherwise(pl.lit("same"))
    changed = frame.with_columns(change=change, change_ns=pl.col("self_ns_after") - pl.col("self_ns"))
    return changed.sort(pl.col("change_ns").abs(), "operator", descending=[True, False])


def _host(trace: Trace, account: pl.DataFrame) -> pl.DataFrame:
    self_ns = host_stacks(trace).self_ns
    rows = np.flatnonzero(trace.kind == Kind.OPERATOR)
    rows = rows[_begin_in(_windows(account), trace.ts[rows])]
    frame = pl.DataFrame({"operator": names_of_rows(trace, rows), "self_ns": self_ns[rows]})
    of_step = {"count": pl.len() / account.height, "self_ns": pl.col("self_ns").sum() / account.height}
    return frame.group_by("operator").agg(**of_step)


def _windows(account: pl.DataFrame) -> Intervals:
    """The compared steps, which are disjoint and in order."""
    return account["start_ns"].to_numpy(), (account["start_ns"] + account["wall_ns"]).to_numpy()


def _begin_in(windows: Intervals, start: Ints) -> Bools:
    """Whether each event begins in one of them."""
    low, high = windows
    at = np.searchsorted(low, start, side="right") - 1
    return (at >= 0) & (start < high[at])
