"""Serving: a model package behind HTTP, the load that tests it, and the search for its best setting."""
