"""Run a strategy for a few steps on ranks of this machine, started by torchrun's engine, and leave nothing behind.

Three layers: the caller (`launch`), a supervisor process that runs torch's elastic agent (`supervise`), and the ranks
(`fettle.train.strategies_rank`). The supervisor is there so that a hang, an exhausted memory or an interrupt can be
answered by ending one process tree. Each rank asks the kernel to end it when its agent dies, so that even a supervisor
that is killed leaves no orphan (Linux; elsewhere the caller ends the tree it sees).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from fettle.errors import UsageError
from fettle.processes import die_with_parent
from fettle.train.strategies import Strategy
from fettle.workload import Target

LOWEST_AVAILABLE = 0.04
"""Share of the machine's memory below which the trial is ended, before the kernel ends whatever it likes."""

_QUIET = {"KINETO_LOG_LEVEL": "99"}
"""The profiler's library writes to stderr otherwise, and the last line there is a dead rank's last word."""


@dataclass(frozen=True)
class RankResult:
    """What one rank measured."""

    rank: int
    peak_bytes: int
    """Most bytes of the CPU allocator alive at once in a step, the step in the middle of all after the first."""
    states: dict[str, int]
    """Bytes of the storages of parameters (with buffers), gradients and optimizer state, counted in the rank."""
    losses: list[float]
    step_ms: list[float]
    """Wall time of each step, with the recording on: not a speed to compare."""
    collectives: dict[str, int]
    highest_bytes: int = 0
    """The same of the highest step: gloo frees a copy late at times."""


@dataclass(frozen=True)
class LaunchResult:
    """A trial of one strategy. `status` is done or failed."""

    strategy: str
    status: str
    reason: str = ""
    kind: str = ""
    """error, memory, timeout or crash."""
    ranks: tuple[RankResult, ...] = ()
    log: str = field(default="", repr=False)
    """The last lines that the ranks wrote."""


def launch(
    target: Target,
    strategy: Strategy,
    nproc: int,
    *,
    steps: int = 3,
    timeout_s: float = 300.0,
    ranks_per_node: int = 8,
    record: bool = True,
) -> LaunchResult:
    """Train `steps` steps of `target` with `strategy` on `nproc` gloo ranks of this machine.

    Whatever a rank does (raises, dies, hangs, runs out of memory) is a result with status failed and the reason in
    one line. Afterwards no process of it is alive.
    """
    if nproc < 1:
        raise UsageError(f"`nproc={nproc}`: give at least 1")
    with tempfile.TemporaryDirectory(prefix="fettle-ranks-") as name:
        folder = Path(name)
        request = {
            "reference": target.reference,
            "name": target.name,
            "search_path": list(target.search_path),
            "strategy": str(strategy),
            "steps": steps,
            "ranks_per_node": ranks_per_node,
            "record": record,
            "nproc": nproc,
            "folder": name,
        }
        (folder / "request.json").write_text(json.dumps(request))
        log = folder / "log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "fettle.train.strategies_launch", str(folder / "request.json")],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env={**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // nproc)), **_QUIET},
                start_new_session=True,
            )
        try:
            kind, reason = _watch(process, folder, nproc, time.monotonic() + timeout_s, timeout_s)
        finally:
            end_tree(process)
        words = log.read_text(errors="replace")[-4000:]
        if not kind:
            kind, reason, results = _results(folder, nproc)
            if not kind:
                return LaunchResult(str(strategy), "done", ranks=results, log=words)
        return LaunchResult(str(strategy), "failed", reason, kind, log=words)


def _watch(
    process: subprocess.Popen[bytes], folder: Path, nproc: int, deadline: float, limit_s: float
) -> tuple[str, str]:
    """Wait for the supervisor; (kind, reason) when it had to be given up, empty when it ended by itself."""
    while process.poll() is None:
        if time.monotonic() > deadline:
            stages = [_stage(folder, rank) for rank in range(nproc)]
            where = "; ".join(f"rank {rank} last in {stage}" for rank, stage in enumerate(stages))
            return "timeout", f"timed out after {limit_s:.0f} s: {where}"
        memory = psutil.virtual_memory()
        if memory.available < LOWEST_AVAILABLE * memory.total and _tree_bytes(process.pid) > memory.total / 4:
            return "memory", f"out of memory: its ranks held {_tree_bytes(process.pid) / 2**30:.1f} GiB"
        time.sleep(0.1)
    return "", ""


def _results(folder: Path, nproc: int) -> tuple[str, str, tuple[RankResult, ...]]:
    """What the ranks left: all results, or why there are none.

    When one rank ends, the others fail too, as their connection breaks. So a rank that ended without a word of its own
    is the cause; otherwise the earliest word is.
    """
    told = {rank: error for rank in range(nproc) if (error := _read(folder / f"error{rank}.json"))}
    outcome = _read(folder / "outcome.json")
    failures = outcome["failures"] if outcome else []
    silent = [(rank, code) for rank, code in failures if rank not in told and code != -signal.SIGTERM]
    if silent:
        rank, code = silent[0]
        if code == -signal.SIGKILL:
            return "memory", f"rank {rank} was killed by SIGKILL, as the kernel does when memory runs out", ()
        ended = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return "crash", f"rank {rank} {ended} in {_stage(folder, rank)}", ()
    if told:
        rank = min(told, key=lambda number: float(told[number].get("at", 0)))
        return str(told[rank]["kind"]), f"rank {rank}: {told[rank]['reason']}", ()
    if outcome is None:
        return "crash", "the process that starts the ranks ended without a word", ()
    results = [_read(folder / f"rank{rank}.json") for rank in range(nproc)]
    missing = [rank for rank, result in enumerate(results) if result is None]
    if missing:
        return "crash", f"rank {missing[0]} ended without a result", ()
    return "", "", tuple(RankResult(**result) for result in results if result is not None)


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all its descendants, and wait until they are gone."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(process.pid)
        family = [root, *root.children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.Error):
            member.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, 9)
    process.wait()
    psutil.wait_procs(family, timeout=5)


def supervise(request_path: str) -> None:
    """The supervisor's life: run torch's elastic agent over the ranks and write how it went."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    die_with_parent()
    request = json.loads(Path(request_path).read_text())
    folder = Path(request["folder"])
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=request["nproc"],
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=folder.name,
        max_restarts=0,
        monitor_interval=0.1,
    )
    failures: list[tuple[int, int]] = []
    try:
        elastic_launch(config, sys.executable)("-m", "fettle.train.strategies_rank", request_path)
    except ChildFailedError as error:
        in_time = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        failures = [(rank, failure.exitcode) for rank, failure in in_time]
    (folder / "outcome.json").write_text(json.dumps({"failures": failures}))


def _stage(folder: Path, rank: int) -> str:
    try:
        return (folder / f"stage{rank}").read_text() or "starting"
    except OSError:
        return "starting"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found


def _tree_bytes(pid: int) -> int:
    total = 0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for member in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += member.memory_info().rss
    return total


if __name__ == "__main__":
    supervise(sys.argv[1])
