"""The modes that see what would synchronise, the tensors that stand for ones on a device, the lines that wait."""

from __future__ import annotations

import contextlib
import linecache
import sys
import sysconfig
import traceback
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_iter

from fettle.diagnose.collectors.mode import OperatorMode
from fettle.diagnose.evidence import Sync, SyncKind
from fettle.patches import replaced

DEVICE = torch.device("cpu", 0)
"""What tensors that stand for device tensors give as their device."""

_READ = "the host waits for the device to know the value"
_SIZE = "the size of the result depends on values on the device, so the host waits for them"
_CHECK = "the operator reads back whether it succeeded"
_UPLOAD = "the host waits while its memory is copied to the device; pin it and copy with non_blocking=True"

# Operators as the dispatcher names them. Those whose kernels call others are here because their CUDA kernels wait
# inside, where no mode sees it (ATen: native/cuda/{Nonzero,Unique,SummaryOps,Repeat,IndexKernel,Equal}).
_OPERATORS: dict[str, tuple[SyncKind, str]] = {
    "aten._local_scalar_dense": ("read", _READ),
    "aten.equal": ("read", _READ),
    "aten.allclose": ("read", _READ),
    "aten.nonzero": ("size", _SIZE),
    "aten.masked_select": ("size", _SIZE),
    "aten._unique": ("size", _SIZE),
    "aten._unique2": ("size", _SIZE),
    "aten.unique_dim": ("size", _SIZE),
    "aten.unique_consecutive": ("size", _SIZE),
    "aten.unique_dim_consecutive": ("size", _SIZE),
    "aten.bincount": ("size", _SIZE),
    "aten.repeat_interleave.Tensor": ("size", _SIZE + "; output_size= gives it beforehand"),
    "aten._linalg_check_errors": ("check", _CHECK + "; the _ex variants do not"),
}
# Python calls that no operator stands for on CPU tensors, and those that run operators the device would not.
_FUNCTIONS: dict[str, tuple[SyncKind, str]] = {
    "torch.Tensor.tolist": ("read", _READ),
    "torch.Tensor.numpy": ("read", "the values are copied to the host"),
    "torch.Tensor.__array__": ("read", "the values are copied to the host"),
    "torch.Tensor.cpu": ("read", "the values are copied to the host, which waits for them"),
    "torch.Tensor.__repr__": ("read", "printing a tensor brings its values to the host"),
    "torch.Tensor.__format__": ("read", "printing a tensor brings its values to the host"),
}
_CPU_ONLY_CHECKS = ("torch.quantile", "torch.nanquantile", "torch.Tensor.quantile", "torch.Tensor.nanquantile")

_TORCH, _STANDARD_LIBRARY = (
    f"{Path(place)}/" for place in (Path(torch.__file__).parent, sysconfig.get_paths()["stdlib"])
)
_SITE = tuple(f"{Path(sysconfig.get_paths()[key])}/" for key in ("purelib", "platlib"))
_NOT_USERS = (str(Path(__file__).parent / "sync"), "<frozen", "<string>", _TORCH)


@dataclass(frozen=True)
class SyncReport:
    """Every line that waits, most frequent first."""

    syncs: tuple[Sync, ...]
    calls: int
    wall_s: float
    """Seconds that looking took; the modes make small operators several times slower, so time nothing beside it."""
    source: Literal["modes", "cuda"]


@dataclass
class SyncWatch:
    """Which tensors stand for device tensors, and what has been seen so far."""

    on_device: Any
    real: bool = False
    """Whether there is a device: its tensors then say so themselves, nothing stands for them and nothing is changed."""
    wall_s: float = 0.0
    _places: Counter[Sync] = field(default_factory=Counter)
    _storages: dict[int, Any] = field(default_factory=dict)
    _most: int = 10_000
    quiet: int = 0
    """Above 0, operators are not looked at: the device would not run them."""

    def __post_init__(self) -> None:
        for leaf in tree_iter(self.on_device):
            if isinstance(leaf, torch.nn.Module):
                self.mark([*leaf.parameters(), *leaf.buffers()])
            else:
                self.mark(leaf)

    def report(self, calls: int = 1) -> SyncReport:
        """What has been seen, over `calls` calls."""
        return SyncReport(counted(self._places), calls, self.wall_s, "modes")

    def mark(self, tree: Any) -> None:
        """Every tensor in the tree stands for a device tensor from now on.

        By storage, because autograd and views make new tensor objects. A weak reference keeps the storage's address
        from being used again, so a match is exact.
        """
        for leaf in () if self.real else tree_iter(tree):
            storage = _storage(leaf)
            if storage is not None and storage._cdata not in self._storages:
                self._storages[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        if len(self._storages) > self._most:
            self._storages = {key: ref for key, ref in self._storages.items() if not ref.expired()}
            self._most = max(10_000, 2 * len(self._storages))

    def holds(self, value: Any) -> bool:
        """Whether this is a tensor that stands for one on the device."""
        if self.real:
            return isinstance(value, torch.Tensor) and lies_on_gpu(value)
        storage = _storage(value)
        return storage is not None and storage._cdata in self._storages

    def is_device(self, device: Any) -> bool:
        """Whether the program means the device by this."""
        if not isinstance(device, (str, torch.device)):
            return False
        return torch.device(device).type != "cpu" if self.real else str(device) == str(DEVICE)

    def any_of(self, *trees: Any) -> bool:
        """Whether any tensor in the trees does."""
        return any(self.holds(leaf) for leaf in tree_iter(trees))

    def saw(self, operator: str, kind: SyncKind, reason: str) -> None:
        """Note a synchronisation at the user's current line."""
        self._places[here(operator, kind, reason)] += 1


class Functions(TorchFunctionMode):
    """Sees calls as the program wrote them."""

    def __init__(self, watch: SyncWatch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, watch = kwargs or {}, self.watch
        name = resolve_name(func) or getattr(func, "__name__", str(func))
        if watch.quiet:
            return func(*args, **kwargs)
        if name == "torch.Tensor.device.__get__":
            return DEVICE if not watch.real and watch.holds(args[0]) else func(*args, **kwargs)
        if name in _FUNCTIONS and args and watch.holds(args[0]):
            if args[0].numel():
                watch.saw(name, *_FUNCTIONS[name])
            with _quiet(watch):
                result = func(*args, **kwargs)
                # On a device this is a copy; on a CPU the same memory, which would go on counting as device memory.
                return result.clone() if isinstance(result, torch.Tensor) and not watch.real else result
        if name == "torch.Tensor.to" and isinstance(args[0], torch.Tensor):
            return self._moved(func, args, kwargs)
        if name in ("torch.Tensor.cuda", "torch.Tensor.pin_memory"):
            if name.endswith("cuda"):  # there is none here: the tensor stays where it is and counts as moved
                self._uploaded(name, args[0], bool(kwargs.get("non_blocking", False)))
                watch.mark(args[0])
            if watch.real:
                with _quiet(watch):
                    return func(*args, **kwargs)
            return args[0]
        if name in ("torch.nn.functional.one_hot", "torch._C._nn.one_hot") and watch.any_of(args, kwargs):
            return self._one_hot(func, name, args, kwargs)
        if name in _CPU_ONLY_CHECKS:
            with _quiet(watch):
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        if watch.is_device(kwargs.get("device")):
            if name in ("torch.tensor", "torch.as_tensor", "torch.asarray", "torch.Tensor.new_tensor"):
                self._uploaded(name, args[-1] if args and watch.real else result, False)
            watch.mark(result)
        elif name in _CPU_ONLY_CHECKS and watch.any_of(args, kwargs):
            watch.mark(result)
        return result

    def _moved(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`.to(...)`: to the host, to the device, or only another type."""
        watch, source = self.watch, args[0]
        target = next((arg for arg in (*args[1:], *kwargs.values()) if isinstance(arg, (str, torch.device))), None)
        other = next((arg for arg in (*args[1:], *kwargs.values()) if isinstance(arg, torch.Tensor)), None)
        flag = next((arg for arg in args if isinstance(arg, bool)), False)  # the first bare one is `non_blocking`
        non_blocking = bool(kwargs.get("non_blocking", flag))
        here = watch.holds(source)
        to_device = watch.holds(other) if other is not None else self._is_to_device(target, here)
        if target is not None and str(target).startswith("cuda") and not watch.real:
            args = tuple(DEVICE if arg is target else arg for arg in args)
            kwargs = {key: DEVICE if arg is target else arg for key, arg in kwargs.items()}
        if here and to_device is False:
            if not non_blocking:
                watch.saw("torch.Tensor.to", "read", "the values are copied to the host, which waits for them")
            with _quiet(watch):
                result = func(*args, **kwargs)
                return result if watch.real else result.clone()
        with _quiet(watch) if watch.real else contextlib.nullcontext():
            result = func(*args, **kwargs)
        if to_device and not here:
            self._uploaded("torch.Tensor.to", source, non_blocking)
            result = result.clone() if result is source and not watch.real else result
            watch.mark(result)
        return result

    def _is_to_device(self, target: str | torch.device | None, here: bool) -> bool | None:
        """None where the tensor stays. Without a GPU a program's `torch.device("cpu")` stands for its device."""
        if target is None:
            return None
        if self.watch.real:
            return self.watch.is_device(target)
        if isinstance(target, str):
            return target != "cpu"
        if target.index is None and target.type == "cpu" and here:
            return None
        return True

    def _uploaded(self, name: str, value: Any, non_blocking: bool) -> None:
        """A blocking copy of a tensor or a list of the host, unless it is empty."""
        empty = isinstance(value, torch.Tensor) and not value.numel()
        if not (non_blocking or empty or self.watch.holds(value)):
            self.watch.saw(name, "upload", _UPLOAD)

    def _one_hot(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Without a number of classes the largest value is read. A CPU reads values to check them, a GPU does not."""
        classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
        if classes == -1:
            self.watch.saw(name, "size", _SIZE + "; give num_classes")
        with _quiet(self.watch):
            result = func(*args, **kwargs)
        self.watch.mark(result)
        return result


class Operators(OperatorMode):
    """Sees the operators beneath, also those of the backward pass."""

    def __init__(self, watch: SyncWatch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, watch = kwargs or {}, self.watch
        if watch.quiet:
            return func(*args, **kwargs)
        device, packet = watch.any_of(args, kwargs), str(getattr(func, "overloadpacket", func))
        if device:
            sync = _OPERATORS.get(str(func)) or _OPERATORS.get(packet) or self._special(packet, args, kwargs)
            if sync is not None and not (packet == "aten.repeat_interleave" and kwargs.get("output_size") is not None):
                watch.saw(packet, *sync)
        result = func(*args, **kwargs)
        if device and packet != "aten.copy_":
            watch.mark(result)
        return result

    def _special(self, packet: str, args: Any, kwargs: Any) -> tuple[SyncKind, str] | None:
        """Operators that wait only for some arguments."""
        watch = self.watch
        if packet == "while_loop" or (packet == "cond" and watch.holds(args[0])):
            return ("read", _READ)
        if packet in ("aten.index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_"):
            indices = [index for index in args[1] if isinstance(index, torch.Tensor)]
            masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
            if masks:
                value = args[2] if len(args) > 2 else None
                accumulate = bool(args[3] if len(args) > 3 else kwargs.get("accumulate", False))
                # ATen turns x[mask] = a host scalar into masked_fill, which does not wait (canDispatchToMaskedFill).
                scalar = isinstance(value, torch.Tensor) and value.numel() == 1 and not watch.holds(value)
                return None if scalar and not accumulate else ("size", _SIZE + "; torch.where keeps the shape")
            if any(index.dim() and not watch.holds(index) for index in indices):
                return ("upload", "the index lies on the host and is copied to the device, which the host waits for")
        if packet == "aten.copy_" and len(args) > 1 and isinstance(args[1], torch.Tensor) and args[1].numel():
            to_device, from_device = watch.holds(args[0]), watch.holds(args[1])
            blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            if blocking and to_device != from_device:
                return ("upload", _UPLOAD) if to_device else ("read", "the values are copied to the host")
        return None


def _quiet(watch: SyncWatch) -> contextlib.AbstractContextManager[None]:
    return replaced(watch, "quiet", lambda depth: depth + 1)


def lies_on_gpu(tensor: torch.Tensor) -> bool:
    """Of a tensor on a machine with a device: NVIDIA's, AMD's, or another."""
    with torch._C.DisableTorchFunction():
        return not tensor.is_cpu


def _storage(value: Any) -> Any:
    """The storage of a tensor; None for what has none (sparse, opaque, anything that is not a tensor)."""
    if not isinstance(value, torch.Tensor):
        return None
    try:
        with torch._C.DisableTorchFunction():
            return value.untyped_storage()
    except RuntimeError:  # torch's way to say that this kind of tensor has no storage
        return None


def _is_users(filename: str) -> bool:
    """Not torch, the standard library or what looks. Other installed packages count: the line is in them."""
    return not filename.startswith(_NOT_USERS) and (
        not filename.startswith(_STANDARD_LIBRARY) or filename.startswith(_SITE)
    )


def here(operator: str, kind: SyncKind, reason: str) -> Sync:
    """The current line of the user's code, not counted yet."""
    stack = traceback.walk_stack(sys._getframe(1))
    places = [(frame.f_code, line) for frame, line in stack if _is_users(frame.f_code.co_filename)][:6]
    if not places:
        return Sync("?", 0, "?", "", operator, kind, reason, 0)
    (first, at), callers = places[0], tuple(f"{code.co_filename}:{line}" for code, line in places[1:])
    return Sync(first.co_filename, at, first.co_name, "", operator, kind, reason, 0, callers)


def counted(syncs: Counter[Sync]) -> tuple[Sync, ...]:
    """With their code and how often they happened, the most frequent first."""
    return tuple(
        replace(sync, code=linecache.getline(sync.file, sync.line).strip(), count=count)
        for sync, count in syncs.most_common()
    )
