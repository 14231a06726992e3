"""Effects against a planted model, against statsmodels' own formulas, and on a published table."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fettle.studies.analysis import analyse
from fettle.studies.effects import effects, shares
from fettle.studies.model import LEAST_FREEDOM, fit
from fettle.studies.reading import read_csv
from fettle.studies.table import Experiment, Table
from tests.studies.made_up import TIME, switches, table

ABC = {"a=on": math.log(2.0), "b=on": math.log(0.8), "a=on b=on": math.log(1.3)}
BRIDGER = Path(__file__).parents[1] / "search" / "data" / "bridger.csv"


def found(made):
    return {effect.label: effect for effect in effects(fit(made, "", TIME))}


def test_planted_effects_come_back():
    effect = found(table(ABC, switches("abc"), noise=0.002, repeats=2))
    # main effects are averages over the other factors: half of the interaction belongs to each
    assert effect["a=on"].ratio.estimate == pytest.approx(2.0 * 1.3**0.5, rel=0.01)
    assert effect["b=on"].ratio.estimate == pytest.approx(0.8 * 1.3**0.5, rel=0.01)
    assert effect["a=on × b=on"].ratio.estimate == pytest.approx(1.3, rel=0.01)
    readings = {label: one.reading for label, one in effect.items()}
    assert (readings["a=on"], readings["b=on"], readings["c=on"]) == ("helped", "hurt", "same")
    assert (readings["a=on × b=on"], readings["a=on × c=on"]) == ("helped", "same")


def test_what_was_never_tried_together_is_no_guess():
    skip = {"b=on", "c=on"}
    effect = found(table(ABC, switches("abc"), noise=0.002, repeats=3, skip=lambda on: skip <= on))
    assert effect["b=on × c=on"].ratio is None
    assert (effect["b=on × c=on"].reading, effect["b=on × c=on"].why) == ("cannot tell", "never tried together")
    assert effect["a=on × b=on"].ratio.estimate == pytest.approx(1.3, rel=0.01)


def test_what_is_only_there_with_another_is_told_beside_it():
    """A level that needs another has an effect there, and no interaction with it."""
    needs = {"freeze=on": math.log(1.2), "compile=on": math.log(2.0)}
    made = table(needs, switches(["compile", "freeze", "c"]), noise=0.002, repeats=2,
                 skip=lambda on: {"freeze=on", "compile=off"} <= on)  # fmt: skip
    effect = found(made)
    assert effect["freeze=on"].ratio.estimate == pytest.approx(1.2, rel=0.01)
    assert effect["compile=on"].ratio.estimate == pytest.approx(2.0, rel=0.01)
    assert effect["compile=on × freeze=on"].why == "never varied apart from other levels"


def test_levels_that_were_never_apart_are_told_and_have_no_interaction_of_their_own():
    """Where b is 1, a is on: whose effect it is nobody knows."""
    factors = {"a": ("off", "on"), "b": ("0", "1", "2"), "c": ("off", "on")}
    gains = {"a=on": 0.1, "b=2": 1.0, "c=on": 0.3, "a=on c=on": 0.5}
    made = table(gains, factors, noise=0.002, repeats=3,
                 skip=lambda on: ("a=on" in on) != ("b=1" in on))  # fmt: skip
    (analysis,) = analyse(made)
    assert "never varied apart: b=1 from a=on; what" in analysis.checks.doubts[0].text
    effect = {one.label: one for one in analysis.effects}
    assert effect["b=1 × c=on"].ratio is None
    assert effect["a=on × c=on"].ratio.estimate == pytest.approx(math.exp(0.5), rel=0.01)
    assert any("c=on" in sentence.text and "a=on" in sentence.text for sentence in analysis.sentences)


@pytest.mark.parametrize("skip", [frozenset(), frozenset({"a=on", "b=on", "c=on"})], ids=["balanced", "a cell lacks"])
def test_agrees_with_the_formulas_of_statsmodels(skip):
    api = pytest.importorskip("statsmodels.formula.api")
    pandas = pytest.importorskip("pandas")
    made = table(ABC, switches("abc"), noise=0.05, repeats=2, skip=lambda on: bool(skip) and skip <= on)
    rows = [{"y": math.log(row.values[TIME.name]), **row.levels} for row in made.experiments]
    plain = api.ols("y ~ (C(a, Sum) + C(b, Sum) + C(c, Sum))**2", pandas.DataFrame(rows)).fit()
    effect = found(made)["a=on"]
    low, high = sorted(math.exp(2 * bound) for bound in plain.conf_int().loc["C(a, Sum)[S.off]"])
    assert effect.ratio.estimate == pytest.approx(math.exp(2 * plain.params["C(a, Sum)[S.off]"]))
    assert (effect.ratio.low, effect.ratio.high) == pytest.approx((low, high))


def test_an_effect_of_any_size_is_a_number(tmp_path):
    (tmp_path / "wide.csv").write_text("a,b,time (ms)\n0,0,1e300\n1,0,1e-300\n0,1,1e300\n1,0,\n")
    (analysis,) = analyse(read_csv(tmp_path / "wide.csv", response=["time (ms)"]))
    ratios = {effect.label: effect.ratio for effect in analysis.effects if effect.ratio}
    assert ratios["a=1"].estimate == math.exp(700)
    assert (ratios["a=1"].low, ratios["a=1"].high) == (0.0, math.inf)  # no rows are left over to tell it from noise


def test_shares_are_those_of_a_balanced_analysis_of_variance():
    api = pytest.importorskip("statsmodels.api")
    formula = pytest.importorskip("statsmodels.formula.api")
    pandas = pytest.importorskip("pandas")
    made = table(ABC, switches("abc"), noise=0.05, repeats=2)
    rows = [{"y": math.log(row.values[TIME.name]), **row.levels} for row in made.experiments]
    squares = api.stats.anova_lm(formula.ols("y ~ (a + b + c)**2", pandas.DataFrame(rows)).fit(), typ=2)["sum_sq"]
    share = shares(fit(made, "", TIME))
    assert next(iter(share)) == ("a",)
    for names, value in share.items():
        assert value == pytest.approx(squares[":".join(names)] / squares.sum(), abs=1e-9)


def test_larger_is_better_is_a_gain_too():
    made = table(ABC, switches("abc"), noise=0.002, repeats=2)
    rate = type(TIME)("rate", larger_is_better=True)
    turned = [Experiment(row.levels, {"rate": 1 / row.values[TIME.name]}) for row in made.experiments]
    one = effects(fit(Table(made.factors, (rate,), tuple(turned)), "", rate))
    assert [effect.ratio.estimate for effect in one] == pytest.approx([e.ratio.estimate for e in found(made).values()])


def test_too_few_experiments_cannot_tell():
    made = table(ABC, switches("abc"), noise=0.002)
    few = Table(made.factors, made.responses, made.experiments[:3])
    assert {effect.reading for effect in effects(fit(few, "", TIME))} == {"cannot tell"}
    assert fit(Table(made.factors, made.responses, made.experiments[:2]), "", TIME) is None


def test_with_nothing_left_over_the_errors_of_measuring_say_how_sure_it_is():
    made = table(ABC, switches("ab"), errors={TIME.name: 0.01})
    effect = found(made)["a=on × b=on"]
    assert effect.ratio.estimate == pytest.approx(1.3)
    assert math.log(effect.ratio.high / effect.ratio.estimate) == pytest.approx(1.96 * 0.02, rel=1e-3)
    assert found(table(ABC, switches("ab")))["a=on"].reading == "cannot tell"


def test_an_interaction_stands_behind_both_of_its_main_effects():
    """With room for few columns, the pair of the largest main effects comes first, and no pair without its levels."""
    gains = {"d=on": 0.7, "e=on": 0.5, "d=on e=on": 0.3, "a=on": 0.01}
    made = table(gains, switches("abcdef"), noise=0.01)
    part = Table(made.factors, made.responses, made.experiments[::5] + made.experiments[1::9])
    model = fit(part, "", TIME)
    pairs = [term for term in model.columns if len(term) == 2]
    assert pairs[0] == (("d", "on"), ("e", "on"))
    assert all((level,) in model.columns for pair in pairs for level in pair)
    assert len(model.rows) - len(model.columns) >= LEAST_FREEDOM
    assert "too few experiments for so many effects" in model.left_out.values()


def test_levels_that_did_not_run_side_by_side_have_no_interval_by_themselves():
    made = table({"batch=4": 0.5, "a=on": 0.3, "a=on batch=4": 0.2},
                 {"a": ("off", "on"), "batch": ("1", "4"), "b": ("off", "on")}, noise=0.01, repeats=2,
                 apart=["batch"])  # fmt: skip
    effect = {one.label: one for one in effects(fit(made, "", TIME))}
    assert (effect["batch=4"].ratio.low, effect["batch=4"].reading) == (0.0, "cannot tell")
    assert effect["a=on × batch=4"].reading == "helped"
    assert effect["a=on"].reading == "helped"


def test_what_is_claimed_has_passed_holm():
    statsmodels = pytest.importorskip("statsmodels.stats.multitest")
    model = fit(table(ABC, switches("abcd"), noise=0.05), "", TIME)
    found = effects(model)
    plain = [(model.main(e.levels[0]) if len(e.levels) == 1 else model.gain({e.levels: 1.0})).p() for e in found]
    assert [effect.p for effect in found] == pytest.approx(statsmodels.multipletests(plain, method="holm")[1])
    assert all(effect.p < 0.05 for effect in found if effect.is_claimed)


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.sampled_from(["a=on", "b=on", "c=on", "a=on b=on", "b=on c=on"]), st.floats(-0.7, 0.7)))
def test_without_noise_the_fit_is_the_truth(gains):
    made = table(gains, switches("abc"), noise=1e-9, repeats=2)
    model = fit(made, "", TIME)
    if model is None:  # nothing that varies
        return
    for name in "abc":
        assert model.beside((name, "on"), None).gain == pytest.approx(gains.get(f"{name}=on", 0.0), abs=1e-6)
    for pair in ("a=on b=on", "b=on c=on"):
        (a, b) = pair.split()
        term = ((a[0], "on"), (b[0], "on"))
        assert model.gain({term: 1.0}).gain == pytest.approx(gains.get(pair, 0.0), abs=1e-6)


def test_a_null_factor_reads_same():
    """cudnn.benchmark cannot matter to a model without convolutions: over the 18 cells of transformers."""
    made = read_csv(BRIDGER, response=["per_second:larger"], factors=["eval", "inference_mode", "autocast_fp16",
                    "cudnn_benchmark", "compile", "torch", "container"], group_by=["model"])  # fmt: skip
    groups = [group for group in made.groups if not group.startswith("resnet")]
    assert len(groups) == 3
    for group in groups:
        effect = {one.label: one for one in effects(fit(made, group, made.responses[0]))}
        assert effect["cudnn_benchmark=1"].reading == "same"
        assert effect["autocast_fp16=1"].reading == "helped"
