"""What techniques are told of a workload that writes text, and the lines that all its recipes have in common."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from fettle.errors import first_line
from fettle.generate import GenerationWorkload
from fettle.generate.decoding import Kept, chances, decoder_of, is_two_parts, part, pick, score, write
from fettle.generate.quality import MAX_KL
from fettle.techniques._base import Code
from fettle.techniques._state_kept import state_kept
from fettle.workload import Workload


def generation_facts(workload: Workload) -> dict[str, Any]:
    """The fields of `Facts` that are for a workload that writes text; none for another."""
    if not isinstance(workload, GenerationWorkload):
        return {}
    model = workload.model
    decoder = decoder_of(model)
    keeps = "own" if decoder is model else "state" if decoder.one_at_a_time else _fixed_size(model)
    if not keeps or (keeps in ("static", "whole") and workload.inputs[0].keys() - {"input_ids", "attention_mask"}):
        keeps = _seen(decoder, workload.inputs[0]) or keeps or "dynamic"
    return {
        "max_error": MAX_KL,
        "new_tokens": int(workload.new_tokens),
        "prompt_tokens": workload.prompt_tokens,
        "has_draft": workload.draft is not None,
        "draft_fails": _why_not_guess(workload.draft, workload.inputs[0].get("input_ids")),
        "row_counts": tuple(workload.batches),
        "keeps": keeps,
        "masks_alone": keeps in ("static", "whole") and not workload.is_two_parts and not _is_told(model),
        "forgets": hasattr(decoder, "crop"),
        "sees_part": workload.is_two_parts or "StaticSlidingWindowLayer" in map(_kind, _layers(model)),
    }


def _fixed_size(model: Any) -> str:
    """``static`` or ``whole`` where transformers has a cache of fixed size for it; else empty."""
    layers = _layers(model)
    if not layers or set(map(_kind, layers)) - {"StaticLayer", "StaticSlidingWindowLayer"}:
        return ""
    from_its_end = "local" in getattr(model.config, "attention_layers", ())  # GPT-Neo's windows: of the whole room
    counts = hasattr(layers[0], "cumulative_length")  # not in transformers 4
    return "static" if counts and not from_its_end else "whole"


def _kind(layer: Any) -> str:
    return type(layer).__name__


def _layers(model: Any) -> Sequence[Any]:
    """The layers of a cache of fixed size for a model; none where transformers has no such cache for it."""
    try:
        from transformers import StaticCache

        two_parts = is_two_parts(model)
        if two_parts and not model._can_compile_fullgraph:
            return []
        config = model.get_decoder().config if two_parts else model.config
        return list(StaticCache(config=config, max_cache_len=8).layers)
    except Exception:  # another library's model, or a kind of layer that has no such cache
        return []


def _is_told(model: Any) -> bool:
    """Whether a model takes a mask that has for each token what it sees, and each token's position: one with ALiBi
    makes its own mask of 0 and 1, or knows no positions."""
    kinds: set[Any] = {*map(type, model.modules())}
    if not any("position_ids" in inspect.signature(kind.forward).parameters for kind in kinds):
        return False
    with contextlib.suppress(Exception), torch.no_grad():
        tokens = torch.ones(1, 2, dtype=torch.long, device=model.device)
        mask = torch.zeros(1, 1, 2, 2, dtype=model.dtype, device=model.device)
        model(input_ids=tokens, attention_mask=mask, position_ids=tokens.cumsum(1) - 1)
        return True
    return False


def _seen(decoder: Kept, prompt: dict[str, Any]) -> str:
    """What shows once it has read a prompt: ``state`` where some layer has one in place of keys and values, ``dynamic``
    where pictures have places beside those of tokens, which no room was set aside for; else empty."""
    with contextlib.suppress(Exception):  # the baseline trial will say what is wrong with it
        decoder.prefill(room=1, **prompt)
    return "state" if decoder.one_at_a_time else "dynamic" if decoder.beside else ""


def _why_not_guess(draft: Any, tokens: torch.Tensor | None) -> str:
    """What a smaller model says where it cannot forget a wrong guess; empty where it can, or there is none."""
    if draft is None or tokens is None:
        return ""
    decoder = decoder_of(draft)
    try:
        with state_kept(draft):
            decoder.prefill(room=2, input_ids=tokens[:, :2])
            if hasattr(decoder, "will_crop"):
                decoder.will_crop()
            decoder.decode(tokens[:, :1])
            decoder.crop(1)
    except Exception as error:
        return first_line(error)
    return ""


def writing(codes: Sequence[Code]) -> Code:
    """What the recipe writes with: the last technique's decoder and writer, else the plain ones."""
    decoder = next((code.decoder for code in reversed(codes) if code.decoder), "decoder_of(model)")
    writer = next((code.writer for code in reversed(codes) if code.writer), "write")
    helpers = (part, is_two_parts, Kept, decoder_of, score, chances, pick, write)
    return Code(helpers=helpers, decoder=decoder, writer=writer)
