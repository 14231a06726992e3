"""Attention with a decomposed relative-position bias (Li et al., *MViTv2*, 2022; ViTDet; SAM), tile by tile.

The bias of a query is the sum of one number for each row of keys and one for each column. Written out it is as large as
the attention weights, queries times keys; here it is added to one tile of scores at a time, which stays in the cache.
"""

from typing import Any

import torch


def relative_positions(size: int, table: torch.Tensor) -> torch.Tensor:
    """Embeddings of the distance of each query to each key on an axis of `size`: size x size x channels. A table for
    another size is interpolated."""
    if len(table) != 2 * size - 1:
        resized = torch.nn.functional.interpolate(table.T[None].float(), size=2 * size - 1, mode="linear")
        table = resized[0].T.to(table.dtype)
    at = torch.arange(size, device=table.device)
    return table[at[:, None] - at[None] + size - 1]


def tiled_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor,
    scale: float, tile: int = 1 << 20,
) -> torch.Tensor:  # fmt: skip
    """softmax(query key^T * scale + bias) value for batch x heads x tokens x channels.

    `rows` is the part of the bias by row of keys, batch x heads x tokens x height, `columns` that by column, batch x
    heads x tokens x width. No more than about `tile` scores are held at once."""
    shape = query.shape
    query, key, value, rows, columns = (part.flatten(0, -3) for part in (query, key, value, rows, columns))
    heads, tokens, _ = query.shape
    height, width = rows.shape[-1], columns.shape[-1]
    out = torch.empty_like(query)
    query, key = query * scale, key.transpose(-2, -1)
    together = max(1, tile // tokens**2)
    step = tokens if together > 1 else max(1, tile // tokens)
    # Without autograd all tiles lie in the memory of the first: bias, scores and weights take each other's place.
    held = None if torch.is_grad_enabled() else query.new_empty(min(heads, together), min(tokens, step), tokens)
    for head in range(0, heads, together):
        some = slice(head, head + together)
        for first in range(0, tokens, step):
            part = slice(first, first + step)
            into = None if held is None else held[: heads - head, : tokens - first]
            square = None if into is None else into.view(*into.shape[:2], height, width)
            bias = torch.add(rows[some, part, :, None], columns[some, part, None, :], out=square)
            weights = torch.softmax(bias.flatten(-2).baddbmm_(query[some, part], key[some]), -1, out=into)
            out[some, part] = weights.to(value.dtype) @ value[some]
    return out.view(shape)


def by_flex_attention() -> Any:
    """The same by torch's FlexAttention, compiled with the bias as what it does to each score."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(query: Any, key: Any, value: Any, rows: Any, columns: Any, scale: float) -> Any:
        width = columns.shape[-1]

        def biased(score: Any, batch: Any, head: Any, of: Any, to: Any) -> Any:
            return score + rows[batch, head, of, to // width] + columns[batch, head, of, to % width]

        return compiled(query, key, value, score_mod=biased, scale=scale)

    return attend


def attend_to_square(
    module: Any, original: Any, attention: Any, in_tuple: bool, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """What such a module computes of batch x height x width x channels, its attention by `attention`; by the `original`
    forward where a call has more than that, a mask, say."""
    if any(other is not None and other is not False for other in (*args, *kwargs.values())):
        return original(hidden_states, *args, **kwargs)
    batch, height, width, _ = hidden_states.shape
    heads = getattr(module, "num_attention_heads", None) or module.num_heads
    mixed = module.qkv(hidden_states).reshape(batch, height * width, 3, heads, -1)
    query, key, value = mixed.permute(2, 0, 3, 1, 4).unbind(0)
    square = query.unflatten(2, (height, width))
    rows = torch.einsum("bnhwc,hkc->bnhwk", square, relative_positions(height, module.rel_pos_h)).flatten(2, 3)
    columns = torch.einsum("bnhwc,wkc->bnhwk", square, relative_positions(width, module.rel_pos_w)).flatten(2, 3)
    out = attention(query, key, value, rows, columns, query.shape[-1] ** -0.5)
    projected: torch.Tensor = module.proj(out.transpose(1, 2).reshape(batch, height, width, -1))
    return (projected, None) if in_tuple else projected


def with_decomposed_bias(model: torch.nn.Module) -> list[Any]:
    """Modules of this kind, each with whether it returns a tuple: those that compute the same in tiles on a trial
    input, and no others."""
    found = []
    modules: Any = model.modules()
    for module in modules:
        parts = [getattr(module, name, None) for name in ("rel_pos_h", "rel_pos_w", "qkv", "proj")]
        if any(part is None for part in parts) or getattr(module.qkv, "in_features", 0) == 0:
            continue
        if not (getattr(module, "num_attention_heads", None) or getattr(module, "num_heads", None)):
            continue  # asked last: diffusers' models warn of the question
        weight = module.qkv.weight
        trial = torch.linspace(-1, 1, 15 * weight.shape[1], device=weight.device).reshape(1, 3, 5, -1).to(weight.dtype)
        modes = [(one, one.training) for one in module.modules()]
        try:
            module.eval()
            with torch.no_grad():
                answer = module(trial)
                wanted = answer[0] if isinstance(answer, tuple) else answer
                off = attend_to_square(module, None, tiled_attention, False, trial) - wanted
                near = off.norm() <= 0.02 * wanted.norm() + 1e-6
            if near and wanted.shape == trial.shape:
                found.append((module, isinstance(answer, tuple)))
        except Exception:  # it takes something else, or has other parts
            continue
        finally:
            module.train(modes[0][1])  # whose class may do more than torch's there
            for one, training in modes:
                one.training = training
    return found


def change_attention(model: torch.nn.Module, attention: Any) -> None:
    """Let `attention` compute attention with a decomposed relative-position bias."""
    import functools

    found = with_decomposed_bias(model)
    if not found:
        raise RuntimeError("no attention with a decomposed relative-position bias was found")
    for module, in_tuple in found:  # a partial function, whose copy belongs to the module's copy
        module.forward = functools.partial(attend_to_square, module, module.forward, attention, in_tuple)


DECOMPOSED = (
    relative_positions, tiled_attention, by_flex_attention, attend_to_square, with_decomposed_bias, change_attention,
)  # fmt: skip
