"""A loaded program as a function of tensors, with its weights laid out as they are read fastest."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fettle.kernels import block_products, packed_blocks
from fettle.package.program import drop_unused, size_check

_LARGE = 1 << 16
"""Elements of a matrix whose layout matters."""
_TWICE_BYTES = 512 << 20
"""Most bytes of matrices that are held in both layouts."""


@dataclass(frozen=True)
class Blocks:
    """In how many bits linear layers hold their weights."""

    bits: int
    only: tuple[str, ...] = ()
    """Names of the layers that have them, as in the model that was packaged: the others have 8. Where there are none,
    all do, but of 4 bits the largest, a language model's head, which has 8."""

    def among(self, layers: Mapping[str, int]) -> set[str]:
        """Those that have them of all `layers`, sizes by names. A program's names are the model's after one beginning,
        so that of those that end alike the shortest is meant."""
        if not self.only:
            largest = max(layers.values(), default=0)
            return {layer for layer, size in layers.items() if size < largest}
        ends = [[layer for layer in layers if f".{layer}".endswith(f".{name}")] for name in self.only]
        return {min(alike, key=len) for alike in ends if alike}


class Function:
    """A program's graph, called with tensors."""

    def __init__(self, bare: torch.fx.GraphModule, check: Callable[[tuple[torch.Tensor, ...]], None]) -> None:
        self._bare, self._check, self._forward = bare, check, _forward(bare)
        self._parts: dict[tuple[int, ...], Callable[..., Any]] = {}

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """All outputs."""
        self._check(tensors)
        return self._forward(*tensors)

    def part(self, tensors: Sequence[torch.Tensor], outputs: tuple[int, ...]) -> Any:
        """Some of the outputs: nothing is computed that they do not need."""
        self._check(tuple(tensors))
        if outputs not in self._parts:
            self._parts[outputs] = _forward(_only(self._bare, outputs))
        return self._parts[outputs](*tensors)


def as_function(module: torch.nn.Module, blocks: Blocks | None = None) -> Function | torch.nn.Module:
    """A loaded program as a function, without what torch puts around its operators: most of a tiny model's call.

    Its tensors come and go as they are, its weights are at hand, and it looks at its inputs only where their shapes are
    new. On a CPU the large matrices of float32 are laid out once as oneDNN reads them, some with the given one kept
    beside (`_laid_out`), or are held in `blocks` (`_in_blocks`). A program with graphs inside of its graph stays what
    it is; else the module's weights are the function's, and it cannot run again. ImportError where `blocks` cannot be
    had here.
    """
    found = _graph_and_weights(module)
    if found is None:
        return module
    graph, weights = found
    if blocks is not None:
        _in_blocks(graph, weights, blocks)
    _laid_out(graph, weights)
    return Function(_with_weights(module, graph, weights), size_check(module))


def _forward(bare: torch.fx.GraphModule) -> Callable[..., Any]:
    """What it computes, with its tensors found at once: `torch.nn.Module` looks for them where Python found nothing."""
    vars(bare).update({**bare._parameters, **bare._buffers})
    return bare.forward


def _only(bare: torch.fx.GraphModule, outputs: Sequence[int]) -> torch.fx.GraphModule:
    """A graph with the same inputs and weights, and some of the outputs only."""
    graph = torch.fx.Graph()
    found: Any = graph.graph_copy(bare.graph, {})
    graph.output(tuple(found[place] for place in outputs))
    drop_unused(graph)
    return torch.fx.GraphModule(bare, graph)


def in_blocks(module: torch.nn.Module, blocks: Blocks) -> torch.nn.Module:
    """A loaded program, to be compiled, whose linear layers hold their weights in blocks (`_in_blocks`).

    ValueError for a program with graphs inside of its graph, ImportError where it cannot be had here.
    """
    found = _graph_and_weights(module)
    if found is None:
        raise ValueError("the program has graphs inside of its graph")
    _in_blocks(*found, blocks)
    return _with_weights(module, *found)


def _graph_and_weights(module: torch.nn.Module) -> tuple[torch.fx.Graph, dict[str, torch.Tensor]] | None:
    """A copy of a program's graph, and its weights by the names in it; None where it has graphs inside of it."""
    graph, weights = torch.fx.Graph(), dict[str, torch.Tensor]()
    graph.output(graph.graph_copy(module.graph, {}))  # type: ignore[arg-type]
    for node in graph.nodes:
        if node.op == "get_attr":
            value = operator.attrgetter(node.target)(module)
            if not isinstance(value, torch.Tensor):
                return None
            node.meta["layer"] = node.target.rpartition(".")[0]
            node.target = f"weight_{len(weights)}"
            weights[node.target] = value
        elif node.op not in ("placeholder", "call_function", "output"):
            return None
    drop_unused(graph)
    return graph, weights


def _with_weights(
    module: torch.nn.Module, graph: torch.fx.Graph, weights: dict[str, torch.Tensor]
) -> torch.fx.GraphModule:
    """The graph with those weights that it reads; what was laid out anew `module` does not hold a second time."""
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    used = dict.fromkeys(node.target for node in graph.nodes if node.op == "get_attr")
    for part in module.modules():
        part._parameters.clear()
    return torch.fx.GraphModule({name: weights[name] for name in used}, graph)


def _linear_layers(
    graph: torch.fx.Graph, weights: Mapping[str, torch.Tensor]
) -> Iterator[tuple[torch.fx.Node, int, torch.Tensor, Any]]:
    """Linear layers of float32 on the CPU: the node, which argument it reads (the next is its weight), its matrix
    [out, in] and its bias."""
    for node in list(graph.nodes):
        if node.kwargs:
            continue
        if node.target is torch.ops.aten.linear.default:
            place, (_, weight, bias) = 0, (*node.args, None)[:3]
        elif node.target is torch.ops.aten.addmm.default:  # how GPT-2 writes it
            place, (bias, _, weight) = 1, node.args
        else:
            continue
        matrix = weights.get(weight.target) if weight.op == "get_attr" else None
        if matrix is None or matrix.dtype != torch.float32 or matrix.device.type != "cpu" or matrix.dim() != 2:
            continue
        if bias is None or (bias.op == "get_attr" and weights[bias.target].dim() == 1):
            yield node, place, matrix.detach().t() if place else matrix.detach(), bias


def linear_by_rows(x: torch.Tensor, matrix: torch.Tensor, laid_out: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """A linear layer that has its matrix in both layouts: one row reads it as it was given."""
    if x.numel() == x.shape[-1]:
        return torch.nn.functional.linear(x, matrix, bias)
    return torch.ops.mkldnn._linear_pointwise(x, laid_out, bias, "none", [], "")


def _laid_out(graph: torch.fx.Graph, weights: dict[str, torch.Tensor]) -> None:
    """Let linear layers read their weights in oneDNN's own order, which is made once instead of in each call.

    With 1 to 64 rows it takes 0.4 to 0.7 of the time (a language model's layers, AMD EPYC with AVX-512). On one thread
    without AVX-512 a single row takes 1.3 to 1.8 times as long, so that the matrix as given stays beside it there, up
    to `_TWICE_BYTES` of them; 2 to 16 rows take 0.4 to 0.9 of the time.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call,unused-ignore]
        return
    twice = _TWICE_BYTES if torch.get_num_threads() == 1 and _has_avx2_alone() else 0
    names: dict[Any, str] = {}
    for node, place, matrix, bias in _linear_layers(graph, weights):
        if matrix.numel() < _LARGE:
            continue
        name = names.setdefault((matrix.data_ptr(), matrix.shape, matrix.stride()), f"laid_out_{len(names)}")
        if name not in weights:
            weights[name] = torch.ops.mkldnn._reorder_linear_weight(matrix.contiguous(), None)
            twice -= matrix.nbytes
        with graph.inserting_before(node):
            laid_out = graph.get_attr(name)
            if twice >= 0:
                weights[f"matrix_of_{name}"] = matrix
                own = graph.get_attr(f"matrix_of_{name}")
                call = graph.call_function(linear_by_rows, (node.args[place], own, laid_out, bias))
            else:
                call = graph.call_function(
                    torch.ops.mkldnn._linear_pointwise.default, (node.args[place], laid_out, bias, "none", [], "")
                )
        node.replace_all_uses_with(call)
        graph.erase_node(node)


def _has_avx2_alone() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def _in_blocks(graph: torch.fx.Graph, weights: dict[str, torch.Tensor], blocks: Blocks) -> None:
    """Hold the weights of linear layers in blocks. Those in as many bits that read the same are one product."""
    block_products()
    beside: dict[Any, list[tuple[torch.fx.Node, int, torch.Tensor, Any]]] = {}
    linear = [layer for layer in _linear_layers(graph, weights) if layer[2].shape[1] % 32 == 0]
    names = {node: node.all_input_nodes[place + 1].meta["layer"] for node, place, *_ in linear}
    chosen = blocks.among({names[node]: matrix.numel() for node, _, matrix, _ in linear})
    for node, place, matrix, bias in linear:
        bits = blocks.bits if names[node] in chosen else 8
        # One whose outputs are no sixteens cannot stand before another.
        alike = (bits, node.args[place], len(matrix) % 16 and node)
        beside.setdefault(alike, []).append((node, place, matrix, bias))
    for number, ((bits, *_), layers) in enumerate(beside.items()):
        parts = [packed_blocks(matrix, bits) for _, _, matrix, _ in layers]
        both = [f"packed_{number}", f"scales_{number}"]
        weights |= zip(both, (torch.cat(part) for part in zip(*parts, strict=True)), strict=True)
        (first, place, *_), begin = layers[0], 0
        with graph.inserting_before(first):
            held = [graph.get_attr(name) for name in both]
            size = sum(len(matrix) for _, _, matrix, _ in layers)
            joint = graph.call_function(block_product, (first.args[place], *held, size))
        for node, _, matrix, bias in layers:
            with graph.inserting_before(node):
                part: Any = (Ellipsis, slice(begin, begin + len(matrix)))
                own = graph.call_function(operator.getitem, (joint, part)) if len(layers) > 1 else joint
                own = own if bias is None else graph.call_function(operator.add, (own, bias))
            node.replace_all_uses_with(own)
            graph.erase_node(node)
            begin += len(matrix)


def block_product(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, size: int) -> torch.Tensor:
    """The product of x [..., in] with weights in blocks: [..., size]."""
    found = torch.ops.block_products.multiply(x.reshape(-1, x.shape[-1]), packed, scales, size)
    return found.reshape(*x.shape[:-1], size)  # type: ignore[no-any-return]
