"""Sample inputs as people have them, read for what they plainly are.

A list is a list of batches. Anything else is one batch: a tuple of positional arguments, a dict of keyword arguments,
or the one argument. Of a DataLoader the first batches are taken. Where the model's signature says that this reading
cannot be meant, the caller is asked, with the spellings there are.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from fettle.errors import UsageError, type_text

FROM_LOADER = 8
"""Batches that are taken of a DataLoader: half of them may calibrate, the others judge."""


@dataclass(frozen=True)
class Batches:
    """The batches, and in one line what they were taken for."""

    items: Sequence[Any]
    taken_for: str


def read_batches(inputs: Any, model: Any = None, call: Callable[..., Any] | None = None) -> Batches:
    """The batches in `inputs` for a `model`, which is called by `call` where that is given.

    Raises `UsageError` for what is not an input, and for what the model cannot take as it is read.
    """
    takes = _Signature.of(model, call)
    if inputs is None or isinstance(inputs, (Iterator, Set)):
        raise UsageError(
            f"the inputs are {type_text(inputs)}: inputs must be a list of batches, for example inputs=[batch], one "
            "batch, or a DataLoader"
        )
    items: Sequence[Any]
    data = sys.modules.get("torch.utils.data")  # where nobody has imported it, nobody has a loader
    if data is not None and isinstance(inputs, data.Dataset):
        kind = type(inputs).__name__
        raise UsageError(f"the inputs are a data set, {kind}: write inputs=DataLoader(dataset, batch_size=8)")
    if data is not None and isinstance(inputs, data.DataLoader):
        items = [_from_loader(batch, takes) for batch in itertools.islice(inputs, FROM_LOADER)]
        return Batches(_some(items), f"the DataLoader's first {_describe(items)}")
    if isinstance(inputs, Sequence) and not isinstance(inputs, (str, bytes, tuple)):
        items = [_plain(batch) for batch in inputs]
        _check_list(items, takes)
        return Batches(_some(items), _describe(items))
    if isinstance(inputs, tuple) and not inputs:
        return Batches(_some([]), "")
    batch = _plain(inputs)
    _check_one(batch, takes)
    return Batches([batch], _describe([batch]))


def misread(batch: Any, model: Any, call: Callable[..., Any] | None = None) -> str:
    """Where a batch in a list has more entries than the model takes arguments, or other names: how else the list may be
    written; else empty. Asked only after the model has refused the batch, for hooks may turn it into what it takes."""
    takes = _Signature.of(model, call)
    if takes is None:
        return ""
    if _is_keywords(batch):
        return _odd_names(batch, takes, "each batch is", "[(batch,) for batch in inputs]", "batches")
    many = takes.most is not None and _is_arguments(batch) and len(batch) > takes.most
    return _entries(batch, takes, "", "inputs") if many else ""


@dataclass(frozen=True)
class _Signature:
    """What a model takes, as far as a Python function says so."""

    name: str
    least: int
    most: int | None
    """Positional arguments; None for any number."""
    names: frozenset[str] | None
    """Keyword arguments; None for any."""

    @classmethod
    def of(cls, model: Any, call: Callable[..., Any] | None) -> _Signature | None:
        """None where it is unknown."""
        own = type(model).__call__ if callable(model) else None
        is_torchs = str(getattr(own, "__module__", "")).startswith("torch.")  # and calls `forward`
        function = call or (getattr(model, "forward", model) if is_torchs else model)
        if not inspect.isroutine(function) or inspect.isbuiltin(function):
            return None
        try:
            every = list(inspect.signature(function).parameters.values())[call is not None :]
        except (TypeError, ValueError):
            return None
        kinds = inspect.Parameter
        positional = [p for p in every if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
        named = [p.name for p in every if p.kind in (kinds.KEYWORD_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
        any_number = any(p.kind == kinds.VAR_POSITIONAL for p in every)
        any_name = any(p.kind == kinds.VAR_KEYWORD for p in every)
        spelled = f"{getattr(function, '__name__', 'call')}({', '.join(map(_spelling, every))})"
        return cls(
            spelled, sum(p.default is kinds.empty for p in positional), None if any_number else len(positional),
            None if any_name else frozenset(named),
        )  # fmt: skip

    def fits(self, count: int) -> bool:
        """Whether it can be called with so many positional arguments."""
        return self.least <= count and (self.most is None or count <= self.most)


def _spelling(parameter: inspect.Parameter) -> str:
    stars = "*" * (parameter.kind == parameter.VAR_POSITIONAL) + "**" * (parameter.kind == parameter.VAR_KEYWORD)
    default = "" if parameter.default is inspect.Parameter.empty else "=..."
    return f"{stars}{parameter.name}{default}"


def _check_one(batch: Any, takes: _Signature | None) -> None:
    """One batch that is not a list."""
    if takes is None:
        return
    if _is_arguments(batch) and not takes.fits(len(batch)):
        raise UsageError(
            f"the inputs are a tuple of {len(batch)}, and the model is called {takes.name}: write "
            f"inputs=[{_letters(len(batch))}] for {len(batch)} batches of one argument, or "
            f"inputs=[(({_letters(len(batch))}),)] for one batch whose one argument is the tuple"
        )
    if _is_keywords(batch) and (why := _odd_names(batch, takes, "the inputs are", "[(batch,)]", "one batch")):
        raise UsageError(why)


def _odd_names(batch: Any, takes: _Signature, whose: str, spelled: str, what: str) -> str:
    """What to write where keyword arguments have other names than the model's; empty where they have not."""
    if takes.names is None or batch.keys() <= takes.names:
        return ""
    return (
        f"{whose} a dict with {', '.join(sorted(batch.keys() - takes.names))}, which is not an argument of the model, "
        f"called {takes.name}: write inputs={spelled} for {what} whose one argument is the dict, or use the names of "
        "its arguments"
    )


def _check_list(items: Sequence[Any], takes: _Signature | None) -> None:
    """A list whose items cannot each be a batch of one argument."""
    single = not any(_is_arguments(item) or isinstance(item, Mapping) for item in items)
    if takes is not None and takes.least > 1 and items and single:
        letters = _letters(takes.least)
        raise UsageError(
            f"the inputs are a list of {len(items)} single values, and the model is called {takes.name}: write "
            f"inputs=({letters}) for one batch of {takes.least} arguments, or inputs=[({letters}), ...] for several"
        )


def _entries(batch: Any, takes: _Signature, whose: str, source: str) -> str:
    return (
        f"each batch{whose} has {len(batch)} entries, and the model is called {takes.name}: write "
        f"inputs=[first for first, *_ in {source}] where the others are labels, or "
        f"inputs=[(batch,) for batch in {source}] where all are the one argument"
    )


def _from_loader(batch: Any, takes: _Signature | None) -> Any:
    """A batch as the loader's collating made it: a list there is what was a tuple in the dataset."""
    batch = tuple(batch) if type(batch) is list else _plain(batch)
    if _is_arguments(batch) and takes is not None and not takes.fits(len(batch)):
        raise UsageError(_entries(batch, takes, " of the DataLoader", f"itertools.islice(loader, {FROM_LOADER})"))
    if _is_keywords(batch):
        _check_one(batch, takes)
    return batch


def _plain(batch: Any) -> Any:
    """What the tokenizers of transformers return is a dict in all but its type, and so is an ordered one."""
    return dict(batch) if isinstance(batch, UserDict) or type(batch) is OrderedDict else batch


def _some(items: Sequence[Any]) -> Sequence[Any]:
    if len(items) == 0:
        raise UsageError("the inputs are empty: give at least one batch, for example inputs=[batch]")
    return items


def _is_arguments(batch: Any) -> bool:
    return isinstance(batch, tuple) and not hasattr(batch, "_fields")


def _is_keywords(batch: Any) -> bool:
    return type(batch) is dict and all(isinstance(key, str) for key in batch)


def _letters(count: int) -> str:
    return ", ".join("abcdefghijklmnopqrstuvwxyz"[:count]) if count <= 4 else "a, b, ..."


def _describe(items: Sequence[Any]) -> str:
    """``4 batches of 2 positional arguments``, by the first of them."""
    count = "one batch" if len(items) == 1 else f"{len(items)} batches"
    first = items[0]
    if _is_arguments(first):
        return f"{count} of {len(first)} positional argument{'s' if len(first) != 1 else ''}"
    if _is_keywords(first):
        return f"{count} of keyword arguments: {', '.join(first)}"
    return f"{count} of one argument: {_kind(first)}"


def _kind(value: Any) -> str:
    try:
        shape = getattr(value, "shape", None)
    except RuntimeError:  # a nested tensor in torch's older layout
        shape = None
    if isinstance(shape, tuple):
        return f"{type(value).__name__.lower()} of {' x '.join(map(str, shape)) or 'one number'}"
    return type(value).__name__
