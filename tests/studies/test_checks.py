"""What is checked of a fit: each doubt is planted, and a good fit has none."""

import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from fettle.studies.checks import check, hold_out
from fettle.studies.model import fit
from fettle.studies.table import Experiment, Table
from tests.studies.made_up import TIME, switches, table

GAINS = {"a=on": 0.5, "b=on": 0.2, "a=on b=on": 0.3}


def doubts(made):
    return check(fit(made, "", TIME))


def test_a_good_fit_has_no_doubts():
    found = doubts(table(GAINS, switches("abcd"), noise=0.01, repeats=2))
    assert found.doubts == ()
    assert found.believed
    assert found.explained > 0.99
    assert found.scatter == pytest.approx(1.01, abs=0.005)
    assert found.held_out.off < 1.03 < found.held_out.mean_off


def test_holding_out_is_fitting_to_the_rest():
    made = table(GAINS, switches("abc"), noise=0.05, repeats=2)
    model = fit(made, "", TIME)
    errors = []
    for places in model.cells():
        rest = np.delete(np.arange(len(model.rows)), places)
        solved = np.linalg.lstsq(model.x[rest], model.y[rest], rcond=None)[0]
        errors += list(model.y[places] - model.x[places] @ solved)
    found = hold_out(model)
    assert found.off == pytest.approx(math.exp(math.sqrt(np.mean(np.square(errors)))))
    assert (found.cells, found.alone) == (8, 0)


def test_holding_out_many_repeats_needs_no_matrix_as_large_as_their_square():
    model = fit(table(GAINS, switches("abc"), noise=0.05, repeats=1000), "", TIME)
    tracemalloc.start()
    try:
        found = hold_out(model)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.cells == 8
    assert peak < 8 * 1000**2


def test_what_cannot_be_predicted_unseen_is_counted():
    found = hold_out(fit(table(GAINS, switches("ab"), errors={TIME.name: 0.01}), "", TIME))
    assert (found.cells, found.alone) == (0, 4)
    assert math.isnan(found.off)


def test_three_that_act_together_are_noticed():
    made = table({**GAINS, "a=on b=on c=on": 1.0}, switches("abc"), noise=0.01, repeats=3)
    found = doubts(made)
    assert any("three factors act together" in doubt.text for doubt in found.doubts)
    assert not found.believed


def test_three_that_act_together_are_noticed_by_the_errors_of_measuring():
    made = table({**GAINS, "a=on b=on c=on": 1.0}, switches("abcd"), noise=0.01, errors={TIME.name: 0.01})
    assert any("three factors act together" in doubt.text for doubt in doubts(made).doubts)
    assert not doubts(table(GAINS, switches("abcd"), noise=0.01, errors={TIME.name: 0.01})).doubts


def changed(made, change):
    return Table(made.factors, made.responses, tuple(change(place, row) for place, row in enumerate(made.experiments)))


def times(row, factor):
    return replace(row, values={TIME.name: row.values[TIME.name] * factor})


def test_one_that_is_far_off_is_named():
    made = table(GAINS, switches("abcd"), noise=0.01, repeats=2)
    found = doubts(changed(made, lambda place, row: times(row, 1.5) if place == 5 else row))
    assert any("far from what the rest says: a=off b=off c=on d=off" in doubt.text for doubt in found.doubts)


def test_scatter_that_differs_is_noticed():
    rng = np.random.default_rng(0)
    made = table(GAINS, switches("abcd"), noise=0.002, repeats=4)
    wild = changed(made, lambda _, row: times(row, math.exp(rng.normal(0, 0.2))) if row.levels["d"] == "on" else row)
    assert any("do not scatter alike" in doubt.text for doubt in doubts(wild).doubts)


def test_drift_is_noticed():
    made = table(GAINS, switches("abc"), noise=0.005, repeats=1)
    later = Table(made.factors, made.responses, made.experiments * 4)  # each combination again and again
    drifted = changed(later, lambda place, row: times(row, 1.01**place))
    assert any("order of the experiments" in doubt.text for doubt in doubts(drifted).doubts)


def test_a_fit_that_predicts_nothing_is_not_believed():
    rng = np.random.default_rng(3)
    rows = [
        Experiment({name: "on" if rng.random() < 0.5 else "off" for name in "abcd"}, {TIME.name: rng.lognormal()})
        for _ in range(16)
    ]
    found = doubts(Table(switches("abcd"), (TIME,), tuple(rows)))
    assert any("no better than by the mean" in doubt.text for doubt in found.doubts)
    assert not found.believed
