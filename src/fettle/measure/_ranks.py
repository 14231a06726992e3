"""A worker of several ranks: it starts them with torchrun's engine and passes requests on to all of them.

Seen from the parent it is a worker like any other (`fettle.measure._process`): lines of JSON in, lines of JSON out.
Each rank runs the same actions as a worker of one process. The elastic agent has the main thread; a thread of its own
does the talking. When one rank fails, the others wait for it in a collective: the first failure is the answer, and then
everything ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

import msgspec

_ADDRESS, _SECRET = "FETTLE_RANKS_ADDRESS", "FETTLE_RANKS_SECRET"
_GRACE_S = 5.0
"""When one rank fails others do too, as their connection breaks: how long to wait for the word of the one that died."""


class _Ranks:
    """The ranks from their start to their end."""

    def __init__(self, count: int) -> None:
        self.count = count
        key = secrets.token_bytes(16)
        self.listener = Listener(("127.0.0.1", 0), authkey=key)
        self.environment = {_ADDRESS: str(self.listener.address[1]), _SECRET: key.hex()}
        self.dead: list[tuple[int, int]] | None = None
        """(rank, exit code) in the order in which they failed, once the agent has given up."""
        self.ended = threading.Event()

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
                    answer = self._why({}, "starting")
                answers.write(msgspec.json.encode(answer) + b"\n")
        finally:
            _end()

    def _accept(self) -> dict[Connection, int] | None:
        found: dict[Connection, int] = {}
        threading.Thread(target=self._unblock, daemon=True).start()
        while len(found) < self.count:
            try:
                connection = self.listener.accept()
            except Exception:  # a stranger without the secret, or a rank that ended while it said hello
                if self.ended.is_set():
                    return None
                continue
            if self.ended.is_set():
                return None
            found[connection] = int(connection.recv_bytes(16))
        return found

    def _unblock(self) -> None:
        """`accept` cannot be given a time limit: knock on the door when no more ranks will come."""
        self.ended.wait()
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", int(self.environment[_ADDRESS])), 1).close()

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
                    return self._why(answers, do)
                answers[rank] = answer
                if "error" in answer:
                    return self._why(answers, do)
        return _merged([answers[rank] for rank in range(self.count)])

    def _why(self, answers: dict[int, dict[str, Any]], do: str) -> dict[str, Any]:
        """What went wrong: a rank that ended without a word of its own is the cause, else the first word is."""
        told = {rank: answer for rank, answer in answers.items() if "error" in answer}
        patience = _GRACE_S if not told or any(_is_broken(answer) for answer in told.values()) else 0.5
        self.ended.wait(patience)
        for rank, code in self.dead or ():
            if code == -signal.SIGTERM or rank in told:
                continue
            if code == -signal.SIGKILL:
                reason = f"rank {rank} was killed by SIGKILL in {do}, as the kernel does when memory runs out"
                return {"error": reason, "kind": "memory"}
            ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return {"error": f"rank {rank} {ended} in {do}", "kind": "crash"}
        if not told:
            return {"error": f"the ranks ended without a word in {do}", "kind": "crash"}
        rank, answer = next(iter(told.items()))
        if answer.get("kind") == "usage":
            return answer
        return {**answer, "error": f"rank {rank}: {answer['error']}"}


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


def _run_agent(ranks: _Ranks) -> None:
    """The elastic agent over the ranks, as torchrun runs it; returns when they have all ended."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks.count,
        rdzv_backend="static",  # the others have heartbeats, and a trial that is paused has none
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": 0},
        run_id=secrets.token_hex(8),
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "fettle.measure._ranks", "rank")
        ranks.dead = []
    except ChildFailedError as error:
        in_time = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        ranks.dead = [(rank, failure.exitcode) for rank, failure in in_time]
    ranks.ended.set()


def supervise() -> None:
    """The life of the process that the parent starts: READ_FD WRITE_FD RANKS."""
    from fettle.processes import die_with_parent

    die_with_parent()
    requests = os.fdopen(int(sys.argv[1]), "rb")
    answers = os.fdopen(int(sys.argv[2]), "wb", buffering=0)
    ranks = _Ranks(int(sys.argv[3]))
    os.environ.update(ranks.environment)
    talking = threading.Thread(target=ranks.serve, args=(requests, answers))
    talking.start()
    try:
        _run_agent(ranks)
    finally:
        ranks.ended.set()
    talking.join()


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
    address = ("127.0.0.1", int(os.environ[_ADDRESS]))
    connection = Client(address, authkey=bytes.fromhex(os.environ.pop(_SECRET)))
    connection.send_bytes(os.environ["RANK"].encode())
    state = State()
    while True:
        try:
            line = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
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
    else:
        supervise()
