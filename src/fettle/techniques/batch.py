"""More rows in one call. What is measured gets bigger batches; the model is not touched."""

from typing import Any, ClassVar

import torch

from fettle.recipe import Recipe
from fettle.techniques._base import Code, Facts, Level, Technique


def joined(data: Any, count: int) -> Any:
    """The batches of `data` without end, `count` of them joined into one along the first dimension."""
    from torch.utils import _pytree as pytree

    def pull() -> Any:
        while True:
            yield from data

    source = pull()
    while True:
        batches = [next(source) for _ in range(count)]
        leaves, structure = zip(*(pytree.tree_flatten(batch) for batch in batches), strict=True)
        yield pytree.tree_unflatten(
            [torch.cat(same) if isinstance(same[0], torch.Tensor) and same[0].dim() else same[0]
             for same in zip(*leaves, strict=True)], structure[0]
        )  # fmt: skip


FACTORS = (2, 4, 8, 16, 32)
LARGEST = 64


class BatchSize(Technique):
    name = "batch"
    modes: ClassVar[frozenset[str]] = frozenset({"inference", "training"})
    title = "batch size"
    given = "as-given"

    def levels(self, facts: Facts) -> list[Level]:
        why_not = "" if facts.allow_batch else "the batch size may not change here"
        most = facts.largest_batch or FACTORS[-1]
        small = f"only {facts.largest_batch} times the batch fits into memory"
        return [Level("as-given", "as given")] + [
            Level(f"x{factor}", f"{factor} batches joined into one call", why_not or (small if factor > most else ""))
            for factor in sorted({*FACTORS, facts.largest_batch} - {0, 1})
        ]

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        if facts.mode == "training":
            return Code(helpers=(joined,), prepare=(f"data = joined(data, {level.removeprefix('x')})",))
        return Code(prepare=(f"# call it with batches {level.removeprefix('x')} times as large",))
