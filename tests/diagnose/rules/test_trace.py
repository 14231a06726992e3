"""What a trace alone says: planted waits, with bounds that can be checked on paper. Times are microseconds."""

import time
from pathlib import Path

import pytest
import torch

from fettle.diagnose.recordings import of_trace
from fettle.diagnose.rules import trace as trace_rules
from fettle.diagnose.rules.trace import trace_findings
from fettle.trace import load, record
from tests.trace.build import Build

NEXT = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def on_device(waits: float) -> Build:
    """Two steps of 1000 us: the host waits for data, launches, and the device works until the step ends."""
    made = Build()
    for number in range(2):
        start = 1000.0 * number
        made.step(number, start, 1000)
        made.add("user_annotation", NEXT, start, waits)
        made.kernel("gemm", start + waits + 10, 990 - waits, call=start + waits + 1)
    return made


def test_the_device_waits_for_data(tmp_path: Path) -> None:
    found, budget = trace_findings(on_device(400).load(tmp_path))
    assert found[0].rule == "data-wait"
    assert 0.4 <= found[0].bound < 0.45
    assert found[0].formula
    assert found[0].before != found[0].after
    assert sum(budget.values()) == pytest.approx(1.0)


def test_no_wait_no_finding(tmp_path: Path) -> None:
    assert "data-wait" not in [finding.rule for finding in trace_findings(on_device(10).load(tmp_path))[0]]


@pytest.mark.parametrize(
    ("operator", "named"), [("aten::mm\x1b[2J", True), ("autograd::engine::evaluate_function: X", False)]
)
def test_graphs_are_named_for_inference_alone(operator: str, named: bool, tmp_path: Path) -> None:
    made = Build().step(0, 0, 1000).op(operator, 100, 700).kernel("gemm", 810, 180, call=790)
    (tmp_path / "t.json").write_text(made.text())
    (found,) = of_trace(tmp_path / "t.json").findings
    assert found.rule == "launch-bound"
    assert dict(found.levels) == ({"cuda_graphs": "on", "grad": "inference_mode"} if named else {})
    assert "\x1b" not in str(found)


def test_waiting_behind_a_busy_device_cannot_be_won(tmp_path: Path) -> None:
    made = Build().step(0, 0, 1000)
    made.kernel("gemm", 10, 990, call=1)
    made.add("user_annotation", NEXT, 5, 900)
    assert "data-wait" not in [finding.rule for finding in trace_findings(made.load(tmp_path))[0]]


def test_operators_inside_the_loader_are_loading_too(tmp_path: Path) -> None:
    made = Build().step(0, 0, 1000)
    made.add("user_annotation", NEXT, 0, 600)
    made.op("aten::stack", 100, 400)
    made.op("aten::mm", 600, 390)
    found, _ = trace_findings(made.load(tmp_path))
    assert found[0].rule == "data-wait"
    assert found[0].bound >= 0.6


def test_what_recording_costs_makes_a_bound_larger_never_smaller(tmp_path: Path) -> None:
    made = Build().step(0, 0, 1000)
    made.add("user_annotation", NEXT, 0, 500)
    for number in range(100):
        made.op("aten::add", 500 + 5 * number, 4)
    found, _ = trace_findings(made.load(tmp_path))
    # Of 1000 us, 100 untraced ones may belong to the loader, and recording 102 events took at most 306.
    assert found[0].rule == "data-wait"
    assert found[0].bound == pytest.approx(600 / (1000 - 306), abs=0.02)


def test_what_recording_costs_is_taken_off_the_time_of_each_device(tmp_path: Path) -> None:
    def bound(devices: int) -> float:
        made = Build().step(0, 0, 1000)
        made.add("user_annotation", NEXT, 0, 500)
        for number in range(40):
            made.op("aten::add", 500 + number, 0.5)
        for device in range(devices):
            made.kernel("gemm", 600, 100, call=560 + 5 * device, device=device)
        return next(one.bound for one in trace_findings(made.load(tmp_path))[0] if one.rule == "data-wait")

    assert bound(1) == pytest.approx(500 / (1000 - 3 * 43), abs=0.02)
    assert bound(2) == pytest.approx(bound(1), abs=0.02)


@pytest.mark.parametrize(("width", "bound"), [(8, 1020 / 1200), (9, 1020 / 1700)])
def test_steps_that_others_slowed_down_make_no_bound_too_small(width: int, bound: float, tmp_path: Path) -> None:
    """Two steps wait alike; the operators of the second take much longer: for nothing, or for a wider matrix."""
    made = Build()
    for number, (begin, length, shape) in enumerate([(0, 90, 8), (600, 590, width)]):
        made.step(number, begin, 510 + length)
        made.add("user_annotation", NEXT, begin, 500)
        made.op("aten::mm", begin + 505, length, **{"Input Dims": [[shape, 8]]})
    found, _ = trace_findings(made.load(tmp_path))
    assert found[0].rule == "data-wait"
    assert found[0].bound == pytest.approx(bound, abs=0.03)
    assert any("do not count in the bound" in line for line in found[0].evidence) == (width == 8)


def test_what_compiled_again_is_named(tmp_path: Path) -> None:
    """The compiler's own ranges are operators to the profiler, and hold operators."""
    made = Build().step(0, 0, 1000)
    for number in range(2):
        made.op("_compile.compile_inner (dynamo_timed)", 500 * number, 300).op("aten::mm", 500 * number + 100, 100)
        made.op(f"Torch-Compiled Region: 0/{number}", 500 * number + 300, 200)
        made.op("Torch-Compiled Region: 1/0", 500 * number + 350, 50)
    (found,) = (one for one in trace_findings(made.load(tmp_path))[0] if one.rule == "compiling")
    assert "60%" in found.says
    assert "torch.compile compiled 2 functions in it" in found.evidence
    assert "compiled again, for a guard failed: functions 0" in found.evidence


def test_python_around_small_operators(tmp_path: Path) -> None:
    made = Build().step(0, 0, 1000)
    for number in range(60):
        made.op("aten::add", 16 * number, 5)
    (found,) = trace_findings(made.load(tmp_path))[0]
    assert found.rule == "python-bound"
    assert "device" not in found.says
    assert not found.levels
    assert found.bound > 0.99  # the operators are as small as that themselves


def test_a_few_operators_are_no_python_bound_step(tmp_path: Path) -> None:
    made = Build().step(0, 0, 1000)
    for number in range(10):
        made.op("aten::add", 100 * number, 60)
    assert trace_findings(made.load(tmp_path))[0] == []


def test_kernels_are_told_by_the_operator_that_was_watched(tmp_path: Path) -> None:
    made = Build()
    for number in range(2):
        start = 1000.0 * number
        made.step(number, start, 1000)
        made.op("aten::convolution", start, 100).op("aten::cudnn_convolution", start + 10, 50)
        made.kernel("implicit_gemm", start + 200, 600, call=start + 20)
        made.kernel("bias", start + 800, 190, call=start + 40)
        made.op("aten::relu", start + 110, 20).kernel("relu", start + 992, 5, call=start + 115)
    path = tmp_path / "trace.json"
    made.write(path)
    found = of_trace(path, calls=2, operators={"aten.convolution"}).kernels
    assert [(kernel.name, kernel.operator, kernel.calls) for kernel in found] == [
        ("implicit_gemm", "aten.convolution", 1.0),
        ("bias", "aten.convolution", 1.0),
    ]
    assert found[0].seconds == pytest.approx(600e-6)
    assert of_trace(path).kernels == []


def test_a_trace_of_this_machine(tmp_path: Path) -> None:
    class Slow(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(0.05)  # a hundred times what a step takes
            return torch.ones(64)

    net = torch.nn.Linear(64, 64)
    with record(tmp_path / "trace.json", warmup=1, active=3) as profiler:
        for batch in torch.utils.data.DataLoader(Slow(), batch_size=3):
            net(batch)
            profiler.step()
    found, _ = trace_findings(load(tmp_path / "trace.json"))
    assert found[0].rule == "data-wait"
    assert found[0].bound > 0.5


def held_up(category: str, name: str) -> Build:
    """Two steps of 1000 us: the host is held up for 400, launches, and the device works until the step ends."""
    made = Build()
    for number in range(2):
        start = 1000.0 * number
        made.step(number, start, 1000).add(category, name, start, 400)
        made.kernel("gemm", start + 410, 590, call=start + 401)
    return made


def alone(cat: str, name: str) -> Build:
    """Device work that nothing hides: 400 us of it, then 600 of computing."""
    made = Build().step(0, 0, 1000).kernel(name, 10, 400, call=1, cat=cat)
    return made.kernel("gemm", 410, 590, call=4)


def launched_slowly() -> Build:
    return Build().step(0, 0, 1000).kernel("gemm", 410, 590, call=0, call_dur=400)


def started_late() -> Build:
    return Build().step(0, 0, 1000).kernel("gemm", 90, 910, call=1)


def behind_an_event() -> Build:
    made = Build().step(0, 0, 1000).kernel("a", 10, 10, call=0, stream=7).kernel("c", 11, 9, call=2, stream=8)
    return made.call("cudaStreamWaitEvent", 5, 1).kernel("d", 120, 880, call=7, stream=8)


def short_kernels(gap: float) -> Build:
    """A hundred kernels, queued at once, with gaps between them."""
    made = Build().step(0, 0, 1010)
    for number in range(100):
        made.kernel("mul", 10 + 10 * number, 10 - gap, call=0.05 * number, call_dur=0.05)
    return made


PLANTED = {
    "data-wait": held_up("user_annotation", NEXT),
    "syncs": held_up("cuda_runtime", "cudaStreamSynchronize"),
    "python-bound": held_up("python_function", "net.py(3): forward"),
    "launch-bound": held_up("cpu_op", "aten::add"),
    "runtime-calls": held_up("cuda_runtime", "cudaEventRecord"),
    "other-rank": held_up("user_annotation", "gloo:all_reduce"),
    "allocator": held_up("cuda_runtime", "cudaMalloc"),
    "compiling": held_up("cuda_driver", "cuModuleLoadData"),
    "garbage-collection": held_up("python_function", "<built-in function collect>"),
    "launch-bound-calls": launched_slowly(),
    "launch-latency": started_late(),
    "stream-event": behind_an_event(),
    "between-kernels": short_kernels(gap=4.0),
    "communication": alone("kernel", "ncclDevKernel_AllReduce_Sum"),
    "transfers": alone("gpu_memcpy", "Memcpy HtoD"),
    "small-kernels": short_kernels(gap=7.0),
}


def test_every_rule_of_a_trace_is_here() -> None:
    rules = {cause.rule for cause in trace_rules._CAUSES.values()}
    assert set(PLANTED) == rules | {"small-kernels"}


@pytest.mark.parametrize("rule", PLANTED)
def test_a_rule_names_its_cause_the_bound_and_the_answer(rule: str, tmp_path: Path) -> None:
    found, _ = trace_findings(PLANTED[rule].load(tmp_path))
    named = {finding.rule: finding for finding in found}
    assert rule in named, found
    assert 0.03 < named[rule].bound < 1
    assert named[rule].advice
    assert named[rule].formula
    assert named[rule].before != named[rule].after
    if "-kernels" not in rule:  # kernels that are short have gaps between them: two rules about the same program
        assert set(named) == {rule}


def test_a_device_that_works_all_the_time_gets_no_finding(tmp_path: Path) -> None:
    assert trace_findings(on_device(10).load(tmp_path))[0] == []


@pytest.mark.parametrize("name", ["Memcpy M2D (MEMORY(Unknown) -> DEVICE)", "Memcpy D2M (DEVICE -> MEMORY(Unknown))"])
def test_copies_of_memory_that_is_not_pinned_on_an_xpu_are_transfers(tmp_path: Path, name: str) -> None:
    assert [finding.rule for finding in trace_findings(alone("gpu_memcpy", name).load(tmp_path))[0]] == ["transfers"]


def test_copies_that_no_pinned_memory_would_help_are_no_transfers(tmp_path: Path) -> None:
    for category, name in (("gpu_memcpy", "Memcpy DtoD (Device -> Device)"), ("gpu_memset", "Memset (Device)")):
        assert trace_findings(alone(category, name).load(tmp_path))[0] == []
