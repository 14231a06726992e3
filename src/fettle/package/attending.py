"""Attention to kept and to new tokens, where they lie: neither are they joined, nor is a head repeated.

Joining them copies all keys and values that are kept, for every token that is written: most of a step's time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache, DynamicLayer

from fettle.patches import replaced

_HIDDEN = -60_000.0
"""The score of a token that is not seen: its share is exactly 0. A recipe may compute in float16, which ends there."""


class FreshLayer(DynamicLayer):  # type: ignore[no-untyped-call,unused-ignore]
    """A layer of which nothing is kept."""

    fresh: tuple[torch.Tensor, torch.Tensor] | None = None
    """Keys and values of the new tokens."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Remember the new ones, and hand them back alone."""
        self.fresh = key_states, value_states
        return self.fresh


class KeptLayer(FreshLayer):
    """A layer's keys and values of the tokens before, [rows, heads, kept, a head's size] each; the new ones beside."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.keys, self.values, self.is_initialized = keys, values, True
        self.kept = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.attended = False
        self.near: torch.Tensor | None = None
        """Which tokens its window has, like a mask; None where it sees all."""


def over(past: torch.Tensor) -> DynamicCache:
    """A cache over `past` [rows, layers, 2, heads, kept, a head's size]."""
    cache = DynamicCache()
    cache.layers.extend(KeptLayer(past[:, layer, 0], past[:, layer, 1]) for layer in range(past.shape[1]))
    return cache


def fresh_of(layers: Iterable[Any]) -> torch.Tensor:
    """Keys and values of the new tokens [rows, layers, 2, heads, new, a head's size]."""
    return torch.stack([torch.stack(layer.fresh, 1) for layer in layers], 1)


@contextmanager
def kept_apart(past: torch.Tensor, *, biased: bool = False) -> Iterator[tuple[DynamicCache, list[KeptLayer]]]:
    """A cache `over` past; inside, what transformers calls sdpa, or eager, attends to it and to new tokens, with a bias
    only where each row has its own.

    Raises ValueError afterwards where a layer did not attend so.
    """
    cache = over(past)
    layers: list[Any] = cache.layers

    def attend(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attention_mask: torch.Tensor | None, scaling: float | None = None, position_bias: torch.Tensor | None = None,
        **more: Any,
    ) -> Any:  # fmt: skip
        own = [layer for layer in layers if layer.fresh is not None and layer.fresh[0] is key]
        if biased and not own:  # to what an encoder has read
            return usual(
                module, query, key, value, attention_mask, scaling=scaling, position_bias=position_bias, **more
            )
        if len(own) != 1 or attention_mask is None or (position_bias is not None and not biased):
            raise ValueError("this attention needs more than keys, values and a mask")
        own[0].attended = True
        seen = attention_mask if own[0].near is None else attention_mask & own[0].near
        return _attention(query, own[0], key, value, seen, scaling, position_bias), None

    usual = AttentionInterface._global_mapping["sdpa"]
    with replaced(AttentionInterface, "_global_mapping", lambda known: {**known, "sdpa": attend, "eager": attend}):
        yield cache, layers
    if not all(layer.attended for layer in layers):
        raise ValueError("a layer attends in a way of its own")


@contextmanager
def places_of_rows(decoder: Any, new: torch.Tensor, all_of_them: torch.Tensor) -> Iterator[None]:
    """Inside, a decoder of transformers goes by each row's own positions, not by one number for all: by those of the
    `new` tokens [rows, new] and of all that they attend to [rows, kept and new].

    It can be told them where it adds a vector to a token by its place, as BART, or M2M100 out of a table, or to scores
    by the distance, as T5. ValueError for others.
    """
    width = all_of_them.shape[1]
    away = (new[:, :, None] - all_of_them[:, None]).clamp_min(0)

    def of_distances(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def biases(*_: Any, **__: Any) -> torch.Tensor:
            of_one = compute(1, width, past_seen_tokens=width - 1)[0, :, 0]  # the nearest token's last
            return of_one[:, width - 1 - away].transpose(0, 1)

        return biases

    def of_places(look_up: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def vectors(tokens: Any, *_: Any, **__: Any) -> torch.Tensor:
            module = decoder.embed_positions
            if hasattr(module, "weights"):  # the token that fills up has the first place, and others those behind it
                first = module.padding_idx
                return module.weights[torch.where(tokens == first, first, new + first + 1)]  # type: ignore[no-any-return]
            found = look_up(tokens, position_ids=_plain(new).flatten())
            return found.reshape(*new.shape, found.shape[-1])

        return vectors

    by_distance = [one for one in decoder.modules() if getattr(one, "has_relative_attention_bias", False)]
    by_place = [decoder.embed_positions] if hasattr(decoder, "embed_positions") else []
    if not by_distance and not by_place:
        raise ValueError("this decoder takes the positions of its rows from elsewhere")
    with ExitStack() as stack:
        for module in by_distance:
            stack.enter_context(replaced(module, "compute_bias", of_distances))
        for module in by_place:
            stack.enter_context(replaced(module, "forward", of_places))
        yield


def _attention(
    query: torch.Tensor, layer: KeptLayer, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor,
    scaling: float | None, bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """[rows, new, query's heads, a head's size]; `mask` [rows, 1, new, kept and new] is True where a token is seen.

    The queries that share a head of keys stand below each other, so that each key is read once for all of them.
    """
    rows, all_heads, new, size = query.shape
    kept_keys, kept_values = layer.kept
    heads, before = key.shape[1], kept_keys.shape[2]
    group = all_heads // heads
    queries = _plain(query * (size**-0.5 if scaling is None else scaling)).view(rows, heads, group * new, size)
    scores = torch.cat([queries @ kept_keys.transpose(-1, -2), queries @ _plain(key).transpose(-1, -2)], -1).float()
    scores = scores if bias is None else scores + bias
    hidden = ~mask if group == 1 else ~mask.repeat(1, 1, group, 1)
    shares = _plain(scores.masked_fill(hidden, _HIDDEN).softmax(-1).to(value.dtype))
    attended = shares[..., :before] @ kept_values + shares[..., before:] @ _plain(value)
    attended = _plain(attended).view(rows, heads, group, new, value.shape[-1])
    return _plain(attended.permute(0, 3, 1, 2, 4)).flatten(2, 3)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Laid out row by row, which the exporter otherwise takes for a condition on the sizes."""
    return tensor.clone(memory_format=torch.contiguous_format)
