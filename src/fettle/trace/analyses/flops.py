"""How near products come to what the device can do: FLOPs and bytes of recorded shapes (`costs`) over their time.

Of FLOPs, bytes and time follow the rate, the intensity, and with a device's limits its roofline (Williams, Waterman,
Patterson 2009).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cache

import msgspec
import numpy as np
import polars as pl

from fettle.trace.analyses.ancestry import in_no_other
from fettle.trace.analyses.operators import device_time, parent_among
from fettle.trace.costs import OPERATORS, Cost, call_cost
from fettle.trace.kinds import Kind, dtype_bytes
from fettle.trace.model import Trace

_MOST = 1 << 58
"""More FLOPs or elements no call has: a shape that says so is damaged."""
_decode_texts = msgspec.json.Decoder(tuple[str, ...]).decode


@dataclass(frozen=True)
class Limits:
    """What a device can do at most: 10**12 FLOP/s by the width of its operands in bytes, and 10**9 bytes/s."""

    tflop_per_s: dict[int, float]
    gb_per_s: float


# Dense matrix units (for 4 bytes TF32 or its like) and memory, from the vendors' data sheets. The first that stands in
# a device's name as words of their own counts: an RTX A1000 is no A100.
DATA_SHEETS = {
    "V100-PCIE": Limits({2: 112.0, 4: 14.0}, 900.0),
    "V100S-PCIE": Limits({2: 130.0, 4: 16.4}, 1134.0),
    "V100": Limits({2: 125.0, 4: 15.7}, 900.0),
    "A100-SXM4-40GB": Limits({1: 624.0, 2: 312.0, 4: 156.0}, 1555.0),
    "A100-PCIE-40GB": Limits({1: 624.0, 2: 312.0, 4: 156.0}, 1555.0),
    "A100 80GB PCIe": Limits({1: 624.0, 2: 312.0, 4: 156.0}, 1935.0),
    "A100": Limits({1: 624.0, 2: 312.0, 4: 156.0}, 2039.0),
    "H100 PCIe": Limits({1: 1513.0, 2: 756.0, 4: 378.0}, 2000.0),
    "H100 NVL": Limits({1: 1671.0, 2: 835.0, 4: 417.0}, 3900.0),
    "H100": Limits({1: 1979.0, 2: 989.0, 4: 494.0}, 3350.0),
    "GH200 144G": Limits({1: 1979.0, 2: 989.0, 4: 494.0}, 4900.0),
    "GH200": Limits({1: 1979.0, 2: 989.0, 4: 494.0}, 4000.0),
    "H200 NVL": Limits({1: 1671.0, 2: 835.0, 4: 417.0}, 4800.0),
    "H200": Limits({1: 1979.0, 2: 989.0, 4: 494.0}, 4800.0),
    "MI210": Limits({1: 181.0, 2: 181.0, 4: 45.3}, 1638.0),
    "MI300X": Limits({1: 2615.0, 2: 1307.0, 4: 653.7}, 5300.0),
}


def limits_of(trace: Trace) -> Limits | None:
    """Limits of the trace's device, where its name is one of `DATA_SHEETS`; of a part of one (MIG) none are known."""
    devices = trace.metadata.get("deviceProperties")
    first = devices[0] if isinstance(devices, list) and devices else None
    name = str(first.get("name", "")) if isinstance(first, dict) else ""
    known = (limits for part, limits in DATA_SHEETS.items() if re.search(rf"\b{part}\b", name))
    return None if " MIG " in name else next(known, None)


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
    texts = cache(_texts)  # there are few distinct ones
    told = trace.side["products"].iter_rows()
    return {
        row: (", ".join(dict.fromkeys(t for t in texts(types) if dtype_bytes(t))), texts(values))
        for row, types, values in told
    }


def _texts(recorded: str) -> tuple[str, ...]:
    """A list of texts as JSON; empty where it is none."""
    try:
        return _decode_texts(recorded or "[]")
    except (ValueError, RecursionError):
        return ()


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
