"""Searching: the space of valid recipes and the designs that say which of them a study tries.

Searching knows nothing of measuring: a design is handed a `Session` that evaluates recipes.
"""

from fettle.search._space import Session, Space

__all__ = ["Session", "Space"]
