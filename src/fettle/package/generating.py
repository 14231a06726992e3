"""A language model as what the generate handler calls: tokens in, the scores of the next token out.

Of a model of transformers the KV cache is outside where that can be: new tokens and kept keys and values in, scores and
fresh keys and values out. So each token costs one token's work, not the whole text's. One exported program does prefill
and decode: how many tokens are new, and how many are kept, may be any number from 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fettle.errors import UsageError
from fettle.generate.decoding import Kept, is_two_parts
from fettle.generate.workload import positions_of
from fettle.package.answering import agree, answering, at_place, attends_by_sdpa, scores_at
from fettle.package.handlers.generate import Settings
from fettle.package.handlers.parts import FRESH, LAST, LOGITS, PAST, SEEN
from fettle.workload import Workload


class NextToken(torch.nn.Module):
    """A causal model's scores at one position of each row: [rows, vocabulary] instead of [rows, tokens, vocabulary].

    A text of a thousand tokens and a vocabulary of 50 000 would otherwise be 200 MB of answer for each token.
    """

    def __init__(self, model: torch.nn.Module, call: Callable[..., Any] | None, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.call, self.names = model, call, names
        # A cache that ends with a window has no size that the exporter could leave open.
        takes_it = call is None and "use_cache" in inspect.signature(model.forward).parameters
        self.given = {"use_cache": False} if takes_it else {}

    def forward(self, input_ids: torch.Tensor, last: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        """`last` [rows] is the position of each row's last token."""
        batch: Any = {"input_ids": input_ids, "attention_mask": attention_mask}
        args, kwargs = ([], {name: batch[name] for name in self.names}) if self.names else ([input_ids], {})
        if self.call is None:
            answer = self.model(*args, **kwargs, **self.given)
        else:
            answer = self.call(self.model, *args, **kwargs)
        return {LOGITS: scores_at(answer, last)}


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
        from fettle.package.attending import fresh_of, kept_apart

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
        chosen = at_place(states, last)
        return {LOGITS: chosen if head is None else head(chosen), FRESH: fresh_of(layers)}


def generating(workload: Workload, max_tokens: int | None = None) -> list[Workload]:
    """Workloads of the next token's scores, the best first: with keys and values kept where that can be, and without.

    No text will have more than `max_tokens`; None: than the handler's usual. Raises `UsageError` where the model is not
    a causal language model.
    """
    batch = workload.inputs[0]
    model = workload.model
    assert isinstance(model, torch.nn.Module)
    two_parts = is_two_parts(model)
    if isinstance(batch, Mapping):
        names = tuple(name for name, value in batch.items() if isinstance(value, torch.Tensor))
        if "input_ids" not in names or set(names) - {"input_ids", "attention_mask", *["decoder_input_ids"] * two_parts}:
            raise UsageError(
                f"the generate handler fills input_ids and attention_mask; the model takes {', '.join(names)}"
            )
        ids = batch["input_ids"]
    else:
        names = ()
        ids = batch[0] if isinstance(batch, tuple) and len(batch) == 1 else batch
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
        raise UsageError("a model that generates takes tokens: integers [rows, tokens]")
    ids = ids.long().repeat(1, -(-4 // ids.shape[1]))  # a sample has 4 tokens at least, and which ones is all the same
    if two_parts:
        return answering(workload, model.eval(), ids)
    wrapped = NextToken(model.eval(), workload.call, names).eval()

    def sample(length: int) -> dict[str, torch.Tensor]:
        cut = ids[:, :length].contiguous()
        made = {"input_ids": cut, LAST: cut.new_full((len(cut),), length - 1)}
        return {**made, "attention_mask": torch.ones_like(cut)} if "attention_mask" in names else made

    short, whole = sample(ids.shape[1] // 2), sample(ids.shape[1])
    with torch.no_grad():
        scores = wrapped(**whole)[LOGITS].float()
        early = wrapped(**{**whole, LAST: short[LAST]})[LOGITS].float()
        alone = wrapped(**short)[LOGITS].float()
    if not torch.allclose(early, alone, rtol=1e-2, atol=1e-2 * float(alone.abs().max())):
        raise UsageError("the model looks at later tokens, so it cannot generate one after the other")
    plain = Workload(wrapped, [whole, short], name=workload.name, samples=len(ids))
    kept = _cached(model, ids, scores, max_tokens or Settings().max_tokens) if workload.call is None else None
    return [kept, plain] if kept is not None else [plain]


def _cached(model: torch.nn.Module, ids: torch.Tensor, wanted: torch.Tensor, most: int) -> Workload | None:
    """The workload of a model that keeps keys and values; None where it cannot be had.

    It can for models of transformers that take positions and whose layers all attend by SDPA, to all tokens before or
    to the last so many, in texts of `most` tokens. `wanted` [rows, vocabulary] are the model's scores after the tokens
    `ids` [rows, tokens], which must come out.
    """
    if not attends_by_sdpa(model):
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
            from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

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
        except Exception:  # an older transformers, or a model that takes no positions, or keeps something else
            return None
    if not all(agree(*pair, step.dtype) for pair in pairs):
        return None
    return Workload(step, batches, samples=len(ids))


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


def of_model(model: Any, wanted: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Settings of the generate handler that the model knows itself, how many positions it has and where its texts end,
    and above these the `wanted` ones. Raises `UsageError` for longer texts than it has positions for."""
    usual, settings = Settings(), dict(wanted or {})
    most, asked = positions_of(model), settings.get("max_tokens")
    if isinstance(asked, int) and 0 < most < asked:
        raise UsageError(f"max_tokens is {asked}, and the model has {most} positions: give at most as many")
    if 0 < most < usual.max_tokens:
        settings = {"max_tokens": most, "max_new_tokens": min(usual.max_new_tokens, most), **settings}
    if is_two_parts(model) and "start_tokens" not in settings:
        try:
            settings["start_tokens"] = [Kept(model).start_token()]
        except RuntimeError as error:
            raise UsageError(f"{error}, or give start_tokens in `handler_settings`") from None
    for where in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        ends = getattr(where, "eos_token_id", None)
        if ends is not None:
            return {"stop_tokens": [ends] if isinstance(ends, int) else list(ends), **settings}
    return settings
