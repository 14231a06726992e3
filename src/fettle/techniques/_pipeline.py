"""Pipelines: workloads of several modules with code of the user's between them.

Each part is tuned as a model of its own and put back in its place, where that code goes on calling it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fettle.techniques._state_kept import buffers_of, put_buffers_back


class Part(torch.nn.Module):
    """A module of a pipeline in its place: it has the module's attributes and is called as `run` is."""

    def __init__(self, module: torch.nn.Module, run: Any) -> None:
        super().__init__()
        self.module = module
        self.__dict__["run"] = run  # no child of this module: it may be the module itself
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def put_part(model: torch.nn.Module, name: str, run: Any) -> None:
    """Let `run` be called where the pipeline calls its part of that name."""
    parent, _, own = name.rpartition(".")
    module = model.get_submodule(name)
    if run is not module:
        setattr(model.get_submodule(parent), own, Part(module, run))


def calls_of_parts(model: torch.nn.Module, names: Any, run: Any, most: int = 8) -> dict[str, list[Any]]:
    """What each part is called with while `run()` runs the pipeline: at most so many calls, evenly spread, each a tuple
    of positional arguments or a dict of keyword arguments."""
    import inspect

    from torch.utils import _pytree as pytree

    found: dict[str, list[Any]] = {name: [] for name in names}
    count, every = dict.fromkeys(names, 0), dict.fromkeys(names, 1)

    def keep(name: str) -> Any:
        def hook(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            if count[name] % every[name] == 0:
                args, kwargs = pytree.tree_map_only(torch.Tensor, lambda one: one.detach().clone(), (args, kwargs))
                if args and kwargs:  # a batch is one or the other
                    names = inspect.signature(module.forward).parameters
                    args, kwargs = (), {**dict(zip(names, args, strict=False)), **kwargs}
                found[name].append(kwargs or args)
                if len(found[name]) > most:
                    found[name], every[name] = found[name][::2], 2 * every[name]
            count[name] += 1

        return hook

    hooks = [model.get_submodule(name).register_forward_pre_hook(keep(name), with_kwargs=True) for name in names]
    buffers = buffers_of(model)
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
        put_buffers_back(model, buffers)
    return found


@dataclass
class Cost:
    """What a part took in one call of the pipeline."""

    calls: int = 0
    seconds: float = 0.0


def timed_parts(
    model: torch.nn.Module, names: Sequence[str], run: Callable[[], Any]
) -> tuple[Mapping[str, Cost], float]:
    """The cost of each part while `run()` runs the pipeline, and the seconds of the whole."""
    costs = {name: Cost() for name in names}
    began: dict[str, float] = {}
    devices = [parameter.device for parameter in model.parameters() if parameter.device.type not in ("cpu", "meta")]

    def now() -> float:
        if devices:
            torch.accelerator.synchronize(devices[0])
        return time.perf_counter()

    def before(name: str) -> Any:
        def hook(*_: Any) -> None:
            began[name] = now()

        return hook

    def after(name: str) -> Any:
        def hook(*_: Any) -> None:
            costs[name].calls += 1
            costs[name].seconds += now() - began[name]

        return hook

    hooks = []
    for name in names:
        part = model.get_submodule(name)
        hooks += [part.register_forward_pre_hook(before(name)), part.register_forward_hook(after(name))]
    try:
        start = now()
        with torch.no_grad():
            run()
        return costs, now() - start
    finally:
        for hook in hooks:
            hook.remove()
