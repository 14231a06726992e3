from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fettle.errors import UsageError
from fettle.trace import CAUSES, Trace, idle_pieces, idle_summary, queue_summary, step_summary, steps, time_account
from fettle.trace.analyses.account import check_account
from tests.trace.build import Build, training


def causes(trace: Trace, device: int = 0) -> dict[str, int]:
    frame = idle_summary(trace, device)
    return dict(zip(frame["cause"], frame["idle_ns"], strict=True))


def test_a_step_on_paper(tmp_path: Path) -> None:
    row = time_account(training(3).load(tmp_path)).row(1, named=True)
    assert row["step"] == 1
    assert row["wall_ns"] == 100_000
    assert row["compute_ns"] == 30_000
    assert row["exposed_communication_ns"] == 20_000
    assert row["exposed_copy_ns"] == 5_000
    assert row["idle_ns"] == 45_000


def test_compute_hides_what_runs_beside_it(tmp_path: Path) -> None:
    build = Build().op("a", 0, 100)
    build.kernel("gemm", 0, 40, call=0).kernel("ncclDevKernel", 20, 40, stream=20).kernel(
        "Memcpy HtoD", 50, 30, stream=9, cat="gpu_memcpy"
    )
    row = time_account(build.load(tmp_path)).row(0, named=True)
    assert (row["compute_ns"], row["exposed_communication_ns"], row["exposed_copy_ns"]) == (40_000, 20_000, 20_000)


def test_a_gap_is_split_not_labelled(tmp_path: Path) -> None:
    """Case M: the launch comes 1 us after the previous kernel's end in one trace, at the end of a 10 ms gap in
    another.
    """
    build = Build().kernel("k", 0, 10, call=-5).op("busy", 11, 9000)
    build.call("cudaLaunchKernel", 9011, 4, correlation=500).add(
        "kernel", "k", 10_010, 5, pid=0, device=0, stream=7, correlation=500
    )
    split = causes(build.load(tmp_path))
    # The first 5 us, before the first kernel, are its launch call and latency.
    assert split == {
        "operator": 9_000_000,
        "queued_unknown": 995_000,
        "launch_call": 2_000 + 4_000,
        "launch_latency": 3_000,
        "host_untraced": 1_000,
    }


@pytest.mark.parametrize(
    ("category", "name", "cause"),
    [
        ("cuda_runtime", "cudaStreamSynchronize", "blocking_call"),
        ("cuda_runtime", "hipMemcpyWithStream", "blocking_call"),
        ("cuda_runtime", "cudaMalloc", "allocator"),
        ("cuda_driver", "cuModuleLoadData", "compile_or_load"),
        ("cpu_op", "_compile.compile_inner (dynamo_timed)", "compile_or_load"),
        ("python_function", "torch/_inductor/compile_fx.py(1): compile_fx_inner", "compile_or_load"),
        ("python_function", "torch/_compile.py(22): inner", "python"),  # a wrapper that compiles nothing
        ("python_function", "torch/_inductor/compile_fx.py(9): run", "python"),
        ("cuda_runtime", "cudaEventRecord", "runtime_call"),
        ("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "data_loading"),
        ("cpu_op", "aten::add", "operator"),
        ("python_function", "train.py(12): loop", "python"),
        ("python_function", "<built-in function collect>", "garbage_collection"),
        ("python_function", "Python GC", "garbage_collection"),  # torch 2.9 and later
        ("overhead", "Command Buffer Full", "profiler"),
        ("overhead", "Lazy Function Loading", "compile_or_load"),
        ("python_function", "opentelemetry/instrumentation/torch.py(7): call", "python"),
        ("user_annotation", "gloo:all_reduce", "other_rank"),
        ("cpu_op", "c10d::barrier", "other_rank"),
        ("cpu_op", "c10d::allreduce_", "operator"),  # it only starts the collective
        ("user_annotation", "my range", "host_untraced"),
    ],
)
def test_causes_by_what_the_host_did(tmp_path: Path, category: str, name: str, cause: str) -> None:
    build = Build().kernel("k", 0, 10, call=-5, call_dur=2).add(category, name, 10, 100)
    build.kernel("k", 115, 5, call=110, call_dur=5)
    assert causes(build.load(tmp_path)).get(cause) == 100_000


def test_a_launch_that_waits_for_a_full_queue(tmp_path: Path) -> None:
    """Device 0 works for 100 us on each of 60 pieces and holds 10 of them; then a launch for device 1, which idles."""
    build = Build().kernel("first", 0, 10, call=-5, call_dur=1, device=1)
    free, begins = 0.0, []
    for i in range(60):
        called = 0.0 if not begins else returned + 2  # noqa: F821 - set in the round before
        returned = max(called + 3, begins[i - 10] + 1) if i >= 10 else called + 3
        begins.append(max(returned + 4, free))
        free = begins[-1] + 100
        build.kernel(f"k{i}", begins[-1], 100, call=called, call_dur=returned - called, device=0)
    build.kernel("late", returned + 10, 10, call=returned + 2, call_dur=3, device=1)
    trace = build.load(tmp_path)
    pieces = idle_pieces(trace, 1).with_columns(length=pl.col("end_ns") - pl.col("start_ns"))
    found = dict(pieces.group_by(pl.col("cause").cast(pl.String())).agg(pl.col("length").sum()).iter_rows())
    # Calls 11 to 60 each wait until another piece has begun, but for 2 us between two of them and 1 us to return.
    waited = sum(begins[i - 10] - max(called_of(begins, i), 10) for i in range(10, 60))
    assert found["full_queue"] == pytest.approx(waited * 1000, rel=0.01)
    summary = queue_summary(trace).row(by_predicate=pl.col("device") == 0, named=True)
    assert summary["depth"] == 10
    assert summary["full_ns"] == pytest.approx(waited * 1000, rel=0.01)
    assert queue_summary(trace).row(by_predicate=pl.col("device") == 1, named=True)["depth"] is None
    low, high = trace.span
    busy_after = sum(found.values())
    assert busy_after == high - low - 20_000


def called_of(begins: list[float], i: int) -> float:
    """When launch i began: 2 us after the one before it had returned, 1 us after a slot came free for it."""
    return begins[i - 11] + 1 + 2 if i > 10 else 9 * 5 + 5.0


def test_data_loading_owns_what_runs_inside_it(tmp_path: Path) -> None:
    build = (
        Build()
        .kernel("k", 0, 10, call=-5)
        .add("user_annotation", "enumerate(DataLoader)#x", 10, 100)
        .op("aten::stack", 20, 50)
    )
    build.kernel("k", 115, 5, call=110, call_dur=5)
    assert causes(build.load(tmp_path))["data_loading"] == 100_000


def test_queued_work_is_not_the_hosts_fault(tmp_path: Path) -> None:
    build = Build().kernel("a", 10, 10, call=0).kernel("b", 23, 10, call=3)
    assert causes(build.load(tmp_path))["between_kernels"] == 3_000


def test_work_that_takes_no_time_ends_a_gap_too(tmp_path: Path) -> None:
    build = Build().kernel("a", 10, 10, call=0).op("busy", 20, 3).kernel("empty", 23, 0, call=3)
    assert "operator" not in causes(build.load(tmp_path))


def test_gaps_inside_a_graph(tmp_path: Path) -> None:
    """Case H: one launch, many kernels."""
    build = Build().call("cudaGraphLaunch", 0, 5, correlation=9)
    for i in range(4):
        build.add("kernel", f"k{i}", 10 + i * 10, 8, pid=0, device=0, stream=7, correlation=9)
    found = causes(build.load(tmp_path))
    assert found["inside_graph"] == 6_000
    assert found["launch_call"] == 5_000


def test_waiting_for_an_event_of_another_stream(tmp_path: Path) -> None:
    build = Build().kernel("a", 10, 10, call=0, stream=7).kernel("c", 11, 9, call=2, stream=8)
    build.call("cudaStreamWaitEvent", 5, 1).kernel("d", 25, 5, call=7, stream=8)
    assert causes(build.load(tmp_path))["stream_event"] == 5_000


def test_the_main_thread_explains_a_silent_launching_thread(tmp_path: Path) -> None:
    build = Build().step(0, 0, 200).op("forward", 10, 80, tid=1)
    build.kernel("a", 0, 10, call=-2, tid=2).kernel("b", 100, 10, call=95, call_dur=5, tid=2)
    assert causes(build.load(tmp_path))["operator"] == 80_000


def test_devices_with_the_same_stream_are_apart(tmp_path: Path) -> None:
    """Case L: stream 7 of two devices."""
    build = Build().op("a", 0, 100).kernel("k", 0, 100, device=0).kernel("k", 50, 10, device=1)
    rows = time_account(build.load(tmp_path)).sort("device")
    assert rows["compute_ns"].to_list() == [100_000, 10_000]


def test_host_only_traces_have_an_account(tmp_path: Path) -> None:
    """Case G."""
    row = time_account(Build().step(0, 0, 100).op("a", 10, 30).load(tmp_path)).row(0, named=True)
    assert (row["device"], row["compute_ns"], row["idle_ns"]) == (-1, 30_000, 70_000)


def test_the_check_can_fail(tmp_path: Path) -> None:
    frame = time_account(training(2).load(tmp_path))
    with pytest.raises(AssertionError):
        check_account(frame.with_columns(compute_ns=pl.col("compute_ns") + 1))


def test_steps_do_not_overlap_and_end_where_the_next_begins(tmp_path: Path) -> None:
    build = Build().step(3, 0, 10).step(4, 12, 10).step(4, 13, 2).add("Operator", "ProfilerStep#5", 30, 10)
    frame = steps(build.load(tmp_path))
    assert frame["step"].to_list() == [3, 4, 5]
    assert frame["end_ns"].to_list() == [12_000, 30_000, 40_000]
    with pytest.raises(UsageError, match="no annotation 'no such'"):
        steps(build.load(tmp_path), annotation="no such")


def test_drift_and_outliers() -> None:
    def summary(walls: list[int]) -> dict[str, object]:
        return dict(step_summary(pl.DataFrame({"step": list(range(len(walls))), "wall_ns": walls})))

    steady = summary([1000, 1010, 990, 1005, 995, 1000, 5000])
    assert steady["outliers"] == [6]
    growing = summary([1000 + 100 * i for i in range(10)])
    assert growing["drift_is_clear"]
    assert growing["drift_ns_per_step"] == 100
    assert not summary([1000, 1010, 990, 1005, 995, 1000])["drift_is_clear"]


@st.composite
def random_traces(draw: st.DrawFn) -> Build:
    build = Build()
    time = st.integers(0, 400)
    for _ in range(draw(st.integers(1, 4))):
        build.step(len(build.events), draw(time), draw(st.integers(1, 200)))
    names = st.sampled_from(
        ["aten::a", "cudaDeviceSynchronize", "cudaMalloc", "autograd::engine::evaluate_function: X", "k"]
    )
    for _ in range(draw(st.integers(0, 12))):
        category = draw(st.sampled_from(["cpu_op", "cuda_runtime", "python_function", "user_annotation", "overhead"]))
        build.add(category, draw(names), draw(time), draw(st.integers(0, 80)), tid=draw(st.integers(1, 3)))
    for _ in range(draw(st.integers(0, 12))):
        call = draw(st.one_of(st.none(), time))
        build.kernel(
            draw(st.sampled_from(["gemm", "ncclDevKernel", "Memcpy"])),
            draw(time),
            draw(st.integers(0, 60)),
            call=call,
            device=draw(st.integers(0, 1)),
            stream=draw(st.integers(0, 2)),
            tid=draw(st.integers(1, 3)),
            cat=draw(st.sampled_from(["kernel", "gpu_memcpy"])),
            launch=draw(st.sampled_from(["cudaLaunchKernel", "cudaGraphLaunch"])),
        )
    return build


@settings(max_examples=60, deadline=None)
@given(build=random_traces())
def test_every_nanosecond_is_booked_once_and_the_path_covers_the_wall(
    build: Build, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from fettle.trace import critical_path, what_if

    trace = build.load(tmp_path_factory.mktemp("t"))
    frame = time_account(trace)  # asserts its own sums
    assert (frame.select(pl.selectors.ends_with("_ns").exclude("start_ns")).to_numpy() >= 0).all()
    for device in trace.device_keys:
        pieces = idle_pieces(trace, device)
        assert (pieces["start_ns"].to_numpy()[1:] >= pieces["end_ns"].to_numpy()[:-1]).all()
        assert set(pieces["cause"].cast(pl.String())) <= set(CAUSES)
    path = critical_path(trace)
    starts, ends = path.pieces["start_ns"].to_numpy(), path.pieces["end_ns"].to_numpy()
    assert starts[0] == path.start_ns
    assert ends[-1] == path.end_ns
    assert np.array_equal(starts[1:], ends[:-1])
    for change in ("kernels", "no_syncs", "perfect_overlap", "graph"):
        answer = what_if(trace, change, kernels=".", path=path)
        assert 0 <= answer.low_ns <= answer.estimate_ns <= answer.high_ns
