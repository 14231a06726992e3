"""Serving: model packages behind HTTP. `http` speaks with clients, `engine` holds models and workers."""
