"""Combinations that are known to work well together."""

from fettle.recipe import Recipe
from fettle.techniques._base import CATALOGUE
from fettle.techniques._catalogue import canonical, conflict, idle, uses_ranks
from fettle.techniques._facts import Facts

_MOST = 8


def bundles(facts: Facts) -> list[Recipe]:
    """Four to eight recipes without conflict on these facts, those that promise most for their cost first."""
    techniques = [technique for technique in CATALOGUE if facts.mode in technique.modes]
    usual = {technique.name: technique.usual(facts) for technique in techniques}
    offered = [bundle for technique in techniques for bundle in technique.bundles(facts)]
    found: dict[Recipe, None] = {}
    for bundle in sorted(offered, key=lambda bundle: bundle.place):
        recipe = canonical(Recipe({**usual, **bundle.levels}))
        recipe = recipe.without(*idle(recipe))
        if not conflict(recipe, facts) and (facts.ranks == 1 or uses_ranks(recipe)):
            found[recipe] = None
    return list(found)[:_MOST]
