"""How the ranks of one child find each other: what torchrun's engine needs to know, on each node."""

from __future__ import annotations

import contextlib
import os
import socket

import msgspec

from fettle.procs.limits import usable_cores

LAUNCHER = "fettle.procs.launcher"
"""The module that starts a node's ranks."""
VARIABLE = "FETTLE_RANKS"
"""What holds the `Rendezvous` in the environment of a child's ranks."""


class Rendezvous(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the ranks of one child find each other, and their requests."""

    run_id: str
    module: str
    """The module that each runs."""
    each: int
    """Ranks of a node."""
    host: str
    """Address of the first node."""
    store_port: int
    """Where torchrun's engine meets."""
    port: int
    """Where requests come from."""
    secret: str
    """What a rank must know to be sent any."""
    nodes: int = 1
    node: int = 0
    """The node of this process."""

    @property
    def count(self) -> int:
        """All ranks."""
        return self.each * self.nodes


def variables_of(rendezvous: Rendezvous) -> dict[str, str]:
    """What the environment of the process that starts a node's ranks must hold."""
    threads = max(1, usable_cores() // rendezvous.each)  # torchrun's own choice would be one each
    return {VARIABLE: msgspec.json.encode(rendezvous).decode(), "OMP_NUM_THREADS": str(threads)}


def free_ports(host: str, count: int) -> list[int]:
    """Different ports that are free at this moment."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def from_environment() -> Rendezvous:
    """The rendezvous that this process was started for."""
    return msgspec.json.decode(os.environ[VARIABLE], type=Rendezvous)
