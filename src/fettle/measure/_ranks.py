"""A worker of several ranks: it starts them with torchrun's engine and passes requests on to all of them.

With several nodes it starts its own share, and those of the others come to it (`fettle.measure._nodes`). Seen from the
parent it is a worker like any other (`fettle.measure._process`): lines of JSON in, lines of JSON out. Each rank runs
the same actions as a worker of one process. The elastic agent has the main thread; a thread of its own does the
talking. When one rank fails, the others wait for it in a collective: the first failure is the answer, and then
everything ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from multiprocessing.connection import Client, Connection, wait
from typing import Any

import msgspec

from fettle.measure._door import Door

_RANKS = "FETTLE_RANKS"
"""The variable that holds the `Gathering` of a worker's processes."""
_GRACE_S = 5.0
"""When one rank fails others do too, as their connection breaks: how long to wait for the word of the one that died."""


class Gathering(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the ranks of one worker find each other, and their requests."""

    run_id: str
    each: int
    """Ranks of a node."""
    host: str
    """Of the first node,"""
    store_port: int
    """where torchrun's engine meets, and"""
    port: int
    """where requests come from, for those who know the"""
    secret: str
    nodes: int = 1
    node: int = 0
    """Of this process."""

    @property
    def count(self) -> int:
        """All ranks."""
        return self.each * self.nodes


def variables_of(gathering: Gathering) -> dict[str, str]:
    """What the environment of the process that starts a node's ranks must hold."""
    from fettle.techniques import usable_cores

    threads = max(1, usable_cores() // gathering.each)  # torchrun's own choice would be one each
    return {_RANKS: msgspec.json.encode(gathering).decode(), "OMP_NUM_THREADS": str(threads)}


def free_ports(host: str, count: int) -> list[int]:
    """Different ports that nobody listens on at this moment."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


class _Ranks:
    """The ranks from their start to their end."""

    def __init__(self, gathering: Gathering) -> None:
        self.gathering, self.count = gathering, gathering.count
        self.door = Door(gathering.host, gathering.port, bytes.fromhex(gathering.secret))
        self.dead: list[tuple[int, int]] | None = None
        """(rank, exit code) of those of this node in the order in which they failed, once the agent has given up."""
        self.ended = threading.Event()

    def end(self) -> None:
        """There are no ranks any more, and none will come."""
        self.ended.set()
        self.door.close()

    def serve(self, requests: Any, answers: Any) -> None:
        """Pass requests on until the parent closes the pipe, then end the process with all ranks."""
        try:
            connections = self._accept()
            for line in requests:
                answer = {"error": "the ranks are gone", "kind": "crash"}
                if connections is not None:
                    answer = self._ask(connections, line)
                    if "error" in answer:
                        connections = None
                else:
                    answer = self._why({}, {}, "starting")
                answers.write(msgspec.json.encode(answer) + b"\n")
        finally:
            _end()

    def _accept(self) -> dict[Connection, int] | None:
        found: dict[Connection, int] = {}
        while len(found) < self.count:
            connection = self.door.wait()
            if connection is None or self.ended.is_set():
                return None
            with contextlib.suppress(EOFError, OSError):  # a rank that ended while it said hello
                found[connection] = int(connection.recv_bytes(16))
        return found

    def _ask(self, connections: dict[Connection, int], line: bytes) -> dict[str, Any]:
        do = str(msgspec.json.decode(line).get("do"))
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(line)
        answers: dict[int, dict[str, Any]] = {}
        waiting = dict(connections)
        while waiting:
            ready = wait(list(waiting))
            for connection in [connection for connection in waiting if connection in ready]:
                rank = waiting.pop(connection)
                try:
                    answer = msgspec.json.decode(connection.recv_bytes())
                except (EOFError, OSError):
                    return self._why(answers, {**waiting, connection: rank}, do)
                answers[rank] = answer
                if "error" in answer:
                    return self._why(answers, waiting, do)
        return _merged([answers[rank] for rank in range(self.count)])

    def _why(self, answers: dict[int, dict[str, Any]], waiting: dict[Connection, int], do: str) -> dict[str, Any]:
        """What went wrong: a rank that ended without a word of its own is the cause, else the first word is."""
        told = {rank: answer for rank, answer in answers.items() if "error" in answer}
        broken = all(_is_broken(answer) for answer in told.values())
        gone = self._gone(waiting, _GRACE_S if broken else 0.5)
        for rank, code in self.dead or ():
            if code == -signal.SIGTERM or rank in told:
                continue
            if code == -signal.SIGKILL:
                reason = f"rank {rank} was killed by SIGKILL in {do}, as the kernel does when memory runs out"
                return {"error": reason, "kind": "memory"}
            ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return {"error": f"rank {rank} {ended} in {do}", "kind": "crash"}
        if broken and gone is not None:
            return {"error": f"rank {gone} on node {gone // self.gathering.each + 1} ended in {do}", "kind": "crash"}
        if not told:
            return {"error": f"the ranks ended without a word in {do}", "kind": "crash"}
        rank, answer = next(iter(told.items()))
        if answer.get("kind") == "usage":
            return answer
        return {**answer, "error": f"rank {rank}: {answer['error']}"}

    def _gone(self, waiting: dict[Connection, int], patience_s: float) -> int | None:
        """Wait for the agent's word on this node's ranks, or until one of another node has ended: which one."""
        until = time.monotonic() + patience_s
        others = {connection: rank for connection, rank in waiting.items() if rank >= self.gathering.each}
        while time.monotonic() < until and not self.ended.wait(0.05):
            for connection in wait(list(others), 0) if others else []:
                rank = others.pop(connection)  # type: ignore[call-overload]
                try:
                    connection.recv_bytes()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    return int(rank)
        return None


def _is_broken(answer: dict[str, Any]) -> bool:
    """Whether a rank complains of another that is gone."""
    text = str(answer["error"]).lower()
    return "gloo" in text or "connection" in text or "nccl" in text or "peer" in text


def _merged(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """One answer for all ranks: rank 0's, with the fullest rank's memory and the slowest one's start."""
    first = dict(answers[0])
    prints = {answer.get("fingerprint") for answer in answers}
    if len(prints) > 1:
        return {"error": "the ranks built different weights or inputs: seed every generator", "kind": "error"}
    for key in ("peak_bytes", "load_s", "optimize_s", "first_call_s", "call_ns"):
        values = [answer[key] for answer in answers if answer.get(key) is not None]
        if values:
            first[key] = max(values)
    if "notes" in first:
        first["notes"] = list(dict.fromkeys(note for answer in answers for note in answer["notes"]))
    return first


def _run_agent(gathering: Gathering) -> list[tuple[int, int]]:
    """The elastic agent over this node's ranks, as torchrun runs it, until they have all ended: (rank, exit code) of
    those that failed, in the order in which they did."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=gathering.nodes,
        max_nodes=gathering.nodes,
        nproc_per_node=gathering.each,
        rdzv_backend="static",  # the others have heartbeats, and a trial that is paused has none
        rdzv_endpoint=f"{gathering.host}:{gathering.store_port}",
        rdzv_configs={"rank": gathering.node},
        run_id=gathering.run_id,
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "fettle.measure._ranks", "rank")
        return []
    except ChildFailedError as error:
        in_time = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        return [(rank, failure.exitcode) for rank, failure in in_time]


def supervise() -> None:
    """The life of the process that the parent starts: READ_FD WRITE_FD."""
    from fettle.processes import die_with_parent

    die_with_parent(pipe=int(sys.argv[1]))
    requests = os.fdopen(int(sys.argv[1]), "rb")
    answers = os.fdopen(int(sys.argv[2]), "wb", buffering=0)
    ranks = _Ranks(_gathering())
    talking = threading.Thread(target=ranks.serve, args=(requests, answers))
    talking.start()
    try:
        ranks.dead = _run_agent(ranks.gathering)
    finally:
        ranks.end()
    talking.join()


def be_a_node() -> None:
    """The life of the process that starts another node's share."""
    from fettle.processes import die_with_parent

    die_with_parent(pipe=sys.stdin.fileno())
    _run_agent(_gathering())


def _gathering() -> Gathering:
    return msgspec.json.decode(os.environ[_RANKS], type=Gathering)


def be_a_rank() -> None:
    """The life of one rank: the actions of a worker, asked over a socket."""
    # Each rank builds its model on a device of its own, whatever number the factory knows it by.
    local = int(os.environ["LOCAL_RANK"])
    devices = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name] or [str(local)]
    os.environ["CUDA_VISIBLE_DEVICES"] = devices[local % len(devices)]
    from fettle.measure._state import State
    from fettle.measure._worker import answer_to
    from fettle.processes import be_a_worker

    be_a_worker()
    gathering = _gathering()
    del os.environ[_RANKS]  # the user's code need not know the secret
    connection = Client((gathering.host, gathering.port), authkey=bytes.fromhex(gathering.secret))
    rank = int(os.environ["RANK"])
    connection.send_bytes(str(rank).encode())
    state = State()
    while True:
        try:
            line = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        if rank >= gathering.each:  # what rank 0 is judged by lies on its node
            line = msgspec.json.encode({**msgspec.json.decode(line), "path": ""})
        connection.send_bytes(msgspec.json.encode(answer_to(state, line)))


def _end() -> None:
    """End the ranks and this process. The kernel would end them too, as their parent dies."""
    import psutil

    with contextlib.suppress(psutil.Error):
        children = psutil.Process().children(recursive=True)
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(children, timeout=2)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        be_a_rank()
    elif sys.argv[1] == "node":
        be_a_node()
    else:
        supervise()
