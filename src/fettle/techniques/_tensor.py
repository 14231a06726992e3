"""Which matrices of a model tensor parallelism can split, and over how many ranks.

A *pair* is matrices split column-wise, what is computed from their outputs slice by slice, and the matrix split
row-wise that adds the slices up: a query, key and value with the output of attention, or both ends of an MLP. A
transformers model says itself which they are; elsewhere they go by their usual names, inside repeated blocks.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fettle.techniques._facts import TensorPlan
from fettle.techniques._ranks import is_named, repeated_blocks

_ATTENTION = (
    (("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj")),
    (("query", "key", "value"), ("o_proj", "out_proj")),
    (("wq", "wk", "wv"), ("wo",)),
)
_MLP: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("gate", "up"), "down"),
    (("up",), "down"),
    (("fc1",), "fc2"),
    (("linear1",), "linear2"),
    (("c_fc",), "c_proj"),
    (("w1", "w3"), "w2"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
)
_STYLES = {"colwise": "column", "rowwise": "row", "replicated_with_grad_allreduce": "per head"}
_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")


@dataclass
class _Pair:
    """Names of the modules of one pair."""

    columns: list[str]
    row: str
    attention: str = ""
    """The module whose heads they are, where it is attention."""
    per_head: list[str] = field(default_factory=list)


def tensor_plan(model: nn.Module) -> TensorPlan:
    """What of `model` can be split; `TensorPlan.why_not` says why nothing can."""
    modules = dict(model.named_modules())
    found = list(_stated(modules)) or list(_by_name(model, modules))
    if not found:
        return TensorPlan(why_not="the model has no pairs of Linear layers that are known by their names to be split")
    uses = Counter(id(p) for module in modules.values() for p in module._parameters.values())
    counts: dict[str, int] = {}
    kept, problem = [], ""
    for pair in found:
        try:
            counts |= _counts(pair, modules, uses)
            kept.append(pair)
        except ValueError as error:
            problem = str(error)
    if not kept:
        return TensorPlan(why_not=problem)
    counted = [pair.attention for pair in kept if pair.attention and _own_count(modules[pair.attention], _HEADS)]
    return TensorPlan(
        columns=patterns([name for pair in kept for name in pair.columns], modules),
        rows=patterns([pair.row for pair in kept], modules),
        per_head=patterns([name for pair in kept for name in pair.per_head], modules),
        attentions=patterns(counted, modules),
        counts=counts,
        why_not="",
    )


def split_bytes(model: nn.Module, plan: TensorPlan) -> tuple[int, int]:
    """Bytes of all parameters that `plan` splits, and of those among them that are trained."""
    whole = trained = 0
    for name, module in model.named_modules():
        is_row = is_named(name, plan.rows)
        if is_row or is_named(name, plan.columns):
            for own, parameter in module.named_parameters():
                size = 0 if is_row and own == "bias" else parameter.numel() * parameter.element_size()
                whole, trained = whole + size, trained + size * parameter.requires_grad
    return whole, trained


def _stated(modules: Mapping[str, nn.Module]) -> Iterator[_Pair]:
    """Pairs of the plans that transformers models have with them, each within one module."""
    styles: dict[str, str] = {}
    for name, module in modules.items():
        plan = getattr(module, "_tp_plan", None)
        if isinstance(plan, Mapping) and hasattr(module, "config"):
            prefix = f"{name}." if name else ""
            known = {f"{prefix}{pattern}": _STYLES[style] for pattern, style in plan.items() if style in _STYLES}
            for pattern, style in known.items():
                styles.update({inner: style for inner in modules if is_named(inner, (pattern,))})
    by_parent: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, style in styles.items():
        if style == "per head" or isinstance(modules[name], nn.Linear):
            by_parent[name.rpartition(".")[0]][style].append(name)
    for parent, members in by_parent.items():
        if members["column"] and len(members["row"]) == 1:
            is_attention = any(re.match("q|k|v", name.rpartition(".")[2]) for name in members["column"])
            yield _Pair(members["column"], members["row"][0], parent if is_attention else "", members["per head"])


def _by_name(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[_Pair]:
    names = {module: name for name, module in modules.items()}
    for block in repeated_blocks(model):
        for inner, module in block.named_modules():
            parent = ".".join(filter(None, (names[block], inner)))
            yield from _within(module, f"{parent}.", modules)


def _within(module: nn.Module, prefix: str, modules: Mapping[str, nn.Module]) -> Iterator[_Pair]:
    """Pairs whose matrices split column-wise are children of `module`."""
    children = {name for name, child in module.named_children() if isinstance(child, nn.Linear)}
    outside = prefix[:-1].rpartition(".")[0] + ".output.dense"  # as BERT has it
    for columns, rows in _ATTENTION:
        row = next((prefix + name for name in rows if name in children), outside)
        if children.issuperset(columns) and isinstance(modules.get(row), nn.Linear):
            names = [prefix + name for name in columns]
            others = {*module.parameters()} - {p for n in (*names, row) for p in modules[n].parameters()}
            if not others:  # they would have to be cut by heads as well
                yield _Pair(names, row, prefix[:-1])
    for ups, down in _MLP:
        if children.issuperset((*ups, down)):
            yield _Pair([prefix + name for name in ups], prefix + down)
            return
    if prefix.endswith("intermediate.") and "dense" in children and isinstance(modules.get(outside), nn.Linear):
        yield _Pair([f"{prefix}dense"], outside)


def _counts(pair: _Pair, modules: Mapping[str, nn.Module], uses: Mapping[int, int]) -> dict[str, int]:
    """What the number of ranks must divide. Raises ValueError where the pair cannot be split."""
    columns: list[Any] = [modules[name] for name in pair.columns]
    row: Any = modules[pair.row]
    if any(uses[id(layer.weight)] > 1 for layer in (*columns, row)):
        raise ValueError("the matrices to split are shared with other layers")
    if not pair.attention:
        if any(layer.out_features != row.in_features for layer in columns):
            raise ValueError("the layers of its MLPs do not fit each other")
        width = row.in_features
        parent = modules[pair.row.rpartition(".")[0]]
        between = [p for child in parent.children() if child not in (*columns, row) for p in child.parameters()]
        if any(width in p.shape for p in between if p.dim() == 1):
            raise ValueError("its MLPs have parameters between their matrices, which would have to be split too")
        return {f"the {width} features inside an MLP": width}
    attention = modules[pair.attention]
    heads, key_heads = _heads(attention, columns)
    if (
        not heads
        or row.in_features % heads
        or any(layer.out_features % math.gcd(heads, key_heads) for layer in columns)
    ):
        raise ValueError("the number of heads of its attention is not known")
    counts = {f"its {heads} attention heads": heads}
    return counts if key_heads == heads else {**counts, f"its {key_heads} heads of keys and values": key_heads}


def _heads(attention: nn.Module, columns: Sequence[nn.Linear]) -> tuple[int, int]:
    """Heads of queries, and of keys and values; 0 where nothing tells."""
    heads, key_heads = _own_count(attention, _HEADS), _own_count(attention, _KEY_HEADS)
    width = _own_count(attention, ("head_dim", "attention_head_size"))
    if not heads and width:
        sizes = [layer.out_features // width for layer in columns]
        return max(sizes), min(sizes)
    config = getattr(attention, "config", None)
    heads = heads or _own_count(config, _HEADS)
    return heads, key_heads or _own_count(config, _KEY_HEADS) or heads


def _own_count(holder: Any, names: Sequence[str]) -> int:
    values = (getattr(holder, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def patterns(names: Sequence[str], modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """`names` with a star for the numbers of blocks, where that means the same modules."""
    chosen: dict[str, list[str]] = defaultdict(list)
    for name in names:
        chosen[_starred(name, modules)].append(name)
    found: list[str] = []
    for pattern, members in chosen.items():
        same = {name for name in modules if is_named(name, (pattern,))} == set(members)
        found += [pattern] if same else members
    return tuple(found)


def _starred(name: str, modules: Mapping[str, nn.Module]) -> str:
    """A name with a star for each number that may be any of its neighbours': torch warns where one has no such
    module."""
    tokens = name.split(".")
    starred = tokens[:]
    for place, token in enumerate(tokens[:-1]):
        before, after = tokens[:place], tokens[place + 1 :]
        beside = [child for child, _ in modules[".".join(before)].named_children()]
        if token.isdigit() and all(".".join([*before, child, *after]) in modules for child in beside):
            starred[place] = "*"
    return ".".join(starred)
