"""The default design: screen what is cheap, then improve the leader move by move until no neighbour is better."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fettle.measure import Trial
from fettle.recipe import Recipe
from fettle.search._evidence import Evidence
from fettle.search._space import Level, Session, Space, batches, valid, with_required
from fettle.search.foresight import Guide


def auto(
    space: Space,
    session: Session,
    *,
    first: Sequence[str] = (),
    guide: Guide | None = None,
) -> Trial | None:
    """Find the best recipe with few trials; None if none may win.

    `first` names techniques to try before others (a diagnosis says so). A `guide` adds what helped other models and
    leaves out what has no chance; as long as it is reliable, it is gone by.
    """
    evidence = Evidence(space, session)
    led: set[Recipe] = set()
    root = _root(space)

    def measure(recipes: Sequence[Recipe]) -> bool:
        """Whether there is budget left. Recipes come before the root: where time is short, a bundle is raced first."""
        if guide is not None:
            return guide.measure(evidence, recipes, root)
        return evidence.measure([Recipe(), *recipes, *root])

    bundles = [bundle for bundle in (with_required(space, one) for one in space.bundles) if valid(space, bundle)]
    going_on, screened = all(map(measure, batches(space, bundles))), False
    if guide is not None:
        going_on = going_on and guide.begin(evidence, root)
    while going_on:
        leader = evidence.leader()
        if guide is not None and (leader is None or not guide.is_reliable):
            guide = None
        if guide is None and not screened:
            going_on, screened = all(map(measure, [*batches(space, _alone(evidence, first)), []])), True
            continue
        if leader is None:
            break
        led.add(leader.recipe)
        batch = _next_batch(evidence, leader, led, first, guide)
        if not batch:
            break
        going_on = measure(batch)
    return evidence.leader()


def _alone(evidence: Evidence, first: Sequence[str]) -> list[Recipe]:
    """Every level that is cheap alone, but for the hopeless ones."""
    space, best = evidence.space, evidence.leader()
    levels = [evidence.moved(with_required(space, Recipe()), *move) for move in _moves(space, first)]
    return [
        recipe
        for recipe in levels  # an expensive one is first tried on the leader
        if recipe is not None and space.cost(recipe) == 1 and (best is None or not evidence.is_hopeless(recipe, best))
    ]


def _root(space: Space) -> list[Recipe]:
    """Nothing but the preconditions: what every move is measured against."""
    root = with_required(space, Recipe())
    return [root] if valid(space, root) else []


def _next_batch(
    evidence: Evidence, leader: Trial, led: set[Recipe], first: Sequence[str], guide: Guide | None
) -> list[Recipe]:
    """The untried neighbours of the leader that promise most; empty when none is left that could be better.

    1. techniques the caller asked for first that were not tried yet; 2. moves that helped elsewhere, one at a time,
    since each may change what the next one brings; 3. moves never tried; 4. the rest: drop-outs, second chances. A
    `guide` puts each group in its own order, and leaves out what has no chance.
    """
    space = evidence.space
    ranked: list[tuple[int, float, int, int, Recipe, Level]] = []
    for place, move in enumerate(_moves(space, first, drops=True)):
        recipe = evidence.moved(leader.recipe, *move)
        if (
            recipe is None
            or recipe in evidence.trials
            or evidence.known_wrong(recipe)
            or evidence.is_hopeless(recipe, leader)
        ):
            continue
        if space.cost(recipe) > 1 and _retired(evidence, move, led):
            continue
        expected, known = evidence.expected(recipe, leader.recipe)
        rank = (2 if expected > 0 else 4) if known else 1 if move[0] in first else 3
        ranked.append((rank, -expected, space.cost(recipe), place, recipe, move))
    if guide is not None:
        worth = guide.worth(evidence, {recipe: move for *_, recipe, move in ranked}, leader)
        ranked = [
            (rank, -worth[recipe], cost, place, recipe, move)
            for rank, _, cost, place, recipe, move in ranked if recipe in worth
        ]  # fmt: skip
        if not ranked:  # what is cheap is tried whatever is foreseen
            tried = {level for recipe in evidence.trials for level in recipe.levels.items()}
            return next(batches(space, [one for one in _alone(evidence, first) if not one.levels.items() <= tried]), [])
    ranked.sort(key=lambda item: item[:4])
    if not ranked:
        return []
    best = ranked[0][0]
    recipes = [recipe for rank, *_, recipe, _ in ranked if rank == best]
    return recipes[:1] if best == 2 else next(batches(space, recipes))


def _retired(evidence: Evidence, move: Level, led: set[Recipe]) -> bool:
    """Whether the move failed to help in two places, one of them a leader: then it is not tried a third time.

    A failed trial counts once like any other, since what fails alone may run beside others (a quantised model that
    only runs compiled). Trials that start in seconds are never retired: each leader is tried with them.
    """
    useless = [before.recipe for before, after in evidence.outcomes(*move) if not evidence.beats(after, before)]
    return len(useless) >= 2 and any(recipe in led for recipe in useless)


def _moves(space: Space, first: Sequence[str], drops: bool = False) -> Iterator[Level]:
    """All moves in the order of the catalogue, the techniques named in `first` before the others."""
    names = [name for name in first if name in space.choices] + [name for name in space.choices if name not in first]
    for name in names:
        for level in space.choices[name][0 if drops else 1 :]:
            yield name, level
