"""Which operator, module and source line a piece of device work belongs to.

It belongs to the innermost operator around its launch. Backward operators are tied to the forward operator with the
same autograd sequence number, whose module and source line they inherit.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import polars as pl

from fettle.trace.analyses.ancestry import LIBRARY, Ancestors, ancestors
from fettle.trace.analyses.launches import launch_rows, launched_work
from fettle.trace.analyses.stacks import host_stacks, nearest
from fettle.trace.analyses.stops import BACKWARD
from fettle.trace.frames import names_of_rows
from fettle.trace.kinds import Kind
from fettle.trace.model import Ints, Trace
from fettle.trace.ordering import last_before


def forward_of_backward(trace: Trace) -> Ints:
    """By event row, the forward operator of a backward one: the last with its number before it; -1 for none."""
    table = trace.side["autograd"].filter(pl.col("sequence") >= 0)
    rows, sequence = table["row"].to_numpy(), table["sequence"].to_numpy()
    backward = trace.named(BACKWARD.search, rows)
    # Of the forward operators with one number, the innermost made the graph node; its outermost carries the same place.
    ahead, behind = rows[~backward], rows[backward]
    partner = np.full(trace.events.height, -1, dtype=np.int64)
    last = last_before(sequence[~backward], trace.ts[ahead], sequence[backward], trace.ts[behind] - 1)
    partner[behind[last >= 0]] = ahead[last[last >= 0]]
    return partner


def attribute_kernels(trace: Trace) -> pl.DataFrame:
    """One row a piece of device work: where it came from.

    Columns: rank, device, row, name, duration_ns, operator, top_operator, shapes (of the innermost operator),
    forward_operator (of backward work), module, line (source file, line and function outside libraries), annotation,
    generated (the file of a generated Triton kernel), launch_row. Null where the trace does not say.
    """
    rows, calls = trace.device_rows, launch_rows(trace)
    up = ancestors(trace)

    def at_call(table: Ints) -> Ints:
        at: Ints = np.append(table, -1)[calls]
        return at

    operator, top = at_call(up.operator), at_call(up.top_operator)
    _by_external_id(trace, rows, operator, top, up)
    forward = _forward_rows(trace, operator)
    module, line = at_call(up.module), at_call(up.line)
    module = np.where(module < 0, np.append(up.module, -1)[forward], module)
    # A backward kernel belongs to the line that made it, not to the line that called backward.
    made = np.append(up.line, -1)[forward]
    line = np.where(made >= 0, made, line)
    shape_code = np.append(trace.column("shape"), 0)[operator]
    stacks = dict(trace.side["stacks"].select("row", "stack").iter_rows())
    line_text = names_of_rows(trace, line)
    if stacks:
        pairs = zip(forward.tolist(), operator.tolist(), strict=True)
        lines = [_own_line(stacks.get(f if f >= 0 else o, "")) for f, o in pairs]
        line_text = line_text.fill_null(pl.Series(lines, dtype=pl.String()))
    generated = dict(trace.side["generated"].select("row", "file").iter_rows())
    shapes = pl.Series(trace.shapes, dtype=pl.String()).gather(pl.Series(shape_code, dtype=pl.UInt32()))
    return pl.DataFrame(
        {
            "rank": np.full(len(rows), trace.rank),
            "device": trace.column("device")[rows].astype(np.int64),
            "row": rows,
            "name": names_of_rows(trace, rows),
            "duration_ns": trace.dur[rows],
            "operator": names_of_rows(trace, operator),
            "top_operator": names_of_rows(trace, top),
            "shapes": shapes.set(shapes == "", None),
            "forward_operator": names_of_rows(trace, forward),
            "module": names_of_rows(trace, module),
            "line": line_text,
            "annotation": names_of_rows(trace, at_call(up.annotation)),
            "generated": pl.Series([generated.get(o) for o in operator.tolist()], dtype=pl.String()),
            "launch_row": calls,
        }
    )


def work_by(work: pl.DataFrame, column: str) -> pl.DataFrame:
    """`attribute_kernels` by a column, longest first: rank, that column (null: unknown), device_ns, kernels."""
    sums = work.group_by("rank", column).agg(device_ns=pl.col("duration_ns").sum(), kernels=pl.len())
    return sums.sort("device_ns", column, descending=[True, False])


def _by_external_id(trace: Trace, rows: Ints, operator: Ints, top: Ints, up: Ancestors) -> None:
    """Work whose launch is unknown can still name its operator by the id that they share."""
    missing = np.flatnonzero(operator < 0)
    if not len(missing):
        return
    external = trace.column("external")
    operators = np.flatnonzero((trace.kind == Kind.OPERATOR) & (external > 0))
    by_id = dict(zip(external[operators].tolist(), operators.tolist(), strict=True))
    for i in missing.tolist():
        owner = by_id.get(int(external[rows[i]]), -1)
        operator[i] = owner
        top[i] = up.top_operator[owner] if owner >= 0 else -1


def _forward_rows(trace: Trace, operator: Ints) -> Ints:
    """The forward operator of the nearest backward operator around each operator row; -1 for none."""
    partner = forward_of_backward(trace)
    around = nearest(host_stacks(trace).parent, partner >= 0, np.flatnonzero(trace.is_host))
    answer: Ints = np.append(partner, -1)[np.append(around, -1)[operator]]
    return answer


def _own_line(stack: str) -> str | None:
    """The innermost line of a recorded call stack that is not a library's."""
    return next((frame.strip() for frame in stack.split(";") if frame and not LIBRARY.search(frame)), None)


def kernels_under(trace: Trace, operators: Collection[str]) -> pl.DataFrame:
    """Kernels by the innermost of these operators (`aten::mm`) around their launch, longest first.

    Columns: name, operator, count, sum_ns. Work that none of them launched is left out.
    """
    wanted = (trace.kind == Kind.OPERATOR) & trace.named(operators.__contains__)
    rows, calls = launched_work(trace)
    owner = nearest(host_stacks(trace).parent, wanted, np.flatnonzero(trace.is_host))[calls]
    known = (owner >= 0) & (trace.kind[rows] == Kind.KERNEL)
    return (
        pl.DataFrame(
            {
                "name": names_of_rows(trace, rows[known]),
                "operator": names_of_rows(trace, owner[known]),
                "ns": trace.dur[rows[known]],
            }
        )
        .group_by("name", "operator")
        .agg(count=pl.len(), sum_ns=pl.col("ns").sum())
        .sort("sum_ns", "name", descending=[True, False])
    )
