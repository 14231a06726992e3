"""The model over all races, on made-up races whose truth is known."""

import math
import random
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from fettle.measure import Interval, Slice, Trial
from fettle.recipe import Recipe
from fettle.tuning.model import (
    LASTING_STRETCH,
    PRIOR_DRIFT,
    PRIOR_STRETCH,
    Point,
    Races,
    Shared,
    _Solved,
    fit,
    points_of,
    widened,
)

GIVEN = Recipe()
FAST, FASTER, SLOW = (Recipe({"precision": level}) for level in ("bf16", "autocast-bf16", "fp16"))
TRUTH_MS = {GIVEN: 8.0, FAST: 4.0, FASTER: 2.0, SLOW: 10.0}


class Machine:
    """Processes differ by luck, rounds by noise; a race stretches what its recipes differ by, the host all of them."""

    def __init__(
        self, seed: int, luck: float = 0.02, noise: float = 0.01, stretch: float = 0.0, lasting: float = 0.0
    ) -> None:
        self.random, self.luck, self.noise, self.stretch = random.Random(seed), luck, noise, stretch
        self.lasting = random.Random(f"{seed} lasting").gauss(0, lasting)
        self.lucks: dict[str, float] = {}

    def race(self, number, recipes, *, rounds=8, processes=1, slower=None, quiet=True, by_quota=False):
        """A race in which some recipes took so many times longer than they should."""
        trials, stretch = [], 1 + self.lasting + self.random.gauss(0, self.stretch)
        for recipe in recipes:
            slices, true_ms = [], TRUTH_MS[GIVEN] * (TRUTH_MS[recipe] / TRUTH_MS[GIVEN]) ** stretch
            for copy in range(processes):
                name = "held" if recipe == GIVEN and processes == 1 else f"{number}:{recipe}:{copy}"
                luck = self.lucks.setdefault(name, self.random.gauss(0, self.luck))
                for turn in range(1, rounds + 1):
                    ms = true_ms * math.exp(luck + self.random.gauss(0, self.noise))
                    elapsed = ms * (slower or {}).get(recipe, 1.0)
                    waits = 0.0 if quiet else 0.8
                    slices.append(Slice(name, turn, elapsed, ms, quiet, waits, by_quota=by_quota))
            trials.append(Trial(recipe, "measured", time_ms=1.0, slices=slices, race=number))
        return trials


def test_a_baseline_that_was_slow_in_one_race_lifts_nobody():
    """In the second race the model as given took nine times as long, and what runs in one thread no longer: over it the
    slow recipe has the greatest ratio of all that were measured once, and it leads nobody that it met."""
    machine = Machine(1)
    races = Races(elapsed=True)
    races.add(machine.race(1, [GIVEN, FASTER, FAST]))
    races.add(machine.race(2, [GIVEN, FASTER, SLOW], slower={GIVEN: 9.0}))
    assert races.fit().speedup(FASTER, SLOW).estimate > 1.3


def test_waiting_that_was_taken_out_widens_the_interval():
    quiet, busy = Races(), Races()
    quiet.add(Machine(2).race(1, [GIVEN, FAST], processes=3))
    busy.add(Machine(2).race(1, [GIVEN, FAST], processes=3, quiet=False, slower={GIVEN: 6.0, FAST: 1.5}))
    one, other = quiet.fit().log_ratio(FAST, GIVEN), busy.fit().log_ratio(FAST, GIVEN)
    assert one.estimate == pytest.approx(other.estimate, abs=0.02)
    assert other.high - other.low > 2 * (one.high - one.low)


def test_what_a_quota_stopped_is_known_better_than_what_others_took():
    stopped, beside = (
        Machine(2).race(1, [GIVEN, FAST], quiet=False, by_quota=by_quota, slower={GIVEN: 6.0, FAST: 6.0})
        for by_quota in (True, False)
    )
    ratio = Interval(2.0, 1.96, 2.04)
    widths = []
    for given, fast in (stopped, beside):
        found = widened(replace(fast, speedup=ratio), given, 0.95).speedup
        widths.append(math.log(found.high / found.low) / 2)
    assert widths[0] == pytest.approx(math.hypot(1.96 * math.hypot(0.03, 0.03), 0.02), rel=0.01)
    assert widths[1] > 4 * widths[0]


def test_a_comparison_beside_others_allows_for_what_was_taken_out():
    ratio = Interval(2.0, 1.96, 2.04)
    quiet, busy = (
        [replace(one, speedup=ratio) for one in Machine(2).race(1, [GIVEN, FAST], quiet=quiet, slower={GIVEN: 6.0})]
        for quiet in (True, False)
    )
    assert widened(quiet[1], quiet[0], 0.95) is quiet[1]
    assert widened(busy[0], busy[0], 0.95) is busy[0]
    found = widened(busy[1], busy[0], 0.95).speedup
    half = 1.96 * math.hypot(0.05 + 0.12 * math.log(6), 0.05)
    assert math.log(found.high / 2) == pytest.approx(math.hypot(half, 0.02), rel=0.01)
    assert found.low * found.high == pytest.approx(ratio.low * ratio.high)
    nothing = replace(busy[1], speedup=None)
    assert widened(nothing, busy[0], 0.95) is nothing


def test_intervals_hold_the_truth_as_often_as_they_say():
    held = told = 0
    for seed in range(300):
        machine = Machine(seed, stretch=PRIOR_STRETCH, lasting=LASTING_STRETCH)
        races = Races()
        races.add(machine.race(1, [GIVEN, FAST, SLOW]))
        races.add(machine.race(2, [GIVEN, FAST, FASTER]))
        races.add(machine.race(3, [GIVEN, FAST, FASTER], processes=2))
        fit = races.fit()
        alone = races.of_race(3, fit)
        for found in (fit.speedup(FASTER), alone.speedup(FASTER)):
            told += 1
            held += found.low <= 4.0 <= found.high
    assert 0.92 <= held / told <= 0.995


def test_what_lasts_for_longer_than_a_study_is_in_every_interval():
    """Races that agree, of processes that hardly differ: half of what other hours differ by is left."""
    machine, races = Machine(9, luck=0.0, noise=0.001), Races()
    for number in range(1, 9):
        races.add(machine.race(number, [GIVEN, FASTER], processes=2))
    found = races.fit().log_ratio(FASTER, GIVEN)
    assert found.high - found.estimate >= 1.96 * LASTING_STRETCH * found.estimate


@pytest.mark.parametrize("shift", [1.0, 1.2])
def test_what_recipes_drift_from_race_to_race_widens_what_one_race_says(shift):
    machine, races = Machine(5), Races(elapsed=True)
    for number in range(1, 6):
        given, fast = machine.race(number, [GIVEN, FAST], slower={FAST: shift ** (-1) ** number})
        held = [replace(one, process="held fast") for one in fast.slices]
        races.add([given, replace(fast, slices=held)])
    races.add(machine.race(6, [GIVEN, FAST], processes=2))
    with_it, without = (
        math.log(found.high / found.low) / 2
        for found in (races.of_race(6, races.fit(), drifts=drifts).speedup(FAST) for drifts in (True, False))
    )
    assert without == pytest.approx(0.07, abs=0.02)
    assert with_it == pytest.approx(without if shift == 1 else 0.4, abs=0.1)
    assert with_it > without


def test_more_processes_of_a_race_do_not_average_out_what_a_recipe_drifts():
    """They drift together: where four of each ran in one of two races its ratio is no surer for that."""
    errors = []
    for processes in (1, 4):
        machine, races = Machine(6, luck=0.0), Races(elapsed=True)
        for number in range(1, 6):
            given, fast = machine.race(number, [GIVEN, FAST], slower={FAST: 1.2 ** (-1) ** number})
            held = [replace(one, process="held fast") for one in fast.slices]
            races.add([given, replace(fast, slices=held)])
        races.add(machine.race(6, [GIVEN, FASTER], processes=processes))
        found = races.fit()
        weights = found.solved.contrast(found.recipes[FASTER], found.recipes[GIVEN])
        errors.append(math.sqrt(sum(part.of(weights) for part in (*found.noise, *found.of_spread, *found.of_drift))))
    assert errors[1] > 0.8 * errors[0]


def test_a_drift_is_told_by_the_recipes_whose_rounds_can_show_it():
    """One recipe scatters by a fifth from round to round, which is no drift, nor the scale of what the others do."""
    drifts = []
    for seed in range(40):
        steady = Machine(seed, luck=0.0, noise=0.005, stretch=2 * PRIOR_STRETCH)
        rough = Machine(seed, luck=0.0, noise=0.2)
        races, draw = Races(elapsed=True), random.Random(seed)
        for number in range(1, 7):
            shifts = {recipe: math.exp(draw.gauss(0, 2 * PRIOR_DRIFT)) for recipe in (GIVEN, FAST, FASTER)}
            trials = steady.race(number, list(shifts), slower=shifts) + rough.race(number, [SLOW])
            for trial in trials:
                held = [replace(each, process=f"held {trial.recipe}") for each in trial.slices]
                races.add([replace(trial, slices=held)])
        drifts.append(races.fit().drift)
    assert sum(drift.variance for drift in drifts) / len(drifts) == pytest.approx(2**2, rel=0.3)


def test_a_process_that_is_slow_for_life_moves_little():
    machine = Machine(3)
    races = Races()
    races.add(machine.race(1, [GIVEN, FAST, FASTER, SLOW]))
    machine.lucks["2:precision=bf16:0"] = 0.3
    races.add(machine.race(2, [GIVEN, FAST, FASTER], processes=4))
    assert races.fit().speedup(FAST).estimate == pytest.approx(2.0, rel=0.05)


def test_rows_that_are_alone_cost_next_to_nothing(monkeypatch):
    """Most recipes of a large study run once. What is solved are the other rows, and the answer is that of all."""
    random, sizes, invert = np.random.default_rng(0), [], np.linalg.inv
    recipes, races = np.array([[0, 1, 2, 3, 0, 1, 4, 5, 0, 6, 7, 8, 9], [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3]])
    parts = [Shared(groups, random.normal(size=13)) for groups in (np.arange(13), recipes, races, recipes % 3)]
    every, values = np.arange(13), random.normal(size=13)
    variance = sum(part.between(every, every) for part in parts)
    monkeypatch.setattr(np.linalg, "inv", lambda matrix: (sizes.append(len(matrix)), invert(matrix))[1])
    solved = _Solved(np.array([recipes, 10 + races]), values, parts)
    assert sizes == [5]  # 0 and 1 ran in several races
    design = np.hstack([np.eye(10)[recipes], np.eye(4)[races]])
    whole = np.linalg.pinv(design.T @ invert(variance) @ design, rcond=1e-9, hermitian=True)
    effects = whole @ design.T @ invert(variance) @ values
    contrast = np.zeros(14)
    for one, other in ((1, 0), (4, 2), (5, 7), (9, 8)):
        contrast[:] = 0
        contrast[[one, other]] = 1, -1
        weights = solved.contrast(one, other)
        assert weights @ design == pytest.approx(contrast, abs=1e-9)
        assert weights @ values == pytest.approx(contrast @ effects, abs=1e-9)
        assert contrast[:10] @ solved.effects[:10] == pytest.approx(contrast @ effects, abs=1e-9)
        assert sum(part.of(weights) for part in parts) == pytest.approx(contrast @ whole @ contrast)
    assert solved.contrast(9, 0) is None  # no race connects them
    assert values - design @ solved.effects == pytest.approx(values - design @ effects)


def test_a_large_study_needs_no_matrix_as_large_as_its_square():
    """As of thousands of recipes, six in a race beside the workload as given and the leader."""
    random, size, leader = np.random.default_rng(0), 600, Recipe({"threads": "1"})
    points = [
        Point((race, 0), f"{one}", one, float(random.normal()), 1e-4)
        for race in range(size // 6)
        for one in (GIVEN, leader, *(Recipe({"batch": f"x{6 * race + place}"}) for place in range(6)))
    ]
    tracemalloc.start()
    try:
        found = fit(points)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(found.recipes) == size + 2
    assert found.speedup(Recipe({"batch": "x7"}), leader) is not None
    assert peak < 2 * 8 * len(points) ** 2


def test_recipes_that_no_race_connects_are_not_compared():
    machine = Machine(4)
    races = Races()
    races.add(machine.race(1, [GIVEN, FAST]))
    races.add(machine.race(2, [FASTER, SLOW]))
    fit = races.fit()
    assert fit.speedup(FAST) is not None
    assert fit.log_ratio(FASTER, SLOW) is not None
    assert fit.speedup(FASTER) is None
    assert fit.speedup(Recipe({"grad": "no_grad"})) is None


def test_quiet_rounds_leave_the_busy_ones_out():
    machine = Machine(5, luck=0.0, noise=0.0)
    quiet = machine.race(1, [GIVEN, FAST], rounds=3)
    busy = machine.race(1, [GIVEN, FAST], rounds=5, quiet=False)
    trials = [
        Trial(one.recipe, "measured", slices=[*one.slices, *(Slice(s.process, s.round + 3, 50.0, 50.0, False, 0.9)
                                                           for s in other.slices)], race=1)
        for one, other in zip(quiet, busy, strict=True)
    ]  # fmt: skip
    races = Races()
    races.add(trials)
    assert races.fit().speedup(FAST).estimate == pytest.approx(2.0)


def test_races_may_come_in_parts_and_again():
    machine = Machine(6)
    trials = machine.race(1, [GIVEN, FAST, FASTER])
    whole, parts = Races(), Races()
    whole.add(trials)
    for part in (trials[2:], trials[:2], trials[:1]):
        parts.add(part)
    assert parts.fit().speedup(FASTER).low == pytest.approx(whole.fit().speedup(FASTER).low)
    assert Races().fit() is None


def test_a_recipe_that_missed_one_far_from_the_rest_is_not_put_nearer_to_it():
    machine = Machine(8, luck=0.0, noise=0.0)
    trials = {one.recipe: one for one in machine.race(1, [GIVEN, FAST, FASTER], rounds=6)}
    early, late = (trials[GIVEN].slices[:3], trials[FASTER].slices[3:])
    races = Races()
    races.add(
        [Trial(GIVEN, "measured", race=1, slices=early), trials[FAST], Trial(FASTER, "measured", race=1, slices=late)]
    )
    assert races.fit().speedup(FASTER).estimate == pytest.approx(4.0)


def test_processes_of_a_race_that_no_rounds_connect_are_not_compared():
    machine = Machine(9, luck=0.0, noise=0.0)
    quiet, busy = machine.race(1, [GIVEN, FAST]), machine.race(1, [FASTER, SLOW], quiet=False)
    races = Races()
    races.add([*quiet, *busy])
    fit = races.fit()
    assert fit.speedup(FASTER) is None
    assert fit.speedup(FAST).estimate == pytest.approx(2.0)
    assert fit.log_ratio(FASTER, SLOW) is not None


def test_a_process_that_met_nobody_says_nothing():
    machine = Machine(7)
    first, second = machine.race(1, [GIVEN, FAST])
    second = Trial(FAST, "measured", race=1, slices=[Slice("x", 99, 4.0, 4.0)])
    assert points_of(1, [first, second]) == []
