"""More rows in one call. What is measured gets bigger batches; the model is not touched."""

from fettle.recipe import Recipe
from fettle.techniques._base import Code, Facts, Level, Technique

FACTORS = (2, 4, 8, 16, 32)


class BatchSize(Technique):
    name = "batch"
    title = "batch size"
    given = "as-given"

    def levels(self, facts: Facts) -> list[Level]:
        why_not = "" if facts.allow_batch else "the batch size may not change here"
        return [Level("as-given", "as given")] + [
            Level(f"x{factor}", f"{factor} batches joined into one call", why_not) for factor in FACTORS
        ]

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        return Code(prepare=(f"# call it with batches {level.removeprefix('x')} times as large",))
