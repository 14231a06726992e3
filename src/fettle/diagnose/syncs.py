"""Where does the host wait for the device? Found on a CPU, before there is a device to wait for.

    report = find_syncs(lambda: model(batch), on_device=[model, batch])
    for sync in report.syncs:
        print(sync.where, sync.code, sync.count, sync.reason)

A synchronisation makes the host wait until the device has done everything queued before it. Two modes of PyTorch see
what a program asks for: a function mode sees calls as the program wrote them (`.cpu()`, `.tolist()`, `print`), a
dispatch mode sees the operators beneath (`_local_scalar_dense`, `nonzero`). Whether a tensor would lie on the device is
tracked: those named in `on_device`, what is computed from them, and what is made on or moved to their device. To tell
that device from the host, such tensors say that their device is `cpu:0`, which PyTorch takes for the CPU everywhere.

What it cannot see:
- Reads past PyTorch: `data_ptr`, DLPack, custom C++ operators, `torch.cuda.synchronize()` (there is no device here).
- Code that runs only where there is a device, such as `if x.is_cuda`.
- Inside torch's own Python functions, what only the function mode sees (a `.tolist()` in there); operators are seen.
- What happens inside compiled graphs. They are run as eager code while looking, so a sync that a compiler would have
  removed is reported, and one that it adds is not.
- Other threads, other processes, and the allocator's own synchronising retries.
- A program that moves tensors with a device of its own making, `torch.device("cpu")`, on a CPU: moving a tensor there
  is taken as moving to the device, the string "cpu" and `.cpu()` as moving to the host. Give such a program `cpu:0`.

On a GPU, `find_cuda_syncs` asks CUDA's own checks instead, and `confirm` says which of the lines found they confirm.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
import sysconfig
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

Kind = Literal["read", "size", "check", "upload", "wait"]
"""read: a value comes to the host. size: the shape of a result depends on values. check: an operator reads back whether
it went well. upload: the host copies to the device and waits. wait: seen by CUDA's checks, which do not say why."""

DEVICE = torch.device("cpu", 0)
"""What tensors that stand for device tensors give as their device."""


@dataclass(frozen=True)
class Sync:
    """One source line that makes the host wait, with how often it did."""

    file: str
    line: int
    function: str
    code: str
    operator: str
    kind: Kind
    reason: str
    count: int
    stack: tuple[str, ...] = ()
    """The callers outside torch, nearest first, as file:line."""

    @property
    def where(self) -> str:
        """file:line, as an editor opens it."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class SyncReport:
    """Every line that waits, most frequent first."""

    syncs: tuple[Sync, ...]
    calls: int
    wall_s: float
    """Seconds that looking took; the modes make small operators several times slower, so time nothing beside it."""
    source: Literal["modes", "cuda"]

    @property
    def per_call(self) -> float:
        """Synchronisations in one call."""
        return sum(sync.count for sync in self.syncs) / self.calls


_READ = "the host waits for the device to know the value"
_SIZE = "the size of the result depends on values on the device, so the host waits for them"
_CHECK = "the operator reads back whether it succeeded"
_UPLOAD = "the host waits while its memory is copied to the device; pin it and copy with non_blocking=True"

# Operators as the dispatcher names them. Those whose kernels call others are here because their CUDA kernels wait
# inside, where no mode sees it (ATen: native/cuda/{Nonzero,Unique,SummaryOps,Repeat,IndexKernel,Equal}).
_OPERATORS: dict[str, tuple[Kind, str]] = {
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
    "aten.repeat_interleave.Tensor": ("size", _SIZE + "; output_size= tells it beforehand"),
    "aten._linalg_check_errors": ("check", _CHECK + "; the _ex variants do not"),
}
# Python calls that no operator stands for on CPU tensors, and those that run operators the device would not.
_FUNCTIONS: dict[str, tuple[Kind, str]] = {
    "torch.Tensor.tolist": ("read", _READ),
    "torch.Tensor.numpy": ("read", "the values are copied to the host"),
    "torch.Tensor.__array__": ("read", "the values are copied to the host"),
    "torch.Tensor.cpu": ("read", "the values are copied to the host, which waits for them"),
    "torch.Tensor.__repr__": ("read", "printing a tensor brings its values to the host"),
    "torch.Tensor.__format__": ("read", "printing a tensor brings its values to the host"),
}
_CPU_ONLY_CHECKS = ("torch.quantile", "torch.nanquantile", "torch.Tensor.quantile", "torch.Tensor.nanquantile")


def find_syncs(call: Callable[[], Any], *, on_device: Any, calls: int = 1) -> SyncReport:
    """Run `call` on the CPU `calls` times and find what would synchronise.

    `on_device` is any tree of modules and tensors that would be on the device: the model and its batch. The function's
    own exceptions come through.
    """
    with watch_syncs(on_device) as watch:
        for _ in range(calls):
            call()
    return watch.report(calls)


@contextlib.contextmanager
def watch_syncs(on_device: Any) -> Iterator[SyncWatch]:
    """`find_syncs` for a block of code: ask the watch for its `report()` at the end."""
    watch = SyncWatch(on_device)
    started = time.perf_counter()
    with torch.compiler.set_stance("force_eager"), _Functions(watch), _Operators(watch):
        try:
            yield watch
        finally:
            watch.wall_s = time.perf_counter() - started


def find_cuda_syncs(call: Callable[[], Any], *, calls: int = 1) -> SyncReport:
    """Run `call` on a GPU with CUDA's sync debug mode and collect its warnings with the source lines.

    The mode does not cover torch.distributed, torch.sparse and an explicit `torch.cuda.synchronize()`. Raises
    `RuntimeError` where there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device here: find_syncs finds them on a CPU")
    places: Counter[_Place] = Counter()

    def seen(message: Any, *args: Any, **kwargs: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            places[_place("cuda", "wait", "CUDA reported a synchronising call")] += 1

    before, started = torch.cuda.get_sync_debug_mode(), time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = seen  # called on the warning's own stack, so the user's line is there to be found
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(calls):
                call()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return SyncReport(_syncs(places), calls, time.perf_counter() - started, "cuda")


def confirm(found: SyncReport, on_gpu: SyncReport) -> tuple[tuple[Sync, ...], tuple[Sync, ...], tuple[Sync, ...]]:
    """Compare by source line: confirmed by the GPU, claimed but not seen there, seen there but not claimed."""
    real, claimed = {sync.where for sync in on_gpu.syncs}, {sync.where for sync in found.syncs}
    return (
        tuple(sync for sync in found.syncs if sync.where in real),
        tuple(sync for sync in found.syncs if sync.where not in real),
        tuple(sync for sync in on_gpu.syncs if sync.where not in claimed),
    )


@dataclass(frozen=True)
class _Place:
    file: str
    line: int
    function: str
    operator: str
    kind: Kind
    reason: str
    stack: tuple[str, ...]


@dataclass
class SyncWatch:
    """Which tensors stand for device tensors, and what has been seen so far."""

    on_device: Any
    wall_s: float = 0.0
    _places: Counter[_Place] = field(default_factory=Counter)
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
        return SyncReport(_syncs(self._places), calls, self.wall_s, "modes")

    def mark(self, tree: Any) -> None:
        """Every tensor in the tree stands for a device tensor from now on.

        By storage, because autograd and views make new tensor objects. A weak reference keeps the storage's address
        from being used again, so a match is exact.
        """
        from torch.multiprocessing.reductions import StorageWeakRef

        for leaf in tree_iter(tree):
            storage = _storage(leaf)
            if storage is not None and storage._cdata not in self._storages:
                self._storages[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        if len(self._storages) > self._most:
            self._storages = {key: ref for key, ref in self._storages.items() if not ref.expired()}
            self._most = max(10_000, 2 * len(self._storages))

    def holds(self, value: Any) -> bool:
        """Whether this is a tensor that stands for one on the device."""
        storage = _storage(value)
        return storage is not None and storage._cdata in self._storages

    def any_of(self, *trees: Any) -> bool:
        """Whether any tensor in the trees does."""
        return any(self.holds(leaf) for leaf in tree_iter(trees))

    def saw(self, operator: str, kind: Kind, reason: str) -> None:
        """Note a synchronisation at the user's current line."""
        self._places[_place(operator, kind, reason)] += 1


class _Functions(TorchFunctionMode):
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
            return DEVICE if watch.holds(args[0]) else func(*args, **kwargs)
        if name in _FUNCTIONS and args and watch.holds(args[0]):
            if args[0].numel():
                watch.saw(name, *_FUNCTIONS[name])
            with _quiet(watch):
                result = func(*args, **kwargs)
                # On a device this is a copy; on a CPU the same memory, which would go on counting as device memory.
                return result.clone() if isinstance(result, torch.Tensor) else result
        if name == "torch.Tensor.to" and isinstance(args[0], torch.Tensor):
            return self._moved(func, args, kwargs)
        if name in ("torch.Tensor.cuda", "torch.Tensor.pin_memory"):
            if name.endswith("cuda"):  # there is none here: the tensor stays where it is and counts as moved
                self._uploaded(name, args[0], bool(kwargs.get("non_blocking", False)))
                watch.mark(args[0])
            return args[0]
        if name in ("torch.nn.functional.one_hot", "torch._C._nn.one_hot") and watch.holds(args[0]):
            return self._one_hot(func, name, args, kwargs)
        if name in _CPU_ONLY_CHECKS:
            with _quiet(watch):
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        if _is_device(kwargs.get("device")):
            if name in ("torch.tensor", "torch.as_tensor", "torch.asarray", "torch.Tensor.new_tensor"):
                self._uploaded(name, result, False)
            watch.mark(result)
        elif watch.quiet == 0 and name in _CPU_ONLY_CHECKS and watch.any_of(args):
            watch.mark(result)
        return result

    def _moved(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`.to(...)`: to the host, to the device, or only another type."""
        watch, source = self.watch, args[0]
        target = next((arg for arg in (*args[1:], *kwargs.values()) if isinstance(arg, (str, torch.device))), None)
        other = next((arg for arg in (*args[1:], *kwargs.values()) if isinstance(arg, torch.Tensor)), None)
        non_blocking = bool(kwargs.get("non_blocking", False)) or _third_is_true(args)
        here = watch.holds(source)
        if other is not None:
            to_device: bool | None = watch.holds(other)
        elif target is None:
            to_device = None
        elif isinstance(target, str):
            to_device = target not in ("cpu",)
        else:
            to_device = True if target.index is not None or target.type != "cpu" else (None if here else True)
        if target is not None and str(target).startswith("cuda"):
            args = tuple(DEVICE if arg is target else arg for arg in args)
            kwargs = {key: DEVICE if arg is target else arg for key, arg in kwargs.items()}
        if here and to_device is False:
            if not non_blocking:
                watch.saw("torch.Tensor.to", "read", "the values are copied to the host, which waits for them")
            with _quiet(watch):
                return func(*args, **kwargs).clone()
        result = func(*args, **kwargs)
        if to_device and not here:
            self._uploaded("torch.Tensor.to", source, non_blocking)
            result = result.clone() if result is source else result
            watch.mark(result)
        return result

    def _uploaded(self, name: str, value: torch.Tensor, non_blocking: bool) -> None:
        if not non_blocking and value.numel() and not self.watch.holds(value):
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


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operators beneath, also those of the backward pass."""

    def __init__(self, watch: SyncWatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, watch = kwargs or {}, self.watch
        if watch.quiet:
            return func(*args, **kwargs)
        device = watch.any_of(args, kwargs)
        if device:
            overload, packet = str(func), str(func.overloadpacket)
            found = _OPERATORS.get(overload) or _OPERATORS.get(packet) or self._special(packet, args, kwargs)
            if found is not None and not (packet == "aten.repeat_interleave" and kwargs.get("output_size") is not None):
                watch.saw(packet, *found)
        result = func(*args, **kwargs)
        if device and str(func.overloadpacket) != "aten.copy_":
            watch.mark(result)
        return result

    def _special(self, packet: str, args: Any, kwargs: Any) -> tuple[Kind, str] | None:
        """Operators that wait only for some arguments."""
        watch = self.watch
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


@contextlib.contextmanager
def _quiet(watch: SyncWatch) -> Iterator[None]:
    watch.quiet += 1
    try:
        yield
    finally:
        watch.quiet -= 1


def _is_device(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and str(device) == str(DEVICE)


def _third_is_true(args: Any) -> bool:
    """`.to(device, dtype, non_blocking)` and `.to(dtype, non_blocking)`: the first bare bool."""
    flags = [arg for arg in args[1:] if isinstance(arg, bool)]
    return bool(flags and flags[0])


def _storage(value: Any) -> Any:
    """The storage of a tensor; None for what has none (sparse, opaque, anything that is no tensor)."""
    if not isinstance(value, torch.Tensor):
        return None
    try:
        with torch._C.DisableTorchFunction():
            return value.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


_INSIDE = tuple(
    str(Path(place)) + "/" for place in (Path(torch.__file__).parent, Path(sysconfig.get_paths()["stdlib"]))
)
_SITE = tuple(str(Path(sysconfig.get_paths()[key])) + "/" for key in ("purelib", "platlib"))
_MINE = (__file__, "<frozen", "<string>")


def _is_users(filename: str) -> bool:
    """Not torch, not the standard library, not this file. Other installed packages count: the line is in them."""
    if filename.startswith(_MINE) or filename.startswith(_INSIDE[0]):
        return False
    return not filename.startswith(_INSIDE[1]) or filename.startswith(_SITE)


def _place(operator: str, kind: Kind, reason: str) -> _Place:
    """The current line of the user's code."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < 6:
        if _is_users(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back
    if not frames:
        return _Place("?", 0, "?", operator, kind, reason, ())
    callers = tuple(f"{caller.f_code.co_filename}:{caller.f_lineno}" for caller in frames[1:])
    code = frames[0].f_code
    return _Place(code.co_filename, frames[0].f_lineno, code.co_name, operator, kind, reason, callers)


def _syncs(places: Counter[_Place]) -> tuple[Sync, ...]:
    return tuple(
        Sync(
            file=place.file,
            line=place.line,
            function=place.function,
            code=linecache.getline(place.file, place.line).strip(),
            operator=place.operator,
            kind=place.kind,
            reason=place.reason,
            count=count,
            stack=place.stack,
        )
        for place, count in places.most_common()
    )
