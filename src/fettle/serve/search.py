"""The best setting under a latency limit: calibrate, simulate every setting, prove the best by open-loop load.

Hundreds of settings cost milliseconds each in simulation; only two or three are put to a real server. Where the real
capacity differs from the predicted one, the constants are corrected, everything is ranked anew, and what comes out on
top is tested again.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from fettle.errors import UsageError
from fettle.recipe import write_text
from fettle.serve.calibrate import calibrate
from fettle.serve.client import Shot, tensor_shot
from fettle.serve.host import host_id
from fettle.serve.load import Run, as_data, open_loop, poisson
from fettle.serve.package import SAMPLES, CurveTable, Package, ServeSettings
from fettle.serve.policy import BatchSettings, PolicyName
from fettle.serve.simulate import Costs, capacity

LATE = "the load generator was late itself in tests that failed: what was measured is a lower bound"
"""A late generator makes latencies longer, never shorter: what passes has passed."""
HEAD_ROOM = 0.2
"""Share of the capacity that a setting for a given rate should have left."""
DELAYS = (0.0, 0.25)
"""Waiting for a fuller batch, as shares of the cost of one row."""


_POLICIES: tuple[PolicyName, ...] = ("greedy", "curve")


@dataclass(frozen=True)
class Setting:
    """One way to serve."""

    workers: int
    threads: int
    max_rows: int
    delay_s: float
    policy: PolicyName
    pad: bool = False

    def batching(self) -> BatchSettings:
        """For the queue."""
        return BatchSettings(
            max_rows=self.max_rows,
            max_delay_s=self.delay_s,
            policy=self.policy,
            pad=self.pad,
            workers=self.workers,
        )

    def __str__(self) -> str:
        delay = f", {self.delay_s * 1e3:.3g} ms delay" if self.delay_s else ""
        return (
            f"{self.workers} worker{'s' if self.workers > 1 else ''} x {self.threads} thread"
            f"{'s' if self.threads > 1 else ''}, {self.policy} up to {self.max_rows} rows{delay}"
        )


@dataclass
class Point:
    """A setting with what was predicted, and what was measured where it was."""

    setting: Setting
    predicted: float
    """Requests a second under the limit, by simulation."""
    predicted_p50_s: float = math.nan
    memory_bytes: int = 0
    measured: float | None = None
    """Requests a second under the limit, by load tests; None where none was made."""
    runs: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Found:
    """The outcome of a search."""

    limit_s: float
    rate: float
    """What was asked for; 0: as much as possible."""
    points: list[Point]
    """Best first: measured ones by measurement, then the others by prediction."""
    costs: dict[str, dict[int, list[float]]]
    """Samples by "workers x threads" and rows."""
    why: list[str] = field(default_factory=list)
    tests: int = 0

    @property
    def best(self) -> Point | None:
        """The best measured point that serves anything within the limit."""
        good = [point for point in self.points if point.measured]
        return max(good, key=lambda point: point.measured or 0.0, default=None)

    @property
    def met(self) -> bool:
        """Whether the limit is kept, at the rate that was asked for."""
        return self.best is not None and (self.best.measured or 0.0) >= self.rate


async def search(
    package: Package, limit_s: float, *, rate: float = 0.0, most_rows: int = 32, cores: int = 2, seconds: float = 8.0,
    confirm: int = 2, keep: Path | None = None, tell: Callable[[str], None] = lambda text: None,
) -> Found:  # fmt: skip
    """Find the setting with the greatest capacity under the limit; `seconds` is the length of one load test.

    `keep` is a file in which calibrations are kept, so that a search that was killed does not measure them again.
    """
    most_rows = min(most_rows, package.manifest.max_rows)
    crews = [(1, cores)] + ([(cores, 1)] if cores > 1 else []) + ([(1, 1)] if cores > 1 else [])
    kept = _read(keep, package)
    costs: dict[tuple[int, int], Costs] = {}
    for workers, threads in crews:
        name = f"{workers}x{threads}"
        if name not in kept:
            samples = await asyncio.to_thread(
                calibrate, package, most=most_rows, workers=workers, threads=threads, limit_s=limit_s, tell=tell
            )
            kept[name] = {rows: list(values) for rows, values in samples.items()}
            _write(keep, package, kept)
        costs[workers, threads] = Costs({int(rows): tuple(values) for rows, values in kept[name].items()})
    single = min(cost.curve().at(1) for cost in costs.values())
    found = Found(limit_s, rate, [], kept)
    if single > limit_s:
        found.why.append(f"one row alone takes {single * 1e3:.1f} ms: the limit is missed by {single / limit_s:.2f}x")
        return found
    found.points = rank(costs, limit_s, tell)
    tested: set[Setting] = set()
    for attempt in range(2):
        todo = [point for point in found.points if point.setting not in tested and point.predicted > 0][:confirm]
        off = []
        for point in todo:
            tested.add(point.setting)
            tell(f"load tests of {point.setting}, predicted {point.predicted:.4g} requests/s")
            curve = costs[point.setting.workers, point.setting.threads]
            await prove(package, point, curve, limit_s, seconds, found, tell)
            if point.measured:
                off.append(point.predicted / point.measured)
        worst = max((abs(math.log(ratio)) for ratio in off), default=0.0)
        if attempt or worst < math.log(1.15):
            break
        # The prediction was off: scale every cost by the mean factor, and rank again.
        scale = math.exp(sum(math.log(ratio) for ratio in off) / len(off))
        found.why.append(f"predictions were {scale:.2f}x what was measured: costs corrected, ranked again")
        costs = {crew: _scaled(cost, scale) for crew, cost in costs.items()}
        old = {point.setting: point for point in found.points if point.measured is not None}
        found.points = [old.get(point.setting, point) for point in rank(costs, limit_s, tell)]
    found.why += explain(costs, found.points)
    found.points.sort(key=lambda point: (point.measured is None, -(point.measured or 0.0), -point.predicted))
    if not found.met and found.best is not None:
        best = found.best.measured or 0.0
        found.why.append(f"{rate:.4g} requests/s are asked for; the best setting keeps the limit up to {best:.4g}")
    return found


def rank(costs: dict[tuple[int, int], Costs], limit_s: float, tell: Callable[[str], None]) -> list[Point]:
    """Every setting, simulated; best first."""
    points = []
    for (workers, threads), cost in costs.items():
        curve = cost.curve()
        for rows in [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= curve.rows[-1]]:
            for policy in _POLICIES:
                for delay in DELAYS if rows > 1 else (0.0,):
                    setting = Setting(workers, threads, rows, delay * curve.at(1), policy)
                    best, seen = capacity(setting.batching(), cost, limit_s)
                    points.append(Point(setting, best, seen.percentile(50) if seen else math.nan))
        tell(f"{len(points)} settings simulated")
    # Of settings that are as good, the simpler one: fewer workers, no delay, smaller batches.
    return sorted(
        points,
        key=lambda p: (-round(p.predicted, 1), p.setting.workers, p.setting.delay_s, p.setting.max_rows),
    )


def _scaled(cost: Costs, scale: float) -> Costs:
    return replace(cost, samples={n: tuple(value * scale for value in s) for n, s in cost.samples.items()})


async def prove(
    package: Package, point: Point, costs: Costs, limit_s: float, seconds: float, found: Found,
    tell: Callable[[str], None],
) -> None:  # fmt: skip
    """Open-loop load tests around the predicted capacity: up while it holds, down while it does not, then between."""
    from fettle.serve.registry import Options
    from fettle.serve.server import Address, Server

    server = Server(Address(port=0), Options())
    settings = serve_settings(package.settings, point.setting, costs, limit_s, server.registry.machine)
    changed = replace(package, settings=settings)
    await server.start([changed])
    try:
        url = f"http://127.0.0.1:{server.ports[0]}"
        shots = sample_shots(package, url)
        good, bad, rate = 0.0, math.inf, point.predicted
        for _ in range(4):
            tell(f"{rate:.4g} requests/s on {point.setting}")
            run = await _test(shots, rate, min(60.0, max(seconds, 1000 / rate)), limit_s)
            found.tests += 1
            point.runs.append(as_data(run))
            if run.stable and not run.failed and not run.shed and run.percentile(99) <= limit_s:
                good = max(good, rate)
            else:
                bad = min(bad, rate)
                if run.void and LATE not in found.why:
                    found.why.append(LATE)
            if good and bad < math.inf:
                if bad / good < 1.05:
                    break
                rate = math.sqrt(good * bad)
            else:
                rate = rate * 1.1 if good else rate * 0.85
        point.measured = good
        version = server.registry.choose(package.manifest.name)
        point.memory_bytes = sum(worker.rss for worker in version.pool.workers)
    finally:
        await server.close()


def sample_shots(package: Package, url: str, most: int = 8) -> list[Shot]:
    """Requests of one row each, with the rows of the package's own sample."""
    from safetensors.numpy import load_file

    samples = load_file(package.folder / SAMPLES)
    specs = package.manifest.inputs
    rows = min([most, *(len(samples[spec.name]) for spec in specs if spec.batched)])
    shots = []
    for row in range(rows):
        tensors = [
            (spec.name, spec.datatype, samples[spec.name][row : row + 1] if spec.batched else samples[spec.name])
            for spec in specs
        ]
        shots.append(tensor_shot(f"{url}/v2/models/{package.manifest.name}/infer", tensors, {}))
    return shots


async def _test(shots: Any, rate: float, seconds: float, limit_s: float) -> Run:
    """One run; again where it failed while this client was too slow, which says little of the server."""
    for seed in range(2):
        run = await open_loop(shots, poisson(rate, seconds, seed), limit_s=limit_s)
        if not run.void or run.percentile(99) <= limit_s:
            break
    return run


def serve_settings(given: ServeSettings, setting: Setting, costs: Costs, limit_s: float, machine: str) -> ServeSettings:
    """A package's settings with those of the search and the curve they rest on."""
    curve = costs.curve()
    return msgspec.structs.replace(
        given, max_rows=setting.max_rows, delay_ms=setting.delay_s * 1e3, policy=setting.policy, pad=setting.pad,
        workers=setting.workers, threads=setting.threads, limit_ms=limit_s * 1e3,
        curve=CurveTable(curve.rows, curve.seconds, machine),
    )  # fmt: skip


def explain(costs: dict[tuple[int, int], Costs], points: Sequence[Point]) -> list[str]:
    """Why the best is the best: what more rows bring, what the policy brings, what more workers bring."""
    if not points or not points[0].predicted:
        return ["no setting keeps the limit in simulation: queueing alone breaks it"]
    said = []
    best = points[0]
    setting = best.setting
    curve = costs[setting.workers, setting.threads].curve()

    def like(**changes: Any) -> Point | None:
        wanted = replace(setting, **changes)
        return next((point for point in points if point.setting == wanted), None)

    smaller = like(max_rows=setting.max_rows // 2) if setting.max_rows > 1 else None
    larger = like(max_rows=setting.max_rows * 2)
    for other, text in ((smaller, "half as many rows"), (larger, "twice as many rows")):
        if other is not None and other.predicted:
            change = other.predicted / best.predicted - 1
            said.append(f"{text} a batch: {change:+.0%} capacity")
    one, most = curve.at(1), curve.at(setting.max_rows) / setting.max_rows
    if setting.max_rows > 1:
        said.append(f"a row costs {one * 1e3:.2f} ms alone and {most * 1e3:.2f} ms in a batch of {setting.max_rows}")
    elif curve.rows[-1] > 1:
        size = curve.rows[-1]
        cost = curve.at(size) / size * 1e3
        said.append(f"batching brings nothing: a row costs {one * 1e3:.2f} ms alone, {cost:.2f} ms in {size}")
    other = like(policy="greedy" if setting.policy == "curve" else "curve")
    if other is not None and other.predicted:
        said.append(f"{setting.policy} instead of {other.setting.policy}: {best.predicted / other.predicted - 1:+.0%}")
    crews = {p.setting.workers * 1000 + p.setting.threads: p for p in reversed(points)}
    for point in crews.values():
        if (point.setting.workers, point.setting.threads) != (setting.workers, setting.threads):
            told = f"{point.predicted / best.predicted - 1:+.0%}" if point.predicted else "cannot keep the limit"
            said.append(f"{point.setting.workers} x {point.setting.threads} threads at best: {told}")
    return said


def as_json(found: Found) -> dict[str, Any]:
    """The search as plain data."""
    rows = []
    for point in found.points:
        rows.append({**asdict(point.setting), "predicted": point.predicted, "measured": point.measured,
                     "memory_bytes": point.memory_bytes, "runs": point.runs})  # fmt: skip
    return {"limit_ms": found.limit_s * 1e3, "rate": found.rate, "met": found.met, "why": found.why,
            "tests": found.tests, "points": rows}  # fmt: skip


def _key(package: Package) -> str:
    return f"{host_id()}:{package.manifest.files.get('weights.safetensors', '')}:{package.manifest.recipe}"


def _read(keep: Path | None, package: Package) -> dict[str, dict[int, list[float]]]:
    if keep is None or not keep.exists():
        return {}
    try:
        said = json.loads(keep.read_text(encoding="utf-8"))
        if said["key"] != _key(package):
            return {}
        return {
            str(crew): {int(rows): [float(value) for value in samples] for rows, samples in table.items()}
            for crew, table in said["costs"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{keep} holds no calibration: delete it, or name another file") from error


def _write(keep: Path | None, package: Package, costs: dict[str, dict[int, list[float]]]) -> None:
    if keep is not None:
        write_text(keep, json.dumps({"key": _key(package), "costs": costs}) + "\n")
