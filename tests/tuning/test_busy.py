"""Studies beside a neighbour, in a made-up world: what is said, who meets in the final race, what is announced."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from simulated import World, made_up_space, session_in, study

from fettle.measure import Accuracy, Interval, Load, Slice, Trial, contrast_interval, is_vague, process_logs
from fettle.recipe import Recipe
from fettle.report._facts import elapsed, load_lines, under
from fettle.search import auto
from fettle.studies import sharing
from fettle.studies.running import _measure_as_given
from fettle.studies.workloads import Workload
from fettle.study import Study
from fettle.techniques import Facts, preconditions
from fettle.tuning import _final_race, _outcome
from fettle.tuning._baseline import depends_on_memory, how_it_swings
from fettle.tuning._budget import FinalRacePlan
from fettle.tuning._final_race import _is_enough, final_race
from fettle.tuning._outcome import _threads_under_load, pick_winner
from fettle.tuning.tune import _advised

FAST = {"openvino-bf16": 2.2, "onnxruntime": 6.0}


def time_ms(recipe):
    """A runtime six times as fast as given; bfloat16 on its way there."""
    if "runtime" in recipe.levels:
        return FAST[recipe.levels["runtime"]]
    return 14.0 * (0.5 if "precision" in recipe.levels else 1.0) * (0.8 if "channels_last" in recipe.levels else 1.0)


def beside(recipe):
    """Two threads wait for each other beside a neighbour, one that has a core does not."""
    return 1.3 if "threads" in recipe.levels or "runtime" in recipe.levels else 6.0


def bursts(now):
    return 0.5 if now % 35 < 20 else 0.0


def run(tmp_path, monkeypatch, neighbour, budget_s=240.0, seed=0, **more):
    told = []
    world = World(time_ms, seed=seed, neighbour=neighbour, **{"beside": beside, **more})
    world.install(monkeypatch)
    space, facts = made_up_space()
    session = session_in(world, tmp_path, budget_s, facts, on_progress=lambda event: told.append(event.doing))
    last = study(world, session, space, auto)
    winner, verdict = pick_winner(session, last.trials)
    return session, last, winner, verdict, told


@pytest.mark.parametrize("neighbour", [lambda now: 0.0, bursts, lambda now: 0.5], ids=["none", "bursts", "always"])
def test_the_winner_is_the_same_beside_any_neighbour(tmp_path, monkeypatch, neighbour):
    for seed in range(3):
        session, _, winner, verdict, _ = run(tmp_path, monkeypatch, neighbour, seed=seed)
        assert winner.recipe.levels["runtime"] == "openvino-bf16"
        assert verdict == "faster"
        assert winner.speedup.low <= 14.0 / 2.2 <= winner.speedup.high
        assert session.patience.waited_s <= 0.26 * 240


def test_a_machine_that_is_never_quiet_is_named_in_the_first_sentence(tmp_path, monkeypatch):
    _, _, winner, _, _ = run(tmp_path, monkeypatch, lambda now: 0.5)
    assert not winner.is_quiet
    assert under(winner).startswith("On a busy machine (its threads together waited")
    assert "not what was measured on one" in elapsed(winner)
    assert winner.elapsed_speedup.estimate > 2 * winner.speedup.estimate
    assert load_lines([winner])[0].startswith("On a busy machine")
    said, *each = load_lines([winner, winner])
    assert said.startswith("On a busy machine")
    assert len(each) == 2
    assert all(line.startswith("- ") and "in time elapsed" in line for line in each)
    assert under(winner, asked=True).startswith("Measured under load, as asked")


def test_what_no_slice_shows_is_not_claimed(tmp_path, monkeypatch):
    """Beside many processes the model as given takes 600 times as long, and no slice shows what it takes alone; what
    another runtime takes can be read. That is a figure of the neighbours, and nobody's gain."""

    def crowded(recipe):
        return 1.3 if "runtime" in recipe.levels else 600.0

    session, _, winner, verdict, _ = run(
        tmp_path, monkeypatch, lambda now: 0.95, beside=crowded, tells=lambda recipe: "runtime" in recipe.levels
    )
    assert not winner.recipe.levels
    assert verdict == "same"
    others = [trial for trial in session.standings.known.values() if trial.recipe.levels]
    assert others
    assert not any(trial.is_compared for trial in others)
    assert all(trial.elapsed_speedup.estimate > 100 for trial in others if "runtime" in trial.recipe.levels)


def test_a_study_that_several_work_at_ends_with_what_no_slice_shows(tmp_path, monkeypatch):
    world = World(time_ms, neighbour=lambda now: 0.95, beside=lambda recipe: 600.0, tells=lambda recipe: False)
    world.install(monkeypatch)
    _, facts = made_up_space()
    waited = []

    def sleep(seconds):
        waited.append(seconds)
        assert len(waited) < 3, "it waits for what nobody is about to measure"

    monkeypatch.setattr(sharing, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=sleep))
    cells = [Recipe(), *(Recipe.parse(text) for text in ("precision=bf16", "channels_last=on", "matmul=medium"))]
    for _ in range(2):  # the second joins when all is done
        session = session_in(world, tmp_path, None, facts)
        session.study = Study.open("s", f"sqlite:///{tmp_path}/s.db", "made up", "here")
        session.refresh()
        sharing.measure_shares(session, cells, 2, math.inf)
        assert set(session.standings.known) == set(cells)
        assert not any(session.standings.known[cell].is_compared for cell in cells[1:])


def test_who_waits_for_others_reads_their_trials_when_there_are_new_ones(tmp_path, monkeypatch):
    world = World(time_ms)
    world.install(monkeypatch)
    _, facts = made_up_space()
    session = session_in(world, tmp_path, None, facts)
    session.study = Study.open("s", f"sqlite:///{tmp_path}/s.db", "made up", "here")
    other = Study.open("s", f"sqlite:///{tmp_path}/s.db", "made up", "here")
    cells = [Recipe(), Recipe({"matmul": "medium"})]
    other.claim(cells, 2)
    looked, read, refresh = [], [], session.refresh

    def sleep(seconds):
        looked.append(seconds)
        if len(looked) in (3, 5):
            other.add(Trial(cells.pop(), "failed", "out of memory"))

    monkeypatch.setattr(sharing, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=sleep))
    monkeypatch.setattr(session, "refresh", lambda **how: (read.append(how), refresh(**how)))
    sharing.measure_shares(session, list(cells), 2, math.inf)
    other.give_back()
    assert (len(looked), len(read)) == (5, 3)


def test_an_interrupt_in_the_middle_of_claiming_gives_back_what_was_claimed(tmp_path, monkeypatch):
    world = World(time_ms)
    world.install(monkeypatch)
    session = session_in(world, tmp_path, None, made_up_space()[1])
    session.study = Study.open("s", f"sqlite:///{tmp_path}/s.db", "made up", "here")
    other = Study.open("s", f"sqlite:///{tmp_path}/s.db", "made up", "here")
    cells = [Recipe({"matmul": "medium"}), Recipe({"precision": "bf16"})]

    def interrupted(recipes):
        raise KeyboardInterrupt

    monkeypatch.setattr(session.study, "_won", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.measure_share(cells, 2)
    assert other.claim(cells, 2)[0] == cells
    other.give_back()


def test_a_workload_that_failed_in_an_earlier_run_is_measured_by_the_next(tmp_path, monkeypatch):
    world = World(time_ms)
    world.install(monkeypatch)
    study = Study.open("s", f"sqlite:///{tmp_path}/s.db", "made up", "here")
    for recipe in (Recipe(), Recipe({"matmul": "medium"})):
        study.add(Trial(recipe, "failed", "out of memory"))
    for is_shared, started in ((True, 1), (False, 1)):
        session = session_in(world, tmp_path, None, made_up_space()[1])
        session.study = study
        session.refresh()
        workload = Workload("net", {}, session)
        _measure_as_given(workload, SimpleNamespace(is_shared=is_shared, storage=None))
        assert (workload.failure, workload.known[Recipe()].ok, len(world.started)) == ("", True, started)


def test_on_a_quiet_machine_nothing_is_said_of_load(tmp_path, monkeypatch):
    _, _, winner, _, told = run(tmp_path, monkeypatch, lambda now: 0.0)
    assert winner.is_quiet
    assert under(winner) == elapsed(winner) == ""
    assert load_lines([winner]) == []
    assert not any("busy" in line for line in told)


def test_a_baseline_that_swings_is_told_of_before_minutes_are_spent(tmp_path, monkeypatch):
    world = World(time_ms, neighbour=lambda now: 0.5 if now < 4.45 else 0.0, beside=beside)
    world.install(monkeypatch)
    told, kept = [], []

    def hear(event):
        told.append(event.doing)
        kept.append(event.note)

    session = session_in(world, tmp_path, 240.0, made_up_space()[1], on_progress=hear)
    session.patience.left_s = 0.0
    session.measure([Recipe()])
    session.look_at_baseline()
    assert told[-1].startswith("the model as given took 1")
    assert "its threads together waited" in told[-1]
    assert kept[-1] == told[-1]  # a line that stays on the screen
    assert session.notes[1:] == [told[-1]]


def test_a_baseline_whose_time_depends_on_freed_memory_is_told_of_and_has_the_allocator_tried_first():
    slices = [Slice("1:0", turn, 35.0 if turn % 2 else 26.0, pages=6500 * (turn % 2)) for turn in range(1, 9)]
    baseline = Trial(Recipe(), "measured", time_ms=30.0, slices=slices)
    assert how_it_swings(baseline).startswith("the model as given takes 26 ms a call where the memory")
    facts = Facts(libraries={"glibc": "libc.so.6"})
    said = depends_on_memory(baseline, None, facts)
    assert said.endswith("which of the two is chance. allocator=keep keeps it.")
    winner = Trial(Recipe({"allocator": "keep"}), "measured", time_ms=26.0)
    assert depends_on_memory(baseline, winner, facts).endswith("which of the two is chance.")
    assert depends_on_memory(winner, winner, facts) == ""
    session = SimpleNamespace(
        facts=facts, standings=SimpleNamespace(known={Recipe(): baseline}), probed=SimpleNamespace(advice=())
    )
    assert _advised(session, ["threads"]) == ["threads", "allocator"]


def trial(text, ms, *, elapsed_ms=None, race=1, quiet=True):
    recipe = Recipe.parse(text)
    slices = [Slice(f"{race} {text}", turn, elapsed_ms or ms * (1 + 0.001 * (turn % 3)), ms * (1 + 0.001 * (turn % 3)),
                    quiet, 0.0 if quiet else 0.8) for turn in range(1, 9)]  # fmt: skip
    return Trial(recipe, "measured", time_ms=ms, slices=slices, race=race, is_quiet=quiet)


def session_with(tmp_path, monkeypatch, *races):
    world = World(time_ms)
    world.install(monkeypatch)
    session = session_in(world, tmp_path, 240.0, made_up_space()[1])
    for number, trials in enumerate(races, 1):
        session._race = number
        session.keep(trials)
    return session


@pytest.mark.parametrize(("after_s", "quiet"), [(12.0, False), (12.5, True)])
def test_a_neighbour_that_begins_in_the_middle_of_the_final_race_changes_no_claim(
    tmp_path, monkeypatch, after_s, quiet
):
    """After two rounds, and after four."""
    begun = []

    def hear(event):
        if event.doing.startswith("final race"):
            begun.append(world.now)

    world = World(time_ms, neighbour=lambda now: 0.5 if begun and now > begun[0] + after_s else 0.0, beside=beside)
    world.install(monkeypatch)
    space, facts = made_up_space()
    session = session_in(world, tmp_path, 240.0, facts, on_progress=hear)
    last = study(world, session, space, auto)
    winner, verdict = pick_winner(session, last.trials)
    assert {one.quiet for one in winner.slices} == {True, False}
    assert winner.is_quiet == quiet
    assert winner.recipe.levels["runtime"] == "openvino-bf16"
    assert verdict == "faster"
    assert winner.speedup.low <= 14.0 / 2.2 <= winner.speedup.high


def test_no_gain_found_in_a_final_race_on_a_busy_machine_says_so(tmp_path, monkeypatch):
    """The races before were quiet."""
    right = Accuracy(error=0.0, finite=True)
    before = [replace(trial(text, ms), accuracy=right) for text, ms in (("baseline", 9.0), ("precision=bf16", 8.0))]
    session = session_with(tmp_path, monkeypatch, before)
    monkeypatch.setattr(_outcome, "_together", lambda session, winner: None)
    for quiet in (True, False):  # the baseline by itself
        ran = [trial("baseline", 9.0, race=2, quiet=quiet), trial("precision=bf16", 9.0, race=2, quiet=False)]
        equal, load = Interval(1.0, 0.9, 1.1), Load(others=0.5)
        last = [replace(one, accuracy=right, load=load, speedup=equal) for one in ran]
        winner, verdict = pick_winner(session, last)
        assert (winner.recipe, winner.race, verdict) == (Recipe(), 2, "same")
        assert not winner.is_quiet
        assert not winner.load.is_quiet


def test_one_finalist_alone_is_not_announced_as_the_best_of_all(tmp_path, monkeypatch):
    session = session_with(
        tmp_path, monkeypatch, [trial("baseline", 9.0), trial("precision=bf16", 3.0), trial("matmul=medium", 3.01)]
    )
    monkeypatch.setattr(_final_race, "plan_final_race", lambda *more: FinalRacePlan(1, 1, 0))
    final_race(session, made_up_space()[0])
    (_, said) = session.notes
    assert said.endswith("only one of 2 recipes in the final race: matmul=medium may be as fast or faster")


def test_finalists_are_all_that_may_be_the_best_and_one_of_another_kind(tmp_path, monkeypatch):
    near = [f"precision=bf16 grad={level}" for level in ("no_grad", "inference_mode")]
    session = session_with(
        tmp_path, monkeypatch,
        [trial("baseline", 10.0), *(trial(text, 4.0 + 0.01 * index) for index, text in enumerate(near)),
         trial("precision=bf16", 4.03), trial("precision=autocast-bf16", 4.05), trial("matmul=medium", 4.06),
         trial("runtime=onnxruntime", 4.08), trial("channels_last=on", 9.0)],
    )  # fmt: skip
    chosen = [str(one.recipe) for one in session.standings.finalists()]
    assert len(chosen) == 4
    assert "runtime=onnxruntime" in chosen
    assert "channels_last=on" not in chosen


def test_a_leader_that_others_may_beat_is_never_alone_in_the_final_race(tmp_path, monkeypatch):
    for seed in range(4):
        _, last, winner, _, _ = run(tmp_path, monkeypatch, bursts, seed=seed)
        assert len(last.trials) >= 2
        assert winner.race == last.trials[0].race


def test_of_two_that_cannot_be_told_apart_the_simpler_wins(tmp_path, monkeypatch):
    """A longer recipe led by luck; in the final race its own simplification is as fast."""
    long, short = "channels_last=on precision=bf16 grad=no_grad", "channels_last=on precision=bf16"
    session = session_with(tmp_path, monkeypatch, [trial("baseline", 90.0), trial(long, 40.8)])
    last = session.standings.confirmed(
        [trial(text, ms, race=2) for text, ms in (("baseline", 90.0), (long, 42.4), (short, 42.6))]
    )
    session.standings.known[last[2].recipe] = last[2]
    winner, verdict = pick_winner(session, last)
    assert str(winner.recipe) == short
    assert verdict == "faster"
    assert math.isclose(winner.speedup.estimate, 90.0 / 42.6, rel_tol=0.01)


@pytest.mark.parametrize(("quiet", "shared_ms", "wins"), [(False, 4.6, False), (False, 4.0, True), (True, 4.6, True)])
def test_what_helps_beside_a_neighbour_must_gain_more_there(tmp_path, monkeypatch, quiet, shared_ms, wins):
    """A stream a core by a tenth faster than one beside a neighbour: the neighbour may be all of that."""
    plain, shared = "runtime=openvino-bf16", "runtime=openvino-bf16 streams=per-core"
    times = (("baseline", 30.0), (plain, 5.0), (shared, shared_ms))
    session = session_with(tmp_path, monkeypatch, [trial(text, ms, quiet=quiet) for text, ms in times])
    assert str(session.standings.best().recipe) == (shared if wins else plain)
    last = session.standings.confirmed([trial(text, ms, race=2, quiet=quiet) for text, ms in times])
    assert str(pick_winner(session, last)[0].recipe) == (shared if wins else plain)


def test_a_gain_that_every_race_saw_is_not_cannot_tell(tmp_path, monkeypatch):
    """The final race was disturbed so much that it tells nothing by itself."""
    fast = "precision=bf16"
    session = session_with(
        tmp_path, monkeypatch,
        *([trial("baseline", 9.0 + 0.1 * n, race=n), trial(fast, 3.0 + 0.05 * n, race=n)] for n in range(1, 4)),
    )  # fmt: skip
    vague = [trial("baseline", 9.0, race=4), trial(fast, 3.0, race=4)]
    wild = [Slice(one.slices[0].process, turn, ms, ms) for one, base in zip(vague, (9.0, 3.0), strict=True)
            for turn, ms in enumerate([base, 9 * base, base / 9], 1)]  # fmt: skip
    last = session.standings.confirmed([
        Trial(one.recipe, "measured", time_ms=1.0, race=4, slices=wild[3 * place : 3 * place + 3])
        for place, one in enumerate(vague)
    ])  # fmt: skip
    _, verdict = pick_winner(session, last)
    assert verdict == "faster"


def test_the_interval_of_what_cannot_be_told_without_a_final_race_is_that_of_the_best_of_many(tmp_path, monkeypatch):
    """The interval that each of them has alone, 1.0 not in it, was shown beside "cannot tell"."""
    fast = "precision=bf16"
    others = [trial(f"{fast} grad={level}", 9.9) for level in ("no_grad", "inference_mode")]
    session = session_with(tmp_path, monkeypatch, [trial("baseline", 10.0), trial(fast, 8.6), *others])
    assert session.standings.known[Recipe.parse(fast)].speedup.low > 1
    winner, verdict = pick_winner(session, [])
    assert verdict == "cannot tell"
    assert winner.speedup.low <= 1


def held(text, ms, race):
    """Of a process that runs in every race."""
    one = trial(text, ms, race=race)
    return replace(one, slices=[replace(each, process=f"held {text}") for each in one.slices])


@pytest.mark.parametrize("swing", [1.1, 1.0])
def test_where_the_machine_changes_from_race_to_race_all_of_them_tell_the_figure(tmp_path, monkeypatch, swing):
    """Nine times as fast and ten times, in turn: one race alone does not know how much that is."""
    fast = "precision=bf16"
    races = [[held("baseline", 9.5, n), held(fast, 1.0 * swing ** (-0.5 if n % 2 else 0.5), n)] for n in range(1, 9)]
    session = session_with(tmp_path, monkeypatch, *races)
    ran = [replace(one, accuracy=Accuracy(error=0.0, finite=True))
           for one in (held("baseline", 9.5, 9), trial(fast, swing**-0.5, race=9))]  # fmt: skip
    last = session.standings.confirmed(ran)
    winner, verdict = pick_winner(session, last)
    said = _outcome._whose_figure(session, winner, last)
    alone, found = last[1].speedup, winner.speedup
    assert verdict == "faster"
    assert found.low <= 9.5 <= found.high
    assert math.log(found.high / found.low) < (0.8 if swing > 1 else 1.0) * math.log(alone.high / alone.low)
    assert "all 9 races together" in said
    assert str(alone) in said


@pytest.mark.parametrize(("slower_ms", "enough"), [(3.5, True), (9.0, False)])
def test_two_processes_that_differ_by_chance_bring_in_no_more(tmp_path, monkeypatch, slower_ms, enough):
    """A seventh is no reason where all races before saw nothing of the kind; three times as long is one."""
    fast = "precision=bf16"
    session = session_with(
        tmp_path, monkeypatch, *([trial("baseline", 9.0, race=n), trial(fast, 3.0, race=n)] for n in range(1, 4))
    )

    def in_two(text, *times_ms):
        slices = [Slice(f"4 {text} {ms}", turn, ms + 0.01 * (turn % 3)) for ms in times_ms for turn in range(1, 9)]
        right = Accuracy(error=0.0, finite=True)
        return Trial(Recipe.parse(text), "measured", slices=slices, race=4, processes=2, accuracy=right)

    last = [in_two("baseline", 9.0, 9.05), in_two(fast, 3.0, slower_ms)]
    assert is_vague(ratio_interval_of(last))
    assert _is_enough(session, last) == enough


def ratio_interval_of(trials):
    """The speed-up of the second over the first, by what their own processes differ by."""
    logs = contrast_interval([process_logs(one) for one in trials], (1, -1), 0.05)
    return Interval(*map(math.exp, (logs.estimate, logs.low, logs.high)))


def test_threads_that_help_only_beside_a_neighbour_are_advice_and_no_recipe(tmp_path, monkeypatch):
    session = session_with(tmp_path, monkeypatch, [trial("baseline", 8.0), trial("threads=1", 12.0)])
    recipe = Recipe({"threads": "1"})
    session.standings.known[recipe] = replace(session.standings.known[recipe], elapsed_speedup=Interval(6.0, 5.0, 7.0))
    said = _threads_under_load(session, None)
    assert "17% of the time" in said
    assert "150% without them" in said
    assert "--under-load" in said
    session.standings.known[recipe] = replace(session.standings.known[recipe], speedup=None)
    assert "but it is not known how much without them" in _threads_under_load(session, None)


def test_a_study_that_is_resumed_knows_the_races_that_repeated_what_was_known(tmp_path, monkeypatch):
    session = session_with(
        tmp_path, monkeypatch,
        [trial("baseline", 9.0), trial("precision=bf16", 3.0)],
        [trial("baseline", 9.1, race=2), trial("precision=bf16", 3.0, race=2), trial("matmul=medium", 5.0, race=2)],
    )  # fmt: skip
    again = session.study.note("again in race 2")
    assert [Trial.from_json(item).recipe for item in again] == [Recipe(), Recipe({"precision": "bf16"})]
    assert session.standings.fit.speedup(Recipe({"matmul": "medium"})).estimate == pytest.approx(9.05 / 5, rel=0.05)


def resumed(session, tmp_path):
    """Another run of its study."""
    again = session_in(World(time_ms), tmp_path, 240.0, made_up_space()[1])
    kept, notes = list(session.standings.known.values()), session.study.notes
    again.study = SimpleNamespace(
        trials=lambda: kept, note=notes.get, set_note=notes.__setitem__, add=lambda trial, facts: None,
        notes=lambda start: [value for key, value in notes.items() if key.startswith(start)],
    )  # fmt: skip
    again.refresh()
    return again


def test_no_race_of_a_resumed_study_has_the_number_of_an_earlier_one(tmp_path, monkeypatch):
    """The final race is kept under a number of its own: rounds of another day would be paired with its rounds."""
    session = session_with(tmp_path, monkeypatch, [trial("baseline", 9.0), trial("precision=bf16", 3.0)])
    last = [trial("baseline", 9.0, race=2), trial("precision=bf16", 3.0, race=2)]
    session.study.set_note("final race", [one.to_json() for one in last])
    assert resumed(session, tmp_path)._race == 2


@pytest.mark.parametrize(("status", "ms", "races"), [("measured", 3.0, 0), ("measured", 8.98, 1), ("failed", 3.0, 1)])
def test_a_final_race_that_told_nothing_is_run_again(tmp_path, monkeypatch, status, ms, races):
    """A longer budget may settle it, the result says; and what killed the leader may be gone."""

    def right(text, ms, **more):
        return replace(trial(text, ms, **more), accuracy=Accuracy(error=0.0, finite=True))

    session = session_with(tmp_path, monkeypatch, [right("baseline", 9.0), right("precision=bf16", 3.0)])
    last = [right("baseline", 9.0, race=2), replace(right("precision=bf16", ms, race=2), status=status)]
    session.study.set_note("final race", [one.to_json() for one in last])
    again, before = resumed(session, tmp_path), session._race
    found = final_race(again, made_up_space()[0])
    assert again._race - before - 1 == races
    assert pick_winner(again, found.trials)[1] == "faster"
    assert ("again in race 2" in session.study.notes) == bool(races)


def test_preconditions_that_win_are_called_what_their_figures_say(tmp_path, monkeypatch):
    """Nothing else was shown to gain; eval mode, which right answers need, did."""
    plain, leader = preconditions(made_up_space()[1]), "mode=eval precision=bf16"
    session = session_with(tmp_path, monkeypatch, [trial("baseline", 9.0), trial(str(plain), 6.0), trial(leader, 5.9)])
    session.standings.allowed = lambda recipe: bool(recipe.levels)  # its answers are wrong
    last = [trial("baseline", 9.0, race=2), replace(trial(leader, 9.0, race=2), speedup=Interval(1.0, 0.5, 2.0))]
    monkeypatch.setattr(_outcome, "_together", lambda session, winner: None)
    winner, claim = pick_winner(session, last)
    assert winner.recipe == plain
    assert claim == "faster"
    assert not _outcome._whose_figure(session, winner, [*last, trial(str(plain), 6.1, race=2)])
    assert winner.speedup.low > 1.3


@pytest.mark.parametrize(("again_mib", "winner"), [(90, "precision=bf16"), (100, "baseline")])
def test_less_memory_that_the_final_race_did_not_see_does_not_win(tmp_path, monkeypatch, again_mib, winner):
    def of(mib, one):
        right = Accuracy(error=0.0, finite=True)
        return replace(one, peak_bytes=mib << 20, speedup=Interval(1.0, 0.9, 1.1), accuracy=right)

    session = session_with(
        tmp_path, monkeypatch, [of(100, trial("baseline", 9.0)), of(90, trial("precision=bf16", 9.0))]
    )
    session.standings.goal = "memory"
    last = [of(100, trial("baseline", 9.0, race=2)), of(again_mib, trial("precision=bf16", 9.0, race=2))]
    assert pick_winner(session, last)[0].recipe == Recipe.parse(winner)
