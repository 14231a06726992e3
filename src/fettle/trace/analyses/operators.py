"""What operators, annotations and the kernels they launch cost: tables by name, path and sequence."""

from __future__ import annotations

import numpy as np
import polars as pl

from fettle.errors import UsageError
from fettle.trace.analyses.ancestry import ancestors, called_from, outer_first, outermost
from fettle.trace.analyses.launches import launched_work
from fettle.trace.analyses.stacks import host_stacks, nearest
from fettle.trace.frames import frame_of, names_of_rows, with_rank
from fettle.trace.kinds import Kind, without_address
from fettle.trace.model import Ints, Trace
from fettle.trace.ordering import in_groups

_MOST_BLOCKS = 600
_MOST_TEXT = 1 << 28
"""Letters in all paths of a tree: each repeats those above it."""
_NO_SUM = r"\.(avg|min|max|max_rate|ratio|pct|per_second)\b|\.pct_|\.per_|_pct\b"
"""In the name of a counter whose values do not add up."""
_PREFIXES = {"aten::": "operator", "autograd::": "backward"}


def operator_table(trace: Trace) -> pl.DataFrame:
    """Operators by name and shapes.

    Columns: rank, operator, shapes, count, host_ns (with what they call), self_ns (without nested operators and runtime
    calls), device_ns (of kernels launched inside, counted at the innermost operator), kernels. Longest device time
    first.
    """
    rows = np.flatnonzero(trace.kind == Kind.OPERATOR)
    work, calls = launched_work(trace)
    owner = nearest(host_stacks(trace).parent, trace.kind == Kind.OPERATOR, calls)[calls]
    work, owner = work[owner >= 0], owner[owner >= 0]
    device, kernels = np.zeros((2, trace.events.height), dtype=np.int64)
    np.add.at(device, owner, trace.dur[work])
    np.add.at(kernels, owner, 1)
    each = pl.DataFrame(
        {
            "name": trace.column("name")[rows],
            "shape": trace.column("shape")[rows],
            "host_ns": trace.dur[rows],
            "self_ns": host_stacks(trace).self_ns[rows],
            "device_ns": device[rows],
            "kernels": kernels[rows],
        }
    )
    table = each.group_by("name", "shape").agg(pl.len().alias("count"), pl.all().sum())
    names = pl.Series("operator", trace.names, dtype=pl.String()).gather(table["name"])
    shapes = pl.Series("shapes", trace.shapes, dtype=pl.String()).gather(table["shape"])
    named = table.select(names, shapes, "count", "host_ns", "self_ns", "device_ns", "kernels")
    order = ("device_ns", "self_ns", "operator", "shapes")
    return with_rank(trace, named.sort(order, descending=[True, True, False, False]))


def call_tree(trace: Trace, *, max_depth: int = 6, python: bool = False) -> pl.DataFrame:
    """Calls merged by path: what calls what, how often, and what it costs on host and device.

    Columns: rank, path (names joined by ` > `), depth, count, host_ns, device_ns (of work launched anywhere below).
    Backward operators on autograd's threads are below what waited for them. Python functions are left out unless asked
    for: paths then explain modules and lines, at many more rows. All steps are one path, `ProfilerStep#`.
    """
    wanted = (trace.kind == Kind.OPERATOR) | (trace.kind == Kind.ANNOTATION)
    if python:
        wanted |= trace.kind == Kind.PYTHON
    rows = np.flatnonzero(wanted)
    parent = parent_among(trace, wanted)
    device, _, _ = device_time(trace, wanted, parent)
    paths: dict[tuple[int, int], int] = {}
    texts: list[str] = []
    depths: list[int] = []
    size = 0
    path_of = np.full(trace.events.height, -1, dtype=np.int64)
    names, texts_of = _merged_names(trace)
    for row in outer_first(trace, rows).tolist():
        above = int(path_of[parent[row]]) if parent[row] >= 0 else -1
        level = depths[above] + 1 if above >= 0 else 0
        if level >= max_depth or (parent[row] >= 0 and above < 0):
            continue
        key = (above, int(names[row]))
        if key not in paths:
            paths[key] = len(paths)
            texts.append((texts[above] + " > " if above >= 0 else "") + texts_of[key[1]])
            depths.append(level)
            size += len(texts[-1])
            if size > _MOST_TEXT:
                raise UsageError(f"{trace.path.name}: the paths of its calls are too long at depth {max_depth}")
        path_of[row] = paths[key]
    kept = rows[path_of[rows] >= 0]
    grouped = (
        pl.DataFrame({"path": path_of[kept], "host": trace.dur[kept], "device": device[kept]})
        .group_by("path")
        .agg(count=pl.len(), host_ns=pl.col("host").sum(), device_ns=pl.col("device").sum())
    )
    path = pl.Series("path", [texts[p] for p in grouped["path"]], dtype=pl.String())
    depth = pl.Series("depth", [depths[p] for p in grouped["path"]], dtype=pl.Int64())
    return with_rank(trace, grouped.select(path, depth, "count", "host_ns", "device_ns").sort("path"))


def call_blocks(traces: list[Trace], device: bool, depth: int = 12, python: bool = False) -> pl.DataFrame:
    """`call_tree` as blocks as wide as their device (else host) time, children below their parent from its start on;
    several ranks one below the other, each under its title.

    Columns: row, name, start, end (ms), kind. Only the paths with the longest times.
    """
    cost = "device_ns" if device else "host_ns"
    rows: list[tuple[int, str, float, float, str]] = []
    for trace in traces:
        tree = call_tree(trace, max_depth=depth, python=python).filter(pl.col(cost) > 0)
        longest = tree.sort(cost, "path", descending=[True, False]).head(max(1, _MOST_BLOCKS // len(traces)))
        kept, top = set(longest["path"].to_list()), 1 + max((row[0] for row in rows), default=-1)
        if len(traces) > 1 and kept:
            rows.append((top, f"rank {trace.rank}", 0.0, 0.0, "title"))
            top += 1
        start_of: dict[str, float] = {}
        used: dict[str, float] = {}
        for path, level, ns in (
            tree.sort("depth", cost, "path", descending=[False, True, False]).select("path", "depth", cost).iter_rows()
        ):
            parent, _, name = path.rpartition(" > ") if level else ("", "", path)
            if path not in kept or (level and parent not in start_of):
                continue
            start = start_of.get(parent, 0.0) + used.get(parent, 0.0)
            start_of[path], used[parent] = start, used.get(parent, 0.0) + ns
            kind = next((kind for prefix, kind in _PREFIXES.items() if name.startswith(prefix)), "annotation")
            rows.append((top + level, name[:100], start / 1e6, (start + ns) / 1e6, kind))
    return frame_of(rows, row=int, name=str, start=float, end=float, kind=str)


def _merged_names(trace: Trace) -> tuple[Ints, list[str]]:
    """A number for each event's name and the text of each number: steps are one name, objects' addresses are cut, and
    what parts the names of a path is in none of them."""
    names = (without_address(name).replace(" > ", ">") for name in trace.names)
    cut = ["ProfilerStep#" if name.startswith("ProfilerStep#") else name for name in names]
    number = {name: i for i, name in enumerate(dict.fromkeys(cut))}
    table = np.array([number[n] for n in cut], dtype=np.int64)
    return table[trace.column("name")], list(number)


def parent_among(trace: Trace, wanted: np.ndarray) -> Ints:
    """The nearest wanted event strictly above each event."""
    up = called_from(trace)
    around = nearest(up, wanted, np.flatnonzero(trace.is_host))
    return np.where(up >= 0, around[np.maximum(up, 0)], -1)


def kernel_sequences(trace: Trace, operator: str = "", *, min_kernels: int = 3, top: int = 10) -> pl.DataFrame:
    """The sequences of kernels that operators whose name contains `operator` (empty: any) launch, counted.

    Only the outermost matching operators count, and sequences of `min_kernels` kernels or more. Columns: rank,
    operator, kernels (names in launch order, joined by ` -> `), length, count, device_ns, host_ns (of the operators).
    """
    flags = (trace.kind == Kind.OPERATOR) & trace.named(lambda name: operator in name)
    rows, calls = launched_work(trace)
    roots = outermost(trace, flags)[calls]
    inside = roots >= 0
    order = np.lexsort((trace.ts[rows[inside]], trace.ts[calls[inside]]))
    rows, roots = rows[inside][order], roots[inside][order]
    counted: dict[tuple[int, ...], list[int]] = {}
    code = trace.column("name")
    for root, mine in in_groups(roots):
        if len(mine) < min_kernels:
            continue
        key = (int(code[root]), *code[rows[mine]].tolist())
        cell = counted.setdefault(key, [0, 0, 0])
        cell[0] += 1
        cell[1] += int(trace.dur[rows[mine]].sum())
        cell[2] += int(trace.dur[root])
    best = sorted(counted.items(), key=lambda item: (-item[1][1], item[0]))[:top]
    cells = [
        (trace.rank, trace.names[key[0]], " -> ".join(trace.names[k] for k in key[1:]), len(key) - 1, *cell)
        for key, cell in best
    ]
    return frame_of(cells, rank=int, operator=str, kernels=str, length=int, count=int, device_ns=int, host_ns=int)


def annotation_table(trace: Trace) -> pl.DataFrame:
    """User annotations: time on the host, and of the device work launched inside them, on any thread: a range around
    `backward()` has the backward's work. Steps are one, `ProfilerStep#`.

    Columns: rank, annotation, count, host_inclusive_ns, host_exclusive_ns (without annotations inside),
    device_inclusive_ns, device_exclusive_ns (work counts at its innermost annotation), kernels (inclusive). Inclusive
    times are those of `call_tree`; a range inside another of its name is not counted again.
    """
    flags = trace.kind == Kind.ANNOTATION
    rows = np.flatnonzero(flags)
    name, texts = _merged_names(trace)
    parent = parent_among(trace, flags)
    inclusive, exclusive, kernels = device_time(trace, flags, parent)
    nested = np.zeros(trace.events.height, dtype=np.int64)
    np.add.at(nested, parent[rows][parent[rows] >= 0], trace.dur[rows][parent[rows] >= 0])
    outer = ~_in_its_own(rows, parent, name)[rows]
    each = pl.DataFrame(
        {
            "annotation": pl.Series(texts, dtype=pl.String()).gather(name[rows]),
            "host_inclusive_ns": trace.dur[rows] * outer,
            "host_exclusive_ns": np.maximum(trace.dur[rows] - nested[rows], 0),
            "device_inclusive_ns": inclusive[rows] * outer,
            "device_exclusive_ns": exclusive[rows],
            "kernels": kernels[rows] * outer,
        }
    )
    table = each.group_by("annotation").agg(pl.len().alias("count"), pl.all().sum())
    order = ("device_inclusive_ns", "host_inclusive_ns", "annotation")
    return with_rank(trace, table.sort(order, descending=[True, True, False]))


def _in_its_own(rows: Ints, parent: Ints, name: Ints) -> np.ndarray:
    """By row, whether an event lies in another one of its name. Each is come to once, however deep they are nested."""
    below: dict[int, list[int]] = {}
    for row, above in zip(rows.tolist(), parent[rows].tolist(), strict=True):
        below.setdefault(above, []).append(row)
    found, around = np.zeros(len(parent), dtype=bool), set[int]()
    todo = below.get(-1, [])
    while todo:
        row = todo.pop()
        if row < 0:  # all that lies in the outermost of this name was looked at
            around.remove(int(name[~row]))
            continue
        found[row] = name[row] in around
        if not found[row]:
            around.add(int(name[row]))
            todo.append(~row)
        todo += below.get(row, [])
    return found


def device_time(trace: Trace, wanted: np.ndarray, parent: Ints) -> tuple[Ints, Ints, Ints]:
    """Device time of each wanted event, of all work launched below it and of what no other one is nearer to, and how
    many pieces the former is. `parent` is the nearest wanted event strictly above each."""
    exclusive, kernels = np.zeros(trace.events.height, dtype=np.int64), np.zeros(trace.events.height, dtype=np.int64)
    work, calls = launched_work(trace)
    owner = nearest(called_from(trace), wanted, np.flatnonzero(trace.is_host))[calls]
    known = owner >= 0
    np.add.at(exclusive, owner[known], trace.dur[work][known])
    np.add.at(kernels, owner[known], 1)
    inclusive = exclusive.copy()
    for row in outer_first(trace, np.flatnonzero(wanted))[::-1].tolist():
        if parent[row] >= 0:
            inclusive[parent[row]] += inclusive[row]
            kernels[parent[row]] += kernels[row]
    return inclusive, exclusive, kernels


def counters_by_operator(trace: Trace) -> pl.DataFrame | None:
    """Hardware counters (CUPTI ranges) by operator; None where ranges and launches cannot be paired.

    The profiler records ranges without any link to launches; they are paired by order, which is only valid where
    there are as many of one as of the other. Columns: rank, kernel, operator, top_operator, counter, value.
    """
    ranges = np.flatnonzero(trace.kind == Kind.COUNTER_RANGE)
    calls = np.flatnonzero((trace.kind == Kind.RUNTIME) & trace.named(lambda name: "LaunchKernel" in name))
    if not len(ranges) or len(ranges) != len(calls):
        return None
    ranges = ranges[np.argsort(trace.ts[ranges], kind="stable")]
    calls = calls[np.argsort(trace.ts[calls], kind="stable")]
    up = ancestors(trace)
    pairs = pl.DataFrame(
        {
            "row": ranges,
            "kernel": names_of_rows(trace, ranges),
            "operator": names_of_rows(trace, up.operator[calls]),
            "top_operator": names_of_rows(trace, up.top_operator[calls]),
        }
    )
    joined = trace.side["counters"].join(pairs, on="row").sort("row", "counter")
    return with_rank(trace, joined.select("kernel", "operator", "top_operator", "counter", "value"))


def counter_sums(ranges: pl.DataFrame, *apart: str) -> pl.DataFrame:
    """`counters_by_operator` by operator, and by the columns to keep `apart`, largest first.

    Columns: those, operator, counter, value: the sum; of averages, extremes and shares, which do not add up, the mean.
    """
    value, adds_up = pl.col("value"), ~pl.col("counter").first().str.contains(_NO_SUM)
    groups = ranges.group_by(*apart, "operator", "counter")
    sums = groups.agg(pl.when(adds_up).then(value.sum()).otherwise(value.mean()))
    return sums.sort("value", "operator", descending=[True, False])
