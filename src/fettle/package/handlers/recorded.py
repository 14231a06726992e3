"""The calls of a model that writes texts, recorded as CUDA graphs: launching a step's kernels one by one takes the host
longer than most of them run.

A graph has one size, so there are graphs of some sizes, powers of two, to which a call is filled up: one token more for
some texts of which so many are kept, and the beginnings of prompts of which nothing is kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fettle.package.settings import powers

_SHORTEST_KEPT, _SHORTEST_PROMPT = 128, 16
_MOST = 256
"""Graphs that are kept: each holds some megabytes."""

log = logging.getLogger("fettle.serve.worker")
Call = Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]
"""The model with `given` [rows, new tokens and 2] and what is kept [rows, ..., tokens, a head's size]."""
Replay = Callable[[], None]
Record = Callable[[Callable[[], list[torch.Tensor]]], tuple[Replay, list[torch.Tensor]]]
"""Records a call: what repeats it, and the outputs that it then writes."""


@dataclass
class Recorded:
    """Calls of `call` with rows of `past` [rows, ..., length, a head's size] from its first one on."""

    call: Call
    past: torch.Tensor
    record: Record
    graphs: dict[tuple[int, int, int], tuple[torch.Tensor, Replay, list[torch.Tensor]]] = field(default_factory=dict)
    """By rows, new tokens, kept tokens: the inputs, and what repeats the call."""
    most: int = _MOST
    """Graphs that are kept; no more than there are once memory has run out."""

    def __call__(self, first: int, new: Sequence[Sequence[int]], kept: Sequence[int]) -> list[torch.Tensor] | None:
        """The model's outputs for rows from `first` on, valid until the next call; None for calls of other kinds."""
        size = self.size(first, new, kept)
        if size is None or (size not in self.graphs and not self.add(*size)):
            return None
        given, replay, outputs = self.graphs[size]
        rows, width, _ = size
        given.copy_(torch.tensor(filled(new, kept, width, rows)))
        replay()
        return [output[: len(new)] for output in outputs]

    def size(self, first: int, new: Sequence[Sequence[int]], kept: Sequence[int]) -> tuple[int, int, int] | None:
        """The size of the graph for a call: rows, new tokens, kept tokens."""
        most_rows, length = len(self.past), self.past.shape[-2]
        rows, longest = min(_power(len(new)), most_rows), max(map(len, new))
        if longest == 1 and not first:
            return rows, 1, min(max(_power(max(kept)), _SHORTEST_KEPT), length)
        return None if any(kept) else (rows, min(max(_power(longest), _SHORTEST_PROMPT), length), 1)

    def add(self, rows: int, new: int, kept: int) -> bool:
        """Record a call of this size, if another graph can be kept; whether it was."""
        if len(self.graphs) >= self.most:
            return False
        if not self._fits(rows, new, kept):
            self.most = len(self.graphs)
            log.warning("no memory for more than %d CUDA graphs: other calls run without them", self.most)
            return False
        return True

    def _fits(self, rows: int, new: int, kept: int) -> bool:
        """Record a call of this size; whether there was memory for it."""
        try:
            given = torch.zeros(rows, new + 2, dtype=torch.long, device=self.past.device)
            given[:, new] = 1
            past = self.past[:rows, ..., :kept, :]
            self.graphs[rows, new, kept] = (given, *self.record(lambda: self.call(given, past)))
            return True
        except torch.OutOfMemoryError:
            pass
        torch.cuda.empty_cache()  # only now: an error that is handled holds tensors
        return False

    def add_all(self, prefill_tokens: int) -> None:
        """Record all that serving will need, so that no text waits for it; prompts of so many tokens in a call."""
        began, (most_rows, length) = time.perf_counter(), (len(self.past), self.past.shape[-2])
        kept_sizes = {max(min(_SHORTEST_KEPT, length), kept) for kept in powers(length)}
        new_sizes = {max(min(_SHORTEST_PROMPT, length), new) for new in powers(min(_power(prefill_tokens), length))}
        sizes = [(rows, 1, kept) for rows in powers(most_rows) for kept in kept_sizes]
        sizes += [
            (rows, new, 1)
            for new in new_sizes
            for rows in powers(most_rows)
            if rows * new < 4 * prefill_tokens or new == _SHORTEST_PROMPT  # each may be rounded up to nearly twice
        ]
        sizes.sort(key=lambda size: -size[0] * size[1] * size[2])  # the largest first: the others reuse its memory
        recorded = [self._fits(*size) for size in sizes[:_MOST]]
        if not all(recorded):
            self.most = len(self.graphs)
            log.warning("memory for %d CUDA graphs only: other calls run without them", self.most)
        log.info("%d CUDA graphs recorded in %.2g s", len(self.graphs), time.perf_counter() - began)


def filled(new: Sequence[Sequence[int]], kept: Sequence[int], width: int, rows: int = 0) -> list[list[int]]:
    """A row for each text: `width` tokens, of which the first are its new ones, how many these are, and how many it
    keeps; filled up to so many rows."""
    texts = [[*tokens, *[0] * (width - len(tokens)), len(tokens), many] for tokens, many in zip(new, kept, strict=True)]
    return texts + [[*[0] * width, 1, 0]] * (rows - len(new))


def cuda_graphs() -> Record:
    """Records as CUDA graphs that share their memory: one call's outputs are gone with the next call."""
    pool = torch.cuda.graph_pool_handle()

    def record(call: Callable[[], list[torch.Tensor]]) -> tuple[Replay, list[torch.Tensor]]:
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # lets libraries and compilers settle
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            outputs = call()
        return graph.replay, outputs

    return record


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << max(0, number - 1).bit_length()
