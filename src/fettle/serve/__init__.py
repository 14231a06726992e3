"""Serving: a model package behind HTTP, the load that tests it, and the search for its best setting.

The batching decision (`policy`) has no clock and no IO, so that the server and the simulation run the same code.
"""

from fettle.serve.policy import Batch, BatchQueue, BatchSettings, CostCurve, Plan, plan

__all__ = ["Batch", "BatchQueue", "BatchSettings", "CostCurve", "Plan", "plan"]
