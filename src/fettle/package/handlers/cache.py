"""The KV cache of the texts that are being written: a row of fixed length for each, and a bound on all."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fettle.errors import UsageError
from fettle.package.handlers.parts import CROSSED, FRESH, LAST, PAST, READ, SEEN, SOURCE, SOURCE_MASK, output_index
from fettle.package.handlers.recorded import Recorded, cuda_graphs, filled
from fettle.procs.limits import granted_memory_bytes
from fettle.units import size_text

if TYPE_CHECKING:
    from fettle.package.handlers.generate import Handler

_LEAST_REUSED = 16
"""Fewer tokens that two prompts begin with are computed again."""
_BLOCK = 256
_SHARE = 0.5
"""Share of the free memory, of what a container may have of it, that a cache may take where its size is not set."""


class Cache:
    """Rows of keys and values, where the model is: ``[rows, layers, 2, heads, length, a head's size]``.

    Those that are in use stand first, so that a call reads them where they lie. The memory is the system's to give as
    it is written to, and never more than `rows` times `length` tokens.
    """

    def __init__(self, handler: Handler, rows: int, most_bytes: int) -> None:
        runner, length = handler.runner, handler.longest
        self.runner, self.inputs = runner, handler.inputs
        self.scores, self.fresh = handler.place, output_index(handler.outputs, FRESH)
        self.halves: list[tuple[int, ...]] = []
        """Of a decoder with an encoder, the outputs of a call that writes, and of one that reads prompts."""
        if handler.begins:
            self.halves = [(self.scores, self.fresh), (output_index(handler.outputs, CROSSED),)]
            self.scores, self.fresh = 0, 1
        _, layers, _, heads, _, size = next(spec.shape for spec in self.inputs if spec.name == PAST)
        self._past = torch.zeros(1, layers, 2, heads, 1, size, device=runner.device)
        with torch.inference_mode():
            dtype = self._call(0, [[0]], [0], [0])[self.fresh].dtype  # as it computes, which a recipe may change
        token = layers * 2 * heads * size * dtype.itemsize
        most_bytes = most_bytes or usual_bytes(runner.device)
        self.rows = min(rows, most_bytes // (token * length))
        if self.rows < 1:
            raise UsageError(
                f"no text fits into {size_text(most_bytes)} of cache: {length} tokens take "
                f"{size_text(token * length)}; serve with more `cache_bytes`, or package with a smaller max_tokens"
            )
        # In memory layers come first: so a layer's keys of all rows are one batch of matrices, which is not copied.
        # Code is compiled for a number of rows: four, eight and so on.
        on_cpu = runner.device == "cpu"
        there = max(4, 1 << (self.rows - 1).bit_length()) if on_cpu else self.rows
        shape = (layers, 2, there, heads, length, size)
        past = _untouched_zeros(shape, dtype) if on_cpu else torch.zeros(shape, dtype=dtype, device=runner.device)
        self._past = past.permute(2, 0, 1, 3, 4, 5)
        self._held: list[tuple[Sequence[int], int]] = [((), 0)] * self.rows
        self._when, self._now = [0] * self.rows, 0  # when each row was last written to
        given = torch.tensor(filled([[0] * 7] * 2, [5] * 2, 7))
        if length > 12 and not self.halves:
            runner.compile_for(self._inputs(given, self._past[:2, ..., :5, :]))
        self.recorded = (
            Recorded(self._filled, self._past[: self.rows], cuda_graphs())
            if runner.may_be_recorded and not self.halves
            else None
        )

    @property
    def nbytes(self) -> int:
        """What all rows take at most."""
        return self._past[: self.rows].nbytes

    @torch.inference_mode()
    def logits(
        self, first: int, new: Sequence[Sequence[int]], kept: Sequence[int], read: Sequence[int] = ()
    ) -> torch.Tensor:
        """Scores of the token after each row's `new` ones [rows, vocabulary], in float32.

        The rows are those from `first` on; of each so many tokens are `kept` already, and the new ones join them. The
        first `read` of each are for an encoder: all of them are new, or none is.
        """
        if any(read) and not any(kept):
            self._read(first, [tokens[:count] for tokens, count in zip(new, read, strict=True)])
            new, kept = [tokens[count:] for tokens, count in zip(new, read, strict=True)], read
        outputs = self.recorded(first, new, kept) if self.recorded is not None else None
        outputs = outputs or self._call(first, new, kept, read)
        fresh = outputs[self.fresh]
        if all(len(tokens) == 1 for tokens in new):
            rows = torch.arange(first, first + len(new), device=self._past.device)
            ends = torch.tensor(kept, device=self._past.device)
            self._past[rows, :, :, :, ends] = fresh[..., 0, :]
        else:
            for row, (tokens, begin) in enumerate(zip(new, kept, strict=True)):
                end = begin + len(tokens)
                self._past[first + row, ..., begin:end, :] = fresh[row, ..., : len(tokens), :]
        return outputs[self.scores].float()

    def _read(self, first: int, prompts: Sequence[Sequence[int]]) -> None:
        """Keep what the decoder makes of prompts, which the encoder reads."""
        rows, none = len(prompts), [0] * len(prompts)
        given, heard = self._given([[0]] * rows, none), self._given(prompts, none)
        [crossed] = self.runner.part(self._inputs(given, self._past[:rows, ..., :1, :], heard), self.halves[1])
        for row, tokens in enumerate(prompts):
            self._past[first + row, ..., : len(tokens), :] = crossed[row, ..., : len(tokens), :]

    def _call(
        self, first: int, new: Sequence[Sequence[int]], kept: Sequence[int], read: Sequence[int]
    ) -> list[torch.Tensor]:
        most = max(1, *kept)  # a program has no sizes of 0
        given, past = self._given(new, kept), self._past[first : first + len(new), ..., :most, :]
        if not self.halves:
            return self._filled(given, past)
        heard = self._given([[0]] * len(new), read)
        outputs: list[torch.Tensor] = self.runner.part(self._inputs(given, past, heard), self.halves[0])
        return outputs

    def _given(self, new: Sequence[Sequence[int]], kept: Sequence[int]) -> torch.Tensor:
        return torch.tensor(filled(new, kept, max(map(len, new)))).to(self.runner.device)

    def _filled(self, given: torch.Tensor, past: torch.Tensor) -> list[torch.Tensor]:
        """The model's outputs for rows as `filled` makes them, and as much of what is kept."""
        outputs: list[torch.Tensor] = self.runner.call(self._inputs(given, past))
        return outputs

    def _inputs(self, given: torch.Tensor, past: torch.Tensor, heard: torch.Tensor | None = None) -> list[torch.Tensor]:
        """`given` as `filled` makes it, and `heard` of prompts, with how many tokens of them are kept."""
        tokens, count, kept = given[:, :-2], given[:, -2:-1], given[:, -1:]
        places = torch.arange(max(tokens.shape[1], past.shape[-2]), device=given.device)
        values = {
            "input_ids": tokens.contiguous(), "attention_mask": (places[: tokens.shape[1]] < count).long(),
            LAST: count[:, 0] - 1, SEEN: (places[: past.shape[-2]] < kept).long(), PAST: past,
        }  # fmt: skip
        if heard is not None:
            source = heard[:, :-2].contiguous()
            mask = torch.arange(source.shape[1], device=given.device) < heard[:, -2:-1]
            values |= {SOURCE: source, SOURCE_MASK: mask.long(), READ: heard[:, -1].contiguous()}
        return [values[spec.name] for spec in self.inputs]

    def holds(self, row: int, tokens: Sequence[int], length: int) -> None:
        """Note that a row has the keys and values of the first `length` of these tokens, to which more may be added."""
        self._now += 1
        self._held[row], self._when[row] = (tokens, length), self._now

    def reuse(self, row: int, prompt: Sequence[int], free: int) -> int:
        """Give a row what any row has of the beginning of this prompt; of how many tokens, never of all.

        The rows from `free` on belong to nobody: they have texts that ended, and what `row` has of one goes there, in
        the place of the one that ended longest ago, since a chat that is continued begins with it.
        """
        common = [_common(held, prompt, min(length, len(prompt) - 1)) for held, length in self._held]
        most = max(common)
        most = most if most >= _LEAST_REUSED else 0
        source = row if most <= common[row] else common.index(most)
        length = self._held[row][1]
        lost = length - most if source == row else length
        place = min((row, *range(free, self.rows)), key=self._when.__getitem__) if lost >= _LEAST_REUSED else row
        if place == source != row:
            self.swap(source, row)
        else:
            if place != row:
                self.move(row, place, length)
            if source != row:
                self.move(source, row, most)
        if most:
            self.holds(row, prompt, most)
        return most

    def move(self, row: int, to: int, length: int) -> None:
        """Put a row's first `length` tokens into another row."""
        self._past[to, ..., :length, :] = self._past[row, ..., :length, :]
        self._held[to], self._when[to] = (self._held[row][0], length), self._when[row]

    def swap(self, one: int, other: int) -> None:
        """Let two rows change places."""
        held, when = self._held[one], self._when[one]
        kept = self._past[one, ..., : held[1], :].clone()
        self.move(other, one, self._held[other][1])
        self._past[other, ..., : held[1], :] = kept
        self._held[other], self._when[other] = held, when

    def wipe(self, row: int) -> None:
        """Zero a row with values that are not finite: a masked place counts 0 times its value, which would be NaN."""
        self._past[row] = 0
        self.holds(row, (), 0)


def _common(one: Sequence[int], other: Sequence[int], most: int) -> int:
    """How many tokens both begin with, of the first `most`. A long system prompt is compared by the block: a step of
    Python's for each token and row would hold up the texts that are being written."""
    at = 0
    while at + _BLOCK <= most and one[at : at + _BLOCK] == other[at : at + _BLOCK]:
        at += _BLOCK
    return next((place for place in range(at, most) if one[place] != other[place]), most)


def usual_bytes(device: str, sharing: int = 1) -> int:
    """What the cache of each of so many workers on one device may take where its size is not set."""
    free = torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else granted_memory_bytes()
    return int(_SHARE * free / sharing)


def _untouched_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take no memory before they are written to: pages that the system gives when they are first touched."""
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, access=mmap.ACCESS_COPY)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)
