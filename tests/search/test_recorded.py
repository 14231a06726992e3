"""The search against a published near-full factorial.

Source: Paul Bridger, PyTorch Performance Features and How They Interact, cube.csv in
github.com/pbridger/pbridger.github.io. A cell is one model, torch version and container. Valid are the configurations
in eval mode (train mode gives other answers); the best of a cell is the largest throughput among these. One run each,
so the numbers are taken as they are, without noise.
"""

import pytest
from recorded import Recorded, cells, space_of

from fettle.recipe import Recipe
from fettle.search import auto

CELLS = cells()


def session_over(cell):
    return Recorded(lambda recipe: 1e3 / cell[recipe] if recipe in cell else None)


def is_eval(recipe):
    return recipe.levels.get("mode") == "eval"


@pytest.mark.parametrize("key", CELLS, ids="-".join)
def test_auto_finds_the_best_valid_configuration(key):
    cell = CELLS[key]
    session = session_over(cell)
    found = auto(space_of(cell), session)
    assert found is not None
    assert is_eval(found.recipe)
    assert cell[found.recipe] == max(rate for recipe, rate in cell.items() if is_eval(recipe))


def test_auto_is_economical():
    """287 of 458 (every valid configuration and the baseline) when this was written."""
    asked = possible = 0
    for cell in CELLS.values():
        session = session_over(cell)
        auto(space_of(cell), session)
        asked += len(session.trials)
        possible += 1 + sum(map(is_eval, cell))
    assert len(CELLS) == 30
    assert possible == 458
    assert asked <= 290


def test_exclusive_techniques_are_exchanged_without_the_precondition_too():
    """From all-off, one toggle at a time stops at 74% of the best here: channels_last shuts the door to compile."""
    cell = CELLS["resnet50", "1.14.0", "ngc"]
    found = auto(space_of(cell, eval_required=False), session_over(cell))
    assert found is not None
    assert found.recipe == Recipe.parse("compile=default cudnn_benchmark=on mode=eval precision=autocast-fp16")
