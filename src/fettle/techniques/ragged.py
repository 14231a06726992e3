"""Rows of unequal length: what only fills them up to the longest is not computed.

Texts are padded to the longest of their batch, or to a fixed length, and at the lengths that people meet most places
are padding then. A mask among the arguments says which.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from fettle.techniques._base import Bundle, Code, Facts, Level, Recipe, Technique, register
from fettle.techniques._exported import flatten
from fettle.techniques._facts import Padding
from fettle.techniques.precision import computes_in_bf16

_LEAST = 0.05
"""Share of the places from which padding is worth a level."""


class ByLength(torch.nn.Module):
    """A model that is run on rows of about the same length at once, without the places that only fill them up.

    `mask` is the name or the place of the argument [rows, places] that is 1 where a row has something; what a row has
    comes first. `axes` are, for each tensor of the output in the order of the tree, those that are as long as the
    input; the first axis is the rows'. Places that are left out are 0 in the output. With `apart` false all rows are
    run at once, as long as the longest of them.
    """

    def __init__(self, model: Any, mask: Any, axes: Any, apart: bool = True) -> None:
        super().__init__()
        self.model, self.mask, self.axes, self.apart = model, mask, axes, apart
        self.train(model.training)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from torch.utils import _pytree as pytree

        mask = kwargs.get(self.mask) if isinstance(self.mask, str) else dict(enumerate(args)).get(self.mask)
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            return self.model(*args, **kwargs)
        has = mask != 0
        lengths = has.sum(1).tolist()
        rows, places = mask.shape
        groups = self.groups(lengths)
        filled_from_the_left = not bool((has[:, :-1] >= has[:, 1:]).all())
        if filled_from_the_left or min(lengths) == 0 or (len(groups) == 1 and max(lengths) == places):
            return self.model(*args, **kwargs)
        whole: list[Any] = []
        for group in groups:
            longest = lengths[group[0]]
            index = torch.tensor(group, device=mask.device)

            def cut(leaf: Any, index: Any = index, longest: int = longest) -> Any:
                if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
                    return leaf
                if leaf.dim() > 1 and leaf.shape[1] == places and leaf.shape[0] in (1, rows):
                    leaf = leaf[:, :longest]
                return leaf[index] if leaf.shape[0] == rows else leaf

            tree, spec = flatten((args, kwargs))
            some, named = pytree.tree_unflatten([cut(leaf) for leaf in tree], spec)
            outputs, form = flatten(self.model(*some, **named))
            tensors = [leaf for leaf in outputs if isinstance(leaf, torch.Tensor)]
            for place, (part, axes) in enumerate(zip(tensors, self.axes, strict=True)):
                if place == len(whole):
                    shape = [places if axis in axes else size for axis, size in enumerate(part.shape)]
                    whole.append(part.new_zeros([rows, *shape[1:]]))
                whole[place][(index, *(slice(0, size) for size in part.shape[1:]))] = part
        results = iter(whole)
        return pytree.tree_unflatten(
            [next(results) if isinstance(leaf, torch.Tensor) else leaf for leaf in outputs], form
        )

    def groups(self, lengths: list[int]) -> list[list[int]]:
        """Rows by length, the longest first: a group ends before a row that would be an eighth padding in it, once it
        has enough places to keep the machine busy."""
        found: list[list[int]] = []
        for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
            longest = lengths[found[-1][0]] if found else 0
            if found and (not self.apart or 8 * lengths[row] > 7 * longest or len(found[-1]) * longest < 256):
                found[-1].append(row)
            else:
                found.append([row])
        return found


@register
class Ragged(Technique):
    name = "ragged"
    order = 668
    title = "rows of unequal length"
    default = "padded"
    rung = 2

    def levels(self, facts: Facts) -> list[Level]:
        why_not = ""
        if facts.padding is None:
            why_not = "no argument is a mask of rows that are filled up at their end"
        elif facts.padding.share < _LEAST:
            why_not = f"{facts.padding.share:.0%} of the places are padding"
        longest = facts.padding.longest if facts.padding else 1.0
        full = "every batch has a row without padding" if longest > 1 - _LEAST else ""
        return [
            Level("padded", "as given"),
            Level("trimmed", "a batch is as long as its longest row", why_not or full),
            Level("grouped", "rows of about the same length at once, each group as long as its longest row", why_not),
        ]

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        for name, usual in (("runtime", "torch"), ("compile", "off"), ("cuda_graphs", "off")):
            if level != self.default and recipe.levels.get(name, usual) != usual:
                return f"{name}={recipe.levels[name]} makes a program for each shape, and there are as many as lengths"
        return ""

    def bundles(self, facts: Facts) -> list[Bundle]:
        found = [Bundle(15, {"ragged": "grouped"})]
        return [Bundle(12, {"precision": "bf16", "ragged": "grouped"}), *found] if computes_in_bf16(facts) else found

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        assert facts.padding is not None
        mask, axes = facts.padding.mask, [list(some) for some in facts.padding.axes]
        apart = "" if level == "grouped" else ", apart=False"
        return Code(helpers=(flatten, ByLength), prepare=(f"model = ByLength(model, {mask!r}, {axes}{apart})",))


class _Noted(Exception):
    """The arguments are known: the call need not be made."""


def padding_of(model: torch.nn.Module, run: Callable[[], Any]) -> Padding | None:
    """How rows are padded in the first call of `model` that `run` makes, which ends where it begins.

    None where no argument tells, or where the rows of the output cannot be told from its other axes: the model is
    called three times, with other numbers of rows and places.
    """
    from torch.utils import _pytree as pytree

    calls: list[tuple[Any, Any]] = []

    def note(_: Any, args: Any, kwargs: Any) -> None:
        calls.append((args, kwargs))
        raise _Noted

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with suppress(_Noted):
            run()
    finally:
        hook.remove()
    args, kwargs = calls[0] if calls else ((), {})
    found = [(name, value) for name, value in (*kwargs.items(), *enumerate(args)) if _is_mask(value)]
    if not found:
        return None
    name, mask = found[0]
    rows, places = mask.shape
    tree, spec = flatten((args, kwargs))

    def shapes(some_rows: int, some_places: int) -> list[torch.Size]:
        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
                return leaf
            if leaf.dim() > 1 and leaf.shape[1] == places and leaf.shape[0] in (1, rows):
                leaf = leaf[:, :some_places]
            return leaf[:some_rows] if leaf.shape[0] == rows else leaf

        some, named = pytree.tree_unflatten([cut(leaf) for leaf in tree], spec)
        return [leaf.shape for leaf in flatten(model(*some, **named))[0] if isinstance(leaf, torch.Tensor)]

    few = min(places - 1, 8)
    axes = []
    for base, fewer, shorter in zip(shapes(2, few + 1), shapes(1, few + 1), shapes(2, few), strict=True):
        if _differ(base, fewer) != (0,):
            return None
        axes.append(_differ(base, shorter))
    has = mask != 0
    return Padding(name, tuple(axes), 1 - float(has.float().mean()), int(has.sum(1).max()) / places)


def _is_mask(value: Any) -> bool:
    """Whether it is a mask [rows, places] of rows that are filled up at their end."""
    if not isinstance(value, torch.Tensor) or value.dim() != 2 or min(value.shape) < 2:
        return False
    has = value != 0
    return bool(((value == 1) == has).all() and has[:, 0].all() and (has[:, :-1] >= has[:, 1:]).all() and not has.all())


def _differ(one: torch.Size, other: torch.Size) -> tuple[int, ...]:
    return tuple(axis for axis, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
