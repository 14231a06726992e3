"""What a program has set in torch, and what its factory has built: facts for the checks, read in its own process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from fettle.errors import is_program

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

_MANY = 100_000
"""Python objects in one list from which on copies by their counts are felt."""
_MOST_SOURCE = 1 << 20
_TF32_NAMES = re.compile(r"\b(allow_tf32|fp32_precision)\s*=[^=]|\b(?:set_float32_matmul_precision)\(")


@dataclasses.dataclass(frozen=True)
class Model:
    """One model that a factory returned."""

    name: str
    device: str = "cpu"
    dtypes: tuple[str, ...] = ()
    """Types of its parameters: ``float32``."""
    odd: tuple[str, ...] = ()
    """Linear layers with a side that is not a multiple of 8."""
    tiny: float = 0.0
    """Share of its weights that are denormal numbers."""
    deprecated: tuple[str, ...] = ()
    """Classes inside it that have ended: ``ScriptModule``, ``FullyShardedDataParallel``."""


@dataclasses.dataclass(frozen=True)
class Loader:
    """One DataLoader that a factory returned."""

    name: str
    workers: int = 0
    prefetch: int = 2
    batch_bytes: int = 0
    """0 where it is not known."""
    tensors: int = 0
    """Tensors in one batch."""
    start_method: str = ""
    lists: tuple[tuple[str, int], ...] = ()
    """Lists and dicts of many Python objects in the dataset: attribute and length."""
    folders: tuple[str, ...] = ()
    """Paths that are attributes of the dataset."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A process of the user's, or nothing at all."""

    switches: tuple[str, ...] = ()
    """Switches that slow a program down and are on: ``anomaly``, ``deterministic``, ``sync-debug``,
    ``memory-history``, ``python-trace``, ``tracemalloc``, ``float64``, ``suppress-errors``."""
    tf32_mixed: bool = False
    """TF32 was set by the old names and by the new ones."""
    used_cuda: bool = False
    sharing: str = ""
    """How tensors go from process to process: ``file_descriptor`` or ``file_system``."""
    backends: tuple[str, ...] | None = None
    """What torch.distributed was built with; None where torch was not asked."""
    models: tuple[Model, ...] = ()
    loaders: tuple[Loader, ...] = ()


def this_program(made: object = None) -> Program:
    """The settings of this process, and what a factory has `made`. Imports torch."""
    import torch
    import torch.multiprocessing
    from torch import distributed

    cuda: Any = torch.cuda
    sharing: Any = torch.multiprocessing
    history = getattr(torch._C, "_cuda_isHistoryEnabled", lambda: False)
    on = {
        "anomaly": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "sync-debug": cuda.is_initialized() and cuda.get_sync_debug_mode() != 0,
        "memory-history": cuda.is_initialized() and history(),
        "python-trace": bool(sys.gettrace() or sys.getprofile()),
        "tracemalloc": "tracemalloc" in sys.modules and sys.modules["tracemalloc"].is_tracing(),
        "float64": torch.get_default_dtype() == torch.float64,
        "suppress-errors": "torch._dynamo" in sys.modules and torch._dynamo.config.suppress_errors,
    }
    backends: tuple[str, ...] = ()
    if distributed.is_available():
        has = {"gloo": distributed.is_gloo_available(), "nccl": distributed.is_nccl_available()}
        backends = tuple(name for name, there in has.items() if there)
    parts = list(_parts(made))
    return Program(
        switches=tuple(name for name, value in on.items() if value),
        tf32_mixed=_tf32_mixed(),
        used_cuda=cuda.is_initialized(),
        sharing=sharing.get_sharing_strategy(),
        backends=backends,
        models=tuple(_model(part) for part in parts if isinstance(part, torch.nn.Module)),
        loaders=tuple(_loader(part) for part in parts if isinstance(part, torch.utils.data.DataLoader)),
    )


def _tf32_mixed() -> bool:
    """Whether the program's own source has both ways to set TF32, and torch can no longer tell it by the old names; by
    itself that means only that the new names are in use."""
    import torch

    with contextlib.suppress(RuntimeError):
        torch.get_float32_matmul_precision()
        return not isinstance(torch.backends.cuda.matmul.allow_tf32, bool)  # it was readable, so nothing is mixed
    values: set[str] = set()
    for path in _own_files():
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            values.update(_TF32_NAMES.findall(file.read(_MOST_SOURCE)))
    return "fp32_precision" in values and len(values) > 1


def _own_files() -> set[str]:
    """Source of the program: what is imported, and neither installed nor ours."""
    paths = (str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values()))
    return {path for path in paths if is_program(path)}


def _parts(made: object, depth: int = 3) -> Iterator[object]:
    """What a factory returned, and what that holds: a tuple, a dict, a `fettle.Workload`."""
    yield made
    if depth and isinstance(made, (tuple, list, dict)):
        for item in list(made.values() if isinstance(made, dict) else made)[:32]:
            yield from _parts(item, depth - 1)
    elif depth and dataclasses.is_dataclass(made) and not isinstance(made, type):
        for field in dataclasses.fields(made):
            yield from _parts(getattr(made, field.name, None), depth - 1)


def _model(model: nn.Module) -> Model:
    import torch

    odd, ended = [], []
    for name, part in model.named_modules():
        if isinstance(part, torch.nn.Linear) and (part.in_features % 8 or part.out_features % 8):
            odd.append(f"{name or 'the model'} ({part.in_features} x {part.out_features})")
        ended += [base.__name__ for base in type(part).__mro__
                  if base.__name__ in ("ScriptModule", "FullyShardedDataParallel")
                  and base.__module__.startswith("torch.")]  # fmt: skip
    parameters = [p for p in model.parameters() if not torch.nn.parameter.is_lazy(p)]
    return Model(
        name=type(model).__name__, device=parameters[0].device.type if parameters else "cpu",
        dtypes=tuple(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})), odd=tuple(odd),
        tiny=subnormal_share(parameters), deprecated=tuple(dict.fromkeys(ended)),
    )  # fmt: skip


def subnormal_share(weights: Iterable[torch.Tensor]) -> float:
    """Share of the float32 weights on the CPU that are denormal numbers."""
    import torch

    from fettle.workload import stored

    small = total = 0
    for values in (part for weight in weights for part in stored(weight.detach())):
        if values.dtype == torch.float32 and values.device.type == "cpu":
            small += int(((values != 0) & (values.abs() < torch.finfo(torch.float32).tiny)).sum())
            total += values.numel()
    return small / total if total else 0.0


def _loader(loader: DataLoader[Any]) -> Loader:
    from torch import multiprocessing
    from torch.utils.data import IterableDataset

    from fettle.workload import is_shared, leaves

    dataset, row_bytes, tensors = loader.dataset, 0, 0
    if not isinstance(dataset, IterableDataset):
        with contextlib.suppress(Exception):  # `fettle data` is who says that rows raise
            row = [leaf for _, leaf in leaves(dataset[0]) if hasattr(leaf, "nbytes")]  # arrays become tensors
            row_bytes, tensors = sum(item.nbytes for item in row), len(row)
    attributes = list(getattr(dataset, "__dict__", {}).items())
    context = loader.multiprocessing_context
    default = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return Loader(
        name=type(dataset).__name__, workers=loader.num_workers, prefetch=loader.prefetch_factor or 2,
        batch_bytes=row_bytes * (loader.batch_size or 1), tensors=tensors,
        start_method=context.get_start_method() if context else default,
        lists=tuple((name, len(value)) for name, value in attributes
                    if isinstance(value, (list, dict)) and len(value) >= _MANY and not all(map(is_shared, value))),
        folders=tuple(os.path.abspath(value) for _, value in attributes
                      if isinstance(value, (str, os.PathLike)) and os.path.exists(value)),
    )  # fmt: skip
