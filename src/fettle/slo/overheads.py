"""What serving adds to the model's own time: one closed loop with one client, and one that keeps every worker busy.

With one client a request takes ``request_s + batch_s`` and the model's call. With more clients than the workers can
take, a worker makes a call every ``batch_s`` and the model's call seconds. The server says how long those calls took.
Under load they take longer than the calibration said where server and client need the cores that the model computes
on: for each request that comes meanwhile, ``held_s``. So two short runs on the real server give the three constants.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from fettle.load.client import Request
from fettle.load.loops import closed_loop
from fettle.package.settings import CostCurve
from fettle.slo.server_process import ServerFailure, ServerProcess
from fettle.slo.stopping import Stopped

RUN_S = 1.5
"""Each of the two runs lasts this long at least, and 30 calls of the model."""


class Overheads(msgspec.Struct, frozen=True):
    """The constants of `fettle.slo.simulate.Costs`. Seconds."""

    request_s: float
    batch_s: float
    held_s: float = 0.0
    """How much longer a request that comes during a call of the model makes that call."""


async def measure_overheads(
    served: ServerProcess, requests: Sequence[Request], curve: CostCurve, *, workers: int, max_rows: int,
    stop: asyncio.Event | None = None,
) -> Overheads:  # fmt: skip
    """Two closed loops. Raises `ServerFailure` where requests fail, and `Stopped`.

    Where the server is quicker than the calibration said, as far as that was noise, a constant is 0: never less.
    """
    alone = await closed_loop(requests, 1, max(RUN_S, 30 * curve.at(1)), stop=stop)
    single = await served.stats()
    clients = min(256, 2 * max_rows * workers + workers)
    busy = await closed_loop(requests, clients, max(RUN_S, 30 * curve.at(max_rows) / workers), stop=stop)
    stats = await served.stats()
    for run in (alone, busy):
        if run.interrupted:
            raise Stopped
        if not run.answered or run.failed:
            raise ServerFailure(f"{run.failed} of {sum(run.statuses.values())} requests failed: {run.statuses}")
    rows = sum(size * count for size, count in stats.rows.items()) / max(stats.calls, 1)
    computing = sum(curve.at(size) * count for size, count in stats.sizes.items()) / max(stats.calls, 1)
    each, model_s = workers * rows / busy.throughput, stats.model_ms.mean / 1e3
    batch_s = max(0.0, each - model_s)
    request_s = max(0.0, alone.percentile(50) - single.model_ms.p50 / 1e3 - batch_s)
    # As many requests come during a call as all workers answer in that time.
    held_s = max(0.0, (model_s - computing) / (workers * rows))
    return Overheads(request_s, batch_s, held_s)
