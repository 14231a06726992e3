"""Studies: every combination, and how they interact; measured here, or read from somebody else's table.

`analyse` fits a table of experiments and says what it says; `study` measures one; `page` and `charts` draw it.
"""

from fettle.studies.analysis import Analysis, analyse
from fettle.studies.designs import Plan
from fettle.studies.reading import read_csv, read_ladder
from fettle.studies.running import Done, Settings, study
from fettle.studies.table import Experiment, Response, Table

__all__ = [
    "Analysis", "Done", "Experiment", "Plan", "Response", "Settings", "Table", "analyse", "read_csv",
    "read_ladder", "study",
]  # fmt: skip
