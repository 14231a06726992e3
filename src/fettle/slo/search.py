"""The best setting under a latency limit: calibrate, simulate every setting, prove the best by open-loop load.

Hundreds of settings cost milliseconds each in simulation; only two or three are put to a real server. Where the real
capacity differs from the predicted one, the constants are corrected, everything is ranked anew, and what comes out on
top is tested again. What fails on the way (a recipe, a batch size, a number of workers) is kept with its reason.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fettle.files import plain
from fettle.journal import Journal
from fettle.load.arrivals import poisson
from fettle.measure import Load, Surroundings
from fettle.package.manifest import Package
from fettle.procs.limits import granted_memory_bytes
from fettle.slo.calibrate import Calibration, calibrate
from fettle.slo.kept import open_journal, package_key
from fettle.slo.outcome import explain, front, how_much_slower
from fettle.slo.overheads import Overheads, measure_overheads
from fettle.slo.points import Branch, Failure, Measured, Point, SearchResult, Setting, Variant
from fettle.slo.proof import load_test_s, prove, sample_requests, serve_settings, watched
from fettle.slo.ranking import Known, between, rank, worker_splits
from fettle.slo.server_process import ServerFailure, ServerProcess
from fettle.slo.simulate import capacity, simulate
from fettle.slo.stopping import Stopped
from fettle.units import count_text, rate_text

HEADROOM = 0.2
"""Share of the capacity to leave free: suggested where no other was asked for."""
OFF = 1.15
"""A prediction that is off by more than this factor is corrected."""
BEHIND = 0.95
"""A setting that is expected to serve less than this share of what another has shown is not tested: load tests show no
smaller steps apart."""
CALIBRATION_S = 10.0
"""Calibration of one branch, about."""
TESTS = 3.2
"""Load tests of a setting, on average."""
HOPELESS = 0.5
"""A recipe with no smaller error that serves less than this share of another's is not tried with other workers."""
OnProgress = Callable[[str], None]


async def search(
    packages: Package | Sequence[Variant], limit_s: float, *, rate: float = 0.0, headroom: float = 0.0,
    most_rows: int = 32, cores: int = 2, devices: Sequence[str] = ("cpu",), seconds: float = 8.0, confirm: int = 3,
    prices: Mapping[str, float] | None = None, keep: Path | Journal | None = None, failures: Iterable[Failure] = (),
    on_progress: OnProgress = lambda text: None, stop: asyncio.Event | None = None, trust: Sequence[str] = (),
) -> SearchResult:  # fmt: skip
    """Find the setting with the greatest capacity under the limit; `seconds` is the length of one load test.

    `prices` are of an hour, by device (``""``: any). `keep` is a file in which everything measured is kept, so that a
    search that was killed measures nothing twice, or its journal, which is closed at the end; `stop` ends it early,
    with what is known by then. `trust`: digests of handlers that may run.
    """
    began = time.monotonic()
    variants = [Variant("", packages)] if isinstance(packages, Package) else list(packages)
    result = SearchResult(limit_s, rate=rate, headroom=headroom, failures=list(failures))
    by_name = {variant.name: variant for variant in variants}
    journal = keep if isinstance(keep, Journal) else open_journal(keep)
    work = _Search(result, by_name, journal, on_progress, stop or asyncio.Event(), seconds, most_rows, cores,
                   trust)  # fmt: skip
    try:
        await work.calibrate(variants, devices)
        if work.possible():
            await work.settle_overheads()
            await work.refine_workers()
            await work.confirm(confirm)
    except Stopped:
        result.interrupted = True
    finally:
        journal.close()
    work.finish(prices or {})
    result.seconds = time.monotonic() - began
    return result


class _Search:
    """A search under way: what `search` calls, in the order in which it does."""

    def __init__(
        self, result: SearchResult, variants: Mapping[str, Variant], journal: Journal, on_progress: OnProgress,
        stop: asyncio.Event, seconds: float, most_rows: int, cores: int, trust: Sequence[str],
    ) -> None:  # fmt: skip
        self.result, self.variants, self.journal, self.stop = result, variants, journal, stop
        self.seconds, self.most_rows, self.cores, self.trust = seconds, most_rows, cores, trust
        self._on_progress, self._until = on_progress, 0.0
        """When the part that is under way is done, about, of `time.monotonic`."""
        self._tested: set[Setting] = set()
        self._tried: set[Branch] = set()
        self._simulated: Known = {}
        self._lender: Measured | None = None
        """The branch that lends what serving adds to those with which it was not measured."""
        self._around = Surroundings(stopped=stop.is_set)

    # -- costs -------------------------------------------------------------------------------------------------------

    async def calibrate(self, variants: Sequence[Variant], devices: Sequence[str]) -> None:
        """Cost curves of every variant and device with all cores in one worker, then divided where there is hope."""
        all_s = CALIBRATION_S * len(variants) * sum(len(worker_splits(self.cores, device)) for device in devices)
        self._until = time.monotonic() + all_s
        for device in devices:
            for variant in variants:
                await self._calibrate(Branch(*worker_splits(self.cores, device)[0], device, variant.name))
        hopeless = self._hopeless()
        for device in devices:
            for workers, threads in worker_splits(self.cores, device)[1:]:
                for variant in variants:
                    if variant.name not in hopeless:
                        await self._calibrate(Branch(workers, threads, device, variant.name))

    async def _calibrate(self, branch: Branch) -> None:
        self._check()
        if branch in self._tried:
            return
        self._tried.add(branch)
        package = self.variants[branch.variant].package
        most = min(self.most_rows, package.manifest.max_rows) if package.manifest.shares_calls else 1
        where = f"{branch.device} {branch.workers}x{branch.threads}"
        key = f"calibration {package_key(package)} {where} {most} {self.result.limit_s:g}"
        calibration = self.journal.answer(key, Calibration)
        if calibration is None:
            if why := self._lacks_memory(branch):
                calibration = Calibration({}, {0: why})
            else:
                calibration = await asyncio.to_thread(
                    calibrate, package, most=most, workers=branch.workers, threads=branch.threads,
                    device=branch.device, limit_s=self.result.limit_s, on_progress=self.progress, around=self._around,
                )  # fmt: skip
            if calibration.samples:  # memory may be free the next time
                self.journal.put(key, calibration)
        else:
            self._until -= CALIBRATION_S
        for rows, why in calibration.failures.items():
            at = f" at {count_text(rows, 'row')}" if rows else ", loading"
            self.result.failures.append(Failure(f"{branch}{at}", why))
        if calibration.samples:
            self.result.loads.append(calibration.load)
            self.result.branches[branch] = Measured(branch, calibration, package.settings, most, lender=self._lender)

    def _lacks_memory(self, branch: Branch) -> str:
        """Why so many workers would not fit beside each other, by what one was seen to need; empty where they would."""
        one = next((m for b, m in self.result.branches.items()
                    if b.workers == 1 and (b.device, b.variant) == (branch.device, branch.variant)), None)  # fmt: skip
        if one is None or branch.device != "cpu":
            return ""
        need, there = branch.workers * one.calibration.memory_at(self.most_rows), granted_memory_bytes()
        return f"needs about {need >> 20} MiB of memory; {there >> 20} MiB are free" if need > 0.9 * there else ""

    def _hopeless(self) -> set[str]:
        """Variants that the first calibrations show to be far behind one that answers as exactly."""
        best: dict[str, float] = {}
        for measured in self.result.branches.values():
            points = rank([measured], self.result.limit_s, known=self._simulated)
            name, top = measured.branch.variant, max(point.predicted for point in points)
            best[name] = max(top, best.get(name, 0.0))
        left = set()
        for name, top in best.items():
            for other, more in best.items():
                if top < HOPELESS * more and not self.variants[other].error > self.variants[name].error:
                    left.add(name)
                    why = f"serves {top / more:.2f}x of {other or 'the other'}, which answers as exactly"
                    self.result.failures.append(Failure(f"{name}: other numbers of workers were left out", why))
                    break
        return left

    def possible(self) -> bool:
        """Whether one row alone can be served within the limit at all; says by how much it cannot."""
        result = self.result
        if not result.branches:
            result.why.append("nothing could be measured: see the failures")
            return False
        single = min(measured.single_s for measured in result.branches.values())
        if single > result.limit_s:
            ratio = single / result.limit_s
            result.why.append(f"one row alone takes {single * 1e3:.1f} ms: the limit is missed by {ratio:.2f}x")
        return single <= result.limit_s

    async def settle_overheads(self) -> None:
        """What serving adds: measured with the branch that is best so far, lent to the others, until that is stable.

        At most three branches are measured: those that come out on top.
        """
        for _ in range(3):
            points = self._rank()
            if not points or not points[0].predicted:
                return
            top = self.result.branches[points[0].setting.branch]
            if top.overheads is not None:
                return
            top.overheads = await self._overheads(points[0].setting)
            if top.overheads is None:  # it cannot be served
                del self.result.branches[top.branch]
                self._rank()
                continue
            self._lender = top
            for other in self.result.branches.values():
                other.lender = top

    async def _overheads(self, setting: Setting) -> Overheads | None:
        self._check()
        package = self.variants[setting.variant].package
        branch, rows = setting.branch, setting.max_rows
        key = f"overheads {package_key(package)} {branch.device} {branch.workers}x{branch.threads} {rows}"
        overheads = self.journal.answer(key, Overheads)
        if overheads is None:
            self.progress(f"what serving adds, with {branch}")
            curve = self.result.branches[branch].costs.curve
            at_once = replace(setting, delay_s=0.0)
            settings = serve_settings(package.settings, at_once, self.result.branches[branch].costs, 0.0)
            try:
                served = await ServerProcess.start(package, settings, self.trust, self.stop.is_set)
                try:
                    requests = sample_requests(package, served.url)
                    overheads, load = await watched(self._around, lambda: measure_overheads(
                        served, requests, curve, workers=branch.workers, max_rows=rows, stop=self.stop
                    ))  # fmt: skip
                finally:
                    await served.close()
            except ServerFailure as failure:
                self.result.failures.append(Failure(f"a server with {branch}", str(failure)))
                return None
            self.journal.put(f"load, {key}", plain(load))
            self.journal.put(key, overheads)
        self.result.loads.append(Load.from_json(self.journal.answer(f"load, {key}", dict[str, Any]) or {}))
        return overheads

    async def refine_workers(self) -> None:
        """Numbers of workers between the best one and its neighbours."""
        points = self._rank()
        if not points or not points[0].predicted:
            return
        best = points[0].setting
        known = sorted(
            {b.workers for b in self.result.branches if (b.device, b.variant) == (best.device, best.variant)}
        )
        wanted = between(best.workers, known)
        for workers in wanted:
            await self._calibrate(Branch(workers, max(1, self.cores // workers), best.device, best.variant))
        if wanted:
            await self.settle_overheads()

    # -- proof -------------------------------------------------------------------------------------------------------

    async def confirm(self, count: int) -> None:
        """Put the best settings to a real server; where the prediction was off, correct it, rank anew, test again."""
        result = self.result
        for attempt in range(2):
            todo = self._next(count)
            for number, point in enumerate(todo):
                self._until = time.monotonic() + sum(
                    TESTS * load_test_s(p.predicted, self.seconds) for p in todo[number:]
                )
                # Testing a point that is expected to be far behind what another has shown would be a waste.
                shown = max((point.measured or 0.0 for point in result.points), default=0.0)
                if (self._expected(point) or math.inf) >= BEHIND * shown:
                    await self._prove(point, shown)
            # Where no test kept the limit, capacity is below the lowest rate: the prediction was off by at least that.
            off = {
                p.setting.branch: p.predicted / (p.measured or p.lowest)
                for p in todo
                if p.measured or (p.tests and p.measured is not None)
            }
            if attempt or not off or max(abs(math.log(ratio)) for ratio in off.values()) < math.log(OFF):
                break
            # The prediction was off: scale the costs of the branch by its factor, of the others by the mean one.
            mean = math.exp(sum(math.log(ratio) for ratio in off.values()) / len(off))
            slower = how_much_slower(todo)
            result.why.append(f"predictions were {mean:.2f}x what was measured{f', and {slower}' if slower else ''}: "
                              "costs corrected, ranked again")  # fmt: skip
            for branch, measured in result.branches.items():
                measured.scale *= off.get(branch, mean)
            self._rank()

    def _next(self, count: int) -> list[Point]:
        """The best points that were not tested; those that differ in their delay only are as good as one."""
        chosen: list[Point] = []
        alike_tested = {replace(setting, delay_s=0.0) for setting in self._tested}
        for point in self.result.points:
            alike = replace(point.setting, delay_s=0.0)
            if point.predicted > 0 and alike not in alike_tested and len(chosen) < count:
                chosen.append(point)
                alike_tested.add(alike)
        return chosen

    def _expected(self, point: Point) -> float | None:
        """The capacity that load tests of the same branch let expect; None where there were none."""
        branch = point.setting.branch
        like = [p.measured / p.predicted for p in self.result.points
                if p.measured and p.predicted and p.setting.branch == branch]  # fmt: skip
        # Once those tests have corrected the costs, the prediction itself is what they let expect.
        factor = statistics.mean(like or [1.0]) if self.result.branches[branch].scale == 1.0 else 1.0
        return point.predicted * factor if like else None

    async def _prove(self, point: Point, to_beat: float) -> None:
        self._tested.add(point.setting)
        self.progress(f"load tests of {point.setting}, predicted {rate_text(point.predicted)} requests/s")
        package = self.variants[point.setting.variant].package
        costs, expected = self.result.branches[point.setting.branch].costs, self._expected(point)
        try:
            await prove(package, point, costs, self.result, self.seconds, self.journal, self.progress, self.stop,
                        expected, to_beat, self.trust, self._around)  # fmt: skip
        except ServerFailure as failure:
            self.result.failures.append(Failure(str(point.setting), str(failure)))

    # -- result ------------------------------------------------------------------------------------------------------

    def finish(self, prices: Mapping[str, float]) -> None:
        """Rank what is known, compare it in all respects, and say why the best is the best."""
        result = self.result
        if result.branches and not any(why.startswith("one row alone") for why in result.why):
            points = self._rank()
            best = result.best.capacity if result.best else points[0].predicted if points else 0.0
            result.reference_rate = result.rate or (1 - HEADROOM) * best
            for point in points:
                self._complete(point, prices)
            for point in front(points):
                point.front = True
            result.why += explain(result)
        if result.best is not None and not result.met:
            best = (1 - result.headroom) * result.best.capacity
            room = f" with {result.headroom:.0%} headroom" if result.headroom else ""
            result.why.append(f"{rate_text(result.rate)} requests/s are asked for; the best setting keeps the limit "
                              f"up to {rate_text(best)}{room}")  # fmt: skip

    def _complete(self, point: Point, prices: Mapping[str, float]) -> None:
        result, setting = self.result, point.setting
        point.error = self.variants[setting.variant].error
        seen = [test.inside.memory_bytes for test in point.tests if test.inside.memory_bytes]
        calibrated = result.branches[setting.branch].calibration.memory_at(setting.max_rows)
        # What a server's workers hold of the host's memory says nothing of another device's.
        point.memory_bytes = seen[-1] if seen and setting.device == "cpu" else calibrated
        price = prices.get(setting.device, prices.get(setting.device.partition(":")[0], prices.get("")))
        if price is not None and point.capacity:
            point.cost = price / 3600 / point.capacity * 1e6
        if result.reference_rate and point.predicted >= 0.5 * result.reference_rate:
            costs = result.branches[setting.branch].costs
            outcome = simulate(poisson(1.0, 4000, 1)[:3000] / result.reference_rate, setting.batching(), costs)
            point.p99_s = outcome.percentile(99)

    def _rank(self) -> list[Point]:
        """All settings, simulated with what is known now; points that were measured stay as they are."""
        old = {point.setting: point for point in self.result.points if point.measured is not None or point.tests}
        fresh = rank(self.result.branches.values(), self.result.limit_s, self.progress, self._simulated)
        for point in old.values():
            measured = self.result.branches.get(point.setting.branch)
            if measured is not None and measured.scale != 1.0:
                point.simulated, _ = capacity(point.setting.batching(), measured.costs, self.result.limit_s)
        points = [old.pop(point.setting, point) for point in fresh] + list(old.values())
        points.sort(key=lambda point: point.order)
        self.result.points = points
        return points

    def progress(self, text: str) -> None:
        """What is done now, and about how long all of it still takes."""
        left_s = self._until - time.monotonic()
        self._on_progress(f"{text} · about {left_s:.0f} s left" if left_s >= 1 else text)

    def _check(self) -> None:
        if self.stop.is_set():
            raise Stopped
