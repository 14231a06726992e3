"""fettle: the fastest configuration of a PyTorch model that keeps its answers, with the evidence.

import fettle

result = fettle.tune(model, [batch], max_error=0.02)
fast = result.apply(model)
result.recipe.save("recipe.toml")
print(result.code)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fettle.applying import apply
    from fettle.comparing import bench
    from fettle.errors import UsageError
    from fettle.recipe import Recipe
    from fettle.train import TrainingWorkload
    from fettle.tuning import tune
    from fettle.watching import step_timer, watch
    from fettle.workload import Workload

__version__ = "0.1.0"
__all__ = [
    "Recipe", "TrainingWorkload", "UsageError", "Workload", "apply", "bench", "step_timer", "tune", "watch",
]  # fmt: skip

_HOMES = {
    "apply": "fettle.applying",
    "bench": "fettle.comparing",
    "tune": "fettle.tuning",
    "Recipe": "fettle.recipe",
    "TrainingWorkload": "fettle.train",
    "UsageError": "fettle.errors",
    "Workload": "fettle.workload",
    "step_timer": "fettle.watching",
    "watch": "fettle.watching",
}
_ROOMS = ("diagnose", "memory", "trace")
"""Those that a program uses by their names: `fettle.memory.record()`."""


def __getattr__(name: str) -> Any:
    # Imported when first used: a workload file that says `import fettle` should not pay for Optuna and altair.
    if name in _HOMES or name in _ROOMS:
        import importlib

        if name in _ROOMS:
            return importlib.import_module(f"fettle.{name}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fettle' has no attribute {name!r}")
