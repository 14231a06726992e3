"""The batching policy: given how many rows wait, how many to take now, and to how many to pad them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """Two tables, looked up by the batcher for every batch and by the simulation for every simulated one."""

    name: str
    take: tuple[int, ...]
    """`take[q]`: rows to take when q wait (`take[0]` is 0; the last entry stands for every longer queue)."""
    pad: tuple[int, ...]
    """`pad[n]`: rows to compute for a batch of n, at least n; as long as the largest entry of `take`, plus one."""
    delay: float = 0.0
    """Seconds to wait from the first row's arrival for a batch of `max_rows` to fill; 0 is work-conserving."""

    @property
    def max_rows(self) -> int:
        """The largest batch this policy takes."""
        return max(self.take)


def greedy(max_rows: int, delay: float = 0.0) -> Policy:
    """Take all that wait, up to `max_rows`, and never pad: what servers without a cost curve do."""
    if max_rows < 1:
        raise ValueError("a batch holds at least one row")
    every = tuple(range(max_rows + 1))
    return Policy("greedy", take=every, pad=every, delay=delay)
