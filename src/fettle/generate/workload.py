"""The workload of a language model: prompts, and how many tokens to write after each."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, cast

import torch

from fettle.batches import read_batches
from fettle.errors import UsageError, type_text
from fettle.generate.decoding import decoder_of, is_two_parts, write
from fettle.workload import Batch, Workload, register_kind


@dataclass(frozen=True)
class GenerationWorkload(Workload):
    """A model that writes text, measured as such: time to the first token, time per token, tokens a second.

    `model` is causal or encoder-decoder and takes and returns `past_key_values` as those of transformers do, or is any
    object with ``prefill`` and ``decode`` (`fettle.generate.decoding`). `inputs` are prompts, of several lengths where
    the lengths differ in service: integers [rows, tokens], or dicts with ``input_ids`` (or what an encoder takes) and
    ``attention_mask``, shorter rows filled up on their left (those of an encoder on either side).
    """

    new_tokens: int = 32
    """How many tokens are written after each prompt."""

    texts: Sequence[torch.Tensor] | torch.Tensor = ()
    """Texts that only judge, integers [tokens] or [rows, tokens]: the perplexity is theirs. Without them it is that of
    what the model as given writes. For causal models."""

    batches: Sequence[int] = (1, 2, 4)
    """Rows at which tokens a second are told."""

    temperature: float = 0.0
    """At which the texts that are timed are drawn; 0: always the likeliest token. How often a guess is right depends on
    it (``guessing``). Recipes are judged by their scores of given tokens all the same."""

    draft: Any = None
    """A smaller model of the same tokens, which may guess what the model will write (``guessing=draft``); it becomes
    `model.draft`, and no submodule. For causal models."""

    def __post_init__(self) -> None:
        model, speaks = self.model, hasattr(self.model, "prefill") and hasattr(self.model, "decode")
        if not speaks and not isinstance(model, torch.nn.Module):
            raise UsageError(
                f"the model of a generation workload is {type_text(model)}: give an nn.Module that takes "
                "past_key_values, or an object with prefill and decode"
            )
        if self.call is not None:
            raise UsageError("a generation workload has no call: fettle writes the text itself, token by token")
        if self.metric is not None and not callable(self.metric):
            raise UsageError(f"the workload's metric is {type_text(self.metric)}, which cannot be called")
        if isinstance(self.new_tokens, bool) or not isinstance(self.new_tokens, Integral) or self.new_tokens < 2:
            raise UsageError(f"the workload's new_tokens are {self.new_tokens!r}: give 2 or more")
        if not 0 <= self.temperature <= 100:
            raise UsageError(f"the workload's temperature is {self.temperature!r}: give 0 to 100")
        self._join_draft()
        counts = self.batches if isinstance(self.batches, Sequence) else ()
        if not counts or any(not isinstance(rows, int) or not 1 <= rows <= 4096 for rows in counts):
            raise UsageError(f"the workload's batches are {self.batches!r}: give numbers of rows, such as (1, 2, 4)")
        read = read_batches(self.inputs)
        object.__setattr__(self, "inputs_taken_for", read.taken_for)
        object.__setattr__(self, "inputs", [_prompt(item, self.is_two_parts) for item in read.items])
        given = self.check_inputs
        check = [] if isinstance(given, Sequence) and not given else read_batches(given).items
        object.__setattr__(self, "check_inputs", [_prompt(item, self.is_two_parts) for item in check])
        positions, longest = learned_positions(model), self._longest("input_ids")
        if 0 < positions < max(longest, self.prompt_tokens + int(self.new_tokens) - 1):
            each = " for each" if self.is_two_parts else ""
            raise UsageError(
                f"a prompt of {longest} tokens and {self.new_tokens} new_tokens are too many for the model: it has "
                f"{positions} positions{each}; give shorter prompts or fewer new_tokens"
            )
        object.__setattr__(self, "texts", _texts(self.texts))
        self._check_tokens()
        if self.texts and (self.is_two_parts or (speaks and not hasattr(model, "crop"))):
            raise UsageError("texts are for causal models: an encoder-decoder's answers are judged on its prompts")

    def _join_draft(self) -> None:
        draft = self.draft
        if draft is None:
            return
        if self.is_two_parts or not isinstance(draft, torch.nn.Module):
            raise UsageError("the workload's draft is an nn.Module beside a causal model: a smaller one of its tokens")
        sizes = [getattr(getattr(one, "config", None), "vocab_size", None) for one in (self.model, draft)]
        if None not in sizes and sizes[0] != sizes[1]:
            raise UsageError(
                f"the workload's draft has {sizes[1]} tokens and the model {sizes[0]}: they must be the same"
            )
        self.model.__dict__["draft"] = draft.eval()

    def _check_tokens(self) -> None:
        known, model = None, cast("Any", self.model)
        with contextlib.suppress(Exception):  # a model of the user's own has none, or says so in its own way
            known = model.get_input_embeddings().num_embeddings
        plain = [prompt for prompt in (*self.inputs, *self.check_inputs) if not prompt.keys() - _OF_TOKENS]
        tokens = [prompt["input_ids"] for prompt in plain if "input_ids" in prompt]
        for what, given in (("prompt", tokens), ("text", self.texts)):
            ends = [int(end) for one in given if one.numel() and not one.is_meta for end in one.aminmax()]
            if isinstance(known, int) and (wrong := [token for token in ends if not 0 <= token < known]):
                raise UsageError(
                    f"a {what} holds the token {wrong[0]}, and the model has {known} tokens: give {what}s of its own "
                    "tokenizer"
                )

    @property
    def is_two_parts(self) -> bool:
        """Whether it is an encoder with a decoder."""
        return is_two_parts(self.model)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the longest prompt that a decoder reads; 1, the start token, where it begins with nothing else."""
        return self._longest("decoder_input_ids" if self.is_two_parts else "input_ids")

    def _longest(self, name: str) -> int:
        given = (prompt for prompt in (*self.inputs, *self.check_inputs) if name in prompt)
        return max((int(prompt[name].shape[1]) for prompt in given), default=1)

    def run(self, model: Any, batch: Batch) -> Any:
        """Write text after one prompt: by a model as it is, token after token."""
        return write(decoder_of(model), **{"new_tokens": int(self.new_tokens), **batch})


_OF_TOKENS = {"input_ids", "attention_mask"}
"""Beside pictures or sound a prompt may hold tokens that stand for these, and have numbers of their own."""


def positions_of(model: Any) -> int:
    """How many tokens a model has positions for, where its configuration says so, else 0."""
    config, names = getattr(model, "config", None), ("max_target_positions", "max_position_embeddings")
    found = (getattr(config, name, None) for name in names)
    return next((one for one in found if isinstance(one, int) and one > 1), 0)


def learned_positions(model: Any) -> int:
    """The same of a model that has learned each of them, and cannot go beyond; 0 for others, which can."""
    found = positions_of(model) if isinstance(model, torch.nn.Module) else 0
    tables = [one for one in model.modules() if isinstance(one, torch.nn.Embedding)] if found else []
    return found if any(found <= table.num_embeddings <= found + 2 for table in tables) else 0


def brief(workload: Workload) -> Workload:
    """The same workload for a look at what a call does: where it writes text, two tokens are enough for that."""
    return replace(workload, new_tokens=2) if isinstance(workload, GenerationWorkload) else workload


def _prompt(batch: Any, to_encoder: bool) -> dict[str, torch.Tensor]:
    """A prompt as keyword arguments. Raises `UsageError` for anything else than tokens or what an encoder takes."""
    if isinstance(batch, tuple) and len(batch) == 1:
        batch = batch[0]
    if isinstance(batch, torch.Tensor):
        batch = {"input_ids": batch}
    if not isinstance(batch, Mapping) or not all(isinstance(value, torch.Tensor) for value in batch.values()):
        raise UsageError(
            "a prompt is a tensor of tokens [rows, tokens], or a dict with input_ids and attention_mask: give what a "
            "tokenizer makes with return_tensors='pt'"
        )
    if "labels" in batch:
        raise UsageError("a prompt has labels, which are for a loss: leave them out")
    ids = batch.get("input_ids")
    if ids is not None and (ids.dim() != 2 or ids.is_floating_point() or 0 in ids.shape):
        raise UsageError(f"a prompt holds tokens, integers [rows, tokens]: its input_ids are {ids.dtype}, "
                         f"{list(ids.shape)}")  # fmt: skip
    mask = batch.get("attention_mask")
    if mask is not None and ids is not None:
        if mask.shape != ids.shape:
            raise UsageError(f"the attention_mask {list(mask.shape)} is not of the shape of input_ids, "
                             f"{list(ids.shape)}")  # fmt: skip
        if not to_encoder and not bool(mask[:, -1].all()):
            raise UsageError(
                "prompts of unequal length are filled up on their left, and a row's last token is masked: set "
                "tokenizer.padding_side = 'left'"
            )
    return dict(batch)


def _texts(given: Any) -> list[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        given = [given]
    if not isinstance(given, Sequence) or not all(isinstance(text, torch.Tensor) for text in given):
        raise UsageError("the workload's texts are tensors of tokens, [tokens] or [rows, tokens]")
    texts = [text[None] if text.dim() == 1 else text for text in given]
    if any(text.dim() != 2 or text.shape[1] < 2 or text.is_floating_point() for text in texts):
        raise UsageError("a text holds at least two tokens, integers [tokens] or [rows, tokens]")
    return texts


register_kind("new_tokens", GenerationWorkload)
