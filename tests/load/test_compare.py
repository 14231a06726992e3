"""Two load runs compared: what differs is found, what does not is not, and noise is no verdict."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fettle.errors import UsageError
from fettle.load.compare import compare, ratio_interval, read_baseline
from fettle.load.run import Run, as_data


def run(seed, scale=1.0, answers=4000, mode="closed", void="", spread=0.2):
    """A closed loop whose latencies are log-normal around 20 ms."""
    latency = np.random.default_rng(seed).lognormal(np.log(0.02 * scale), spread, answers)
    done = np.cumsum(latency) / 8
    made = Run(mode, answers / done[-1], float(done[-1]), latency, 8 if mode == "closed" else 0, {200: answers},
               mean_inflight=8.0, done_s=done, void=void)  # fmt: skip
    return as_data(made)


def baseline(tmp_path, *runs):
    path = tmp_path / "earlier.json"
    path.write_text(json.dumps(runs))
    return read_baseline(path)


def verdicts(changes):
    return {change.measure: change.verdict for change in changes}


def test_a_slower_server_is_worse_and_a_faster_one_better(tmp_path):
    then = baseline(tmp_path, run(1))
    assert verdicts(compare([run(2, 1.2)], then)) == {"answers/s": "worse", "p50": "worse", "p99": "worse"}
    assert verdicts(compare([run(2, 0.8)], then)) == {"answers/s": "better", "p50": "better", "p99": "better"}


def test_the_same_server_is_the_same(tmp_path):
    assert verdicts(compare([run(2, answers=40_000)], baseline(tmp_path, run(1, answers=40_000)))) == dict.fromkeys(
        ("answers/s", "p50", "p99"), "same"
    )


def test_noise_is_no_verdict(tmp_path):
    then = baseline(tmp_path, run(1, answers=1000, spread=1.5))
    found = compare([run(2, 1.03, answers=1000, spread=1.5)], then)
    assert verdicts(found)["p99"] == "cannot tell"


def test_too_few_answers_and_void_runs_tell_nothing(tmp_path):
    (few,) = [c for c in compare([run(2, 2.0, answers=200)], baseline(tmp_path, run(1))) if c.measure == "p99"]
    assert (few.verdict, few.why) == ("cannot tell", "too few answers for an interval")
    void = compare([run(2, 2.0, void="late")], baseline(tmp_path, run(1)))
    assert {change.verdict for change in void} == {"cannot tell"}
    assert "void" in void[0].why


def test_only_loads_that_are_alike(tmp_path):
    with pytest.raises(UsageError, match="8 clients"):
        compare([run(2, mode="open")], baseline(tmp_path, run(1)))
    nothing = {**run(1, mode="open"), "rate": 0.0}
    with pytest.raises(UsageError, match="no run of the same load"):
        compare([run(2, mode="open")], baseline(tmp_path, nothing))


def test_of_two_loads_that_are_alike_the_nearer(tmp_path):
    then = baseline(tmp_path, {**run(1, 0.5, mode="open"), "rate": 95.0}, {**run(1, mode="open"), "rate": 100.0})
    assert verdicts(compare([{**run(1, mode="open"), "rate": 100.0}], then))["p50"] == "same"


@pytest.mark.parametrize("text", ["", "[]", "{}", "[1]", '[{"mode": "closed"}]', '{"runs": 3}', "\x00", "[" * 10**5])
def test_what_is_no_baseline(tmp_path, text):
    (tmp_path / "b").write_text(text)
    with pytest.raises(UsageError):
        read_baseline(tmp_path / "b")
    with pytest.raises(UsageError):
        read_baseline(tmp_path / "missing")


@given(
    values=st.lists(st.floats(0.1, 100), min_size=3, max_size=20),
    other=st.lists(st.floats(0.1, 100), min_size=3, max_size=20),
)
@settings(max_examples=100, deadline=None)
def test_an_interval_holds_its_estimate_and_turns_with_its_sides(values, other):
    ratio, low, high = ratio_interval(values, other, 0.95)
    assert low <= ratio * (1 + 1e-9)
    assert ratio <= high * (1 + 1e-9)
    back = ratio_interval(other, values, 0.95)
    assert (back[0], back[1], back[2]) == pytest.approx((1 / ratio, 1 / high, 1 / low), rel=1e-6)


def test_one_in_twenty_equal_pairs_at_most_is_called_different(tmp_path):
    """The interval keeps its promise, roughly: of 60 pairs of equal servers hardly any is called better or worse."""
    wrong = 0
    for seed in range(60):
        found = compare([run(1000 + seed, answers=1500)], baseline(tmp_path, run(seed, answers=1500)))
        wrong += verdicts(found)["p99"] in ("better", "worse")
    assert wrong <= 7
