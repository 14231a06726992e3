"""fettle: the fastest configuration of a PyTorch model that keeps its answers, with the evidence.

```python
import fettle

result = fettle.tune(model, batches, max_error=0.02)
fast = result.apply(model)
result.recipe.save("recipe.toml")
print(result.code)
```
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fettle.applying import apply
    from fettle.comparing import Comparison, bench, check
    from fettle.errors import UsageError
    from fettle.generate import GenerationWorkload
    from fettle.measure import Interval, Trial
    from fettle.recipe import Recipe
    from fettle.recipe_file import RecipeFile
    from fettle.report import Result
    from fettle.result import Limits
    from fettle.train import TrainingWorkload
    from fettle.tuning import Effort, Event, Options, tune
    from fettle.watching import Steps, step_timer, watch
    from fettle.workload import Target, Workload

__version__ = "0.1.0"
# OpenVINO and NNCF report their use over the network from the process that imports them, unless this is missing.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
__all__ = [
    "Comparison", "Effort", "Event", "GenerationWorkload", "Interval", "Limits", "Options", "Recipe", "RecipeFile",
    "Result", "Steps", "Target", "TrainingWorkload", "Trial", "UsageError", "Workload", "apply", "bench", "check",
    "step_timer", "tune", "watch",
]  # fmt: skip

_HOMES = {
    "fettle.applying": ("apply",),
    "fettle.comparing": ("Comparison", "bench", "check"),
    "fettle.errors": ("UsageError",),
    "fettle.generate": ("GenerationWorkload",),
    "fettle.measure": ("Interval", "Trial"),
    "fettle.recipe": ("Recipe",),
    "fettle.recipe_file": ("RecipeFile",),
    "fettle.report": ("Result",),
    "fettle.result": ("Limits",),
    "fettle.train": ("TrainingWorkload",),
    "fettle.tuning": ("Effort", "Event", "Options", "tune"),
    "fettle.watching": ("Steps", "step_timer", "watch"),
    "fettle.workload": ("Target", "Workload"),
}
_ROOMS = ("diagnose", "memory", "trace")
"""Rooms that a program uses by their names: `fettle.memory.record()`."""


def __getattr__(name: str) -> Any:
    # Imported when first used: a workload file that says `import fettle` should not pay for Optuna and altair.
    home = f"fettle.{name}" if name in _ROOMS else next((home for home, names in _HOMES.items() if name in names), None)
    if home is not None:
        import importlib
        import warnings

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "IProgress not found")  # tqdm's, of Optuna, in a notebook without widgets
            module = importlib.import_module(home)
        value = module if name in _ROOMS else getattr(module, name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fettle' has no attribute {name!r}")


def __dir__() -> list[str]:  # what a notebook completes `fettle.` with
    return [*__all__, *_ROOMS]


def load_ipython_extension(shell: Any) -> None:
    """For ``%load_ext fettle`` in a notebook, which makes ``%%fettle`` known: a race of snippets."""
    from fettle.snippets import register

    register(shell)
