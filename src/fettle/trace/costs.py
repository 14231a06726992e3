"""What one call of a matrix product, a convolution or attention costs, from the shapes and values of its inputs.

A product of (m, k) and (k, n) takes 2mkn FLOPs; a convolution is the product of its patches and its weight; attention
is two products, and five in its backward (Dao 2022, arXiv:2205.14135, B.4), counted as if nothing were masked. Bytes
are those of the operands and the result, each moved once: the least that is possible.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

Shape = Sequence[int]


@dataclass(frozen=True)
class Cost:
    """One call: `batch` products of (m, k) and (k, n), in all `flops`, and the elements of operands and result."""

    batch: int
    m: int
    n: int
    k: int
    flops: int
    elements: int


def matrix_cost(a: Shape, b: Shape) -> Cost | None:
    """Cost of a matrix product, batched or with vectors; None where the shapes do not fit."""
    if not a or not b:
        return None
    m, k = (a[-2] if len(a) > 1 else 1), a[-1]
    inner, n = (b[-2], b[-1]) if len(b) > 1 else (b[0], 1)
    if inner != k or a[:-2] != b[:-2]:
        return None
    batch = prod(a[:-2])
    return Cost(batch, m, n, k, 2 * batch * m * n * k, batch * (m * k + k * n + m * n))


def convolution_cost(data: Shape, weight: Shape, result: Shape, groups: int, transposed: bool = False) -> Cost | None:
    """Cost of a convolution, from the shapes of its operands and its result."""
    if len(data) < 3 or groups < 1 or not len(data) == len(weight) == len(result):
        return None
    space = data[2:] if transposed else result[2:]
    m, n, k = data[0] * prod(space), weight[0] // groups, prod(weight[1:])
    return Cost(groups, m, n, k, 2 * groups * m * n * k, prod(data) + prod(weight) + prod(result))


def attention_cost(q: Shape, k: Shape, v: Shape, products: int = 2) -> Cost | None:
    """Cost of attention over (batch, heads, length, width); its backward has five products, and moves twice as much."""
    if len(q) != 4 or len(k) != 4 or len(v) != 4:
        return None
    batch = q[0] * q[1]
    flops = products * batch * q[2] * k[2] * (q[3] + v[3])
    elements = prod(q) + prod(k) + prod(v) + batch * q[2] * v[3]
    return Cost(batch, q[2], k[2], q[3], flops, products // 2 * elements)


_MATRIX = {
    "aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::mv": (0, 1), "aten::_int_mm": (0, 1), "aten::_scaled_mm": (0, 1),
}  # fmt: skip
_ADDED = frozenset(("aten::addmm", "aten::baddbmm", "aten::addmv", "aten::_addmm_activation"))
"""Products to whose result the first operand is added."""
_TRANSPOSED = frozenset(("aiter::gemm_a16w16", "vllm::rocm_unquantized_gemm"))
"""Products with a weight of (n, k), as serving engines name their own."""
_ATTENTION = {
    f"aten::_scaled_dot_product_{kind}{backward}": (1, 5) if backward else (0, 2)
    for kind in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    for backward in ("", "_backward")
}
OPERATORS = frozenset((*_MATRIX, *_ADDED, *_TRANSPOSED, *_ATTENTION, "aten::convolution", "aten::convolution_backward"))


def call_cost(operator: str, shapes: Sequence[Any], values: Sequence[str]) -> Cost | None:
    """Cost of one call, from the shapes of its inputs and the values of the others; None where they do not say."""

    def shape(at: int) -> Shape:
        sizes = shapes[at] if at < len(shapes) and isinstance(shapes[at], list) else []
        return sizes if all(isinstance(size, int) and 0 <= size < 2**40 for size in sizes) else []

    def value(at: int) -> Any:
        try:
            return json.loads(values[at].lower())
        except (IndexError, ValueError, RecursionError):
            return None

    def numbers(at: int) -> list[int]:
        found = value(at)
        return found if isinstance(found, list) and all(isinstance(one, int) for one in found) else []

    if operator in _MATRIX:
        return matrix_cost(*map(shape, _MATRIX[operator]))
    if operator in _ADDED:
        cost = matrix_cost(shape(1), shape(2))
        return cost and replace(cost, elements=cost.elements + prod(shape(0)))
    if operator in _TRANSPOSED:
        return matrix_cost(shape(0), shape(1)[::-1])
    if operator in _ATTENTION:
        first, products = _ATTENTION[operator]
        return attention_cost(shape(first), shape(first + 1), shape(first + 2), products)
    if operator == "aten::convolution_backward":
        transposed, groups, wanted = value(7), value(9), numbers(10)
        if not isinstance(groups, int):
            return None
        cost = convolution_cost(shape(1), shape(2), shape(0), groups, bool(transposed))
        times = sum(wanted[:2]) if len(wanted) == 3 else 2
        return cost and Cost(cost.batch, cost.m, cost.n, cost.k, times * cost.flops, times * cost.elements)
    stride, padding, dilation = map(numbers, (3, 4, 5))
    transposed, groups, data, weight = value(6), value(8), shape(0), shape(1)
    if not (isinstance(groups, int) and stride and padding and dilation):
        return None
    wide = len(data) - 2
    stride, padding, dilation = (v * wide if len(v) == 1 else v for v in (stride, padding, dilation))
    sizes = zip(data[2:], weight[2:], stride, padding, dilation, strict=False)
    if transposed:
        more = numbers(7) or [0]
        more = more * wide if len(more) == 1 else more
        space = [
            max((i - 1) * s - 2 * p + d * (w - 1) + 1 + o, 0) for (i, w, s, p, d), o in zip(sizes, more, strict=False)
        ]
        return convolution_cost(data, weight, [*data[:1], groups * prod(weight[1:2]), *space], groups, transposed=True)
    space = [max((i + 2 * p - d * (w - 1) - 1) // s + 1, 0) if s > 0 else 0 for i, w, s, p, d in sizes]
    return convolution_cost(data, weight, [*data[:1], *weight[:1], *space], groups)
