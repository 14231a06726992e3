"""Other machines that lend ranks to a study.

The study runs on one node (`fettle tune --nodes 2 --listen HOST:PORT`); on each of the others `fettle join HOST:PORT`
waits and starts its share of the ranks of each child, with torchrun's engine as on the first. All that passes between
the two commands is which child begins and which has ended. The ranks talk to each other as torchrun's ranks do, and
take their requests from the first node (`fettle.procs.launcher`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from typing import Any

import msgspec

from fettle.errors import UsageError, first_line
from fettle.procs.child import Child
from fettle.procs.listener import KeyedListener
from fettle.procs.rendezvous import LAUNCHER, Rendezvous, variables_of

KEY = "FETTLE_KEY"
"""The variable that holds what both sides must know."""
_LONGEST = 1 << 20
"""Bytes of a message."""
_PACKAGES = ("torch-fettle", "torch")
"""What must be alike on all nodes."""


class Welcome(msgspec.Struct):
    """The study to a node: which it is, or why it may not join."""

    error: str
    node: int
    nodes: int


class Begin(msgspec.Struct, tag=True):
    """The study to a node: start your share of a child's ranks."""

    share: Rendezvous
    variables: dict[str, str]


class End(msgspec.Struct, tag=True):
    """The study to a node: that child is over."""

    run_id: str


def address_of(text: str, option: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; `UsageError` for anything else, which names the option."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"{option} {text!r} is not an address: write HOST:PORT, such as 10.0.0.1:29400")
    return host, int(port)


class Nodes:
    """The study's side: this node, and those that joined it. Close it."""

    def __init__(self, count: int, host: str, port: int) -> None:
        self.count, self.host = count, host
        self.key = os.environ.get(KEY) or secrets.token_hex(16)
        self._listener = KeyedListener(host, port, self.key.encode())
        self.port = self._listener.address[1]
        self._others: list[Connection] = []

    def gather(self, on_progress: Callable[[str], None]) -> None:
        """Wait until all have joined. Those with another version of fettle or torch are refused, with the reason."""
        while len(self._others) < self.count - 1:
            left = self.count - 1 - len(self._others)
            on_progress(f"waiting for {left} more node{'s' if left > 1 else ''}: "
                 f"{KEY}={self.key} fettle join {self.host}:{self.port}")  # fmt: skip
            visitor = self._listener.accept(1.0)
            if visitor is None:
                continue
            with contextlib.suppress(EOFError, OSError, msgspec.DecodeError):
                wrong = _wrong_versions(_received(visitor, dict[str, str]))
                visitor.send_bytes(msgspec.json.encode(Welcome(wrong, len(self._others) + 1, self.count)))
                if not wrong:
                    self._others.append(visitor)
        self._listener.close()

    def why_fewer(self) -> str:
        """Which other node has left, as a sentence; empty where all are there."""
        # They send nothing: what can be read is their end.
        left = [node for node, other in enumerate(self._others, 2) if other.poll()]
        return f"node {left[0]} has left: start 'fettle join' there and this again, which goes on" if left else ""

    def begin(self, rendezvous: Rendezvous, variables: Mapping[str, str]) -> None:
        """Have the others start their ranks of a child. Raises `UsageError` where one has left."""
        if why := self.why_fewer():
            raise UsageError(why)
        for node, other in enumerate(self._others, 1):
            _send(other, Begin(msgspec.structs.replace(rendezvous, node=node), dict(variables)))

    def end(self, rendezvous: Rendezvous) -> None:
        """Have the others end their ranks of a child."""
        for other in self._others:
            _send(other, End(rendezvous.run_id))

    def close(self) -> None:
        """Let the other nodes go."""
        self._listener.close()
        for other in self._others:
            other.close()
        self._others.clear()


def join(host: str, port: int, on_progress: Callable[[str], None]) -> int:
    """Lend this machine to the study that listens there, until it ends; the number of children that ran here.

    Waits for the study to begin. Raises `UsageError` for a wrong key and for other versions than the study's.
    """
    key = os.environ.get(KEY, "")
    if not key:
        raise UsageError(f"set {KEY} to the key that the study shows")
    study = _connect(host, port, key.encode(), on_progress)
    running: dict[str, Child] = {}
    ran = 0
    with tempfile.TemporaryDirectory(prefix="fettle-node-") as cache, contextlib.closing(study):
        try:
            study.send_bytes(msgspec.json.encode(_versions()))
            welcome = _received(study, Welcome)
            if welcome.error:
                raise UsageError(welcome.error)
            on_progress(f"node {welcome.node + 1} of {welcome.nodes} of the study on {host}:{port}")
            while True:
                message = _received(study, Begin | End)
                if isinstance(message, Begin):
                    here = {"TORCHINDUCTOR_CACHE_DIR": cache, "FETTLE_CACHE": cache}
                    variables = {**variables_of(message.share), **message.variables, **here}
                    running[message.share.run_id] = Child(LAUNCHER, variables=variables)
                    ran += 1
                elif message.run_id in running:
                    running.pop(message.run_id).close()
        except (EOFError, OSError):
            return ran
        finally:
            for child in running.values():
                child.close()


def _send(other: Connection, message: Begin | End) -> None:
    with contextlib.suppress(OSError):  # it has gone: its missing ranks will show that
        other.send_bytes(msgspec.json.encode(message))


def _received(other: Connection, message: Any) -> Any:
    return msgspec.json.decode(other.recv_bytes(_LONGEST), type=message)


def _connect(host: str, port: int, key: bytes, on_progress: Callable[[str], None]) -> Connection:
    on_progress(f"waiting for a study on {host}:{port}")
    while True:
        try:
            return Client((host, port), authkey=key)
        except (AuthenticationError, EOFError):
            raise UsageError(f"{host}:{port} does not take this {KEY}") from None
        except ConnectionError:
            time.sleep(1.0)
        except OSError as error:
            raise UsageError(f"cannot reach {host}:{port}: {first_line(error)}") from error


def _wrong_versions(theirs: Mapping[str, str]) -> str:
    odd = [f"{name} {theirs.get(name)}, not {mine}" for name, mine in _versions().items() if theirs.get(name) != mine]
    return f"all nodes must have the versions of the study's: here is {', '.join(odd)}" if odd else ""


def _versions() -> dict[str, str]:
    return {name: version(name) for name in _PACKAGES}
