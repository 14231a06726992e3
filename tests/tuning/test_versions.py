"""Figures of a recipe that runs by another package than torch hold for its version."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from simulated import World, made_up_space, session_in

from fettle import study as room
from fettle.errors import UsageError
from fettle.measure import Accuracy, Interval, Judge, Slice, Trial, by_round, messages
from fettle.recipe import Recipe
from fettle.result import Limits
from fettle.study import Study
from fettle.techniques import Facts, run_by
from fettle.tuning import _probe, recalled, studies_in
from fettle.tuning.model import Races
from fettle.tuning.standings import Standings

PACKAGES = {"torchao": "0.18", "openvino": "2026.4", "onnxruntime": "1.31", "onnx": "1.2", "transformers": "5.1"}


def test_what_a_recipe_runs_by():
    for text, names in (
        ("precision=bf16 compile=default", set()), ("quantize=int8-dynamic", {"torchao"}),
        ("runtime=aoti", {"transformers"}), ("runtime=openvino-bf16", {"openvino", "transformers"}),
        ("runtime[encoder]=onnxruntime", {"onnxruntime", "onnx", "transformers"}),
        ("python=other runtime=onnxruntime", set()),
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


def test_what_could_not_be_compared_is_measured_again(tmp_path):
    """Of two trials the first counts, unless others hid from it how fast the recipe is."""
    study = Study.open("s", f"sqlite:///{tmp_path}/s.db", "w", "m")
    hidden = [Slice("2:x", 1, 90.0, None, False, 1.9)]
    vague = replace(ran("precision=bf16", 2, 90.0), slices=hidden, accuracy=Accuracy(finite=True))
    clear = replace(ran("precision=bf16", 3, 4.0), speedup=Interval(2.0, 1.9, 2.1))
    for one in (ran("baseline", 1, 8.0), vague):
        study.add(one)
    found = Standings("throughput", Limits(max_error=None), Races())
    found.recall(study)
    assert list(found.known) == [Recipe()]
    study.add(clear)
    assert [one.race for one in study.trials()] == [1, 3]


def test_who_only_reads_a_study_sees_what_could_not_be_compared_and_what_was_inaccurate(tmp_path):
    study = Study.open("s", f"sqlite:///{tmp_path}/s.db", "w", "m")
    hidden = replace(ran("compile=default", 2, 90.0), slices=[Slice("2:x", 1, 90.0, None, False, 1.9)])
    why = "relative error 0.4 is above 0.02"
    wrong = replace(ran("precision=bf16", 1, 2.0), status="rejected", reason=why, accuracy=Accuracy(0.4, finite=True))
    kept = [ran("baseline", 1, 8.0), wrong, replace(hidden, accuracy=Accuracy(0.01, finite=True))]
    for one in kept:
        study.add(one)
    found = recalled(study)
    assert [(one.recipe, one.status, one.reason) for one in found] == [(k.recipe, k.status, k.reason) for k in kept]
    assert [one.speedup is not None for one in found] == [False, True, False]
    today = recalled(study, judge=Judge(max_error=0.5))
    assert [one.status for one in today] == ["measured"] * 3
    assert recalled(study, judge=Judge(max_error=0.001))[2].status == "rejected"


def test_as_given_is_tried_again_after_a_failure_and_so_is_what_was_not_ready_in_time(tmp_path):
    study, late = Study.open("s", f"sqlite:///{tmp_path}/s.db", "w", "m"), "timed out after 60 s in {}"
    failed = {"baseline": "out of memory", "compile=default": late.format("prepare: compiling"),
              "matmul=medium": late.format("slice"), "precision=bf16": "it broke"}  # fmt: skip
    for text, reason in failed.items():
        study.add(Trial(Recipe.parse(text), "failed", reason))
    for timeout_s, known in ((60.4, list(failed)[1:]), (900.0, list(failed)[2:])):
        found = Standings("throughput", Limits(max_error=None), Races())
        found.recall(study, timeout_s=timeout_s)
        assert [str(recipe) for recipe in found.known] == known
    study.add(ran("baseline", 1, 8.0))
    assert study.trials()[0].status == "measured"
    found.recall(study)
    assert found.known[Recipe()].ok


def test_what_only_another_version_of_fettle_has_is_not_known():
    """A level that is gone, or that is not there yet: whatever it costs or conflicts with nobody can say."""
    kept = [ran("baseline", 1, 8.0), ran("precision=bf16", 1, 4.0)]
    odd = [ran("warp=on", 1, 1.0), ran("precision=bf17", 1, 2.0)]
    notes = [[trial.to_json() for trial in odd]]
    study: Any = SimpleNamespace(trials=lambda: [*kept, *odd], notes=lambda start: notes, note=lambda key: None)
    found = Standings("throughput", Limits(max_error=None), Races())
    found.recall(study)
    assert list(found.known) == [trial.recipe for trial in kept]
    assert found.fit is not None
    assert set(found.fit.recipes) == set(found.known)


def test_a_study_of_a_version_with_fewer_levels_goes_on(tmp_path, monkeypatch):
    """Optuna's choices are fixed by the first trial."""
    url = f"sqlite:///{tmp_path / 'study.db'}"
    known = room.known_levels()
    monkeypatch.setattr(room, "known_levels", lambda: {**known, "precision": known["precision"][:-1]})
    Study.open("net", url, "weights", "here").add(ran("baseline", 1, 8.0))
    monkeypatch.undo()
    again = Study.open("net", url, "weights", "here")
    again.add(ran("precision=bf16", 1, 4.0))
    assert again.claim([Recipe.parse("grad=no_grad")], 1)[0]
    again.give_back()
    assert [str(trial.recipe) for trial in again.trials()] == ["baseline", "precision=bf16"]


@pytest.mark.parametrize(
    "changed",
    [
        {"samples": 0}, {"peak_bytes": -1}, {"speedup": {"estimate": 0, "low": 0, "high": 1}}, {"slices": 3},
        {"learned": {"int8_layers": 3}}, {"samples": 10**400},
    ],
)  # fmt: skip
def test_a_trial_that_somebody_changed_is_one_line(tmp_path, changed):
    url = f"sqlite:///{tmp_path / 'study.db'}"
    study, trial = Study.open("net", url, "weights", "here"), ran("baseline", 1, 8.0)
    written: Any = SimpleNamespace(**vars(trial), to_json=lambda: {**trial.to_json(), **changed})
    study.add(written)
    with pytest.raises(UsageError, match="trial 0 of the study cannot be read"):
        study.trials()


def test_what_goes_into_code_is_not_taken_from_a_probe_that_somebody_changed():
    facts = Facts(learned={"int8_layers": "__import__('os')"})
    probe = _probe.Probed(facts, False, {}, (), messages.Reference(dtype="float64", seconds=1.0))
    study: Any = SimpleNamespace(note=lambda key: msgspec.to_builtins(probe))
    found = _probe._recalled(study)
    assert found is not None
    assert found.facts.learned == {}


def test_a_study_whose_machine_somebody_changed_is_one_line(tmp_path):
    url = f"sqlite:///{tmp_path / 'study.db'}"
    Study.open("net", url, "weights", "here").set_note("machine", 3)
    with pytest.raises(UsageError, match="the study 'net' cannot be read"):
        list(studies_in(url))


def test_a_time_that_is_no_number_is_no_slice():
    assert by_round([Slice("a", 1, math.inf), Slice("a", 2, math.nan), Slice("a", 3, 2.0)]) == {3: 2.0}


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
