"""What a workload computes and on what, as far as it shows: to see that somebody has edited the model.

Weights and inputs have their own hash (`fettle.workload.fingerprint`); a ReLU that became a GELU changes neither, nor
does a model that was moved to a GPU.
"""

from __future__ import annotations

import hashlib
import re
import types
from collections.abc import Iterator
from typing import Any

import torch

from fettle.errors import is_users

ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def structure(model: Any, *functions: Any) -> str:
    """A short hash of the modules as they print, of the kinds of devices other than the CPU that they lie on, and of
    the user's own code in them and in `functions`.

    Comments and layout do not count; functions that this code calls by their name in the same module do. The hash is
    stable for one version of Python.
    """
    digest = hashlib.sha256()
    visited: set[int] = set()
    for part in (model, *functions):
        try:
            digest.update(ADDRESS.sub("", repr(part)).encode())
        except Exception:  # a module of the user's may fail to print
            digest.update(type(part).__name__.encode())
        for function in _functions_of(part):
            _add(function, digest, visited)
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
    modules = part.modules() if hasattr(part, "modules") and hasattr(part, "state_dict") else [part]
    classes = dict.fromkeys(base for module in modules for base in type(module).__mro__)
    for kind in classes:
        for value in vars(kind).values():
            inner = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(inner, types.FunctionType):
                yield inner


def _add(function: types.FunctionType, digest: Any, seen: set[int]) -> None:
    """A function of the user's with all that it calls by name, once each."""
    code = function.__code__
    if id(code) in seen or not _own(code.co_filename):
        return
    seen.add(id(code))
    for name in _add_code(code, digest):
        value = function.__globals__.get(name)
        if isinstance(value, types.FunctionType):
            _add(value, digest, seen)
        elif isinstance(value, _PLAIN):
            digest.update(f"{name}={value!r}".encode())


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


def _own(file: str) -> bool:
    """Whether the user wrote it: a file of theirs, or a cell of a notebook."""
    return (
        "/site-packages/" not in file and (is_users(file) or file.startswith("<ipython")) and "/lib/python" not in file
    )
