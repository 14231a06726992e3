"""Studies: every combination, and how they interact; measured here, or read from somebody else's table.

`analyse` fits a table of experiments and says what it says; `study` measures one; `page` and `charts` draw it.
"""

from fettle.studies.analysis import Analysis, analyse
from fettle.studies.designs import Plan
from fettle.studies.orders import check_name, settings_of
from fettle.studies.outcome import Done
from fettle.studies.reading import read_csv, read_ladder
from fettle.studies.running import enqueue, study
from fettle.studies.settings import Settings
from fettle.studies.stored import stored
from fettle.studies.table import Experiment, Response, Table

__all__ = [
    "Analysis", "Done", "Experiment", "Plan", "Response", "Settings", "Table", "analyse", "check_name", "enqueue",
    "read_csv", "read_ladder", "settings_of", "stored", "study",
]  # fmt: skip
