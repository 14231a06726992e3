"""Who called whom: nesting, and what becomes of events that overlap without nesting."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fettle.trace import annotation_table
from fettle.trace.analyses.stacks import host_stacks
from fettle.trace.intervals import merge, total
from tests.trace.build import Build

SPANS = st.lists(st.tuples(st.integers(0, 15), st.integers(0, 9), st.integers(1, 2)), min_size=1, max_size=25)


def test_a_chain_of_overlaps_is_cut_in_order_and_loses_nothing_else(tmp_path: Path) -> None:
    made = Build().op("a", 0, 20).op("b", 18, 22).op("c", 38, 22).op("inside c", 40, 18).op("d", 58, 10)
    stacks = host_stacks(made.load(tmp_path))
    # b is cut at a's end, 20; then c, which b's old end had covered, has no parent and keeps its whole length.
    assert stacks.parent.tolist() == [-1, 0, -1, 2, 2]
    assert stacks.overlaps_cut == 2
    pieces = zip(stacks.segment_row, stacks.segment_start // 1000, stacks.segment_end // 1000, strict=True)
    assert [tuple(map(int, p)) for p in pieces] == [
        (0, 0, 18), (1, 18, 20), (2, 38, 40), (3, 40, 58), (4, 58, 60),
    ]  # fmt: skip


def test_what_begins_where_another_ends_but_for_rounding_comes_after_it(tmp_path: Path) -> None:
    made = Build().op("a", 0, 10).op("inside a", 1, 8).call("cudaStreamSynchronize", 9.999, 500)
    stacks = host_stacks(made.load(tmp_path))
    assert stacks.parent.tolist() == [-1, 0, -1]
    assert stacks.self_ns.tolist() == [2_000, 8_000, 499_999]
    both = Build().op("a", 0, 10).op("inside a", 1, 8).step(0, 9.999, 500).op("enumerate(DataLoader)", 9.999, 400)
    stacks = host_stacks(both.load(tmp_path))
    assert stacks.parent.tolist() == [-1, 0, -1, 2]
    assert stacks.self_ns.tolist() == [2_000, 8_000, 100_000, 399_999]


def test_a_range_opened_in_a_function_holds_what_runs_after_it(tmp_path: Path) -> None:
    made = Build().add("python_function", "train.py(1): train", 0, 1000).add("python_function", "x.py(2): before", 1, 3)
    made.add("python_function", "torch/autograd/profiler.py(700): __enter__", 10, 10)
    made.add("python_function", "<built-in method _record_function_enter_new>", 12, 5)
    made.add("user_annotation", "## part ##", 15, 485).op("aten::mm", 100, 50).kernel("gemm", 130, 40, call=110)
    made.add("python_function", "torch/autograd/profiler.py(710): __exit__", 495, 15)
    trace = made.load(tmp_path)
    parent = {trace.name_of([row])[0]: host_stacks(trace).parent[row] for row in host_stacks(trace).rows}
    assert parent["## part ##"] == 0  # train, not the function that opened it
    assert trace.name_of([parent["aten::mm"]]) == ["## part ##"]
    table = annotation_table(trace).row(0, named=True)
    assert (table["host_inclusive_ns"], table["device_inclusive_ns"], table["kernels"]) == (485_000, 40_000, 1)


@settings(max_examples=100, deadline=None)
@given(spans=SPANS)
def test_nesting_is_that_of_a_stack(
    spans: list[tuple[int, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = Build()
    for start, length, thread in spans:
        made.op("x", 2 * start, 2 * length, tid=thread)  # less than a microsecond would be rounding
    trace = made.load(tmp_path_factory.mktemp("s"))
    stacks, thread = host_stacks(trace), trace.column("thread")
    end = trace.end.copy()
    open_events: list[int] = []
    for row in stacks.rows.tolist():  # the plain way, event by event
        while open_events and (end[open_events[-1]] <= trace.ts[row] or thread[open_events[-1]] != thread[row]):
            open_events.pop()
        above = open_events[-1] if open_events else -1
        assert stacks.parent[row] == above
        assert stacks.depth[row] == len(open_events)
        if above >= 0:
            end[row] = min(end[row], end[above])
        open_events.append(row)
    for one in np.unique(thread):
        part, mine = stacks.thread_slice(int(one)), np.flatnonzero(thread == one)
        starts, ends = stacks.segment_start[part], stacks.segment_end[part]
        assert (ends > starts).all()
        assert (starts[1:] >= ends[:-1]).all()
        assert int((ends - starts).sum()) == total(merge(trace.ts[mine], end[mine]))
    low, high = np.array([0, 7_000, 7_000, 20_000]), np.array([7_000, 20_000, 7_000, 50_000])
    for one in np.unique(thread):
        start, end, row, window = stacks.over(int(one), low, high)
        assert np.bincount(window, weights=end - start, minlength=4).tolist() == [7_000, 13_000, 0, 30_000]
        assert (start[1:] == end[:-1]).all()
        assert (row == stacks.innermost(np.full(len(start), one), start)).all()
