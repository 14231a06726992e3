"""Training workloads: what is trained, how its steps are measured, and whether its losses are as good.

The same study, race, recipe, code and report as for inference are used on them; what differs lives here.
"""

from fettle.train.facts import largest_that_fits, moved_facts, training_facts, untrained
from fettle.train.losses import SEEDS, Band, Curve, judge_curve
from fettle.train.steps import Steps
from fettle.train.workload import TrainingWorkload, load_training, target_of, training_fingerprint, workload_of

__all__ = [
    "SEEDS", "Band", "Curve", "Steps", "TrainingWorkload", "judge_curve", "largest_that_fits", "load_training",
    "moved_facts", "target_of", "training_facts", "training_fingerprint", "untrained", "workload_of",
]  # fmt: skip
