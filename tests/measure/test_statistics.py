"""The statistics of a race, against textbook values and by simulation."""

import math

import numpy as np
import pytest

from fettle.measure import Interval, contrast_interval, log_interval, places, ratio_interval, verdict
from fettle.measure._statistics import LOOKS, _signed_rank_quantile, exp, is_exhausted, is_vague


@pytest.mark.parametrize(("n", "cut"), [(6, 1), (8, 4), (10, 9), (15, 26), (20, 53), (25, 90)])
def test_signed_rank_cut_agrees_with_published_tables(n: int, cut: int) -> None:
    # Two-sided 5%: critical values T of the Wilcoxon table are cut - 1 (Siegel 1956, table G; n=8: 3, n=20: 52).
    assert _signed_rank_quantile(n, 0.05) == cut


def test_too_few_observations_tell_nothing() -> None:
    assert math.isnan(log_interval([], 0.05).estimate)
    assert log_interval([0.3], 0.05) == Interval(0.3, -math.inf, math.inf)
    assert ratio_interval([0.3], 0.05).high == math.inf


def test_estimate_is_the_pseudo_median_and_ignores_an_outlier() -> None:
    found = log_interval([0.10, 0.11, 0.09, 0.10, 0.12, 0.08, 0.10, 5.0], 0.05)
    assert found.estimate == pytest.approx(0.10, abs=0.02)
    assert found.low <= found.estimate <= found.high


@pytest.mark.parametrize("n", [3, 5, 8, 20, 48])
def test_interval_covers_the_truth_as_often_as_it_says(n: int) -> None:
    random = np.random.default_rng(n)
    hits = 0
    for _ in range(400):
        found = log_interval(0.03 + 0.02 * random.standard_t(4, n), 0.05)
        hits += found.low <= 0.03 <= found.high
    assert hits / 400 >= 0.92  # 95% less three standard errors


def test_repeated_looks_keep_the_error_rate() -> None:
    random = np.random.default_rng(7)
    wrong = 0
    for _ in range(300):
        x = 0.02 * random.standard_normal(LOOKS[-1])
        intervals = [log_interval(x[:look], 0.05 / len(LOOKS)) for look in LOOKS]
        wrong += any(not found.low <= 0 <= found.high for found in intervals)
    assert wrong / 300 <= 0.09


@pytest.mark.parametrize(
    ("interval", "word"),
    [
        (Interval(1.2, 1.1, 1.3), "faster"),
        (Interval(0.8, 0.7, 0.9), "slower"),
        (Interval(1.0, 0.995, 1.005), "same"),
        (Interval(1.004, 1.001, 1.008), "same"),
        (Interval(1.05, 0.98, 1.12), "cannot tell"),
        (Interval(1.008, 1.001, 1.015), "cannot tell"),
        (Interval(0.9912, 0.9835, 0.9991), "cannot tell"),
        (Interval(math.nan, 0, math.inf), "cannot tell"),
        (Interval(87.25, 5.1, 1490.0), "cannot tell"),  # three rounds of a model and itself, on a crowded machine
        (Interval(0.011, 0.0007, 0.2), "cannot tell"),
    ],
)
def test_verdict(interval: Interval, word: str) -> None:
    assert verdict(interval, 0.01) == word


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_what_a_process_is_given_for_life_does_not_pass_for_a_difference(processes: int) -> None:
    """Processes of the same code differ by 1%, rounds by 2%: rounds alone claim a difference, replicates do not."""
    generator = np.random.default_rng(7)
    claims = {"rounds": 0, "replicates": 0}
    for _ in range(300):
        effects = generator.normal(0, 0.01, (2, processes, 1))
        common = generator.normal(0, 0.3, 30)  # what a round does to all
        logs = effects + common + generator.normal(0, 0.02, (2, processes, 30))
        first, second = [[dict(enumerate(process, 1)) for process in group] for group in logs]
        found = contrast_interval([first, second], (1, -1), 0.05)
        claims["replicates"] += not found.low <= 0 <= found.high
        rounds = log_interval((logs[0].mean(axis=0) - logs[1].mean(axis=0)).tolist(), 0.05)
        claims["rounds"] += not rounds.low <= 0 <= rounds.high
    assert claims["replicates"] <= 0.08 * 300
    assert claims["rounds"] > 0.2 * 300


def test_replicates_find_a_difference_of_three_per_cent() -> None:
    generator = np.random.default_rng(8)
    found = 0
    for _ in range(200):
        logs = generator.normal(0, 0.007, (2, 4, 1)) + generator.normal(0, 0.02, (2, 4, 48))
        logs[0] += np.log(1.03)
        first, second = [[dict(enumerate(process, 1)) for process in group] for group in logs]
        found += contrast_interval([first, second], (1, -1), 0.05).low > 0
    assert found >= 0.9 * 200


@pytest.mark.parametrize("gap", [0.0, 1.0])
def test_slices_in_which_the_machine_was_taken_away_do_not_widen_the_interval(gap: float) -> None:
    """One slice in seven takes 1.2 to 2.7 times as long; it is as well known beside a gap as without."""
    generator = np.random.default_rng(9)
    claims, found = 0, 0
    for _ in range(200):
        logs = generator.normal(0, 0.003, (2, 4, 1)) + generator.normal(0, 0.02, (2, 4, 48))
        logs += generator.uniform(0.2, 1.0, logs.shape) * (generator.random(logs.shape) < 0.15)
        logs[0] += gap
        first, second = [[dict(enumerate(process, 1)) for process in group] for group in logs]
        interval = contrast_interval([first, second], (1, -1), 0.05)
        claims += not interval.low <= gap <= interval.high
        found += interval.high < gap + np.log(1.03)
    assert claims <= 0.08 * 200
    assert found >= 0.9 * 200


def test_six_processes_see_past_one_that_is_slow_for_life() -> None:
    """Its side's trimmed mean leaves it out."""
    generator = np.random.default_rng(10)
    claims, found = 0, 0
    for _ in range(200):
        logs = generator.normal(0, 0.007, (2, 6, 1)) + generator.normal(0, 0.02, (2, 6, 30))
        logs[generator.integers(2), 0] += generator.uniform(0.1, 0.3)
        first, second = [[dict(enumerate(process, 1)) for process in group] for group in logs]
        interval = contrast_interval([first, second], (1, -1), 0.05)
        claims += not interval.low <= 0 <= interval.high
        found += interval.high < np.log(1.03)
    assert claims <= 0.08 * 200
    assert found >= 0.85 * 200


@pytest.mark.parametrize(("rounds", "lasting"), [(4, 0.0), (11, 0.0), (20, 0.0), (20, 0.5), (40, 0.7)])
def test_what_a_host_does_to_all_processes_of_a_recipe_is_no_agreement_between_them(rounds, lasting) -> None:
    """From round to round one of two recipes gains or loses 4%, in all its processes alike; a part of it lasts. By the
    spread of processes alone more than half of such intervals miss."""
    generator, held, claimed = np.random.default_rng(13), 0, 0
    for _ in range(200):
        moments = [generator.normal(0, 0.04)]
        for _ in range(rounds - 1):
            moments.append(lasting * moments[-1] + math.sqrt(1 - lasting**2) * generator.normal(0, 0.04))
        logs = generator.normal(0, 0.005, (2, 4, 1)) + generator.normal(0, 0.01, (2, 4, rounds))
        logs[0] += moments
        first, second = [[dict(enumerate(process, 1)) for process in group] for group in logs]
        found = contrast_interval([first, second], (1, -1), 0.05)
        held += found.low <= 0 <= found.high
        claimed += is_exhausted(first, second, 0.05, 0.001)
    assert held >= 0.85 * 200
    assert claimed <= 0.2 * 200


def test_processes_that_came_later_are_told_apart_by_the_rounds_that_they_share() -> None:
    """The first two of each ran in rounds 0 to 9, all in rounds 10 to 19, in which the machine took twice as long."""
    common = {number: 0.0 if number < 10 else 0.7 for number in range(20)}
    groups = [
        [
            {number: level + offset + slow for number, slow in common.items() if number >= begin}
            for offset, begin in ((0.0, 0), (0.001, 0), (0.002, 10), (0.003, 10))
        ]
        for level in (0.5, 0.0)
    ]
    found = contrast_interval(groups, (1, -1), 0.05)
    assert found.estimate == pytest.approx(0.5)
    assert 0.49 < found.low < found.high < 0.51


def test_a_pair_that_never_met_costs_neither_the_figure_nor_its_truth() -> None:
    """On a machine that comes and goes one process had its quiet rounds when another had busy ones."""
    whole = [[{n: level + 0.01 * copy + 0.1 * n for n in (1, 2, 3)} for copy in range(4)] for level in (0.5, 0.0)]
    whole[0][0] = {1: whole[0][0][1]}
    without = [[dict(process) for process in group] for group in whole]
    for process in without[1][1:]:
        del process[1]  # these three and the first of the others have no round in common
    found, expected = (contrast_interval(groups, (1, -1), 0.05) for groups in (without, whole))
    assert found.estimate == pytest.approx(0.5)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_processes_that_no_rounds_connect_are_not_compared() -> None:
    quiet, busy = {1: 0.5, 2: 0.6}, {-1: 1.5, -2: 1.6}
    assert places([quiet, busy, quiet]) == [{0: 0.0, 2: 0.0}, {1: 0.0}]
    found = contrast_interval([[quiet, quiet], [busy, busy]], (1, -1), 0.05)
    assert math.isnan(found.estimate)
    assert verdict(exp(found), 0.01) == "cannot tell"
    assert is_vague(exp(found))
    assert not is_exhausted([quiet, quiet], [busy, busy], 0.05, 0.01)


@pytest.mark.parametrize(
    ("spread", "noise", "rounds", "exhausted"),
    [(0.03, 0.01, 10, True), (0.003, 0.03, 4, False), (0.003, 0.03, 10, False), (0.001, 0.001, 4, True)],
)
def test_more_rounds_are_needless_beside_what_processes_differ_by(spread, noise, rounds, exhausted) -> None:
    """Or where the interval is narrow already: in nearly all of 40 races."""
    generator, found = np.random.default_rng(11), 0
    for _ in range(40):
        logs = generator.normal(0, spread, (2, 4, 1)) + generator.normal(0, noise, (2, 4, rounds))
        first, second = [[dict(enumerate(process, 1)) for process in group] for group in logs]
        found += is_exhausted(first, second, 0.025, 0.01)
    assert found >= 36 if exhausted else found <= 4


@pytest.mark.parametrize(
    ("interval", "vague"),
    [
        (Interval(1.0, 0.98, 1.02), False),
        (Interval(1.0, 0.95, 1.05), True),
        (Interval(0.97, 0.9, 1.05), True),
        (Interval(10.0, 8.0, 12.5), False),
        (Interval(9.38, 3.66, 24.09), True),
        (Interval(2.0, 0.0, math.inf), True),
    ],
)
def test_vague_is_what_leaves_open_how_fast_it_is(interval: Interval, vague: bool) -> None:
    assert is_vague(interval) == vague


def test_two_processes_that_differ_by_a_third_still_tell_ten_times_from_none() -> None:
    slower, faster = [[{0: level, 1: level + 0.1} for level in levels] for levels in ((2.3, 2.6), (0.0, 0.01))]
    found = contrast_interval([slower, faster], (1, -1), 0.05)
    assert 1 < found.low < found.estimate < found.high < 4


def test_processes_equal_to_the_last_bit_have_no_interval() -> None:
    same = [{0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0}]
    assert contrast_interval([same, same], (1, -1), 0.05) == Interval(0.0, 0.0, 0.0)
