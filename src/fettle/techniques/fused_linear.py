"""Linear layers that are given the same tensor (queries, keys and values, both halves of a gated MLP) as one product.

Which they are is seen while the model runs, whatever their names. At run time, too, each looks whether it is given the
very tensor that the product was computed of: where it is another one, the product is computed again.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from fettle.techniques._base import Code, Facts, Level, Recipe, Technique, register
from fettle.techniques._ranks import is_named
from fettle.techniques._tensor import patterns
from fettle.techniques.runtime import computes_in_torch
from fettle.techniques.tensor_parallel import linear_of


def is_plain(layer: Any) -> bool:
    """Whether it is torch's linear layer with plain weights, and nobody has added something to its forward pass."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    plain = type(layer) is torch.nn.Linear and type(layer.weight) is torch.nn.Parameter and "forward" not in vars(layer)
    return plain and not any(getattr(layer, name) for name in hooks)


class FusedSibling(torch.nn.Module):
    """One of several linear layers that are given the same tensor. The first has the weights of all, one below the
    other, as `fused`. Whichever is called first computes the product, and the others take their columns of it."""

    first: Any
    fused: Any

    def __init__(self, layer: Any, start: int, first: Any) -> None:
        super().__init__()
        self.in_features, self.out_features, self.start = layer.in_features, layer.out_features, start
        self.has_bias, self.is_last = layer.bias is not None, False
        self.kept: Any = None
        self.training = layer.training
        vars(self)["first"] = first or self  # no submodule, whose weights would be there twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.first.kept
        if kept is None or kept[0] is not x:
            kept = (x, self.first.fused(x))
            if not self.is_last:
                self.first.kept = kept
        if self.is_last:
            self.first.kept = None
        found: torch.Tensor = kept[1].narrow(-1, self.start, self.out_features)
        return found

    @property
    def weight(self) -> torch.Tensor:
        """Its own rows, for a model that looks at them itself."""
        rows: torch.Tensor = self.first.fused.weight[self.start : self.start + self.out_features]
        return rows

    @property
    def bias(self) -> torch.Tensor | None:
        """Its own part, likewise."""
        return self.first.fused.bias[self.start : self.start + self.out_features] if self.has_bias else None


def fuse_linear(model: torch.nn.Module, groups: Any) -> None:
    """Fuse linear layers that are given the same tensor. Each group is the name of their parent, where a star stands
    for any part, and their own in the order in which they are called."""
    import logging

    fused, patterns = 0, tuple(pattern for pattern, *_ in groups)
    # Only parents are held, so that a layer's old weights are freed as soon as it is fused.
    for name, parent in [one for one in model.named_modules() if is_named(one[0], patterns)]:
        for pattern, *names in groups:
            layers: list[Any] = [getattr(parent, child, None) for child in names]
            if not is_named(name, (pattern,)) or not all(map(is_plain, layers)):
                continue
            first: Any = None
            start, some_bias = 0, any(layer.bias is not None for layer in layers)
            weight = torch.cat([layer.weight.detach() for layer in layers])
            biases = [weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias for layer in layers]
            for child, layer in zip(names, layers, strict=True):
                sibling = FusedSibling(layer, start, first)
                first, start = first or sibling, start + layer.out_features
                setattr(parent, child, sibling)
            first.fused = linear_of(weight, torch.cat(biases).detach() if some_bias else None)
            sibling.is_last, fused = True, fused + len(names)
    if not fused:
        raise RuntimeError("fused linear layers: found none of those that were given the same tensor")
    logging.getLogger("optimized").info("fused linear layers: %d", fused)


@contextlib.contextmanager
def fed_alike(model: torch.nn.Module) -> Iterator[list[tuple[str, ...]]]:
    """A list that holds, after calls of the model within the context, groups of linear layers as `fuse_linear` takes
    them: layers of one parent that are called one right after the other, each time with the same tensor."""
    named = dict(model.named_modules(remove_duplicate=False))
    uses = Counter(id(parameter) for module in named.values() for parameter in module._parameters.values())
    given: dict[Any, list[int]] = {}  # by layer, in the order of first calls: a number for each tensor
    last: Any = None, 0, 0  # a tensor, how often it was written into, its number
    found: list[tuple[str, ...]] = []

    def note(layer: torch.nn.Module, args: Any) -> None:
        nonlocal last
        x = args[0] if args else None
        version = 0 if x is None or x.is_inference() else x._version
        if x is None or x is not last[0] or version != last[1]:
            last = x, version, last[2] + 1
        given.setdefault(layer, []).append(last[2])

    with contextlib.ExitStack() as hooks:
        compiled = any("_orig_mod" in one._modules or one._compiled_call_impl for one in named.values())
        for layer in () if compiled else named.values():
            if is_plain(layer) and all(uses[id(one)] == 1 for one in layer.parameters()):
                hooks.enter_context(layer.register_forward_pre_hook(note))
        yield found
    places = {module: name.rpartition(".") for name, module in named.items() if module in given}
    groups = defaultdict(list)
    for layer, tensors in given.items():
        groups[places[layer][0], tuple(tensors), layer.weight.dtype, layer.weight.device].append(places[layer][2])
    firsts = defaultdict(list)
    for (parent, *_), children in groups.items():
        if len(children) > 1:
            firsts[tuple(children)].append(f"{parent}.{children[0]}".lstrip("."))
    for group, names in firsts.items():
        found += [(name.rpartition(".")[0], *group) for name in patterns(names, named)]


@register
class FusedLinear(Technique):
    name = "fused_linear"
    order = 490
    rung = 4
    title = "fused linear layers"
    default = "off"
    of_module = True
    before_export = True

    def levels(self, facts: Facts) -> list[Level]:
        why_not = "" if facts.fed_alike else "no linear layers were found that are given the same tensor"
        if facts.device == "cpu":
            why_not = why_not or "it is for GPUs: on a CPU several products take no longer than one"
        summary = "linear layers that are given the same tensor, as queries, keys and values are, become one product"
        return [Level("off", "as given"), Level("on", summary, why_not)]

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        if not computes_in_torch(recipe):
            return "another runtime has its own products"
        if recipe.levels.get("sparsity") == "2:4-mlp":
            return "sparsity=2:4-mlp knows MLPs by the sizes of their layers"
        return ""

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        return Code(helpers=FUSED, prepare=fused(facts))


FUSED = (is_named, is_plain, linear_of, FusedSibling, fuse_linear)
"""What `fused` needs in a file of its own."""


def fused(facts: Facts) -> tuple[str, ...]:
    """The lines that fuse what was found to be given the same tensors."""
    return ("fuse_linear(model, [", *(f"    {group!r}," for group in facts.fed_alike), "])")
