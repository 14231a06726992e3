"""Other machines that lend ranks to a study.

The study runs on one node (`fettle tune --nodes 2 --listen HOST:PORT`); on each of the others `fettle join HOST:PORT`
waits and starts its share of the ranks of each worker, with torchrun's engine as on the first. All that passes between
the two commands are lines of JSON: which worker begins and which has ended. The ranks talk to each other as torchrun's
ranks do, and take their requests from the first node (`fettle.measure._ranks`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from typing import Any

import msgspec
import psutil

from fettle.errors import UsageError, first_line
from fettle.measure._door import Door
from fettle.measure._ranks import Gathering, variables_of

KEY = "FETTLE_KEY"
"""The variable that holds what both sides must know."""
_LONGEST = 1 << 20
"""Bytes of a message."""
_PACKAGES = ("torch-fettle", "torch")
"""What must be alike on all nodes."""


def address_of(text: str, option: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; `UsageError` for anything else, which names the option."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"{option} {text!r} is no address: write HOST:PORT, such as 10.0.0.1:29400")
    return host, int(port)


class Nodes:
    """The study's side: this node, and those that joined it. Close it."""

    def __init__(self, count: int, host: str, port: int) -> None:
        self.count, self.host = count, host
        self.key = os.environ.get(KEY) or secrets.token_hex(16)
        self._door = Door(host, port, self.key.encode())
        self.port = self._door.address[1]
        self._others: list[Connection] = []

    def gather(self, tell: Callable[[str], None]) -> None:
        """Wait until all have joined. Those with another version of fettle or torch are told so and sent away."""
        while len(self._others) < self.count - 1:
            left = self.count - 1 - len(self._others)
            tell(f"waiting for {left} more node{'s' if left > 1 else ''}: "
                 f"{KEY}={self.key} fettle join {self.host}:{self.port}")  # fmt: skip
            visitor = self._door.wait(1.0)
            if visitor is None:
                continue
            with contextlib.suppress(EOFError, OSError, msgspec.DecodeError):
                wrong = _wrong_versions(msgspec.json.decode(visitor.recv_bytes(_LONGEST), type=dict[str, str]))
                answer = {"error": wrong, "node": len(self._others) + 1, "nodes": self.count}
                visitor.send_bytes(msgspec.json.encode(answer))
                if not wrong:
                    self._others.append(visitor)
        self._door.close()

    def why_fewer(self) -> str:
        """Which other node has left, as a sentence; empty where all are there."""
        left = [node for node, other in enumerate(self._others, 2) if other.poll()]  # it says nothing but that it ends
        return f"node {left[0]} has left: start 'fettle join' there and this again, which goes on" if left else ""

    def begin(self, gathering: Gathering, environment: Mapping[str, str]) -> None:
        """Have the others start their ranks of a worker. Raises `UsageError` where one has left."""
        if why := self.why_fewer():
            raise UsageError(why)
        for node, other in enumerate(self._others, 1):
            share = msgspec.structs.replace(gathering, node=node)
            self._send(other, {"begin": msgspec.to_builtins(share), "environment": dict(environment)})

    def end(self, gathering: Gathering) -> None:
        """Have the others end their ranks of a worker."""
        for other in self._others:
            self._send(other, {"end": gathering.run_id})

    def close(self) -> None:
        """Let the other nodes go."""
        self._door.close()
        for other in self._others:
            other.close()
        self._others.clear()

    def _send(self, other: Connection, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has gone: the ranks that are missing tell it
            other.send_bytes(msgspec.json.encode(message))


def join(host: str, port: int, tell: Callable[[str], None]) -> int:
    """Lend this machine to the study that listens there, until it ends; the number of workers that ran here.

    Waits for the study to begin. Raises `UsageError` for a wrong key and for other versions than the study's.
    """
    key = os.environ.get(KEY, "")
    if not key:
        raise UsageError(f"set {KEY} to the key that 'fettle tune --nodes' shows")
    study = _connect(host, port, key.encode(), tell)
    running: dict[str, subprocess.Popen[bytes]] = {}
    ran = 0
    with tempfile.TemporaryDirectory(prefix="fettle-node-") as cache, contextlib.closing(study):
        try:
            study.send_bytes(msgspec.json.encode(_versions()))
            said = msgspec.json.decode(study.recv_bytes(_LONGEST), type=dict[str, Any])
            if said["error"]:
                raise UsageError(str(said["error"]))
            tell(f"node {said['node'] + 1} of {said['nodes']} of the study on {host}:{port}")
            while True:
                message = msgspec.json.decode(study.recv_bytes(_LONGEST), type=dict[str, Any])
                if "end" in message:
                    _end(running.pop(message["end"], None))
                    continue
                share = msgspec.convert(message["begin"], Gathering)
                running[share.run_id] = _begin(share, message["environment"], cache)
                ran += 1
        except (EOFError, OSError):
            return ran
        finally:
            for process in running.values():
                _end(process)


def _connect(host: str, port: int, key: bytes, tell: Callable[[str], None]) -> Connection:
    tell(f"waiting for a study on {host}:{port}")
    while True:
        try:
            return Client((host, port), authkey=key)
        except (AuthenticationError, EOFError):
            raise UsageError(f"{host}:{port} does not take this {KEY}") from None
        except ConnectionError:
            time.sleep(1.0)
        except OSError as error:
            raise UsageError(f"cannot reach {host}:{port}: {first_line(error)}") from error


def _begin(share: Gathering, environment: Mapping[str, str], cache: str) -> subprocess.Popen[bytes]:
    """Start this node's ranks of a worker: a process that runs torchrun's engine over them.

    Nothing is written to its input: that it is open says that we are there.
    """
    variables = {**os.environ, **variables_of(share), **environment, "TORCHINDUCTOR_CACHE_DIR": cache}
    return subprocess.Popen(
        [sys.executable, "-m", "fettle.measure._ranks", "node"], env=variables, stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def _end(process: subprocess.Popen[bytes] | None) -> None:
    if process is None:
        return
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
    for child in family:
        with contextlib.suppress(psutil.Error):
            child.kill()


def _wrong_versions(theirs: Mapping[str, str]) -> str:
    odd = [f"{name} {theirs.get(name)}, not {mine}" for name, mine in _versions().items() if theirs.get(name) != mine]
    return f"all nodes must have the versions of the study's: here is {', '.join(odd)}" if odd else ""


def _versions() -> dict[str, str]:
    return {name: version(name) for name in _PACKAGES}
