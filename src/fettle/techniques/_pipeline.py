"""Pipelines: workloads of several modules with code of the user's between them.

Each part is tuned as a model of its own and put back in its place, where that code goes on calling it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fettle.errors import UsageError
from fettle.techniques._state_kept import state_kept
from fettle.workload import map_tensors


class Part(torch.nn.Module):
    """A module in its place: it is called as `run` is, and otherwise stands for the module, whose attributes it has and
    sets. Its `dtype` is the one as given, which `run` takes and gives."""

    def __init__(self, module: torch.nn.Module, run: Any, dtype: Any = None) -> None:
        super().__init__()
        # Its own names are such as no module has; what runs is no child: it may be the module itself.
        self._modules["_part_given"] = module
        vars(self).update(_part_run=run, training=module.training)
        if dtype is not None:
            vars(self)["dtype"] = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._part_run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_part_given"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) or hasattr(torch.nn.Module, name):
            super().__setattr__(name, value)
        else:
            setattr(self._part_given, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._part_given, name)

    def __bool__(self) -> bool:
        return bool(self._part_given)

    def __len__(self) -> int:
        return len(self._part_given)

    def __getitem__(self, key: Any) -> Any:
        return self._part_given[key]

    def __iter__(self) -> Any:
        return iter(self._part_given)


def put_part(model: torch.nn.Module, name: str, optimize: Any, batches: Any) -> None:
    """Optimize the pipeline's part of that name, and let what comes of it be called in its place."""
    parent, _, own = name.rpartition(".")
    module = model.get_submodule(name)
    dtype = getattr(module, "dtype", None)
    run = optimize(module, batches)
    if run is not module:
        setattr(model.get_submodule(parent), own, Part(module, run, dtype))


def calls_of_parts(model: torch.nn.Module, names: Any, run: Any, most: int = 8) -> dict[str, list[Any]]:
    """What each part is called with while `run()` runs the pipeline: at most so many calls, evenly spread, each a batch
    for `spread`."""
    import contextlib
    import functools

    found: dict[str, list[Any]] = {name: [] for name in names}
    count, every = dict.fromkeys(names, 0), dict.fromkeys(names, 1)

    def keep(name: str, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if count[name] % every[name] == 0:
            args, kwargs = map_tensors(lambda one: one.detach().clone(), (args, kwargs))
            found[name].append({"*": args, **kwargs} if args and kwargs else kwargs or args)
            if len(found[name]) > most:
                found[name], every[name] = found[name][::2], 2 * every[name]
        count[name] += 1

    with contextlib.ExitStack() as hooks, torch.no_grad(), state_kept(model):
        for name in names:
            hook, part = functools.partial(keep, name), model.get_submodule(name)
            hooks.enter_context(part.register_forward_pre_hook(hook, with_kwargs=True))
        run()
    return found


@contextmanager
def counted_by_name(model: torch.nn.Module, called: dict[str, int]) -> Iterator[None]:
    """Count the calls of each part that find it under its name, where a recipe would put something else."""
    modules = {name: model.get_submodule(name) for name in called}

    def run(name: str, /, *args: Any, **kwargs: Any) -> Any:
        called[name] += 1
        return modules[name](*args, **kwargs)

    def put(name: str, module: torch.nn.Module) -> None:
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, module)

    try:
        for name, module in modules.items():
            put(name, Part(module, partial(run, name), getattr(module, "dtype", None)))
        yield
    finally:
        for name, module in modules.items():
            put(name, module)


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
    devices = {one.device for one in model.parameters() if one.device.type not in ("cpu", "meta")}

    def now() -> float:
        for device in devices:
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    def before(name: str, *_: Any) -> None:
        began[name] = now()

    def after(name: str, *_: Any) -> None:
        costs[name].calls += 1
        costs[name].seconds += now() - began[name]

    with ExitStack() as hooks, torch.no_grad():
        for name in names:
            part = model.get_submodule(name)
            hooks.enter_context(part.register_forward_pre_hook(partial(before, name)))
            hooks.enter_context(part.register_forward_hook(partial(after, name)))
        start = now()
        run()
        return costs, now() - start


@dataclass
class Look:
    """One call of a pipeline."""

    given: Mapping[str, list[Any]]
    """What each part was called with."""
    costs: Mapping[str, Cost]
    seconds: float


def looks_at(
    model: torch.nn.Module, names: Sequence[str], inputs: Sequence[Any], ready: Callable[[Any], Callable[[], Any]]
) -> list[Look]:
    """A look at the first two inputs (at the only one twice), and at further ones while there is a part that none has
    called; `ready(batch)` is what calls the pipeline. Raises `UsageError` for a part that is never called, or where
    nothing could be put in its place."""
    by_name = dict.fromkeys(names, 0)

    def look(batch: Any, called: dict[str, int]) -> Look:
        run, timed = ready(batch), list[Any]()

        def call() -> None:
            with counted_by_name(model, called):
                run()

        # Timed is the call alone: keeping the state of a model with many modules takes as long as a short call.
        given = calls_of_parts(model, names, lambda: timed.append(timed_parts(model, names, call)))
        return Look(given, *timed[0])

    def uncalled() -> list[str]:
        return [name for name in names if not any(one.given[name] for one in looks)]

    looks = [look(inputs[0], {})]
    second = inputs[min(1, len(inputs) - 1)]
    try:
        looks.append(look(second, by_name))
    except Exception:  # it takes nothing else in the place of a part, as recipes will show
        by_name.clear()
        looks.append(look(second, {}))
    for batch in inputs[2:]:
        if uncalled():
            looks.append(look(batch, {}))
    for name in uncalled():
        raise UsageError(f"the part {name!r} is not called by the pipeline, or not as a module")
    for name, calls in by_name.items():
        if calls < looks[1].costs[name].calls:
            raise UsageError(
                f"the part {name!r} is called by another reference than its name, where nothing can take its place: "
                f"let the pipeline call it as the model's {name}"
            )
    return looks
