"""Searching: the space of valid recipes and the designs that say which of them a study tries.

Searching knows nothing of measuring: a design is handed a function that evaluates recipes.
"""
