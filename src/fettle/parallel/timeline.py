"""The memory of a step, byte by byte in time, without the memory: every storage's birth, growth and death.

Under fake tensors an operation computes shapes only, yet its results live exactly as long as real ones would: autograd
keeps what it saves, modules drop what they are done with. `Timeline` watches these lives. What an operation allocates
and frees inside itself, below PyTorch's dispatcher, is not seen: it can be handed a function that knows
(`fettle.parallel.workspace`).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fettle.patches import replaced

PARTS = ("parameters", "gradients", "optimizer state", "activations", "transients")
Workspace = Callable[[Any, Any, Any], int]
"""``workspace(operator, args, kwargs)``: bytes that the operator holds while it runs, its results among them."""


@dataclass
class _Life:
    """One storage: its size now, what it is for, and the phases in which it began and ended."""

    size: int
    part: str
    born: str
    died: str = ""


@dataclass(frozen=True)
class Collective:
    """One collective operation as a rank sees it."""

    name: str
    """all_gather, reduce_scatter, all_reduce or broadcast."""
    bytes: int
    """Size of the full (not sharded) buffer."""


class Timeline(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watch storages while active. Use as a context manager, with `phase` around each part of a step."""

    def __init__(self, device: str, workspace: Workspace | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._workspace = workspace
        # gloo copies: a gathered buffer and the input of a reduce-scatter exist twice for a moment.
        self._gloo = device == "cpu"
        self._round_to = 512 if device == "cuda" else 1  # what CUDA's caching allocator hands out
        self.changes: list[tuple[int, int, str]] = []
        """(bytes, index of the storage, phase), in order."""
        self.lives: list[_Life] = []
        self.collectives: list[Collective] = []
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._phase = "before"
        self._communicating = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # its own dispatch comes back here with local tensors
        result = func(*args, **(kwargs or {}))
        if self._workspace is not None:
            self._moment(self._workspace(func, args, kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._collective(func, args, result)
        if func.namespace == "_c10d_functional":  # these return what they made
            self.see(result)
        elif func.namespace not in ("c10d", "prim", "profiler"):
            self.see(result, "transients" if self._communicating or func.namespace == "fsdp" else "")
        return result

    def see(self, tree: Any, part: str = "", *, final: bool = False) -> None:
        """Take note of the storages of all tensors in `tree`. A known one changes its part only if that is `final`."""
        for leaf in tree_leaves(tree):
            if not isinstance(leaf, torch.Tensor):
                continue
            for storage in get_untyped_storages(leaf):
                if storage.device.type == "meta" and leaf.device.type == "meta":
                    continue
                known = self._alive.get(storage._cdata)
                if known is None:
                    self._add(storage, part)
                elif final:
                    self.lives[known[0]].part = part

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Everything inside happens in the phase `name`: forward, backward or optimizer."""
        return replaced(self, "_phase", lambda _: name)

    def communicating(self) -> AbstractContextManager[None]:
        """What is allocated inside belongs to communication."""
        return replaced(self, "_communicating", lambda _: True)

    def resizing(self, original: Any) -> Any:
        """`torch.UntypedStorage.resize_` with a note of the new size."""

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            known = self._alive.get(storage._cdata)
            if known is not None:
                life = self.lives[known[0]]
                rounded = self._rounded(size)
                self._change(rounded - life.size, known[0])
                life.size, life.part = rounded, "transients"
            return result

        return resize_

    def _add(self, storage: Any, part: str) -> None:
        index = len(self.lives)
        key = storage._cdata

        def gone(_: object) -> None:
            self._alive.pop(key, None)
            life = self.lives[index]
            life.died = self._phase
            self._change(-life.size, index)

        self._alive[key] = (index, weakref.ref(storage, gone))
        size = self._rounded(int(storage.nbytes()))
        self.lives.append(_Life(size, part, self._phase))
        self._change(size, index)

    def _rounded(self, size: int) -> int:
        return -(-size // self._round_to) * self._round_to

    def _change(self, size: int, index: int) -> None:
        if size:
            self.changes.append((size, index, self._phase))

    def _collective(self, func: Any, args: Any, result: Any) -> None:
        name = func._schema.name.split("::")[-1].replace("_", "")
        kind = next((kind for kind in _COLLECTIVES if kind.replace("_", "") in name), None)
        sizes, made = (
            [leaf.numel() * leaf.element_size() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
            for tree in (args, result)
        )
        if kind is None or not sizes:
            return
        whole = max(*sizes, *made) if kind in ("all_gather", "reduce_scatter") else sum(sizes)
        self.collectives.append(Collective(kind, whole))
        if self._gloo and kind in ("all_gather", "reduce_scatter"):
            self._moment(whole)

    def _moment(self, size: int) -> None:
        """Something that is there for a moment only."""
        index = len(self.lives)
        self.lives.append(_Life(0, "transients", self._phase, self._phase))
        self._change(size, index)
        self._change(-size, index)


_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")


@dataclass(frozen=True)
class Peak:
    """The largest sum of live storages in a timeline, taken apart."""

    bytes: int
    parts: dict[str, int]
    phase: str


def peak_of(timeline: Timeline, without: Iterable[str] = (), phases: Iterable[str] = ()) -> Peak:
    """The peak after everything was registered, parts in `without` left out (they live elsewhere).

    `phases` limits where the peak may be; none means anywhere.
    """
    parts = [_part(life) for life in timeline.lives]
    left_out, allowed = set(without), set(phases)
    now: dict[str, int] = defaultdict(int)
    total, best, best_parts, best_phase = 0, -1, dict[str, int](), "forward"
    for size, index, phase in timeline.changes:
        part = parts[index]
        if part in left_out:
            continue
        now[part] += size
        total += size
        if total > best and phase != "before" and (not allowed or phase in allowed):
            best, best_parts, best_phase = total, dict(now), phase
    return Peak(max(best, 0), {part: best_parts.get(part, 0) for part in PARTS}, best_phase)


def _part(life: _Life) -> str:
    """What a storage was for, seen from its end: saved for backward, or gone within its own phase."""
    if life.part:
        return life.part
    return "activations" if life.born == "forward" and life.died != "forward" else "transients"
