"""The published table that the searches are tested on too: dominant effects per model, against statsmodels itself.

Source: Paul Bridger, PyTorch Performance Features and How They Interact (see tests/search/data/bridger.csv).
"""

import math
from itertools import combinations
from pathlib import Path

import pytest

from fettle.studies.analysis import analyse
from fettle.studies.reading import read_csv

BRIDGER = Path(__file__).parents[1] / "search" / "data" / "bridger.csv"
NEVER_TOGETHER = {"channels_last", "compile"}


@pytest.fixture(scope="module")
def analyses():
    table = read_csv(BRIDGER, response=["per_second:larger"], group_by=["model"])
    assert set(table.factors) == {
        "torch", "container", "eval", "inference_mode", "autocast_fp16", "channels_last", "cudnn_benchmark", "compile",
    }  # fmt: skip
    return {analysis.group: analysis for analysis in analyse(table)}


def test_dominant_effects_per_model_agree_with_statsmodels(analyses):
    api = pytest.importorskip("statsmodels.api")
    formula = pytest.importorskip("statsmodels.formula.api")
    pandas = pytest.importorskip("pandas")
    assert len(analyses) == 5
    for group, analysis in analyses.items():
        model = analysis.model
        names = [name for name in model.levels if name not in ("torch", "container")]
        rows = [{"y": -math.log(row.values["per_second"]), **row.levels} for row in model.rows]
        pairs = [f"{a}:{b}" for a, b in combinations(names, 2) if {a, b} != NEVER_TOGETHER]
        text = "y ~ " + " + ".join([*names, "C(torch)", "C(container)", *pairs])
        squares = api.stats.anova_lm(formula.ols(text, pandas.DataFrame(rows)).fit(), typ=2)["sum_sq"]
        total = {
            name: squares[name] + sum(squares[pair] / 2 for pair in pairs if name in pair.split(":")) for name in names
        }
        ranked = sorted(names, key=lambda name: -total[name])
        ours = [name for name in analysis.dominant if name in names]
        assert ours[:2] == ranked[:2], group
        assert ours[0] == "autocast_fp16"


def test_what_the_article_found(analyses):
    """Mixed precision carries most, channels_last helps convolutional models only beside it."""
    for group in ("resnet18", "resnet50"):
        said = {sentence.levels: sentence for sentence in analyses[group].sentences}
        pair = (("channels_last", "1"), ("autocast_fp16", "1"))
        found = said.get(pair) or said.get(pair[::-1])
        assert found is not None
        assert found.is_surprise
    for analysis in analyses.values():
        held = analysis.checks.held_out
        assert math.log(held.off) < 0.2 * math.log(held.mean_off)
