"""Training workloads: what is trained, how its steps are measured, and the guard on its losses.

The same study, race, recipe, code and report as for inference are used on them; what differs lives here.
"""

from fettle.train.workload import TrainingWorkload, load_training, training_fingerprint

__all__ = ["TrainingWorkload", "load_training", "training_fingerprint"]
