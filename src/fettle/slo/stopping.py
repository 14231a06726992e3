"""A search that is to stop: nobody waits for what it was measuring."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fettle.procs.child import Child


class Stopped(Exception):
    """Whoever asked for the measurement wants it no more."""


class Stoppable(Child):
    """A child whose answer is awaited until the search is `stopped`, and then no longer: `Stopped` is raised."""

    def __init__(self, module: str, variables: Mapping[str, str], stopped: Callable[[], bool]) -> None:
        super().__init__(module, variables=variables)
        self._stopped = stopped

    def _look_around(self) -> None:
        super()._look_around()
        if self._stopped():
            raise Stopped
