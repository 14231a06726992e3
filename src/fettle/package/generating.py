"""A language model as what the generate handler calls: tokens in, the scores of the next token out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fettle.errors import UsageError
from fettle.generate.decoding import Kept
from fettle.generate.workload import positions_of
from fettle.package.caching import cached
from fettle.package.handlers.generate import Settings
from fettle.package.handlers.parts import LAST, LOGITS, SOURCE, SOURCE_MASK
from fettle.workload import Workload, leaves


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
        return {LOGITS: _at(answer, last)}


class AnswerToken(torch.nn.Module):
    """The same of a decoder that has read `input_ids`, to prompts that its encoder reads."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, source: torch.Tensor, source_mask: torch.Tensor, input_ids: torch.Tensor, last: torch.Tensor
    ) -> Any:
        """`source_mask` is 0 where a prompt is only filled up."""
        given = {"input_ids": source, "attention_mask": source_mask, "decoder_input_ids": input_ids}
        return {LOGITS: _at(self.model(**given, use_cache=False), last)}


def generating(workload: Workload, max_tokens: int | None = None) -> list[Workload]:
    """Workloads of the next token's scores, the best first: with keys and values kept where that can be, and without.

    No text will have more than `max_tokens`; None: than the handler's usual. Raises `UsageError` where the model is not
    a causal language model.
    """
    batch = workload.inputs[0]
    model = workload.model
    assert isinstance(model, torch.nn.Module)
    two_parts = _is_two_parts(model)
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
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point() or ids.shape[1] < 4:
        raise UsageError("a model that generates takes tokens: integers [rows, tokens], at least 4 in the sample")
    ids = ids.long()
    if two_parts:
        return [_answering(workload, model.eval(), ids)]
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
    kept = cached(model, ids, scores, max_tokens or Settings().max_tokens) if workload.call is None else None
    return [kept, plain] if kept is not None else [plain]


def _answering(workload: Workload, model: torch.nn.Module, ids: torch.Tensor) -> Workload:
    """The workload of an encoder with a decoder. Sizes differ from each other, else the exporter takes two for one."""
    if workload.call is not None:
        raise UsageError("the generate handler calls an encoder with a decoder itself: take the workload's call away")

    def sample(length: int, read: int) -> dict[str, torch.Tensor]:
        source, begun = ids[:, :length].contiguous(), ids[:, :read].contiguous()
        last = source.new_full((len(source),), read - 1)
        return {SOURCE: source, SOURCE_MASK: torch.ones_like(source), "input_ids": begun, LAST: last}

    batches = [sample(ids.shape[1], 3), sample(ids.shape[1] - 1, 2)]
    return Workload(AnswerToken(model).eval(), batches, name=workload.name, samples=len(ids))


def _is_two_parts(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def of_model(model: Any, wanted: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Settings of the generate handler that the model knows itself, how many positions it has and where its texts end,
    and above these the `wanted` ones. Raises `UsageError` for longer texts than it has positions for."""
    usual, settings = Settings(), dict(wanted or {})
    most, asked = positions_of(model), settings.get("max_tokens")
    if isinstance(asked, int) and 0 < most < asked:
        raise UsageError(f"max_tokens is {asked}, and the model has {most} positions: give at most as many")
    if 0 < most < usual.max_tokens:
        settings = {"max_tokens": most, "max_new_tokens": min(usual.max_new_tokens, most), **settings}
    if _is_two_parts(model) and "start_tokens" not in settings:
        try:
            settings["start_tokens"] = [Kept(model).start_token()]
        except RuntimeError as error:
            raise UsageError(f"{error}, or give start_tokens in `handler_settings`") from None
    for where in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        ends = getattr(where, "eos_token_id", None)
        if ends is not None:
            return {"stop_tokens": [ends] if isinstance(ends, int) else list(ends), **settings}
    return settings


def _at(answer: Any, last: torch.Tensor) -> torch.Tensor:
    """The scores [rows, vocabulary] at each row's position `last`, of what is called logits among a model's outputs, else
    of the first tensor [rows, tokens, vocabulary]."""
    candidates = [(path, leaf) for path, leaf in leaves(answer) if isinstance(leaf, torch.Tensor) and leaf.dim() == 3]
    if not candidates:
        raise UsageError("the model gives no scores [rows, tokens, vocabulary]")
    named = [leaf for path, leaf in candidates if path.endswith("logits")]
    logits = named[0] if named else candidates[0][1]
    place = last[:, None, None].expand(-1, 1, logits.shape[-1])
    return logits.gather(1, place)[:, 0]
