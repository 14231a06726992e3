"""Figures of a recipe that runs by another package than torch hold for its version."""

from types import SimpleNamespace
from typing import Any

from simulated import World, made_up_space, session_in

from fettle.measure import Slice, Trial
from fettle.recipe import Recipe
from fettle.result import Limits
from fettle.techniques import run_by
from fettle.tuning.model import Races
from fettle.tuning.standings import Standings

PACKAGES = {"torchao": "0.18", "openvino": "2026.4", "onnxruntime": "1.31", "onnx": "1.2", "transformers": "5.1"}


def test_what_a_recipe_runs_by():
    for text, names in (
        ("precision=bf16 compile=default", set()), ("quantize=int8-dynamic", {"torchao"}),
        ("runtime=aoti", {"transformers"}), ("runtime=openvino-bf16", {"openvino", "transformers"}),
        ("runtime[encoder]=onnxruntime", {"onnxruntime", "onnx", "transformers"}),
    ):  # fmt: skip
        assert run_by(Recipe.parse(text), PACKAGES) == {name: PACKAGES[name] for name in names}


def test_trials_keep_the_versions_that_they_ran_by(tmp_path, monkeypatch):
    world = World(lambda recipe: 2.0, lambda recipe: 1.0)
    world.install(monkeypatch)
    _, facts = made_up_space()
    opened = session_in(world, tmp_path, 600.0, facts)
    assert opened.study.packages == facts.packages
    opened.measure([Recipe(), Recipe.parse("runtime=onnxruntime")])
    kept = [Trial.from_json(trial.to_json()).versions for trial in opened.standings.known.values()]
    assert kept == [{}, {"onnxruntime": "1.31", "onnx": "1.2", "onnxscript": "1"}]


def ran(text: str, race: int, ms: float, **versions: str) -> Trial:
    slices = [Slice(f"{race}:{text}", turn, ms) for turn in range(1, 7)]
    return Trial(Recipe.parse(text), "measured", time_ms=ms, slices=slices, race=race, versions=versions)


def test_a_race_with_another_version_says_nothing_of_todays():
    before = [ran("baseline", 1, 8.0), ran("runtime=openvino", 1, 8.0, openvino="1"), ran("precision=bf16", 1, 4.0)]
    today = [before[0], before[2], ran("runtime=openvino", 2, 2.0, openvino="2")]
    again = [trial.to_json() for trial in (*before, ran("baseline", 2, 8.0))]
    study: Any = SimpleNamespace(trials=lambda: today, notes=lambda start: [again], note=lambda key: None)
    found = Standings("throughput", Limits(max_error=None), Races())
    found.recall(study)
    assert [trial.race for trial in found.raced(again)] == [1, 1, 2]
    speedup = found.known[Recipe.parse("runtime=openvino")].speedup
    assert speedup is not None
    assert 3.9 < speedup.estimate < 4.1
    assert len(found.raced([ran("runtime=openvino", 3, 2.0).to_json()])) == 1  # kept before versions were
