"""Sentences are true to the fit, and the planted surprise comes first."""

import math
import re

import pytest

from fettle.studies.effects import effects
from fettle.studies.model import fit
from fettle.studies.sentences import sentences
from tests.studies.made_up import TIME, switches, table


def said(gains, factors=None, **options):
    made = table(gains, factors or switches("abc"), noise=0.003, repeats=2, **options)
    model = fit(made, "", TIME)
    return model, sentences(model, effects(model))


@pytest.mark.parametrize(
    ("gains", "kind", "text"),
    [
        ({"a=on": 0.0, "b=on": 0.3, "a=on b=on": 0.5}, "needs", r"a=on needs b=on: worth [01]\.\d\dx alone, 1\.6\dx"),
        ({"a=on": -0.2, "b=on": 0.3, "a=on b=on": 0.6}, "needs", r"a=on needs b=on: worth 0\.8\dx alone, 1\.\d\dx"),
        ({"a=on": 0.4, "b=on": 0.5, "a=on b=on": -0.4}, "cancels", r"a=on brings nothing more after b=on: worth 1\."),
        ({"a=on": 0.3, "b=on": 0.8, "a=on b=on": -0.5}, "turns", r"a=on helps alone and hurts after b=on: worth 1\.3"),
        ({"a=on": 0.1, "b=on": 0.4, "a=on b=on": 0.7}, "more", r"a=on is worth 1\.1\dx alone, 2\.2\dx after b=on"),
        ({"a=on": 0.5, "b=on": 0.9, "a=on b=on": -0.2}, "less", r"a=on is worth 1\.6\dx alone, 1\.3\dx after b=on"),
        ({"a=on": -0.3, "b=on": 0.4}, "hurts", r"a=on hurts: 0\.74x \[0\.7\d, 0\.7\d\] on average"),
    ],
)  # fmt: skip
def test_each_kind_of_surprise_is_said_first(gains, kind, text):
    _, found = said(gains)
    assert found[0].kind == kind
    assert re.match(text, found[0].text), found[0].text


def test_every_number_is_a_contrast_of_the_fit():
    model, found = said({"a=on": 0.1, "b=on": 0.4, "a=on b=on": 0.7, "c=on": -0.2, "b=on c=on": 0.3})
    assert len(found) >= 5
    for sentence in found:
        level, *other = sentence.levels
        if other:
            true = [model.beside(level, None).gain, model.beside(level, other[0]).gain]
        else:
            true = [model.main(level).gain]
        assert sentence.ratios == pytest.approx([math.exp(gain) for gain in true])
        shown = [float(number) for number in re.findall(r"([0-9.]+)x", sentence.text)]
        assert shown == pytest.approx(sentence.ratios, abs=0.006)


def test_numbers_agree_with_the_cells_themselves():
    """Alone is the ratio of two cells, and so is beside: a full design without noise has no other truth."""
    made = table({"a=on": 0.1, "b=on": 0.4, "a=on b=on": 0.7}, switches("ab"), noise=1e-6, repeats=3)
    model = fit(made, "", TIME)
    first = sentences(model, effects(model))[0]
    time = {(row.levels["a"], row.levels["b"]): row.values[TIME.name] for row in made.experiments}
    alone, beside = time["off", "off"] / time["on", "off"], time["off", "on"] / time["on", "on"]
    assert first.ratios == pytest.approx((alone, beside), rel=1e-4)


def test_what_did_not_run_side_by_side_is_the_stage_and_never_the_actor():
    _, found = said({"a=on": 0.1, "batch=4": 0.9, "a=on batch=4": 0.5}, {"a": ("off", "on"), "batch": ("1", "4"),
                    "c": ("off", "on")}, apart=["batch"])  # fmt: skip
    assert found[0].text.startswith("a=on is worth 1.1")
    assert "at batch=4" in found[0].text
    assert not any(sentence.levels[0][0] == "batch" for sentence in found)


def test_without_effects_nothing_is_said():
    assert said({"a=on": 0.0})[1] == []


def test_what_helps_comes_after_the_surprises():
    _, found = said({"a=on": 0.9, "b=on": -0.1, "c=on": 0.5})
    assert [sentence.is_surprise for sentence in found] == [True, False, False]
    assert [sentence.levels[0][0] for sentence in found] == ["b", "a", "c"]
