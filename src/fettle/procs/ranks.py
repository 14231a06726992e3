"""A child of several ranks that answer as one; they may run on several nodes."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fettle.errors import UsageError
from fettle.procs.child import TICK_S, Child, T
from fettle.procs.nodes import Nodes
from fettle.procs.rendezvous import LAUNCHER, Rendezvous, free_ports, variables_of

if TYPE_CHECKING:
    from fettle.procs.forks import ForkServer

_WORD_S = 10.0
"""How long to wait for the other ranks to fail when a node leaves; where its own had not joined yet, none would."""


class Ranks(Child):
    """`count` processes that run ``main(parent)`` of `module`; one runs the module itself, as a plain child.

    Of `nodes` each has an equal share of them. Raises `UsageError` where a node has left.
    """

    def __init__(
        self, module: str, count: int = 1, *, nodes: Nodes | None = None, variables: Mapping[str, str] | None = None,
        log: Path | None = None, python: str = "", forks: ForkServer | None = None,
    ) -> None:  # fmt: skip
        self._nodes = nodes if count > 1 else None
        self._rendezvous = _rendezvous(module, count, self._nodes) if count > 1 else None
        self._missing_s = 0.0
        ours: dict[str, str] = {}
        if self._rendezvous is not None:
            ours, module = variables_of(self._rendezvous), LAUNCHER
            if self._nodes is not None:
                self._nodes.begin(self._rendezvous, variables or {})
        super().__init__(
            module, variables={**ours, **(variables or {})}, log=log, python=python, forks=forks if count == 1 else None
        )

    def gather(self, answer: type[T], timeout_s: float) -> list[T]:
        """The answers of all ranks to the request that was sent; raises what `receive` raises."""
        if self._rendezvous is None:
            return [self.receive(answer, timeout_s)]
        return self.receive(list[answer], timeout_s)  # type: ignore[valid-type]

    def close(self) -> None:
        """Kill the ranks of all nodes. Safe to call again."""
        if self._nodes is not None and self._rendezvous is not None and not self._closed:
            self._nodes.end(self._rendezvous)
        super().close()

    def _groups(self) -> set[int]:
        groups = super()._groups()
        if self._rendezvous is not None:  # torchrun's engine starts each rank in a session of its own
            for process in self.tree():
                with contextlib.suppress(OSError):
                    groups.add(os.getpgid(process.pid))
        return groups - {os.getpgid(0)}

    def _look_around(self) -> None:
        why = self._nodes.why_fewer() if self._nodes is not None else ""
        self._missing_s = self._missing_s + TICK_S if why else 0.0
        if self._missing_s > _WORD_S:
            self.close()
            raise UsageError(why)
        super()._look_around()


def _rendezvous(module: str, count: int, nodes: Nodes | None) -> Rendezvous:
    host, number = (nodes.host, nodes.count) if nodes is not None else ("127.0.0.1", 1)
    store_port, port = free_ports(host, 2)
    return Rendezvous(
        secrets.token_hex(8), module, count // number, host, store_port, port, secrets.token_hex(16), number
    )
