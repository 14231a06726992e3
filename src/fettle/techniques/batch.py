"""More rows in one call. What is measured gets bigger batches; the model is not touched."""

from typing import Any

import torch

from fettle.techniques._base import BOTH, Code, Facts, Level, Recipe, Technique, register
from fettle.techniques._ranks import ROWS, endless, rows_in, tensors_in
from fettle.workload import map_tensors


def joined(data: Any, count: int) -> Any:
    """The batches of `data` without end, the rows of `count` of them joined into one batch."""
    source = endless(data)
    while True:
        batches = [next(source) for _ in range(count)]
        rows = rows_in(batches[0])
        columns = zip(*map(tensors_in, batches), strict=True)
        tensors = (torch.cat(same) if same[0].dim() and len(same[0]) == rows else same[0] for same in columns)
        yield map_tensors(lambda _, tensors=tensors: next(tensors), batches[0])


LARGEST = 64


def enlarged(factor: int) -> Recipe:
    """The recipe whose batch is `factor` batches as given."""
    return Recipe({"batch": f"x{factor}"} if factor > 1 else {})


@register
class BatchSize(Technique):
    name = "batch"
    order = 210
    modes = BOTH
    title = "batch size"
    default = "as-given"
    served = False

    def levels(self, facts: Facts) -> list[Level]:
        return [Level("as-given", "as given")] + [
            Level(f"x{factor}", f"{factor} batches joined into one call", self.why_not(f"x{factor}", facts))
            for factor in sorted({2, 4, 8, 16, 32, facts.largest_batch} - {0, 1})
        ]

    def why_not(self, level: str, facts: Facts) -> str:
        if level == self.default or level not in self.every_level():
            return "" if level == self.default else f"there is no such level: {self.default}, x2 to x{LARGEST}"
        if not facts.allow_batch:
            return "the batch size may not change here"
        if facts.generates:
            return "tokens a second are told at several numbers of rows"
        fits = not facts.largest_batch or self.batch_factor(level) <= facts.largest_batch
        return "" if fits else f"only {facts.largest_batch} times the batch fits into memory"

    def every_level(self) -> list[str]:
        return [self.default, *(f"x{factor}" for factor in range(2, LARGEST + 1))]

    def batch_factor(self, level: str) -> int:
        return int(level.removeprefix("x"))

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        if facts.mode == "training":
            return Code(helpers=(*ROWS, endless, joined), prepare=(f"data = joined(data, {level.removeprefix('x')})",))
        return Code(prepare=(f"# call it with batches {level.removeprefix('x')} times as large",))
