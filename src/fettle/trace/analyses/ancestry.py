"""What is around each host event: its operators, module, source line and annotation."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from fettle.trace.analyses.stacks import host_stacks, nearest
from fettle.trace.analyses.stops import autograd_threads, main_thread
from fettle.trace.kinds import Kind
from fettle.trace.model import Ints, Trace, per_trace
from fettle.trace.ordering import in_groups

_MODULE = re.compile(r"^nn\.Module: ")
_LINE = re.compile(r"^(.+)\((\d+)\): (.+)$")
LIBRARY = re.compile(
    r"site-packages|dist-packages|^torch/|<frozen|<built-in|/lib/python3|^(threading|runpy|contextlib)\.py"
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
    kind, python = trace.kind, trace.kind == Kind.PYTHON
    rows, parent = np.flatnonzero(trace.is_host), host_stacks(trace).parent
    lines = trace.named(lambda name: _LINE.match(name) and not LIBRARY.search(name))
    steps = trace.named(lambda name: name.startswith("ProfilerStep#"))
    return Ancestors(
        operator=nearest(parent, kind == Kind.OPERATOR, rows),
        top_operator=outermost(trace, kind == Kind.OPERATOR),
        module=nearest(parent, python & trace.named(_MODULE.match), rows),
        line=nearest(parent, python & lines, rows),
        annotation=nearest(parent, (kind == Kind.ANNOTATION) & ~steps, rows),
    )


@per_trace
def called_from(trace: Trace) -> Ints:
    """By row, the event that each host event was called from (-1: none): the one around it, and of the outermost on
    autograd's threads what the main thread was in meanwhile."""
    parent, main = host_stacks(trace).parent.copy(), main_thread(trace)
    thread = trace.column("thread")
    apart = [t for t in autograd_threads(trace) if t != main]
    roots = np.flatnonzero(trace.is_host & np.isin(thread, apart) & (parent < 0))
    parent[roots] = host_stacks(trace).innermost(np.full(len(roots), main), trace.ts[roots])
    return parent


def outer_first(trace: Trace, rows: Ints) -> Ints:
    """Host events in an order in which each comes after what it was called from."""
    main = trace.column("thread")[rows] != main_thread(trace)
    return rows[np.lexsort((host_stacks(trace).depth[rows], main, trace.ts[rows]))]


def outermost(trace: Trace, flags: np.ndarray) -> Ints:
    """The outermost flagged event at or above each host event, by row: level by level from the top."""
    answer, rows = np.full(len(flags), -1, dtype=np.int64), np.flatnonzero(trace.is_host)
    depth, parent = host_stacks(trace).depth, host_stacks(trace).parent
    for _, at in in_groups(depth[rows]):
        level = rows[at]
        up = parent[level]
        above = np.where(up >= 0, answer[np.maximum(up, 0)], -1)
        answer[level] = np.where(above >= 0, above, np.where(flags[level], level, -1))
    return answer


def in_no_other(trace: Trace, flags: np.ndarray) -> Ints:
    """Rows of the flagged host events that lie in no other one."""
    rows = np.flatnonzero(flags)
    alone: Ints = rows[outermost(trace, flags)[rows] == rows]
    return alone
