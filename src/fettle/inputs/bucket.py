"""Batches of rows of like length, so that little is padded.

A pool of batches is drawn at random, sorted by length, cut into batches, and the batches are shuffled: rows stay
random beyond the pool, and the order of batches says nothing of their length.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from fettle.errors import UsageError


class LengthBuckets:
    """A batch sampler: pass it as ``DataLoader(dataset, batch_sampler=...)``. Call `set_epoch` for another order.

    `lengths` is the length of each row of the dataset, in its order. A larger `pool` (batches sorted at once) pads less
    and mixes less; the longest batch is then as long as the longest row, full: peak memory may rise.

    With several ranks each gets its own batches, the same number on each; the batches that do not divide evenly are
    dropped or, without `drop_last`, filled up by repeating the first ones, as `DistributedSampler` does with rows.
    """

    def __init__(
        self, lengths: Sequence[int], batch_size: int, *, pool: int = 50, shuffle: bool = True, seed: int = 0,
        drop_last: bool = False, rank: int = 0, ranks: int = 1,
    ) -> None:  # fmt: skip
        if not len(lengths):
            raise UsageError("bucket_by_length: there are no lengths")
        if batch_size < 1 or pool < 1:
            raise UsageError(f"bucket_by_length: batch_size {batch_size} and pool {pool} must be 1 or more")
        if not 0 <= rank < ranks:
            raise UsageError(f"bucket_by_length: rank {rank} of {ranks} ranks")
        if any(length < 0 for length in lengths):
            raise UsageError("bucket_by_length: a length is negative")
        self.lengths, self.batch_size, self.pool = list(lengths), batch_size, pool
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.rank, self.ranks, self.epoch = rank, ranks, 0

    def set_epoch(self, epoch: int) -> None:
        """Another epoch, another order; the same epoch and seed give the same batches on every rank."""
        self.epoch = epoch

    def __len__(self) -> int:
        whole, rest = divmod(len(self.lengths), self.batch_size)
        batches = whole + bool(rest and not self.drop_last)
        return batches // self.ranks if self.drop_last else -(-batches // self.ranks)

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._all()
        if self.drop_last:
            batches = batches[: len(batches) // self.ranks * self.ranks]
        elif batches:
            missing = -len(batches) % self.ranks
            batches += [batches[index % len(batches)] for index in range(missing)]
        yield from batches[self.rank :: self.ranks]

    def _all(self) -> list[list[int]]:
        generator = random.Random(f"{self.seed}-{self.epoch}")
        rows = list(range(len(self.lengths)))
        if self.shuffle:
            generator.shuffle(rows)
        size, batches, odd = self.batch_size * self.pool, [], []
        for begin in range(0, len(rows), size):
            part = sorted(rows[begin : begin + size], key=lambda row: self.lengths[row])
            cut = [part[start : start + self.batch_size] for start in range(0, len(part), self.batch_size)]
            if cut and len(cut[-1]) < self.batch_size:
                odd = cut.pop()
            batches += cut
        if self.shuffle:
            generator.shuffle(batches)
        return batches if self.drop_last or not odd else [*batches, odd]


bucket_by_length = LengthBuckets


def padding_waste(lengths: Sequence[int], batches: Sequence[Sequence[int]], *, power: int = 1) -> float:
    """Share of positions that are padding, each batch as long as its longest row: 1 - sum(len) / sum(max * n).

    `power` 2 gives the share for what grows with the square of the length, as attention does.
    """
    filled = sum(lengths[row] ** power for batch in batches for row in batch)
    taken = sum(max((lengths[row] for row in batch), default=0) ** power * len(batch) for batch in batches)
    return 1 - filled / taken if taken else 0.0
