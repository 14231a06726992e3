"""Batches as trees of tensors: how one is handed to a model, what it holds, what becomes of it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Batch = Any
"""One sample input, any pytree: a tuple is spread as positional arguments, a dict as keyword arguments, anything
else is the one argument."""


def spread(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of one batch. A named tuple or a dataclass is one argument. A part of a pipeline
    may be called with both: those by position are under ``*`` then."""
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        return batch, {}
    if type(batch) is dict and all(isinstance(key, str) for key in batch):
        return batch.get("*", ()), {name: value for name, value in batch.items() if name != "*"}
    return (batch,), {}


def leaves(
    tree: Any, path: str = "", *, caches: bool = False, met: dict[int, Any] | None = None
) -> Iterator[tuple[str, Any]]:
    """Every leaf of a pytree with its path; dataclasses, mappings and sequences are branches, None is skipped. Of any
    other object, such as a distribution or a graph, the leaves are the tensors and arrays that it holds, in containers
    and other objects too, where there are some. What a cache of transformers holds is left out unless `caches` is set.

    `met` are such objects by their `id`, each of which is entered once: they may hold one another."""
    if tree is None:
        return
    import torch

    met = {} if met is None else met
    inside: list[tuple[str, Any]] = []
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type) and not isinstance(tree, Mapping):
        inside = [(f".{item.name}", getattr(tree, item.name)) for item in dataclasses.fields(tree)]
    elif isinstance(tree, Mapping):
        inside = [(f".{key}", value) for key, value in tree.items()]
    elif isinstance(tree, (list, tuple)):
        inside = [(f"[{index}]", value) for index, value in enumerate(tree)]
    else:
        held = _held(tree, caches) if id(tree) not in met else {}
        met[id(tree)] = tree
        every = leaves(held, path, caches=caches, met=met)
        found = [(place, leaf) for place, leaf in every if isinstance(leaf, torch.Tensor) or _is_array(leaf)]
        yield from found or [(path or "output", tree)]
        return
    if id(tree) not in met:
        met[id(tree)] = tree
        for place, value in inside:
            yield from leaves(value, path + place, caches=caches, met=met)
        del met[id(tree)]


def _held(owner: Any, caches: bool) -> dict[str, Any]:
    """What an object holds that may hold tensors."""
    import torch

    traced = (torch.SymInt, torch.SymFloat, torch.SymBool)  # numbers that hold all of what traces them
    closed = isinstance(owner, (type, torch.nn.Module, torch.Tensor, ModuleType, *traced))
    closed = closed or (not caches and type(owner).__module__.startswith("transformers."))
    return {} if closed else dict(getattr(owner, "__dict__", {}))


def _is_array(value: Any) -> bool:
    return is_numbers(value) and value.ndim > 0


def is_numbers(value: Any) -> bool:
    """Whether it is an array or a number of NumPy's that torch can take: none of texts or objects."""
    return type(value).__module__ == "numpy" and getattr(getattr(value, "dtype", None), "kind", "O") in "biufc"


def is_shared(value: Any) -> bool:
    """Whether it is an object of the interpreter's own, of which there is one: a small whole number, True, None."""
    return value is None or (isinstance(value, int) and -5 <= value <= 256)


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of a pytree."""
    import torch

    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def size_bytes(leaf: Any) -> int:
    """Bytes of what a tensor or an array holds, of a sparse tensor its stored values; 0 for anything else."""
    if getattr(leaf, "is_sparse", False):
        leaf = leaf._values()
    elif str(getattr(leaf, "layout", "")).startswith("torch.sparse"):
        leaf = leaf.values()
    return int(getattr(leaf, "nbytes", 0))


def stored(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that it is made of: of a quantised one those of integers and scales."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from stored(getattr(tensor, name))
    else:
        yield tensor


def rows_of(batch: Any) -> int:
    """The first dimension of the first tensor of a batch that has one and is not empty in it; 0 where there is none."""
    return next((int(tensor.size(0)) for tensor in tensors(batch) if tensor.dim() and tensor.size(0)), 0)


def again(batch: Any) -> Any:
    """The same leaves in containers of their own: whoever is given a batch may take out of it what it needs."""
    return map_tensors(lambda tensor: tensor, batch, caches=True)


def device_of(model: Any, batch: Any) -> str:
    """Type of the device that a call has to be waited for on: the first but the CPU that a module's parameters and
    buffers and the batch's tensors lie on."""
    import torch

    held = itertools.chain(model.parameters(), model.buffers()) if isinstance(model, torch.nn.Module) else ()
    kinds = dict.fromkeys(str(tensor.device.type) for tensor in itertools.chain(held, tensors(batch)))
    return next((kind for kind in kinds if kind not in ("cpu", "meta")), next(iter(kinds), "cpu"))


def wait_for(device: str | torch.device | None = None) -> None:
    """Wait until a device, or whatever accelerator there is, has done all that it was given. Of GPUs without a number
    all that hold something of this process are waited for: any other would be given memory to be asked. A CPU has done
    it already."""
    import torch

    place = torch.device(device or "cuda")
    if place.type == "cpu" or not torch.accelerator.is_available():
        return
    every = range(torch.cuda.device_count() if place == torch.device("cuda") else 0)
    holding = [gpu for gpu in every if len(every) > 1 and torch.cuda.memory_reserved(gpu)]
    for gpu in holding or [place.index]:
        torch.accelerator.synchronize(gpu)


def fresh(batch: Any) -> Any:
    """A batch of its own: a model may write into its tensors and arrays, and draw from its generators."""
    import numpy
    import torch

    def own(leaf: Any) -> Any:
        if isinstance(leaf, numpy.ndarray):
            return leaf.copy()
        return leaf.clone_state() if isinstance(leaf, torch.Generator) else leaf.clone()

    return map_tensors(own, batch, (torch.Tensor, torch.Generator, numpy.ndarray), caches=True)


def map_tensors(change: Any, tree: Any, kinds: Any = None, *, caches: bool = False, met: Any = None) -> Any:
    """A copy of a tree with every tensor changed, or all that is of other `kinds`: in sequences, mappings, dataclasses,
    what torch knows as a tree, and what other objects hold, such as a distribution. A cache of transformers is left
    alone unless `caches` is set.

    `met` has how often something was changed, and what became of other objects: they may hold one another."""
    import copy  # in the body: this source is copied into optimized.py
    import dataclasses
    from collections.abc import MutableMapping

    import torch

    def inner(item: Any) -> Any:
        return map_tensors(change, item, kinds, caches=caches, met=met)

    kinds, met = kinds or torch.Tensor, met or {"changed": 0}
    if isinstance(tree, kinds):
        met["changed"] += 1
        return change(tree)
    if tree is None or isinstance(tree, (str, int, float, torch.Size)):
        return tree
    if type(tree) in (tuple, list):  # the common branches first, without the cost of a general tree
        return type(tree)(map(inner, tree))
    if type(tree) is dict:
        return {key: inner(item) for key, item in tree.items()}
    if id(tree) in met:
        was, changed = met[id(tree)]
        met["changed"] += changed is not was
        return changed
    if dataclasses.is_dataclass(tree) and not isinstance(tree, (type, dict)):  # torch knows only registered ones
        changed = copy.copy(tree)
        met[id(tree)] = tree, changed
        for item in dataclasses.fields(tree):
            object.__setattr__(changed, item.name, inner(getattr(tree, item.name)))
        del met[id(tree)]
        return changed

    def inside(item: Any) -> Any:
        if item is not tree:
            return inner(item)
        changed: Any = tree  # of a type that torch does not know
        if isinstance(tree, MutableMapping):  # such as what transformers' tokenizers return
            changed = copy.copy(tree)
            held = getattr(changed, "__dict__", {})  # it may lie in a mapping of its own, which the copy shares
            held.update({name: copy.copy(one) for name, one in held.items() if isinstance(one, MutableMapping)})
            for key, value in tree.items():
                changed[key] = inner(value)
        elif isinstance(tree, (tuple, list)):
            items = [*map(inner, tree)]
            if isinstance(tree, list):
                changed = copy.copy(tree)
                changed[:] = items
            elif any(new is not old for new, old in zip(items, tree, strict=True)):  # no type of Python's own
                changed = tuple.__new__(type(tree), items)
                getattr(changed, "__dict__", {}).update(getattr(tree, "__dict__", {}))
        elif not isinstance(tree, (type, torch.nn.Module, type(torch))) and (
            caches or not type(tree).__module__.startswith("transformers.")
        ):
            met[id(tree)], before = (tree, tree), met["changed"]
            held = {name: inner(one) for name, one in getattr(tree, "__dict__", {}).items()}
            if met["changed"] > before:
                changed = copy.copy(tree)
                vars(changed).update(held)
                met[id(tree)] = tree, changed
        return changed

    return torch.utils._pytree.tree_map(inside, tree, is_leaf=lambda item: item is not tree)
