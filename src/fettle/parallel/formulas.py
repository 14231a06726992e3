"""Closed formulas beside the simulation: what the model's states hold per rank, and what a rank sends.

Sources: the memory of a step by ZeRO stage is in Rajbhandari et al., ZeRO, arXiv 1910.02054, section 5 and figure 1
(for Adam in mixed precision 16 bytes a parameter: 2 + 2 + 12; in plain float32, as PyTorch trains, also 16: 4 + 4 + 8).
The bytes that ring collectives send are those of Patarasuk and Yuan, 2009: an all-reduce of S bytes over n ranks sends
2 S (n-1)/n from each rank, an all-gather or a reduce-scatter S (n-1)/n.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fettle.parallel.timeline import Collective

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
    gathered P besides, from forward to backward). `ranks` is how many ranks share one copy.
    """
    if states is None:
        return None
    parameters, gradients, optimizer = all_bytes, trained_bytes, states * trained_bytes
    if kind in ("single", "ddp"):
        return parameters + gradients + optimizer
    if kind == "zero1":
        return parameters + gradients + optimizer // ranks
    return (parameters + gradients + optimizer) // ranks


def bucket_sizes(sizes: Sequence[int], first: int = 1 << 20, rest: int = 25 << 20) -> list[int]:
    """DDP's buckets: gradients in reverse order, closed when they reach 1 MiB (the first) or 25 MiB.

    `sizes` are bytes of the parameters in the model's order, of one type. The order in which gradients become ready
    decides the buckets from the second step on, so a real run may have one bucket more or less.
    """
    buckets, now, limit = [], 0, first
    for size in reversed(sizes):
        now += size
        if now >= limit:
            buckets.append(now)
            now, limit = 0, rest
    return [*buckets, now] if now else buckets


def largest_partition(sizes: Sequence[int], ranks: int) -> list[int]:
    """Indices that ZeroRedundancyOptimizer gives to its fullest rank: the largest first, each to the emptiest rank."""
    import heapq

    heap = [(0, rank) for rank in range(ranks)]
    held: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for index in sorted(range(len(sizes)), key=lambda i: sizes[i], reverse=True):
        total, rank = heapq.heappop(heap)
        held[rank].append(index)
        totals[rank] = total + sizes[index]
        heapq.heappush(heap, (totals[rank], rank))
    return held[max(range(ranks), key=lambda rank: totals[rank])]


def sent_bytes(collectives: Iterable[Collective], mesh: Sequence[int], ranks_per_node: int) -> tuple[int, int]:
    """Bytes that one rank sends in a step, and bytes that leave one node, both for ring collectives.

    On a mesh of two dimensions an all-reduce runs over the first (between nodes, one ring for each rank of a node),
    the others over the second. A ring over many nodes crosses each node's border once.
    """
    total = between = 0.0
    ranks = 1
    for size in mesh:
        ranks *= size
    many_nodes = ranks > ranks_per_node
    for item in collectives:
        across = len(mesh) == 1 or item.name == "all_reduce"
        group = mesh[0] if across else mesh[1]
        sent = (2 if item.name == "all_reduce" else 1) * item.bytes * (group - 1) / group
        total += sent
        if many_nodes and across:
            between += sent * (mesh[1] if len(mesh) == 2 else 1)
    return round(total), round(between)
