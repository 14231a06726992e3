"""The atlas: the trials of many studies in one table, with features of model and machine: what helped whom, and what to
try first.

`table` is the table and `reading` reads it from outside; `features` make it of a study's trials; `query` asks it what
helps. `prediction` says what to expect of a model that it has not seen; it alone needs torch, and is imported by name.
"""

from fettle.atlas.features import model_features, subject
from fettle.atlas.query import Effect, Pair, apart, effects, matching, never_compared, pairs
from fettle.atlas.reading import read_atlas
from fettle.atlas.table import Row, Subject, merged, rows_of, weights_of, write_atlas

__all__ = [
    "Effect", "Pair", "Row", "Subject", "apart", "effects", "matching", "merged", "model_features", "never_compared",
    "pairs", "read_atlas", "rows_of", "subject", "weights_of", "write_atlas",
]  # fmt: skip
