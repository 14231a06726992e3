"""The workload: what is to be made fast, and where it comes from.

A *workload* is a model, sample batches, how the model is called and, optionally, the user's metric. A *target* says
how to build it, so that a fresh process can build it again: ``path/to/file.py:factory``, ``package.module:factory``,
or live objects, which travel as a cloudpickle file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fettle.batches import read_batches
from fettle.errors import UsageError, first_line

if TYPE_CHECKING:
    import torch

Batch = Any
"""One sample input, any pytree: a tuple is spread as positional arguments, a dict as keyword arguments, anything
else is the one argument."""


MODES = ("inference", "training")
AUTO = "auto"
"""The mode of a target whose factory has not been asked: what it returns tells."""


@dataclass(frozen=True)
class Workload:
    """A model to be made fast for inference, with everything that is needed to measure and to judge it."""

    model: Callable[..., Any]
    """Usually an ``nn.Module``; any callable will do."""

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
    """Rows in one call, for throughput. None: the first dimension of the first tensor of the first batch."""

    parts: Sequence[str] = ()
    """A pipeline: the names of those submodules of `model` that are tuned each on its own, such as ``("text_encoder",
    "unet", "vae.decoder")``. What is done between them stays as it is. Each must be called as a module."""

    inputs_taken_for: str = field(default="", init=False, repr=False, compare=False)
    """What `inputs` were read as, in one line: ``one batch of keyword arguments: input_ids``."""

    def __post_init__(self) -> None:
        if not callable(self.model):
            raise UsageError(f"the workload's model is a {type(self.model).__name__}, which cannot be called")
        for name in ("call", "metric"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise UsageError(f"the workload's {name} is a {type(value).__name__}, which cannot be called")
        if self.samples is not None and (not isinstance(self.samples, Integral) or self.samples < 1):
            raise UsageError(f"the workload's samples are {self.samples!r}: give the number of rows in one call")
        _check_parts(self.model, self.parts)
        read = read_batches(self.inputs, self.model, self.call)
        object.__setattr__(self, "inputs", read.items)
        object.__setattr__(self, "inputs_taken_for", read.taken_for)
        none = isinstance(self.check_inputs, Sequence) and len(self.check_inputs) == 0
        judged = [] if none else read_batches(self.check_inputs, self.model, self.call).items
        object.__setattr__(self, "check_inputs", judged)

    @property
    def calibration(self) -> list[Batch]:
        """Batches on which a recipe may be calibrated; never among `judged` for such a recipe. May be empty."""
        if self.check_inputs:
            return list(self.inputs)
        return list(self.inputs[: len(self.inputs) // 2])

    def run(self, model: Callable[..., Any], batch: Batch) -> Any:
        """Call `model` on one batch in the workload's way."""
        args, kwargs = spread(batch)
        return model(*args, **kwargs) if self.call is None else self.call(model, *args, **kwargs)


def _check_parts(model: Any, parts: Sequence[str]) -> None:
    """Raise `UsageError` for parts of a pipeline that are no submodules, or lie in one another."""
    import torch

    if isinstance(parts, str):
        raise UsageError(f"the workload's parts are a list of names, as in [{parts!r}]")
    if parts and not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"the workload has parts, and its model is a {type(model).__name__}: make it an nn.Module that holds them, "
            "such as nn.ModuleDict, and give the workload a call"
        )
    for place, name in enumerate(parts):
        try:
            found = model.get_submodule(name) if name else None
        except AttributeError:
            found = None
        if found is None:
            known = [child for child, _ in model.named_children()]
            raise UsageError(f"the workload's part {name!r} is no submodule of its model: it has {', '.join(known)}")
        for other in (*parts[:place], *parts[place + 1 :]):
            if name == other or name.startswith(f"{other}."):
                raise UsageError(f"the workload's parts {other!r} and {name!r} lie in one another: name one of them")


def spread(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of one batch. A named tuple or a dataclass is one argument."""
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        return batch, {}
    if type(batch) is dict and all(isinstance(key, str) for key in batch):
        return (), batch
    return (batch,), {}


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a pytree with its path; dataclasses, mappings and sequences are branches, None is skipped."""
    if tree is None:
        return
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type) and not isinstance(tree, Mapping):
        for item in dataclasses.fields(tree):
            yield from leaves(getattr(tree, item.name), f"{path}.{item.name}")
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}")
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from leaves(value, f"{path}[{index}]")
    else:
        yield path or "output", tree


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of a pytree."""
    import torch

    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def device_of(model: Any, batch: Any) -> str:
    """Type of the device of a module's first parameter or buffer, else of the batch's first tensor, else ``cpu``."""
    import torch

    held = itertools.chain(model.parameters(), model.buffers()) if isinstance(model, torch.nn.Module) else ()
    return next((str(tensor.device.type) for tensor in itertools.chain(held, tensors(batch))), "cpu")


def map_tensors(change: Any, tree: Any) -> Any:
    """A copy of a tree with every tensor changed: tuples, lists, dicts, dataclasses, and what torch knows as a tree."""
    import copy
    import dataclasses

    import torch

    if isinstance(tree, torch.Tensor):
        return change(tree)
    if tree is None or isinstance(tree, (str, int, float)):
        return tree
    if type(tree) in (tuple, list):  # the common branches first, without the cost of a general tree
        return type(tree)(map_tensors(change, item) for item in tree)
    if type(tree) is dict:
        return {key: map_tensors(change, item) for key, item in tree.items()}
    if dataclasses.is_dataclass(tree) and not isinstance(tree, (type, dict)):  # torch knows only registered ones
        changed = copy.copy(tree)
        for item in dataclasses.fields(tree):
            object.__setattr__(changed, item.name, map_tensors(change, getattr(tree, item.name)))
        return changed

    def inside(item: Any) -> Any:
        return item if item is tree else map_tensors(change, item)

    return torch.utils._pytree.tree_map(inside, tree, is_leaf=lambda item: item is not tree)


@dataclass(frozen=True)
class Target:
    """Where a workload comes from. Data only: building it is `load`, which runs the user's code."""

    reference: str
    """``/absolute/file.py:factory``, ``package.module:factory``, or ``/absolute/workload.pkl`` for live objects."""

    name: str = ""
    search_path: tuple[str, ...] = field(default=(), repr=False)
    """``sys.path`` of the process that named the target, so that a worker finds the same modules."""
    mode: str = AUTO
    """``inference`` for a `Workload`, ``training`` for a `fettle.TrainingWorkload`, ``auto`` for what the factory
    returns."""
    arguments: Mapping[str, int | float | str] = field(default_factory=dict, hash=False)
    """What the factory is called with, by name."""
    folder: str = field(default="", repr=False)
    """Where its process works; empty for where we are."""
    instead_of: str = field(default="", repr=False)
    """Of another revision: the working tree, from which nothing may be imported."""
    checkout: str = field(default="", repr=False)
    """Of another revision: the root of its own files, which may lie in the working tree."""

    @property
    def is_live(self) -> bool:
        """Whether the workload was handed over as live objects."""
        return self.reference.endswith(".pkl")

    def load(self, made: object = None) -> Workload:
        """Build the workload, or take what the factory has `made`. Raises `UsageError` with one line where the user can
        mend it."""
        return self._named(workload_from(self.make() if made is None else made, self.reference))

    def make(self, seed: int = 0) -> object:
        """What the factory returns, unchecked. A factory with a parameter ``seed`` is given it."""
        if self.folder:
            os.chdir(self.folder)
        for entry in reversed(self.search_path):
            if entry not in sys.path:
                sys.path.insert(0, entry)
        if self.is_live:
            return _load_live(Path(self.reference))
        factory = _find_factory(self.reference)
        for name in self.arguments:
            if not _takes(factory, name):
                raise UsageError(f"the factory {self.reference} has no parameter {name!r}")
        arguments = {"seed": seed, **self.arguments} if _takes(factory, "seed") else self.arguments
        try:
            made = factory(**arguments)
            if self.instead_of:
                self._check_imports()
            return made
        except UsageError:
            raise
        except (Exception, SystemExit) as error:  # a script without a main guard may leave
            raise UsageError(f"the factory {self.reference} raised {first_line(error)}") from error

    def _check_imports(self) -> None:
        """Raise `UsageError` where a module came from the working tree: it would be measured in place of its other
        revision."""
        folders = (self.checkout, sys.prefix, sys.base_prefix, os.environ.get("TORCHINDUCTOR_CACHE_DIR"))
        allowed = tuple(os.path.abspath(folder) + os.sep for folder in folders if folder)
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None) or ""
            if (
                file.startswith(self.instead_of + os.sep) and not file.startswith(allowed)
                and name.partition(".")[0] != "fettle" and not re.search(r"/(site|dist)-packages/", file)
            ):  # fmt: skip
                raise UsageError(
                    f"{name} was imported from the working tree ({file}), not from the other revision: an editable "
                    "install that names its modules one by one; run fettle with PYTHONPATH set to the source folder"
                )

    def _named(self, workload: Workload) -> Workload:
        return workload if workload.name else dataclasses.replace(workload, name=self.name)


def check_mode(mode: str) -> None:
    """Raise `UsageError` for anything but ``inference``, ``training`` and ``auto``."""
    if mode not in (*MODES, AUTO):
        raise UsageError(f"unknown mode {mode!r}: there are {', '.join((*MODES, AUTO))}")


def find_target(text: str) -> Target:
    """The target that a user named, checked as far as that goes without running it.

    Raises `UsageError` for a file that does not exist or a text of another form.
    """
    here = str(Path.cwd())
    # without a factory the text may still have a colon: it is in the path
    bare = ":" not in text or text.endswith(".py")
    location, _, factory = (text, "", "workload") if bare else text.rpartition(":")
    if not factory.isidentifier():
        raise UsageError(f"{text!r} is not a target: write path/to/file.py:factory or package.module:factory")
    if location.endswith(".py") or "/" in location:
        path = Path(location).expanduser().resolve()
        if not path.is_file():
            raise UsageError(f"no such file: {location}")
        if path.suffix != ".py":
            raise UsageError(f"{location} is no Python file: write path/to/file.py:factory")
        name = path.stem if factory == "workload" else f"{path.stem}-{factory}"
        return Target(f"{path}:{factory}", name, (str(path.parent), here))
    if not all(part.isidentifier() for part in location.split(".")):
        raise UsageError(f"{text!r} is not a target: write path/to/file.py:factory or package.module:factory")
    name = location.rpartition(".")[2] if factory == "workload" else f"{location.rpartition('.')[2]}-{factory}"
    return Target(f"{location}:{factory}", name, (here,))


def target_from_objects(workload: Any, folder: Path) -> Target:
    """Write a `Workload` or a `fettle.TrainingWorkload` to ``folder/workload.pkl`` with cloudpickle, and return the
    target that reads it.

    Raises `UsageError` when something in them cannot be pickled, with the factory form that always works.
    """
    import cloudpickle

    try:
        data = cloudpickle.dumps(workload)
    except Exception as error:
        raise UsageError(
            f"the model or its inputs cannot be handed to a worker process ({first_line(error)}): write a factory "
            "instead, def workload(): return model, [batch], and pass 'file.py:workload'"
        ) from error
    path = (folder / "workload.pkl").resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or first_line(error)}") from error
    name = workload.name or type(workload.model).__name__
    return Target(str(path), name, tuple(entry or str(Path.cwd()) for entry in sys.path))


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
    if type(made).__name__ == "TrainingWorkload" or (isinstance(made, dict) and "optimizer" in made):
        raise UsageError(f"what the factory {where} returned is for training, and a workload for inference is needed")
    if isinstance(made, tuple) and len(made) == 2:
        return Workload(made[0], made[1])
    kind = next((kind for key, kind in _KINDS.items() if isinstance(made, dict) and key in made), Workload)
    names = {item.name for item in dataclasses.fields(kind) if item.init}
    if isinstance(made, dict) and {"model", "inputs"} <= made.keys() <= names:
        return kind(**made)
    raise UsageError(
        f"the factory {where} returned a {type(made).__name__}: return fettle.Workload(model, [batch]), "
        f"a dict with keys among {', '.join(sorted(names))}, or (model, [batch])"
    )


def fingerprint(workload: Workload) -> str:
    """A short hash of weights and inputs, to see that two processes built the same workload.

    Every tensor counts with its name, shape and type, and with up to 4096 of its values taken at even strides.
    """
    import torch

    digest = hashlib.sha256()
    tensors: list[tuple[str, Any]] = []
    if isinstance(workload.model, torch.nn.Module):
        tensors += workload.model.state_dict().items()
    for index, batch in enumerate([*workload.inputs, *workload.check_inputs]):
        tensors += [(f"input{index}{path}", leaf) for path, leaf in leaves(batch)]
    usual = {item.name for item in dataclasses.fields(Workload)}
    for item in dataclasses.fields(workload):  # what another kind of workload has besides: texts, how much is written
        if item.name not in usual:
            tensors += [(f"{item.name}{path}", leaf) for path, leaf in leaves(getattr(workload, item.name))]
    for part in workload.parts:
        digest.update(f"part {part}".encode())
    for name, value in tensors:
        digest.update(name.encode())
        if type(value).__module__ == "numpy":
            value = torch.as_tensor(value)
        if not isinstance(value, torch.Tensor):
            digest.update(repr(value).encode() if isinstance(value, (str, int, float, bool)) else b"?")
        elif torch.nn.parameter.is_lazy(value):
            digest.update(b"lazy")  # has no shape before the first call
        else:
            digest.update(f"{tuple(value.shape)}{value.dtype}".encode())
            digest.update(_some_bytes(value))
    return digest.hexdigest()[:16]


def _some_bytes(value: torch.Tensor, most: int = 4096) -> bytes:
    """Up to `most` values at even strides; none where a tensor's values cannot be had as plain memory."""
    import torch

    if value.is_meta or not value.numel():
        return b""
    try:
        dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
        sample = dense.reshape(-1)[:: -(-dense.numel() // most)].resolve_conj().resolve_neg().cpu().contiguous()
        return sample.view(torch.uint8).numpy().tobytes()
    except (RuntimeError, TypeError, NotImplementedError):  # nested, opaque or packed tensor types
        return b"?"


def _takes(factory: Callable[..., object], name: str) -> bool:
    """Whether it can be called with an argument of that name."""
    try:
        parameters = inspect.signature(factory).parameters
        return name in parameters or (
            name != "seed" and any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        )
    except (TypeError, ValueError):  # a built-in, or something else without a signature
        return False


def _find_factory(reference: str) -> Callable[..., object]:
    location, _, name = reference.rpartition(":")
    try:
        if location.endswith(".py"):
            module_name = f"_fettle_target_{Path(location).stem}"
            spec = importlib.util.spec_from_file_location(module_name, location)
            if spec is None or spec.loader is None:
                raise UsageError(f"cannot read {location} as a Python file")
            module = importlib.util.module_from_spec(spec)
            sys.modules[module_name] = module  # dataclasses and pickling inside the file look it up there
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(location)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"importing {location} failed: {first_line(error)}") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        hint = f" (it has {', '.join(known[:8])})" if known else ""
        raise UsageError(f"{location} has no factory named {name!r}{hint}")
    return factory  # type: ignore[no-any-return]


def _load_live(path: Path) -> object:
    import pickle

    try:
        made = pickle.loads(path.read_bytes())  # written by this user's own process a moment ago
    except Exception as error:
        raise UsageError(
            f"the model or its inputs cannot be rebuilt in a worker process ({first_line(error)}): write a factory "
            "instead, def workload(): return model, [batch], and pass 'file.py:workload'"
        ) from error
    return made
