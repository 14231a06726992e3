"""A technique is one file: one that nobody knew is searched, raced, learned from, written down and applied."""

import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import fettle
from fettle.measure import Interval
from fettle.package.export import as_served
from fettle.recipe_file import load_recipe
from fettle.techniques import CATALOGUE, Facts, bundles, conflict, find, known_levels, register, source
from fettle.tuning.space import space_for
from tests.conftest import quick_studies
from tests.tuning.test_tuning import FEW

FILE = '''
"""ReLUs that write into their input."""

import torch

from fettle.techniques import Bundle, Code, Facts, Learned, Level, Technique, register


def relus_in_place(model: torch.nn.Module, names: list) -> None:
    """Let the ReLUs of these names, or of all names where none is given, write into their input."""
    import logging
    import os

    relus = {name: child for name, child in model.named_modules() if isinstance(child, torch.nn.ReLU)}
    names = names or list(relus)
    for name in names:
        relus[name].inplace = True
    told = {"learned": {"relus": names}}
    logging.getLogger("optimized").info("%d ReLUs, %s", len(names), os.environ["RELU"], extra=told)


@register
class InPlaceRelu(Technique):
    name = "in_place_relu"
    title = "ReLUs in place"
    default = "off"
    order = 450
    rung = 3
    learns = Learned("relus", frozenset({"on"}), list[str])

    def levels(self, facts: Facts) -> list[Level]:
        return [Level("off", "as given"), Level("on", "ReLUs write into their input")]

    def bundles(self, facts: Facts) -> list[Bundle]:
        return [Bundle(5, {"in_place_relu": "on"})]

    def conflict(self, level, recipe, facts: Facts) -> str:
        elsewhere = recipe.levels.get("runtime", "torch") != "torch"
        return "another runtime has ReLUs of its own" if level == "on" and elsewhere else ""

    def code(self, level, recipe, facts: Facts) -> Code:
        names = list(facts.learned.get("relus", ()))
        return Code(
            environment={"RELU": "in place"}, helpers=(relus_in_place,), prepare=(f"relus_in_place(model, {names})",)
        )
'''


@pytest.fixture
def technique(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The new file, imported as whoever adds one outside of fettle imports it, and gone afterwards."""
    (tmp_path / "in_place_relu.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("in_place_relu")
    del sys.modules["in_place_relu"]
    yield find("in_place_relu")
    CATALOGUE.remove(find("in_place_relu"))


@pytest.mark.usefixtures("forks")
def test_a_technique_in_one_new_file_goes_all_the_way(technique, tmp_path: Path, monkeypatch) -> None:
    orders = [each.order for each in CATALOGUE]
    assert orders == sorted(orders)
    assert known_levels()["in_place_relu"] == ["off", "on"]

    # space
    space, left_out = space_for(Facts(), {})
    assert space.choices["in_place_relu"] == ("off", "on")
    assert not any(item.technique == "in_place_relu" for item in left_out)
    assert bundles(Facts())[0].levels["in_place_relu"] == "on"
    assert as_served(fettle.Recipe.parse("in_place_relu=on threads=2")) == fettle.Recipe.parse("in_place_relu=on")
    recipe = fettle.Recipe.parse("in_place_relu=on runtime=openvino")
    assert "another runtime" in conflict(recipe, Facts(packages={"openvino": "1"}))

    # recipe and race
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.ReLU()).eval()
    batches = [torch.randn(4, 8) for _ in range(3)]
    techniques = {**FEW, "precision": ["fp32"]}
    with quick_studies():
        result = fettle.tune(model, batches, techniques=techniques, budget_s=0, output=tmp_path / "out")
    (trial,) = [trial for trial in result.trials if dict(trial.recipe.levels) == {"in_place_relu": "on"}]
    assert trial.status == "measured", trial.reason
    assert isinstance(trial.speedup, Interval)
    assert "2 ReLUs, in place" in trial.notes  # its environment was there when its process began
    assert trial.learned == {"relus": ["1", "3"]}
    assert result.facts.learned == trial.learned

    # code and report, as if it had won
    won = replace(result, winner=trial, code=source(trial.recipe, result.facts))
    assert "relus_in_place(model, ['1', '3'])" in won.code
    won.save(tmp_path / "won")
    assert "in_place_relu=on" in (tmp_path / "won" / "report.html").read_text()
    kept = load_recipe(tmp_path / "won" / "recipe.toml")
    assert kept.learned == {"relus": ["1", "3"]}
    monkeypatch.setitem(os.environ, "RELU", "in place")
    fast = fettle.apply(model, tmp_path / "won" / "recipe.toml", batches)
    assert model[1].inplace
    assert fast(batches[0]).shape == (4, 4)


def test_what_a_recipe_claims_was_learned_must_be_of_its_type(technique, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("[levels]\nin_place_relu = 'on'\n[evidence]\nrelus = [3]\n")
    with pytest.raises(fettle.UsageError, match=r"evidence\.relus\.0: Expected `str`"):
        load_recipe(tmp_path / "recipe.toml")


def test_two_techniques_cannot_have_one_place(technique) -> None:
    with pytest.raises(ValueError, match="InPlaceRelu has the name or the order of InPlaceRelu"):
        register(type(technique))
    assert CATALOGUE.count(technique) == 1
