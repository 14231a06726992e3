"""A language model of transformers with its KV cache outside: new tokens and kept keys and values in, scores and fresh
keys and values out.

So each token costs one token's work, not the whole text's. One exported program does prefill and decode: how many
tokens are new, and how many are kept, may be any number from 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fettle.package.handlers.parts import FRESH, LAST, LOGITS, PAST, SEEN
from fettle.workload import Workload

_ROUNDED = 0.1
"""Largest relative L2 distance of scores in 16 bits; those of a small Llama are 0.04 apart, and 0.05 from float32's."""


class CachedNextToken(torch.nn.Module):
    """A causal model's scores after one position of each row, and the keys and values of the new tokens.

    With `head_once` only that position goes through the model's last layer, which of a long prompt is much of the work.
    `windows` are how many tokens each layer sees, 0 where it is all of them.

    Letters of shapes: r rows, n new tokens, p kept ones, l layers, h heads, d a head's size.
    """

    def __init__(self, model: torch.nn.Module, *, head_once: bool, windows: Sequence[int]) -> None:
        super().__init__()
        self.model, self.head_once, self.windows = model, head_once, windows
        self.dtype = next(model.parameters()).dtype

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        last: torch.Tensor,
        seen: torch.Tensor,
        past: torch.Tensor,
    ) -> Any:
        """`past` is [r, l, 2, h, p, d]; `attention_mask` [r, n] and `seen` [r, p] are 0 where a place is only filled.

        A token's position is the number of tokens before it, wherever its keys lie. `past` may come in float32, as
        clients and samples have it.
        """
        from fettle.package.attending import kept_apart

        if self.dtype != torch.float32:  # in the graph it would undo what a recipe computes in
            past = past.to(self.dtype)
        kept, new = past.shape[4], input_ids.shape[1]
        places = torch.arange(kept + new, device=input_ids.device)
        there = torch.cat([seen, attention_mask], 1).bool()
        before = places[None, :] <= places[kept:, None]
        given: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": before[None, None] & there[:, None, None],
            "position_ids": (seen.sum(1, keepdim=True) + attention_mask.cumsum(1) - 1).clamp_min(0),
            "use_cache": True,
        }
        model: Any = self.model
        at = there.long().cumsum(1)
        near = {size: at[:, None, None] > at[:, None, kept:, None] - size for size in set(self.windows) - {0}}
        with kept_apart(past) as (cache, layers):
            for layer, size in zip(layers, self.windows, strict=True):
                layer.near = near.get(size)
            if self.head_once:
                head = model.get_output_embeddings()
                states = model.base_model(**given, past_key_values=cache).last_hidden_state
            else:
                head, states = None, model(**given, past_key_values=cache).logits
        chosen = states.gather(1, last[:, None, None].expand(-1, 1, states.shape[-1]))[:, 0]
        fresh = [torch.stack(layer.fresh, 1) for layer in layers if layer.fresh is not None]
        return {LOGITS: chosen if head is None else head(chosen), FRESH: torch.stack(fresh, 1)}


def cached(model: torch.nn.Module, ids: torch.Tensor, wanted: torch.Tensor, most: int) -> Workload | None:
    """The workload of a model that keeps keys and values; None where it cannot be had.

    It can for models of transformers that take positions and whose layers all attend by SDPA, to all tokens before or
    to the last so many, in texts of `most` tokens. `wanted` [rows, vocabulary] are the model's scores after the tokens
    `ids` [rows, tokens], which must come out.
    """
    try:
        from transformers import DynamicCache, PreTrainedModel
        from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
    except ImportError:
        return None
    if not isinstance(model, PreTrainedModel) or model.config._attn_implementation != "sdpa":
        return None

    def sample(ids: torch.Tensor, cut: int, end: int, empty: int) -> dict[str, torch.Tensor]:
        """The tokens from `cut` to `end`, those before kept, after so many empty places."""
        new = ids[:, cut:end].contiguous()
        mask, seen = torch.ones_like(new), torch.zeros_like(ids[:, :1]).repeat(1, empty)
        past = nothing[: len(ids)].repeat(1, 1, 1, 1, empty, 1)
        if cut:
            before = sample(ids, 0, cut, empty)
            past = torch.cat([past, step(**before)[FRESH].float()], 4)
            seen = torch.cat([seen, before["attention_mask"]], 1)
        return {
            "input_ids": new, "attention_mask": mask, LAST: new.new_full((len(ids),), end - cut - 1),
            SEEN: seen, PAST: past,
        }  # fmt: skip

    length = ids.shape[1]
    with torch.no_grad():
        try:
            made: Any = model(input_ids=ids, use_cache=True).past_key_values
            kept: Any = made.layers if isinstance(made, DynamicCache) else [None]
            if not all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in kept):
                return None
            sizes = [getattr(layer, "sliding_window", most) for layer in kept]
            windows = [size if size < most else 0 for size in sizes]
            step = CachedNextToken(model, head_once=_ends_with_head(model, ids), windows=windows).eval()
            keys = kept[0].keys[:, :, :1]
            nothing = torch.zeros(len(ids), len(kept), 2, *keys.shape[1:], device=keys.device)
            # Sizes that differ from each other, else the exporter takes two for one.
            batches = [sample(ids, 2, length, 2 if length == 5 else 1), sample(ids, length - 1, length, 1)]
            batches.append(sample(ids, 0, length - 1, 1))
            pairs = [(step(**batch)[LOGITS].float(), wanted) for batch in batches[:2]]
            if any(windows):  # a text that is longer than they are
                long = (torch.arange(min(max(windows) + 3, most), device=ids.device) * 7919 % wanted.shape[-1])[None]
                batch, scores = sample(long, long.shape[1] - 2, long.shape[1], 1), model(input_ids=long).logits
                pairs.append((step(**batch)[LOGITS].float(), scores[:, -1].float()))
        except Exception:  # a model that takes no positions, or keeps something else
            return None
    if not all(_agree(*pair, step.dtype) for pair in pairs):
        return None
    return Workload(step, batches, samples=len(ids))


def _agree(scores: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether both are one model's scores: of one that computes in 16 bits they are rounded otherwise by each path."""
    if dtype == torch.float32:
        return torch.allclose(scores, wanted, rtol=1e-2, atol=1e-2 * float(wanted.abs().max()))
    return float((scores - wanted).norm()) < _ROUNDED * float(wanted.norm())


def _ends_with_head(model: Any, ids: torch.Tensor) -> bool:
    """Whether the model's scores are its last hidden states through its output embeddings, and nothing else."""
    if any("logit" in name and value not in (None, 1, 1.0) for name, value in model.config.to_dict().items()):
        return False  # scaled or capped: too little to be seen in the scores of a model that is not trained
    try:
        with torch.no_grad():
            states, wanted = model.base_model(input_ids=ids).last_hidden_state, model(input_ids=ids).logits
            logits = model.get_output_embeddings()(states)
    except Exception:  # a model that has no such parts
        return False
    return logits.shape == wanted.shape and torch.allclose(
        logits, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max())
    )
