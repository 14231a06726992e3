"""The parent's side of a worker: a child of `fettle.procs` that is asked what `messages` lists."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from fettle.errors import UsageError
from fettle.measure.messages import Answer, Asked, Build, Built
from fettle.procs.child import ChildError as WorkerError
from fettle.procs.forks import ForkServer, Imports
from fettle.procs.interpreter import WORKER
from fettle.procs.nodes import Nodes
from fettle.procs.ranks import Ranks
from fettle.workload import Target

__all__ = ["Worker", "WorkerError", "close_all", "close_each"]

A = TypeVar("A", bound=Answer)


class Worker(Ranks):
    """One worker, alive from construction to `close`, as one process or as several `ranks`. Use as a context manager.

    It runs by `python`, by default ours. `environment` is added to ours. It is one of `forks` where these serve it.
    """

    def __init__(
        self, environment: Mapping[str, str] | None = None, log: Path | None = None, *,
        ranks: int = 1, nodes: Nodes | None = None, python: str = "", forks: ForkServer | None = None,
    ) -> None:  # fmt: skip
        super().__init__(WORKER, ranks, nodes=nodes, variables=environment, log=log, python=python, forks=forks)
        self.fingerprint = ""
        """Fingerprint of the workload that it has built, once it has."""
        self.name = ""
        """What that workload calls itself."""
        _OWN.workers.add(self)

    def ask(self, request: Asked, answer: type[A], timeout_s: float) -> A:
        """Send a request and wait for its answer. Raises `WorkerError`, or `UsageError` for the user's own mistake.

        A worker that fails in any way but an ordinary exception is gone afterwards.
        """
        self.send(request)
        return self.finish(answer, timeout_s)

    def build(self, target: Target, timeout_s: float = 600.0) -> Built:
        """Build the workload of a target. Raises `UsageError` where that cannot be done, the worker gone."""
        try:
            return self.ask(Build(target), Built, timeout_s)
        except BaseException as error:
            self.close()
            if isinstance(error, WorkerError):
                raise UsageError(f"the workload could not be built: {error}") from error
            raise

    def finish(self, answer: type[A], timeout_s: float) -> A:
        """The answer to the request that was sent; raises what `ask` raises. So two workers can work side by side."""
        first, *others = self.gather(answer, timeout_s)
        return first.with_ranks(others) if others else first

    def close(self) -> None:
        """Kill the worker with all its children. Safe to call again."""
        _OWN.workers.discard(self)
        super().close()


class _Own(threading.local):
    """What one thread has started: another's call of fettle may go on when its own ends."""

    def __init__(self) -> None:
        self.workers = set[Worker]()
        self.servers = list[ForkServer]()


_OWN = _Own()


def fork_server(environment: Mapping[str, str], imports: Imports) -> ForkServer:
    """Workers with this environment beside ours as forks that have the `imports` of one which started by itself."""
    forks = ForkServer([WORKER, "fettle.measure._inference", "fettle.measure._training"], environment, imports)
    _OWN.servers.append(forks)
    return forks


def close_each(workers: Iterable[Worker]) -> None:
    """Kill several workers, all before the first is waited for: a GPU takes its time to let go of a process."""
    ended = list(workers)
    for worker in ended:
        worker.kill()
    for worker in ended:
        worker.close()


def close_all() -> None:
    """Kill every worker of this thread's that is still alive, and what they are forked from: for an interrupt that
    comes from anywhere."""
    close_each(_OWN.workers)
    while _OWN.servers:
        _OWN.servers.pop().close()
