"""The analyses on traces small enough to check by hand, and the crash cases of other tools (letters as in the docs)."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from fettle import trace as T
from fettle.errors import UsageError
from fettle.trace.analyses import hta
from fettle.trace.analyses.arrival import clock_offsets, match_collectives
from fettle.trace.analyses.communication import bus_factor
from fettle.trace.analyses.idle import missing_information
from fettle.trace.analyses.launches import launch_rows
from fettle.trace.analyses.operators import counter_sums
from fettle.trace.analyses.replay import replay_of
from fettle.trace.analyses.stops import host_stops
from fettle.trace.analyses.waits import device_waits
from fettle.trace.kinds import is_collective_name, short_kernel_name
from tests.trace.build import Build, training


def test_kernel_statistics_are_over_launches(tmp_path: Path) -> None:
    """Case C: with more than ten kernels nothing is averaged over sums."""
    build = Build()
    for i in range(12):
        build.kernel(f"k{i}", i * 100, 10, call=i * 100 - 5).kernel(f"k{i}", i * 100 + 50, 20, call=i * 100 + 40)
    table = T.kernel_table(build.load(tmp_path))
    assert table.height == 12
    assert set(table["mean_ns"]) == {15_000.0}
    assert set(table["std_ns"].round(3)) == {7071.068}
    assert set(table["short"]) == {0}


def test_generated_kernels_count_once(tmp_path: Path) -> None:
    """Case D: the operator on the host carries a stream, and is no device work."""
    build = Build().op("triton_poi_fused_add_0", 0, 95, stream=0, kernel_file="/tmp/x.py", kernel_hash="abc")
    build.kernel("triton_poi_fused_add_0", 100, 1, call=50, launch="cuLaunchKernelEx")
    trace = build.load(tmp_path)
    row = T.time_account(trace).row(0, named=True)
    assert row["compute_ns"] == 1_000
    work = T.attribute_kernels(trace)
    assert work["generated"].to_list() == ["/tmp/x.py"]
    assert hta.temporal_breakdown(trace)["compute_us"].to_list() == [96]  # as the other tool has it


def test_sync_events_are_not_work(tmp_path: Path) -> None:
    """Case E: a Context Sync with the unsigned -1 for a stream."""
    build = Build().kernel("k", 0, 10, call=-5).op("a", -5, 100)
    build.add("cuda_sync", "Context Sync", 10, 80, pid=0, tid=-1, device=0, stream=4294967295, correlation=3)
    assert T.time_account(build.load(tmp_path))["compute_ns"].to_list() == [10_000]


def test_new_collective_names_and_one_rank(tmp_path: Path) -> None:
    """Case F: ncclDevKernel*; a single rank has no straggler, and says nothing rather than fail."""
    trace = training(2).load(tmp_path)
    table = T.collective_table(trace)
    assert table["bytes"].to_list() == [4000]
    assert T.overlap(trace)["hidden_share"].to_list() == [0.0]
    assert T.stragglers([trace]).height == 0
    for name in (
        "ncclDevKernel_AllReduce",
        "void rcclGenericKernel<1>(x)",
        "cross_device_reduce_1stage<bf16>",
        "nvshmemi_put",
    ):
        assert is_collective_name(name)
    for name in ("void gemm<ncclFake>(int)", "Memcpy DtoD (nccl)", "elementwise_kernel", "reduce_kernel<512>",
                 "triton_poi_fused_add_all_reduce_wait_tensor_0"):  # fmt: skip
        assert not is_collective_name(name)


def test_host_only_traces_answer_everything(tmp_path: Path) -> None:
    """Case G."""
    trace = (
        Build()
        .step(1, 0, 100)
        .op("aten::linear", 0, 50)
        .op("aten::to", 5, 10)
        .op("aten::add", 60, 5, tid=2)
        .load(tmp_path)
    )
    for empty in (
        T.kernel_table,
        T.kernel_classes,
        T.launch_stats,
        T.queue_summary,
        T.bandwidth_summary,
        T.overlap,
        T.collectives,
        T.attribute_kernels,
        T.memory_peak,
        hta.temporal_breakdown,
        hta.kernel_types,
        hta.idle_breakdown,
    ):
        assert empty(trace).height == 0
    questions = dict(T.host_summary(trace).select("question", "time_ns").iter_rows())
    assert questions["conversions and copies"] == 10_000
    assert questions["operators that call others, without those"] == 40_000
    assert T.critical_path(trace).wall_ns == 100_000
    for change in ("no_syncs", "perfect_overlap", "graph"):  # nothing of the kind is there: nothing is saved
        assert T.what_if(trace, change).estimate_ns == 100_000
    assert T.parallel_operators(trace)["time_ns"].to_list() == [45_000, 55_000]


def test_the_host_in_detail(tmp_path: Path) -> None:
    build = Build()
    build.step(0, 1000, 200)
    # A large operator with a small one inside, three small ones alone, a conversion in a conversion.
    build.op("aten::linear", 1000, 50).op("aten::view", 1005, 2)
    for start in (1060, 1070, 1080):
        build.op("aten::add", start, 5)
    build.op("aten::to", 1090, 40).op("aten::_to_copy", 1095, 30)
    build.add("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 1140, 50)
    build.op("aten::stack", 1150, 10)
    trace = build.load(tmp_path)
    small = {o: (c, ns) for o, c, ns in T.small_operators(trace).select("operator", "count", "time_ns").iter_rows()}
    assert small == {"aten::add": (3, 15_000), "aten::view": (1, 2_000)}
    assert T.conversions(trace).select("operator", "count", "time_ns").rows() == [("aten::to", 1, 40_000)]
    loading = T.data_loading(trace)
    assert loading.select("main", "count", "time_ns").rows() == [(True, 1, 50_000)]
    assert loading["share"][0] == pytest.approx(0.25)
    sizes = {p: (c, ns) for p, c, ns in T.operator_sizes(trace).select("power", "count", "time_ns").iter_rows()}
    # 2 us is class 2 (2 to 4), 5 us class 3 (4 to 8), 10 us class 4, 30 us class 5.
    assert sizes == {2: (1, 2_000), 3: (3, 15_000), 4: (1, 10_000), 5: (1, 30_000)}
    ready = T.what_if(trace, "data_ready")
    assert (ready.wall_ns, ready.estimate_ns, ready.low_ns) == (200_000, 150_000, 150_000)


def test_compare_books_a_slower_host_to_operators_and_data(tmp_path: Path) -> None:
    traces = []
    for name, operator, data in (("a.json", 30, 10), ("b.json", 40, 25)):
        build = Build()
        for i in range(4):
            at = 1000 + i * 100
            build.step(i, at, 100).op("aten::mm", at, operator)
            build.add("user_annotation", "enumerate(DataLoader)#x.__next__", at + operator, data)
        traces.append(build.load(tmp_path, name))
    parts = dict(T.compare(*traces).parts.select("part", "change_ns").iter_rows())
    assert (parts["operators"], parts["idle data loading"], parts["idle host untraced"]) == (10_000, 15_000, -25_000)


def test_a_trace_of_allocations_alone(tmp_path: Path) -> None:
    build = Build()
    build.add("cpu_instant_event", "[memory]", 5, 0, ph="i", Addr=1, Bytes=64, **{"Total Allocated": 64})
    build.add("cpu_instant_event", "[memory]", 10**23, 0, ph="i", Addr=2, Bytes=64)
    timeline = T.memory_timeline(build.load(tmp_path))
    assert timeline.select("ts_ns", "bytes", "operator").rows() == [(5_000, 64, None)]


def test_memory_counts_from_the_trace_start_where_the_allocator_tells_no_total(tmp_path: Path) -> None:
    build = Build()
    for at, size in enumerate((64, 32, -64)):
        build.add("cpu_instant_event", "[memory]", 5 + at, 0, ph="i", Addr=at % 2, Bytes=size)
    trace = build.load(tmp_path)
    assert T.memory_timeline(trace)["held_bytes"].to_list() == [64, 96, 32]
    assert T.memory_peak(trace)["peak_bytes"].unique().to_list() == [96]


def test_ranks_without_communication_have_no_stragglers(tmp_path: Path) -> None:
    traces = []
    for rank in range(2):
        build = Build(distributedInfo={"rank": rank}).kernel("k", 20, 5, call=10)
        traces.append(build.load(tmp_path, f"r{rank}.json"))
    assert T.arrival(traces).height == 0
    assert T.stragglers(traces).height == 0
    with pytest.raises(UsageError):
        T.critical_path_of_ranks(traces)
    assert T.write_report(traces, tmp_path / "r.html") == []


def test_graphs_and_every_launch_call_are_counted(tmp_path: Path) -> None:
    """Cases H and I."""
    build = Build().call("hipGraphLaunch", 0, 5, correlation=9)
    for i in range(5):
        build.add("kernel", "k", 10 + i * 10, 8, pid=0, device=0, stream=7, correlation=9)
    for i, call in enumerate(("cuLaunchKernel", "hipModuleLaunchKernel", "cudaLaunchCooperativeKernel")):
        build.kernel("k", 100 + i * 10, 5, call=60 + i * 5, launch=call)
    trace = build.load(tmp_path)
    stats = T.launch_stats(trace)
    assert stats.height == 8
    assert stats["graph"].sum() == 5
    assert stats.filter("graph")["short"].null_count() == 5
    assert T.queue_summary(trace)["max"].to_list() == [5]
    graph = Build().call("cudaGraphLaunch", 0, 5, correlation=9).call("cudaDeviceSynchronize", 6, 60)
    for i in range(5):
        graph.add("kernel", "k", 10 + i * 10, 8, pid=0, device=0, stream=7, correlation=9)
    spent = dict(T.critical_path(graph.load(tmp_path)).summary().select("category", "time_ns").iter_rows())
    assert spent == {
        "compute": 40_000,
        "inside_graph": 8_000,
        "blocking_call": 8_000,
        "launch_call": 5_000,
        "launch_latency": 5_000,
    }


def test_of_calls_with_one_number_the_last_before_the_work_launched_it(tmp_path: Path) -> None:
    build = Build()
    for call in (10, 100, 200):
        build.call("cudaLaunchKernel", call, 5, correlation=7)
    build.call("cudaLaunchKernel", 150, 5, correlation=8)
    for start, number in ((5, 7), (20, 7), (110, 7), (160, 8), (100, 7), (300, 7), (310, 9)):
        build.add("kernel", "k", start, 3, pid=0, tid=7, device=0, stream=7, correlation=number)
    trace = build.load(tmp_path)
    calls = launch_rows(trace)
    started = [int(trace.ts[c]) // 1000 if c >= 0 else None for c in calls]
    # Before the first call there is none: then the first one; at the same instant the call counts.
    assert started == [10, 10, 100, 100, 150, 200, None]


def test_old_categories_have_a_critical_path(tmp_path: Path) -> None:
    """Case J."""
    build = Build().add("Operator", "ProfilerStep#1", 0, 60).add("Operator", "aten::mm", 1, 10)
    build.add("Runtime", "cudaLaunchKernel", 5, 5, correlation=3).add(
        "Kernel", "gemm", 12, 30, pid=0, device=0, stream=7, correlation=3
    )
    build.add("Runtime", "cudaDeviceSynchronize", 15, 30)
    path = T.critical_path(build.load(tmp_path))
    shares = dict(path.summary().select("category", "time_ns").iter_rows())
    assert shares["compute"] == 30_000
    assert shares["blocking_call"] == 3_000
    assert sum(shares.values()) == 60_000


def test_a_step_that_is_not_there(tmp_path: Path) -> None:
    """Case K."""
    with pytest.raises(UsageError, match="no step 99"):
        T.critical_path(training(2).load(tmp_path), 99)


def test_rounding_of_others_loses_time_and_ours_does_not(tmp_path: Path) -> None:
    """Case B: an event of 0.8 us that spans no whole microsecond is -1 us long when both ends are rounded inward."""
    build = Build()
    for i in range(10):
        build.kernel("tiny", i * 2 + 0.1, 0.8, call=i * 2 - 3)
    trace = build.load(tmp_path)
    assert T.kernel_table(trace)["sum_ns"].to_list() == [8_000]
    assert hta.temporal_breakdown(trace)["compute_us"][0] < 0
    assert T.annotation_table(trace).height == 0


def test_amd_traces(tmp_path: Path) -> None:
    """Case A and stream 0: text streams on runtime calls, default stream."""
    build = Build().step(1, 0, 50).call("hipMemcpyWithStream", 2, 20, correlation=117, stream="0x0", size="2560")
    build.add("gpu_memcpy", "MEMORY_COPY", 5, 10, pid=2, device=2, stream=0, correlation=117, kind="HtoD")
    trace = build.load(tmp_path)
    assert T.time_account(trace)["exposed_copy_ns"].to_list() == [10_000]
    assert T.launch_stats(trace).height == 1


def test_full_queue_of_every_stream_and_time_weights(tmp_path: Path) -> None:
    """Case L: each stream keeps its row; the mean is over time, not over points."""
    build = Build().kernel("a", 90, 5, call=0, stream=7).kernel("b", 10, 5, call=9, stream=8)
    frame = T.queue_summary(build.load(tmp_path))
    assert frame["stream"].to_list() == [7, 8]
    assert frame["mean"].to_list() == [1.0, 1.0]


def test_copy_bandwidth_adds_up_what_overlaps(tmp_path: Path) -> None:
    build = Build()
    for i in range(2):
        build.kernel(
            "Memcpy HtoD",
            i * 5,
            10,
            call=-2 + i,
            stream=i,
            cat="gpu_memcpy",
            bytes=str(100_000),
            **{"memory bandwidth (GB/s)": 10.0},
        )
    trace = build.load(tmp_path)
    assert T.copy_bandwidth(trace)["gb_per_s"].to_list() == [10.0, 20.0, 10.0, 0.0]
    assert T.bandwidth_summary(trace)["mean_gb_per_s"].to_list() == [10.0]


def test_critical_path_goes_through_the_sync_to_the_kernel(tmp_path: Path) -> None:
    path = T.critical_path(training(1, kernel=30).load(tmp_path))
    spent = dict(path.summary().select("category", "time_ns").iter_rows())
    # By hand: copy 5, its wait on the collective's end (an event) 0, collective 20, its wait on the kernel 0, kernel
    # 30.
    assert spent["copy"] == 5_000
    assert spent["communication"] == 20_000
    assert spent["compute"] == 30_000
    assert sum(spent.values()) == 100_000


def test_critical_path_follows_the_backward_thread(tmp_path: Path) -> None:
    build = Build().step(1, 0, 100).op("aten::forward", 0, 20)
    build.op("autograd::engine::evaluate_function: MmBackward0", 30, 50, tid=2).op("Optimizer.step", 85, 15)
    pieces = T.critical_path(build.load(tmp_path)).pieces
    places = pieces.filter(pl.col("category") == "operator")["place"].to_list()
    assert len(set(places)) == 2
    assert (
        pieces.filter(pl.col("category") == "operator").select(pl.col("end_ns") - pl.col("start_ns")).sum().item()
        == 85_000
    )


def test_what_if(tmp_path: Path) -> None:
    trace = training(3).load(tmp_path)
    free = T.what_if(trace, "kernels", kernels="gemm")
    assert free.wall_ns == 300_000
    assert free.low_ns <= free.estimate_ns < free.wall_ns
    assert abs(free.replay_error) < 0.05
    # Each step's kernel of 30 us is on the path; at most that can go. By hand: then the collective, which begins when
    # its launch has arrived, 32 us into the step, begins 18 us earlier ... (see the replay's own tests).
    assert 300_000 - 3 * 30_000 <= free.low_ns <= free.estimate_ns <= free.high_ns
    same = T.what_if(trace, "kernels", kernels="no such kernel")
    assert same.estimate_ns == same.low_ns == same.wall_ns
    assert T.what_if(trace, "kernels", kernels="gemm", factor=2.0).estimate_ns >= same.wall_ns
    with pytest.raises(UsageError):
        T.what_if(trace, "wishful thinking")
    with pytest.raises(UsageError):
        T.what_if(trace, "kernels", kernels="(")


@pytest.mark.parametrize("copy", ["Memcpy HtoD", "Memcpy M2D (MEMORY(Unknown) -> DEVICE)", "CopyHostToDevice"])
def test_a_graph_does_not_make_the_data_of_a_copy(tmp_path: Path, copy: str) -> None:
    made = Build().step(0, 0, 1000).op("aten::mm", 600, 200)
    made.kernel(copy, 520, 10, call=510, launch="cudaMemcpyAsync", cat="gpu_memcpy")  # after 510 us of host
    made.kernel("gemm", 620, 40, call=610).kernel("gemm", 760, 40, call=750).call("cudaDeviceSynchronize", 900, 100)
    found = T.what_if(made.load(tmp_path), "graph")
    assert 510_000 <= found.estimate_ns < 700_000
    assert found.low_ns <= 90_000  # what the devices still have to do


def test_a_wait_that_nothing_explains_is_unknown_on_the_path_as_it_is_in_the_gaps(tmp_path: Path) -> None:
    made = Build().step(0, 0, 1000).op("aten::mm", 0, 20).kernel("gemm", 800, 200, call=5)
    trace = made.load(tmp_path)
    pieces = T.critical_path(trace).summary()
    unknown = pieces.filter(pl.col("category") == "queued_unknown")["time_ns"].to_list()
    assert unknown == T.idle_summary(trace, 0).filter(pl.col("cause") == "queued_unknown")["idle_ns"].to_list()
    assert unknown == [793_000]


def test_what_is_missing_is_said_of_graphs_and_of_events(tmp_path: Path) -> None:
    """A late begin behind a graph's launch is not put down to events that nobody waited for."""
    late = Build().step(0, 0, 1000).kernel("gemm", 20, 30, call=5).kernel("gemm", 800, 200, call=30)
    said = missing_information(late.load(tmp_path), 0)
    assert "is queued work that launch and stream allowed to begin" in said
    assert "enable_cuda_sync_events" in said
    graph = Build().step(0, 0, 2000).kernel("gemm", 20, 60, call=5).call("cudaGraphLaunch", 30, 10, correlation=9)
    for at in (1500, 1700):
        graph.add("kernel", "k", at, 200, pid=0, device=0, stream=7, correlation=9)
    said = missing_information(graph.load(tmp_path), 0)
    assert "ends with a graph's work" in said
    assert "enable_cuda_sync_events" not in said


def test_compare_books_every_nanosecond(tmp_path: Path) -> None:
    before, after = training(5).load(tmp_path, "a.json"), training(5, kernel=40, extra_gap=7).load(tmp_path, "b.json")
    result = T.compare(before, after)
    assert result.change_ns == pytest.approx(7_000)
    parts = result.parts.filter(~pl.col("sums"))
    assert parts["change_ns"].sum() == pytest.approx(result.change_ns)
    change = dict(parts.select("part", "change_ns").iter_rows())
    assert change["compute: slower or faster"] == pytest.approx(10_000)
    assert change["compute: overlap gained or lost"] == pytest.approx(0)


def test_compare_with_itself_finds_nothing(tmp_path: Path) -> None:
    trace = training(4).load(tmp_path)
    result = T.compare(trace, trace)
    assert result.change_ns == 0
    assert result.parts["change_ns"].abs().sum() == 0
    assert result.work["change_ns"].abs().sum() == 0
    assert result.low_ns <= 0 <= result.high_ns
    assert set(result.operators["change"]) == {"same"}


def test_compare_sees_through_a_renamed_kernel(tmp_path: Path) -> None:
    before, after = (
        training(4).load(tmp_path, "a.json"),
        training(4, name="gemm_v2", kernel=33).load(tmp_path, "b.json"),
    )
    work = T.compare(before, after).work.filter(pl.col("class") == "compute")
    assert work["renamed"].to_list() == [True]
    assert work["matched_by"].to_list() == ["path"]
    assert work["slower_ns"].to_list() == pytest.approx([3_000])


def test_comparing_long_traces_needs_no_memory_beyond_theirs(tmp_path: Path) -> None:
    build = Build()
    for number in range(4000):
        build.step(number, 10 * number, 10).op("aten::add", 10 * number, 5 + number % 3)
    trace = build.load(tmp_path)
    tracemalloc.start()
    try:
        result = T.compare(trace, trace)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert result.low_ns == result.high_ns == 0
    assert peak < 64 << 20


def test_compare_two_sets_of_steps_of_one_trace(tmp_path: Path) -> None:
    trace = training(6).load(tmp_path)
    assert T.compare(trace, trace, steps_before=[0, 1], steps_after=[2, 3, 4]).steps_after == 3
    for unknown in ([77], [2, 77]):
        with pytest.raises(UsageError):
            T.compare(trace, trace, steps_after=unknown)


def test_bus_factors() -> None:
    assert bus_factor("allreduce", 8) == 1.75
    assert bus_factor("allgather", 8) == 0.875
    assert bus_factor("broadcast", 8) == 1.0


def ranks(folder: Path, *, skew: float, clock: float) -> list[T.Trace]:
    """Two ranks: rank 1 arrives `skew` us late, and its clock is `clock` us ahead."""
    traces = []
    for rank in (0, 1):
        build = Build(distributedInfo={"rank": rank})
        for i in range(4):
            t = i * 200
            ahead = clock if rank else 0
            late = skew if rank else 0
            end = t + 50 + skew
            build.step(i, t + ahead, 200).call("cudaDeviceSynchronize", t + 29 + ahead, end + 1 - t - 29)
            build.kernel("gemm", t + 5 + ahead, 20 + late, call=t + 1 + ahead)
            build.kernel(
                "ncclDevKernel_AllReduce",
                t + 30 + late + ahead,
                end - t - 30 - late,
                call=t + 4 + ahead,
                stream=20,
                **{
                    "Collective name": "allreduce",
                    "In msg nelems": 5000,
                    "Out msg nelems": 5000,
                    "dtype": "Float",
                    "Group size": 2,
                    "Process Group Name": "0",
                },
            )
        traces.append(build.load(folder, f"r{rank}.json"))
    return traces


def test_clocks_skew_and_the_straggler(tmp_path: Path) -> None:
    traces = ranks(tmp_path, skew=15, clock=1000)
    clocks = clock_offsets(match_collectives(traces))
    assert clocks["offset_ns"].to_list() == [0, 1_000_000]
    assert clocks["uncertainty_ns"].to_list() == [0, 0]
    skews = T.arrival(traces)
    assert skews["skew_ns"].to_list() == [15_000] * 4
    assert skews["last_rank"].to_list() == [1] * 4
    assert skews["transfer_ns"].to_list() == [20_000.0] * 4
    assert skews["bus_gb_per_s"].to_list() == [1.0] * 4  # 20000 bytes in 20 us, factor 1 for two ranks
    found = T.stragglers(traces).row(0, named=True)
    assert found["rank"] == 1
    assert found["caused_ns"] == 60_000
    # The first collective ends no stretch between two: three stretches, in each of which its gemm takes 15 us more.
    assert found["compute_excess_ns"] == 45_000
    assert found["reason"] == "it computes longer (0.045 ms), mostly gemm"
    across = T.kernels_across_ranks(traces).filter(pl.col("name") == "gemm").row(0, named=True)
    assert across["slowest_rank"] == 1


def test_critical_path_goes_to_the_rank_that_came_last(tmp_path: Path) -> None:
    path = T.critical_path_of_ranks(ranks(tmp_path, skew=15, clock=1000))
    spent = {
        (r["rank"], r["category"]): r["ns"]
        for r in path.pieces.group_by("rank", "category")
        .agg(ns=(pl.col("end_ns") - pl.col("start_ns")).sum())
        .to_dicts()
    }
    # Each step: 20 us of transfer, then the late rank's 35 us of compute; once there, the path has no reason to come
    # back.
    assert spent[(0, "communication")] == 20_000
    assert spent[(1, "communication")] == 3 * 20_000
    assert spent[(1, "compute")] == 4 * 35_000
    assert (0, "compute") not in spent
    assert sum(spent.values()) == path.wall_ns
    alone = T.critical_path_of_ranks(ranks(tmp_path, skew=0, clock=1000))
    assert set(alone.pieces["rank"]) == {0}
    with pytest.raises(UsageError):
        T.critical_path_of_ranks([training(2).load(tmp_path)])


def test_backward_kernels_know_their_forward(tmp_path: Path) -> None:
    build = Build()
    build.add("python_function", "nn.Module: Linear_0", 0, 30).add("python_function", "model.py(7): forward", 1, 28)
    build.op("aten::linear", 5, 10, **{"Sequence number": 42, "Fwd thread id": 0})
    build.add("python_function", "train.py(30): step", 50, 40)
    build.op(
        "autograd::engine::evaluate_function: AddmmBackward0",
        60,
        30,
        tid=2,
        **{"Sequence number": 42, "Fwd thread id": 1},
    )
    build.op("aten::mm", 65, 10, tid=2).kernel("gemm", 80, 5, call=70, tid=2).kernel("fwd", 20, 5, call=8)
    work = T.attribute_kernels(build.load(tmp_path)).sort("name")
    forward, backward = work.rows(named=True)
    assert (forward["operator"], forward["module"], forward["line"]) == (
        "aten::linear",
        "nn.Module: Linear_0",
        "model.py(7): forward",
    )
    assert (backward["operator"], backward["forward_operator"]) == ("aten::mm", "aten::linear")
    assert (backward["module"], backward["line"]) == ("nn.Module: Linear_0", "model.py(7): forward")


def test_operators_trees_and_sequences(tmp_path: Path) -> None:
    build = Build()
    for i in range(3):
        t = i * 100
        build.op("aten::outer", t, 50, **{"Input Dims": [[4, 4]]}).op("aten::inner", t + 10, 30)
        for k in range(3):
            build.kernel(f"k{k}", t + 60 + k * 10, 5, call=t + 12 + k * 5)
    trace = build.load(tmp_path)
    table = {r["operator"]: r for r in T.operator_table(trace).to_dicts()}
    assert table["aten::outer"]["self_ns"] == 60_000
    assert table["aten::inner"]["kernels"] == 9
    assert table["aten::inner"]["self_ns"] == 90_000 - 9 * 2_000
    assert table["aten::outer"]["shapes"] == "[[4,4]]"
    tree = {r["path"]: r for r in T.call_tree(trace).to_dicts()}
    assert tree["aten::outer > aten::inner"]["device_ns"] == 45_000
    assert tree["aten::outer"]["device_ns"] == 45_000
    found = T.kernel_sequences(trace, "outer").row(0, named=True)
    assert (found["kernels"], found["count"], found["device_ns"]) == ("k0 -> k1 -> k2", 3, 45_000)


def test_annotations_take_the_work_launched_inside_on_any_thread(tmp_path: Path) -> None:
    build = Build().step(0, 0, 200).add("user_annotation", "forward", 0, 50).add("user_annotation", "layer", 10, 20)
    build.kernel("k", 60, 5, call=12).kernel("k", 70, 7, call=40).add("user_annotation", "backward", 80, 100)
    build.add("user_annotation", "layer", 10, 10)  # of the same name inside: not counted again
    build.op("autograd::engine::evaluate_function: MmBackward0", 90, 40, tid=2).kernel("b", 120, 11, call=95, tid=2)
    trace = build.load(tmp_path)
    columns = ("host_inclusive_ns", "host_exclusive_ns", "device_inclusive_ns", "device_exclusive_ns", "kernels")
    table = {r["annotation"]: tuple(r[c] for c in columns) for r in T.annotation_table(trace).to_dicts()}
    assert table == {
        "ProfilerStep#": (200_000, 50_000, 23_000, 0, 3),
        "forward": (50_000, 30_000, 12_000, 7_000, 2),
        "layer": (20_000, 20_000, 5_000, 5_000, 1),
        "backward": (100_000, 100_000, 11_000, 11_000, 1),
    }
    tree = T.call_tree(trace)
    for name in ("forward", "backward"):
        row = tree.filter(pl.col("path") == f"ProfilerStep# > {name}").row(0, named=True)
        assert (row["host_ns"], row["device_ns"]) == (table[name][0], table[name][2])


def test_an_annotation_in_another_of_its_name_is_not_counted_again_at_any_depth(tmp_path: Path) -> None:
    build = Build()
    for level in range(300):
        build.add("user_annotation", "abc"[level % 3], level, 1000 - 2 * level)
    build.add("user_annotation", "a", 2000, 7)
    found = dict(T.annotation_table(build.load(tmp_path)).select("annotation", "host_inclusive_ns").iter_rows())
    assert found == {"a": 1_007_000, "b": 998_000, "c": 996_000}


def test_rows_that_tie_come_in_one_order(tmp_path: Path) -> None:
    build = Build()
    for i in range(400):
        build.op(f"aten::op{i % 50}", 100 * i, 50, **{"Input Dims": [[i // 50]]})
        build.kernel(f"k{i}", 100 * i + 20, 10, call=100 * i + 10)
    trace = build.load(tmp_path)
    table = T.operator_table(trace)
    assert table.height == 400
    assert table.rows() == sorted(table.rows(), key=lambda row: (row[1], row[2]))
    again = [T.compare(trace, trace).work for _ in range(3)]
    assert again[0].equals(again[1])
    assert again[1].equals(again[2])


def test_a_question_of_ranks_of_which_one_has_no_device(tmp_path: Path) -> None:
    (tmp_path / "host").mkdir()
    ranks = [Build().op("aten::mm", 0, 20).load(tmp_path / "host"), training(3).load(tmp_path)]
    assert T.query(ranks, "select * from idle").equals(T.query(ranks[1:], "select * from idle"), null_equal=True)


def test_counters_pair_only_where_they_can(tmp_path: Path) -> None:
    build = Build().op("aten::mm", 0, 20).call("cudaLaunchKernel", 5, 2, correlation=1)
    build.add("cuda_profiler_range", "gemm", 100, 5, **{"flops.sum": 12.0})
    frame = T.counters_by_operator(build.load(tmp_path))
    assert frame is not None
    assert frame.select("operator", "counter", "value").row(0) == ("aten::mm", "flops.sum", 12.0)
    build.call("cudaLaunchKernel", 9, 2, correlation=2)
    assert T.counters_by_operator(build.load(tmp_path)) is None


def test_shares_and_averages_among_counters_are_not_added_up(tmp_path: Path) -> None:
    build = Build().op("aten::mm", 0, 20)
    for i in (1, 2):
        build.call("cudaLaunchKernel", 5 * i, 2, correlation=i)
        share = {"sm__throughput.avg.pct_of_peak_sustained_elapsed": 40.0 * i}
        build.add("cuda_profiler_range", "gemm", 100 * i, 5, **{"flops.sum": 12.0}, **share)
    ranges = T.counters_by_operator(build.load(tmp_path))
    assert ranges is not None
    assert counter_sums(ranges)["value"].to_list() == [60.0, 24.0]


def test_memory_is_joined_to_operators(tmp_path: Path) -> None:
    build = Build().op("aten::empty", 0, 20).op("aten::cat", 30, 20)
    for ts, size, address, total in ((5, 100, 1, 600), (35, 50, 2, 650), (60, -100, 1, 550)):
        build.events.append(
            {
                "ph": "i",
                "cat": "cpu_instant_event",
                "name": "[memory]",
                "pid": 1,
                "tid": 1,
                "ts": ts,
                "s": "t",
                "args": {
                    "Bytes": size,
                    "Addr": address,
                    "Total Allocated": total,
                    "Total Reserved": 1000,
                    "Device Id": 0,
                    "Device Type": 1,
                },
            }
        )
    trace = build.load(tmp_path)
    timeline = T.memory_timeline(trace)
    assert timeline["operator"].to_list() == ["aten::empty", "aten::cat", None]
    assert timeline["device"].to_list() == ["cuda:0"] * 3
    peak = {r["operator"]: r["bytes"] for r in T.memory_peak(trace).to_dicts()}
    assert peak == {"aten::empty": 100, "aten::cat": 50, None: 500}


def test_a_full_queue_and_a_module_that_is_loaded_are_no_doing_of_the_profiler(tmp_path: Path) -> None:
    build = training(3)
    for name in ("Command Buffer Full", "Lazy Function Loading"):
        build.add("overhead", name, 0, 200, pid=-1, tid=0)
    health = T.trace_health(build.load(tmp_path))
    assert health.uncertain == ()
    assert "kinds of compilation or module loading inside the trace" in {f.what for f in health.findings}
    build.add("overhead", "Activity Buffer Request", 0, 200, pid=-1, tid=0)
    assert "idle" in T.trace_health(build.load(tmp_path)).uncertain


def test_health_counts_what_is_missing(tmp_path: Path) -> None:
    build = training(3).kernel("orphan", 1100, 5)
    build.call("cudaLaunchKernel", 1200, 2, correlation=9999)
    found = {f.what: f.count for f in T.trace_health(build.load(tmp_path)).findings}
    assert found["device work without a known launch"] == 1
    assert found["launches whose kernel is not in the trace"] == 1
    early = Build().kernel("k", 0, 5, call=100)
    health = T.trace_health(early.load(tmp_path))
    assert "idle" in health.uncertain
    assert T.trace_health(training(3).load(tmp_path)).uncertain == ()


def test_ranks_merged_into_one_file_are_told(tmp_path: Path) -> None:
    def merged(first: int, at: float) -> T.Health:
        build = training(1)
        build.add("cuda_runtime", "cudaLaunchKernel", at - 5, 2, pid=2, correlation=first)
        build.add("kernel", "gemm", at, 30, pid=0, tid=7, device=0, stream=7, correlation=first)
        return T.trace_health(build.load(tmp_path))

    for health in (merged(101, 2000), merged(900, 1030)):  # the number of another's launch, its stream at the same time
        assert ("serious", 2) in [(f.severity, f.count) for f in health.findings]
        assert {"account", "idle", "kernels"} <= set(health.uncertain)
    assert merged(900, 2000).uncertain == ()


def test_sql(tmp_path: Path) -> None:
    traces = [training(3).load(tmp_path)]
    frame = T.query(traces, "select class, sum(sum_ns) as ns from kernels group by class order by ns desc")
    assert frame["ns"].to_list() == [90_000, 60_000, 15_000]
    idle = "select rank, sum(end_ns - start_ns) as ns from idle group by rank order by rank"
    assert T.query([*traces, replace(traces[0], rank=1)], idle)["rank"].to_list() == [0, 1]
    for text in ("select", "drop table events", "select * from nowhere", "select nothing_here from events"):
        with pytest.raises(UsageError):
            T.query(traces, text)


def test_no_quotes_or_comments_let_sql_read_another_file(tmp_path: Path) -> None:
    traces, path = [training(2).load(tmp_path)], tmp_path / "other.csv"
    path.write_text("a\n1\n")
    for text in (
        f"select * from read_csv('{path}')",
        f"""select *, 1 as "it's" from read_csv('{path}') as "it's" """,
        f"""select * from "read_csv"('{path}')""",
        f"select * from read_csv/* */('{path}')",
        f"select * -- '\nfrom read_csv('{path}') -- '",
        f"select *, `it's` from read_csv('{path}') as `it's`",
        f"select *, $$'$$ from read_csv('{path}') as a, $$'$$",
    ):
        with pytest.raises(UsageError, match="only the trace is read"):
            T.query(traces, text)
    quoted = "select count(*) as \"n(\" from events where name = 'read_csv(int)'"
    assert T.query(traces, quoted)["n("].to_list() == [0]


def test_short_names() -> None:
    assert (
        short_kernel_name("void at::native::(anonymous namespace)::vec_kernel<4, F>(int)") == "at::native::vec_kernel"
    )
    assert short_kernel_name("<lambda>") == "<lambda>"


def test_data_that_the_main_thread_makes_has_a_price_that_is_not_known(tmp_path: Path) -> None:
    for loader, sure in (("_MultiProcessingDataLoaderIter", True), ("_SingleProcessDataLoaderIter", False)):
        build = Build()
        for i in range(4):
            build.step(i, 100 * i, 100).op("aten::mm", 100 * i + 60, 30)
            build.add("user_annotation", f"enumerate(DataLoader)#{loader}.__next__", 100 * i + 5, 50)
        answer = T.what_if(build.load(tmp_path), "data_ready")
        assert answer.estimate_ns == pytest.approx(200_000, rel=0.01)
        assert answer.cannot_tell is not sure
        assert answer.answer.startswith("saves 5" if sure else "cannot tell, saves 0.0% to 5")


def test_idle_time_of_each_stream(tmp_path: Path) -> None:
    build = Build()
    for i in range(6):  # the first stream's work waits for its launch, 10 us each, and then 4 us
        build.kernel("a", 100 + 20 * i, 6, call=94 + 20 * i)
        build.kernel("b", 300 + 10 * i, 9, call=200 + 5 * i, stream=8)
    table = T.idle_streams(build.load(tmp_path))
    assert table["work"].to_list() == [6, 6]
    assert table["idle_ns"].to_list() == [5 * 14_000, 5 * 1_000]
    assert table["host_ns"].to_list() == [5 * 10_000, 0]
    assert table["latency_ns"].to_list() == [5 * 4_000, 0]
    assert table["gap_ns"].to_list() == [0, 5 * 1_000]
    assert (
        table["idle_ns"] == table.select(pl.sum_horizontal("^(host|event|latency|gap|unknown)_ns$")).to_series()
    ).all()


def test_work_without_a_launch_is_kernel_wait_where_its_gap_is_short(tmp_path: Path) -> None:
    build = Build().kernel("a", 0, 10).kernel("b", 15, 10).kernel("c", 90, 10)
    table = hta.idle_breakdown(build.load(tmp_path))
    assert dict(table.select("idle_category", "idle_us").iter_rows()) == {"host_wait": 0, "kernel_wait": 5, "other": 65}


def test_a_step_may_end_with_its_own_annotation(tmp_path: Path) -> None:
    build = Build()
    for i in range(3):
        build.step(i, 100 * i, 60).op("aten::mm", 100 * i + 5, 10)
    trace = build.load(tmp_path)
    assert T.steps(trace)["wall_ns"].to_list() == [100_000, 100_000, 60_000]
    assert T.steps(replace(trace, own_end=True))["wall_ns"].to_list() == [60_000] * 3


def test_waits_are_exact_on_clocks_that_count_from_1970(tmp_path: Path) -> None:
    def waits(base: int) -> list[int]:
        build = Build()
        for i in range(10):  # every other piece is queued behind the one before while its call goes on
            build.kernel("k", base + 400 * i + 60, 330 + 20 * (i % 2), call=base + 400 * i, call_dur=120)
        return (device_waits(build.load(tmp_path)).since - 1000 * base).tolist()

    assert waits(1_700_000_000_000_000) == waits(1000)


def test_transfers_are_exact_on_clocks_that_count_from_1970(tmp_path: Path) -> None:
    base, traces = 1_700_000_000_000_001, []
    told = {"Collective name": "allreduce", "In msg nelems": 5000, "Out msg nelems": 5000, "Process Group Name": "0"}
    for rank in range(2):
        build = Build(distributedInfo={"rank": rank})
        for at in (base + 10, base + 30):
            build.kernel("ncclDevKernel_AllReduce", at, 9, call=at - 5, **told)
        traces.append(build.load(tmp_path, f"{rank}.json"))
    assert T.arrival(traces)["transfer_ns"].to_list() == [9_000.0] * 2


def test_two_reasons_at_once_are_told_as_a_range(tmp_path: Path) -> None:
    """The last kernel may have waited for its launch or for the kernel before it: both let go as usual before it."""
    build = Build()
    for i in range(30):
        build.kernel("alone", 1000 + 100 * i, 20, call=1000 + 100 * i - 5 - i % 3, call_dur=2)
        build.kernel("next", 1021 + 100 * i + 0.1 * (i % 5), 20, call=990 + 100 * i, call_dur=1, tid=2)
    build.kernel("long", 5000, 1000, call=4990).kernel("either", 6001.2, 5, call=5994.6, call_dur=2)
    shares = T.path_shares(trace := build.load(tmp_path), T.critical_path(trace))
    compute = shares.filter(pl.col("category") == "compute").row(0, named=True)
    assert compute["low_share"] < compute["high_share"]
    assert compute["low_share"] <= compute["share"] <= compute["high_share"]
    assert shares["time_ns"].sum() == T.critical_path(trace).wall_ns


def collective(build: Build, ts: float, dur: float, group: str) -> Build:
    facts = {"Collective name": "allreduce", "In msg nelems": 10, "Out msg nelems": 10, "dtype": "Float"}
    more = {"Group size": 2, "Process Group Name": group}
    return build.kernel("ncclDevKernel_AllReduce", ts, dur, call=ts - 20, stream=20, **facts, **more)


def test_clocks_of_ranks_that_share_no_collective_with_the_first(tmp_path: Path) -> None:
    """Rank 2 is held against rank 1, which shares some with both; ranks 3 and 4 against each other."""
    ahead = {0: 0, 1: 3_000, 2: 50_000, 3: 700_000, 4: 707_000}
    traces = []
    for rank, clock in ahead.items():
        build = Build(distributedInfo={"rank": rank})
        for i in range(5):
            for group, ranks in (("a", (0, 1)), ("b", (1, 2)), ("c", (3, 4))):
                if rank in ranks:
                    collective(build, 1000 + 300 * i + 100 * "abc".index(group) + clock, 20, group)
        traces.append(build.load(tmp_path, f"r{rank}.json"))
    offsets = clock_offsets(match_collectives(traces))["offset_ns"].to_list()
    assert offsets == [0, 3_000_000, 50_000_000, 0, 7_000_000]
    skews = T.arrival(traces)
    assert skews["group"].value_counts(sort=True)["count"].to_list() == [5, 5, 5]
    assert skews["skew_ns"].to_list() == [0] * 15


def test_exchanges_whose_sizes_differ_by_rank_are_matched_in_their_order(tmp_path: Path) -> None:
    """As of a mixture of experts, whose ranks send as many tokens as each expert is asked for."""
    traces = []
    for rank, sizes in enumerate(((10, 20, 30), (20, 10, 40))):
        build = Build(distributedInfo={"rank": rank})
        for i, size in enumerate(sizes):
            facts = {"Collective name": "all_to_allv", "In msg nelems": size, "Out msg nelems": size, "dtype": "Float"}
            more = {"Group size": 2, "Process Group Name": "0"}
            build.kernel("ncclDevKernel_SendRecv", 1000 + 300 * i, 20, call=980 + 300 * i, stream=20, **facts, **more)
        traces.append(build.load(tmp_path, f"r{rank}.json"))
    skews = T.arrival(traces)
    assert skews["skew_ns"].to_list() == [0, 0, 0]
    assert skews["bytes"].to_list() == [None, None, None]


@pytest.mark.parametrize("base", ["yesterday", float("nan"), [1], 10**40])
def test_a_base_time_that_is_not_a_number_is_none(tmp_path: Path, base: object) -> None:
    traces = [
        collective(Build(distributedInfo={"rank": rank}, baseTimeNanoseconds=base), 100, 20, "0").load(tmp_path)
        for rank in (0, 1)
    ]
    assert T.arrival(traces)["skew_ns"].to_list() == [0]


def test_of_several_devices_the_work_of_the_compared_one_is_matched(tmp_path: Path) -> None:
    def two_devices(other: float) -> T.Trace:
        build = Build()
        for i in range(3):
            build.step(i, 200 * i, 200).kernel("gemm", 200 * i + 10, 50, call=200 * i + 2, device=0)
            build.kernel("other", 200 * i + 10, other, call=200 * i + 5, device=1)
        return build.load(tmp_path)

    result = T.compare(two_devices(20), two_devices(35))
    assert result.work["name"].to_list() == ["gemm"]
    assert result.parts["change_ns"].abs().max() == 0  # the busiest device did the same


def test_a_range_may_have_what_parts_a_path_in_its_name(tmp_path: Path) -> None:
    build = Build().step(0, 0, 100).add("user_annotation", "load > run", 10, 50).op("aten::mm", 20, 10)
    trace = build.kernel("gemm", 40, 10, call=22).load(tmp_path)
    assert T.identities(trace)["holds"].all()
    assert T.call_tree(trace)["path"].to_list() == [
        "ProfilerStep#",
        "ProfilerStep# > load>run",
        "ProfilerStep# > load>run > aten::mm",
    ]


def test_a_loader_on_a_thread_of_its_own_holds_no_step_up(tmp_path: Path) -> None:
    build = Build()
    for i in range(2):
        build.step(i, 100 * i, 100).op("aten::mm", 100 * i + 20, 80)
        build.add("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 100 * i, 90, tid=2)
        build.add("user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 100 * i, 10)
    assert T.loader_waits(build.load(tmp_path))["wait_ns"].to_list() == [10_000, 10_000]


@pytest.mark.parametrize(
    ("call", "sync", "stream"),
    [("cudaStreamSynchronize", "Stream Sync", 7), ("cudaDeviceSynchronize", "Context Sync", 4294967295)],
)
def test_a_call_that_waits_for_one_device_waits_for_no_other(tmp_path: Path, call: str, sync: str, stream: int) -> None:
    """Both devices have a stream 7; what the other one does ends while the call waits as well, and later."""
    build = Build().kernel("mine", 10, 30, call=0).kernel("other", 10, 38, call=3, device=1)
    build.call(call, 6, 45, correlation=900)
    more = {"device": 0, "stream": stream, "cuda_sync_kind": sync, "correlation": 900}
    trace = build.add("cuda_sync", sync, 6, 45, pid=0, tid=stream, **more).load(tmp_path)
    stops = host_stops(trace)
    assert trace.name_of(trace.device_rows[stops.work]) == ["mine"]
    assert stops.when.tolist() == [40_000]
    assert set(trace.name_of(trace.device_rows[replay_of(trace).last_work[0]])) == {"mine"}
