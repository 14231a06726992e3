"""What a search comes to, for people and programs: Pareto front, reasons, plain data, TorchServe's table."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import msgspec
import numpy as np

from fettle.files import plain
from fettle.load.torchserve import torchserve_row
from fettle.measure import pareto
from fettle.slo.kept import Tested
from fettle.slo.points import Measured, Point, Proven, SearchResult
from fettle.units import rate_text

LINEAR = 0.05
"""Change of the cost a row below which larger batches bring nothing."""


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats: capacity, p99 at the common rate, memory, cost and error at once.

    Differences below 2% are none: both simulation and load test are noisier than that. Of points that are alike, the
    first.
    """
    by_respects: dict[tuple[float, ...], Point] = {}
    for point in points:
        if point.capacity > 0 and math.isfinite(point.p99_s):
            by_respects.setdefault(_respects(point), point)
    unbeaten = pareto(list(by_respects))
    return [point for place, point in enumerate(by_respects.values()) if place in unbeaten]


def _respects(point: Point) -> tuple[float, ...]:
    """Less is better in each; in steps of 2%."""
    values = (1 / point.capacity, point.p99_s, float(point.memory_bytes), point.cost or 0.0, plain(point.error) or 0)
    return tuple(round(math.log(max(value, 1e-9)) / 0.02) for value in values)


def explain(result: SearchResult) -> list[str]:
    """Why the best is the best: what more rows, waiting, workers and recipes bring or cost."""
    points = result.points
    best = result.best or (points[0] if points else None)
    if best is None or not best.predicted:
        return _why_nothing(result)
    notes = [*about_bound(best), *_about_ties(best, points), *_about_serving(best, result), *_about_rows(best, result),
            *_about_delay(best, points), *_about_workers(best, points)]  # fmt: skip
    if result.best is None and any(point.tests for point in points):
        nearest = min((test for point in points for test in point.tests), key=_p99)
        p99 = _p99(nearest)
        notes.insert(0, f"no load test kept the limit: the nearest had a p99 of {p99:.4g} ms at {nearest.rate:.4g} "
                       f"requests/s, {p99 / result.limit_s / 1e3:.2f}x the limit")  # fmt: skip
    return notes


def _why_nothing(result: SearchResult) -> list[str]:
    """Which factor binds where no setting keeps the limit even in simulation."""
    if not result.branches:
        return []
    single = min(measured.single_s for measured in result.branches.values())
    around = min(measured.costs.request_s + measured.costs.batch_s for measured in result.branches.values())
    if single + around > result.limit_s:
        return [f"one row takes {single * 1e3:.4g} ms and serving it {around * 1e3:.4g} ms: over the limit without any "
                "queue"]  # fmt: skip
    return [f"queueing breaks the limit: one row takes {single * 1e3:.4g} of {result.limit_s * 1e3:.4g} ms, and two "
            "requests that come together cannot both be in time"]  # fmt: skip


def about_bound(best: Proven) -> list[str]:
    """That a setting was not brought to its limit."""
    if not (best.tests and all(test.held for test in best.tests)):
        return []
    return ["all load tests of the best setting kept the limit: it may serve more than the most that was tried"]


def _about_ties(best: Point, points: Sequence[Point]) -> list[str]:
    """Settings that kept the limit up to the same rate."""
    if not best.measured:
        return []
    tied = [point for point in points if point.measured == best.measured and point is not best]
    return [f"{point.setting} keeps the limit up to {rate_text(best.measured)} requests/s as well, with a p99 of "
            f"{point.p99_at_measured_ms:.3g} instead of {best.p99_at_measured_ms:.3g} ms there"
            for point in tied]  # fmt: skip


def _about_serving(best: Point, result: SearchResult) -> list[str]:
    """What of a row's cost is not the model's, and what a pause costs. Nothing where it was not measured."""
    measured, rows = result.branches[best.setting.branch], best.setting.max_rows
    costs, notes = measured.costs, []
    if measured.known_overheads is not None:
        added = costs.batch_s / rows + costs.held_s
        whole = costs.curve.at(rows) / rows + added
        notes.append(f"of {whole * 1e3:.3g} ms a row in calls of {rows}, {added * 1e3:.2g} ms are the server's")
    longer = [statistics.median(after) / statistics.median(costs.samples[size])
              for size, after in costs.rested.items() if size <= rows]  # fmt: skip
    if longer and statistics.median(longer) > 1 + LINEAR:
        notes.append(f"a call after a pause takes {statistics.median(longer) - 1:.0%} longer: simulated so")
    tested = [point for point in result.points if result.branches[point.setting.branch].scale == 1.0]
    if slower := how_much_slower(tested):
        notes.append(f"the machine's speed moves: {slower}, and a prediction is off by as much")
    return notes


def how_much_slower(points: Sequence[Point]) -> str:
    """Calls in the points' load tests against what they were to be; empty where that is nearly the same."""
    times = [test.slower for point in points for test in point.tests if test.slower]
    if not times or 1 / (1 + LINEAR) < statistics.median(times) < 1 + LINEAR:
        return ""
    return f"the model's calls took {statistics.median(times):.2f}x as long in load tests as when calibrated"


def _about_rows(best: Point, result: SearchResult) -> list[str]:
    """A sentence for each doubling of the rows, up to the first that the curve or the limit rules out."""
    setting, notes = best.setting, []
    costs = result.branches[setting.branch].costs
    curve = costs.curve
    top: dict[int, float] = {}
    for point in result.points:
        if point.setting.branch == setting.branch:
            top[point.setting.max_rows] = max(top.get(point.setting.max_rows, 0.0), point.now)
    sizes = sorted(top)
    for fewer, more in itertools.pairwise(sizes):
        if not top[fewer]:
            continue
        gain = top[more] / top[fewer] - 1
        a_row, then = curve.at(fewer) / fewer, curve.at(more) / more
        if then > (1 - LINEAR) * a_row:
            shape = "linear" if then < (1 + LINEAR) * a_row else "steeper than linear"
            why = f"the curve is {shape}, {a_row * 1e3:.3g} and {then * 1e3:.3g} ms a row"
        elif gain < LINEAR and curve.at(more) < result.limit_s / 3:
            slow = max(costs.samples.get(more, (curve.at(more),)))
            why = f"a call of {more} takes {curve.at(more) * 1e3:.3g} ms, but the slowest took {slow * 1e3:.3g}"
        elif gain < LINEAR:
            why = (f"a call of {more} takes {curve.at(more) * 1e3:.3g} of {result.limit_s * 1e3:.4g} ms: what waits "
                   "behind it is late")  # fmt: skip
        else:
            why = f"a row costs {a_row * 1e3:.3g} ms in {fewer} and {then * 1e3:.3g} ms in {more}"
        notes.append(f"{fewer} to {more} rows: {gain:+.0%} capacity; {why}")
    if not sizes[1:]:
        notes.append("only one row a call was tried")
    return notes


def _about_delay(best: Point, points: Sequence[Point]) -> list[str]:
    """What waiting for fuller batches brings or costs, beside the same setting with or without it."""
    mine = best.setting
    alike = (p for p in points if replace(p.setting, delay_s=mine.delay_s) == mine)
    other = next((p for p in alike if bool(p.setting.delay_s) != bool(mine.delay_s)), None)
    if other is None or not other.now or not best.now:
        return []
    what = "no delay instead" if mine.delay_s else f"waiting {other.setting.delay_s * 1e3:.3g} ms for fuller batches"
    return [f"{what}: {other.now / best.now - 1:+.0%} in simulation"]


def _about_workers(best: Point, points: Sequence[Point]) -> list[str]:
    """The best setting of every other branch, in one sentence each."""
    tops: dict[Any, Point] = {}
    for point in points:
        branch = point.setting.branch
        if branch not in tops or point.now > tops[branch].now:
            tops[branch] = point
    notes = []
    for branch, point in tops.items():
        if branch != best.setting.branch and best.now:
            change = point.now / best.now - 1
            notes.append(f"{branch}, at best: " + (f"{change:+.0%}" if point.now else "cannot keep the limit"))
    return notes


def _p99(test: Tested) -> float:
    value = test.run["latency_ms"]["p99"]
    return float(value) if value is not None and math.isfinite(value) else math.inf


# -- plain data -------------------------------------------------------------------------------------------------------


def as_data(result: SearchResult, **more: Any) -> dict[str, Any]:
    """Everything that the report shows, without NaN or infinity, with `more` facts about the search."""
    best = result.best
    data: dict[str, Any] = plain({
        "limit_ms": result.limit_s * 1e3, "rate": result.rate, "headroom": result.headroom, "met": result.met,
        "why": result.why, "tests": result.tests, "tests_kept": result.tests_kept, "interrupted": result.interrupted,
        "seconds": result.seconds, "reference_rate": result.reference_rate,
        "best": result.points.index(best) if best is not None else None,
        "points": [_plain_point(point) for point in result.points],
        "branches": [_plain_branch(measured) for measured in result.branches.values()],
        "failures": result.failures, "is_quiet": result.load.is_quiet, "load": result.load, **more,
    })  # fmt: skip
    return data


def _plain_point(point: Point) -> dict[str, Any]:
    tests = [
        {"rate": test.rate, "held": test.held, "predicted_p99_ms": test.predicted_p99_ms, "slower": test.slower,
         **msgspec.to_builtins(test.inside), "batch_rows": test.inside.rows, "run": test.run}
        for test in point.tests
    ]  # fmt: skip
    return {
        **asdict(point.setting), "setting": str(point.setting), "predicted": point.predicted,
        "simulated": point.now,
        "measured": point.measured, "p50_ms": point.predicted_p50_s * 1e3,
        "p99_ms": point.p99_s * 1e3, "memory_bytes": point.memory_bytes, "error": point.error,
        "cost_per_million": point.cost, "front": point.front, "tests": tests,
    }  # fmt: skip


def _plain_branch(measured: Measured) -> dict[str, Any]:
    calibration, lender = measured.calibration, measured.lender
    curve = []
    for rows, samples in calibration.samples.items():
        low_ms, median_ms, high_ms = (1e3 * np.percentile(samples, (5, 50, 95))).tolist()
        curve.append({"rows": rows, "median_ms": median_ms, "low_ms": low_ms, "high_ms": high_ms,
                      "calls": len(samples)})  # fmt: skip
    return {
        **asdict(measured.branch), "branch": str(measured.branch), "curve": curve, "scale": measured.scale,
        "failures": [{"rows": rows, "why": why} for rows, why in calibration.failures.items()],
        "is_quiet": calibration.load.is_quiet, "load": calibration.load,
        "request_ms": measured.costs.request_s * 1e3, "batch_ms": measured.costs.batch_s * 1e3,
        "held_ms": measured.costs.held_s * 1e3,
        "overheads": "measured" if measured.overheads else f"measured with {lender.branch}" if lender else "assumed",
    }  # fmt: skip


# -- TorchServe's table -----------------------------------------------------------------------------------------------


def torchserve_rows(result: SearchResult, name: str) -> list[dict[str, str]]:
    """Every load test in the columns of TorchServe's ``ab_report.csv``, best setting first.

    Its columns of the handler are the calls of the model here; the queue's are from arrival to dispatch. Its own
    latencies come from a closed loop; these count from when a request was due.
    """
    return [
        torchserve_test(test, f"{name}, {setting}", "requests", setting.max_rows, setting.delay_s, setting.workers)
        for setting, test in ((point.setting, test) for point in result.points for test in point.tests)
    ]


def torchserve_test(
    test: Tested, model: str, what: str, rows: int, delay_s: float = 0.0, workers: int = 1
) -> dict[str, str]:
    """One load test in these columns."""
    inside = test.inside
    calls = {f"Model_{p}": getattr(inside.model_ms, p) for p in ("p50", "p90", "p99")}
    queue = {f"Queue time {p}": getattr(inside.queue_ms, p) for p in ("p50", "p90", "p99")}
    return torchserve_row(
        test.run, model, **calls, **queue,
        **{"Batch size": rows, "Batch delay": delay_s * 1e3, "Workers": workers,
           "Input": f"{test.rate:.5g} {what}/s, Poisson", "predict_mean": inside.model_ms.mean,
           "handler_time_mean": inside.model_ms.mean, "waiting_time_mean": inside.queue_ms.mean,
           "cpu_percentage_mean": inside.cpu_percent, "memory_percentage_mean": inside.memory_percent},
    )  # fmt: skip
