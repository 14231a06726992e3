"""A diagnosis records a trace and an allocator's history: what their rules add, and what happens when they fail."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fettle.diagnose import Finding, diagnose
from fettle.diagnose.collectors import recording, waiting
from fettle.diagnose.evidence import Cost
from fettle.diagnose.recordings import joined, of_snapshot, of_trace
from fettle.errors import UsageError
from fettle.techniques import Facts
from fettle.workload import Workload

KEEPS = """
import os
import torch
kept = []
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(512, 512)
    def forward(self, x):
        y = self.layer(x)
        kept.append(y.square().sum())
        return y
class Ends(torch.nn.Module):
    def forward(self, x):
        if torch._C._autograd._profiler_enabled():
            os._exit(3)
        return x * 2
def workload():
    return Net().eval(), [torch.randn(640, 512)]
def ends():
    return Ends(), [torch.randn(4, 4)]
"""


@pytest.mark.usefixtures("forks")
def test_a_leak_has_its_line_from_the_memory_recording_and_the_files_are_kept(tmp_path: Path) -> None:
    (tmp_path / "keeps.py").write_text(KEEPS)
    report = tmp_path / "out.html"
    found = diagnose(
        tmp_path / "keeps.py", seconds=2.0, compile_check=False, beside=report
    )  # 60 ms a call are room enough
    (leak,) = [finding for finding in found.findings if finding.rule == "leak"]
    assert any("keeps.py:10" in place for place in leak.where)
    assert any(line.startswith("memory: keeps.py:10") for line in leak.evidence)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out.")) == [
        "out.memory.pickle", "out.trace.json.gz"
    ]  # fmt: skip
    assert not list(tmp_path.glob(".fettle-*"))
    memory, trace = found.recordings
    assert (memory.kind, trace.kind) == ("memory", "trace")
    assert memory.path == str(tmp_path / "out.memory.pickle")
    assert memory.size_bytes == Path(memory.path).stat().st_size
    assert "keeps.py:10" in memory.says
    assert trace.cost.slowdown >= 1
    assert trace.command == f"fettle trace account {trace.path}"
    told = {item.what: item for item in found.watching}
    assert list(told)[-2:] == ["memory of 8 calls", "trace of 5 calls"]
    assert {"plain calls", "operators", "syncs", "waiting", "kept alive", "peaks", "padding", "weights"} < set(told)
    assert found.evidence is not None
    assert all(cost.seconds > 0 for cost in found.evidence.costs.values())
    assert found.evidence.costs["operators"].slowdown >= 1
    assert str(Cost(1.2, 2.0)) == "1.2 s, a call took 2.0x as long"
    assert of_trace(Path(trace.path)).budget
    assert any(finding.rule == "leak" for finding in of_snapshot(Path(memory.path)).findings)


@pytest.mark.usefixtures("forks")
def test_a_collector_that_ends_its_process_is_a_line_in_the_report(tmp_path: Path) -> None:
    (tmp_path / "keeps.py").write_text(KEEPS)
    found = diagnose(f"{tmp_path / 'keeps.py'}:ends", seconds=0.2, compile_check=False)
    told = [note for note in found.notes if "not recorded" in note]
    assert [note.partition(":")[0] for note in told] == ["memory", "trace"]
    assert all("exit code 3" in note for note in told)
    assert not found.recordings
    assert found.wall_s > 0


def test_what_would_not_fit_is_refused_before_it_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(x: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            x = x + 1
        return x

    monkeypatch.setattr(recording, "_MOST_EVENTS", 40)
    work = Workload(loop, [torch.ones(2)])
    with pytest.raises(UsageError, match="a call runs 50 operators"):
        recording.trace(work, str(tmp_path / "t.json"), 0.1)
    sums = Workload(lambda x: sum(len(str(n)) for n in range(40)) + x, [torch.ones(2)])
    with pytest.raises(UsageError, match="Python functions, more than 40"):
        recording.memory(sums, str(tmp_path / "m.pickle"), 0.1)
    assert not list(tmp_path.iterdir())


def test_few_calls_of_a_slow_or_long_program_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(call: Callable[[], Any], device: str, seconds: float, least: int = 3) -> list[float]:
        call()
        return [0.05]

    monkeypatch.setattr(recording, "timed", timed)  # what a call takes is made up: a busy machine takes longer
    work = Workload(lambda x: x + 1, [torch.ones(2)])
    assert recording.trace(work, str(tmp_path / "t.json"), 0.12).calls == 2
    assert recording.trace(work, str(tmp_path / "t.json"), 0.001).calls == 1
    assert recording.trace(work, str(tmp_path / "t.json"), 10.0).calls == 5
    monkeypatch.setattr(recording, "_MOST_EVENTS", 3)
    assert recording.trace(work, str(tmp_path / "t.json"), 1.0).calls == 3


def test_a_profiler_of_the_workload_s_own_is_left_alone(tmp_path: Path) -> None:
    work = Workload(lambda x: x + 1, [torch.ones(2)])
    with torch.profiler.profile() as own:
        for collector in (recording.trace, recording.memory):
            with pytest.raises(UsageError, match="a profiler is running"):
                collector(work, str(tmp_path / "x"), 0.1)
        torch.ones(3).sum()
    assert any(event.key == "aten::sum" for event in own.key_averages())


class TestJoined:
    """One cause, one finding."""

    def test_a_recording_confirms_what_was_found(self) -> None:
        host = Finding("host-bound", "Small operators.", 0.5, evidence=("seen",), where=("net.py:1",))
        trace = Finding("python-bound", "Python.", 0.7, evidence=("trace: much",), where=("net.py:2",))
        (both,) = joined([host], [trace], Facts())
        assert (both.rule, both.bound) == ("host-bound", 0.5)
        assert both.evidence == ("seen", "trace: much")
        assert both.where == ("net.py:1", "net.py:2")

    def test_on_a_cpu_a_trace_accuses_nobody_of_what_was_timed_without_it(self) -> None:
        slow = [Finding(rule, "Slow.", 0.7) for rule in ("python-bound", "data-wait", "garbage-collection")]
        assert joined([], slow, Facts()) == []
        assert len(joined([], slow, Facts(device="cuda"))) == 3

    def test_what_nobody_else_sees_is_a_finding_of_its_own(self) -> None:
        compiling = Finding("compiling", "Steps compile.", 0.4)
        churn = Finding("churn", "Segments come and go.")
        stalls = Finding("allocator", "The device idles.", 0.2, formula="time")
        first, second = joined([], [churn, compiling, stalls], Facts(device="cuda"))
        assert first == compiling
        assert (second.rule, second.bound, second.formula) == ("churn", 0.2, "time")

    def test_levels_that_a_workload_cannot_have_are_not_named(self) -> None:
        idle = Finding("launch-latency", "Gaps.", 0.2, levels={"cuda_graphs": "on"})
        (found,) = joined([], [idle], Facts(device="cpu"))
        assert not found.levels


def test_a_busy_machine_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([(1.0, 0.0), (2.0, 3.0)])
    monkeypatch.setattr(waiting, "all_threads_s", lambda: next(told))
    assert waiting.crowded(waiting.all_threads_s()) == pytest.approx(0.75)
