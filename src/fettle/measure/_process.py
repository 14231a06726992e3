"""The parent's side of a worker: what `fettle.procs` does, asked by name and answered in plain data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fettle.procs.child import ChildError as WorkerError
from fettle.procs.nodes import Nodes
from fettle.procs.ranks import Ranks

__all__ = ["Worker", "WorkerError", "close_all"]


class Worker(Ranks):
    """One worker, alive from construction to `close`, as one process or as several `ranks`. Use as a context manager.

    `module` is what it runs. `environment` is added to ours.
    """

    def __init__(
        self, environment: Mapping[str, str] | None = None, log: Path | None = None, *,
        module: str = "fettle.measure._worker", ranks: int = 1, nodes: Nodes | None = None,
    ) -> None:  # fmt: skip
        super().__init__(module, ranks, nodes=nodes, variables=environment, log=log)
        _LIVE.add(self)

    def ask(self, do: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
        """Send a request and wait for its answer. Raises `WorkerError`, or `UsageError` for the user's own mistake.

        A worker that fails in any way but an ordinary exception is gone afterwards.
        """
        self.begin(do, **fields)
        return self.finish(do, timeout_s)

    def begin(self, do: str, **fields: Any) -> None:
        """Send a request without waiting: `finish` has its answer. So two workers can work side by side."""
        self.send({"do": do, **fields})

    def finish(self, do: str, timeout_s: float) -> dict[str, Any]:
        """The answer to the request that was begun; raises what `ask` raises."""
        return _merged(self.gather(dict[str, Any], timeout_s))

    def close(self) -> None:
        """Kill the worker with all its children. Safe to call again."""
        _LIVE.discard(self)
        super().close()


def _merged(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """One answer for all ranks: rank 0's, with the fullest rank's memory and the slowest one's start."""
    first = dict(answers[0])
    if len({answer.get("fingerprint") for answer in answers}) > 1:
        raise WorkerError("the ranks built different weights or inputs: seed every generator")
    for key in ("peak_bytes", "load_s", "optimize_s", "first_call_s", "call_ns", "waits"):
        values = [answer[key] for answer in answers if answer.get(key) is not None]
        if values:
            first[key] = max(values)
    if "cpu_s" in first:
        first["cpu_s"] = sum(answer["cpu_s"] for answer in answers)
    if "notes" in first:
        first["notes"] = list(dict.fromkeys(note for answer in answers for note in answer["notes"]))
    return first


_LIVE: set[Worker] = set()


def close_all() -> None:
    """Kill every worker that is still alive: for an interrupt that comes from anywhere."""
    for worker in list(_LIVE):
        worker.close()
