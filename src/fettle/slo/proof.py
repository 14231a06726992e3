"""Proof by load: open-loop tests of one setting on a real server, around the capacity that was predicted for it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np

from fettle.errors import UsageError
from fettle.files import plain
from fettle.journal import Journal
from fettle.load.arrivals import poisson
from fettle.load.client import Request, tensor_request
from fettle.load.loops import open_loop
from fettle.load.run import Run, as_data
from fettle.measure import Load, Surroundings
from fettle.package.host import host_id
from fettle.package.manifest import Package
from fettle.package.settings import CostCurve, ServeSettings
from fettle.slo.kept import Tested, package_key
from fettle.slo.points import Outcome, Point, Proven, SearchResult, Setting
from fettle.slo.server_process import ServerFailure, ServerProcess, ServerStats
from fettle.slo.simulate import Costs, simulate
from fettle.slo.stopping import Stopped
from fettle.units import rate_text

T = TypeVar("T")
LATE = "the load generator was late itself in tests that failed: what was measured is a lower bound"
"""A late generator makes latencies longer, never shorter: what passes has passed."""
STEPS_DOWN = (0.85, 0.7, 0.5)
"""Factors on the rate after the first, second and third load test that did not keep the limit."""
STEPS_UP = (1.1, 1.3, 1.6)
"""Those after the first, second and third where all have kept it: costs that were measured on a busy machine let expect
far too little."""
NEAR = 1.045
"""The first step, either way, from a rate that tests of a like setting let expect: two tests are enough then."""
REQUESTS, LONGEST_S = 1000, 60.0
"""A load test has so many requests at least, or takes so long."""


def load_test_s(rate: float, seconds: float, requests: int = REQUESTS) -> float:
    """Seconds of a load test at a rate: `seconds` at least, and as long as a 99th percentile needs."""
    return min(LONGEST_S, max(seconds, requests / rate))


async def bracket(
    point: Proven, result: Outcome[Any], journal: Journal, expected: float, to_beat: float, *, near: bool,
    key: Callable[[float], str], start: Callable[[], Awaitable[ServerProcess]],
    test: Callable[[ServerProcess, float], Coroutine[Any, Any, Tested]], on_test: Callable[[float], None],
    around: Surroundings,
) -> None:  # fmt: skip
    """Find the greatest rate at which a point keeps the limits in at most four tests, 0 if in none.

    Up from `expected` while it holds, down while it does not, then between; none below `to_beat`. With `near` the first
    step is a small one. What the journal has under the `key` of a rate is not tested again; `on_test` hears of each
    other rate before its test, and the server is started for the first of them. A test that others disturbed is made
    again once they are gone, as far as `around` waits for that.
    """
    good, bad, rate, missed = 0.0, math.inf, max(expected, to_beat), 0
    up, down = ((NEAR,), (1 / NEAR, *STEPS_DOWN)) if near else (STEPS_UP, STEPS_DOWN)
    served: ServerProcess | None = None
    try:
        for number in range(4):
            known = journal.answer(key(rate), Tested)
            if known is None:
                on_test(rate)
                served = served or await start()
                tested, load = await watched(around, partial(test, served, rate))
                tested.run |= {"is_quiet": load.is_quiet, "load": plain(load)}
                journal.put(key(rate), tested)
            else:
                tested = known
                result.tests_kept += 1
            result.tests += 1
            result.loads.append(Load.from_json(tested.run.get("load", {})))
            point.tests.append(tested)
            if tested.held:
                good = max(good, rate)
            else:
                bad, missed = min(bad, rate), missed + 1
                if tested.run["void"] and LATE not in result.why:
                    result.why.append(LATE)
            if bad <= to_beat or (good and bad / good < 1.05):
                break
            if good:
                rate = math.sqrt(good * bad) if bad < math.inf else rate * up[min(number, len(up) - 1)]
            else:
                rate = max(rate * down[min(missed, len(down)) - 1], to_beat)
        point.measured = good
    finally:
        if served is not None:
            await served.close()


async def watched(around: Surroundings, measure: Callable[[], Coroutine[Any, Any, T]]) -> tuple[T, Load]:
    """`Surroundings.watched` of what runs in this event loop, which goes on meanwhile."""
    loop = asyncio.get_running_loop()
    return await asyncio.to_thread(around.watched, lambda: asyncio.run_coroutine_threadsafe(measure(), loop).result())


async def loaded(served: ServerProcess, requests: list[Request], due: np.ndarray[Any, Any], **options: Any) -> Run:
    """One open-loop run. Raises `ServerFailure` where nothing answers any more, and `Stopped`."""
    await served.stats()
    try:
        run = await open_loop(requests, due, **options)
    except UsageError as error:
        raise ServerFailure(str(error)) from error
    if run.interrupted:
        raise Stopped
    return run


async def prove(
    package: Package, point: Point, costs: Costs, result: SearchResult, seconds: float, journal: Journal | None = None,
    on_progress: Callable[[str], None] = lambda text: None, stop: asyncio.Event | None = None,
    expected: float | None = None, to_beat: float = 0.0, trust: Sequence[str] = (),
    around: Surroundings | None = None,
) -> None:  # fmt: skip
    """Open-loop load tests around the predicted capacity, as `bracket` has them.

    They begin at `expected`, a rate that tests of a similar setting let expect, but not below `to_beat`, which another
    setting has shown; where this one does not keep that rate they end, however much worse it is. Raises
    `ServerFailure` where the server fails, and `Stopped`.
    """
    setting, limit_s = point.setting, result.limit_s
    settings = serve_settings(package.settings, setting, costs, limit_s)
    watch = around or Surroundings(stopped=stop.is_set if stop is not None else lambda: False)

    def on_test(rate: float) -> None:
        if stop is not None and stop.is_set():
            raise Stopped
        on_progress(f"{rate_text(rate)} requests/s on {setting}")

    def key(rate: float) -> str:
        return f"test {package_key(package)} {setting} {rate:.6g}/s {load_test_s(rate, seconds):.6g}s {limit_s:g}s"

    await bracket(
        point, result, journal or Journal(), expected or point.predicted, to_beat, near=bool(expected), key=key,
        start=lambda: ServerProcess.start(package, settings, trust, watch.stopped), on_test=on_test, around=watch,
        test=lambda served, rate: _test(
            served, package, point, costs, rate, load_test_s(rate, seconds), limit_s, stop
        ),
    )  # fmt: skip


async def _test(
    served: ServerProcess, package: Package, point: Point, costs: Costs, rate: float, seconds: float, limit_s: float,
    stop: asyncio.Event | None,
) -> Tested:  # fmt: skip
    """One run; again where it failed while this client was too slow, which says little of the server."""
    requests = sample_requests(package, served.url)
    for seed in range(2):
        run = await loaded(served, requests, poisson(rate, seconds, seed), limit_s=limit_s, stop=stop)
        if not run.void or run.percentile(99) <= limit_s:
            break
    inside = await served.stats()
    expected = simulate(poisson(rate, seconds, seed), point.setting.batching(), costs)
    p99_s = expected.percentile(99)
    return Tested(
        rate, run.held, as_data(run), inside, p99_s * 1e3 if math.isfinite(p99_s) else None,
        _slower(inside, costs, expected.stretch),
    )  # fmt: skip


def _slower(inside: ServerStats, costs: Costs, stretch: float) -> float | None:
    """How much slower calls of the sizes that occurred were; None where there were none."""
    curve = costs.curve
    by_curve_s = sum(curve.at(size) * count for size, count in inside.sizes.items())
    return inside.model_ms.mean / 1e3 * inside.calls / by_curve_s / stretch if by_curve_s else None


def sample_requests(package: Package, url: str) -> list[Request]:
    """Requests of one row each, with the rows of the package's own sample."""
    from fettle.package.model_runner import as_array, load_samples

    specs = package.manifest.inputs
    samples = [as_array(tensor) for tensor in load_samples(package)]
    rows = min([8, *(len(sample) for sample, spec in zip(samples, specs, strict=True) if spec.batched)])
    requests = []
    for row in range(rows):
        tensors = [
            (spec.name, spec.datatype, sample[row : row + 1] if spec.batched else sample)
            for sample, spec in zip(samples, specs, strict=True)
        ]
        requests.append(tensor_request(f"{url}/v2/models/{package.manifest.name}/infer", tensors, {}))
    return requests


def serve_settings(settings: ServeSettings, setting: Setting, costs: Costs, limit_s: float) -> ServeSettings:
    """A package's settings with those of the search and the curve they rest on, which is of this machine."""
    curve = costs.curve
    return msgspec.structs.replace(
        settings, max_rows=setting.max_rows, delay_ms=setting.delay_s * 1e3, workers=setting.workers,
        threads=setting.threads, devices=(setting.device,), limit_ms=limit_s * 1e3,
        curve=CostCurve(curve.rows, curve.seconds, host_id()),
    )  # fmt: skip


def tuned(result: SearchResult, package: Package) -> ServeSettings:
    """The best point as settings for its package. Only where there is a best point."""
    assert result.best is not None
    setting = result.best.setting
    costs = result.branches[setting.branch].costs
    return serve_settings(package.settings, setting, costs, result.limit_s)
