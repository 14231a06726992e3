"""Fewer products for the same answers, in a model that another runtime is given (`_algebra.py` says how)."""

from collections.abc import Mapping
from typing import ClassVar

from fettle.techniques._base import Bundle, Facts, Level, Recipe, Technique, register
from fettle.techniques.runtime import AS_GIVEN, STATEFUL, why_not_exported


@register
class Algebra(Technique):
    """What the runtime is given: its lines are `Runtime.code`'s."""

    name = "algebra"
    order = 652
    title = "algebra"
    default = "as-given"
    of_module = True
    needs: ClassVar[Mapping[str, str]] = {"runtime": "openvino"}  # which every CPU can, with bfloat16 or without
    cost = 2

    def levels(self, facts: Facts) -> list[Level]:
        uneven = "" if facts.uneven_sdpa else "no attention between few tokens and many was found"
        summary = "what is equal along a batch is computed once, and projections are applied to the fewer tokens"
        return [Level("as-given", "as given"), Level("fewer-products", summary, uneven or why_not_exported(facts))]

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        runtime = recipe.levels.get("runtime", "torch")
        if runtime in ("torch", STATEFUL):
            return f"runtime={runtime} takes the module as it is; it needs one that the model is exported to"
        if recipe.levels.get("streams", "one") != "one":
            return "the batch is cut after it, and what it makes is for a batch of one size"
        return ""

    def unpackaged(self, level: str, recipe: Recipe, facts: Facts) -> str:
        why = "it writes the sizes of one batch into the graph, and a package takes any number of rows."
        return f"{why} {self.tune_without()}"

    def bundles(self, facts: Facts) -> list[Bundle]:
        if not facts.uneven_sdpa:
            return []
        if facts.device == "cuda":
            exported = {"runtime": "exported", "algebra": "fewer-products"}
            return [Bundle(5, {**exported, "cuda_graphs": "on"}), Bundle(15, exported)]
        runtime = "openvino-bf16" if facts.has_bf16 else "openvino"
        return [Bundle(10, {"runtime": runtime, "algebra": "fewer-products", **AS_GIVEN})]
