"""Gradient accumulation: a step's batch in equal parts, one after the other. Less memory, the same gradient."""

from typing import Any

from fettle.techniques._base import TRAINING, Code, Facts, Level, Recipe, Technique, register
from fettle.techniques._ranks import ROWS, rows_in, share_of


def split(batch: Any, count: int) -> list[Any]:
    """Equal parts of a batch: `count`, or the next larger number that divides its rows, as in an epoch's last batch."""
    rows = rows_in(batch)
    count = next((number for number in range(count, rows) if rows % number == 0), rows)
    return [share_of(batch, part, count) for part in range(count)]


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
            Level(f"x{count}", f"{count} parts a step", facts.uneven(count)) for count in (2, 4, 8)
        ]

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        return Code(helpers=(*ROWS, split), parts=f"split(batch, {level.removeprefix('x')})")
