"""What a call leaves behind: tensors, and the graphs that they hold on to."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import torch

from fettle.diagnose.evidence import Kept


def kept_alive(call: Callable[[], Any], calls: int = 3) -> Kept:
    """Tensors a call that stay alive after it.

    Counted over `calls` calls after one that settles caches; none unless every call left some behind.
    """
    counts = []
    for _ in range(calls + 1):
        call()
        gc.collect()
        # By type, not isinstance: lazy proxies among all objects would be woken.
        alive = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
        size = sum(tensor.numel() * tensor.element_size() for tensor in alive)
        counts.append((len(alive), sum(tensor.grad_fn is not None for tensor in alive), size))
        del alive  # it would keep them for the next count
    if min(after[0] - before[0] for before, after in itertools.pairwise(counts)) < 1:
        return Kept()
    kept, graphs, size = (max(0.0, (last - first) / calls) for first, last in zip(counts[0], counts[-1], strict=True))
    return Kept(kept, graphs, size)
