"""An encoder with a decoder as what the generate handler calls: prompts and tokens in, scores of the next token out.

Of a model of transformers keys and values are kept outside where that can be: those that the decoder makes of a prompt,
once it is read, and those of its own tokens behind them. So each token costs one token's work, as in `generating`.
"""

from __future__ import annotations

from typing import Any

import torch

from fettle.errors import UsageError
from fettle.package.handlers.parts import CROSSED, FRESH, LAST, LOGITS, PAST, READ, SEEN, SOURCE, SOURCE_MASK
from fettle.techniques import hf_attention, is_transformers
from fettle.workload import Workload, leaves

_ROUNDED = 0.1
"""Largest relative L2 distance of scores in 16 bits; those of a small Llama are 0.04 apart, and 0.05 from float32's."""


class AnswerToken(torch.nn.Module):
    """The scores [rows, vocabulary] at one position of each row of a decoder that has read `input_ids`, to prompts that
    its encoder reads."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, source: torch.Tensor, source_mask: torch.Tensor, input_ids: torch.Tensor, last: torch.Tensor
    ) -> Any:
        """`source_mask` is 0 where a prompt is only filled up."""
        given = {"input_ids": source, "attention_mask": source_mask, "decoder_input_ids": input_ids}
        return {LOGITS: scores_at(self.model(**given, use_cache=False), last)}


class CachedAnswerToken(torch.nn.Module):
    """The same with keys and values of the tokens before, and what the decoder makes of prompts that are to be read.

    These are two programs in one, which share weights and no values: a call's scores are those after prompts that calls
    before it have read. The server asks for the outputs of one of them (`fettle.package.function.Function.part`).

    Letters of shapes: r rows, s tokens of prompts, n new tokens, p kept ones, l layers, h heads, d a head's size.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.dtype = next(model.parameters()).dtype

    def read(self, source: torch.Tensor, source_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The encoder's states [r, s, states], and the keys and values that the decoder makes of them
        [r, l, 2, h, s, d], whatever its tokens are."""
        from transformers.cache_utils import Cache, EncoderDecoderCache

        from fettle.package.attending import FreshLayer, fresh_of

        model: Any = self.model
        states = model.get_encoder()(input_ids=source, attention_mask=source_mask).last_hidden_state
        made = EncoderDecoderCache(*(Cache(layer_class_to_replicate=FreshLayer) for _ in range(2)))
        mask = source_mask[:, None, None].bool()
        model.get_decoder()(
            input_ids=source[:, :1], attention_mask=torch.ones_like(mask[..., :1]), encoder_hidden_states=states,
            encoder_attention_mask=mask, past_key_values=made, use_cache=True,
        )  # fmt: skip
        return states, fresh_of(made.cross_attention_cache.layers)

    def forward(
        self, source: torch.Tensor, source_mask: torch.Tensor, input_ids: torch.Tensor, attention_mask: torch.Tensor,
        last: torch.Tensor, seen: torch.Tensor, past: torch.Tensor, read: torch.Tensor,
    ) -> Any:  # fmt: skip
        """`past` is [r, l, 2, h, p, d]: first the `read` [r] tokens of each row's prompt, then the decoder's own.
        `source_mask` [r, s], `attention_mask` [r, n] and `seen` [r, p] are 0 where a place is only filled."""
        from transformers.cache_utils import EncoderDecoderCache
        from transformers.modeling_outputs import BaseModelOutput

        from fettle.package.attending import fresh_of, kept_apart, over, places_of_rows

        states, crossed = self.read(source, source_mask)
        if self.dtype != torch.float32:  # in the graph it would undo what a recipe computes in
            past = past.to(self.dtype)
        model: Any = self.model
        kept, new = past.shape[4], input_ids.shape[1]
        places = torch.arange(kept + new, device=input_ids.device)
        own = torch.cat([seen, attention_mask], 1).bool() & (places >= read[:, None])
        prompt = seen.bool() & (places[:kept] < read[:, None])
        at = own.long().cumsum(1) - 1
        with (
            places_of_rows(model.get_decoder(), at[:, kept:].clamp_min(0), at),
            kept_apart(past, biased=True) as (cache, layers),
        ):
            logits = model(
                encoder_outputs=BaseModelOutput(states),  # only that there are some: keys and values are there
                attention_mask=prompt[:, None, None].expand(-1, 1, new, -1),
                decoder_input_ids=input_ids,
                decoder_attention_mask=(places <= places[kept:, None])[None, None] & own[:, None, None],
                past_key_values=EncoderDecoderCache(cache, over(past)),
                use_cache=True,
            ).logits
        return {LOGITS: at_place(logits, last), FRESH: fresh_of(layers), CROSSED: crossed}


def answering(workload: Workload, model: torch.nn.Module, ids: torch.Tensor) -> list[Workload]:
    """Workloads of an encoder with a decoder, the best first: with keys and values kept where that can be, and without.

    Sizes differ from each other, else the exporter takes two for one.
    """
    if workload.call is not None:
        raise UsageError("the generate handler calls an encoder with a decoder itself: take the workload's call away")

    def sample(length: int, read: int) -> dict[str, torch.Tensor]:
        source, begun = ids[:, :length].contiguous(), ids[:, :read].contiguous()
        last = source.new_full((len(source),), read - 1)
        return {SOURCE: source, SOURCE_MASK: torch.ones_like(source), "input_ids": begun, LAST: last}

    batches = [sample(ids.shape[1], 3), sample(ids.shape[1] - 1, 2)]
    plain = Workload(AnswerToken(model).eval(), batches, name=workload.name, samples=len(ids))
    kept = _cached(model, ids)
    return [kept, plain] if kept is not None else [plain]


def _cached(model: Any, ids: torch.Tensor) -> Workload | None:
    """The workload of a model that keeps keys and values; None where it cannot be had.

    It can for models of transformers that attend by SDPA, and whose decoder goes by positions of its rows that can be
    told to it. Its scores after prompts and texts of several lengths must come out.
    """
    if not attends_by_sdpa(model):
        return None
    step, length, pad = CachedAnswerToken(model).eval(), ids.shape[1], torch.nn.functional.pad

    def sample(ids: torch.Tensor, prompt: int, cut: int, end: int, source: int, width: int) -> dict[str, torch.Tensor]:
        """The tokens from `cut` to `end`; those before and a prompt of so many tokens are kept, in `width` places. And
        a prompt of `source` tokens, to be read."""
        new, whole = ids[:, cut:end].contiguous(), torch.ones_like(ids)
        past = step.read(ids[:, :prompt], whole[:, :prompt])[1].float()
        if cut:
            before = sample(ids, prompt, 0, cut, source, prompt)
            past = torch.cat([past, step(**before)[FRESH].float()], 4)
        free = width - past.shape[4]
        return {
            SOURCE: ids[:, :source].contiguous(), SOURCE_MASK: whole[:, :source].contiguous(), "input_ids": new,
            "attention_mask": torch.ones_like(new), LAST: new.new_full((len(ids),), end - cut - 1),
            SEEN: pad(whole[:, :1].repeat(1, prompt + cut), (0, free)), PAST: pad(past, (0, 0, 0, free)),
            READ: new.new_full((len(ids),), prompt),
        }  # fmt: skip

    def wanted(ids: torch.Tensor, prompt: int, end: int) -> torch.Tensor:
        source = ids[:, :prompt]
        given = {"input_ids": source, "attention_mask": torch.ones_like(source), "decoder_input_ids": ids[:, :end]}
        scores: torch.Tensor = model(**given).logits[:, -1].float()
        return scores

    with torch.no_grad():
        try:
            batches = [sample(ids, length, 1, 3, length, length + 2), sample(ids, length, 0, 3, length - 1, length + 1)]
            one = sample(ids[:1], length, 1, 2, length, length + 1)
            other = sample(ids[-1:], 2, 3, 4, length, length + 1)
            ragged = {name: torch.cat([one[name], other[name]]) for name in one}
            right = torch.cat([wanted(ids[:1], length, 2), wanted(ids[-1:], 2, 4)])
            pairs = [(step(**batch)[LOGITS].float(), wanted(ids, length, 3)) for batch in batches]
            pairs.append((step(**ragged)[LOGITS].float(), right))
        except Exception:  # a model whose decoder goes by something else
            return None
    return Workload(step, batches, samples=len(ids)) if all(agree(*pair, step.dtype) for pair in pairs) else None


def attends_by_sdpa(model: torch.nn.Module) -> bool:
    """Whether it is a model of transformers that attends by SDPA, or can be switched to it."""
    return is_transformers(model) and "sdpa" in hf_attention(model, "cpu")


def agree(scores: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether both are one model's scores: of one that computes in 16 bits they are rounded otherwise by each path."""
    if dtype == torch.float32:
        return torch.allclose(scores, wanted, rtol=1e-2, atol=1e-2 * float(wanted.abs().max()))
    return float((scores - wanted).norm()) < _ROUNDED * float(wanted.norm())


def scores_at(answer: Any, last: torch.Tensor) -> torch.Tensor:
    """The scores [rows, vocabulary] at each row's position `last`: of what is called logits among a model's outputs,
    else of the first tensor [rows, tokens, vocabulary]."""
    candidates = [(path, leaf) for path, leaf in leaves(answer) if isinstance(leaf, torch.Tensor) and leaf.dim() == 3]
    if not candidates:
        raise UsageError("the model gives no scores [rows, tokens, vocabulary]")
    named = [leaf for path, leaf in candidates if path.endswith("logits")]
    return at_place(named[0] if named else candidates[0][1], last)


def at_place(values: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Of values [rows, tokens, n] those at each row's place [rows]: [rows, n]."""
    return values.gather(1, place[:, None, None].expand(-1, 1, values.shape[-1]))[:, 0]
