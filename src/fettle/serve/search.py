"""The best setting under a latency limit: calibrate, simulate every setting, prove the best by open-loop load.

Hundreds of settings cost milliseconds each in simulation; only two or three are put to a real server. Where the real
capacity differs from the predicted one, the constants are corrected, everything is ranked anew, and what comes out on
top is tested again. What fails on the way (a recipe, a batch size, a number of workers) is kept with its reason.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from fettle.errors import UsageError
from fettle.serve.calibrate import Calibration, Stopped, calibrate
from fettle.serve.client import Shot, tensor_shot
from fettle.serve.host import host_id
from fettle.serve.journal import Journal, Tested, package_key
from fettle.serve.load import Run, as_data, open_loop, poisson
from fettle.serve.overheads import Overheads, measure_overheads
from fettle.serve.package import SAMPLES, CurveTable, Package, ServeSettings
from fettle.serve.policy import BatchSettings, PolicyName, plan
from fettle.serve.served import Served, ServerFailure
from fettle.serve.simulate import Costs, capacity, simulate

LATE = "the load generator was late itself in tests that failed: what was measured is a lower bound"
"""A late generator makes latencies longer, never shorter: what passes has passed."""
HEAD_ROOM = 0.2
"""Share of the capacity that a setting had better have left: what is suggested where nobody asks for another."""
STEPS_DOWN = (0.85, 0.7, 0.5)
"""Of the rate, after the first, second and third load test that did not keep the limit."""
DELAYS = (0.0, 0.25)
"""Waiting for a fuller batch, as shares of the cost of one row."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
OFF = 1.15
"""A prediction that is off by more than this factor is corrected."""
HOPELESS = 0.5
"""A recipe with no smaller error that serves less than this share of another's is not tried with other workers."""
_POLICIES: tuple[PolicyName, ...] = ("greedy", "curve")
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Branch:
    """What a cost curve is measured for."""

    workers: int
    threads: int
    device: str = "cpu"
    variant: str = ""
    """Which of the packages; empty where there is one only."""

    def __str__(self) -> str:
        workers = f"{self.workers} worker{'s' if self.workers > 1 else ''}"
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        device = f" on {self.device}" if self.device != "cpu" else ""
        return f"{workers} x {threads}{device}" + (f", {self.variant}" if self.variant else "")


@dataclass(frozen=True)
class Setting:
    """One way to serve."""

    workers: int
    threads: int
    max_rows: int
    delay_s: float
    policy: PolicyName
    pad: bool = False
    device: str = "cpu"
    variant: str = ""

    @property
    def branch(self) -> Branch:
        """The part that costs are measured for."""
        return Branch(self.workers, self.threads, self.device, self.variant)

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
        pad = ", padding" if self.pad else ""
        return f"{self.branch}, {self.policy} up to {self.max_rows} rows{delay}{pad}"


@dataclass(frozen=True)
class Variant:
    """One package that can serve the model: the model with one recipe."""

    name: str
    package: Package

    @property
    def error(self) -> float:
        """Relative L2 error of its answers against the model as given."""
        return float(self.package.manifest.accuracy.get("relative_error", math.nan))


@dataclass(frozen=True)
class Failure:
    """Something that was tried, or could not be, and why."""

    what: str
    why: str


@dataclass
class Point:
    """A setting with what was predicted, and what was measured where it was."""

    setting: Setting
    predicted: float
    """Requests a second under the limit, by simulation."""
    predicted_p50_s: float = math.nan
    """At that rate."""
    p99_s: float = math.inf
    """By simulation at `Found.reference_rate`."""
    memory_bytes: int = 0
    """Of all workers: as calibrated, or as seen in the last load test."""
    error: float = math.nan
    """Relative L2 error of the answers."""
    cost: float | None = None
    """Of a million requests at `capacity`, in the unit of the price."""
    front: bool = False
    """Whether no other point is better in one respect and no worse in the others."""
    measured: float | None = None
    """Requests a second under the limit, by load tests; None where none was made."""
    tests: list[Tested] = field(default_factory=list)

    @property
    def lowest(self) -> float:
        """The lowest rate that was tested."""
        return min((test.rate for test in self.tests), default=math.nan)

    @property
    def capacity(self) -> float:
        """As measured (0 where no test kept the limit), else as predicted."""
        return self.predicted if self.measured is None else self.measured


@dataclass
class Measured:
    """What is known of one branch."""

    branch: Branch
    calibration: Calibration
    overheads: Overheads | None = None
    """Measured with this branch; None: `lent` ones are used."""
    lent: Overheads | None = None
    lent_by: str = ""
    scale: float = 1.0
    """By which the costs were multiplied after load tests that contradicted them."""

    @property
    def costs(self) -> Costs:
        """For the simulation."""
        around = self.overheads or self.lent
        samples = {n: tuple(value * self.scale for value in s) for n, s in self.calibration.samples.items()}
        return Costs(samples, around.request_s, around.batch_s) if around else Costs(samples)


@dataclass
class Found:
    """The outcome of a search."""

    limit_s: float
    rate: float
    """What was asked for; 0: as much as possible."""
    head_room: float = 0.0
    """Share of the capacity that has to be left at `rate`."""
    points: list[Point] = field(default_factory=list)
    """Best first: measured ones by measurement, then the others by prediction."""
    branches: dict[Branch, Measured] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    why: list[str] = field(default_factory=list)
    reference_rate: float = 0.0
    """Requests a second at which the points' `p99_s` are compared."""
    tests: int = 0
    """Load tests that the outcome rests on,"""
    tests_kept: int = 0
    """and how many of them had been made by an earlier run of the same search."""
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def best(self) -> Point | None:
        """The best measured point that serves anything within the limit."""
        good = [point for point in self.points if point.measured]
        return max(good, key=lambda point: point.measured or 0.0, default=None)

    @property
    def met(self) -> bool:
        """Whether the limit is kept, at the rate that was asked for and with the head-room."""
        return self.best is not None and (1 - self.head_room) * (self.best.measured or 0.0) >= self.rate


async def search(
    packages: Package | Sequence[Variant], limit_s: float, *, rate: float = 0.0, head_room: float = 0.0,
    most_rows: int = 32, cores: int = 2, devices: Sequence[str] = ("cpu",), seconds: float = 8.0, confirm: int = 2,
    prices: Mapping[str, float] | None = None, keep: Path | None = None, failures: Iterable[Failure] = (),
    tell: Tell = lambda text: None, stop: asyncio.Event | None = None,
) -> Found:  # fmt: skip
    """Find the setting with the greatest capacity under the limit; `seconds` is the length of one load test.

    `prices` are of an hour, by device (``""``: any). `keep` is a file in which everything measured is kept, so that a
    search that was killed measures nothing twice; `stop` ends it early, with what is known by then.
    """
    began = time.monotonic()
    variants = [Variant("", packages)] if isinstance(packages, Package) else list(packages)
    found = Found(limit_s, rate, head_room, failures=list(failures))
    work = _Search(found, {variant.name: variant for variant in variants}, Journal(keep), tell, stop or asyncio.Event(),
                   seconds, most_rows, cores)  # fmt: skip
    try:
        await work.calibrate(variants, devices)
        if work.possible():
            await work.around()
            await work.refine_workers()
            await work.confirm(confirm)
            await work.against_greedy()
    except Stopped:
        found.interrupted = True
    work.finish(prices or {})
    found.seconds = time.monotonic() - began
    return found


class _Search:
    """A search under way: what `search` calls, in the order in which it does."""

    def __init__(
        self, found: Found, variants: Mapping[str, Variant], journal: Journal, tell: Tell, stop: asyncio.Event,
        seconds: float, most_rows: int, cores: int,
    ) -> None:  # fmt: skip
        self.found, self.variants, self.journal, self.stop = found, variants, journal, stop
        self.seconds, self.most_rows, self.cores = seconds, most_rows, cores
        self._tell, self._left_s = tell, 0.0
        self._tested: set[Setting] = set()
        self._tried: set[Branch] = set()

    # -- costs -------------------------------------------------------------------------------------------------------

    async def calibrate(self, variants: Sequence[Variant], devices: Sequence[str]) -> None:
        """Cost curves of every variant and device with the first crew, then with the others where there is hope."""
        self._left_s = 10.0 * len(variants) * sum(len(crews(self.cores, device)) for device in devices)
        for device in devices:
            for variant in variants:
                await self._calibrate(Branch(*crews(self.cores, device)[0], device, variant.name))
        hopeless = self._hopeless()
        for device in devices:
            for workers, threads in crews(self.cores, device)[1:]:
                for variant in variants:
                    if variant.name not in hopeless:
                        await self._calibrate(Branch(workers, threads, device, variant.name))

    async def _calibrate(self, branch: Branch) -> None:
        self._check()
        if branch in self._tried:
            return
        self._tried.add(branch)
        package = self.variants[branch.variant].package
        most = min(self.most_rows, package.manifest.max_rows)
        key = f"{package_key(package)} {branch.device} {branch.workers}x{branch.threads} {most} {self.found.limit_s:g}"
        made = self.journal.calibrations.get(key)
        if made is None:
            self._check_memory(branch)
            began = time.monotonic()
            try:
                made = await asyncio.to_thread(
                    calibrate, package, most=most, workers=branch.workers, threads=branch.threads,
                    device=branch.device, limit_s=self.found.limit_s, tell=self.tell, stopped=self.stop.is_set,
                )  # fmt: skip
            except _TooMuch as failure:
                made = Calibration({}, {0: str(failure)})
            self._left_s = max(0.0, self._left_s - (time.monotonic() - began))
            self.journal.calibrations[key] = made
            self.journal.save()
        for rows, why in made.failures.items():
            at = f" at {rows} row{'s' if rows > 1 else ''}" if rows else ", loading"
            self.found.failures.append(Failure(f"{branch}{at}", why))
        if made.samples:
            self.found.branches[branch] = Measured(branch, made)

    def _check_memory(self, branch: Branch) -> None:
        """Raise where so many workers as one is known to need memory for would not fit beside each other."""
        import psutil

        one = next((m for b, m in self.found.branches.items()
                    if b.workers == 1 and (b.device, b.variant) == (branch.device, branch.variant)), None)  # fmt: skip
        if one is None or branch.device != "cpu":
            return
        need, there = branch.workers * one.calibration.memory_at(self.most_rows), psutil.virtual_memory().available
        if need > 0.9 * there:
            raise _TooMuch(f"needs about {need >> 20} MiB of memory; {there >> 20} MiB are free")

    def _hopeless(self) -> set[str]:
        """Variants that the first calibrations show to be far behind one that answers as exactly."""
        best: dict[str, float] = {}
        for measured in self.found.branches.values():
            name, top = measured.branch.variant, max(point.predicted for point in rank([measured], self.found.limit_s))
            best[name] = max(top, best.get(name, 0.0))
        left = set()
        for name, top in best.items():
            for other, more in best.items():
                if top < HOPELESS * more and not self.variants[other].error > self.variants[name].error:
                    left.add(name)
                    why = f"serves {top / more:.2f}x of {other or 'the other'}, which answers as exactly"
                    self.found.failures.append(Failure(f"{name}: other numbers of workers were left out", why))
                    break
        return left

    def possible(self) -> bool:
        """Whether one row alone can be served within the limit at all; says by how much it cannot."""
        found = self.found
        if not found.branches:
            found.why.append("nothing could be measured: see the failures")
            return False
        single = min(measured.costs.curve().at(1) for measured in found.branches.values())
        if single > found.limit_s:
            ratio = single / found.limit_s
            found.why.append(f"one row alone takes {single * 1e3:.1f} ms: the limit is missed by {ratio:.2f}x")
        return single <= found.limit_s

    async def around(self) -> None:
        """What serving adds: measured with the branch that is best so far, lent to the others, until that is stable.

        At most three branches are measured: those that come out on top.
        """
        for _ in range(3):
            points = self._rank()
            if not points or not points[0].predicted:
                return
            top = self.found.branches[points[0].setting.branch]
            if top.overheads is not None:
                return
            top.overheads = await self._overheads(points[0].setting)
            if top.overheads is None:  # it cannot be served
                del self.found.branches[top.branch]
                continue
            for other in self.found.branches.values():
                if other.overheads is None:
                    other.lent, other.lent_by = top.overheads, str(top.branch)

    async def _overheads(self, setting: Setting) -> Overheads | None:
        self._check()
        package = self.variants[setting.variant].package
        branch, rows = setting.branch, setting.max_rows
        key = f"{package_key(package)} {branch.device} {branch.workers}x{branch.threads} {rows}"
        if key not in self.journal.overheads:
            self.tell(f"what serving adds, with {branch}")
            curve = self.found.branches[branch].costs.curve()
            greedy = replace(setting, policy="greedy", delay_s=0.0, pad=False)
            settings = serve_settings(package.settings, greedy, self.found.branches[branch].costs, 0.0, host_id())
            try:
                served = await Served.start(package, settings, branch.device)
                try:
                    shots = sample_shots(package, served.url)
                    self.journal.overheads[key] = await measure_overheads(
                        served, shots, curve, workers=branch.workers, max_rows=rows
                    )
                finally:
                    await served.close()
            except ServerFailure as failure:
                self.found.failures.append(Failure(f"a server with {branch}", str(failure)))
                return None
            self.journal.save()
        return self.journal.overheads[key]

    async def refine_workers(self) -> None:
        """Numbers of workers between the best one and its neighbours."""
        points = self._rank()
        if not points or not points[0].predicted:
            return
        best = points[0].setting
        known = sorted({b.workers for b in self.found.branches if (b.device, b.variant) == (best.device, best.variant)})
        wanted = between(best.workers, known)
        for workers in wanted:
            await self._calibrate(Branch(workers, max(1, self.cores // workers), best.device, best.variant))
        if wanted:
            lender = next((m for m in self.found.branches.values() if m.overheads is not None), None)
            for measured in self.found.branches.values():
                if lender is not None and measured.overheads is measured.lent is None:
                    measured.lent, measured.lent_by = lender.overheads, str(lender.branch)
            await self.around()

    # -- proof -------------------------------------------------------------------------------------------------------

    async def confirm(self, count: int) -> None:
        """Put the best settings to a real server; where the prediction was off, correct it, rank anew, test again."""
        found = self.found
        for attempt in range(2):
            self._left_s = 3.2 * self.seconds * (count + 1 - attempt)
            todo = self._next(count)
            for point in todo:
                await self._prove(point)
            # Where no test kept the limit the capacity is below the lowest rate: the least that the prediction was off.
            off = {
                p.setting.branch: p.predicted / (p.measured or 0.85 * p.lowest)
                for p in todo
                if p.measured or (p.tests and p.measured is not None)
            }
            if attempt or not off or max(abs(math.log(ratio)) for ratio in off.values()) < math.log(OFF):
                break
            # The prediction was off: scale the costs of the branch by its factor, of the others by the mean one.
            mean = math.exp(sum(math.log(ratio) for ratio in off.values()) / len(off))
            found.why.append(f"predictions were {mean:.2f}x what was measured: costs corrected, ranked again")
            for branch, measured in found.branches.items():
                measured.scale *= off.get(branch, mean)
            self._rank()

    def _next(self, count: int) -> list[Point]:
        """The best points that were not tested, and differ by more than delay and padding from each other."""
        chosen: list[Point] = []
        seen = {replace(setting, delay_s=0.0, pad=False) for setting in self._tested}
        for point in self.found.points:
            alike = replace(point.setting, delay_s=0.0, pad=False)
            if point.predicted > 0 and alike not in seen and len(chosen) < count:
                chosen.append(point)
                seen.add(alike)
        return chosen

    async def against_greedy(self) -> None:
        """The same setting with the greedy policy, side by side: what is handed back is never worse than greedy."""
        best = self.found.best
        if best is None or best.setting.policy != "curve":
            return
        twin = next(
            (p for p in self.found.points if p.setting == replace(best.setting, policy="greedy")), None
        ) or Point(replace(best.setting, policy="greedy"), best.predicted)
        curve = self.found.branches[best.setting.branch].costs.curve()
        if plan(twin.setting.batching(), curve) == plan(best.setting.batching(), curve):
            return  # with this curve both decide alike
        if not twin.predicted:
            self.found.why.append("greedy batches instead keep the limit at no rate in simulation: not tested")
            return
        if twin not in self.found.points:
            self.found.points.append(twin)
        if twin.measured is None:
            await self._prove(twin)
        if twin.measured and best.measured:
            gain = best.measured / twin.measured - 1
            self.found.why.append(f"measured side by side, batches by the cost curve instead of greedy: {gain:+.0%}")

    async def _prove(self, point: Point) -> None:
        self._tested.add(point.setting)
        self.tell(f"load tests of {point.setting}, predicted {point.predicted:.4g} requests/s")
        package = self.variants[point.setting.variant].package
        costs = self.found.branches[point.setting.branch].costs
        try:
            await prove(package, point, costs, self.found, self.seconds, self.journal, self.tell, self.stop)
        except ServerFailure as failure:
            self.found.failures.append(Failure(str(point.setting), str(failure)))
        self._left_s = max(0.0, self._left_s - 3.2 * self.seconds)

    # -- result ------------------------------------------------------------------------------------------------------

    def finish(self, prices: Mapping[str, float]) -> None:
        """Rank what is known, compare it in all respects, and say why the best is the best."""
        from fettle.serve.outcome import explain, front

        found = self.found
        if found.branches and not any(why.startswith("one row alone") for why in found.why):
            points = self._rank()
            best = found.best.capacity if found.best else points[0].predicted if points else 0.0
            found.reference_rate = found.rate or (1 - HEAD_ROOM) * best
            for point in points:
                self._complete(point, prices)
            for point in front(points):
                point.front = True
            found.why += explain(found)
        if found.best is not None and not found.met:
            best = (1 - found.head_room) * found.best.capacity
            room = f" with {found.head_room:.0%} head-room" if found.head_room else ""
            found.why.append(f"{found.rate:.4g} requests/s are asked for; the best setting keeps the limit up to "
                             f"{best:.4g}{room}")  # fmt: skip

    def _complete(self, point: Point, prices: Mapping[str, float]) -> None:
        found, setting = self.found, point.setting
        point.error = self.variants[setting.variant].error
        if not point.memory_bytes:
            point.memory_bytes = found.branches[setting.branch].calibration.memory_at(setting.max_rows)
        price = prices.get(setting.device, prices.get(setting.device.partition(":")[0], prices.get("")))
        if price is not None and point.capacity:
            point.cost = price / 3600 / point.capacity * 1e6
        if found.reference_rate and point.predicted >= 0.5 * found.reference_rate:
            costs = found.branches[setting.branch].costs
            seen = simulate(poisson(1.0, 4000, 1)[:3000] / found.reference_rate, setting.batching(), costs)
            point.p99_s = seen.percentile(99)

    def _rank(self) -> list[Point]:
        """All settings, simulated with what is known now; points that were measured stay as they are."""
        old = {point.setting: point for point in self.found.points if point.measured is not None or point.tests}
        fresh = rank(self.found.branches.values(), self.found.limit_s, self.tell)
        points = [old.pop(point.setting, point) for point in fresh] + list(old.values())
        points.sort(key=lambda point: (point.measured is None, -(point.measured or 0.0)))
        self.found.points = points
        return points

    def tell(self, text: str) -> None:
        """What is done now, and about how long all of it still takes."""
        self._tell(f"{text} · about {self._left_s:.0f} s left" if self._left_s >= 1 else text)

    def _check(self) -> None:
        if self.stop.is_set():
            raise Stopped


class _TooMuch(Exception):
    """More memory than there is."""


def crews(cores: int, device: str = "cpu") -> list[tuple[int, int]]:
    """Workers and threads of each: all cores to one worker, then divided; also one core left for the front end.

    Workers that share another device than the CPU need a core each, to hand it work.
    """
    if device != "cpu":
        return [(workers, 1) for workers in (1, 2) if workers <= max(cores, 1)]
    counts = [2**power for power in range(cores.bit_length()) if 2**power <= cores]
    counts += [cores] if cores not in counts else []
    found = [(workers, cores // workers) for workers in counts]
    return found + ([(1, cores - 1)] if cores > 1 else [])


def between(workers: int, known: Sequence[int]) -> list[int]:
    """Numbers of workers halfway to the neighbours among those `known`."""
    place = known.index(workers)
    near = [known[i] for i in (place - 1, place + 1) if 0 <= i < len(known)]
    return sorted({(workers + other) // 2 for other in near} - set(known))


def rank(branches: Iterable[Measured], limit_s: float, tell: Tell = lambda text: None) -> list[Point]:
    """Every setting, simulated; best first."""
    points = []
    for measured in branches:
        branch, costs = measured.branch, measured.costs
        curve = costs.curve()
        for rows, policy in itertools.product([size for size in ROWS if size <= curve.rows[-1]], _POLICIES):
            plans = set()
            for delay, pad in itertools.product(DELAYS if rows > 1 else (0.0,), (False, True)):
                if pad and not measured.calibration.may_pad:
                    continue
                setting = Setting(branch.workers, branch.threads, rows, delay * curve.at(1), policy, pad,
                                  branch.device, branch.variant)  # fmt: skip
                tables = plan(setting.batching(), curve)
                if (delay, tables) in plans:
                    continue  # with this curve padding changes nothing
                plans.add((delay, tables))
                best, seen = capacity(setting.batching(), costs, limit_s)
                points.append(Point(setting, best, seen.percentile(50) if seen else math.nan))
        tell(f"{len(points)} settings simulated")
    # Of settings that are as good, the simpler one: fewer workers, no delay, no padding, smaller batches.
    return sorted(
        points,
        key=lambda p: (
            -round(p.predicted, 1), p.setting.workers, p.setting.delay_s, p.setting.pad, p.setting.max_rows
        ),
    )  # fmt: skip


async def prove(
    package: Package, point: Point, costs: Costs, found: Found, seconds: float, journal: Journal | None = None,
    tell: Tell = lambda text: None, stop: asyncio.Event | None = None,
) -> None:  # fmt: skip
    """Open-loop load tests around the predicted capacity: up while it holds, down while it does not, then between.

    Tests that the journal holds are not made again; the server is started for the first that it does not hold. Raises
    `ServerFailure` where the server fails, and `Stopped`.
    """
    journal, setting, limit_s = journal or Journal(), point.setting, found.limit_s
    settings = serve_settings(package.settings, setting, costs, limit_s, host_id())
    served: Served | None = None
    try:
        good, bad, rate, missed = 0.0, math.inf, point.predicted, 0
        for _ in range(4):
            length = min(60.0, max(seconds, 1000 / rate))
            key = f"{package_key(package)} {setting} {rate:.6g}/s {length:.6g}s {limit_s:g}s"
            if key not in journal.tests:
                if stop is not None and stop.is_set():
                    raise Stopped
                tell(f"{rate:.4g} requests/s on {setting}")
                served = served or await Served.start(package, settings, setting.device)
                journal.tests[key] = await _test(served, package, point, costs, rate, length, limit_s, stop)
                journal.save()
            else:
                found.tests_kept += 1
            tested = journal.tests[key]
            found.tests += 1
            point.tests.append(tested)
            point.memory_bytes = tested.inside.memory_bytes or point.memory_bytes
            if tested.held:
                good = max(good, rate)
            else:
                bad, missed = min(bad, rate), missed + 1
                if tested.run["void"] and LATE not in found.why:
                    found.why.append(LATE)
            if good and bad < math.inf:
                if bad / good < 1.05:
                    break
                rate = math.sqrt(good * bad)
            else:
                rate = rate * 1.1 if good else rate * STEPS_DOWN[min(missed, 3) - 1]
        point.measured = good
    finally:
        if served is not None:
            await served.close()


async def _test(
    served: Served, package: Package, point: Point, costs: Costs, rate: float, seconds: float, limit_s: float,
    stop: asyncio.Event | None,
) -> Tested:  # fmt: skip
    """One run; again where it failed while this client was too slow, which says little of the server."""
    shots = sample_shots(package, served.url)
    for seed in range(2):
        await served.look()
        try:
            run = await open_loop(shots, poisson(rate, seconds, seed), limit_s=limit_s, stop=stop)
        except UsageError as error:  # nothing answers any more
            raise ServerFailure(str(error)) from error
        if run.interrupted:
            raise Stopped
        if not run.void or run.percentile(99) <= limit_s:
            break
    inside = await served.look()
    expected = simulate(poisson(rate, seconds, seed), point.setting.batching(), costs).percentile(99)
    return Tested(
        rate, held(run), as_data(run), inside, expected * 1e3 if math.isfinite(expected) else None
    )  # fmt: skip


def held(run: Run) -> bool:
    """Whether a run kept its limit: a steady state, nothing failed or refused, and a p99 within."""
    return bool(run.stable and run.answered and not run.failed and not run.shed and run.percentile(99) <= run.limit_s)


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


def serve_settings(given: ServeSettings, setting: Setting, costs: Costs, limit_s: float, machine: str) -> ServeSettings:
    """A package's settings with those of the search and the curve they rest on."""
    curve = costs.curve()
    return msgspec.structs.replace(
        given, max_rows=setting.max_rows, delay_ms=setting.delay_s * 1e3, policy=setting.policy, pad=setting.pad,
        workers=setting.workers, threads=setting.threads, limit_ms=limit_s * 1e3,
        curve=CurveTable(curve.rows, curve.seconds, machine),
    )  # fmt: skip


def tuned(found: Found, package: Package) -> ServeSettings:
    """The best point as settings for its package. Only where there is a best point."""
    assert found.best is not None
    setting = found.best.setting
    costs = found.branches[setting.branch].costs
    return serve_settings(package.settings, setting, costs, found.limit_s, host_id())


def as_json(found: Found, **more: Any) -> dict[str, Any]:
    """The search as plain data without NaN or infinity, with `more` facts about it."""
    from fettle.serve.outcome import plain

    return plain(found) | more
