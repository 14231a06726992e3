"""What is around each host event: its operators, module, source line and annotation."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from fettle.trace.kinds import Kind
from fettle.trace.model import Ints, Trace

_MODULE = re.compile(r"^nn\.Module: ")
_LINE = re.compile(r"^(.+)\((\d+)\): (.+)$")
LIBRARY = re.compile(
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
    is_line = np.array([bool(_LINE.match(n)) and not LIBRARY.search(n) for n in names], dtype=bool)
    is_step = np.array([n.startswith("ProfilerStep#") for n in names], dtype=bool)
    rows = np.flatnonzero(trace.is_host)
    python = kind == Kind.PYTHON
    return Ancestors(
        operator=nearest(trace, kind == Kind.OPERATOR, rows),
        top_operator=outermost(trace, kind == Kind.OPERATOR, rows),
        module=nearest(trace, python & is_module[code], rows),
        line=nearest(trace, python & is_line[code], rows),
        annotation=nearest(trace, (kind == Kind.ANNOTATION) & ~is_step[code], rows),
    )


def nearest(trace: Trace, flags: np.ndarray, rows: Ints) -> Ints:
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


def outermost(trace: Trace, flags: np.ndarray, rows: Ints) -> Ints:
    """The outermost flagged event at or above each row: level by level from the top."""
    answer = np.full(len(flags), -1, dtype=np.int64)
    depth, parent = trace.stacks.depth, trace.stacks.parent
    order = rows[np.argsort(depth[rows], kind="stable")]
    levels = depth[order]
    for begin, stop in runs(levels):
        level = order[begin:stop]
        up = parent[level]
        above = np.where(up >= 0, answer[np.maximum(up, 0)], -1)
        answer[level] = np.where(above >= 0, above, np.where(flags[level], level, -1))
    return answer


def runs(values: Ints) -> list[tuple[int, int]]:
    """Where equal neighbours begin and stop."""
    begins = np.flatnonzero(np.diff(values, prepend=values[0] - 1 if len(values) else 0)).tolist()
    return list(zip(begins, [*begins[1:], len(values)][: len(begins)], strict=True)) if begins else []
