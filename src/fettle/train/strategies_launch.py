"""Run a strategy for a few steps on ranks of this machine, started by torchrun's engine, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fettle.errors import UsageError
from fettle.procs.child import ChildError, Request
from fettle.procs.ranks import Ranks
from fettle.train.strategies import Strategy
from fettle.workload import Target

_QUIET = {"KINETO_LOG_LEVEL": "99"}
"""The profiler's library writes to stderr otherwise, and the last line there is a dead rank's last word."""


class Train(Request):
    """Train a target for so many steps."""

    target: Target
    strategy: str
    steps: int
    ranks_per_node: int
    record: bool


@dataclass(frozen=True)
class RankResult:
    """What one rank measured."""

    rank: int
    peak_bytes: int
    """Most bytes of the CPU allocator alive at once in a step, the step in the middle of all after the first."""
    states: dict[str, int]
    """Bytes of the storages of parameters (with buffers), gradients and optimizer state, counted in the rank."""
    losses: Sequence[float | None]
    """None where it was not finite."""
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
        raise UsageError(f"--nproc {nproc}: give at least 1")
    request = Train(target, str(strategy), steps, ranks_per_node, record)
    with Ranks("fettle.train.strategies_rank", nproc, variables=_QUIET) as ranks:
        try:
            ranks.send(request)
            results = ranks.gather(RankResult, timeout_s)
            return LaunchResult(str(strategy), "done", ranks=tuple(results), log=ranks.printed(4000))
        except (ChildError, UsageError) as error:
            kind = error.kind if isinstance(error, ChildError) else "usage"
            return LaunchResult(str(strategy), "failed", str(error), kind, log=ranks.printed(4000))
