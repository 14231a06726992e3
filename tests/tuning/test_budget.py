"""A budget holds the final race too. Machine, processes and clock are made up; session, race and search are real."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import World, made_up_space, session_in, study

from fettle.errors import UsageError
from fettle.measure import Interval, Startup, Stop, Trial, _candidates
from fettle.recipe import Recipe
from fettle.search import auto
from fettle.studies import Settings, running
from fettle.studies.workloads import PlanProgress, Workload, _session
from fettle.tuning._budget import (
    FEWEST_ROUNDS,
    Budget,
    FinalRacePlan,
    plan_final_race,
    race_s,
    replicates_s,
    start_s,
    turn_s,
)
from fettle.workload import Target


def time_ms(scale):
    def of(recipe):
        gain = {"precision": 0.5, "compile": 0.4, "channels_last": 0.2, "grad": 0.05, "runtime": 0.6}
        return scale * math.exp(-sum(gain.get(name, 0.0) for name in recipe.levels))

    return of


def ready_s(scale):
    def of(recipe):
        return scale * (0.5 + 12 * ("compile" in recipe.levels) + 4 * ("runtime" in recipe.levels))

    return of


@pytest.mark.parametrize("budget_s", [20, 45, 90, 200, 280, 600])
@pytest.mark.parametrize(
    ("call_ms", "slowness", "cores"), [(3, 1.0, 2), (15, 2.0, 2), (15, 2.0, 8), (700, 1.0, 2), (6000, 3.0, 2)]
)
def test_a_study_ends_inside_its_budget(budget_s, call_ms, slowness, cores, tmp_path, monkeypatch):
    """But for a tenth, and for what cannot be left out: the baseline, and a confirmation that had begun."""
    world = World(time_ms(call_ms), ready_s(slowness))
    world.install(monkeypatch)
    space, facts = made_up_space()
    session = session_in(world, tmp_path, budget_s, replace(facts, physical_cores=cores))
    last = study(world, session, space, auto)
    baseline = session.standings.known[Recipe()]
    least = world.process_s + ready_s(slowness)(Recipe()) + 8 * call_ms / 1e3 + 2
    assert baseline.ok
    assert world.now <= max(1.1 * budget_s + 4 * 3 * call_ms / 1e3, least)
    leader = session.standings.best()
    confirmed = any(trial.ok and trial.recipe.levels for trial in last.trials)  # which is what is announced
    assert confirmed or last.unconfirmed or not leader.recipe.levels
    if budget_s >= 90 and call_ms < 100:
        assert confirmed


def test_calls_that_take_long_leave_time_for_what_promises_most(tmp_path, monkeypatch):
    """SAM on two cores: 14 s as given, 4.4 s in bfloat16, 1.6 s in OpenVINO. Cheap levels first, the budget was spent
    before a runtime had its turn."""

    def of(recipe):
        return (
            1600 if recipe.levels.get("runtime") == "openvino-bf16" else 4400 if "precision" in recipe.levels else 14000
        )

    world = World(of, ready_s(3.0), process_s=20.0)
    world.install(monkeypatch)
    space, facts = made_up_space()
    session = session_in(world, tmp_path, 700, facts)
    last = study(world, session, space, auto)
    assert session.standings.best().recipe.levels["runtime"] == "openvino-bf16"
    assert not last.unconfirmed


def test_one_recipe_is_tried_where_there_is_time_for_no_more(tmp_path, monkeypatch):
    """Stable Diffusion in five minutes: two are gone when the pipeline as given is known, 46 s take it to start."""
    world = World(
        lambda recipe: 1100 if "runtime" in recipe.levels else 5000, lambda recipe: 10.0, process_s=12.0, noise=0.05
    )
    world.install(monkeypatch)
    space, facts = made_up_space()
    session = session_in(world, tmp_path, 300, facts)
    world.now += 80.0  # building it and its reference
    last = study(world, session, space, auto)
    assert "runtime" in session.standings.best().recipe.levels
    assert not last.unconfirmed
    assert world.now <= 330


def test_a_build_that_hangs_ends_with_the_budget(tmp_path, monkeypatch):
    """Weights on a disk that is slow all at once: a trial may take a quarter of an hour, the study a minute."""
    world = World(time_ms(5), ready_s(1.0))
    world.install(monkeypatch)
    space, facts = made_up_space()
    session = session_in(world, tmp_path, 60, facts)
    session.measure([Recipe()])
    world.process_s = 500.0
    study(world, session, space, auto)
    assert world.now <= 1.1 * 60 + 10


def test_a_fraction_ends_with_its_budget_and_keeps_nothing_back(tmp_path, monkeypatch):
    """Its races knew no deadline: compilers that took minutes were waited for, one after the other."""
    world = World(time_ms(5), lambda recipe: 300.0 if "compile" in recipe.levels else 1.0)
    world.install(monkeypatch)
    monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=lambda: world.now))
    space, facts = made_up_space()
    settings = Settings(design="fraction", budget_s=60.0, output=tmp_path)
    made = _session(Target("made/up.py:workload"), tmp_path, settings, PlanProgress(lambda event: None, 0.0))
    session = session_in(world, tmp_path, made.budget.seconds, facts)
    session.rules, session.costs = replace(session.rules, equal_rounds=3), replace(session.costs, confirms=False)
    cells = ["precision=bf16", "grad=inference_mode", "compile=default", "compile=default freeze=on"]
    workload = Workload("net", {}, session, space, [Recipe(), *map(Recipe.parse, cells)])
    session.measure([Recipe()])
    running._measure(workload, settings)
    assert not made.costs.confirms
    assert session.costs.deadline() == 60.0
    assert len(workload.unknown()) > 0
    assert world.now <= 71


def test_an_interrupt_keeps_what_the_rounds_have_shown(tmp_path, monkeypatch):
    heard = []

    def interrupt(event):
        heard.append(event.doing)
        if event.doing == last:
            raise KeyboardInterrupt

    world, last = World(time_ms(5), ready_s(1.0)), ""
    world.install(monkeypatch)
    session = session_in(world, tmp_path, None, made_up_space()[1], on_progress=interrupt)
    session.measure([Recipe()])
    fast, none = Recipe.parse("precision=bf16"), Recipe.parse("channels_last=on")
    for recipe, last in ((fast, "round 3, 2 in the race"), (none, "round 2, 3 in the race")):
        with pytest.raises(KeyboardInterrupt):
            session.measure([recipe])
        assert last in heard
    assert session.standings.known[fast].rounds == 3
    assert session.standings.known[fast].speedup.estimate > 1.2
    assert none not in session.standings.known  # too few to say anything
    assert not session.held.runners  # they were in the middle of a slice


def test_an_interrupt_of_the_final_race_leaves_what_it_has_shown(tmp_path, monkeypatch):
    def interrupt(event):
        if final and event.doing.startswith("round 4"):
            raise KeyboardInterrupt
        final.extend([event.doing] * event.doing.startswith("final race"))

    world, final = World(time_ms(5), ready_s(1.0)), []
    world.install(monkeypatch)
    space, facts = made_up_space()
    last = study(world, session_in(world, tmp_path, None, facts, on_progress=interrupt), space, auto)
    assert last.interrupted
    assert max(trial.rounds for trial in last.trials) == 4


def test_an_interrupt_while_rows_are_measured_leaves_the_final_race(tmp_path, monkeypatch):
    def rows(start, started):
        if any(doing.startswith("final race") for doing in heard):
            raise KeyboardInterrupt
        return {}

    world, heard = World(time_ms(5), ready_s(1.0)), []
    world.install(monkeypatch)
    monkeypatch.setattr(_candidates.Start, "row_rates", rows)
    space, facts = made_up_space()
    session = session_in(world, tmp_path, None, facts, on_progress=lambda event: heard.append(event.doing))
    last = study(world, session, space, auto)
    assert last.interrupted
    assert last.trials
    assert session.study.note("final race")


def test_a_model_that_came_in_train_mode_is_told_of(tmp_path):
    session = session_in(World(time_ms(5), ready_s(1.0)), tmp_path, None, made_up_space()[1])
    (said,) = session.notes
    assert said.startswith("the model is in train mode and answers otherwise in eval mode")


def test_a_final_race_that_cannot_be_kept_is_announced(tmp_path, monkeypatch):
    def set_note(key, value):
        if key == "final race":
            raise UsageError("the study 'made up' cannot be written")

    world = World(time_ms(5), ready_s(1.0))
    world.install(monkeypatch)
    space, facts = made_up_space()
    session = session_in(world, tmp_path, None, facts)
    monkeypatch.setattr(session.study, "set_note", set_note)
    last = study(world, session, space, auto)
    assert max(trial.speedup.estimate for trial in last.trials) > 1.5
    assert session.notes[1:] == ["the final race is not kept: the study 'made up' cannot be written"]


def test_further_processes_are_not_started_for_a_race_that_was_ended(tmp_path, monkeypatch):
    world = World(time_ms(5), ready_s(1.0))
    world.install(monkeypatch)
    session = session_in(world, tmp_path, None, made_up_space()[1])
    rules = replace(session.rules, replicates=2, stop=Stop(asked=True))
    trials = session.run([Recipe(), Recipe.parse("precision=bf16")], rules)
    assert [trial.processes for trial in trials] == [1, 1]


def test_without_a_budget_the_final_race_is_whole(tmp_path, monkeypatch):
    world = World(time_ms(5), ready_s(1.0))
    world.install(monkeypatch)
    space, facts = made_up_space()
    session = session_in(world, tmp_path, None, facts)
    last = study(world, session, space, auto)
    assert not last.unconfirmed
    again = {trial.recipe: trial for trial in last.trials}
    assert again[session.standings.best().recipe].processes >= 2
    assert again[Recipe()].processes >= 2


def test_a_budget_that_is_too_small_is_said_plainly(tmp_path, monkeypatch):
    world = World(time_ms(5), ready_s(1.0))
    world.install(monkeypatch)
    space, facts = made_up_space()
    said = []
    session = session_in(world, tmp_path, 9.0, facts, on_progress=lambda event: said.append(event.doing))
    last = study(world, session, space, auto)
    assert last.trials == ()
    assert last.unconfirmed.startswith("Not confirmed: the budget of 9 s was too small")
    assert last.unconfirmed in said
    session.budget = Budget(300, world.now)  # the same command with a larger budget goes on
    assert not study(world, session, space, auto).unconfirmed


def trial(start=4.0, ms=10.0, speedup=2.0, recipe="precision=bf16", cache="", first=1.0):
    return Trial(
        Recipe.parse(recipe), "measured", time_ms=ms, speedup=Interval(speedup, speedup * 0.97, speedup * 1.03),
        startup=Startup(1.0, 0.0, first, cache), start_s=start,
    )  # fmt: skip


BASE = trial(recipe="baseline", speedup=1.0)


def test_what_is_left_out_first():
    """The ladder's rungs, then further processes, then the other finalists; the leader last of all."""
    best = [trial(), trial(recipe="precision=fp16"), trial(recipe="grad=no_grad")]
    plans = [plan_final_race(seconds, BASE, best, 3) for seconds in (4, 8, 25, 40, 60, 80, 110, 130, math.inf)]
    assert plans[0] is None
    known = [(plan.replicates, plan.finalists, plan.extras) for plan in plans[1:]]
    assert known[0] == (1, 1, 0)
    assert known[-1][1:] == (3, 3)
    assert known == sorted(known, key=lambda plan: (plan[0] * plan[1], plan[2]))


@given(
    left_s=st.floats(0, 500), starts=st.lists(st.floats(1, 40), min_size=2, max_size=4), ms=st.floats(0.01, 5000),
    extras=st.integers(0, 4),
)  # fmt: skip
def test_a_plan_fits_into_the_time_that_is_left(left_s, starts, ms, extras):
    baseline, *best = (trial(start=start, ms=ms) for start in starts)
    plan = plan_final_race(left_s, baseline, best, extras)
    first = [baseline, best[0]]
    if plan is None:
        assert race_s(first, FEWEST_ROUNDS) > left_s
        return
    if (plan.replicates, plan.finalists, plan.extras) == (1, 1, 0):
        assert race_s(first, FEWEST_ROUNDS) <= left_s
        return
    field = [baseline, *best[: plan.finalists]]
    if (plan.replicates, plan.finalists, plan.extras) == (1, 2, 0):
        assert race_s(field, FEWEST_ROUNDS) <= left_s
        return
    rungs_s = plan.extras * (start_s(baseline) + 6 * turn_s(baseline))
    cost_s = race_s(field) + replicates_s(field, plan.replicates - 1) + rungs_s
    assert cost_s <= left_s + 1e-6


def test_the_leader_is_not_alone_where_another_fits_beside_it_for_the_fewest_rounds():
    slow = [replace(one, turn_s=5.0) for one in (BASE, trial(), trial(recipe="grad=no_grad"))]
    left_s = race_s(slow, FEWEST_ROUNDS)
    assert left_s < race_s(slow)
    assert plan_final_race(left_s, slow[0], slow[1:], 3) == FinalRacePlan(2, 1, 0, 0.0)
    assert plan_final_race(left_s - 1, slow[0], slow[1:], 0).finalists == 1


@given(seconds=st.floats(1, 1e5), start=st.floats(0, 1e4))
def test_at_least_half_of_a_budget_is_for_the_search(seconds, start):
    deadline = Budget(seconds, 100.0).deadline([BASE, trial(start=start)])
    assert 100.0 + 0.5 * seconds - 1e-3 <= deadline <= 100.0 + seconds


def test_nothing_is_kept_back_while_there_is_nothing_to_confirm():
    """A call of 5 s: a third of five minutes kept back would leave no time for the first recipe."""
    slow = replace(BASE, turn_s=15.0, start_s=45.0)
    budget = Budget(300, 0.0)
    assert budget.deadline([slow]) == budget.end
    assert budget.end - budget.deadline([slow, replace(slow, recipe=Recipe.parse("precision=bf16"))]) >= 100


def test_while_few_recipes_were_tried_half_as_much_is_kept_back_for_further_processes():
    """Beside a busy neighbour a start takes 20 s: of three minutes one went to a race of the only recipe tried."""
    slow, leader = replace(BASE, turn_s=1.0, start_s=20.0), replace(trial(start=13.0), turn_s=0.3)
    budget = Budget(180.0, 0.0)
    assert budget.end - budget.deadline([slow, leader]) > 45
    assert budget.end - budget.deadline([slow, leader], few=True) == pytest.approx(30.0)


def test_the_workload_as_given_is_not_started_again_for_the_final_race():
    """Its process runs since the first race. Of 360 s a sampling of 5 s a call kept back a third for two starts, and
    ended after one bundle with 130 s left."""
    baseline, leader = replace(BASE, start_s=48.0, turn_s=5.3), replace(trial(start=27.0), turn_s=1.4)
    assert race_s([baseline, leader], FEWEST_ROUNDS) == pytest.approx(27 + 3 * (5.3 + 1.4))
    assert Budget(360.0, 0.0).deadline([baseline, leader]) > 280


def test_a_compile_that_is_in_the_cache_costs_less_the_second_time():
    assert start_s(trial(start=30.0, cache="cold", first=20.0)) == 20.0
    assert start_s(trial(start=30.0, cache="warm", first=20.0)) == 30.0
    assert start_s(trial(start=math.nan)) == 7.0  # a study of an earlier version: the parts that it kept, and a guess


def test_a_turn_takes_what_it_took_where_that_is_known():
    """Prompts of three lengths are written after in each turn, and the time of a call is that of one."""
    assert turn_s(trial(ms=1300.0)) == pytest.approx(1.35)
    assert turn_s(replace(trial(ms=1300.0), turn_s=3.9)) == 3.9


def test_a_small_study_is_cheap_and_right(tmp_path, monkeypatch):
    """A runtime that is six times as fast as given, found among 55 combinations. When this was written: 16 trials in 20
    to 24 processes and at most 280 slices; without the evidence of the other races it had been 20, 32 and 640."""
    for seed in range(3):
        world = World(_digits_ms, ready_s(1.0), seed=seed)
        world.install(monkeypatch)
        space, facts = made_up_space()
        session = session_in(world, tmp_path, None, facts)
        last = study(world, session, space, auto)
        finalists = {item.recipe for item in session.standings.finalists()}
        again = [trial for trial in last.trials if trial.recipe in finalists]
        winner = min(again, key=session.standings.rank)
        assert _digits_ms(winner.recipe) <= 1.03 * 2.2
        assert len(session.standings.known) <= 18
        assert len(world.started) <= 26
        assert world.slices <= 320


def _digits_ms(recipe):
    levels = dict(recipe.levels)
    if "runtime" in levels:
        return {"openvino-bf16": 2.2, "onnxruntime": 6.0}[levels["runtime"]]
    log = math.log(14.0) - {"bf16": 0.6, "autocast-bf16": 0.45}.get(levels.get("precision"), 0.0)
    log -= (0.25 + 0.35 * ("precision" in levels)) * ("channels_last" in levels) + 0.06 * ("grad" in levels)
    log -= 0.3 * ("matmul" in levels and "precision" not in levels)
    return math.exp(log - ("compile" in levels) * (0.3 + 0.3 * ("freeze" in levels)))
