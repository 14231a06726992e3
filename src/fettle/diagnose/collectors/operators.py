"""Every operator of a call with its own time, FLOPs and bytes, by module and source line."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import statistics
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fettle.diagnose.collectors.mode import OperatorMode
from fettle.diagnose.collectors.training import TrainingSteps
from fettle.diagnose.evidence import CAST, INDEX, LAYOUT, MATRIX, OTHER, POINTWISE, Operation
from fettle.errors import is_users
from fettle.workload import Workload, again, leaves, tensors, wait_for

_LAYOUT_OPS = {"clone", "contiguous", "cat", "stack", "copy_", "copy", "constant_pad_nd", "repeat", "roll", "flip"}
_INDEX_OPS = {"index", "index_select", "gather", "embedding", "index_put", "index_put_", "scatter", "masked_select",
              "nonzero", "index_add", "slice_scatter", "select_scatter", "take"}  # fmt: skip
_FREE_OPS = {"view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "detach", "unsqueeze",
             "squeeze", "alias", "split", "split_with_sizes", "unbind", "as_strided", "chunk", "_reshape_alias",
             "unfold", "diagonal", "lift_fresh"}  # fmt: skip
"""Views: they move no data."""
_WEIGHED = {"addmm": -1, "mm": 1, "linear": 1, "mkldnn_linear": 1, "convolution": 1, "mkldnn_convolution": 1}
"""Products with weights, and which of their tensors that is. The same rows give the same results again."""
_LONG_PAUSE_S = 2e-4
"""Between two operators while they are watched: what is longer is not Python's and the dispatcher's work around them,
which takes 15 to 75 us (on an EPYC, modules, autograd and optimizers included)."""
_MATRIX_MORE = {"_scaled_dot_product_flash_attention_for_cpu", "mkldnn_rnn_layer", "_mkldnn_rnn_layer", "linear",
                "mkldnn_linear", "_linear", "lstm", "gru", "mv", "dot", "_fused_sdp_choice", "_int_mm",
                "linear_dynamic", "linear_relu_dynamic", "_weight_int8pack_mm", "_weight_int4pack_mm",
                "_weight_int4pack_mm_for_cpu", "qlinear_pointwise", "qconv_pointwise", "qconv2d_pointwise"}  # fmt: skip

_STEPS_FILE = TrainingSteps.__call__.__code__.co_filename


def operations(workload: Workload, device: str, calls: int = 3) -> list[Operation]:
    """Every operator of a call with its own time, FLOPs and bytes.

    Operators are timed one by one below the dispatcher, so their time is that of their work; on a device each one is
    waited for. Times are the median over `calls` calls. What a compiled graph runs inside is not seen.
    """
    return watched(workload, device, calls)[0].rows()


def watched(workload: Workload, device: str, calls: int = 3) -> tuple[Watch, float]:
    """The watch after `calls` calls, and the median seconds of a watched call."""
    watch = Watch(workload.model, device)
    totals: list[float] = []
    try:
        for _ in range(calls):
            watch.begin()
            began = time.perf_counter()
            with watch:
                workload.run(workload.model, again(workload.inputs[0]))
            watch.paused("the end of the call", time.perf_counter())
            totals.append(time.perf_counter() - began)
    finally:
        watch.close()
    return watch, statistics.median(totals)


@dataclass
class _Row:
    """What is known of one operator in one module, on one line, in one dtype; all but its time from the first call."""

    kind: str
    rounds: list[list[float]] = field(default_factory=list)
    """Seconds and calls, by call of the workload."""
    group: str = ""
    flops: list[int] = field(default_factory=list)
    weights: set[int] = field(default_factory=set)
    """Where the weights of its products lie."""
    bytes: int = 0
    written: int = 0
    largest: tuple[int, ...] = ()
    growth: float = 0.0

    def add(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        packet = _packet(func)
        name = packet.__name__
        inputs, outputs = _tensors((args, kwargs)), _tensors(out)
        counter = flop_registry.get(packet)
        self.group = group_of(name, inputs, outputs)
        if packet is func:  # what one of a higher order runs inside is not seen
            self.group = OTHER if counter is None else MATRIX
        if counter is not None:
            if name in _WEIGHED and len(inputs) > 1:
                with contextlib.suppress(RuntimeError):  # one that stands for another has no memory
                    self.weights.add(inputs[_WEIGHED[name]].data_ptr())
            try:
                self.flops.append(int(counter(*args, **kwargs, out_val=out)))
            except Exception:
                self.flops.append(0)  # a formula that does not know this form of the call
        if name not in _FREE_OPS:
            written = sum(tensor.numel() * tensor.element_size() for tensor in outputs)
            self.bytes += written + sum(tensor.numel() * tensor.element_size() for tensor in inputs)
            self.written += written
        sizes = (tuple(tensor.shape) for tensor in outputs if not tensor.is_nested)  # which has none
        shape = max(sizes, key=math.prod, default=())
        self.largest = max(self.largest, shape, key=math.prod)
        if math.prod(shape) >= 1 << 20 and _broadcast(inputs, shape):
            self.growth = max(self.growth, math.prod(shape) / max(1, *(tensor.numel() for tensor in inputs)))


class Watch(OperatorMode):
    """Times operators; module paths come from hooks on the modules."""

    def __init__(self, model: Any, device: str) -> None:
        super().__init__()
        self.device = device
        self.modules: list[tuple[str, str]] = [("", "")]
        self.by_place: dict[tuple[str, str, str, str, str], _Row] = {}
        self.call = -1
        self.handles: list[Any] = []
        self.overhead_s = _watching_s(device)
        self.last_s = 0.0
        self.long_pauses: list[defaultdict[str, float]] = []
        self._hashing = False
        self.batches: set[bytes] = set()
        self.batches_run = self.batches_seen_before = 0
        self.built: Counter[str] = Counter()
        self.handles.append(register_module_parameter_registration_hook(self._built))
        for name, module in _named_modules(model):
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks: its operators count as its caller's
                continue
            pair = (name, type(module).__name__)
            enter = functools.partial(self._enter, pair)
            self.handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self.handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))

    def _enter(self, pair: tuple[str, str], module: Any, args: Any, kwargs: Any) -> None:
        if self.call == 0 and len(self.modules) == 1:
            began = time.perf_counter()
            self.batches_run += 1
            self._hashing = True
            known = _digest(module, (args, kwargs))
            self._hashing = False
            self.batches_seen_before += known in self.batches
            if known is not None and len(self.batches) < 10_000:
                self.batches.add(known)
            self.last_s += time.perf_counter() - began
        self.modules.append(pair)

    def _built(self, module: Any, name: str, parameter: Any) -> None:
        if self.call == 0:
            self.built[_user_place()[0]] += 1

    def _leave(self) -> None:
        if len(self.modules) > 1:
            self.modules.pop()

    def begin(self) -> None:
        self.call += 1
        del self.modules[1:]
        self.long_pauses.append(defaultdict(float))
        self.last_s = time.perf_counter()

    def paused(self, before: str, now_s: float) -> None:
        if now_s - self.last_s > _LONG_PAUSE_S:
            self.long_pauses[self.call][before] += now_s - self.last_s

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        for row in self.by_place.values():  # what later calls have not run again
            row.rounds += [[0.0, 0.0]] * (self.call + 1 - len(row.rounds))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._hashing:
            return func(*args, **kwargs)
        began = time.perf_counter()
        out = func(*args, **kwargs)
        if self.device != "cpu":
            wait_for(self.device)
        spent = time.perf_counter() - began
        module, kind = self.modules[-1]
        line, function = _user_place()
        self.paused(line, began)
        key = (_packet(func).__name__, module, line, function, _dtype(_tensors(out), _tensors((args, kwargs))))
        row = self.by_place.setdefault(key, _Row(kind))
        while len(row.rounds) <= self.call:
            row.rounds.append([0.0, 0])
        row.rounds[self.call][0] += max(0.0, spent - self.overhead_s)
        row.rounds[self.call][1] += 1
        if self.call == 0:
            row.add(func, args, kwargs, out)
        self.last_s = time.perf_counter()
        return out

    def pauses(self) -> dict[str, float]:
        """Seconds of a call in long pauses, by what came after them: a line, empty where there is none of the user's,
        or the end of the call."""
        ends = {end for call in self.long_pauses for end in call}
        medians = {end: statistics.median(call[end] for call in self.long_pauses) for end in ends}
        return {end: seconds for end, seconds in medians.items() if seconds > 0}

    def rows(self) -> list[Operation]:
        """One row for each operator, module, line, function and dtype; costliest first."""
        rows = [
            Operation(
                name=f"aten.{name}",
                group=row.group,
                module=module,
                kind=row.kind,
                line=line,
                dtype=dtype,
                calls=round(statistics.median(count for _, count in row.rounds)),
                seconds=statistics.median(spent for spent, _ in row.rounds),
                flops=sum(row.flops),
                bytes=row.bytes,
                largest=row.largest,
                repeated=repeated_share(row.flops) if len(row.weights) == 1 else 0.0,
                weights=len(row.weights),
                function=function,
                written=row.written,
                growth=row.growth,
            )
            for (name, module, line, function, dtype), row in self.by_place.items()
            # It ran in the first call, where control flow did not take another way, and in half of them.
            if row.group and statistics.median(count for _, count in row.rounds)
        ]
        return sorted(rows, key=lambda row: -row.seconds)


def _watching_s(device: str) -> float:
    """What timing an operator below the dispatcher adds to its time, by an operator that does next to nothing.

    On a GPU that is its launch and waiting for it: what is left of an operator is the time of its kernels.
    """
    tensor, bare, times = torch.zeros(1, device=device), torch.ops.aten.neg.default, 200

    class Bare(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            began = time.perf_counter()
            out = func(*args, **(kwargs or {}))
            if device != "cpu":
                wait_for(device)
            spent.append(time.perf_counter() - began)
            return out

    spent: list[float] = []
    alone: list[float] = [0.0] if device != "cpu" else []  # a few microseconds of work, lost in those of its launch
    for _ in range(0 if alone else 5):
        began = time.perf_counter()
        for _ in range(times):
            tensor.neg()
        alone.append((time.perf_counter() - began) / times)
    with Bare():  # type: ignore[no-untyped-call]
        for _ in range(times):
            bare(tensor)
    return max(0.0, statistics.median(spent) - min(alone))


def repeated_share(flops: Sequence[int]) -> float:
    """Share of the work of successive products that only repeats what an earlier one computed.

    A product with weights whose size grows call by call (all tokens so far, for every new token) does again what the
    last one did and a little more: all but its largest size was needless. 0 where the sizes do not grow so, always by
    as much: those of batches sorted by length grow too, and repeat nothing.
    """
    if any(b < a for a, b in itertools.pairwise(flops)) or len(set(flops)) < 8:
        return 0.0
    if len({b - a for a, b in itertools.pairwise(sorted(set(flops)))}) > 1:
        return 0.0
    largest = flops[-1]
    return 1.0 - largest * flops.count(largest) / sum(flops)


def group_of(name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> str:
    """The group of an operator, by its name and by what it does to the dtype."""
    if name == "_to_copy" or (name == "copy_" and len(inputs) > 1 and inputs[0].dtype != inputs[1].dtype):
        same = inputs and outputs and inputs[0].dtype == outputs[0].dtype
        return LAYOUT if same and name == "_to_copy" else CAST
    if name in _LAYOUT_OPS:
        return LAYOUT
    if name in _INDEX_OPS:
        return INDEX
    if name in _MATRIX_MORE or getattr(torch.ops.aten, name, None) in flop_registry or "convolution" in name:
        return MATRIX
    if name in _FREE_OPS or not outputs:
        return OTHER
    if any(tensor.is_floating_point() for tensor in outputs):
        return POINTWISE
    return OTHER


def _broadcast(inputs: list[torch.Tensor], shape: tuple[int, ...]) -> bool:
    """Whether an operator's output has the shape that its inputs, several, are broadcast to."""
    sizes = itertools.zip_longest(*(reversed(tensor.shape) for tensor in inputs if not tensor.is_nested), fillvalue=1)
    return len(inputs) > 1 and tuple(map(max, sizes))[::-1] == shape


def _user_place() -> tuple[str, str]:
    """``file.py:12`` of the innermost frame that is neither torch's nor ours, and the function that it is in; both
    empty where there is none. In a training loop of ours the caller's frames are no part of it: no line, and its own
    function."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        name, function = frame.f_code.co_filename, frame.f_code.co_qualname
        own = str(frame.f_globals.get("__name__", ""))  # what a compiler of torch writes is a module of torch's
        if is_users(name) and not own.startswith("torch."):
            return f"{name.rpartition('/')[2]}:{line}", function.removesuffix(".<locals>.<genexpr>")
        if name == _STEPS_FILE:
            return "", function
    return "", ""


def _named_modules(model: Any) -> list[tuple[str, torch.nn.Module]]:
    """All modules by path; of a callable that is not a module, those that it holds as attributes."""
    if isinstance(model, torch.nn.Module):
        return list(model.named_modules())
    held = getattr(model, "__dict__", {}).items()
    modules = [(name, value) for name, value in held if isinstance(value, torch.nn.Module)]
    parts = {id(part): (f"{name}.{path}".rstrip("."), part) for name, m in modules for path, part in m.named_modules()}
    return list(parts.values())


def _digest(module: torch.nn.Module, inputs: Any) -> bytes | None:
    """What identifies a module and the values of its inputs; None where these have no tensor, or too much to read."""
    held = tensors(inputs)
    if not held or sum(tensor.numel() * tensor.element_size() for tensor in held) > 16 << 20:
        return None
    whole = hashlib.blake2b(str(id(module)).encode(), digest_size=16)
    try:
        for path, leaf in leaves(inputs):
            if isinstance(leaf, torch.Tensor):
                whole.update(f"{path}{tuple(leaf.shape)}{leaf.dtype}".encode())
                whole.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            elif isinstance(leaf, (str, int, float)):
                whole.update(f"{path}{leaf!r}".encode())
    except (RuntimeError, TypeError):  # a tensor without plain memory: sparse, nested, quantised
        return None
    return whole.digest()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _packet(func: Any) -> Any:
    """An operator in all its forms; one of a higher order, such as `torch.cond`, has one."""
    return getattr(func, "overloadpacket", func)


def _dtype(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> str:
    every = [*outputs, *inputs]
    floating = [tensor for tensor in every if tensor.is_floating_point()]
    return str((floating or every or [torch.empty(0)])[0].dtype).removeprefix("torch.")
