"""A pipeline as its factory makes it, and the same pipeline under another setting."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.collate import default_convert

from fettle.errors import UsageError, first_line, refusing, type_text
from fettle.inputs.setting import AS_GIVEN, BATCH_INDEX, ONE_BY_ONE, Setting
from fettle.workload import find_target, leaves, size_bytes

Step = Callable[[Any], Any]


def pipeline(target: str) -> tuple[DataLoader[Any], Step | None]:
    """What the factory returns: a loader, a dataset, or (loader or dataset, step)."""
    torch.manual_seed(0)
    factory = find_target(target).function()
    with refusing(f"{target} raised", (Exception, SystemExit)):  # a script may leave
        loader = factory()
    step = None
    if isinstance(loader, tuple) and len(loader) == 2 and callable(loader[1]):
        loader, step = loader
    if isinstance(loader, torch.utils.data.Dataset):
        loader = DataLoader(loader, batch_size=32)
    if not isinstance(loader, DataLoader):
        raise UsageError(f"{target} returned {type_text(loader)}, not a DataLoader, a dataset, or (loader, step)")
    return loader, step


def with_setting(loader: DataLoader[Any], setting: Setting) -> DataLoader[Any]:
    """The same loader with another setting: a copy, so that subclasses and all other arguments stay."""
    changed = copy.copy(loader)
    # Not by attribute: a DataLoader refuses to change some of these, as its iterators rely on them; a copy has none.
    changed.__dict__.update(
        num_workers=setting.num_workers, prefetch_factor=setting.prefetch_factor if setting.num_workers else None,
        persistent_workers=bool(setting.num_workers) and setting.persistent_workers, pin_memory=setting.pin_memory,
        _iterator=None,
    )  # fmt: skip
    if not setting.num_workers:
        changed.__dict__["timeout"] = 0
    if setting.fetch == BATCH_INDEX:
        changed.__dict__.update(
            batch_size=None, drop_last=False, sampler=loader.batch_sampler, batch_sampler=None,
            collate_fn=default_convert,
        )  # fmt: skip
    if setting.fetch == ONE_BY_ONE:
        dataset: Any = copy.copy(loader.dataset)
        dataset.__getitems__ = None
        changed.__dict__["dataset"] = dataset
    return changed


def fetches(loader: DataLoader[Any]) -> tuple[list[str], list[str]]:
    """Ways to fetch rows that give the very same batches, shown on the first three; and what was seen against a way."""
    ways: list[str] = [AS_GIVEN]
    notes: list[str] = []
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None or type(loader) is not DataLoader:
        return ways, notes
    try:
        batches = [list(batch) for batch in itertools.islice(iter(loader.batch_sampler), 3)]
        rows = [loader.collate_fn([loader.dataset[row] for row in batch]) for batch in batches]
        again = [loader.collate_fn([loader.dataset[row] for row in batch]) for batch in batches[:1]]
    except Exception:
        return ways, notes  # it fails in a run too, which gives the reason
    try:
        alike = _same(rows[:1], again)
    except Exception:  # a class of the user's that cannot be compared
        alike = False
    if not batches or not alike:
        return ways, ["batch fetching was not tried: read twice, a batch does not compare as equal (random rows?)"]
    if callable(getattr(loader.dataset, "__getitems__", None)):
        try:
            whole = [loader.collate_fn(loader.dataset.__getitems__(batch)) for batch in batches]  # type: ignore[attr-defined]
        except Exception as error:
            return ways, [f"__getitems__ of the dataset raised {first_line(error)}"]
        if not _same(whole, rows):
            notes.append("__getitems__ gives other batches than __getitem__ row by row: one of them is wrong")
        else:
            ways.append(ONE_BY_ONE)
    if getattr(loader.dataset, "__len__", None) is not None and loader.generator is None:
        try:
            indexed = [default_convert(loader.dataset[batch]) for batch in batches]  # type: ignore[no-untyped-call]
        except Exception:
            return ways, notes  # most datasets take one index
        if _same(indexed, rows):
            ways.append(BATCH_INDEX)
    return ways, notes


def batch_bytes(batch: Any) -> int:
    """Bytes of a batch's tensors and arrays."""
    return sum(size_bytes(leaf) for _, leaf in leaves(batch))


def _same(one: Any, other: Any) -> bool:
    """Whether two batches hold the same values in the same structure. A collate function may return any class."""
    mine, theirs = list(leaves(one)), list(leaves(other))
    if len(mine) != len(theirs) or pytree.tree_structure(one) != pytree.tree_structure(other):
        return False
    pairs = zip(mine, theirs, strict=True)
    return all(path == place and _same_leaf(leaf, its) for (path, leaf), (place, its) in pairs)


def _same_leaf(one: Any, other: Any) -> bool:
    """NaN is the same as NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (torch.Tensor, np.ndarray)) and (one.dtype != other.dtype or one.shape != other.shape):
        return False
    if isinstance(one, torch.Tensor):
        exact = not (one.is_floating_point() or one.is_complex())
        return torch.equal(one, other) if exact else torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    if isinstance(one, np.ndarray):
        return _same(one.tolist(), other.tolist()) if one.dtype.hasobject else one.tobytes() == other.tobytes()
    return bool(one == other) or (one != one and other != other)
