"""What a trace alone says: planted waits, with bounds that can be checked on paper. Times are microseconds."""

import time
from pathlib import Path

import pytest
import torch

from fettle.diagnose.trace_rules import trace_findings
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


def test_a_trace_of_this_machine(tmp_path: Path) -> None:
    class Slow(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(0.01)
            return torch.ones(64)

    net = torch.nn.Linear(64, 64)
    with record(tmp_path / "trace.json", warmup=1, active=3) as profiler:
        for batch in torch.utils.data.DataLoader(Slow(), batch_size=3):
            net(batch)
            profiler.step()
    found, _ = trace_findings(load(tmp_path / "trace.json"))
    assert found[0].rule == "data-wait"
    assert found[0].bound > 0.9
