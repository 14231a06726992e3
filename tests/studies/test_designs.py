"""Which combinations each design measures."""

import itertools

import pytest

from fettle.errors import UsageError
from fettle.recipe import Recipe
from fettle.search import Space
from fettle.studies import designs
from fettle.studies.designs import Part, Plan

CHOICES = {"a": ("off", "on"), "b": ("off", "on"), "c": ("none", "x", "y")}


def space(conflict=lambda recipe: "", choices=CHOICES, **options):
    return Space(choices, conflict, **options)


def cells(design, made=None, start="", most=None):
    return [str(recipe) for recipe in designs.cells(design, made or space(), Recipe.parse(start), most)]


def test_the_factorial_is_every_combination_that_can_work():
    found = cells("factorial")
    assert found[0] == "baseline"
    assert len(found) == len(set(found)) == 12
    excluded = space(lambda recipe: "no" if {"a", "b"} <= recipe.levels.keys() else "")
    assert len(cells("factorial", excluded)) == 9


def test_no_number_of_combinations_is_too_many():
    large = space(choices=dict.fromkeys("abcdefgh", ("off", "on")))
    assert len(cells("factorial", large)) == 256


def test_what_changes_in_the_course_of_a_study_does_not_look_like_a_factor():
    found = cells("factorial", space(choices=dict.fromkeys("abcdef", ("off", "on"))))
    for name in "abcdef":
        place = [index for index, recipe in enumerate(found) if f"{name}=on" in recipe]
        assert abs(sum(place) / len(place) - 31.5) < 8


def test_the_fraction_tells_main_effects_and_pairs():
    choices = dict.fromkeys("abcdef", ("off", "on"))
    found = designs.cells("fraction", space(choices=choices), Recipe())
    assert 1 + 6 + 15 + 4 <= len(found) < 64
    for one, two in itertools.combinations(choices, 2):
        seen = {(recipe.levels.get(one), recipe.levels.get(two)) for recipe in found}
        assert len(seen) == 4
    assert len(cells("fraction", space(choices=choices), most=12)) == 12


@pytest.mark.parametrize("design", ["factorial", "fraction", "pairs"])
def test_of_what_was_listed_a_budget_takes_a_part_without_listing_it_again(design):
    asked = list[Recipe]()
    large = space(lambda recipe: asked.append(recipe) or "", dict.fromkeys("abcdef", ("off", "on")))
    whole = designs.cells(design, large, Recipe())
    count = len(asked)
    found = designs.fewer(design, large, whole, 13)
    assert len(asked) == count
    assert found[0] == Recipe()
    assert len(set(found)) == 13
    if design == "pairs":
        assert found == whole[:13]
    else:
        assert all(4 <= sum(name in recipe.levels for recipe in found) <= 9 for name in "abcdef")


def test_pairs_are_each_alone_and_each_two_together():
    found = cells("pairs")
    assert set(found[1:5]) == {"a=on", "b=on", "c=x", "c=y"}
    assert set(found[5:]) == {"a=on b=on", "a=on c=x", "a=on c=y", "b=on c=x", "b=on c=y"}


def test_a_pair_that_excludes_each_other_is_not_exchanged():
    found = cells("pairs", space(lambda recipe: "no" if {"a", "b"} <= recipe.levels.keys() else ""))
    assert "a=on b=on" not in found
    assert len(found) == 1 + 4 + 4


def test_sensitivity_changes_one_level_at_a_time_about_a_recipe():
    assert cells("sensitivity") == ["baseline", "a=on", "b=on", "c=x", "c=y"]
    assert cells("sensitivity", start="a=on c=x") == ["baseline", "a=on c=x", "a=on b=on c=x", "a=on c=y"]
    with pytest.raises(UsageError, match="the recipe a=on cannot work here: never"):
        cells("sensitivity", space(lambda recipe: "never" if "a" in recipe.levels else ""), start="a=on")


def test_what_every_recipe_must_have_is_in_each_but_the_first():
    found = cells("factorial", space(required=Recipe({"a": "on"})))
    assert found[0] == "baseline"
    assert all("a=on" in recipe for recipe in found[1:])


def test_nothing_to_vary_is_said():
    with pytest.raises(UsageError, match="nothing to vary"):
        cells("factorial", space(choices={"a": ("off",)}))
    with pytest.raises(UsageError, match="unknown design 'all': there are ladder, factorial"):
        designs.check("all", None)
    with pytest.raises(UsageError, match="`cells=1`"):
        designs.check("pairs", 1)


def test_what_fits_into_a_budget():
    assert designs.fitting([10, 10, 10], 25) == 2
    assert designs.fitting([10, 10, 10], 30) == 3
    assert designs.fitting([10], -5) == 0
    assert designs.fitting([float("nan"), 1], 5) == 0


def test_the_plan_says_how_many_and_how_long():
    plan = Plan("factorial", (Part("one", 96, 6, 5400.0), Part("two", 96, 0, 6000.0)))
    assert str(plan) == (
        "factorial: 192 combinations of 2 workloads, 6 of them measured already; the rest takes about 3 h 10 min"
    )
    assert plan.is_long
    assert str(Plan("pairs", (Part("one", 1, 1, 0.0),))).startswith("pairs: 1 combination, 1 of them measured already")
    assert not Plan("ladder", (Part("one", 9, 0, 80.0),)).is_long
    assert str(Plan("ladder", (Part("one", 9, 0, 80.0),))).startswith("ladder: about 9 combinations; the rest")
