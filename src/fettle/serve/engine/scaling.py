"""Another number of workers while requests come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fettle.package.settings import ServeSettings
from fettle.serve.engine.worker import Worker
from fettle.serve.engine.worker_start import threads_each

if TYPE_CHECKING:
    from fettle.serve.engine.pool import Pool


async def scale(pool: Pool, settings: ServeSettings, cores: Sequence[Sequence[int]], machine: str) -> None:
    """Give a pool the workers that `settings` ask for, each on its `cores`, without a failed request.

    New ones take part once all of them are warm. Those that are too many, or whose threads and cores are others now,
    end after the batch that they have. Raises `Rejected` (503) where a new one cannot be started; then nothing has
    changed.
    """
    threads = threads_each(settings.threads, settings.workers)
    staying = {worker.index: worker for worker in pool.workers if not worker.leaving}
    kept, pool.joining = [], []
    for index in range(settings.workers):
        old, mine = staying.get(index), list(cores[index]) if cores else []
        if old is not None and old.threads == threads and (not cores or old.cores == mine):
            kept.append(old)
        else:
            pool.joining.append(Worker(pool, index, threads, mine))
    try:
        await pool.start_all(pool.joining)
    except BaseException:
        for worker in pool.joining:
            worker.close()
        raise
    finally:
        joined, pool.joining = pool.joining, []
    left = [worker for worker in pool.workers if worker not in kept]
    pool.workers = sorted([*kept, *joined], key=lambda worker: worker.index) + left
    pool.change(settings, machine)
    for worker in left:
        worker.leave()
