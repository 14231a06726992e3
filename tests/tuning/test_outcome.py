"""Which of the trials a result is made of."""

import io
import math
import os
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType, SimpleNamespace

import pytest
import torch
from rich.console import Console

from fettle import comparing
from fettle.cli._show import print_comparison
from fettle.comparing import Comparison, comparison_json
from fettle.errors import UsageError
from fettle.machine import this_machine
from fettle.measure import Accuracy, Interval, Load, Startup, Trial
from fettle.measure._inference import hidden_modules
from fettle.measure.messages import Built
from fettle.recipe import Recipe
from fettle.recipe_file import RecipeFile
from fettle.techniques import Facts
from fettle.tuning import Options, Session
from fettle.tuning._arguments import live_folder
from fettle.tuning._opening import open_study, remarks
from fettle.tuning._outcome import _beside, _code, _remarks, pick_winner
from fettle.workload import Target

WINNER = Trial(Recipe({"precision": "bf16"}), "measured", time_ms=5.0, speedup=Interval(2.0, 1.9, 2.1))
GIVEN = Trial(Recipe(), "measured", time_ms=10.0)


def test_the_baseline_beside_the_winner_is_of_its_race():
    third = replace(GIVEN, time_ms=12.0, race=3)
    assert _beside(WINNER, [third, GIVEN, WINNER]) is GIVEN
    assert _beside(replace(WINNER, race=3), [GIVEN, third]) is third  # never measured again
    assert _beside(WINNER, [third]) is None
    assert _beside(None, [GIVEN, WINNER]) is None


def test_a_baseline_that_died_in_the_final_race_is_not_shown_as_its_time():
    assert _beside(WINNER, [Trial(Recipe(), "failed", "killed", time_ms=math.nan), WINNER]) is None


def test_what_a_level_of_the_winner_means_for_its_user_is_said_once(tmp_path):
    session = Session(Target("made/up.py:workload"), Options(output=tmp_path), lambda event: None)
    session.facts = Facts()
    won = replace(WINNER, recipe=Recipe.parse("runtime[a]=openvino runtime[b]=openvino-bf16 threads=1"))
    (said,) = filter(None, _remarks(session, won))
    assert said.startswith("Inputs of another shape are converted when they first come")
    assert _remarks(session, None) == []
    session.facts = Facts(new_tokens=3)
    assert _remarks(session, won) == []


@pytest.mark.parametrize("status", ["measured", "failed"])
def test_a_leader_that_ran_again_and_could_not_be_read_beside_others_is_no_broken_promise(status, tmp_path):
    session = Session(Target("made/up.py:workload"), Options(output=tmp_path), lambda event: None)
    session.facts = Facts()
    right = Accuracy(error=0.0, finite=True)
    given, leader = replace(GIVEN, speedup=Interval(1.0, 1.0, 1.0), accuracy=right), replace(WINNER, accuracy=right)
    session.standings.known = {one.recipe: one for one in (given, leader)}
    winner, claim = pick_winner(session, [given, replace(leader, status=status, speedup=None)])
    assert (winner, claim) == ((given, "same") if status == "measured" else (None, "cannot tell"))


@pytest.mark.parametrize(("peaks", "wins"), [((90, 99), True), ((90, 101), False), ((101, 104), False)])
def test_memory_is_saved_where_each_process_takes_less_than_any_as_given(peaks, wins, tmp_path):
    session = Session(Target("made/up.py:workload"), Options(goal="memory", output=tmp_path), lambda event: None)
    session.facts = Facts()
    right = Accuracy(error=0.0, finite=True)
    given, saving = (
        replace(one, peaks_bytes=each, peak_bytes=max(each), accuracy=right)
        for one, each in ((replace(GIVEN, speedup=Interval(1.0, 1.0, 1.0)), (100, 110)), (WINNER, peaks))
    )
    session.standings.known = {one.recipe: one for one in (given, saving)}
    winner, _ = pick_winner(session, [given, saving])
    assert (winner.recipe == saving.recipe) == wins


@pytest.mark.parametrize(
    ("accuracy", "off"),
    [
        (Accuracy(error=0.01), ", with a relative error of 0.01."),
        (Accuracy(error=0.01, perplexity=3.0), ", with a mean KL divergence of 0.01."),
        (Accuracy(), "."),
    ],
)
def test_the_code_says_how_far_off_its_answers_are(accuracy, off, tmp_path):
    session = Session(Target("made/up.py:workload"), Options(output=tmp_path), lambda event: None)
    session.facts = Facts()
    said = f"Measured 2.00x as given on {this_machine().summary}{off}\n"
    assert said in _code(session, replace(WINNER, accuracy=accuracy))


def test_torch_can_compile_for_a_study_in_a_folder_with_a_quote_in_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    session = Session(Target("made/up.py:workload"), Options(output=tmp_path / "bob's"), lambda event: None)
    cache = session._environment()["TORCHINDUCTOR_CACHE_DIR"]
    assert "'" not in cache
    assert Path(cache).resolve() == tmp_path.resolve() / "bob's" / "cache" / "inductor"


@pytest.mark.parametrize(("goal", "seconds"), [("energy", 0.5), ("throughput", 0.08)])
def test_slices_outlast_the_period_of_an_energy_counter(goal, seconds, tmp_path):
    session = Session(
        Target("made/up.py:workload"), Options(goal=goal, budget_s=None, output=tmp_path), lambda event: None
    )
    assert session.rules.slice_s == seconds


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "work"),
        ({"goal": "latency"}, "work"),
        ({"under_load": True}, "work-under-load"),
        ({"goal": "energy"}, "work-energy"),
        ({"goal": "tpot", "under_load": True}, "work-tpot-under-load"),
        ({"goal": "warm-startup", "study": "mine"}, "mine-warm-startup"),
    ],
)
def test_what_is_measured_in_another_way_has_a_study_of_its_own(options, name, tmp_path):
    """Or the answer to one question would be made of the trials of another."""
    built = Built(load_s=1.0, fingerprint="f" * 16, structure="s", name="", mode="inference")
    target = Target("work.py:workload", "work")
    study, elsewhere = open_study(target, built, Options(output=tmp_path, **options), this_machine())
    assert (study.name, elsewhere) == (name, "")


def test_of_two_that_measure_one_study_at_once_the_second_is_refused(tmp_path):
    """Both would number their races alike."""
    built = Built(load_s=1.0, fingerprint="f" * 16, structure="s", name="", mode="inference")

    def opened(**changes):
        session = Session(Target("work.py:workload", "work"), Options(output=tmp_path, **changes), lambda event: None)
        sessions.append(session)
        session._take(built, this_machine())
        return session

    sessions = []
    first, beside = opened(), opened(study="another")
    kept = first._folder("cache/kept")
    with pytest.raises(UsageError, match="another fettle measures this study; wait for it, or give another `output`"):
        opened()
    sessions.pop().let_go()
    assert kept.exists()
    opened(storage=f"sqlite:///{tmp_path}/study.db")  # whose workers claim what they measure
    first.let_go()
    opened().let_go()
    beside.let_go()


@pytest.mark.parametrize(("load_s", "budget_s", "told"), [(70, 300, 1), (50, 300, 0), (70, None, 0)])
def test_a_workload_that_takes_much_of_the_budget_to_build_is_told_of(load_s, budget_s, told):
    built = Built(load_s=load_s, fingerprint="f", structure="s", name="", mode="inference")
    assert sum("took 70 s of the budget of 300 s" in text for text in remarks(built, budget_s)) == told


def test_live_objects_of_a_process_that_was_killed_are_deleted(tmp_path):
    mine = live_folder(tmp_path)
    dead = tmp_path / mine.name.replace(f"-{os.getpid()}-", f"-{2**22 + 1}-")  # above the largest number of a process
    elsewhere = tmp_path / "live-another-machine-1-00"
    for folder in (mine, dead, elsewhere):
        folder.mkdir()
    assert live_folder(tmp_path) != mine
    assert sorted(tmp_path.iterdir()) == sorted([mine, elsewhere])


def test_recipes_that_hold_different_choices_are_not_raced_as_one():
    one, other = (RecipeFile(levels={"runtime": "openvino-int8-part"}, evidence={"int8_layers": layers})
                  for layers in ({"layers": ["a"]}, {"layers": ["b"]}))  # fmt: skip
    assert comparing._learned([RecipeFile(), one]) == one.learned != {}
    with pytest.raises(UsageError, match="different int8_layers"):
        comparing._learned([one, other])


def test_a_comparison_without_its_baseline_has_failed():
    ran, failed = replace(GIVEN, recipe=WINNER.recipe), Trial(Recipe(), "failed", "out of memory")
    assert Comparison("made up", "f", this_machine(), [failed, ran], ["same", "cannot tell"]).failed
    said = repr(Comparison("made up", "f", this_machine(), [ran, failed], ["same", "failed"]))
    assert said.splitlines()[1].endswith(f"failed, {failed.reason}")
    whole = Comparison("made up", "f", this_machine(), [GIVEN, ran], ["same", "same"])
    assert not whole.failed
    assert replace(whole, left_out=[Recipe({"threads": "1"})]).failed


@pytest.mark.parametrize(
    ("goal", "theirs", "verdict", "nothing", "said"),
    [
        ("throughput", {}, "slower", True, ""),
        ("throughput", {}, "cannot tell", False, ""),
        ("memory", {"peak_bytes": 10 << 20}, "slower", False, "10.0 MiB instead of 40.0 MiB, 4.00x less"),
        ("memory", {"peak_bytes": 80 << 20}, "faster", True, "needs less of it here: 80.0 MiB, and 40.0 MiB as given"),
        ("memory", {"peak_bytes": 30 << 20, "peaks_bytes": (25 << 20, 45 << 20)}, "same", True, "not certain"),
        ("startup", {"startup": Startup(1.0, 0.5, 0.5)}, "slower", False, "1.00 s instead of 2.00 s"),
        ("energy", {}, "slower", False, "which could not be read here"),
    ],
)
def test_a_recipe_is_checked_by_the_goal_it_was_tuned_for(goal, theirs, verdict, nothing, said) -> None:
    given = replace(GIVEN, peak_bytes=40 << 20, peaks_bytes=(40 << 20, 40 << 20), startup=Startup(2.0, 1.0, 1.0))
    recipe = replace(WINNER, **theirs)
    checked = Comparison("made up", "f", this_machine(), [given, recipe], ["same", verdict], goal=goal)
    assert checked.gains_nothing is nothing
    console = Console(width=200, record=True, file=io.StringIO())
    print_comparison(console, checked)
    assert said in console.export_text()


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (Interval(4.56, 4.50, 4.62), "another hour may say 4.05x to 5.14x of the fastest"),
        (Interval(4.56, 3.9, 5.33), ""),
        (Interval(1.03, 1.02, 1.04), ""),
    ],
)
def test_a_large_gain_says_what_another_hour_may_say(ratio: Interval, said: str) -> None:
    found = Comparison("made up", "f", this_machine(), [GIVEN, replace(WINNER, speedup=ratio)], ["same", "faster"])
    assert (found.another_hour is not None) is bool(said)
    assert (comparison_json(found)["another_hour"] is not None) is bool(said)
    console = Console(width=200, record=True, file=io.StringIO())
    print_comparison(console, found)
    assert said in (text := console.export_text())
    assert ("another hour" in text) is bool(said)


def test_what_others_had_of_the_machine_stands_before_the_figures_and_in_the_json() -> None:
    given, fast = (replace(one, is_quiet=False, load=Load(waits=0.8, others=0.5)) for one in (GIVEN, WINNER))
    fast = replace(fast, elapsed_speedup=Interval(4.0, 3.0, 5.0))
    found = Comparison("made up", "f", this_machine(), [given, fast], ["same", "faster"])
    console = Console(width=200, record=True, file=io.StringIO())
    print_comparison(console, found)
    first, second, *_ = console.export_text().splitlines()
    assert first.startswith("On a busy machine")
    assert "others took 50% of the cores); in time elapsed beside that load 4.00x [3.00, 5.00]" in second
    told = comparison_json(found)["trials"][1]
    assert (told["is_quiet"], told["load"]["others"], told["elapsed_speedup"]["estimate"]) == (False, 0.5, 4.0)


def test_a_comparison_whose_time_was_over_before_it_began_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(Session, "open", lambda self, machine, fingerprint, searches: setattr(self, "facts", Facts()))
    monkeypatch.setattr(Session, "run", lambda self, recipes, rules: [])
    with pytest.raises(UsageError, match="no time to start the workload as given"):
        comparing.bench(Target("made/up.py:workload"), "baseline", budget_s=1.0)


def test_a_callable_around_a_module_is_told_to_give_the_module():
    net = torch.nn.Linear(1, 1)
    holder = SimpleNamespace(net=net, size=3)
    for model in (lambda x: net(x), partial(net, input=1), MethodType(lambda self, x: self.net(x), holder)):
        assert len(hidden_modules(model)) == 1
    assert hidden_modules(net) == hidden_modules(abs) == hidden_modules(lambda x: x + 1) == []
    for hidden in ([], ["net"]):
        built = Built(load_s=1, fingerprint="f", structure="s", name="", mode="inference", hidden=hidden)
        assert ["around modules (net)" in said for said in remarks(built, None)] == [True] * len(hidden)
