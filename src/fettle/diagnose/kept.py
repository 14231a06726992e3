"""What a call leaves behind: tensors, and the graphs that they hold on to."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch

from fettle.diagnose.evidence import Kept


def kept_alive(call: Callable[[], Any], calls: int = 3) -> Kept:
    """Tensors a call that outlive it and the next call too; none unless every call left such.

    Told apart one by one, over `calls` calls after one that settles caches: a count of all tensors would miss a leak
    while something else in the process lets go of as many. What the last call left is not judged: a result, a cache
    that the next call replaces.
    """
    known: dict[int, weakref.ref[torch.Tensor]] = {}
    born: list[list[weakref.ref[torch.Tensor]]] = []
    for _ in range(calls + 1):
        call()
        gc.collect()
        # By type, not isinstance: lazy proxies among all objects would be woken.
        alive = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
        last, known = known, {id(tensor): weakref.ref(tensor) for tensor in alive}
        # An address may be another tensor's by now.
        born.append([known[id(tensor)] for tensor in alive if last.get(id(tensor), lambda: None)() is not tensor])
        del alive  # it would keep them for the next count
    left = [[tensor for ref in refs if (tensor := ref()) is not None] for refs in born[1:-1]]
    if not all(left):
        return Kept()
    kept = [tensor for tensors in left for tensor in tensors]
    graphs = sum(tensor.grad_fn is not None for tensor in kept)
    size = sum(tensor.numel() * tensor.element_size() for tensor in kept)
    return Kept(len(kept) / len(left), graphs / len(left), size / len(left))
