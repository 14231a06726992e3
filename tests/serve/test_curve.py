import pytest

from fettle.serve.curve import CostCurve
from fettle.serve.policy import greedy


def test_between_measured_sizes_the_cost_is_interpolated():
    curve = CostCurve((1, 4, 8), ((1.0, 1.2, 0.8), (4.0,), (6.0,)))
    assert curve.seconds(1) == 1.0
    assert curve.seconds(2) == pytest.approx(2.0)
    assert curve.seconds(8) == 6.0
    assert curve.seconds(16) == pytest.approx(10.0)
    assert curve.table(2) == pytest.approx([0.0, 1.0, 2.0])


@pytest.mark.parametrize(("rows", "samples"), [((), ()), ((1, 1), ((1.0,), (1.0,))), ((0,), ((1.0,),)), ((1,), ((),))])
def test_a_curve_that_cannot_be_is_refused(rows, samples):
    with pytest.raises(ValueError):
        CostCurve(rows, samples)


def test_greedy_takes_all_up_to_its_most():
    policy = greedy(4)
    assert policy.take[3] == 3
    assert policy.take[-1] == policy.max_rows == 4
    assert policy.pad[4] == 4
