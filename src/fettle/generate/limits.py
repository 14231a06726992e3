"""How near the machine's limit: bytes that a new token reads and operations of a prompt, against measured peaks.

A step of decoding reads every weight once, whatever the number of rows, and the keys and values of all tokens before
it; a prompt is products of matrices. The one is bounded by memory bandwidth, the other by arithmetic (the roofline of
Williams, Waterman and Patterson, 2009).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fettle.generate.decoding import decoder_of, is_two_parts
from fettle.generate.workload import GenerationWorkload
from fettle.workload import stored


@dataclass(frozen=True)
class Work:
    """What the model as given computes, on the mean over the prompts. 0 where it cannot be counted."""

    prefill_flops: int = 0
    """Of reading a prompt, all rows."""
    decode_flops: int = 0
    """Of one step, all rows."""


@dataclass(frozen=True)
class Point:
    """A phase of a recipe on the roofline."""

    phase: str
    """``prefill`` or ``decode``"""
    intensity: float
    """FLOP for each byte of weights and cache that is read."""
    flops: float
    """FLOP/s reached."""
    share: float
    """Of what the machine allows at that intensity."""


def count_work(workload: GenerationWorkload) -> Work:
    """Count what prompts and steps compute, by torch's own counter of products and attention."""
    from torch.utils.flop_counter import FlopCounterMode

    if not isinstance(workload.model, torch.nn.Module):
        return Work()
    prefill, decode = [], []
    try:
        for prompt in workload.inputs:
            decoder = decoder_of(workload.model)
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                token = decoder.prefill(room=2, **prompt).argmax(-1, keepdim=True)
            prefill.append(counter.get_total_flops())
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                decoder.decode(token)
            decode.append(counter.get_total_flops())
    except Exception:  # the counter does not know some operator: then there is no roofline, and all else goes on
        return Work()
    return Work(sum(prefill) // len(prefill), sum(decode) // len(decode))


def weights_read(model: Any, decoder: Any = None) -> int:
    """Bytes of the weights that one step reads, as the decoder says where it has them itself. Else all parameters and
    buffers but an embedding, of which a row is looked up (one that is the head too counts), and but an encoder, which
    has done its work. Of a mixture of experts all are counted."""
    if hasattr(decoder, "weight_bytes"):
        return int(decoder.weight_bytes)
    if not isinstance(model, torch.nn.Module):
        return 0
    head = _asked(model, "get_output_embeddings")
    skipped = set()
    tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    for table in tables:
        if getattr(head, "weight", None) is not table.weight:
            skipped.add(id(table.weight))
    if is_two_parts(model):
        encoder = _asked(model, "get_encoder")
        kept = {id(table.weight) for table in tables} - skipped
        skipped |= {id(tensor) for tensor in encoder.parameters()} - kept if encoder is not None else set()
    seen: dict[int, int] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        if id(tensor) not in skipped and not torch.nn.parameter.is_lazy(tensor):
            seen[id(tensor)] = sum(part.numel() * part.element_size() for part in stored(tensor))
    return sum(seen.values())


def _asked(model: Any, name: str) -> Any:
    try:
        return getattr(model, name)()
    except Exception:  # not from transformers, or without such a part
        return None


def cache_bytes(decoder: Any) -> int:
    """Bytes of the keys and values that a decoder holds after its last text; 0 where they cannot be seen."""
    if hasattr(decoder, "cache_bytes"):
        return int(decoder.cache_bytes)
    return sum(tensor.numel() * tensor.element_size() for tensor in _kept(getattr(decoder, "past", None)))


def _kept(past: Any) -> Iterator[torch.Tensor]:
    if isinstance(past, torch.Tensor):
        yield past
    elif isinstance(past, (tuple, list)):
        for item in past:
            yield from _kept(item)
    elif hasattr(past, "self_attention_cache"):
        yield from _kept([past.self_attention_cache, past.cross_attention_cache])
    elif hasattr(past, "layers"):
        for layer in past.layers:
            yield from _kept([getattr(layer, name, None) for name in ("keys", "values", "scales")])


def points(figures: Any, work: Work, peaks: Mapping[str, float]) -> Sequence[Point]:
    """Where a recipe's prefill and decode stand, from its `fettle.generate.speed.Generation`. Both of the mean prompt:
    bytes are those of the weights as the recipe has them and of its keys and values at the end of the longest text."""
    bandwidth, best = peak_bytes(peaks), peak_flops(peaks)
    read = figures.weight_bytes + figures.cache_bytes
    found = []
    phases = (
        ("prefill", work.prefill_flops, figures.weight_bytes, figures.ttft_ms),
        ("decode", work.decode_flops, read, figures.tpot_ms * figures.tokens_per_step),
    )
    for phase, flops, moved, took_ms in phases:
        if flops and moved and took_ms > 0:
            intensity, reached = flops / moved, flops / took_ms * 1e3
            found.append(Point(phase, intensity, reached, reached / min(best, bandwidth * intensity)))
    return found


def peak_bytes(peaks: Mapping[str, float]) -> float:
    """The most bytes a second that were read; of studies from before that was measured, copied."""
    return peaks.get("read") or peaks.get("copy", math.nan)


def peak_flops(peaks: Mapping[str, float]) -> float:
    """The most operations a second that were measured in any type."""
    return max((value for name, value in peaks.items() if name.startswith("matmul_")), default=math.nan)
