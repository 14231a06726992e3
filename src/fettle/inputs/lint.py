"""One lint, and the rows of a loader that lints read."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

ROWS = 512
"""Rows that a lint reads at most."""
SECONDS = 3.0
"""Time that a lint reads rows at most."""
RAISES = "row-raises"
"""The lint that comes first: a run would end there."""


@dataclass(frozen=True)
class Lint:
    """One thing that is wrong, its evidence, and what to do."""

    name: str
    says: str
    evidence: str
    advice: str


def rows_of(loader: DataLoader[Any], most: int) -> Iterator[tuple[Any, Any]]:
    """Rows in the order in which the loader would read them, with their index (None in a stream)."""
    began = time.monotonic()
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        pairs: Iterator[tuple[Any, Any]] = ((None, row) for row in dataset)
    else:
        pairs = ((index, dataset[index]) for index in indices(loader))
    for pair in itertools.islice(pairs, most):
        yield pair
        if time.monotonic() - began > SECONDS:
            return


def indices(loader: DataLoader[Any]) -> Iterator[Any]:
    """Row indices in the loader's own order."""
    if loader.batch_sampler is not None:
        return itertools.chain.from_iterable(loader.batch_sampler)
    return iter(loader.sampler)
