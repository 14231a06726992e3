"""What products cost, and how near they come to what the device can do: FLOPs and bytes from recorded shapes.

A product of (m, k) and (k, n) takes 2mkn FLOPs; a convolution is the product of its patches and its weight; attention
is two products, and five in its backward (Dao 2022, arXiv:2205.14135, B.4), counted as if nothing were masked. Bytes
are those of the operands and the result, each moved once: the least that is possible. Of FLOPs, bytes and time follow
the rate, the intensity, and with a device's limits its roofline (Williams, Waterman, Patterson 2009).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from math import prod
from typing import Any

import numpy as np
import polars as pl

from fettle.trace.analyses.ancestry import in_no_other
from fettle.trace.analyses.operators import device_time, parent_among
from fettle.trace.io.arguments import operator_inputs
from fettle.trace.kinds import Kind, dtype_bytes
from fettle.trace.model import Trace

Shape = Sequence[int]


@dataclass(frozen=True)
class Limits:
    """What a device can do at most: 10**12 FLOP/s by the width of its operands in bytes, and 10**9 bytes/s."""

    tflop_per_s: dict[int, float]
    gb_per_s: float


# Dense matrix units (for 4 bytes TF32 or its like) and memory, from the vendors' data sheets. The first that is part of
# a device's name counts.
DATA_SHEETS = {
    "V100-PCIE": Limits({2: 112.0, 4: 14.0}, 900.0),
    "V100": Limits({2: 125.0, 4: 15.7}, 900.0),
    "A100-SXM4-40GB": Limits({1: 624.0, 2: 312.0, 4: 156.0}, 1555.0),
    "A100-PCIE-40GB": Limits({1: 624.0, 2: 312.0, 4: 156.0}, 1555.0),
    "A100 80GB PCIe": Limits({1: 624.0, 2: 312.0, 4: 156.0}, 1935.0),
    "A100": Limits({1: 624.0, 2: 312.0, 4: 156.0}, 2039.0),
    "H100 PCIe": Limits({1: 1513.0, 2: 756.0, 4: 378.0}, 2000.0),
    "H100 NVL": Limits({1: 1671.0, 2: 835.0, 4: 417.0}, 3900.0),
    "H100": Limits({1: 1979.0, 2: 989.0, 4: 494.0}, 3350.0),
    "GH200": Limits({1: 1979.0, 2: 989.0, 4: 494.0}, 4000.0),
    "H200": Limits({1: 1979.0, 2: 989.0, 4: 494.0}, 4800.0),
    "MI210": Limits({1: 181.0, 2: 181.0, 4: 45.3}, 1638.0),
    "MI300X": Limits({1: 2615.0, 2: 1307.0, 4: 653.7}, 5300.0),
}


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
_MOST = 1 << 60
"""More FLOPs or elements no call has: a shape that says so is damaged."""
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


def limits_of(trace: Trace) -> Limits | None:
    """Limits of the trace's device, where its name is one of `DATA_SHEETS`."""
    devices = trace.metadata.get("deviceProperties")
    first = devices[0] if isinstance(devices, list) and devices else None
    name = str(first.get("name", "")) if isinstance(first, dict) else ""
    return next((limits for part, limits in DATA_SHEETS.items() if part in name), None)


def product_table(trace: Trace, limits: Limits | None = None) -> pl.DataFrame:
    """Matrix products, convolutions and attention by distinct shapes and types of their inputs, longest first.

    Columns: rank, operator, shapes, types, count, batch, m, n, k (of the products), flops and bytes (of one call),
    time_ns (of all calls: of the device work inside them, on the host where there is no device), tflop_per_s,
    gb_per_s (both null without time), intensity (FLOPs a byte); from `limits` (those of the trace's device where None):
    bound (`compute` or `memory`) and roof_share (of the rate that the roofline allows). Calls whose shapes or strides
    were not recorded are left out.
    """
    limits = limits or limits_of(trace) or Limits({}, 0.0)
    rows = in_no_other(trace, (trace.kind == Kind.OPERATOR) & trace.named(OPERATORS.__contains__))
    flags = np.zeros(trace.events.height, dtype=bool)
    flags[rows] = True
    time = device_time(trace, flags, parent_among(trace, flags))[0] if trace.device_keys else trace.dur
    inputs = _inputs(trace)
    groups: dict[tuple[str, int, str, tuple[str, ...]], list[int]] = {}
    for row, name, shapes in zip(rows.tolist(), trace.name_of(rows), trace.column("shape")[rows].tolist(), strict=True):
        groups.setdefault((name, shapes, *inputs.get(row, ("", ()))), []).append(row)
    costs = []
    for (name, shapes, types, values), calls in groups.items():
        cost = _cost(name, trace.shapes[shapes], values)
        if cost is not None:
            # Of the first operand: what else there is may be the scales of one, a seed, a sum in higher precision.
            width = dtype_bytes(types.split(", ")[0])
            key = (trace.rank, name, trace.shapes[shapes], types, len(calls), cost.batch, cost.m, cost.n, cost.k)
            costs.append((*key, cost.flops, width and width * cost.elements, int(time[calls].sum()), width))
    texts, numbers = ("operator", "shapes", "types"), ("count", "batch", "m", "n", "k", "flops", "bytes", "time_ns")
    schema = {"rank": pl.Int64(), **dict.fromkeys(texts, pl.String()), **dict.fromkeys((*numbers, "width"), pl.Int64())}
    timed = pl.when(pl.col("time_ns") > 0)
    reachable = pl.min_horizontal("most", pl.col("intensity") * limits.gb_per_s / 1e3)
    known = pl.when(pl.col("most").is_not_null() & pl.col("intensity").is_not_null())
    table = pl.DataFrame(costs, schema=schema, orient="row").with_columns(
        tflop_per_s=timed.then(pl.col("flops") * pl.col("count") / pl.col("time_ns") / 1e3),
        gb_per_s=timed.then(pl.col("bytes") * pl.col("count") / pl.col("time_ns")),
        intensity=pl.col("flops") / pl.col("bytes"),
        most=pl.col("width").replace_strict(limits.tflop_per_s, default=None, return_dtype=pl.Float64()),
    )
    table = table.with_columns(
        bound=known.then(pl.when(reachable < pl.col("most")).then(pl.lit("memory")).otherwise(pl.lit("compute"))),
        roof_share=pl.when(pl.col("flops") > 0).then(known.then(pl.col("tflop_per_s") / reachable)),
    )
    order = ("time_ns", "operator", "shapes", "types")
    first = ("rank", "operator", "count", "time_ns", "tflop_per_s", "roof_share", "bound", "batch", "m", "n", "k")
    shown = table.select(*first, pl.exclude(*first, "width", "most"))
    return shown.sort(order, descending=[True, False, False, False])


def _inputs(trace: Trace) -> dict[int, tuple[str, tuple[str, ...]]]:
    """By row: the types of a call's tensors, and the values of its other inputs."""
    by_row: dict[int, tuple[str, tuple[str, ...]]] = {}
    for name, text in operator_inputs(trace, OPERATORS & set(trace.names)).items():
        rows = np.flatnonzero(trace.column("name") == trace.names.index(name))
        if len(rows) == len(text):  # else part of the file could not be read, and which calls these are is not known
            for row, (types, values) in zip(rows.tolist(), text, strict=True):
                by_row[row] = ", ".join(dict.fromkeys(t for t in types if dtype_bytes(t))), values
    return by_row


def _cost(operator: str, shapes: str, values: Sequence[str]) -> Cost | None:
    try:
        recorded = json.loads(shapes or "[]")
    except (ValueError, RecursionError):
        return None
    cost = call_cost(operator, recorded, values) if isinstance(recorded, list) else None
    return cost if cost is not None and max(astuple(cost)) < _MOST else None


def product_summary(table: pl.DataFrame) -> pl.DataFrame:
    """`product_table` by operator.

    Columns: rank, operator, shapes (how many distinct), count, flops (of all calls), time_ns, tflop_per_s, roof_share
    (of the time that the roofline allows in the time taken, over calls that compute something; null without limits).
    Longest first.
    """
    did = (pl.col("time_ns") > 0) & (pl.col("flops") > 0)
    share, spent = pl.col("roof_share").filter(did), pl.col("time_ns").filter(did)
    return (
        table.group_by("rank", "operator")
        .agg(
            shapes=pl.len(),
            count=pl.col("count").sum(),
            flops=(pl.col("flops") * pl.col("count")).sum(),
            time_ns=pl.col("time_ns").sum(),
            roof_share=pl.when(share.null_count() == 0, share.len() > 0).then((share * spent).sum() / spent.sum()),
        )
        .with_columns(tflop_per_s=pl.when(pl.col("time_ns") > 0).then(pl.col("flops") / pl.col("time_ns") / 1e3))
        .select("rank", "operator", "shapes", "count", "flops", "time_ns", "tflop_per_s", "roof_share")
        .sort("time_ns", "operator", descending=[True, False])
    )
