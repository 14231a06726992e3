"""What is wrong with a pipeline beyond its speed, each shown by what was seen."""

from __future__ import annotations

import hashlib
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from fettle.errors import first_line
from fettle.inputs.bucket import bucket_by_length, padding_waste
from fettle.inputs.growth import growing_workers
from fettle.inputs.lint import RAISES, ROWS, SECONDS, Lint, indices, rows_of
from fettle.inputs.profile import profile_rows
from fettle.units import size_text
from fettle.workload import size_bytes


def lint(loader: DataLoader[Any]) -> tuple[list[Lint], list[str]]:
    """All lints of one loader, each on a few seconds and, but for rows that raise, at most 512 rows. One that fails is
    a note, not an end."""
    faults: list[Lint] = []
    notes: list[str] = []
    checks: list[Callable[[DataLoader[Any]], list[Lint]]] = [
        rows_that_raise, duplicates, profile_rows, padding, growing_workers, getitems_differ
    ]  # fmt: skip
    for check in checks:
        try:
            faults += check(loader)
        except Exception as error:
            # A worker's traceback arrives as the text of an exception; its last line says what was wrong.
            text = str(error).strip().splitlines()[-1].strip() if "Traceback" in str(error) else first_line(error)
            notes.append(f"Looking for {check.__name__.replace('_', ' ')} ended early: {text[:200]}.")
    return faults, notes


def rows_that_raise(loader: DataLoader[Any]) -> list[Lint]:
    """Rows that cannot be read, of as many as can be tried in a few seconds; of a stream none, it ends there."""
    if isinstance(loader.dataset, IterableDataset):
        return []
    began = time.monotonic()
    tried: dict[str, str] = {}
    for row in indices(loader):
        if (name := repr(row)) not in tried:  # a sampler may give a row again and again
            tried[name] = ""
            try:
                loader.dataset[row]
            except Exception as error:
                tried[name] = first_line(error)
        if time.monotonic() - began > SECONDS:
            break
    raised = {name: why for name, why in tried.items() if why}
    if not raised:
        return []
    row, *others = raised
    more = f", and {len(others)} more: {', '.join(others[:4])}" if others else ""
    return [Lint(
        RAISES, f"A run over this data set ends with an error: item {row} raised {raised[row]}.",
        f"{len(raised):,} of {len(tried):,} rows that were read raise{'s' * (len(raised) == 1)} (item {row}{more}).",
        "fix or leave out those rows, in the data set's list of rows and not by catching the error in each epoch",
    )]  # fmt: skip


def duplicates(loader: DataLoader[Any]) -> list[Lint]:
    """An IterableDataset that every worker reads whole: two workers give each row twice, by content hash."""
    if not isinstance(loader.dataset, IterableDataset):
        return []
    few = 64
    once = Counter(_hashes(loader, 0, few))
    twice = Counter(_hashes(loader, 2, 2 * once.total()))
    repeated = [key for key in once if twice.get(key, 0) >= 2 * once[key]]
    if not once or len(repeated) < 0.5 * len(once):
        return []
    example = repeated[0]
    return [Lint(
        "duplicate-data", "Every worker gives the same rows: with N workers each row is seen N times an epoch.",
        f"of {sum(once.values())} rows read without workers, {len(repeated)} came {twice[example] // once[example]} "
        f"times from two workers (by content; for example the row with hash {example[:8]})",
        "split the stream in __iter__: itertools.islice(rows, info.id, None, info.num_workers) with "
        "info = torch.utils.data.get_worker_info()",
    )]  # fmt: skip


def padding(loader: DataLoader[Any]) -> list[Lint]:
    """Rows of unlike length padded together, what bucketing would leave, and what its longest batch would hold."""
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if isinstance(loader.dataset, IterableDataset) or not isinstance(size, int):
        return []
    lengths, row_bytes = _lengths(loader)
    if len(lengths) < 4 * size or max(lengths) == min(lengths):
        return []
    # The rows come in the loader's order: cut as it would, each batch is one that the loop would see.
    plain = [list(range(begin, min(begin + size, len(lengths)))) for begin in range(0, len(lengths), size)]
    bucketed = list(bucket_by_length(lengths, size))
    before, after = padding_waste(lengths, plain), padding_waste(lengths, bucketed)
    if before < 0.1 or before - after < 0.05:
        return []
    held = [max(max(lengths[row] for row in batch) * len(batch) for batch in batches) for batches in (plain, bucketed)]
    squares = [padding_waste(lengths, batches, power=2) for batches in (plain, bucketed)]
    return [Lint(
        "padding", f"{before:.0%} of the positions are padding.",
        f"{len(lengths)} rows of {min(lengths)} to {max(lengths)} positions, {size} a batch; {after:.0%} with rows of "
        f"like length together (in attention, by the square: {squares[0]:.0%} and {squares[1]:.0%}); the largest "
        f"batch goes from {held[0]:,} to {held[1]:,} positions ({size_text(held[0] * row_bytes)} to "
        f"{size_text(held[1] * row_bytes)} of input, {held[1] / held[0]:.2f}x, and activations with it)",
        f"DataLoader(dataset, batch_sampler=fettle.inputs.bucket_by_length(lengths, {size})); it mixes rows only "
        "within a pool of batches",
    )]  # fmt: skip


def getitems_differ(loader: DataLoader[Any]) -> list[Lint]:
    """A dataset whose `__getitems__`, which DataLoader prefers, gives other rows than its `__getitem__`."""
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or not callable(getattr(dataset, "__getitems__", None)):
        return []
    read = list(rows_of(loader, most=8))
    rows, alone = [row for row, _ in read], [item for _, item in read]
    again, together = [dataset[row] for row in rows], dataset.__getitems__(rows)
    if [_hash(item) for item in alone] != [_hash(item) for item in again]:
        return []  # random rows: nothing to compare
    wrong = [row for row, one, other in zip(rows, alone, together, strict=False) if _hash(one) != _hash(other)]
    if not wrong and len(together) == len(rows):
        return []
    what = f"rows {wrong[:4]} differ" if wrong else f"{len(together)} rows for {len(rows)} indices"
    return [Lint(
        "batch-fetch-differs", "__getitems__ of the dataset gives other rows than __getitem__.", what,
        "DataLoader calls __getitems__ where there is one: make it give the same, or take it away",
    )]  # fmt: skip


def _lengths(loader: DataLoader[Any]) -> tuple[list[int], int]:
    """Length of each row's longest sequence (tensor's or array's first axis, or list of numbers), bytes a position."""
    lengths: list[int] = []
    bytes_each = 0
    for _, item in rows_of(loader, most=4 * ROWS):
        parts = item.values() if isinstance(item, dict) else item if isinstance(item, tuple) else (item,)
        sizes = [(int(part.shape[0]), _position_bytes(part)) for part in parts if _is_sequence(part)]
        sizes += [
            (len(part), 8) for part in parts if isinstance(part, list) and part and isinstance(part[0], (int, float))
        ]
        if not sizes:
            return [], 0
        length, each = max(sizes)
        lengths.append(length)
        bytes_each = max(bytes_each, each)
    return lengths, bytes_each


def _is_sequence(part: Any) -> bool:
    """One or two axes, the first of which is the sequence; pictures have three."""
    return hasattr(part, "shape") and hasattr(part, "dtype") and 1 <= len(part.shape) <= 2 and part.shape[0] > 0


def _position_bytes(part: Any) -> int:
    return max(1, (size_bytes(part) or sys.getsizeof(part)) // max(1, int(part.shape[0])))


def _hashes(loader: DataLoader[Any], workers: int, rows: int) -> list[str]:
    """Content hashes of the first rows, the user's own way to split the stream included; without workers as many as
    can be read in a few seconds."""
    plain = DataLoader(loader.dataset, batch_size=None, num_workers=workers, worker_init_fn=loader.worker_init_fn)
    hashes: list[str] = []
    began = time.monotonic()
    for item in itertools.islice(plain, rows):
        hashes.append(_hash(item))
        if not workers and time.monotonic() - began > SECONDS:
            break
    return hashes


def _hash(item: Any) -> str:
    values = [leaf.tolist() if hasattr(leaf, "tolist") else leaf for leaf in pytree.tree_leaves(item)]
    return hashlib.sha256(repr(values).encode()).hexdigest()
