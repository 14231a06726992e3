"""Gathering evidence, inside a worker process: a few calls plain, a few watched, a few with one thing switched.

Each collector stands alone: `operations` (time, FLOPs and bytes of every operator, by module and source line),
`variants` (what switching one process-wide thing brings), `padding`, `subnormal`, `duplicates`. `collect` runs them
all and is what the worker is asked for.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import itertools
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fettle.diagnose.evidence import CAST, INDEX, LAYOUT, MATRIX, OTHER, POINTWISE, Evidence, Operation
from fettle.diagnose.syncs import find_syncs
from fettle.machine import measure_peaks
from fettle.techniques import probe_facts, unchanged
from fettle.workload import Workload, leaves

_LAYOUT_OPS = {"clone", "contiguous", "cat", "stack", "copy_", "copy", "constant_pad_nd", "repeat", "roll", "flip"}
_INDEX_OPS = {"index", "index_select", "gather", "embedding", "index_put", "index_put_", "scatter", "masked_select",
              "nonzero", "index_add", "slice_scatter", "select_scatter", "take"}  # fmt: skip
_FREE_OPS = {"view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "detach", "unsqueeze",
             "squeeze", "alias", "split", "split_with_sizes", "unbind", "as_strided", "chunk", "_reshape_alias",
             "unfold", "diagonal", "lift_fresh"}  # fmt: skip
"""Views: they move no data."""
_WEIGHED = {"addmm": -1, "mm": 1, "linear": 1, "mkldnn_linear": 1, "convolution": 1, "mkldnn_convolution": 1}
"""Products with weights, and which of their tensors that is. The same rows give the same results again."""
_MATRIX_MORE = {"_scaled_dot_product_flash_attention_for_cpu", "mkldnn_rnn_layer", "_mkldnn_rnn_layer", "linear",
                "mkldnn_linear", "_linear", "lstm", "gru", "mv", "dot", "_fused_sdp_choice"}  # fmt: skip


def collect(workload: Workload, seconds: float) -> Evidence:
    """All evidence of one workload, in about `seconds` and at least a few calls each."""
    device = _device(workload)
    model = workload.model

    def call(batch: Any = workload.inputs[0]) -> Any:
        return workload.run(model, batch)

    module = model if isinstance(model, torch.nn.Module) else None
    began = time.perf_counter()
    call()
    first_call_s = time.perf_counter() - began
    plain = _timed(call, device, 0.25 * seconds)
    wall_s = statistics.median(plain)
    watch, watched_s = watched(workload, device)
    found = watch.rows()
    with _held(
        torch.autograd, "set_detect_anomaly", False, torch.is_anomaly_enabled()
    ):  # its own checks would be found
        syncs = find_syncs(call, on_device=[model, workload.inputs[0]]).syncs
    facts = probe_facts(workload)
    gc_s, slept_s, loading = _waiting(call)
    loader_s = loading.seconds / loading.calls
    waits = loader_s > 0.02 * wall_s
    tensors_kept, graphs_kept, bytes_kept = kept_alive(call)
    return Evidence(
        facts=facts,
        wall_s=wall_s,
        operations=found,
        watched_s=watched_s,
        peaks=measure_peaks(device),
        settings={**_settings(), "records": str(_records(call()))},
        variants=variants(call, wall_s, 0.5 * seconds, module) if device == "cpu" else {},
        threads=torch.get_num_threads(),
        cores=facts.physical_cores,
        rows=facts.samples,
        padding=padding(workload)[0],
        padding_where=padding(workload)[1],
        subnormal_weights=subnormal(module),
        weight_bytes=sum(p.numel() * p.element_size() for p in module.parameters()) if module is not None else 0,
        duplicate_bytes=duplicates(module),
        first_call_s=first_call_s,
        syncs=syncs,
        batches_run=watch.batches_run,
        batches_seen_before=watch.batches_seen_before,
        compiled=isinstance(model, torch._dynamo.OptimizedModule) or hasattr(model, "_torchdynamo_orig_callable"),
        loader_s=loader_s,
        loader_rows=loading.rows,
        loader_batches=loading.batches // loading.calls,
        at_hand_s=_at_hand(call, loading) if waits else 0.0,
        fresh_s_per_byte=fresh_s_per_byte() if graphs_kept else 0.0,
        tensors_kept=tensors_kept,
        graphs_kept=graphs_kept,
        bytes_kept=bytes_kept,
        gc_s=gc_s,
        slept_s=slept_s,
    )


def glance(workload: Workload, seconds: float) -> Evidence:
    """What a search needs to know where to begin: operators, settings and peaks, in about four calls.

    The model is left as it was: the reference of the search is computed from it.
    """
    del seconds
    device = _device(workload)
    module = workload.model if isinstance(workload.model, torch.nn.Module) else torch.nn.Module()
    with unchanged(workload, module), torch.no_grad():
        plain = _timed(lambda: workload.run(workload.model, workload.inputs[0]), device, 0.0, least=2)
        found, watched_s = operations(workload, device, calls=1)
    facts = probe_facts(workload)
    return Evidence(
        facts=facts,
        wall_s=min(plain),
        operations=found,
        watched_s=watched_s,
        peaks=measure_peaks(device),
        settings={**_settings(), "grad": "False"},
        threads=torch.get_num_threads(),
        cores=facts.physical_cores,
        rows=facts.samples,
    )


def operations(workload: Workload, device: str, calls: int = 3) -> tuple[list[Operation], float]:
    """Every operator of a call with its own time, FLOPs and bytes; and the median time of the watched call.

    Operators are timed one by one below the dispatcher, so their time is that of their work; on a device each one is
    waited for. Times are the median over `calls` calls. What a compiled graph runs inside is not seen.
    """
    watch, watched_s = watched(workload, device, calls)
    return watch.rows(), watched_s


def watched(workload: Workload, device: str, calls: int = 3) -> tuple[Watch, float]:
    """The watch after `calls` calls, and the median seconds of a watched call."""
    watch = Watch(workload.model, device)
    totals: list[float] = []
    for _ in range(calls):
        watch.begin()
        began = time.perf_counter()
        with watch:
            workload.run(workload.model, workload.inputs[0])
        totals.append(time.perf_counter() - began)
    watch.close()
    return watch, statistics.median(totals)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Times operators; module paths come from hooks on the modules."""

    def __init__(self, model: Any, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.modules: list[tuple[str, str]] = [("", "")]
        self.seen: dict[tuple[str, str, str, str], list[list[float]]] = defaultdict(list)
        self.facts: dict[tuple[str, str, str, str], dict[str, Any]] = {}
        self.call = -1
        self.handles: list[Any] = []
        self.overhead_s = _watching_s() if device == "cpu" else 0.0
        self._hashing = False
        self.batches: set[bytes] = set()
        self.batches_run = self.batches_seen_before = 0
        for name, module in _named_modules(model):
            pair = (name, type(module).__name__)
            self.handles.append(module.register_forward_pre_hook(functools.partial(self._enter, pair)))
            self.handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))

    def _enter(self, pair: tuple[str, str], module: Any, args: Any) -> None:
        if self.call == 0 and len(self.modules) == 1:
            self.batches_run += 1
            self._hashing = True
            known = _digest(args)
            self._hashing = False
            self.batches_seen_before += known in self.batches
            if known is not None and len(self.batches) < 10_000:
                self.batches.add(known)
        self.modules.append(pair)

    def _leave(self) -> None:
        if len(self.modules) > 1:
            self.modules.pop()

    def begin(self) -> None:
        """A new call begins."""
        self.call += 1
        del self.modules[1:]

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._hashing:
            return func(*args, **kwargs)
        began = time.perf_counter()
        out = func(*args, **kwargs)
        if self.device == "cuda":
            torch.cuda.synchronize()
        spent = time.perf_counter() - began
        name = func.overloadpacket.__name__
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        dtype = _dtype(inputs, outputs)
        module, kind = self.modules[-1]
        line, function = _user_place()
        key = (name, module, line, dtype)
        rounds = self.seen[key]
        while len(rounds) <= self.call:
            rounds.append([0.0, 0])
        rounds[self.call][0] += max(0.0, spent - self.overhead_s)
        rounds[self.call][1] += 1
        if self.call == 0:
            facts = self.facts.setdefault(
                key,
                {
                    "steps": [],
                    "weights": set(),
                    "growth": 0.0,
                    "bytes": 0,
                    "largest": (),
                    "group": "",
                    "kind": kind,
                    "function": function,
                    "written": 0,
                },
            )
            facts["group"] = group_of(name, inputs, outputs)
            counter = flop_registry.get(func.overloadpacket)
            if counter is not None:
                if name in _WEIGHED and len(inputs) > 1:
                    facts["weights"].add(inputs[_WEIGHED[name]].data_ptr())
                try:
                    facts["steps"].append(int(counter(*args, **kwargs, out_val=out)))
                except Exception:
                    facts["steps"].append(0)  # a formula that does not know this form of the call
            if name not in _FREE_OPS:
                facts["bytes"] += sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs))
                facts["written"] += sum(tensor.numel() * tensor.element_size() for tensor in outputs)
            shape = max((tuple(tensor.shape) for tensor in outputs), key=math.prod, default=())
            facts["largest"] = max(facts["largest"], shape, key=math.prod)
            given = max((tensor.numel() for tensor in inputs), default=0)
            if given and math.prod(shape) >= 1 << 20:
                facts["growth"] = max(facts["growth"], math.prod(shape) / given)
        return out

    def rows(self) -> list[Operation]:
        """One row for each operator, module, line and dtype; dearest first."""
        found = []
        for (name, module, line, dtype), rounds in self.seen.items():
            facts = self.facts.get((name, module, line, dtype))
            if facts is None:
                continue  # it did not run in the first call: control flow took another way
            seconds = statistics.median(spent for spent, _ in rounds)
            calls = round(statistics.median(count for _, count in rounds))
            found.append(
                Operation(f"aten.{name}", facts["group"], module, facts["kind"], line, dtype, calls, seconds,
                          sum(facts["steps"]), facts["bytes"], facts["largest"],
                          repeated_share(facts["steps"]) if len(facts["weights"]) == 1 else 0.0,
                          len(facts["weights"]), facts["function"], facts["written"], facts["growth"])
            )  # fmt: skip
        return sorted(found, key=lambda row: -row.seconds)


def repeated_share(flops: Sequence[int]) -> float:
    """Share of the work of successive products that only repeats what an earlier one computed.

    A product with weights whose size grows call by call (all tokens so far, for every new token) does again what the
    last one did and a little more: all but its largest size was needless. 0 where the sizes do not grow so.
    """
    if len(flops) < 8 or any(b < a for a, b in itertools.pairwise(flops)) or len(set(flops)) < 8:
        return 0.0
    largest = flops[-1]
    return 1.0 - largest * flops.count(largest) / sum(flops)


def _named_modules(model: Any) -> list[tuple[str, torch.nn.Module]]:
    """All modules by path; of a callable that is no module, those that it holds as attributes."""
    if isinstance(model, torch.nn.Module):
        return list(model.named_modules())
    held = [(name, value) for name, value in getattr(model, "__dict__", {}).items()]
    modules = [(name, value) for name, value in held if isinstance(value, torch.nn.Module)]
    found = {id(part): (f"{name}.{path}".rstrip("."), part) for name, m in modules for path, part in m.named_modules()}
    return list(found.values())


def _digest(args: Any) -> bytes | None:
    """What identifies the values of a module's inputs; None where there are none, or too many to read."""
    tensors = [leaf for _, leaf in leaves(args) if isinstance(leaf, torch.Tensor)]
    if not tensors or sum(tensor.numel() * tensor.element_size() for tensor in tensors) > 16 << 20:
        return None
    whole = hashlib.blake2b(digest_size=16)
    try:
        for tensor in tensors:
            whole.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
            whole.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    except (RuntimeError, TypeError):  # a tensor without plain memory: sparse, nested, quantised
        return None
    return whole.digest()


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


def variants(
    call: Callable[[], Any], wall_s: float, seconds: float, module: torch.nn.Module | None = None
) -> dict[str, tuple[float, float, float]]:
    """What switching one thing brings, tried in this process: share of time saved, and its 95% interval.

    Interleaved rounds; only what can be switched there and back between two calls. A slow call gets three rounds.
    """
    from fettle.measure import log_interval

    given = torch.get_num_threads()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    switches: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {}
    if given != usable:
        switches[f"threads={usable}"] = lambda: _threads(usable)
    if given > 1 and wall_s < 0.5:
        switches["threads=1"] = lambda: _threads(1)
    if torch.is_grad_enabled():
        switches["grad=inference_mode"] = torch.inference_mode
    if module is not None and module.training and all(part.training for part in module.modules()):
        switches["mode=eval"] = lambda: _evaluating(module)
    if torch.is_anomaly_enabled():
        switches["anomaly=off"] = lambda: _held(torch.autograd, "set_detect_anomaly", False, True)
    if torch.are_deterministic_algorithms_enabled():
        switches["deterministic=off"] = lambda: _held(torch, "use_deterministic_algorithms", False, True)
    rounds = int(min(12, max(3, seconds / max(wall_s, 1e-4) / (len(switches) + 1) / 3)))
    logs: dict[str, list[float]] = {name: [] for name in switches}
    broken: set[str] = set()
    for _ in range(rounds):
        base = min(_timed(call, "cpu", 0.0, least=2))
        for name, switched in switches.items():
            if name in broken:
                continue
            try:
                with switched():
                    logs[name].append(math.log(base / min(_timed(call, "cpu", 0.0, least=3))))
            except Exception:
                broken.add(name)
    found: dict[str, tuple[float, float, float]] = {}
    for name, values in logs.items():
        if len(values) >= 3 and name not in broken:
            interval = log_interval(values, 0.05)
            ends = (interval.estimate, interval.low, interval.high)
            saved = [1 - math.exp(-max(-50.0, min(end, 50.0))) for end in ends]
            found[name] = (saved[0], saved[1], saved[2])
    return found


def padding(workload: Workload) -> tuple[float, str]:
    """Share of padded positions in the inputs, and where that is seen: a mask's zeros, else a repeated last token."""
    padded = positions = 0
    where = ""
    for batch in workload.inputs:
        tensors = {path: leaf for path, leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim() == 2}
        mask = next((t for path, t in tensors.items() if path.endswith("attention_mask")), None)
        if mask is not None:
            padded += int((mask == 0).sum())
            positions += mask.numel()
            where = "attention_mask"
            continue
        ids = next((t for t in tensors.values() if t.dtype in (torch.int32, torch.int64) and t.shape[1] > 4), None)
        if ids is not None:
            last = ids[:, -1:]
            run = (ids.flip(1) == last).long().cumprod(1).sum(1)
            alike = int((last == last.mode(0).values).sum())
            if alike > 1 or len(ids) == 1:  # one token at the end of several rows: the filler
                padded += int((run[run > 1] - 0).sum())
            positions += ids.numel()
            where = "a repeated last token"
    return (padded / positions if positions else 0.0), where


def subnormal(module: torch.nn.Module | None) -> float:
    """Share of nonzero float32 weights below the smallest normal number."""
    small = total = 0
    for parameter in module.parameters() if module is not None else ():
        if parameter.dtype == torch.float32 and parameter.device.type == "cpu":
            magnitude = parameter.detach().abs()
            small += int(((magnitude > 0) & (magnitude < torch.finfo(torch.float32).tiny)).sum())
            total += int((magnitude > 0).sum())
    return small / total if total else 0.0


def duplicates(module: torch.nn.Module | None) -> int:
    """Bytes of large parameters that equal another one, value for value, in memory of their own."""
    groups: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for parameter in module.parameters() if module is not None else ():
        if parameter.numel() >= 1 << 16:
            key = (tuple(parameter.shape), parameter.dtype, float(parameter.detach().flatten()[:64].double().sum()))
            groups[key].append(parameter.detach())
    wasted = 0
    for same in groups.values():
        kept: list[torch.Tensor] = []
        for tensor in same:
            if any(tensor.data_ptr() != other.data_ptr() and torch.equal(tensor, other) for other in kept):
                wasted += tensor.numel() * tensor.element_size()
            else:
                kept.append(tensor)
    return wasted


def _timed(call: Callable[[], Any], device: str, seconds: float, least: int = 3) -> list[float]:
    samples: list[float] = []
    began = time.perf_counter()
    while len(samples) < least or (time.perf_counter() - began < seconds and len(samples) < 200):
        started = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        samples.append(time.perf_counter() - started)
    return samples


def kept_alive(call: Callable[[], Any], calls: int = 3) -> tuple[float, float, float]:
    """Tensors a call that stay alive after it, how many of them hold an autograd graph, and their bytes.

    Counted over `calls` calls after one that settles caches; 0 unless every call left some behind.
    """
    counts = []
    for _ in range(calls + 1):
        call()
        gc.collect()
        # By type, not isinstance: lazy proxies among all objects would be woken.
        alive = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
        size = sum(tensor.numel() * tensor.element_size() for tensor in alive)
        counts.append((len(alive), sum(tensor.grad_fn is not None for tensor in alive), size))
        del alive  # it would keep them for the next count
    if min(after[0] - before[0] for before, after in itertools.pairwise(counts)) < 1:
        return 0.0, 0.0, 0.0
    tensors, graphs, size = (
        max(0.0, (last - first) / calls) for first, last in zip(counts[0], counts[-1], strict=True)
    )
    return tensors, graphs, size


_KEPT_BYTES = 512 << 20
_LEAST_WATCHED_S = 0.2


class _LoaderClock:
    """Times DataLoaders of this process while it is entered: making an iterator, and each batch.

    The batches of the first call are kept, in the order of their iterators, unless they are too large.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = self.rows = self.batches = 0
        self.kept: list[list[Any]] = []
        self._bytes = 0
        self._inside = False

    def __enter__(self) -> _LoaderClock:
        from torch.utils.data import DataLoader
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        self._were = [(DataLoader, "__iter__"), (_BaseDataLoaderIter, "__next__")]
        self._originals = [getattr(kind, name) for kind, name in self._were]
        for (kind, name), original in zip(self._were, self._originals, strict=True):
            setattr(kind, name, self._timed(original))
        return self

    def __exit__(self, *_: object) -> None:
        for (kind, name), original in zip(self._were, self._originals, strict=True):
            setattr(kind, name, original)

    def _timed(self, original: Any) -> Any:
        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # a loader that reads another one
                return original(*args, **kwargs)
            self._inside, began = True, time.perf_counter()
            try:
                result = original(*args, **kwargs)
            finally:
                self._inside = False
                self.seconds += time.perf_counter() - began
            self._keep(args[0], result)
            return result

        return timed

    def _keep(self, loader: Any, result: Any) -> None:
        from torch.utils.data import DataLoader

        if isinstance(loader, DataLoader):
            self.rows = min(self.rows or sys.maxsize, loader.batch_size or sys.maxsize) % sys.maxsize
            if self.calls == 1:
                self.kept.append([])
            return
        self.batches += 1
        if self.calls == 1 and self.kept:
            tensors = [leaf for _, leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
            self._bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            if self._bytes > _KEPT_BYTES:
                self.kept.clear()
            else:
                self.kept[-1].append(result)


def _at_hand(call: Callable[[], Any], loading: _LoaderClock, calls: int = 5) -> float:
    """Seconds of a call whose loaders hand out at once what they handed out before; 0 where that cannot be tried."""
    from torch.utils.data import DataLoader

    if not loading.kept:
        return 0.0
    turns = itertools.cycle(loading.kept)
    original = DataLoader.__iter__
    DataLoader.__iter__ = lambda self: iter(next(turns))  # type: ignore[method-assign, return-value, assignment]
    try:
        return min(_timed(call, "cpu", 0.0, least=calls))
    finally:
        DataLoader.__iter__ = original  # type: ignore[method-assign]


def _watching_s(times: int = 200) -> float:
    """What timing an operator below the dispatcher adds to its time, by an operator that does next to nothing."""
    tensor, bare = torch.zeros(1), torch.ops.aten.neg.default

    class Bare(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            began = time.perf_counter()
            out = func(*args, **(kwargs or {}))
            spent.append(time.perf_counter() - began)
            return out

    spent: list[float] = []
    alone: list[float] = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(times):
            tensor.neg()
        alone.append((time.perf_counter() - began) / times)
    with Bare():  # type: ignore[no-untyped-call]
        for _ in range(times):
            bare(tensor)
    return max(0.0, statistics.median(spent) - min(alone))


def fresh_s_per_byte(size: int = 32 << 20) -> float:
    """Seconds a byte that writing memory for the first time costs over writing it again."""
    costs = []
    for _ in range(3):
        tensor = torch.empty(size, dtype=torch.uint8)  # large enough that it comes from the system each time
        times = []
        for _ in range(3):
            began = time.perf_counter()
            tensor.fill_(1)
            times.append(time.perf_counter() - began)
        costs.append(times[0] - min(times[1:]))
        del tensor
    return max(0.0, statistics.median(costs)) / size


def _waiting(call: Callable[[], Any], least: int = 3) -> tuple[float, float, _LoaderClock]:
    """Seconds a call in the garbage collector, and asleep of the process's own will; and the clock of DataLoaders.

    With one thread: threads that wait for each other would look asleep.
    """
    spent, began = 0.0, 0.0

    def note(phase: str, info: dict[str, Any]) -> None:
        nonlocal spent, began
        if phase == "start":
            began = time.perf_counter()
        else:
            spent += time.perf_counter() - began

    blocked = 0.0
    loading = _LoaderClock()
    try:
        with _threads(1):
            call()
            gc.callbacks.append(note)
            before, started = _run_and_wait_s(), time.perf_counter()
            with loading:
                while loading.calls < least or (
                    time.perf_counter() - started < _LEAST_WATCHED_S and loading.calls < 500
                ):
                    loading.calls += 1
                    call()
            # The main thread was neither on a core nor waiting for one: it slept. The system counts in ticks.
            wall, after = time.perf_counter() - started, _run_and_wait_s()
            if before is not None and after is not None:
                blocked = max(0.0, wall - (after - before))
    finally:
        if note in gc.callbacks:
            gc.callbacks.remove(note)
    return spent / loading.calls, blocked / loading.calls, loading


@contextlib.contextmanager
def _held(holder: Any, setter_name: str, value: Any, given: Any) -> Iterator[None]:
    """A process-wide setting at `value`, whatever the call itself asks for; then at `given` again."""
    setter = getattr(holder, setter_name)
    setter(value)
    setattr(holder, setter_name, lambda *_, **__: contextlib.nullcontext())
    try:
        yield
    finally:
        setattr(holder, setter_name, setter)
        setter(given)


def _threads(count: int) -> contextlib.AbstractContextManager[None]:
    return _held(torch, "set_num_threads", count, torch.get_num_threads())


@contextlib.contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    module.eval()
    try:
        yield
    finally:
        module.train()


def _run_and_wait_s() -> float | None:
    """Seconds that this thread ran or waited for a core (Linux); None where the system does not tell."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            ran, waited, *_ = file.read().split()
    except (OSError, ValueError):
        return None
    return (int(ran) + int(waited)) / 1e9


def user_line() -> str:
    """``file.py:12`` of the innermost frame that is neither torch's nor ours; empty where there is none."""
    return _user_place()[0]


def _user_place() -> tuple[str, str]:
    """That line, and the function that it is in."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/torch/" not in name and "/fettle/" not in name and not name.startswith("<frozen"):
            return f"{name.rpartition('/')[2]}:{frame.f_lineno}", frame.f_code.co_qualname.removesuffix(
                ".<locals>.<genexpr>"
            )
        frame = frame.f_back  # type: ignore[assignment]
    return "", ""


def _settings() -> dict[str, str]:
    return {
        "anomaly": str(torch.is_anomaly_enabled()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "matmul": torch.get_float32_matmul_precision(),
        "cudnn_benchmark": str(torch.backends.cudnn.benchmark),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "mkldnn": str(torch.backends.mkldnn.enabled),
        "profiler": str(torch.autograd.profiler._is_profiler_enabled),
        "grad": str(torch.is_grad_enabled()),
    }


def _records(output: Any) -> bool:
    """Whether autograd keeps a graph for the output."""
    return any(leaf.requires_grad for _, leaf in leaves(output) if isinstance(leaf, torch.Tensor))


def _device(workload: Workload) -> str:
    if isinstance(workload.model, torch.nn.Module):
        for parameter in workload.model.parameters():
            return str(parameter.device.type)
    for _, leaf in leaves(workload.inputs[0]):
        if isinstance(leaf, torch.Tensor):
            return str(leaf.device.type)
    return "cpu"


def _dtype(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> str:
    floating = [tensor for tensor in (*outputs, *inputs) if tensor.is_floating_point()]
    return str((floating or [*outputs, *inputs] or [torch.empty(0)])[0].dtype).removeprefix("torch.")
