"""Planted causes are found and named; healthy snapshots are left alone."""

from __future__ import annotations

from typing import Any

import pytest
from memory_machine import MIB, Machine, healthy_training, stack

from fettle.errors import UsageError
from fettle.memory import Analysis, analyse, as_json, compare, parse, verdict, would_fit
from fettle.memory.fragmentation import round_size, segment_size
from fettle.memory.leaks import theil_sen

GIB = 1 << 30
FORWARD = ("relu:10", "forward:20", "_call_impl:30", "step:40")


def _analyse(machine: Machine, **options: Any) -> Analysis:
    return analyse(parse(machine.data()), **options)


# ---- healthy ----


def test_a_healthy_loop_gets_no_findings() -> None:
    analysis = _analyse(healthy_training(12))
    assert analysis.leaks.judged
    assert analysis.leaks.steps == 12
    assert not analysis.leaks.leaks
    assert not analysis.churn
    assert not analysis.advice
    assert not analysis.violations
    assert analysis.unexplained_bytes == 0


def test_one_forward_pass_without_marks_is_not_called_a_leak() -> None:
    machine = Machine()
    for layer in range(60):
        machine.alloc(4 * MIB, stack(f"relu:{layer}", "forward:20", "_call_impl:30"))
    analysis = _analyse(machine)
    assert not analysis.leaks.judged
    assert "warm-up" in analysis.leaks.reason
    assert not analysis.churn


def test_a_window_that_ends_where_it_began_did_not_leak() -> None:
    machine = Machine()
    for _ in range(30):
        machine.free(machine.alloc(4 * MIB, stack("f")))
    leaks = _analyse(machine).leaks
    assert leaks.judged
    assert not leaks.leaks


# ---- holders ----


def test_holders_add_up_to_the_peak_and_know_their_lives() -> None:
    machine = Machine()
    old = machine.alloc(40 * MIB, stack("weights:1"))
    seen = len(machine.events)
    short = [machine.alloc(7 * MIB, stack("relu:5", "forward:6", "_call_impl:7")) for _ in range(3)]
    machine.alloc(1000, stack("kept:8"))
    for address in short:
        machine.free(address)
    analysis = analyse(parse(machine.data(len(machine.events) - seen)))
    first, second, third = analysis.holders
    assert sum(row.bytes for row in analysis.holders) == analysis.replay.peak_bytes == max(machine.used[seen:])
    assert (first.own_line, first.bytes, first.from_before, first.until_end) == (
        "model.py:1 in weights",
        40 * MIB,
        1,
        1,
    )
    assert (second.count, second.bytes, second.phase, second.until_end) == (3, 21 * MIB, "forward", 0)
    # An event is 10 us. Born at events 2, 3 and 5 (a segment came between), gone at 9, 11 and 13: 7, 8 and 8 events.
    assert second.median_lifetime_ms == pytest.approx(0.08)
    assert (third.bytes, third.until_end) == (1000, 1)
    assert machine.in_use == 40 * MIB + 1000
    assert old


def test_the_line_shown_is_the_users_own() -> None:
    machine = Machine()
    library = stack("linear:134", file="/usr/lib/python3/dist-packages/torch/nn/modules/linear.py")
    machine.alloc(MIB, library + stack("forward:12", file="/home/user/net.py") + stack("main:99"))
    assert _analyse(machine).holders[0].own_line == "net.py:12 in forward"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>&&)", "MmBackward0 (C++)"),
        ("torch::autograd::AccumulateGrad::apply(std::vector<at::Tensor>&&)", "AccumulateGrad (C++)"),
        ("at::(anonymous namespace)::wrapper_CUDA__mm(at::Tensor const&)", "at::wrapper_CUDA__mm (C++)"),
    ],
)
def test_autograds_threads_are_shown_by_their_node(name: str, shown: str) -> None:
    machine = Machine()
    allocator = {"name": "at::native::foo(long)", "filename": "??", "line": 0}
    frames = [{"name": name, "filename": "??", "line": 0}]
    machine.alloc(MIB, [allocator, *frames] if "autograd" in name else frames)
    assert _analyse(machine).holders[0].own_line == shown


def test_blocks_without_a_stack_say_why() -> None:
    machine = Machine()
    machine.alloc(9 * MIB, [])
    seen = len(machine.events)
    machine.alloc(5 * MIB, [])
    lines = [row.own_line for row in analyse(parse(machine.data(len(machine.events) - seen))).holders]
    assert lines == ["(allocated before recording began)", "(no stack recorded)"]


# ---- spikes ----


def test_a_spike_is_found_with_what_it_is_made_of() -> None:
    machine = Machine()
    base = machine.alloc(20 * MIB, stack("base:1"))
    for number in range(80):
        machine.free(machine.alloc(MIB // 2, stack("small:2")))
        if number == 40:
            high = machine.alloc(300 * MIB, stack("logits_to_float:3"))
            machine.free(high)
    spike = _analyse(machine).spikes[0]
    assert spike.contributors[0].own_line == "model.py:3 in logits_to_float"
    assert spike.contributors[0].bytes == 300 * MIB
    assert spike.top_bytes == max(machine.used)
    assert 299 * MIB < spike.height_bytes <= 300 * MIB + MIB
    assert base


def test_a_plateau_has_no_spikes() -> None:
    machine = Machine()
    machine.alloc(20 * MIB, stack("base:1"))
    for _ in range(80):
        machine.free(machine.alloc(MIB // 2, stack("small:2")))
    assert not _analyse(machine).spikes


def test_the_activations_of_a_training_step_are_no_spike() -> None:
    machine = Machine()
    machine.alloc(100 * MIB, stack("weights:1"))
    for _ in range(4):
        kept = [machine.alloc(5 * MIB, stack(f"layer:{i}", "forward:9")) for i in range(40)]
        for address in reversed(kept):
            machine.free(address)
        for _ in range(60):
            machine.free(machine.alloc(MIB // 2, stack("optimizer:3")))
    assert not _analyse(machine).spikes


def test_without_events_there_is_no_peak_and_no_word_on_leaks() -> None:
    machine = Machine()
    machine.alloc(9 * MIB, stack("weights:1"))
    analysis = analyse(parse(machine.data(0) | {"device_traces": [[]]}))
    assert verdict(analysis).startswith("9.00 MiB in use, ")
    assert "the peak is not known" in verdict(analysis)
    assert not analysis.leaks.judged
    assert as_json(analysis)["peak_bytes"] is None


# ---- leaks ----


def _leaking(kind: str, steps: int = 14) -> Machine:
    machine = Machine()
    machine.alloc(8 * MIB, stack("build:3"))
    waiting: list[int] = []
    resident = 1 * GIB
    for number in range(steps):
        work = machine.alloc(4 * MIB, stack(*FORWARD))
        if kind == "graph":
            machine.alloc(3 * MIB, stack("linear:11", "forward:21", "_call_impl:31", "step:40"))
            machine.alloc(3 * MIB, stack("relu:12", "forward:22", "_call_impl:31", "step:40"))
        elif kind == "tensor":
            machine.alloc(5 * MIB, stack("append:77", "step:40"))
        elif kind == "cycle":
            waiting.append(machine.alloc(6 * MIB, stack("cache:50", "step:40")))
            if number % 5 == 4:
                while waiting:
                    machine.free(waiting.pop())
        elif kind == "fragmentation":
            # A small survivor of a few bytes pins a new segment of its own every step.
            machine.alloc(12 * MIB + number * 2 * MIB, stack("odd:60"))
            last = machine.segments[-1]["blocks"][0]["address"]
            machine.free(last)
            machine.segments[-1]["blocks"] = [
                {
                    "address": last,
                    "size": 512,
                    "requested_size": 4,
                    "state": "active_allocated",
                    "frames": stack("pin:61"),
                },
                {
                    "address": last + 512,
                    "size": machine.segments[-1]["total_size"] - 512,
                    "requested_size": 0,
                    "state": "inactive",
                    "frames": [],
                },
            ]
            machine.in_use += 4
            machine.note("alloc", 4, stack("pin:61"), addr=last)
        elif kind == "host":
            resident += 50 * MIB
        machine.free(work)
        machine.host_memory.append((machine.now_us, resident))
        machine.step()
    return machine


@pytest.mark.parametrize("kind", ["graph", "tensor", "cycle", "fragmentation", "host"])
def test_each_kind_of_leak_is_named(kind: str) -> None:
    analysis = _analyse(_leaking(kind))
    assert not analysis.violations
    assert [leak.kind for leak in analysis.leaks.leaks] == [kind]


def test_a_leak_names_its_stack_and_its_size() -> None:
    leak = _analyse(_leaking("tensor")).leaks.leaks[0]
    assert leak.bytes_per_step == 5 * MIB
    assert leak.growing_share == 1
    assert (leak.survivors[0].own_line, leak.survivors[0].size_bytes) == ("model.py:77 in append", 5 * MIB)
    assert leak.survivors[0].steps == 14


def test_growth_that_ends_with_the_warm_up_is_no_leak() -> None:
    machine = Machine()
    for number in range(12):
        if number < 3:
            machine.alloc(50 * MIB, stack("lazy:9"))
        machine.free(machine.alloc(4 * MIB, stack(*FORWARD)))
        machine.step()
    assert not _analyse(machine).leaks.leaks


def test_too_few_steps_are_not_judged() -> None:
    leaks = _analyse(_leaking("tensor", steps=4)).leaks
    assert not leaks.judged
    assert "4 steps in the window" in leaks.reason


def test_theil_sen_is_not_moved_by_one_odd_step() -> None:
    assert theil_sen([0, 1, 2, 300, 4, 5, 6, 7, 8]) == pytest.approx(1)
    assert theil_sen([5]) == 0
    assert theil_sen(range(0, 4000, 2)) == pytest.approx(2)


# ---- fragmentation ----


def _checkerboard() -> Machine:
    """Ten segments of 20 MiB, in each 10 MiB in use and 10 MiB free."""
    machine = Machine()
    pairs = [(machine.alloc(10 * MIB - 512, stack("a")), machine.alloc(10 * MIB - 512, stack("b"))) for _ in range(10)]
    for _, second in pairs:
        machine.free(second)
    return machine


def test_pools_tell_stuck_from_releasable() -> None:
    machine = _checkerboard()
    idle = machine.alloc(64 * MIB, stack("c"))
    machine.free(idle)
    (pool,) = _analyse(machine).pools
    assert pool.reserved_bytes == 264 * MIB
    assert pool.releasable_bytes == 64 * MIB
    assert pool.non_releasable_bytes == 264 * MIB - 64 * MIB - 10 * (10 * MIB - 512)
    assert pool.largest_free_bytes == 64 * MIB
    assert pool.free_bytes == pool.releasable_bytes + pool.non_releasable_bytes


def test_what_was_reserved_and_never_used() -> None:
    machine = Machine()
    machine.free(machine.alloc(5 * MIB, stack("f:1")))
    assert _analyse(machine).never_used == 0.75  # 5 of the 20 MiB that were fetched for it


def test_free_blocks_serve_only_their_own_stream_and_pool() -> None:
    machine = Machine()
    machine.free(machine.alloc(64 * MIB, stack("a"), stream=7))
    snapshot = parse(machine.data())
    assert would_fit(snapshot, 0, 50 * MIB, stream=7).answer == "cache"
    assert would_fit(snapshot, 0, 50 * MIB, stream=0).answer == "unknown"
    assert would_fit(snapshot, 0, 50 * MIB, stream=7, pool=(1, 0)).answer == "unknown"
    assert would_fit(snapshot, 0, 1000, stream=7).answer == "unknown"  # large blocks do not serve the small pool


@pytest.mark.parametrize(
    ("request_bytes", "device_free", "answer", "fragmented"),
    [
        (9 * MIB, 0, "cache", False),
        (15 * MIB, 0, "no", True),
        (15 * MIB, 15 * MIB, "no", True),
        (15 * MIB, 16 * MIB, "device", True),
        (500 * MIB, 0, "no", False),
        (15 * MIB, None, "unknown", True),
    ],
)
def test_would_it_have_fitted(request_bytes: int, device_free: int | None, answer: str, fragmented: bool) -> None:
    fit = would_fit(parse(_checkerboard().data()), 0, request_bytes, device_free_bytes=device_free)
    assert (fit.answer, fit.fragmented) == (answer, fragmented)


def test_idle_segments_are_given_back_first_but_private_ones_are_not() -> None:
    machine = _checkerboard()
    machine.free(machine.alloc(64 * MIB, stack("c")))
    assert would_fit(parse(machine.data()), 0, 70 * MIB, device_free_bytes=6 * MIB).answer == "after_release"
    data = machine.data()
    data["segments"][-1]["segment_pool_id"] = (0, 3)
    assert would_fit(parse(data), 0, 70 * MIB, device_free_bytes=6 * MIB).answer == "no"


def test_the_request_that_failed_is_asked_about() -> None:
    machine = _checkerboard()
    machine.note("oom", 17 * MIB, stack("big:8"), device_free=3 * MIB)
    fit = _analyse(machine).fit
    assert fit is not None
    assert (fit.request_bytes, fit.device_free_bytes, fit.answer, fit.fragmented) == (17 * MIB, 3 * MIB, "no", True)


def test_max_split_size_keeps_large_blocks_whole() -> None:
    machine = Machine()
    machine.settings["max_split_size"] = 32 * MIB
    machine.free(machine.alloc(64 * MIB, stack("a")))
    snapshot = parse(machine.data())
    assert would_fit(snapshot, 0, 20 * MIB, device_free_bytes=0).answer != "cache"
    assert would_fit(snapshot, 0, 60 * MIB, device_free_bytes=0).answer == "cache"
    assert would_fit(snapshot, 0, 40 * MIB, device_free_bytes=0).answer != "cache"  # more than 20 MiB to spare


def test_expandable_segments_give_back_pages_and_grow_behind_their_last_block() -> None:
    data = _checkerboard().data()
    for segment in data["segments"]:
        segment["is_expandable"] = True
    snapshot = parse(data)
    (pool,) = analyse(snapshot).pools
    assert (pool.releasable_bytes, pool.non_releasable_bytes) == (0, 10 * (10 * MIB + 512))  # no whole page of 20 MiB
    assert would_fit(snapshot, 0, 15 * MIB).needed_from_device_bytes == 20 * MIB
    assert would_fit(snapshot, 0, 29 * MIB).needed_from_device_bytes == 20 * MIB
    assert would_fit(snapshot, 0, 31 * MIB).needed_from_device_bytes == 40 * MIB
    machine = Machine()
    machine.free(machine.alloc(64 * MIB, stack("a")))
    data = machine.data()
    data["segments"][0]["is_expandable"] = True
    assert analyse(parse(data)).releasable_bytes == 60 * MIB


def test_rounding() -> None:
    assert [round_size(size, {}) for size in (1, 512, 513, MIB + 1)] == [512, 512, 1024, MIB + 512]
    eighths = {"roundup_power2_divisions[1]": 4, "roundup_power2_divisions[1024]": 8}
    assert round_size(1200 * 1024, eighths) == 1280 * 1024  # quarters between 1 and 2 MiB
    assert round_size(1100 * MIB, eighths) == 1152 * MIB
    sizes = (512, MIB + 512, 11 * MIB)
    assert [segment_size(size, {}) for size in sizes] == [2 * MIB, 20 * MIB, 12 * MIB]
    larger = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False,large_segment_size_mb:64"}
    assert [segment_size(size, larger) for size in sizes] == [2 * MIB, 64 * MIB, 12 * MIB]


# ---- churn and advice ----


def _churning(name: str) -> Machine:
    machine = Machine()
    machine.alloc(8 * MIB, stack("build:3"))
    for _ in range(8):
        for address in [machine.alloc(32 * MIB, stack(*FORWARD)) for _ in range(4)]:
            machine.free(address)
        machine.give_back([{"name": name, "filename": "??", "line": 0}, *stack("step:40", "main:50")])
        machine.step()
    machine.alloc(32 * MIB, stack(*FORWARD))
    return machine


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("c10::cuda::CUDACachingAllocator::emptyCache()", "empty_cache"),
        ("empty_cache", "empty_cache"),
        ("DeviceCachingAllocator::release_cached_blocks()", "near_full"),
        ("DeviceCachingAllocator::garbage_collect_cached_blocks()", "gc_threshold"),
        ("malloc", "allocator"),
    ],
)
def test_churn_names_its_cause(name: str, cause: str) -> None:
    (row,) = _analyse(_churning(name)).churn
    assert (row.cause, row.own_line) == (cause, "model.py:40 in step")
    assert (row.freed_segments, row.freed_bytes) == (32, 32 * 32 * MIB)
    assert row.allocated_segments == 29
    assert row.same_sizes == 29 / 32


def test_giving_back_once_at_the_end_is_not_churn() -> None:
    machine = Machine()
    machine.free(machine.alloc(32 * MIB, stack("f")))
    machine.give_back(stack("empty_cache"))
    assert not _analyse(machine).churn


def test_shapes_that_keep_growing_are_churn() -> None:
    machine = Machine()
    for number in range(10):
        machine.free(machine.alloc((12 + 4 * number) * MIB, stack("pad:4", "step:40")))
        machine.step()
    (row,) = _analyse(machine).churn
    assert (row.cause, row.own_line) == ("shapes", "model.py:4 in pad")
    settings = [advice.setting for advice in _analyse(machine).advice]
    assert settings == ["expandable_segments:True", "roundup_power2_divisions:8"]


def test_advice_on_empty_cache_and_expandable_segments_says_when_not() -> None:
    advice = _analyse(_churning("empty_cache")).advice
    assert advice[0].setting == "remove empty_cache() at model.py:40 in step"
    machine = Machine()
    blocks = [(machine.alloc(100 * MIB, stack("a")), machine.alloc(8 * MIB, stack("b"))) for _ in range(10)]
    for large, _ in blocks:
        machine.free(large)
        segment = next(s for s in machine.segments if s["address"] == large)
        segment["blocks"] = [
            {"address": large, "size": 512, "requested_size": 4, "state": "active_allocated", "frames": stack("pin")},
            {"address": large + 512, "size": 100 * MIB - 512, "requested_size": 0, "state": "inactive", "frames": []},
        ]
    (found,) = _analyse(machine).advice
    assert found.setting == "expandable_segments:True"
    assert any("IPC" in reason for reason in found.not_when)
    machine.settings["expandable_segments"] = True
    assert not _analyse(machine).advice


def test_a_failed_request_in_fragments_is_advised_on() -> None:
    machine = _checkerboard()
    machine.note("oom", 17 * MIB, stack("big:8"), device_free=3 * MIB)
    assert [row.setting for row in _analyse(machine).advice] == ["expandable_segments:True"]


# ---- difference ----


def test_the_difference_is_by_stack_not_by_address() -> None:
    before, after = Machine(), Machine()
    for machine, extra in ((before, 0), (after, 9 * MIB)):
        machine.next_address += extra * 1000
        machine.alloc(5 * MIB, stack("same:1"))
        machine.alloc(3 * MIB + extra, stack("grown:2"))
    before.alloc(2 * MIB, stack("gone:3"))
    difference = compare(parse(before.data()), parse(after.data()), 0)
    assert [(row.own_line, row.change_bytes) for row in difference.at_end] == [
        ("model.py:2 in grown", 9 * MIB),
        ("model.py:3 in gone", -2 * MIB),
    ]
    assert difference.end_after_bytes - difference.end_before_bytes == 7 * MIB
    assert not difference.notes
    assert not compare(parse(after.data()), parse(after.data()), 0).at_peak


def test_different_programs_are_called_so() -> None:
    one, other = Machine(), Machine()
    one.alloc(5 * MIB, stack("f:1"))
    other.alloc(5 * MIB, stack("g:1", file="/elsewhere/serve.py"))
    assert "different programs" in compare(parse(one.data()), parse(other.data()), 0).notes[0]
    with pytest.raises(UsageError, match="nothing of device 5"):
        compare(parse(one.data()), parse(other.data()), 5)


# ---- words ----


def test_the_recorders_own_growth_is_no_leak_of_the_host() -> None:
    machine = _leaking("host")
    machine.host_memory = [(time_us, (1 << 30) + 2 * MIB * n) for n, (time_us, _) in enumerate(machine.host_memory)]
    assert [leak.kind for leak in _analyse(machine).leaks.leaks] == ["host"]
    for _ in range(4000):  # so many events a step explain 2 MiB a step
        machine.events.insert(0, {**machine.events[0], "action": "snapshot"})
    assert not _analyse(machine).leaks.leaks
