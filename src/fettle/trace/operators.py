"""Which operator, module and source line a kernel belongs to, and what operators cost.

A kernel belongs to the innermost operator around its launch. Backward operators are tied to the forward operator with
the same autograd sequence number, whose module and source line they inherit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import polars as pl

from fettle.trace.kinds import Kind
from fettle.trace.launches import text_column
from fettle.trace.model import Ints, Trace

_MODULE = re.compile(r"^nn\.Module: ")
_LINE = re.compile(r"^(.+)\((\d+)\): (.+)$")
_LIBRARY = re.compile(
    r"site-packages|dist-packages|/torch/|^torch/|<frozen|<built-in|/lib/python3|^(threading|runpy|contextlib)\.py"
)


@dataclass(frozen=True)
class Ancestors:
    """For host events by row, the nearest enclosing event of each sort (itself included); -1 where there is none."""

    operator: Ints
    top_operator: Ints
    module: Ints
    line: Ints
    annotation: Ints


def ancestors(trace: Trace) -> Ancestors:
    """Find them for all host events at once."""
    kind, code = trace.kind, trace.column("name")
    names = trace.names
    is_module = np.array([bool(_MODULE.match(n)) for n in names], dtype=bool)
    is_line = np.array([bool(_LINE.match(n)) and not _LIBRARY.search(n) for n in names], dtype=bool)
    is_step = np.array([n.startswith("ProfilerStep#") for n in names], dtype=bool)
    rows = np.flatnonzero(trace.is_host)
    python = kind == Kind.PYTHON
    return Ancestors(
        operator=_nearest(trace, kind == Kind.OPERATOR, rows),
        top_operator=_outermost(trace, kind == Kind.OPERATOR, rows),
        module=_nearest(trace, python & is_module[code], rows),
        line=_nearest(trace, python & is_line[code], rows),
        annotation=_nearest(trace, (kind == Kind.ANNOTATION) & ~is_step[code], rows),
    )


def _nearest(trace: Trace, flags: np.ndarray, rows: Ints) -> Ints:
    """The nearest event at or above each row that is flagged: parents followed in doubling steps."""
    answer = np.where(flags, np.arange(len(flags)), -1)
    above = trace.stacks.parent.copy()
    active = rows[(answer[rows] < 0) & (above[rows] >= 0)]
    while len(active):
        found = answer[above[active]]
        hit = found >= 0
        # The whole stretch above has been searched only once its own answer is settled, so take the nearest known one.
        answer[active[hit]] = found[hit]
        rest = active[~hit]
        above[rest] = above[above[rest]]
        active = rest[above[rest] >= 0]
    return answer


def _outermost(trace: Trace, flags: np.ndarray, rows: Ints) -> Ints:
    """The outermost flagged event at or above each row: level by level from the top."""
    answer = np.full(len(flags), -1, dtype=np.int64)
    depth, parent = trace.stacks.depth, trace.stacks.parent
    order = rows[np.argsort(depth[rows], kind="stable")]
    levels = depth[order]
    for begin, stop in _runs(levels):
        level = order[begin:stop]
        up = parent[level]
        above = np.where(up >= 0, answer[np.maximum(up, 0)], -1)
        answer[level] = np.where(above >= 0, above, np.where(flags[level], level, -1))
    return answer


def _runs(values: Ints) -> list[tuple[int, int]]:
    """Where equal neighbours begin and stop."""
    begins = np.flatnonzero(np.diff(values, prepend=values[0] - 1 if len(values) else 0)).tolist()
    return list(zip(begins, [*begins[1:], len(values)][: len(begins)], strict=True)) if begins else []


def forward_of_backward(trace: Trace) -> dict[int, int]:
    """Backward operators to their forward operators, by autograd sequence number: row to row.

    The forward operator is the last one with the number on another thread, or without a forward thread of its own, that
    began earlier. Operators without a partner are absent.
    """
    table = trace.side["autograd"].filter(pl.col("sequence") >= 0)
    rows = table["row"].to_numpy()
    sequence = table["sequence"].to_numpy()
    is_engine = np.array([n.startswith("autograd::engine::evaluate_function") for n in trace.names], dtype=bool)
    is_backward_name = np.array([bool(re.search(r"Backward\d*$", n)) for n in trace.names], dtype=bool)
    code = trace.column("name")[rows]
    backward = is_engine[code] | is_backward_name[code]
    # Of the forward operators with one number, the innermost made the graph node; its outermost carries the same place.
    forward_rows, forward_numbers = rows[~backward], sequence[~backward]
    order = np.lexsort((trace.ts[forward_rows], forward_numbers))
    forward_rows, forward_numbers = forward_rows[order], forward_numbers[order]
    answer = {}
    left = np.searchsorted(forward_numbers, sequence[backward], side="left")
    right = np.searchsorted(forward_numbers, sequence[backward], side="right")
    for row, low, high in zip(rows[backward].tolist(), left.tolist(), right.tolist(), strict=True):
        same = forward_rows[low:high]
        same = same[trace.ts[same] < trace.ts[row]]
        if len(same):
            answer[row] = int(same[-1])
    return answer


def attribute_kernels(trace: Trace) -> pl.DataFrame:
    """One row a piece of device work: where it came from.

    Columns: rank, device, row, name, duration_ns, operator, top_operator, shapes (of the innermost operator),
    forward_operator (of backward work), module, line (source file, line and function outside libraries), annotation,
    generated (the file of a generated Triton kernel), launch_row. Null where the trace does not tell.
    """
    links = trace.launches
    rows, calls = links.device_rows, links.launch_rows
    up = ancestors(trace)
    has = calls >= 0

    def at_call(table: Ints) -> Ints:
        return np.where(has, table[np.maximum(calls, 0)], -1)

    operator, top = at_call(up.operator), at_call(up.top_operator)
    _by_external_id(trace, rows, operator, top, up)
    forward = _forward_rows(trace, operator)
    module, line = at_call(up.module), at_call(up.line)
    lacks = (forward >= 0) & (module < 0)
    module[lacks] = up.module[forward[lacks]]
    lacks = forward >= 0  # a backward kernel belongs to the line that made it, not to the line that called backward
    line = np.where(lacks & (up.line[np.maximum(forward, 0)] >= 0), up.line[np.maximum(forward, 0)], line)
    shape_code = np.where(operator >= 0, trace.column("shape")[np.maximum(operator, 0)], 0)
    stacks = dict(zip(trace.side["stacks"]["row"].to_list(), trace.side["stacks"]["stack"].to_list(), strict=True))
    line_text = _names(trace, line)
    if stacks:
        told = [
            _own_line(stacks.get(f if f >= 0 else o, ""))
            for f, o in zip(forward.tolist(), operator.tolist(), strict=True)
        ]
        line_text = line_text.fill_null(pl.Series(told, dtype=pl.String()))
    generated = dict(
        zip(trace.side["generated"]["row"].to_list(), trace.side["generated"]["file"].to_list(), strict=True)
    )
    shapes = pl.Series(trace.shapes, dtype=pl.String()).gather(pl.Series(shape_code, dtype=pl.UInt32()))
    return pl.DataFrame(
        {
            "rank": np.full(len(rows), trace.rank),
            "device": trace.column("device")[rows].astype(np.int64),
            "row": rows,
            "name": text_column(trace, trace.column("name")[rows]),
            "duration_ns": trace.dur[rows],
            "operator": _names(trace, operator),
            "top_operator": _names(trace, top),
            "shapes": shapes.set(shapes == "", None),
            "forward_operator": _names(trace, forward),
            "module": _names(trace, module),
            "line": line_text,
            "annotation": _names(trace, at_call(up.annotation)),
            "generated": pl.Series([generated.get(o) for o in operator.tolist()], dtype=pl.String())
            if generated
            else pl.Series([None] * len(rows), dtype=pl.String()),
            "launch_row": calls,
        }
    )


def _names(trace: Trace, rows: Ints) -> pl.Series:
    codes = pl.Series(np.where(rows >= 0, trace.column("name")[np.maximum(rows, 0)].astype(np.int64), -1))
    return pl.Series(trace.names, dtype=pl.String()).gather(codes.set(codes < 0, None).cast(pl.UInt32()))


def _by_external_id(trace: Trace, rows: Ints, operator: Ints, top: Ints, up: Ancestors) -> None:
    """Work whose launch is unknown can still name its operator by the id that they share."""
    missing = np.flatnonzero(operator < 0)
    if not len(missing):
        return
    external = trace.column("external")
    operators = np.flatnonzero((trace.kind == Kind.OPERATOR) & (external > 0))
    by_id = dict(zip(external[operators].tolist(), operators.tolist(), strict=True))
    for i in missing.tolist():
        found = by_id.get(int(external[rows[i]]), -1)
        operator[i] = found
        top[i] = up.top_operator[found] if found >= 0 else -1


def _forward_rows(trace: Trace, operator: Ints) -> Ints:
    """The forward operator of the nearest backward operator around each operator row; -1 for none."""
    pairs = forward_of_backward(trace)
    partner = np.full(trace.events.height, -1, dtype=np.int64)
    if pairs:
        partner[list(pairs)] = list(pairs.values())
    nearest = _nearest(trace, partner >= 0, np.flatnonzero(trace.is_host))
    here = np.where(operator >= 0, nearest[np.maximum(operator, 0)], -1)
    answer: Ints = np.where(here >= 0, partner[np.maximum(here, 0)], -1)
    return answer


def _own_line(stack: str) -> str | None:
    """The innermost line of a recorded call stack that is not a library's."""
    for frame in stack.split(";"):
        if frame and not _LIBRARY.search(frame):
            return frame.strip()
    return None


def operator_table(trace: Trace) -> pl.DataFrame:
    """Operators by name and shapes.

    Columns: rank, operator, shapes, count, host_ns (with what they call), self_ns (without nested operators and runtime
    calls), device_ns (of kernels launched inside, counted at the innermost operator), kernels. Longest device time
    first.
    """
    stacks = trace.stacks
    rows = np.flatnonzero(trace.kind == Kind.OPERATOR)
    self_ns = np.zeros(trace.events.height, dtype=np.int64)
    np.add.at(self_ns, stacks.segment_row, stacks.segment_end - stacks.segment_start)
    host = (
        pl.DataFrame(
            {
                "name": trace.column("name")[rows],
                "shape": trace.column("shape")[rows],
                "dur": trace.dur[rows],
                "self": self_ns[rows],
            }
        )
        .group_by("name", "shape")
        .agg(count=pl.len(), host_ns=pl.col("dur").sum(), self_ns=pl.col("self").sum())
    )
    links = trace.launches
    has = links.launch_rows >= 0
    operator = ancestors(trace).operator[links.launch_rows[has]]
    known = operator >= 0
    work = (
        pl.DataFrame(
            {
                "name": trace.column("name")[operator[known]],
                "shape": trace.column("shape")[operator[known]],
                "dur": trace.dur[links.device_rows[has][known]],
            }
        )
        .group_by("name", "shape")
        .agg(kernels=pl.len(), device_ns=pl.col("dur").sum())
    )
    table = host.join(work, on=["name", "shape"], how="left").with_columns(pl.col("kernels", "device_ns").fill_null(0))
    return table.select(
        rank=pl.lit(trace.rank, dtype=pl.Int64()),
        operator=text_column(trace, table["name"].to_numpy()),
        shapes=pl.Series(trace.shapes, dtype=pl.String()).gather(table["shape"]),
        count="count",
        host_ns="host_ns",
        self_ns="self_ns",
        device_ns="device_ns",
        kernels="kernels",
    ).sort("device_ns", "self_ns", "operator", descending=[True, True, False])


def call_tree(trace: Trace, *, max_depth: int = 6, python: bool = False) -> pl.DataFrame:
    """Calls merged by path: what calls what, how often, and what it costs on host and device.

    Columns: rank, path (names joined by ` > `), depth, count, host_ns, device_ns (of work launched anywhere below).
    Python functions are left out unless asked for: paths then explain modules and lines, at many more rows.
    """
    wanted = (trace.kind == Kind.OPERATOR) | (trace.kind == Kind.ANNOTATION)
    if python:
        wanted |= trace.kind == Kind.PYTHON
    rows = np.flatnonzero(wanted)
    parent = _parent_among(trace, wanted)
    device = np.zeros(trace.events.height, dtype=np.int64)
    links = trace.launches
    has = links.launch_rows >= 0
    nearest = _nearest(trace, wanted, np.flatnonzero(trace.is_host))
    owner = nearest[links.launch_rows[has]]
    np.add.at(device, owner[owner >= 0], trace.dur[links.device_rows[has]][owner >= 0])
    depth = trace.stacks.depth
    for row in rows[np.argsort(-depth[rows], kind="stable")].tolist():
        if parent[row] >= 0:
            device[parent[row]] += device[row]
    paths: dict[tuple[int, int], int] = {}
    path_of = np.full(trace.events.height, -1, dtype=np.int64)
    parents_of_path: list[int] = []
    name_of_path: list[int] = []
    depth_of_path: list[int] = []
    names = trace.column("name")
    for row in rows[np.argsort(depth[rows], kind="stable")].tolist():
        above = int(path_of[parent[row]]) if parent[row] >= 0 else -1
        level = depth_of_path[above] + 1 if above >= 0 else 0
        if level >= max_depth or (parent[row] >= 0 and above < 0):
            continue
        key = (above, int(names[row]))
        if key not in paths:
            paths[key] = len(paths)
            parents_of_path.append(above)
            name_of_path.append(key[1])
            depth_of_path.append(level)
        path_of[row] = paths[key]
    kept = rows[path_of[rows] >= 0]
    texts: list[str] = []
    for above, name in zip(parents_of_path, name_of_path, strict=True):
        texts.append((texts[above] + " > " if above >= 0 else "") + trace.names[name])
    grouped = (
        pl.DataFrame({"path": path_of[kept], "host": trace.dur[kept], "device": device[kept]})
        .group_by("path")
        .agg(count=pl.len(), host_ns=pl.col("host").sum(), device_ns=pl.col("device").sum())
    )
    return grouped.select(
        rank=pl.lit(trace.rank, dtype=pl.Int64()),
        path=pl.Series([texts[p] for p in grouped["path"]], dtype=pl.String()),
        depth=pl.Series([depth_of_path[p] for p in grouped["path"]], dtype=pl.Int64()),
        count="count",
        host_ns="host_ns",
        device_ns="device_ns",
    ).sort("path")


def _parent_among(trace: Trace, wanted: np.ndarray) -> Ints:
    """The nearest wanted event strictly above each event."""
    nearest = _nearest(trace, wanted, np.flatnonzero(trace.is_host))
    up = trace.stacks.parent
    answer: Ints = np.where(up >= 0, nearest[np.maximum(up, 0)], -1)
    return answer


def kernel_sequences(trace: Trace, operator: str, *, min_kernels: int = 3, top: int = 10) -> pl.DataFrame:
    """The sequences of kernels that operators whose name contains `operator` launch, counted.

    Only the outermost matching operators count. Columns: rank, operator, kernels (names in launch order, joined by `
    -> `), length, count, device_ns, host_ns (of the operators).
    """
    matches = np.array([operator in n for n in trace.names], dtype=bool)
    flags = (trace.kind == Kind.OPERATOR) & matches[trace.column("name")]
    outer = _outermost(trace, flags, np.flatnonzero(trace.is_host))
    links = trace.launches
    has = links.launch_rows >= 0
    rows, calls = links.device_rows[has], links.launch_rows[has]
    roots = outer[calls]
    inside = roots >= 0
    order = np.lexsort((trace.ts[rows[inside]], trace.ts[calls[inside]], roots[inside]))
    rows, roots = rows[inside][order], roots[inside][order]
    counted: dict[tuple[int, ...], list[int]] = {}
    code = trace.column("name")
    for begin, stop in _runs(roots):
        if stop - begin < min_kernels:
            continue
        root = int(roots[begin])
        key = (int(code[root]), *code[rows[begin:stop]].tolist())
        cell = counted.setdefault(key, [0, 0, 0])
        cell[0] += 1
        cell[1] += int(trace.dur[rows[begin:stop]].sum())
        cell[2] += int(trace.dur[root])
    best = sorted(counted.items(), key=lambda item: (-item[1][1], item[0]))[:top]
    return pl.DataFrame(
        [
            (trace.rank, trace.names[key[0]], " -> ".join(trace.names[k] for k in key[1:]), len(key) - 1, *cell)
            for key, cell in best
        ],
        schema={
            "rank": pl.Int64(),
            "operator": pl.String(),
            "kernels": pl.String(),
            "length": pl.Int64(),
            "count": pl.Int64(),
            "device_ns": pl.Int64(),
            "host_ns": pl.Int64(),
        },
        orient="row",
    )


def annotation_table(trace: Trace) -> pl.DataFrame:
    """User annotations: time on the host and of the device work launched inside them.

    Columns: rank, annotation, count, host_ns (inclusive), device_ns (work counted at its innermost annotation),
    kernels.
    """
    rows = np.flatnonzero(trace.kind == Kind.ANNOTATION)
    host = (
        pl.DataFrame({"name": trace.column("name")[rows], "dur": trace.dur[rows]})
        .group_by("name")
        .agg(count=pl.len(), host_ns=pl.col("dur").sum())
    )
    links = trace.launches
    has = links.launch_rows >= 0
    nearest = _nearest(trace, trace.kind == Kind.ANNOTATION, np.flatnonzero(trace.is_host))
    owner = nearest[links.launch_rows[has]]
    known = owner >= 0
    work = (
        pl.DataFrame({"name": trace.column("name")[owner[known]], "dur": trace.dur[links.device_rows[has][known]]})
        .group_by("name")
        .agg(device_ns=pl.col("dur").sum(), kernels=pl.len())
    )
    table = host.join(work, on="name", how="left").with_columns(pl.col("device_ns", "kernels").fill_null(0))
    return table.select(
        rank=pl.lit(trace.rank, dtype=pl.Int64()),
        annotation=text_column(trace, table["name"].to_numpy()),
        count="count",
        host_ns="host_ns",
        device_ns="device_ns",
        kernels="kernels",
    ).sort("device_ns", "host_ns", descending=True)


def counters_by_operator(trace: Trace) -> pl.DataFrame | None:
    """Hardware counters (CUPTI ranges) by operator; None where ranges and launches cannot be paired.

    The profiler records ranges without any link to launches; they are paired by order, which is only valid where
    there are as many of one as of the other. Columns: rank, kernel, operator, top_operator, counter, value.
    """
    ranges = np.flatnonzero(trace.kind == Kind.COUNTER_RANGE)
    kernels = np.array(["LaunchKernel" in n for n in trace.names], dtype=bool)
    calls = np.flatnonzero((trace.kind == Kind.RUNTIME) & kernels[trace.column("name")])
    if not len(ranges) or len(ranges) != len(calls):
        return None
    ranges = ranges[np.argsort(trace.ts[ranges], kind="stable")]
    calls = calls[np.argsort(trace.ts[calls], kind="stable")]
    up = ancestors(trace)
    pairs = pl.DataFrame(
        {
            "row": ranges,
            "kernel": text_column(trace, trace.column("name")[ranges]),
            "operator": _names(trace, up.operator[calls]),
            "top_operator": _names(trace, up.top_operator[calls]),
        }
    )
    joined = trace.side["counters"].join(pairs, on="row").sort("row", "counter")
    return joined.select(
        rank=pl.lit(trace.rank, dtype=pl.Int64()),
        kernel="kernel",
        operator="operator",
        top_operator="top_operator",
        counter="counter",
        value="value",
    )
