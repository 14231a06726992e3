"""What is said of simulated programs, whose truth is known (see `simulator.py`; `bench/trace_device_bound.py` asks
more of them).
"""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from fettle.trace import (
    critical_path,
    identities,
    idle_summary,
    load,
    path_shares,
    queue_summary,
    trace_health,
    what_if,
)
from fettle.trace.analyses.replay import Change as Replayed
from fettle.trace.analyses.slots import doubtful_waits, queues
from fettle.trace.analyses.whatif import replayed_ns
from fettle.trace.model import Trace
from tests.trace.build import Build, training
from tests.trace.simulator import Change, Op, Program, composition, random_change, random_program, simulate, write

WAITING = ("launch_latency", "stream_event", "between_kernels", "inside_graph", "queued_unknown", "blocking_call")


def full_queue(depth: int, layers: int = 400, *, kernel: float = 60.0, steps: int = 4) -> Program:
    """A loop whose host is four times as fast as its device, with a synchronise at the end."""
    ops: list[Op] = []
    for _ in range(steps):
        ops.append(Op("step"))
        for i in range(layers):
            ops += [Op("host", 8.0), Op("launch", 5.0, kernels=(("gemm" if i % 2 else "norm", kernel + i % 7),))]
    return Program((*ops, Op("sync_device")), depth=depth)


def traced(program: Program, folder: Path) -> Trace:
    return load(write(program, simulate(program), folder / "trace.json"), use_sidecar=False)


@pytest.mark.parametrize("depth", [2, 16, 333, 1022])
def test_the_depth_of_a_full_queue_is_found_and_the_device_is_on_the_path(tmp_path: Path, depth: int) -> None:
    program = full_queue(depth)
    trace = traced(program, tmp_path)
    assert [queue.depth for queue in queues(trace)] == [pytest.approx(depth, abs=1)]
    assert queue_summary(trace)["full_share"][0] > 0.1
    spent = dict(critical_path(trace).summary().select("category", "share").iter_rows())
    assert spent["compute"] == pytest.approx(composition(simulate(program))["compute"], abs=0.02)
    for factor in (0.5, 2.0):
        answer = what_if(trace, "kernels", kernels=".", factor=factor)
        truth = simulate(program, Change("*", factor)).length
        assert not answer.cannot_tell
        assert answer.estimate_ns / 1e3 == pytest.approx(truth, rel=0.02)
        assert answer.low_ns <= answer.estimate_ns <= answer.high_ns


def test_what_the_profiler_notes_of_a_full_queue_holds_nothing_up(tmp_path: Path) -> None:
    """On an H200 each launch that waits for a slot has a "Command Buffer Full" on a thread of its own."""
    program = full_queue(64, kernel=90.0)
    path = write(program, simulate(program), tmp_path / "trace.json")
    document = json.loads(path.read_text())
    launches = [event for event in document["traceEvents"] if event.get("name") == "cudaLaunchKernel"]
    note = {"ph": "X", "cat": "overhead", "name": "Command Buffer Full", "pid": -1, "tid": 0}
    notes = [{**note, "ts": one["ts"], "dur": one["dur"]} for one in launches if one["dur"] > 20]
    events = [
        one for one in document["traceEvents"] if "ProfilerStep" not in one.get("name", "")
    ]  # the trace as a whole
    path.write_text(json.dumps({"traceEvents": events + notes}))
    answer = what_if(load(path, use_sidecar=False), "kernels", kernels=".", factor=0.3)
    assert not answer.cannot_tell
    assert answer.estimate_ns / 1e3 == pytest.approx(simulate(program, Change("*", 0.3)).length, rel=0.02)


def test_a_queue_that_was_never_full_has_no_depth(tmp_path: Path) -> None:
    trace = traced(full_queue(4096, layers=100), tmp_path)
    assert queues(trace) == []
    assert queue_summary(trace)["depth"].to_list() == [None]


def test_one_wait_that_may_have_been_for_a_slot_is_told(tmp_path: Path) -> None:
    """Too few calls wait for a depth to show; whether one long call waited decides path and what-if."""
    short = [Op("host", 5.0), Op("launch", 5.0, kernels=(("norm", 10.0),))]
    ops = [Op("step"), Op("launch", 5.0, kernels=(("gemm", 200.0),)), *short * 4, Op("host", 300.0), *short]
    program = Program((*ops, Op("sync_device")), depth=3)
    trace = traced(program, tmp_path)
    assert queues(trace) == []
    assert len(doubtful_waits(trace)[0]) == 1
    shares = path_shares(trace, critical_path(trace)).filter(pl.col("category") == "compute").row(0, named=True)
    assert shares["low_share"] + 0.2 < composition(simulate(program))["compute"] <= shares["high_share"] + 0.01
    answer = what_if(trace, "kernels", kernels="gemm", factor=0.5)
    assert answer.cannot_tell
    assert "slot" in answer.unknown
    assert answer.low_ns <= simulate(program, Change("gemm", 0.5)).length * 1e3 <= answer.high_ns * 1.01


@pytest.mark.parametrize(("seed", "category"), [(3965, "copy"), (5419, "compute")])
def test_a_short_wait_for_a_slot_widens_the_path(tmp_path: Path, seed: int, category: str) -> None:
    """One call of a small queue waits 2 and 10 us: which of two chains made it late is not sure, and the range says so;
    in the second program two reasons come close together besides.
    """
    program = random_program(seed)
    outcome = simulate(program)
    trace = load(write(program, outcome, tmp_path / "trace.json"), use_sidecar=False)
    found = path_shares(trace, critical_path(trace)).filter(pl.col("category") == category).row(0, named=True)
    assert found["low_share"] + 0.05 < composition(outcome)[category] <= found["high_share"] + 0.01


def test_a_queue_that_would_be_longer_than_any_in_the_trace_is_told(tmp_path: Path) -> None:
    """Kernels three times as long would fill a queue that holds one, which never shows in the trace."""
    layer = [Op("host", 30.0), *[Op("launch", 5.0, kernels=(("norm", 4.0),))] * 4]
    program = Program((Op("step"), *layer * 12, Op("sync_device")), depth=1)
    trace = traced(program, tmp_path)
    assert queues(trace) == []
    answer = what_if(trace, "kernels", kernels="norm", factor=3.0)
    assert answer.cannot_tell
    truth = simulate(program, Change("norm", 3.0)).length
    assert answer.estimate_ns * 1.05 < truth * 1e3 <= answer.high_ns * 1.02
    assert not what_if(trace, "kernels", kernels="norm", factor=0.5).cannot_tell


@pytest.mark.parametrize("seed", [*range(24), 37, 1019, 1206, 1387, 2396, 2666, 3021, 3618, 5135, 5890, 6200, 6862])
def test_random_programs(tmp_path: Path, seed: int) -> None:
    """The first ones of the bench; then two waits for a slot in all, two reasons on one stream, a graph that
    waits, a wait for what is launched later, a call that seems to begin in the one before, copies inside whose call
    the stream comes free, a shared queue whose order changes, a launch that nobody saw alone, a queue of 4 that was
    never full and would be, gaps inside graphs beside gaps between launches, a synchronise of one of two streams.
    """
    program = random_program(seed)
    outcome = simulate(program)
    trace = load(write(program, outcome, tmp_path / "trace.json"), use_sidecar=False)
    change, question, asked = random_change(seed)
    path = critical_path(trace)
    answer = what_if(trace, change, path=path, **question)
    assert answer.cannot_tell or answer.estimate_ns / 1e3 == pytest.approx(simulate(program, asked).length, rel=0.05)
    unchanged = replayed_ns(trace, Replayed(), path.start_ns, path.end_ns)
    assert unchanged == pytest.approx(path.wall_ns, rel=1e-3)
    table = identities(trace)
    assert table["holds"].all(), table.filter(~pl.col("holds"))
    if seed == 5:  # two reasons within 2 us of each other: either is right
        return
    found = dict.fromkeys(composition(outcome), 0.0)
    for category, share in path.summary().select("category", "share").iter_rows():
        work = category in ("compute", "communication", "copy")
        found[category if work else "waiting" if category in WAITING else "host"] += share
    assert found == pytest.approx(composition(outcome), abs=0.05)


def test_the_walk_begins_where_the_trace_ends(tmp_path: Path) -> None:
    """The last event is a synchronise on a thread that launched nothing."""
    build = Build()
    for i in range(10):
        build.kernel("gemm", 10 + i * 100, 99, call=1 + i * 3, call_dur=2, tid=1)
    build.call("hipDeviceSynchronize", 50, 965, tid=2)
    spent = dict(critical_path(build.load(tmp_path)).summary().select("category", "share").iter_rows())
    assert spent["compute"] > 0.97
    assert "host_untraced" not in spent


def test_a_thread_that_begins_later_waited_for_the_other_one_that_launches(tmp_path: Path) -> None:
    """No operators say that the second thread is the backward's."""
    build = Build()
    for tid, since in ((1, 10), (2, 1_110)):
        for i in range(10):
            build.kernel("gemm", since + i * 100, 99, call=since - 8 + i * 3, call_dur=2, tid=tid)
    build.call("hipDeviceSynchronize", 50, 1_000, tid=1).call("hipDeviceSynchronize", 1_150, 970, tid=1)
    spent = dict(critical_path(build.load(tmp_path)).summary().select("category", "share").iter_rows())
    assert spent["compute"] > 0.9


def test_work_launched_before_the_window_counts(tmp_path: Path) -> None:
    build = Build().step(0, 0, 20).step(1, 20, 1000)
    for i in range(10):  # all launched in step 0
        build.kernel("gemm", 10 + i * 100, 99, call=1 + i, call_dur=0.5)
    build.call("cudaDeviceSynchronize", 25, 990)
    trace = build.load(tmp_path)
    answer = what_if(trace, "kernels", kernels="gemm", factor=0.5, step=1)
    assert answer.estimate_ns == pytest.approx(1_000_000 - 490_000, rel=0.02)


def test_a_copy_that_spans_a_gap_is_its_cause(tmp_path: Path) -> None:
    build = Build().kernel("a", 10, 10, call=0).kernel("b", 1_020, 10, call=3)
    build.kernel("Memcpy DtoH", 1_040, 5, call=15, call_dur=1_035, launch="hipMemcpyWithStream", cat="gpu_memcpy")
    frame = idle_summary(build.load(tmp_path), 0)
    spent = dict(frame.select("cause", "idle_ns").iter_rows())
    assert spent["blocking_call"] >= 1_000_000
    assert "queued_unknown" not in spent
    assert "hipMemcpyWithStream" in frame.filter(pl.col("cause") == "blocking_call")["what"][0]


def test_what_if_cannot_tell_where_nothing_explains_the_waits(tmp_path: Path) -> None:
    build = Build().step(0, 0, 2_000)
    for i in range(10):  # each begins 150 us after all that the trace shows
        build.kernel("gemm", 10 + i * 200, 50, call=1 + i, call_dur=0.5)
    trace = build.call("cudaDeviceSynchronize", 30, 1_900).load(tmp_path)
    spent = dict(idle_summary(trace, 0).select("cause", "idle_ns").iter_rows())
    assert spent["blocking_call"] > 1_000_000  # the host waits meanwhile, which explains nothing to a replay
    answer = what_if(trace, "kernels", kernels="gemm", factor=0.5)
    assert answer.cannot_tell
    assert answer.answer.startswith("cannot tell")
    assert "what-if" in trace_health(trace, replayed=True).uncertain
    assert "what-if" not in trace_health(training(3).load(tmp_path), replayed=True).uncertain
