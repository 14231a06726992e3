"""The process that a workload is examined in."""

from __future__ import annotations

from fettle.errors import UsageError
from fettle.measure import Worker, WorkerError, messages
from fettle.workload import Target


class Examiner:
    """Runs collectors on a workload in a worker process; where a collector ended the process, the next gets a new one.

    Use as a context manager.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._worker: Worker | None = None

    def __enter__(self) -> Examiner:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def examine(self, collector: str, seconds: float, path: str = "", timeout_s: float = 300.0) -> messages.Examined:
        """What ``module:function`` of this room finds.

        Raises `WorkerError` where it fails, `UsageError` where the workload cannot be built.
        """
        if self._worker is None:
            self._worker = Worker()
            try:
                self._worker.ask(messages.Build(self._target), messages.Built, 600.0)
            except WorkerError as error:
                self._leave()
                raise UsageError(f"the workload could not be built: {error}") from error
        try:
            return self._worker.ask(
                messages.Examine(f"fettle.diagnose.{collector}", seconds, path), messages.Examined, timeout_s
            )
        except WorkerError as error:
            if error.kind != "error":  # anything but an exception, and the process is gone
                self._leave()
            raise

    def _leave(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
