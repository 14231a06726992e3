"""Rows of unequal length: what only fills them up to the longest is not computed.

Texts are padded to the longest of their batch, or to a fixed length, and at the lengths that people meet most places
are padding then. A mask among the arguments says which.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from fettle.techniques._base import BOTH, Bundle, Code, Facts, Level, Recipe, Technique, register
from fettle.techniques._exported import flatten
from fettle.techniques._facts import Padding
from fettle.techniques._packed import PACKED, filled, why_not_packed
from fettle.techniques._pipeline import Part
from fettle.techniques.precision import computes_in_bf16

_LEAST = 0.05
"""Share of the places from which padding is worth a level."""


def cut_to(args: Any, kwargs: Any, mask: Any, at: Any, whole: Any, index: Any, longest: int) -> Any:
    """Arguments with only those rows of `mask`, so many places long: `at` is the axis of the places in those that have
    them, by name or place, and those that are `whole` stay as they are."""
    from torch.utils import _pytree as pytree

    rows, places = mask.shape

    def cut(leaf: Any, axis: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            return leaf
        if axis is not None and leaf.dim() > axis and leaf.shape[axis] == places and leaf.shape[0] in (1, rows):
            leaf = leaf.narrow(axis, 0, longest)
        return leaf[index] if leaf.shape[0] == rows else leaf

    def cut_all(name: Any, value: Any) -> Any:
        if name in whole:
            return value
        leaves, spec = flatten(value)
        return pytree.tree_unflatten([cut(leaf, at.get(name)) for leaf in leaves], spec)

    return [cut_all(n, v) for n, v in enumerate(args)], {n: cut_all(n, v) for n, v in kwargs.items()}


class ByLength(Part):
    """A model that is run on rows of about the same length at once, without the places that only fill them up.

    `mask` is the name or the place of the argument [rows, places] that is 1 where a row has something; what a row has
    comes first. The first axis of every output is the rows'; places that are left out are 0 in it. `at` is the axis of
    the places in the arguments that have them, by name or place, and those that are `whole` are no rows. With `apart`
    false all rows are run at once, as long as the longest of them; an output may then be one number for all, too.
    """

    def __init__(self, model: Any, mask: Any, at: Any, apart: bool = True, whole: Any = ()) -> None:
        super().__init__(model, model)
        vars(self).update(_mask=mask, _at=at, _apart=apart, _whole=whole, _shapes={})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from torch.utils import _pytree as pytree

        mask, lengths = filled(self._mask, args, kwargs)
        groups = self._groups(lengths)
        known = self._at.keys() <= {*range(len(args)), *kwargs}  # else it is called in another form than the sample was
        if not (lengths and known) or (len(groups) == 1 and max(lengths) == mask.shape[1]):
            return self._part_run(*args, **kwargs)
        rows, places = mask.shape

        def run(index: Any, longest: int) -> Any:
            some, named = cut_to(args, kwargs, mask, self._at, self._whole, index, longest)
            outputs, form = flatten(self._part_run(*some, **named))
            return outputs, form, [leaf for leaf in outputs if isinstance(leaf, torch.Tensor)]

        whole: list[Any] = []
        for group in groups:
            longest, index = lengths[group[0]], torch.tensor(group, device=mask.device)
            outputs, form, tensors = run(index, longest)
            if len(groups) > 1 and any(part.dim() == 0 for part in tensors):
                raise RuntimeError("ragged=grouped: the model answers with one number for all rows")
            if not whole:  # the longest rows
                shapes = [part.shape for part in tensors]
                if longest < places and any(shapes):
                    given = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
                    key = tuple(leaf.shape[1:] for leaf in given)
                    if key not in self._shapes:  # an answer may have a place for every few of the input
                        with torch.no_grad():
                            self._shapes[key] = [part.shape for part in run(index[:1], places)[2]]
                    shapes = self._shapes[key]
                sizes = [[rows, *shape[1:]] if shape else [] for shape in shapes]
                whole = [part.new_zeros(size) for part, size in zip(tensors, sizes, strict=True)]
            for part, into in zip(tensors, whole, strict=True):
                at = (index, *(slice(0, size) for size in part.shape[1:])) if part.dim() else ()
                into[at] = part
        results = iter(whole)
        return pytree.tree_unflatten(
            [next(results) if isinstance(leaf, torch.Tensor) else leaf for leaf in outputs], form
        )

    def _groups(self, lengths: list[int]) -> list[list[int]]:
        """Rows by length, the longest first: a group ends before a row that would be an eighth padding in it, once it
        has enough places to keep the machine busy."""
        found: list[list[int]] = []
        for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
            longest = lengths[found[-1][0]] if found else 0
            if found and (not self._apart or 8 * lengths[row] > 7 * longest or len(found[-1]) * longest < 256):
                found[-1].append(row)
            else:
                found.append([row])
        return found


@register
class Ragged(Technique):
    name = "ragged"
    order = 668
    modes = BOTH
    title = "rows of unequal length"
    default = "padded"
    served = False
    of_module = True
    rung = 2

    def levels(self, facts: Facts) -> list[Level]:
        why_not = ""
        if facts.padding is None:
            why_not = "no argument masks what fills rows up at their end, or the answer is no tensors (use_cache=True)"
        elif facts.padding.share < _LEAST:
            why_not = f"{facts.padding.share:.0%} of the places are padding"
        elif facts.moving or facts.normalises_rows:
            why_not = f"a step changes {facts.moving or 'running averages'} by all rows and places of a batch"
        why_not = why_not or facts.no_copies
        longest = facts.padding.longest if facts.padding else 1.0
        full = "every batch has a row without padding" if longest > 1 - _LEAST else ""
        of_all = "the model answers with one number for all rows, such as a loss" if _is_of_all(facts) else ""
        return [
            Level("padded", "as given"),
            Level("trimmed", "a batch is as long as its longest row", why_not or full),
            Level("grouped", "rows of about the same length at once, each group as long as its longest row",
                  why_not or of_all),
            Level("packed", "blocks compute the rows one after the other without padding, attention row by row",
                  why_not or (facts.padding.not_packed if facts.padding else "")),
        ]  # fmt: skip

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        for name, usual in (("runtime", "torch"), ("compile", "off"), ("cuda_graphs", "off")):
            if recipe.levels.get(name, usual) != usual:
                return f"{name}={recipe.levels[name]} makes a program for each shape, and there are as many as lengths"
        if recipe.levels.get("parallel", "single") != "single":
            return "ranks whose rows have other lengths would wait for each other, or not call the model equally often"
        if level == "packed" and recipe.levels.get("checkpoint", "none") != "none":
            return "what is recomputed in the backward pass is not told apart by rows"
        attention = recipe.levels.get("attention", "")
        if level == "packed" and attention.startswith(("hf-", "windowed")) and attention != "hf-sdpa":
            return f"attention={attention} is not one scaled_dot_product_attention, which is what tells rows apart"
        return ""

    def bundles(self, facts: Facts) -> list[Bundle]:
        packs = facts.padding is not None and not facts.padding.not_packed
        levels = [*["packed"] * packs, "trimmed" if _is_of_all(facts) else "grouped"]
        found = [Bundle(15 + number, {"ragged": level}) for number, level in enumerate(levels)]
        half = {"precision": "autocast-bf16" if facts.mode == "training" else "bf16"}
        halves = [Bundle(12 + number, {**half, "ragged": level}) for number, level in enumerate(levels)]
        return [*halves, *found] if computes_in_bf16(facts) else found

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        assert facts.padding is not None
        mask, axes = facts.padding.mask, dict(facts.padding.axes)
        apart = "" if level == "grouped" else ", apart=False"
        apart += f", whole={facts.padding.whole}" if facts.padding.whole else ""
        cut = f"model = ByLength(model, {mask!r}, {axes}{apart})"
        if level != "packed":
            return Code(helpers=(flatten, cut_to, filled, Part, ByLength), prepare=(cut,))
        packed = f"model = Packed(model, {mask!r})"
        if facts.padding.longest > 1 - _LEAST:
            return Code(helpers=PACKED, prepare=(packed,))
        return Code(helpers=(flatten, cut_to, *PACKED, ByLength), prepare=(packed, cut))


def _is_of_all(facts: Facts) -> bool:
    return facts.padding is not None and facts.padding.of_all


class _Noted(Exception):
    """The arguments are known: the call need not be made."""


def padding_of(model: torch.nn.Module, run: Callable[[], Any]) -> Padding | None:
    """How rows are padded in the first call of `model` that `run` makes, which ends where it begins.

    None where no argument tells, or where the rows of the output cannot be told from its other axes: the model is
    called twice more, with two rows and with one, half as long.
    """
    calls: list[tuple[Any, Any]] = []

    def note(_: Any, args: Any, kwargs: Any) -> None:
        calls.append((args, kwargs))
        raise _Noted

    with model.register_forward_pre_hook(note, with_kwargs=True), suppress(_Noted):
        run()
    args, kwargs = calls[0] if calls else ((), {})
    arguments: list[tuple[str | int, Any]] = [*kwargs.items(), *enumerate(args)]
    found = [(name, value) for name, value in arguments if _is_mask(value)]
    if not found:
        return None
    name, mask = found[0]
    rows, places = mask.shape
    axes = {name: axis for name, value in arguments if (axis := _axis_of_places(value, rows, places))}

    def shapes(some_rows: int) -> list[torch.Size]:
        index = torch.arange(some_rows, device=mask.device)
        some, named = cut_to(args, kwargs, mask, axes, (), index, -(-places // 2))
        return [leaf.shape for leaf in flatten(model(*some, **named))[0] if isinstance(leaf, torch.Tensor)]

    of_all = False
    for two, one in zip(shapes(2), shapes(1), strict=True):
        of_all = of_all or not two
        if two and [axis for axis, (a, b) in enumerate(zip(two, one, strict=True)) if a != b] != [0]:
            return None
    lengths = (mask != 0).sum(1)
    longest, whole = int(lengths.max()), tuple(name for name, value in arguments if _is_whole(value, rows))
    pair = torch.stack([lengths.argmax(), lengths.argmin()])
    some, named = cut_to(args, kwargs, mask, axes, whole, pair, longest)
    not_packed = why_not_packed(model, some, named, lengths[pair].tolist(), longest)
    share = 1 - float(lengths.float().mean()) / places
    return Padding(name, tuple(axes.items()), share, longest / places, whole, of_all, not_packed)


def _axis_of_places(value: Any, rows: int, places: int) -> int:
    """Which axis of an argument's tensors is the places': the second or, as the columns of images and the frames of
    spectrograms are, the last; 0 for none."""
    tensors = [leaf for leaf in flatten(value)[0] if isinstance(leaf, torch.Tensor) and leaf.dim() > 1]
    tensors = [leaf for leaf in tensors if leaf.shape[0] in (1, rows)]
    if any(leaf.shape[1] == places for leaf in tensors):
        return 1
    return next((leaf.dim() - 1 for leaf in tensors if leaf is value and leaf.shape[-1] == places), 0)


def _is_whole(value: Any, rows: int) -> bool:
    """Whether tensors of an argument have another first size than rows have."""
    sizes = [leaf.shape[0] for leaf in flatten(value)[0] if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    return bool(sizes) and not {1, rows} & set(sizes)


def _is_mask(value: Any) -> bool:
    """Whether it is a mask [rows, places] of rows that are filled up at their end."""
    if not isinstance(value, torch.Tensor) or value.dim() != 2 or min(value.shape) < 2:
        return False
    has = value != 0
    return bool(((value == 1) == has).all() and has[:, 0].all() and (has[:, :-1] >= has[:, 1:]).all() and not has.all())
