"""A model to be made fast for inference: the workload itself, and what distinguishes two of them."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

from fettle.batches import read_batches
from fettle.errors import UsageError, type_text
from fettle.workload.trees import Batch, is_numbers, leaves, map_tensors, rows_of, spread, tensors

if TYPE_CHECKING:
    import torch


_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
"""What `fettle.recipe` can name."""


@dataclass(frozen=True)
class Workload:
    """A model to be made fast for inference, with everything that is needed to measure and to judge it."""

    model: Callable[..., Any]
    """Usually an ``nn.Module``; any callable will do. A method of a module is taken for the module, called by it."""

    inputs: Sequence[Batch] | Batch
    """Sample batches, rotated while the time is taken. The first half may calibrate a quantised recipe.

    A list of batches, one batch (a tensor, a tuple of positional arguments, a dict of keyword arguments), or a
    DataLoader, of which the first eight are taken; a list of batches afterwards."""

    call: Callable[..., Any] | None = None
    """How the model is called: ``call(model, *args, **kwargs)``. None means ``model(*args, **kwargs)``."""

    metric: Callable[[Callable[..., Any]], float] | None = None
    """The user's own measure of quality, higher is better: given the callable under test, return a number."""

    check_inputs: Sequence[Batch] | Batch = ()
    """Batches that only judge: no recipe is calibrated on them and no time is taken on them."""

    name: str = ""
    """Short name, shown in reports. Empty: taken from the target."""

    samples: int | None = None
    """Rows in one call, for throughput. None: the first dimension of the first tensor of a batch that has one, and is
    not empty in it; where the batches differ, the mean."""

    parts: Sequence[str] = ()
    """A pipeline: the names of those submodules of `model` that are tuned each on its own, such as ``("text_encoder",
    "unet", "vae.decoder")``. What is done between them stays as it is. Each must be called as a module."""

    padding: str = ""
    """Name of the argument [rows, places] that is 1 where a row has something and 0 where it is only filled up, such as
    ``attention_mask``: what the model says at the places that are filled up is not judged."""

    inputs_taken_for: str = field(default="", init=False, repr=False, compare=False)
    """What `inputs` were read as, in one line: ``one batch of keyword arguments: input_ids``."""

    def __post_init__(self) -> None:
        if not callable(self.model):
            raise UsageError(f"the workload's model is {type_text(self.model)}, which cannot be called")
        if isinstance(self.model, type):
            raise UsageError(f"the workload's model is a class: give an object of it, {self.model.__name__}(...)")
        for name in ("call", "metric"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise UsageError(f"the workload's {name} is {type_text(value)}, which cannot be called")
        if self.samples is not None and (not isinstance(self.samples, Integral) or self.samples < 1):
            raise UsageError(f"the workload's samples are {self.samples!r}: give the number of rows in one call")
        if self.samples is not None:
            object.__setattr__(self, "samples", int(self.samples))  # NumPy's own numbers are told to no other process
        model, call = of_module(self.model, self.call)
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "call", call)
        _check_parts(self.model, self.parts)
        read = read_batches(self.inputs, self.model, self.call)
        object.__setattr__(self, "inputs", read.items)
        object.__setattr__(self, "inputs_taken_for", read.taken_for)
        none = isinstance(self.check_inputs, Sequence) and len(self.check_inputs) == 0
        judged = [] if none else read_batches(self.check_inputs, self.model, self.call).items
        object.__setattr__(self, "check_inputs", judged)
        for number, batch in enumerate([*read.items, *judged] if self.padding else [], 1):
            mask = spread(batch)[1].get(self.padding)
            if getattr(mask, "ndim", 0) != 2:
                raise UsageError(
                    f"the workload's padding is {self.padding!r}, and batch {number} has no argument of that name with "
                    "rows and places: give batches as dicts of keyword arguments"
                )

    @property
    def calibration(self) -> list[Batch]:
        """Batches on which a recipe may be calibrated; never among `judged` for such a recipe. May be empty."""
        if self.check_inputs:
            return list(self.inputs)
        return list(self.inputs[: len(self.inputs) // 2])

    @property
    def rows(self) -> int:
        """Rows in one call: `samples`, else those of the first batch; 1 where its tensors have none. Raises
        `UsageError` where it is empty."""
        rows = self.samples or rows_of(self.inputs[0])
        if not rows and any(tensor.dim() for tensor in tensors(self.inputs[0])):
            raise UsageError(
                "the first batch of the inputs has no rows: give batches with at least one, or the number of rows in "
                "one call, Workload(..., samples=N)"
            )
        return rows or 1

    def run(self, model: Callable[..., Any], batch: Batch) -> Any:
        """Call `model` on one batch in the workload's way."""
        args, kwargs = spread(batch)
        return model(*args, **kwargs) if self.call is None else self.call(model, *args, **kwargs)

    def judged(self, output: Any, batch: Batch) -> Any:
        """An output as it is judged: 0 at the places of `batch` that `padding` says are only filled up."""
        if not self.padding:
            return output

        import torch

        filled_up = torch.as_tensor(spread(batch)[1][self.padding]) == 0  # it may be an array

        def without(leaf: torch.Tensor) -> torch.Tensor:
            if leaf.shape[:2] != filled_up.shape:
                return leaf
            places = filled_up.reshape(*filled_up.shape, *[1] * (leaf.dim() - 2))
            return leaf.masked_fill(places.to(leaf.device), 0)  # the model may have moved what it was given

        return map_tensors(without, output)


def of_module(model: Any, call: Callable[..., Any] | None) -> tuple[Any, Callable[..., Any] | None]:
    """A method of a module as the module and how it is called, `forward` as the module alone; all else as it is."""
    import torch

    if not isinstance(model, types.MethodType) or not isinstance(model.__self__, torch.nn.Module):
        return model, call
    usual = None if model.__name__ in ("forward", "_wrapped_call_impl") else model.__func__
    same = getattr(call, "__qualname__", "") == model.__func__.__qualname__
    return (model.__self__, usual) if call is None or same else (model, call)


def _check_parts(model: Any, parts: Sequence[str]) -> None:
    """Raise `UsageError` for parts of a pipeline that are not submodules, have names that no recipe can spell, or
    contain one another."""
    import torch

    if isinstance(parts, str):
        raise UsageError(f"the workload's parts are a list of names, as in [{parts!r}]")
    if parts and not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"the workload has parts, and its model is {type_text(model)}: make it an nn.Module that holds them, such "
            "as nn.ModuleDict, and give the workload a call"
        )
    found: dict[str, torch.nn.Module] = {}
    for name in parts:
        try:
            part = model.get_submodule(name) if name else None
        except AttributeError:
            part = None
        if part is None:
            known = [child for child, _ in model.named_children()]
            raise UsageError(f"the workload's part {name!r} is not a submodule of its model: it has {', '.join(known)}")
        if isinstance(part, torch.jit.ScriptModule):
            raise UsageError(f"the workload's part {name!r} is TorchScript, which cannot be changed: leave it out")
        if not _PART.fullmatch(name):
            raise UsageError(
                f"the workload's part {name!r} has a name that no recipe can spell: rename the submodule, with letters "
                "from a to z, digits, `_`, `-` and dots"
            )
        for other, module in found.items():
            if part in {*module.modules()} or module in {*part.modules()}:
                raise UsageError(f"the workload's parts {other!r} and {name!r} contain one another: name one of them")
        found[name] = part


_KINDS: dict[str, type[Workload]] = {}


def register_kind(key: str, kind: type[Workload]) -> None:
    """Let a factory that returns a dict with `key` in it mean this kind of workload."""
    _KINDS[key] = kind


def workload_from(made: object, where: str) -> Workload:
    """A workload from what a factory returned: a `Workload`, a dict of its fields, or ``(model, inputs)``.

    The last two forms let a workload file do without importing fettle.
    """
    if isinstance(made, Workload):
        return made
    if "optimizer" in made if isinstance(made, dict) else hasattr(made, "optimizer"):
        raise UsageError(f"what the factory {where} returned is for training, and a workload for inference is needed")
    if isinstance(made, tuple) and len(made) == 2:
        return Workload(made[0], made[1])
    kind = next((kind for key, kind in _KINDS.items() if isinstance(made, dict) and key in made), Workload)
    names = {item.name for item in dataclasses.fields(kind) if item.init}
    if isinstance(made, dict) and {"model", "inputs"} <= made.keys() <= names:
        return kind(**made)
    raise UsageError(
        f"the factory {where} returned {type_text(made)}: return fettle.Workload(model, [batch]), "
        f"a dict with keys among {', '.join(sorted(names))}, or (model, [batch])"
    )


def fingerprint(workload: Workload) -> str:
    """A short hash of weights and inputs, to see that two processes built the same workload.

    Every tensor counts with its name, shape and type, and with up to 4096 of its values taken at even strides.
    """
    import torch

    from fettle.structure import some_bytes

    digest = hashlib.sha256()
    tensors: list[tuple[str, Any]] = []
    if isinstance(workload.model, torch.nn.Module):
        tensors += workload.model.state_dict().items()
    for index, batch in enumerate([*workload.inputs, *workload.check_inputs]):
        tensors += [(f"input{index}{path}", leaf) for path, leaf in leaves(batch, caches=True)]
    usual = {item.name for item in dataclasses.fields(Workload)}
    for item in dataclasses.fields(workload):  # what another kind of workload has besides: texts, how much is written
        if item.name in usual:
            continue
        value = getattr(workload, item.name)
        value = dict(value.state_dict()) if isinstance(value, torch.nn.Module) else value  # a draft
        tensors += [(f"{item.name}{path}", leaf) for path, leaf in leaves(value)]
    for part in workload.parts:
        digest.update(f"part {part}".encode())
    if workload.padding:
        digest.update(f"padding {workload.padding}".encode())
    for name, value in tensors:
        digest.update(name.encode())
        if is_numbers(value):
            value = torch.as_tensor(value.copy())  # torch takes no array that runs backwards
        if not isinstance(value, torch.Tensor):
            digest.update(repr(value).encode() if isinstance(value, (str, int, float, bool)) else b"?")
        elif torch.nn.parameter.is_lazy(value):
            digest.update(b"lazy")  # has no shape before the first call
        else:
            digest.update(f"{tuple(value.shape)}{value.dtype}".encode())
            digest.update(some_bytes(value))
    return digest.hexdigest()[:16]
