"""The process that starts the ranks of a child with torchrun's engine and forwards requests to them; and each rank.

With several nodes each starts its own share (`fettle.procs.nodes`). Each rank runs the module that a child of one
process would run. The elastic agent has the main thread; a thread of its own does the talking. When one rank fails, the
others wait for it in a collective: the first failure is the answer, and then everything ends.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Client, Connection, wait
from typing import Any, cast

import msgspec
import psutil

from fettle.procs.child import Failure, Reply, replied, what
from fettle.procs.listener import KeyedListener
from fettle.procs.parent import Parent, be_a_worker, die_with_parent
from fettle.procs.process import how_it_ended
from fettle.procs.rendezvous import LAUNCHER, VARIABLE, Rendezvous, from_environment

_GRACE_S = 5.0
"""When one rank fails others do too, as their connection breaks: how long to wait for the agent
to name the one that died."""


class _Supervisor:
    """The ranks from their start to their end."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        self.listener = KeyedListener(rendezvous.host, rendezvous.port, bytes.fromhex(rendezvous.secret))
        self.dead: list[tuple[int, int]] | None = None
        """(rank, exit code) of those of this node in the order in which they failed, once the agent has given up."""
        self.ended = threading.Event()
        self._stages: dict[int, str] = {}

    def end(self) -> None:
        """There are no ranks any more, and none will come."""
        self.ended.set()
        self.listener.close()

    def serve(self, parent: Parent) -> None:
        """Pass requests on until the parent goes, then end the process with all ranks."""
        try:
            links = self._accept()
            for request in parent.requests():
                if links is None:
                    parent.send(Reply(failure=self._why({}, {}, "starting")))
                    continue
                reply = self._ask(links, request, parent)
                links = links if reply.failure is None else {}
                parent.send(reply)
        finally:
            _end()

    def _accept(self) -> dict[Connection, int] | None:
        index_of: dict[Connection, int] = {}
        while len(index_of) < self.rendezvous.count:
            link = self.listener.accept()
            if link is None or self.ended.is_set():
                return None
            with contextlib.suppress(EOFError, OSError):  # a rank that ended while it said hello
                index_of[link] = int(link.recv_bytes(16))
        return index_of

    def _ask(self, links: dict[Connection, int], request: bytes, parent: Parent) -> Reply:
        if not links:
            return Reply(failure=Failure("the ranks are gone", "crash"))
        doing = what(request)
        self._stages.clear()
        for link in links:
            with contextlib.suppress(OSError):
                link.send_bytes(request)
        replies: dict[int, Reply] = {}
        waiting = dict(links)
        while waiting:
            for ready in wait(list(waiting)):
                link = cast(Connection, ready)
                rank = waiting[link]
                try:
                    reply = msgspec.msgpack.decode(link.recv_bytes(), type=Reply)
                except (EOFError, OSError):
                    return Reply(failure=self._why(replies, waiting, doing))
                if reply.stage:
                    self._stages[rank] = reply.stage
                    stages = sorted(self._stages.items())
                    parent.stage("; ".join(f"rank {number} last in {stage}" for number, stage in stages))
                    continue
                del waiting[link]
                replies[rank] = reply
                if reply.failure is not None:
                    return Reply(failure=self._why(replies, waiting, doing))
        return replied([replies[rank].answer for rank in range(self.rendezvous.count)])

    def _why(self, replies: dict[int, Reply], waiting: dict[Connection, int], doing: str) -> Failure:
        """What went wrong: a rank that ended without an error of its own is the cause, else the first error is."""
        failures = {rank: reply.failure for rank, reply in replies.items() if reply.failure is not None}
        broken = all(_is_broken(failure) for failure in failures.values())
        left = self._gone(waiting, _GRACE_S if broken else 0.5)
        for rank, code in self.dead or ():
            if code == -signal.SIGTERM or rank in failures:
                continue
            ended = f"{how_it_ended(code)} in {self._stages.get(rank, doing)}"
            return Failure(f"rank {rank} {ended}", "memory" if code == -signal.SIGKILL else "crash")
        if broken and left is not None:
            return Failure(f"rank {left} on node {left // self.rendezvous.each + 1} ended in {doing}", "crash")
        if not failures:
            return Failure(f"the ranks ended without an error in {doing}", "crash")
        rank, failure = next(iter(failures.items()))
        if failure.kind == "usage":
            return failure
        return msgspec.structs.replace(failure, reason=f"rank {rank}: {failure.reason}")

    def _gone(self, waiting: dict[Connection, int], patience_s: float) -> int | None:
        """Wait for the agent to report on this node's ranks, or until a rank of another node has ended: which one."""
        until = time.monotonic() + patience_s
        others = {link: rank for link, rank in waiting.items() if rank >= self.rendezvous.each}
        while time.monotonic() < until and not self.ended.wait(0.05):
            for ready in wait(list(others), 0) if others else []:
                link = cast(Connection, ready)
                rank = others.pop(link)
                try:
                    link.recv_bytes()
                except (EOFError, OSError):
                    return rank
        return None


def _is_broken(failure: Failure) -> bool:
    """Whether a rank's error is that another one is gone."""
    text = failure.reason.lower()
    return "gloo" in text or "connection" in text or "nccl" in text or "peer" in text


def _run_agent(rendezvous: Rendezvous) -> list[tuple[int, int]]:
    """The elastic agent over this node's ranks, as torchrun runs it, until they have all ended: (rank, exit code) of
    those that failed, in the order in which they did."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=rendezvous.nodes,
        max_nodes=rendezvous.nodes,
        nproc_per_node=rendezvous.each,
        rdzv_backend="static",  # the others have heartbeats, and a trial that is paused has none
        rdzv_endpoint=f"{rendezvous.host}:{rendezvous.store_port}",
        rdzv_configs={"rank": rendezvous.node},
        run_id=rendezvous.run_id,
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", LAUNCHER, "rank")
        return []
    except ChildFailedError as error:
        in_time = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        return [(rank, failure.exitcode) for rank, failure in in_time]


def supervise() -> None:
    """The life of the process that starts a node's ranks; on the first node it passes requests on to all."""
    die_with_parent(pipe=int(sys.argv[1]))
    rendezvous = from_environment()
    parent = Parent()
    if rendezvous.node:
        _run_agent(rendezvous)
        return
    supervisor = _Supervisor(rendezvous)
    talking = threading.Thread(target=supervisor.serve, args=(parent,))
    talking.start()
    try:
        supervisor.dead = _run_agent(rendezvous)
    finally:
        supervisor.end()
    talking.join()


def _end() -> None:
    """End the ranks and this process. The kernel would end them too, as their parent dies."""
    with contextlib.suppress(psutil.Error):
        children = psutil.Process().children(recursive=True)
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(children, timeout=2)
    os._exit(0)


# -- in each rank ------------------------------------------------------------------------------------------------------


def be_a_rank() -> None:
    """The life of one rank: the module's, asked over a socket."""
    # Each rank builds its model on a device of its own, whatever number the factory knows it by.
    local, rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if name.startswith("CUDA") or name in os.environ:  # AMD's runtime goes by the second where that is set
            devices = os.environ.get(name, str(local)).split(",")  # none where it is empty
            os.environ[name] = devices[local % len(devices)]
    be_a_worker()
    rendezvous = from_environment()
    del os.environ[VARIABLE], sys.argv[1:]  # the user's code need not know the secret, and takes arguments for its own
    module: Any = importlib.import_module(rendezvous.module)
    link = Client((rendezvous.host, rendezvous.port), authkey=bytes.fromhex(rendezvous.secret))
    link.send_bytes(str(rank).encode())
    module.main(Parent(link, rank // rendezvous.each))


if __name__ == "__main__":
    be_a_rank() if sys.argv[1:] == ["rank"] else supervise()
