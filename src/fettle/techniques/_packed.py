"""Rows of unequal length, one after the other without padding, while the blocks of a model compute them.

What looks at one place at a time, a linear layer or a norm, takes them as one long row. Attention is between the places
of a row, and is computed row by row. Around the blocks everything has the form that the model was written for, so that
a model may take a row's first place, or its loss, as ever.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from fettle.techniques._exported import flatten
from fettle.techniques._pipeline import Part


def filled(name: Any, args: Any, kwargs: Any) -> tuple[Any, list[int]]:
    """The mask [rows, places] among the arguments, and how many places each row has; no lengths where a row is empty
    or filled up at its beginning."""
    mask = kwargs.get(name) if isinstance(name, str) else dict(enumerate(args)).get(name)
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return None, []
    has = mask != 0
    lengths: list[int] = has.sum(1).tolist()
    from_the_left = not bool((has[:, :-1] >= has[:, 1:]).all())
    return mask, [] if from_the_left or 0 in lengths else lengths


def packing() -> Any:
    """The rows that are packed in this thread's call; None where none are."""
    overrides: Any = torch.overrides
    modes = overrides._get_current_function_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, PackedRows)), None)


def pack_block(_: Any, args: Any, kwargs: Any) -> Any:
    """Hand a block packed rows, and what goes with each of their places."""
    from torch.utils import _pytree as pytree

    now, tensors = packing(), [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if now is None or not tensors or tensors[0].dim() != 3:
        return None
    if tensors[0].shape[:2] not in (now.shape, now.packed):
        now.others = True
        return None
    now.blocks += 1

    def pack(leaf: Any) -> Any:
        is_hidden = leaf is tensors[0] or leaf.shape[:2] == now.packed
        return now.pack(leaf, True) if is_hidden else now.once(leaf, now.pack)

    return pytree.tree_map_only(torch.Tensor, pack, (args, kwargs))


def unpack_block(_: Any, __: Any, output: Any) -> Any:
    """Give what the last block answers the form that the rows came in."""
    from torch.utils import _pytree as pytree

    now = packing()
    return None if now is None else pytree.tree_map_only(torch.Tensor, now.unpack, output)


def pack_blocks(model: torch.nn.Module) -> list[Any]:
    """Have the blocks of a model, modules of one class in a container, compute packed rows; the hooks that do it."""
    hooks: list[Any] = []
    inside: set[int] = set()
    for container in model.modules():
        if not isinstance(container, (torch.nn.ModuleList, torch.nn.Sequential)) or id(container) in inside:
            continue
        blocks = list(container)
        if len({type(block) for block in blocks}) == 1 and next(blocks[0].children(), None) is not None:
            inside |= {id(module) for module in container.modules()}
            hooks += [block.register_forward_pre_hook(pack_block, with_kwargs=True) for block in blocks]
            hooks.append(blocks[-1].register_forward_hook(unpack_block))
    return hooks


class Unclear(Exception):
    """Two sizes of a tensor are equal by chance, so that its axes cannot be told apart: places, or pairs of places."""


class PackedRows(torch.overrides.TorchFunctionMode):
    """The rows of one call, by their lengths. While it is active, attention between packed places stays in their row,
    and linear layers outside of the blocks leave padding out."""

    def __init__(self, lengths: list[int], places: int, device: Any) -> None:
        import inspect
        from itertools import groupby

        super().__init__()
        rows = sorted(range(len(lengths)), key=lambda row: lengths[row])
        index = [torch.arange(row * places, row * places + lengths[row]) for row in rows]
        self.index = torch.cat(index).to(device)
        self.shape, self.packed = torch.Size((len(rows), places)), torch.Size((1, len(self.index)))
        self.groups = [(list(same), length) for length, same in groupby(rows, key=lambda row: lengths[row])]
        self.sizes = [len(same) * length for same, length in self.groups]
        self.blocks = self.attended = 0
        self.others = False  # whether rows of another length were seen
        self.kept: dict[Any, Any] = {}
        self.learns = torch.is_grad_enabled()
        self.varlen: Any = None
        if device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0):
            from torch.nn.attention.varlen import varlen_attn

            ends = torch.tensor([0, *(lengths[row] for row in rows)]).cumsum(0)
            self.ends, self.longest = ends.to(device, torch.int32), max(lengths)
            self.varlen = varlen_attn if "window_size" in inspect.signature(varlen_attn).parameters else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        functions, named = torch.nn.functional, kwargs or {}
        if func is functions.scaled_dot_product_attention:
            return self.attend(*args, **named)
        if func is functions.multi_head_attention_forward and args[0].shape[:-1] == self.packed[::-1]:
            return self.attend_by_heads(*args, **named)
        if func is functions.linear and args and args[0].dim() == 3:
            if args[0].shape[:2] == self.shape:
                return self.unpack(func(self.pack(args[0], True), *args[1:], **named))
            self.others = self.others or args[0].shape[0] == self.shape[0]
        return func(*args, **named)

    def once(self, tensor: torch.Tensor, find: Any) -> Any:
        """`find(tensor)`, worked out once for a tensor that all blocks are given."""
        key = (id(tensor), find.__name__)
        if key not in self.kept:
            self.kept[key] = (tensor, find(tensor))
        return self.kept[key][1]

    def pack(self, tensor: torch.Tensor, is_hidden: bool = False) -> torch.Tensor:
        """A tensor with the places in its second axis, or of all rows in its first, without those that are padding."""
        places = self.shape[1]
        if tensor.dim() < 2 or (tensor.dim() == 3 and tensor.dtype == torch.bool):  # [rows, places, places]
            return tensor
        if tensor.shape[:2] in (self.shape, (1, places)):
            if not is_hidden and tensor.dim() > 2 and tensor.shape[-1] == places and tensor.shape[:-1] != (1, places):
                raise Unclear
            if tensor.shape[0] == 1:
                return tensor[0].index_select(0, self.index % places)[None]
            return tensor.flatten(0, 1).index_select(0, self.index)[None]
        if tensor.dim() == 2 and tensor.shape[0] == places != tensor.shape[1]:
            return tensor.index_select(0, self.index % places)
        return tensor

    def unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Packed rows as they came, with zeros where they were filled up."""
        if tensor.shape[:2] != self.packed:
            return tensor
        whole = tensor.new_zeros(self.shape.numel(), *tensor.shape[2:])
        return whole.index_copy_(0, self.index, tensor[0]).view(*self.shape, *tensor.shape[2:])

    def attend(
        self, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        **more: Any,
    ) -> Any:  # fmt: skip
        """Attention of each row to itself."""
        attention = torch.nn.functional.scaled_dot_product_attention
        if query.shape[0] != 1 or query.shape[-2] != self.packed[1]:
            return attention(query, key, value, attn_mask, dropout_p, is_causal, **more)
        if query.dim() != 4 or key.shape[-2] != self.packed[1]:
            raise RuntimeError("ragged=packed: a row attends to others than its own places")
        if self.learns:
            hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
            if hooks is not None or not torch.is_grad_enabled():
                raise RuntimeError("ragged=packed: what is recomputed in the backward pass is not told apart by rows")
        self.attended += 1
        masks, causal = (None, is_causal) if attn_mask is None else self.once(attn_mask, self.seen)
        half = query.dtype in (torch.bfloat16, torch.float16)
        sizes = {query.shape[-1], key.shape[-1], value.shape[-1]}
        able = range(8, 193 if self.learns else 257, 8)  # larger ones have no backward pass on some GPUs
        if self.varlen and half and masks is None and not dropout_p and len(sizes) == 1 and max(sizes) in able:
            q, k, v = (given[0].transpose(0, 1) for given in (query, key, value))
            if k.shape[1] < q.shape[1]:
                k, v = (given.repeat_interleave(q.shape[1] // k.shape[1], 1) for given in (k, v))
            most, window = self.longest, (-1, 0 if causal else -1)
            scale = more.get("scale")
            out = self.varlen(q, k, v, self.ends, self.ends, most, most, scale=scale, window_size=window)
            return out.transpose(0, 1)[None]
        found = []
        each = zip(*(given[0].split(self.sizes, 1) for given in (query, key, value)), strict=True)
        for number, ((rows, length), given) in enumerate(zip(self.groups, each, strict=True)):
            q, k, v = (one.unflatten(1, (len(rows), length)).transpose(0, 1) for one in given)
            out = attention(q, k, v, masks and masks[number], dropout_p, causal, **more)
            found.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(found)[None].transpose(1, 2)

    def attend_by_heads(
        self, query: Any, key: Any, value: Any, width: int, heads: int, weight: Any, bias: Any, bias_k: Any,
        bias_v: Any, zeros: bool, dropout: float, out: Any, out_bias: Any, training: bool = True,
        key_padding_mask: Any = None, need_weights: bool = True, attn_mask: Any = None, **more: Any,
    ) -> Any:  # fmt: skip
        """The attention of `torch.nn.MultiheadAttention`, which asks for it in one call that holds the projections."""
        odd = bias_k is not None or zeros or need_weights or more.get("use_separate_proj_weight")
        if odd or not (query is key is value):
            raise RuntimeError("ragged=packed: a MultiheadAttention is asked for its weights, or about other rows")
        mask = attn_mask
        if key_padding_mask is not None and mask is None:
            mask = key_padding_mask[:, None, None]
        elif key_padding_mask is not None and bool(key_padding_mask.any()):
            raise RuntimeError("ragged=packed: a row does not attend to all of its own places")
        if mask is not None and mask.dtype == torch.bool:
            mask = ~mask  # True means hidden here
        linear = torch.nn.functional.linear
        q, k, v = linear(query, weight, bias).view(1, -1, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        found = self.attend(q, k, v, mask, dropout if training else 0.0)
        return linear(found.transpose(1, 2).flatten(2).transpose(0, 1), out, out_bias), None

    def seen(self, mask: torch.Tensor) -> tuple[Any, bool]:
        """What a mask lets each row see of itself: a tensor for each length, or none where that is all, or all that is
        not later, which the second value says."""
        mask = mask[(None,) * (4 - mask.dim())]
        packed, alone = mask.shape[-1] == self.packed[1] and mask.shape[0] == 1, mask.shape[-2] == 1
        found, start = [], 0
        for rows, length in self.groups:
            starts = [start + number * length for number in range(len(rows))] if packed else [0]
            spans = [slice(begin, begin + length) for begin in starts]
            own = torch.cat([mask[..., slice(None) if alone else span, span] for span in spans])
            found.append(own if packed or len(own) == 1 else own[rows])
            start += len(rows) * length
        if mask.requires_grad:  # a learned bias may begin as zeros
            return found, False

        def every(tests: list[Any]) -> bool:
            return bool(torch.stack([test.all() for test in tests]).all())

        shown = [own if own.dtype == torch.bool else own == 0 for own in found]
        if every(shown):
            return None, False
        left = [own if own.dtype == torch.bool else own >= -1e4 for own in found]  # with what has a bias
        causal = [(one == one.new_ones(one.shape[-2:]).tril()) & (one == other)
                  for one, other in zip(shown, left, strict=True)]  # fmt: skip
        return (None, True) if every(causal) else (found, False)


class Packed(Part):
    """A model whose blocks compute the rows of a batch one after the other, without padding.

    `mask` is the name or the place of the argument [rows, places] that is 1 where a row has something.
    """

    def __init__(self, model: Any, mask: Any) -> None:
        super().__init__(model, model)
        vars(self).update(_mask=mask)
        if not pack_blocks(model):
            raise RuntimeError("ragged=packed found no blocks")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from contextlib import suppress

        mask, lengths = filled(self._mask, args, kwargs)
        # With as many rows as places, a mask [rows, places] looks like one of pairs; where all rows together are as
        # long as a padded row, packed rows look like that one.
        if len(lengths) < 2 or mask.shape[1] in (len(lengths), min(lengths), sum(lengths)):
            return self._part_run(*args, **kwargs)
        with suppress(Unclear), PackedRows(lengths, mask.shape[1], mask.device):
            return self._part_run(*args, **kwargs)
        return self._part_run(*args, **kwargs)


PACKED = (filled, packing, pack_block, unpack_block, pack_blocks, Unclear, PackedRows, Part, Packed)


def why_not_packed(model: torch.nn.Module, args: Any, kwargs: Any, lengths: list[int], places: int) -> str:
    """Why the blocks of a model cannot compute packed rows, as a phrase; empty where a call answers the same."""
    import inspect

    def answers() -> list[torch.Tensor]:
        return [leaf for leaf in flatten(model(*args, **kwargs))[0] if isinstance(leaf, torch.Tensor)]

    configs = [getattr(module, "config", None) for module in model.modules()]
    if any(getattr(config, f"{part}layerdrop", 0) for config in configs for part in ("", "encoder_", "decoder_")):
        return "training leaves out blocks by chance (layerdrop), the last one, too"
    of_two = "its blocks take rows of other lengths, too"
    rows: Any = None
    try:
        if any("decoder_input_ids" in inspect.signature(module.forward).parameters for module in model.modules()):
            return of_two  # two texts, which may have the same length in this batch
        given, device = answers(), next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        real = torch.arange(places, device=device) < torch.tensor(lengths, device=device)[:, None]
        rows = PackedRows(lengths, places, device)
        with ExitStack() as stack:
            for hook in [*pack_blocks(model), rows]:
                stack.enter_context(hook)
            found = answers()
        if not rows.blocks:
            return "the model has no blocks, one after the other, that take [rows, places, width]"
        same = all(_alike(one, other, real) for one, other in zip(given, found, strict=True))
    except Exception as error:
        if rows is None:
            return f"a trial with two rows ends with {type(error).__name__}"
        same = False
    if rows.others:
        return of_two
    if same:
        return ""
    if not rows.attended:
        return "its blocks compute no scaled_dot_product_attention, which is what tells rows apart"
    return "its blocks answer otherwise where rows are packed"


def _alike(one: torch.Tensor, other: torch.Tensor, real: torch.Tensor) -> bool:
    """Whether two answers are the same but for rounding, at places that rows have; looked at row by row, since they may
    be as large as memory allows."""
    if one.shape != other.shape:
        return False
    near = 1e-3 if one.dtype in (torch.float32, torch.float64) else 0.05
    if one.dim() == 0:
        one, other = one[None], other[None]
    places: Any = real if one.shape[:2] == real.shape else [...] * len(one)
    sizes = []
    for own, its, has in zip(one, other, places, strict=True):
        right = own[has].float()
        sizes.append(torch.stack([(right - its[has].float()).abs().max(), right.abs().max()]))
    far, most = torch.stack(sizes).amax(0).tolist()
    return bool(far <= near * most)
