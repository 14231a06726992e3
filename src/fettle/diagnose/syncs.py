"""Which operations would make the host wait for the device, found without a device.

On a CPU nothing synchronises, so the operators that would are recognised by name and by their arguments, below the
dispatcher (``.item()``, ``nonzero``, boolean indexing: their result's size or value must be known to the host) and
above it (``.tolist()``, ``.cpu()``, ``.numpy()``: they call no operator on a CPU tensor at all). What runs inside a
compiled graph, `torch.distributed` and C++ extensions is not seen. On a CUDA device `torch.cuda.set_sync_debug_mode`
says the same with the device's own authority.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fettle.diagnose.evidence import Sync

_BELOW = {
    "_local_scalar_dense": "reads a value of a tensor (.item(), float(), if tensor:)",
    "nonzero": "the number of results must be known to the host",
    "masked_select": "the number of results must be known to the host",
    "_unique2": "the number of results must be known to the host",
    "unique_dim": "the number of results must be known to the host",
    "unique_consecutive": "the number of results must be known to the host",
    "equal": "gives a Python bool",
    "allclose": "gives a Python bool",
    "is_nonzero": "gives a Python bool",
    "bincount": "the number of bins must be known to the host",
}
_ABOVE = {
    torch.Tensor.tolist: "copies the values to Python",
    torch.Tensor.cpu: "copies to the host and waits for it",
    torch.Tensor.numpy: "copies to the host and waits for it",
    torch.Tensor.__repr__: "prints the values",
    torch.Tensor.__array__: "copies to the host and waits for it",
}


def user_line() -> str:
    """``file.py:12`` of the innermost frame that is neither torch's nor ours; empty where there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/torch/" not in name and "/fettle/" not in name and not name.startswith("<frozen"):
            return f"{name.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def sync_reason(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why the operator `name` (without namespace and overload) would synchronise; empty where it would not."""
    if name in _BELOW:
        return _BELOW[name]
    if name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"):
        indices = args[1] if len(args) > 1 else ()
        if any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices):
            return "a boolean index: the number of results must be known to the host"
    if name == "repeat_interleave" and args and len(args) == 1 and "output_size" not in kwargs:
        return "the size of the result depends on values: give output_size"
    return ""


class _Above(TorchFunctionMode):
    def __init__(self, found: Counter[tuple[str, str, str]]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        why = _ABOVE.get(func, "")
        name = getattr(func, "__name__", str(func))
        if func is torch.Tensor.to and _to_host(args, kwargs):
            why = "copies to the host and waits for it"
        if why:
            self.found[f"Tensor.{name}", user_line(), why] += 1
        return func(*args, **kwargs)


class _Below(TorchDispatchMode):
    def __init__(self, found: Counter[tuple[str, str, str]]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        why = sync_reason(func.overloadpacket.__name__, args, kwargs)
        if why:
            self.found[f"aten.{func.overloadpacket.__name__}", user_line(), why] += 1
        return func(*args, **kwargs)


def _to_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``tensor.to(...)`` asks for the host by name."""
    wanted = kwargs.get("device", args[1] if len(args) > 1 else None)
    if isinstance(wanted, (str, torch.device)):
        return torch.device(wanted).type == "cpu" and not kwargs.get("non_blocking", False)
    return False


@contextmanager
def watch_syncs() -> Iterator[list[Sync]]:
    """Find the operations inside the block that would synchronise; the list is filled when it ends."""
    found: Counter[tuple[str, str, str]] = Counter()
    syncs: list[Sync] = []
    try:
        with _Above(found), _Below(found):
            yield syncs
    finally:
        syncs += [Sync(name, line, calls, why) for (name, line, why), calls in found.most_common()]
