"""Gradient accumulation: a step's batch in equal parts, one after the other. Less memory, the same gradient."""

from typing import Any

import torch

from fettle.techniques._base import TRAINING, Code, Facts, Level, Recipe, Technique, register


def split(batch: Any, count: int) -> list[Any]:
    """`count` equal parts of a batch: tensors with the rows of the first one are cut along the first dimension."""
    from torch.utils import _pytree as pytree

    leaves, structure = pytree.tree_flatten(batch)
    rows = next(len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim())
    if rows % count:
        raise ValueError(f"a batch of {rows} rows cannot be cut into {count} equal parts")
    columns = [
        leaf.chunk(count) if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == rows else [leaf] * count
        for leaf in leaves
    ]
    return [pytree.tree_unflatten(list(part), structure) for part in zip(*columns, strict=True)]


@register
class Accumulate(Technique):
    name = "accumulate"
    order = 900
    modes = TRAINING
    rung = 8
    title = "gradient accumulation"
    default = "off"

    def levels(self, facts: Facts) -> list[Level]:
        return [Level("off", "the whole batch at once")] + [
            Level(
                f"x{count}",
                f"{count} parts a step",
                f"a batch of {facts.samples} rows cannot be cut into {count} equal parts"
                if facts.samples % count
                else "",
            )
            for count in (2, 4, 8)
        ]

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        return Code(helpers=(split,), parts=f"split(batch, {level.removeprefix('x')})")
