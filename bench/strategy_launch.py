"""Train a few steps of a strategy on gloo ranks of this machine, and say what each held at its peak.

What a plan predicts is held against this, by `memory_plan.py` and tests/parallel/test_launch.py. A study's own ranks
run a recipe's code instead (`fettle tune --nproc`).

The peak is that of the CPU allocator's own count of bytes that are handed out, begun before the model is built, so that
nothing is missing from it. Resident memory would show the heap's habits instead. oneDNN and gloo take their workspaces
from the same allocator and are counted; what a library takes from malloc is in neither the count nor a prediction.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fettle.errors import UsageError
from fettle.parallel.strategies import Strategy
from fettle.procs.child import ChildError, Request
from fettle.procs.parent import Parent, be_a_worker
from fettle.procs.ranks import Ranks
from fettle.workload import Target

if TYPE_CHECKING:
    import torch

_STEP = "fettle.step"


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
    target: Target, strategy: Strategy, nproc: int, *, steps: int = 3, timeout_s: float = 300.0,
    ranks_per_node: int = 8, record: bool = True,
) -> LaunchResult:  # fmt: skip
    """Train `steps` steps of `target` with `strategy` on `nproc` gloo ranks of this machine.

    Whatever a rank does (raises, dies, hangs, runs out of memory) is a result with status failed and the reason in
    one line. Afterwards no process of it is alive.
    """
    request = Train(target, str(strategy), steps, ranks_per_node, record)
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with Ranks("bench.strategy_launch", nproc, variables={"PYTHONPATH": os.pathsep.join(paths)}) as ranks:
        try:
            ranks.send(request)
            results = ranks.gather(RankResult, timeout_s)
            return LaunchResult(str(strategy), "done", ranks=tuple(results), log=ranks.printed(4000))
        except (ChildError, UsageError) as error:
            kind = error.kind if isinstance(error, ChildError) else "usage"
            return LaunchResult(str(strategy), "failed", str(error), kind, log=ranks.printed(4000))


# -- in each rank ------------------------------------------------------------------------------------------------------


def main(parent: Parent) -> None:
    """Answer as rank RANK of WORLD_SIZE, as torchrun's environment says; alone without it."""
    parent.serve(Train, lambda request: _train(request, parent.stage))


def _train(request: Train, stage: Callable[[str], None]) -> RankResult:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.profiler import record_function

    from fettle.parallel.strategies import apply, mesh_of, mesh_shape, parse_strategy, precision_context
    from fettle.train.workload import load_training

    strategy = parse_strategy(request.strategy)
    stage("joining the other ranks")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with _recording(request.record, request.steps) as record:
            stage("building the workload")
            workload = load_training(request.target)
            mesh = mesh_of(strategy, mesh_shape(strategy, world, request.ranks_per_node))
            stage(f"applying {strategy.kind}")
            model = _replicated(apply(workload.model, strategy, mesh), strategy)
            optimizer = _optimizer(model, strategy, workload.optimizer)
            batch = workload.first
            losses, step_ms, states = [], [], dict[str, int]()

            def step(number: int) -> torch.Tensor:
                stage(f"forward of step {number}")
                with precision_context(strategy):
                    loss = workload.loss(model, batch)
                stage(f"backward of step {number}")
                loss.backward()
                states.update(_states(model, optimizer))
                stage(f"optimizer of step {number}")
                if workload.max_grad_norm is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), workload.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                return loss.detach()

            gc.collect()
            for number in range(request.steps):
                began = time.perf_counter()
                with record_function(f"{_STEP} {number}"):
                    losses.append(float(step(number + 1)))
                step_ms.append((time.perf_counter() - began) * 1e3)
            states["optimizer state"] = _bytes(_optimizer_tensors(optimizer))
            # Counted in a step of its own: the mode that counts keeps gradients alive for longer.
            with CommDebugMode() as counting:
                step(request.steps + 1)
            counts = {str(op).split(".")[-1]: n for op, n in counting.get_comm_counts().items()}
        stage("done")
        return RankResult(rank, record.peak_bytes, states, losses, step_ms, counts, record.highest_bytes)
    finally:
        if sys.exc_info()[0] is None:
            dist.destroy_process_group()


def _replicated(model: torch.nn.Module, strategy: Strategy) -> torch.nn.Module:
    """The model under DDP, where the strategy is one of its kinds."""
    if strategy.kind not in ("ddp", "zero1"):
        return model
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(
        model, gradient_as_bucket_view=strategy.buckets == "view", static_graph=strategy.graph == "static"
    )
    if strategy.compress == "fp16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        wrapped.register_comm_hook(None, fp16_compress_hook)
    elif strategy.compress == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        # Compression before the second iteration is refused by the hook when it keeps an error of its own.
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped


def _optimizer(model: torch.nn.Module, strategy: Strategy, factory: Callable[..., Any]) -> torch.optim.Optimizer:
    """The user's optimizer over the model's parameters, its state split over the ranks for ZeRO-1.

    `ZeroRedundancyOptimizer` wants a class and its arguments; the user's factory is asked once for an optimizer, and
    class and defaults are taken from that. Raises `UsageError` where parameter groups differ from the defaults.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made = factory(trained)
    if strategy.kind != "zero1":
        return made
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if len(made.param_groups) != 1:
        raise UsageError("zero1: the optimizer factory makes several parameter groups, which zero1 does not take here")
    given = {
        key: value for key, value in made.defaults.items() if key not in ("differentiable", "decoupled_weight_decay")
    }
    return ZeroRedundancyOptimizer(trained, optimizer_class=type(made), **given)


class _Record:
    peak_bytes = 0
    highest_bytes = 0


@contextmanager
def _recording(on: bool, steps: int) -> Iterator[_Record]:
    """Every allocation from here to the end; afterwards the peaks of the steps are in the record.

    gloo frees its copies in threads of its own, at times so late that one more is alive. That can only add, in some
    steps of some runs: the step in the middle is what training takes, the highest is kept beside it. The first step,
    before the optimizer's state exists, is counted only where it is the only one.
    """
    record = _Record()
    if not on:
        yield record
        return
    from fettle.memory.cpu import events_in_time
    from fettle.parallel.workspace import allocations

    with allocations() as taken:
        yield record
    events = events_in_time(taken)
    peaks = [_peak_within(events, f"{_STEP} {number}") for number in range(steps)]
    record.peak_bytes, record.highest_bytes = statistics.median_low(peaks[1:] or peaks), max(peaks)


def _peak_within(events: list[tuple[str, Any]], name: str) -> int:
    """Most bytes handed out at once within the range recorded under that name."""
    step = next(event for kind, event in events if kind == "TorchOp" and event.name == name)
    moves = [
        (event.start_time_ns, int(event.extra_fields.total_allocated))
        for kind, event in events
        if kind == "Allocation" and event.extra_fields.device.type == "cpu"
    ]
    before = [held for time_ns, held in moves if time_ns < step.start_time_ns]
    inside = [held for time_ns, held in moves if step.start_time_ns <= time_ns <= step.end_time_ns]
    return max([*before[-1:], *inside], default=0)


def _states(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    return {
        "parameters": _bytes([*model.parameters(), *model.buffers()]),
        "gradients": _bytes(p.grad for p in model.parameters() if p.grad is not None),
        "optimizer state": _bytes(_optimizer_tensors(optimizer)),
    }


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Any]:
    inner = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer holds the rank's own part inside
    return [value for state in inner.state.values() for value in state.values()]


def _bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the storages behind the tensors, each once, local shards only."""
    import torch
    from torch.distributed._tools.common_utils import get_untyped_storages

    seen: dict[int, int] = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            for storage in get_untyped_storages(tensor):
                seen[storage._cdata] = int(storage.nbytes())
    return sum(seen.values())


if __name__ == "__main__":
    be_a_worker()
    main(Parent())
