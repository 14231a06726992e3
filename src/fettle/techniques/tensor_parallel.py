"""Tensor parallelism for inference: every rank sees the same rows and holds a slice of each large matrix.

A step of decoding reads all weights once for a token or a few; so many devices read them in a part of the time, for two
sums over the ranks in each block. The scores of a language model are computed slice by slice too. All ranks then hold
the same scores and choose the same tokens, and nothing else has to be sent.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from fettle.techniques._base import Bundle, Code, Facts, Level, Recipe, Technique, register
from fettle.techniques._ranks import fewer_heads, is_named, join_ranks
from fettle.techniques.parallel import listed
from fettle.techniques.precision import computes_in_bf16


def linear_of(weight: torch.Tensor, bias: Any) -> torch.nn.Linear:
    """A linear layer with these tensors."""
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = torch.nn.Parameter(bias, requires_grad=False)
    return layer


class Slice(torch.nn.Module):
    """A linear layer of which the rank has a slice."""

    def __init__(self, weight: torch.Tensor, bias: Any) -> None:
        super().__init__()
        self.own = linear_of(weight, bias)

    @property
    def weight(self) -> torch.Tensor:
        """The rank's slice, for a model that looks at it."""
        return self.own.weight


class AddedUp(Slice):
    """A linear layer of which the rank has the columns [out, part of in]: the products of all ranks are added up."""

    def __init__(self, weight: torch.Tensor, bias: Any) -> None:
        super().__init__(weight, None)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import torch.distributed as dist

        found: torch.Tensor = self.own(x).detach()
        dist.all_reduce(found)
        return found if self.bias is None else found + self.bias


class SideBySide(Slice):
    """A linear layer of which the rank has the rows [part of out, in]: what all ranks give is put side by side."""

    def __init__(self, weight: torch.Tensor, bias: Any, ranks: int) -> None:
        super().__init__(weight, bias)
        self.ranks = ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import torch.distributed as dist

        own = self.own(x).detach().contiguous()
        every = own.new_empty(self.ranks * len(own), *own.shape[1:])
        dist.all_gather_into_tensor(every, own)
        return torch.cat(every.chunk(self.ranks), -1)


def split_over_ranks(
    model: torch.nn.Module, columns: tuple[str, ...], rows: tuple[str, ...], rank: int, ranks: int
) -> None:
    """Keep this rank's slice of each linear layer, in place: of those named in `columns` its outputs, of those in
    `rows` its inputs, and of a language model's head its tokens, where the ranks divide them."""
    ask: Any = getattr(model, "get_output_embeddings", None)
    head: Any = ask() if ask is not None else None
    uses = [id(weight) for module in model.modules() for weight in module._parameters.values()]

    def own(tensor: Any, dim: int = 0) -> Any:
        return None if tensor is None else tensor.detach().tensor_split(ranks, dim)[rank].clone()

    for name, parent in list(model.named_modules()):
        children: Any = list(parent.named_children())
        for child, layer in children:
            if type(layer) is not torch.nn.Linear:
                continue
            place = f"{name}.{child}".lstrip(".")
            if is_named(place, columns):
                setattr(parent, child, linear_of(own(layer.weight), own(layer.bias)))
            elif is_named(place, rows):
                bias = None if layer.bias is None else layer.bias.detach()
                setattr(parent, child, AddedUp(own(layer.weight, 1), bias))
            elif layer is head and layer.out_features % ranks == 0:
                tied = uses.count(id(layer.weight)) > 1  # with the embeddings, which stay whole
                part = layer.weight.detach().tensor_split(ranks)[rank]
                setattr(parent, child, SideBySide(part if tied else part.clone(), own(layer.bias), ranks))


@register
class TensorParallel(Technique):
    name = "tensor_parallel"
    order = 480
    title = "tensor parallelism"
    default = "off"
    rung = 4
    remarks: ClassVar[Mapping[str, str]] = {
        "on": "It runs on several ranks that all get the same calls: start your program with torchrun, "
        "--nproc-per-node as many as it was tuned for."
    }

    def levels(self, facts: Facts) -> list[Level]:
        alone = "" if facts.ranks > 1 else "there is one rank: give `nproc`, or start it with torchrun"
        why_not = alone or facts.tensor.why_not_over(facts.ranks)
        return [
            Level("off", "one process, as given"),
            Level("on", "each rank holds a slice of the large matrices", why_not),
        ]

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        alone = recipe.levels.get("runtime", "torch") == "torch"
        return "" if alone else "another runtime has the whole model in one process"

    def uses_ranks(self, level: str) -> bool:
        return level == "on"

    def bundles(self, facts: Facts) -> list[Bundle]:
        half = {"precision": "bf16"} if computes_in_bf16(facts) else {}
        static = {"kv_cache": "static-compiled"} if facts.keeps == "static" else {}
        found = [Bundle(25, {"tensor_parallel": "on", **half})]
        return [*found, Bundle(45, {"tensor_parallel": "on", **half, **static})] if static else found

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        plan = facts.tensor
        lines = [
            f'rank, ranks = join_ranks("{facts.device}")',
            *listed("columns", plan.columns),
            *listed("rows", plan.rows),
            "split_over_ranks(model, columns, rows, rank, ranks)",
        ]
        if plan.attentions:
            lines += [*listed("attentions", plan.attentions), "fewer_heads(model, attentions, ranks)"]
        # Each rank's threads would take all cores, and wait for each other's.
        each = max(1, facts.physical_cores // max(1, facts.ranks))
        return Code(
            environment={"OMP_NUM_THREADS": str(each)} if facts.device == "cpu" else {},
            helpers=(join_ranks, is_named, linear_of, Slice, AddedUp, SideBySide, split_over_ranks,
                     *((fewer_heads,) if plan.attentions else ())),
            prepare=tuple(lines),
        )  # fmt: skip
