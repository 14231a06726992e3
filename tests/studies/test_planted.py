"""The small form of bench/planted_effects.py: intervals hold as often as they say, the planted surprise comes first."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "planted_effects.py"


@pytest.fixture(scope="module")
def planted():
    spec = importlib.util.spec_from_file_location("planted_effects", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("design", ["four switches", "three levels, twice", "two thirds of six"])
def test_intervals_hold_and_the_surprise_is_first(planted, design):
    studies = 90
    found = [planted.judge(planted.plant(design, "recorded", 0.02, seed)) for seed in range(studies)]
    held, told = (sum(one[place] for one in found) for place in (0, 1))
    assert told > 8 * studies
    assert 0.92 <= held / told <= 0.975  # 0.95; intervals of one study hang together, so this varies by about 0.01
    assert sum(one[3] for one in found) >= 0.95 * studies
    assert sum(one[2] > 0 for one in found) <= 0.11 * studies  # Holm: at most 5% of studies claim something false


def test_a_wrong_truth_would_be_seen(planted):
    """The judge does fail: planted gains that are not those of the data are outside the intervals."""
    made = planted.plant("four switches", "normal", 0.01, 1)
    wrong = planted.Planted(made.table, {term: gain + 0.2 for term, gain in made.gains.items()}, made.surprise)
    held, told, *_ = planted.judge(wrong)
    assert held < 0.5 * told
