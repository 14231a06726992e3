"""Memory that loader workers come to hold: copies of what they were forked with, and leaks.

A forked worker shares its parent's memory until it writes to it, and Python writes to every object that it touches:
the reference count lies in the object. One worker reads the same rows again and again. What grows in the first pass and
then stays is such a copy (or a cache); what grows in each pass is a leak.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
from torch.utils.data import DataLoader, IterableDataset

from fettle.inputs.lint import Lint, indices
from fettle.procs.limits import granted_memory_bytes
from fettle.units import size_text
from fettle.workload import is_shared

_MANY = 100_000
"""Python objects in one container from which on copies are worth a look."""
_PASSES = 3
_ROWS = 4096
_SECONDS = 2.0
_LEAST = 4 << 20
"""Growth of fewer bytes is noise."""


def growing_workers(loader: DataLoader[Any]) -> list[Lint]:
    """Large containers of Python objects in the dataset, and workers that grow with each pass over the same rows."""
    if isinstance(loader.dataset, IterableDataset):
        return []
    big = big_containers(loader.dataset)
    sizes, rows = _grow(loader)
    lints = []
    steps = [after - before for before, after in itertools.pairwise(sizes)]
    if len(steps) >= 2 and all(step > max(_LEAST / 4, 0.25 * max(steps[1:])) for step in steps[1:]) and (
        sum(steps[1:]) > _LEAST
    ):  # fmt: skip
        each, room = sum(steps[1:]) / len(steps[1:]) / rows, granted_memory_bytes()
        lints.append(Lint(
            "leaking-worker", "A worker holds more memory with every row it reads.",
            f"reading the same {rows:,} rows again and again it held " + ", ".join(size_text(size) for size in sizes)
            + f" of its own: {size_text(each)} a row, so that {room / max(each, 1):,.0f} rows fill what is free now",
            "find what the dataset keeps: a cache without a limit, a growing list, files left open",
        ))  # fmt: skip
    if big:
        name, count, held = big
        grew = steps[0] if steps else 0
        seen = (
            f"; a worker that read {rows:,} rows came to hold {size_text(grew)} more of its own"
            if grew > _LEAST / 4 else ""
        )  # fmt: skip
        lints.append(Lint(
            "growing-workers", f"The dataset holds {count:,} Python objects in {name}.",
            f"about {size_text(held)}, which each forked worker comes to copy as it reads them: touching an object "
            f"writes its reference count{seen}",
            "keep them as one NumPy array or tensor (strings as bytes with offsets)",
        ))  # fmt: skip
    return lints


def big_containers(dataset: Any) -> tuple[str, int, int] | None:
    """The largest list, tuple or dict of objects in the dataset or in the datasets it wraps: name, objects, bytes."""
    best: tuple[str, int, int] | None = None
    for name, value in _containers(dataset, "", 3):
        values = value.values() if isinstance(value, dict) else value
        sample = list(itertools.islice(values, 0, None, max(1, len(value) // 1000)))[:1000]
        if all(is_shared(item) for item in sample):
            continue
        size = int(sum(_deep_size(item) for item in sample) / len(sample) * len(value))
        if isinstance(value, dict):
            keys = list(itertools.islice(value, 1000))
            size += int(sum(sys.getsizeof(key) for key in keys) / len(keys) * len(value))
        if best is None or size > best[2]:
            best = (name, len(value), size)
    return best


def _containers(owner: Any, prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        if isinstance(value, (list, tuple, dict)):
            if len(value) >= _MANY:
                yield f"{prefix}.{name}", value
            elif depth and isinstance(value, (list, tuple)) and len(value) <= 64:
                for number, part in enumerate(value):
                    yield from _containers(part, f"{prefix}.{name}[{number}]", depth - 1)
        elif depth and hasattr(value, "__getitem__") and hasattr(value, "__dict__"):
            yield from _containers(value, f"{prefix}.{name}", depth - 1)


def _deep_size(item: Any) -> int:
    """Bytes of one entry, with what a tuple, list or dict in it holds."""
    size = sys.getsizeof(item)
    if isinstance(item, (list, tuple)):
        size += sum(sys.getsizeof(part) for part in item[:100])
    elif isinstance(item, dict):
        size += sum(sys.getsizeof(part) for pair in list(item.items())[:100] for part in pair)
    return size


def _grow(loader: DataLoader[Any]) -> tuple[list[int], int]:
    """A worker's own memory (USS) at the first batch and after each pass over the same rows; and how many rows."""
    rows = list(itertools.islice(indices(loader), _ROWS))
    if not rows:
        return [], 0
    began = time.monotonic()
    taken = 0
    for row in rows[:64]:  # how long a row takes here says how many a pass may have
        loader.dataset[row]
        taken += 1
        if time.monotonic() - began > _SECONDS / 4:
            break
    each = (time.monotonic() - began) / taken
    rows = rows[: max(4, min(len(rows), int(_SECONDS / max(each, 1e-7))))]
    plain: DataLoader[Any] = DataLoader(
        loader.dataset, batch_size=None, sampler=rows * _PASSES, num_workers=1, collate_fn=_collate_nothing,
        worker_init_fn=loader.worker_init_fn, multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=2,
    )  # fmt: skip
    sizes: list[int] = []
    before = {child.pid for child in psutil.Process().children()}
    for number, _ in enumerate(plain):
        if number == 0 or (number + 1) % len(rows) == 0:
            workers = [child for child in psutil.Process().children() if child.pid not in before]
            sizes.append(max((worker.memory_full_info().uss for worker in workers), default=0))
    return sizes, len(rows)


def _collate_nothing(row: Any) -> int:
    """In place of the collate function: the bytes of the rows on their way do not matter here."""
    del row
    return 0
