"""What is wrong with a pipeline beyond its speed, each shown by what was seen."""

from __future__ import annotations

import cProfile
import hashlib
import itertools
import pstats
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from fettle.inputs.bucket import bucket_by_length, padding_waste

_ROWS = 512


@dataclass(frozen=True)
class Lint:
    """One thing that is wrong, its evidence, and what to do."""

    name: str
    says: str
    evidence: str
    advice: str


def lint(loader: DataLoader[Any], step: Callable[[Any], Any] | None = None) -> list[Lint]:
    """All lints of one loader, on at most 512 rows."""
    del step
    found = [duplicates(loader), big_lists(loader), slow_function(loader), padding(loader)]
    return [item for item in found if item is not None]


def duplicates(loader: DataLoader[Any]) -> Lint | None:
    """An IterableDataset that every worker reads whole: two workers give each row twice, by content hash."""
    if not isinstance(loader.dataset, IterableDataset):
        return None
    few = 64
    rows = [Counter(_hashes(loader, workers, few)) for workers in (0, 2)]
    once, twice = rows[0], rows[1]
    repeated = [key for key in once if twice.get(key, 0) >= 2 * once[key]]
    if len(repeated) < 0.5 * min(len(once), few // 2) or not once:
        return None
    return Lint(
        "duplicate-data", "Every worker gives the same rows: with N workers each row is seen N times.",
        f"of {len(once)} rows read without workers, {len(repeated)} came twice from two workers",
        "split the stream by torch.utils.data.get_worker_info() in __iter__",
    )  # fmt: skip


def big_lists(loader: DataLoader[Any]) -> Lint | None:
    """Python lists and dicts of many objects in the dataset: each worker comes to hold a copy (reference counts)."""
    for name, value in vars(loader.dataset).items() if hasattr(loader.dataset, "__dict__") else ():
        if isinstance(value, (list, dict)) and len(value) >= 100_000:
            sample = list(itertools.islice(value.values() if isinstance(value, dict) else value, 1000))
            if sample and not isinstance(sample[0], (int, float, bool)):
                size = sum(sys.getsizeof(item) for item in sample) / len(sample) * len(value)
                return Lint(
                    "growing-workers", f"The dataset holds {len(value):,} Python objects in .{name}.",
                    f"about {size / 2**20:.0f} MiB, which each forked worker comes to copy as it reads them",
                    "keep them as one NumPy array or tensor (strings as bytes with offsets)",
                )  # fmt: skip
    return None


def slow_function(loader: DataLoader[Any]) -> Lint | None:
    """The function that takes most of an item's time, by profile; told where it takes more than half."""
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        return None
    profile = cProfile.Profile()
    count = min(_ROWS, len(loader.dataset))
    with profile:
        for row in range(count):
            loader.dataset[row]
    stats: Any = pstats.Stats(profile)
    spent = {place: row[2] for place, row in stats.stats.items() if row[2] > 0}
    total = sum(spent.values())
    if not spent or total / count < 2e-4:
        return None
    place, own = max(spent.items(), key=lambda item: item[1])
    if own < 0.5 * total:
        return None
    where = f"{place[2]} at {place[0].rpartition('/')[2]}:{place[1]}" if place[1] else place[2]
    return Lint(
        "slow-transform", f"Most of an item's time goes into {where}.",
        f"{own / total:.0%} of {total / count * 1e3:.2f} ms an item, over {count} items",
        "make that faster first: do it once beforehand, on whole batches, or in fewer steps",
    )  # fmt: skip


def padding(loader: DataLoader[Any]) -> Lint | None:
    """Rows of unlike length padded together, and what bucketing would leave."""
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__") or not loader.batch_size:
        return None
    lengths = _lengths(loader.dataset)
    if len(lengths) < 4 * loader.batch_size or max(lengths) == min(lengths):
        return None
    rows = [row for row in itertools.islice(iter(loader.sampler), len(lengths)) if row < len(lengths)]
    size = loader.batch_size
    before = padding_waste(lengths, [rows[begin : begin + size] for begin in range(0, len(rows), size)])
    after = padding_waste(lengths, list(bucket_by_length(lengths, size)))
    if before < 0.1 or before - after < 0.05:
        return None
    return Lint(
        "padding", f"{before:.0%} of the positions would be padding.",
        f"{len(lengths)} rows of {min(lengths)} to {max(lengths)}; {after:.0%} with rows of like length together",
        "DataLoader(dataset, batch_sampler=fettle.inputs.bucket_by_length(lengths, batch_size)); peak memory may rise",
    )  # fmt: skip


def _lengths(dataset: Any) -> Sequence[int]:
    """Length of each row's first one-dimensional part; empty where rows have none."""
    lengths = []
    for row in range(min(_ROWS * 4, len(dataset))):
        item = dataset[row]
        parts = item.values() if isinstance(item, dict) else item if isinstance(item, (tuple, list)) else (item,)
        part = next((p for p in parts if isinstance(p, torch.Tensor) and p.dim() == 1), None)
        if part is None:
            return []
        lengths.append(int(part.numel()))
    return lengths


def _hashes(loader: DataLoader[Any], workers: int, rows: int) -> list[str]:
    """Content hashes of the first rows."""
    plain = DataLoader(loader.dataset, batch_size=None, num_workers=workers)
    limit = rows * max(1, workers)
    return [hashlib.sha256(repr(_values(item)).encode()).hexdigest() for item in itertools.islice(plain, limit)]


def _values(item: Any) -> Any:
    from torch.utils import _pytree as pytree

    return [leaf.tolist() if hasattr(leaf, "tolist") else leaf for leaf in pytree.tree_leaves(item)]
