"""Improve: the six steps of the usual workflow as one run, where each step's finding feeds the next.

Nothing is measured here: `guided` calls what the single commands call, keeps what each brought, and goes on where it
was.
"""

from fettle.improve.guided import STEPS, Improvement, Settings, improve
from fettle.improve.page import page
from fettle.improve.state import Step

__all__ = ["STEPS", "Improvement", "Settings", "Step", "improve", "page"]
