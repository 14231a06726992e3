"""Plain functions for the rows of a training batch of any kind, copied into ``optimized.py``."""

from typing import Any

import torch

from fettle.workload import map_tensors


def tensors_in(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch, in the order in which `map_tensors` meets them."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, batch)
    return found


def rows_in(batch: Any) -> int:
    """Rows of a batch: those of its first tensor that has any."""
    sizes = [len(tensor) for tensor in tensors_in(batch) if tensor.dim()]
    if not sizes:
        raise ValueError(f"a batch that is a {type(batch).__name__} has no tensor with rows")
    return sizes[0]


def share_of(batch: Any, part: int, count: int) -> Any:
    """One of `count` parts of a batch: tensors with as many rows as the first are cut, the rest is the same in all."""
    rows = rows_in(batch)
    return map_tensors(
        lambda tensor: tensor.tensor_split(count)[part] if tensor.dim() and len(tensor) == rows else tensor, batch
    )


ROWS = (map_tensors, tensors_in, rows_in, share_of)
