"""One rank: build the workload, apply the strategy, train a few steps, tell what it held at its peak.

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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fettle.procs.parent import Parent, be_a_worker
from fettle.train.allocations import allocations, peak_of
from fettle.train.strategies_launch import RankResult, Train

if TYPE_CHECKING:
    import torch

_STEP = "fettle.step"


def main(parent: Parent) -> None:
    """Answer as rank RANK of WORLD_SIZE, as torchrun's environment says; alone without it."""
    parent.serve(Train, lambda request: _train(request, parent.stage))


def _train(request: Train, stage: Callable[[str], None]) -> RankResult:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.profiler import record_function

    from fettle.train.strategies import apply, make_optimizer, mesh_shape, parse_strategy, precision_context
    from fettle.train.workload import load_training

    strategy = parse_strategy(request.strategy)
    stage("joining the other ranks")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        with _recording(request.record, request.steps) as record:
            stage("building the workload")
            workload = load_training(request.target)
            shape = mesh_shape(strategy, world, request.ranks_per_node)
            names = ("replicate", "shard")[-len(shape) :]
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names) if strategy.sharded else None
            stage(f"applying {strategy.kind}")
            model = apply(workload.model, strategy, mesh)
            optimizer = make_optimizer(model, strategy, workload.optimizer)
            batch = workload.first
            losses, step_ms, states = [], [], dict[str, int]()

            def step(number: int) -> torch.Tensor:
                stage(f"forward of step {number}")
                with precision_context(strategy, "cpu"):
                    loss = workload.loss(model, batch)
                stage(f"backward of step {number}")
                loss.backward()  # type: ignore[no-untyped-call]
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
            with CommDebugMode() as counting:  # type: ignore[no-untyped-call]
                step(request.steps + 1)
            counts = {str(op).split(".")[-1]: n for op, n in counting.get_comm_counts().items()}
        stage("done")
        return RankResult(rank, record.peak_bytes, states, losses, step_ms, counts, record.highest_bytes)
    finally:
        if sys.exc_info()[0] is None:
            dist.destroy_process_group()


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
    with allocations() as taken:
        yield record
    events = taken()
    peaks = [peak_of(events, within=f"{_STEP} {number}") for number in range(steps)]
    record.peak_bytes, record.highest_bytes = statistics.median_low(peaks[1:] or peaks), max(peaks)


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
