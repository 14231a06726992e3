"""How much each factor matters by another method: Optuna's functional ANOVA, beside the shares of variance.

It fits a random forest in place of a linear model, so that factors which act three and more together count as
well; it says nothing of direction or of how sure that is (Hutter, Hoos and Leyton-Brown, *ICML*, 2014).
"""

from __future__ import annotations

from collections.abc import Mapping

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.importance import FanovaImportanceEvaluator
from optuna.trial import create_trial

from fettle.studies.model import Model

_TREES = 32


def importance(model: Model) -> dict[str, float]:
    """The importance of each factor, adding up to 1, largest first; empty where scikit-learn is not installed, or where
    fewer than two factors vary."""
    tried = {name: sorted({row.levels[name] for row in model.rows}) for name in model.levels}
    varied: Mapping[str, BaseDistribution] = {
        name: CategoricalDistribution(levels) for name, levels in tried.items() if len(levels) > 1
    }
    if len(varied) < 2:
        return {}
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study()
    study.add_trials([
        create_trial(params={name: row.levels[name] for name in varied}, distributions=dict(varied), value=float(value))
        for row, value in zip(model.rows, model.y, strict=True)
    ])  # fmt: skip
    try:
        found = optuna.importance.get_param_importances(
            study, evaluator=FanovaImportanceEvaluator(n_trees=_TREES, seed=0)
        )
    except ImportError:
        return {}
    return {name: float(value) for name, value in found.items()}
