"""Closed formulas beside the simulation: what the model's states hold per rank, and what a rank sends.

Sources: the memory of a step by ZeRO stage is in Rajbhandari et al., ZeRO, arXiv 1910.02054, section 5 and figure 1
(for Adam in mixed precision 16 bytes a parameter: 2 + 2 + 12; in plain float32, as PyTorch trains, also 16: 4 + 4 + 8).
The bytes that ring collectives send are those of Patarasuk and Yuan, 2009: an all-reduce of S bytes over n ranks sends
2 S (n-1)/n from each rank, an all-gather or a reduce-scatter S (n-1)/n. Of DDP also its reducer as a plan sees it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from fettle.parallel.strategies import Strategy
from fettle.parallel.timeline import Collective, Timeline

_STATE_TENSORS = {"SGD": 0, "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "RMSprop": 1, "Adagrad": 1, "Adamax": 2}


def state_tensors(optimizer_name: str, defaults: dict[str, object]) -> int | None:
    """How many tensors of a parameter's size the optimizer keeps for it; None where no formula is known here."""
    count = _STATE_TENSORS.get(optimizer_name)
    if count is None:
        return None
    return count + sum(bool(defaults.get(extra)) for extra in ("momentum", "amsgrad", "centered"))


def states_bytes(kind: str, ranks: int, all_bytes: int, trained_bytes: int, states: int | None) -> int | None:
    """Bytes of parameters, gradients and optimizer state that a rank keeps from one step to the next.

    ``ddp`` P+G+O; ``zero1`` P+G+O/n; ``zero2`` and ``zero3`` (P+G+O)/n, as FSDP2 keeps shards only (zero2 holds the
    gathered P besides, from forward to backward). `ranks` is how many ranks share one copy. Where matrices are split as
    well, the bytes given are those of one slice.
    """
    if states is None:
        return None
    parameters, gradients, optimizer = all_bytes, trained_bytes, states * trained_bytes
    if kind in ("single", "ddp", "tensor"):
        return parameters + gradients + optimizer
    if kind == "zero1":
        return parameters + gradients + optimizer // ranks
    return (parameters + gradients + optimizer) // ranks


def bucket_sizes(sizes: Sequence[int]) -> list[int]:
    """DDP's buckets: gradients in reverse order, closed when they reach 1 MiB (the first) or 25 MiB.

    `sizes` are bytes of the parameters in the model's order, of one type. The order in which gradients become ready
    decides the buckets from the second step on, so a real run may have one bucket more or less.
    """
    buckets, now, limit = [], 0, 1 << 20
    for size in reversed(sizes):
        now += size
        if now >= limit:
            buckets.append(now)
            now, limit = 0, 25 << 20
    return [*buckets, now] if now else buckets


def largest_partition(sizes: Sequence[int], ranks: int) -> list[int]:
    """Indices that ZeroRedundancyOptimizer gives to its fullest rank: the largest first, each to the emptiest rank."""
    heap = [(0, rank) for rank in range(ranks)]
    held: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for index in sorted(range(len(sizes)), key=lambda i: sizes[i], reverse=True):
        total, rank = heapq.heappop(heap)
        held[rank].append(index)
        totals[rank] = total + sizes[index]
        heapq.heappush(heap, (totals[rank], rank))
    return held[max(range(ranks), key=lambda rank: totals[rank])]


def sent_bytes(collectives: Iterable[Collective], mesh: Mapping[str, int], ranks_per_node: int) -> tuple[int, int]:
    """Bytes that one rank sends in a step, and bytes that leave one node, both for ring collectives.

    On a mesh of two dimensions the first is between nodes, one ring for each rank of a node, and the second within
    each. Shards are gathered and reduced over theirs; all-reduces run over the other. A ring over many nodes crosses
    each node's border once.
    """
    total = between = 0.0
    ranks = math.prod(mesh.values())
    first, *_ = mesh
    other = next((name for name in mesh if name != "shard"), first)
    for item in collectives:
        over = other if item.name == "all_reduce" or "shard" not in mesh else "shard"
        group = mesh[over]
        sent = (2 if item.name == "all_reduce" else 1) * item.bytes * (group - 1) / group
        total += sent
        if ranks > ranks_per_node and over == first:
            between += sent * ranks / group
    return round(total), round(between)


def ddp_buckets(trained: list[torch.nn.Parameter], strategy: Strategy, timeline: Timeline) -> None:
    """DDP's flat buckets, and what its reducer does with a gradient as soon as it is there."""
    with timeline.phase("before"):
        views = _bucket_views(trained)
        timeline.see(views, "gradients" if strategy.buckets == "view" else "transients", final=True)
        if strategy.compress == "powersgd":
            errors = [torch.empty_like(view) for view in views]  # the error that PowerSGD carries to the next step
            timeline.see(errors, "transients", final=True)
            views[0]._fettle_errors = errors  # type: ignore[attr-defined]
    sent: list[torch.Tensor] = []

    def ready(view: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            with torch.no_grad():
                view.copy_(parameter.grad)
                if strategy.buckets == "view":
                    parameter.grad = view
                if strategy.compress == "fp16":
                    sent.append(view.to(torch.float16))  # an upper bound: all are still on their way at the end
                    timeline.see(sent[-1], "transients", final=True)

        return hook

    for parameter, view in zip(trained, views, strict=True):
        parameter.register_post_accumulate_grad_hook(ready(view))  # type: ignore[no-untyped-call]


def _bucket_views(trained: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """One view a parameter into flat buckets, one bucket set for each type."""
    views: dict[int, torch.Tensor] = {}
    for dtype in {p.dtype for p in trained}:
        same = [p for p in trained if p.dtype == dtype]
        left = list(reversed(same))
        for size in bucket_sizes([p.numel() * p.element_size() for p in same]):
            flat = torch.empty(size // left[0].element_size(), dtype=dtype)
            offset = 0
            while offset < flat.numel():
                parameter = left.pop(0)
                views[id(parameter)] = flat[offset : offset + parameter.numel()].view(parameter.shape)
                offset += parameter.numel()
    return [views[id(p)] for p in trained]


def collectives_of_ddp(model: torch.nn.Module, strategy: Strategy) -> list[Collective]:
    """What DDP sends in a step, and ZeRO-1 after it."""
    if strategy.kind not in ("ddp", "zero1"):
        return []
    trained = [p for p in model.parameters() if p.requires_grad]
    sizes = [p.numel() * p.element_size() for p in trained]
    divisor = 2 if strategy.compress == "fp16" and trained[0].element_size() == 4 else 1
    made = [Collective("all_reduce", size // divisor) for size in bucket_sizes(sizes)]
    if strategy.kind == "zero1":  # the owner of each parameter sends its new value to all
        made += [Collective("broadcast", size) for size in sizes]
    return made
