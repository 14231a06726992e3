"""Recording one's own program: on the CPU, on a stand-in for the CUDA recorder, on a GPU where there is one."""

from __future__ import annotations

import gc
import inspect
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from memory_machine import MIB, Machine, stack

from fettle.errors import UsageError
from fettle.memory import analyse, parse, read, record
from fettle.memory.cpu import CpuTimeline
from tests.forking import run_script


def _network() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU()
    )


def _train(network: torch.nn.Module, keep: list[torch.Tensor] | None, steps: int, recorder: Any) -> None:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(steps):
        loss = network(torch.randn(128, 256)).square().mean()
        if keep is not None:
            keep.append(loss)
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        recorder.step()


def test_a_kept_graph_is_found_on_the_cpu(tmp_path: Path) -> None:
    file, kept = tmp_path / "leak.pickle", []
    with record(file, device="cpu") as recorder:
        _train(_network(), kept, 10, recorder)
    analysis = analyse(read(file))
    assert not analysis.violations
    assert analysis.unexplained_bytes == 0
    assert [leak.kind for leak in analysis.leaks.leaks] == ["graph"]
    # Two activations of 128 x 1024 floats for each of two ReLUs' inputs and outputs, and the batch itself.
    assert analysis.leaks.leaks[0].bytes_per_step >= 2 * 128 * 1024 * 4
    assert "test_memory_record.py" in analysis.leaks.leaks[0].survivors[0].own_line


class Node:
    """Refers to itself: only the garbage collector frees it, and its tensor with it."""

    def __init__(self) -> None:
        self.me, self.tensor = self, torch.empty(2 * MIB, dtype=torch.uint8)


def test_tensors_in_reference_cycles_are_found_on_the_cpu(tmp_path: Path) -> None:
    file = tmp_path / "cycle.pickle"
    gc.collect()
    gc.disable()
    try:
        with record(file, device="cpu") as recorder:
            for number in range(14):
                Node()
                if number % 5 == 4:
                    gc.collect()
                recorder.step()
    finally:
        gc.enable()
    (leak,) = analyse(read(file)).leaks.leaks
    assert (leak.kind, leak.bytes_per_step) == ("cycle", 2 * MIB)
    assert "in __init__" in leak.survivors[0].own_line


def test_a_sound_loop_is_left_alone_on_the_cpu(tmp_path: Path) -> None:
    file = tmp_path / "sound.pickle"
    network = _network()
    with record(file, device="cpu") as recorder:
        _train(network, None, 10, recorder)
    analysis = analyse(read(file))
    assert analysis.leaks.judged
    assert not analysis.leaks.leaks
    assert not analysis.violations
    assert analysis.steps.source == "marks of fettle.memory.record"
    assert not analysis.pools
    weights = sum(p.numel() * 4 for p in network.parameters())
    before = [row for row in analysis.holders if row.from_before]
    assert sum(row.bytes for row in before) >= weights
    assert "parameter" in {row.category for row in before}


def test_an_allocation_that_fails_costs_the_recording_nothing(tmp_path: Path) -> None:
    file = tmp_path / "failed.pickle"
    with record(file, device="cpu") as recorder:
        for _ in range(3):
            held = torch.empty(2 * MIB, dtype=torch.uint8)
            with pytest.raises(RuntimeError):
                torch.empty(10**13)
            recorder.step()
    assert analyse(read(file)).replay.end_bytes >= held.nbytes
    with pytest.raises(RuntimeError), record(tmp_path / "ended.pickle", device="cpu"):
        torch.empty(10**13)
    assert (tmp_path / "ended.pickle").exists()


def test_sizes_and_order_are_those_of_the_program(tmp_path: Path) -> None:
    file = tmp_path / "sizes.pickle"
    with record(file, device="cpu"):
        first = torch.empty(3 * MIB, dtype=torch.uint8)
        second = torch.empty(5 * MIB, dtype=torch.uint8)
        del first
        third = torch.empty(1 * MIB, dtype=torch.uint8)
        del second, third
    window = analyse(read(file)).replay
    assert (window.peak_bytes - window.start_bytes, window.end_bytes - window.start_bytes) == (8 * MIB, 0)


def test_the_ring_is_bounded_and_stays_exact(tmp_path: Path) -> None:
    file = tmp_path / "ring.pickle"
    with record(file, max_events=40, device="cpu") as recorder:
        held = [torch.empty(2 * MIB, dtype=torch.uint8)]
        for _ in range(100):
            torch.empty(MIB, dtype=torch.uint8)
            recorder.step()
    analysis = analyse(read(file))
    assert len(analysis.replay.trace) == 40
    assert analysis.replay.end_bytes >= 2 * MIB
    assert analysis.replay.peak_bytes == analysis.replay.end_bytes + MIB
    assert not analysis.violations
    assert held


def test_a_block_from_before_the_profiler_was_emptied_is_gone_once_it_is_freed(tmp_path: Path) -> None:
    file = tmp_path / "pieces.pickle"
    with record(file, device="cpu") as recorder:
        held = torch.zeros(2 * MIB, dtype=torch.uint8)
        recorder.step()  # the first piece ends, whatever it holds
        (held + 1).sum()  # by which the profiler knows of it in the second
        del held
        recorder.step()
    window = analyse(read(file)).replay
    assert window.peak_bytes >= 4 * MIB
    assert max(window.start_bytes, window.end_bytes) < 2 * MIB


def test_no_garbage_is_collected_while_the_profiler_is_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would see what is freed then."""
    end, collects = CpuTimeline._end, []

    def watched(timeline: CpuTimeline) -> None:
        collects.append(gc.isenabled())
        end(timeline)

    monkeypatch.setattr(CpuTimeline, "_end", watched)
    with record(tmp_path / "pause.pickle", device="cpu") as recorder:
        recorder.step()
        assert gc.isenabled()
    assert collects[0] is False


def test_a_block_that_was_freed_unseen_is_gone_once_its_address_is_used_again() -> None:
    timeline, nameless = CpuTimeline(100), SimpleNamespace(of=lambda fields: "")
    for at_us, size in enumerate((MIB, 3 * MIB)):
        fields = SimpleNamespace(device=torch.device("cpu"), alloc_size=size, ptr=4096)
        event = SimpleNamespace(extra_fields=fields, start_time_ns=1000 * at_us, parent=None)
        timeline._take("Allocation", event, nameless)  # type: ignore[arg-type]
    analysis = analyse(parse(timeline.stop(None) | {"fettle": {"allocator": "cpu"}}))
    window = analysis.replay
    assert (window.start_bytes, window.peak_bytes, window.end_bytes) == (0, 3 * MIB, 3 * MIB)
    assert not analysis.violations


def test_a_program_that_dies_leaves_its_snapshot(tmp_path: Path) -> None:
    file = tmp_path / "died.pickle"
    with pytest.raises(RuntimeError, match="alloc"), record(file, device="cpu"):  # noqa: PT012
        kept = torch.empty(3 * MIB, dtype=torch.uint8)
        torch.empty(1 << 55, dtype=torch.uint8)
    analysis = analyse(read(file))
    assert analysis.replay.peak_bytes >= 3 * MIB
    assert kept.numel() == 3 * MIB


def test_bad_use_is_refused_before_anything_runs(tmp_path: Path) -> None:
    for options, message in (
        ({"max_events": 0}, "at least 1"),
        ({"stacks": "some"}, "stacks must be"),
        ({"device": "gpu"}, "device must be"),
    ):
        with pytest.raises(UsageError, match=message), record(tmp_path / "x", **options):  # type: ignore[arg-type]
            raise AssertionError("the body must not run")
    with pytest.raises(UsageError, match="it is a folder"), record(tmp_path):
        raise AssertionError("the body must not run")
    assert not list(tmp_path.iterdir())


def test_the_room_comes_with_fettle(tmp_path: Path) -> None:
    code = "import fettle; assert callable(fettle.memory.record); assert callable(fettle.diagnose.find_syncs)"
    (tmp_path / "uses.py").write_text(code)
    assert run_script(tmp_path / "uses.py", os.environ)[0] == 0


def test_a_second_profiler_is_refused(tmp_path: Path) -> None:
    with record(tmp_path / "one.pickle", device="cpu"):
        kept = torch.empty(3 * MIB, dtype=torch.uint8)
        with pytest.raises(UsageError, match="a profiler is running"), record(tmp_path / "two.pickle", device="cpu"):
            raise AssertionError("the body must not run")
    assert analyse(read(tmp_path / "one.pickle")).replay.peak_bytes >= kept.numel()


class CudaStandIn:
    """What `record` asks of torch.cuda, with a machine behind it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.machine = Machine()
        self.calls: list[dict[str, Any]] = []
        self.observers: list[Any] = []
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "init", lambda: None)
        real = inspect.signature(torch.cuda.memory._record_memory_history)

        def recorder(**options: Any) -> None:
            real.bind(**options)  # the real recorder takes these names
            self.calls.append(options)

        patch.setattr(torch.cuda.memory, "_record_memory_history", recorder)
        patch.setattr(torch.cuda.memory, "_snapshot", lambda: self.machine.data())
        patch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", self.observers.append, raising=False)

    def run_out_of_memory(self, request: int, free: int) -> None:
        self.machine.note("oom", request, stack("big:8"), device_free=free)
        for observer in self.observers:
            observer(0, request, 80 << 30, free)
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_the_cuda_recorder_is_bounded_and_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = CudaStandIn(monkeypatch)
    file = tmp_path / "cuda.pickle"
    with record(file, max_events=500) as recorder:
        cuda.machine.alloc(5 * MIB, stack("f:1"))
        recorder.step()
    assert cuda.calls[0]["max_entries"] == 500
    assert cuda.calls[0]["stacks"] == "python"
    assert cuda.calls[-1] == {"enabled": None}
    analysis = analyse(read(file))
    assert analysis.replay.end_bytes == 5 * MIB
    assert analysis.snapshot.allocator == "cuda"


def test_an_oom_stays_one_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, folder = CudaStandIn(monkeypatch), tmp_path / "folder"

    def run() -> None:
        with record(folder / "oom.pickle"):
            folder.write_text("a file by now")
            cuda.run_out_of_memory(400 * MIB, 8 * MIB)

    with pytest.warns(UserWarning, match="cannot write"), pytest.raises(torch.OutOfMemoryError):
        run()


def test_dying_of_oom_keeps_the_moment_of_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = CudaStandIn(monkeypatch)
    file = tmp_path / "oom.pickle"
    with pytest.raises(torch.OutOfMemoryError), record(file):  # noqa: PT012
        address = cuda.machine.alloc(50 * MIB, stack("f:1"))
        try:
            cuda.run_out_of_memory(400 * MIB, 8 * MIB)
        finally:
            cuda.machine.free(address)  # what the unwinding stack does
    analysis = analyse(read(file))
    assert analysis.replay.end_bytes == 50 * MIB
    assert analysis.fit is not None
    assert (analysis.fit.request_bytes, analysis.fit.device_free_bytes, analysis.fit.answer) == (
        400 * MIB,
        8 * MIB,
        "no",
    )
    assert cuda.calls[-1] == {"enabled": None}


def test_an_oom_that_is_survived_gives_the_snapshot_of_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = CudaStandIn(monkeypatch)
    file = tmp_path / "survived.pickle"
    with record(file):
        with pytest.raises(torch.OutOfMemoryError):
            cuda.run_out_of_memory(400 * MIB, 8 * MIB)
        cuda.machine.alloc(7 * MIB, stack("f:1"))
    assert analyse(read(file)).replay.end_bytes == 7 * MIB
    for observer in cuda.observers:  # observers cannot be detached: this one must be silent now
        observer(0, 1, 1, 1)
    assert analyse(read(file)).replay.end_bytes == 7 * MIB


def test_a_full_disk_does_not_hide_the_programs_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CudaStandIn(monkeypatch)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pickle.dump", full)
    with pytest.warns(UserWarning, match="No space left"), pytest.raises(KeyError), record(tmp_path / "x.pickle"):
        raise KeyError("the program's own")
    with pytest.raises(UsageError, match="No space left"), record(tmp_path / "x.pickle"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_failing_recorder_does_not_hide_the_programs_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = CudaStandIn(monkeypatch)

    def broken() -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(torch.cuda.memory, "_snapshot", broken)
    with pytest.warns(UserWarning, match="the device is gone"), pytest.raises(KeyError), record(tmp_path / "x.pickle"):
        raise KeyError("the program's own")
    assert cuda.calls[-1] == {"enabled": None}
    with pytest.raises(RuntimeError, match="the device is gone"), record(tmp_path / "x.pickle"):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_replay_agrees_with_the_allocators_counters(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    file = tmp_path / "gpu.pickle"
    with record(file, device="cuda", stacks="all") as recorder:
        network = _network().cuda()
        kept = []
        for _ in range(10):
            kept.append(network(torch.randn(128, 256, device="cuda")).square().mean())
            recorder.step()
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
    analysis = analyse(read(file))
    assert analysis.replay.peak_bytes == stats["requested_bytes.all.peak"]
    assert analysis.replay.end_bytes == stats["requested_bytes.all.current"]
    assert analysis.reserved_bytes == stats["reserved_bytes.all.current"]
    assert not analysis.violations
    assert [leak.kind for leak in analysis.leaks.leaks] == ["graph"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_an_out_of_memory_error_is_recorded_where_it_happens(tmp_path: Path) -> None:
    file = tmp_path / "oom.pickle"
    with pytest.raises(torch.OutOfMemoryError), record(file, device="cuda"):  # noqa: PT012
        held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
    analysis = analyse(read(file))
    assert analysis.fit is not None
    assert analysis.fit.request_bytes == 1 << 42
    assert analysis.fit.answer == "no"
    assert analysis.replay.end_bytes >= 64 * MIB
    assert held.numel()
