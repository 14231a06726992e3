"""What a workload computes and on what, as far as it shows: to see that somebody has edited the model.

Weights and inputs have their own hash (`fettle.workload.fingerprint`); a ReLU that became a GELU changes neither, nor
do another number of heads, another attention or the mode, nor does a model that was moved to a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import itertools
import numbers
import os
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fettle.errors import is_program

ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_PLAIN = (numbers.Number, str, bytes, enum.Enum, torch.dtype)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_CONFIGS = ("config", "cfg", "hparams", "args")
"""How attributes are called whose objects hold settings."""
_MOST = 4096
"""Entries of a container that are looked at."""
_DEEPEST = 6
"""Containers and objects in one another that are looked into."""


def structure(model: Any, *parts: Any) -> str:
    """A short hash of the modules as they print, of their modes, settings and hooks, of the kinds of devices other than
    the CPU that they lie on, and of the user's own code in them and in `parts`, with its defaults and closures.

    Comments and layout do not count; functions that this code calls by their name in the same module do. Settings are
    attributes that are functions or plain values; of the latter none whose name begins with an underscore, which may
    hold an address, or what a module remembers of its calls. What the code beside the modules is given counts, too:
    tensors, arrays and data sets, such as those that a metric is computed on. The hash is stable for one version of
    Python.
    """
    digest = hashlib.sha256()
    seen: set[int] = set()
    for part in (model, *parts):
        try:
            digest.update(ADDRESS.sub("", repr(part)).encode())
        except Exception:  # a module of the user's may fail to print
            digest.update(type(part).__name__.encode())
        for function in _functions_of(part):
            _add(function, digest, seen)
        _add_attributes(part, digest, seen)
    if isinstance(model, torch.nn.Module):
        devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
        digest.update(" ".join(sorted({_kind(device) for device in devices} - {"cpu"})).encode())
    return digest.hexdigest()[:16]


def _kind(device: torch.device) -> str:
    """What two devices have in common that compute alike: the name of a GPU where the machine has others as well."""
    if device.type == "cuda":
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        if len(set(names)) > 1:
            return f"cuda {names[device.index or 0]}"
    return device.type


def _functions_of(part: Any) -> Iterator[types.FunctionType]:
    """The Python functions of a callable: its own, or the methods of its class and of its modules' classes."""
    if isinstance(part, types.MethodType):
        part = part.__func__
    if isinstance(part, types.FunctionType):
        yield part
        return
    if isinstance(inner := getattr(part, "__wrapped__", None), types.FunctionType):  # of functools.cache
        yield inner
    modules = part.modules() if hasattr(part, "modules") and hasattr(part, "state_dict") else [part]
    classes = dict.fromkeys(base for module in modules for base in type(module).__mro__)
    for kind in classes:
        for value in vars(kind).values():
            inner = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(inner, types.FunctionType):
                yield inner


def _add_attributes(part: Any, digest: Any, seen: set[int]) -> None:
    """The settings of a callable: of its modules, or of the object that it is or belongs to."""
    if isinstance(part, functools.partial):
        _add_value("", part, digest, seen)
    elif isinstance(part, torch.nn.Module):
        for name, module in part.named_modules():
            digest.update(f"{name}.training={module.training}".encode())
            _add_settings(name, module, digest, seen, data=False)
            for hooks in _HOOKS:
                _add_value(f"{name}.{hooks}", list(getattr(module, hooks, {}).values()), digest, seen, data=False)
    elif isinstance(part, types.MethodType):
        _add_settings("", part.__self__, digest, seen)
    elif not isinstance(part, (types.FunctionType, type)):
        _add_settings("", part, digest, seen)


def _add_settings(path: str, owner: Any, digest: Any, seen: set[int], depth: int = 0, data: bool = True) -> None:
    """What an object's attributes say, once for each object; tensors among them only as `data`."""
    if id(owner) in seen:
        return
    seen.add(id(owner))
    for name, value in sorted(getattr(owner, "__dict__", {}).items()):
        if not name.startswith("_") or callable(value) or name.endswith("_implementation_internal"):  # transformers'
            with contextlib.suppress(Exception):  # of a configuration that fails where it is read
                _add_value(f"{path}.{name}", value, digest, seen, depth, data)


def _add_value(path: str, value: Any, digest: Any, seen: set[int], depth: int = 0, data: bool = True) -> None:
    """A setting under its name: a plain value, a function, `data`, or those in a container or a configuration. Others
    are none, nor is what changes when a model is saved elsewhere or has warned."""
    deeper, name = (depth + 1, data), path.rpartition(".")[2]
    if depth > _DEEPEST or "warnings" in name:
        return
    if _is_plain(value):
        digest.update(f"{path}={value!r}".encode())
    elif isinstance(value, dict) or (isinstance(value, Mapping) and name.endswith(_CONFIGS)):
        known = [(str(key), item) for key, item in itertools.islice(value.items(), _MOST) if isinstance(key, _PLAIN)]
        for key, item in sorted(known, key=lambda pair: pair[0]):
            _add_value(f"{path}.{key}", item, digest, seen, *deeper)
    elif isinstance(value, (list, tuple)):
        few = value[:_MOST]
        if few and all(map(_is_plain, few)):  # a table may have rows of thousands
            digest.update(f"{path}={few!r}".encode())
            return
        for place, item in enumerate(few):
            _add_value(f"{path}.{place}", item, digest, seen, *deeper)
    elif isinstance(value, (set, frozenset)):  # prints in another order in each process
        digest.update(f"{path}={sorted(map(repr, filter(_is_plain, value)))}".encode())
    elif isinstance(value, functools.partial):
        _add_value(path, (value.func, value.args, value.keywords), digest, seen, *deeper)
    elif isinstance(value, types.MethodType):
        _add_value(path, value.__func__, digest, seen, *deeper)
    elif callable(value) and not isinstance(value, torch.nn.Module):
        digest.update(f"{path}={getattr(value, '__qualname__', type(value).__qualname__)}".encode())
        functions = [] if isinstance(value, type) else list(_functions_of(value))
        for function in functions:
            _add(function, digest, seen)
        if not isinstance(value, types.FunctionType) and any(map(_is_users, functions)):  # an object of the user's
            _add_settings(path, value, digest, seen, *deeper)
    elif data and (isinstance(value, torch.Tensor) or hasattr(value, "__array_interface__")):
        with contextlib.suppress(Exception):  # an array of no numbers
            tensor = torch.as_tensor(value)
            digest.update(f"{path}={tuple(tensor.shape)}{tensor.dtype}".encode() + some_bytes(tensor))
    elif (
        dataclasses.is_dataclass(value)
        or (name.endswith(_CONFIGS) and not isinstance(value, types.ModuleType))
        or (data and isinstance(value, (torch.utils.data.Dataset, torch.utils.data.DataLoader)))
    ):
        _add_settings(path, value, digest, seen, *deeper)


def _is_plain(value: Any) -> bool:
    """Whether a value prints alike in all processes; where a file lies, a temporary one perhaps, is no setting."""
    return isinstance(value, _PLAIN) and not (isinstance(value, str) and os.path.isabs(value))


def _add(function: types.FunctionType, digest: Any, seen: set[int]) -> None:
    """A function of the user's with all that it calls by name, its defaults and its closure, once each."""
    if id(function) in seen:
        return
    seen.add(id(function))
    inner = getattr(function, "__wrapped__", None)  # under `torch.no_grad()`
    if isinstance(inner, types.FunctionType):
        _add(inner, digest, seen)
    if not _is_users(function):
        return
    for name in _add_code(function.__code__, digest):
        with contextlib.suppress(Exception):
            _add_value(name, function.__globals__.get(name), digest, seen)
    _add_value("defaults", (function.__defaults__, function.__kwdefaults__), digest, seen)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(Exception):  # a cell may still be empty
            _add_value(name, cell.cell_contents, digest, seen)


def _add_code(code: types.CodeType, digest: Any) -> list[str]:
    """Add code and what is nested in it; returns the names that it uses."""
    digest.update(code.co_code)
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _add_code(constant, digest)
        else:  # a set prints in another order in each process
            digest.update(repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant).encode())
    digest.update(" ".join(names).encode())
    return names


def _is_users(function: types.FunctionType) -> bool:
    """Whether the user wrote it: in a file of theirs, a cell of a notebook, or a shell."""
    file = function.__code__.co_filename
    if file.startswith("<"):
        return file.startswith("<ipython") or function.__module__ == "__main__"
    return is_program(file)


def some_bytes(value: torch.Tensor) -> bytes:
    """Up to 4096 values at even strides; none where a tensor's values cannot be had as plain memory."""
    if value.is_meta or not value.numel():
        return b""
    try:
        dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
        sample = dense.reshape(-1)[:: -(-dense.numel() // 4096)].resolve_conj().resolve_neg().cpu().contiguous()
        return sample.view(torch.uint8).numpy().tobytes()
    except (RuntimeError, TypeError, NotImplementedError):  # nested, opaque or packed tensor types
        return b"?"
