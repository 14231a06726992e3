"""What NVML says of a GPU, from a made-up NVML."""

import itertools
import math
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fettle.measure import _inference, _meters
from fettle.measure._clock import Clock
from fettle.measure._load import Load, gpu_memory, gpus_in_use, with_gpu
from fettle.measure._state import State, gpus_of, take_slice
from fettle.measure._watch import Surroundings
from fettle.measure.messages import Prepare, SliceTaken, TakeSlice
from fettle.workload import Workload
from tests.techniques.test_devices import on_gpu


def nvml(monkeypatch, *, running=(1, 7, 8), utilisation=(), reasons=0, now=1500, missing="", gpus=("GPU-1",), late_s=0):
    """A module that answers like pynvml, alike for all `gpus`; `missing` names a call that it does not have; since it
    looked, the clock was set back by `late_s`."""

    class NVMLError(Exception): ...

    def not_found(*args):
        raise NVMLError("Not Found")

    answers = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: len(gpus),
        "nvmlDeviceGetHandleByIndex": lambda number: gpus[number],
        "nvmlDeviceGetUUID": lambda device: device,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid if uuid in gpus else not_found(),
        "nvmlDeviceGetComputeRunningProcesses": lambda device: [SimpleNamespace(pid=pid) for pid in running],
        "nvmlDeviceGetProcessUtilization": lambda device, since: (
            [
                SimpleNamespace(pid=pid, smUtil=share, timeStamp=since + late_s * 1e6)
                for pid, share in utilisation
                if device == gpus[-1]
            ]
            or not_found()
        ),
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda device: reasons if device == gpus[-1] else 0,
        "nvmlDeviceGetClockInfo": lambda device, which: now,
        "nvmlDeviceGetMaxClockInfo": lambda device, which: 2000,
        "nvmlClocksThrottleReasonGpuIdle": 1,
        "nvmlClocksThrottleReasonApplicationsClocksSetting": 2,
        "nvmlClocksThrottleReasonSwPowerCap": 4,
        "nvmlDeviceGetTotalEnergyConsumption": lambda device: 7000,
        "NVML_CLOCK_SM": 1,
        "NVMLError": NVMLError,
    }
    if missing:
        answers[missing] = not_found
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(**answers))


def test_what_other_processes_have_is_counted_once_each(monkeypatch):
    nvml(monkeypatch, utilisation=[(1, 90), (7, 30), (7, 40), (8, 10)])
    load = with_gpu(Load(others=0.01), "GPU-1", {1})
    assert (load.others, load.gpu) == (0.01, pytest.approx(0.5))
    assert not load.is_quiet
    assert str(load) == "others took 50% of a GPU"


def test_a_part_of_a_gpu_is_found_by_the_name_that_it_has(monkeypatch):
    nvml(monkeypatch, utilisation=[(7, 40)], gpus=("MIG-1",))
    assert with_gpu(Load(), "GPU-1", {1}).gpu == 0.4


def test_a_gpu_of_our_own_is_quiet(monkeypatch):
    nvml(monkeypatch, utilisation=[(1, 99)])
    assert with_gpu(Load(), "GPU-1", {1}).is_quiet
    nvml(monkeypatch)
    assert with_gpu(Load(), "GPU-1", {1}).gpu == 0


def test_what_was_seen_before_the_clock_was_set_back_is_no_load_of_now(monkeypatch):
    nvml(monkeypatch, utilisation=[(7, 90)], late_s=3600)
    assert with_gpu(Load(), "GPU-1", {1}).gpu == 0


def test_other_process_numbers_than_ours_say_nothing_of_the_others(monkeypatch):
    nvml(monkeypatch, running=(4711,), utilisation=[(4711, 99)])
    assert math.isnan(with_gpu(Load(), "GPU-1", {1}).gpu)
    nvml(monkeypatch, running=(1,), utilisation=[(4711, 99)])  # ours, by the number that it has outside the container
    assert with_gpu(Load(), "GPU-1", {1}).is_quiet


def test_what_is_timed_for_long_is_looked_back_on_for_as_long(monkeypatch):
    nvml(monkeypatch, utilisation=[(7, 40)], late_s=30)
    assert with_gpu(Load(), "GPU-1", {1}, 60.0).gpu == 0.4
    assert with_gpu(Load(), "GPU-1", {1}, 0.1).gpu == 0


@pytest.mark.parametrize(("running", "share"), [((os.getpid(), 7), 0.4), ((7,), math.nan)], ids=["on it", "not"])
def test_what_is_timed_otherwise_than_in_a_race_looks_at_the_gpus_that_it_is_on(monkeypatch, running, share):
    nvml(monkeypatch, running=running, utilisation=[(os.getpid(), 90), (7, 40)], gpus=("GPU-1", "GPU-2"))
    assert Surroundings().look().gpu == pytest.approx(share, nan_ok=True)


def test_a_clock_below_its_best_counts_only_where_something_throttles(monkeypatch):
    nvml(monkeypatch, reasons=3)
    assert with_gpu(Load(), "GPU-1", {1}).is_quiet
    nvml(monkeypatch, reasons=8)
    assert with_gpu(Load(), "GPU-1", {1}).clock == 0.75


@pytest.mark.parametrize("order", [("GPU-1", "GPU-2"), ("GPU-2", "GPU-1")])
def test_of_several_gpus_the_worst_counts(monkeypatch, order):
    nvml(monkeypatch, utilisation=[(7, 40)], reasons=8, gpus=("GPU-1", "GPU-2"))
    load = Load()
    for gpu in order:
        load = with_gpu(load, gpu, {1})
    assert (load.gpu, load.clock) == (0.4, 0.75)


def test_what_a_recipe_itself_draws_is_no_neighbour(monkeypatch):
    """A GPU at its power limit is slowed for as long as the recipe runs: waiting for it to be quiet never ends."""
    nvml(monkeypatch, reasons=4)
    assert with_gpu(Load(), "GPU-1", {1}).is_quiet


def test_energy_is_that_of_the_gpus_which_the_model_lies_on(monkeypatch):
    """NVML numbers them otherwise where CUDA_VISIBLE_DEVICES names some of them."""
    nvml(monkeypatch)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda gpu: SimpleNamespace(uuid=gpu + 1))
    assert _meters.energy_j([0]) == 7.0
    assert _meters.energy_j([1]) is None


def test_energy_of_several_ranks_is_that_of_all_their_gpus():
    def slice_of(energy_j, *gpus):
        return SliceTaken(samples_ns=[1], unhindered_ns=1.0, waits=0.0, cpu_s=1.0, energy_j=energy_j, gpus=gpus)

    assert slice_of(2.0, "GPU-1").with_ranks([slice_of(3.0, "GPU-2")]).energy_j == 5.0
    assert slice_of(2.0, "GPU-1").with_ranks([slice_of(2.0, "GPU-1")]).energy_j == 2.0
    assert slice_of(2.0, "GPU-1").with_ranks([slice_of(None, "GPU-2")]).energy_j is None
    assert slice_of(2.0).with_ranks([slice_of(2.0)]).energy_j == 2.0  # the machine's, either time
    every = slice_of(2.0, "GPU-1").with_ranks([slice_of(3.0, "GPU-2"), slice_of(2.0, "GPU-1")])
    assert every.gpus == ["GPU-1", "GPU-2"]


def test_energy_of_a_machine_is_that_of_its_packages(monkeypatch, tmp_path):
    for place, name, microjoules in (("intel-rapl:0", "package-0", 3e6), ("intel-rapl:0:0", "core", 2e6),
                                     ("intel-rapl:1", "psys", 9e6)):  # fmt: skip
        (tmp_path / place).mkdir()
        (tmp_path / place / "name").write_text(f"{name}\n")
        (tmp_path / place / "energy_uj").write_text(f"{microjoules:.0f}\n")
    monkeypatch.setattr(_meters, "_RAPL", tmp_path)
    assert _meters.energy_j([]) == 3.0


def test_where_a_model_lies_decides_which_gpus_are_waited_for(monkeypatch):
    with FakeTensorMode():
        model = torch.nn.ParameterList([torch.empty(2, device="cuda:1")])
        assert gpus_of(model, (torch.empty(2, device="cuda:3"), {"x": torch.empty(2)})) == [1, 3]
    waited = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", waited.append)
    assert Clock("cuda", [1, 3]).time_ns(lambda: None) > 0  # no events: they are those of one GPU
    assert waited == [1, 3, 1, 3]


@pytest.fixture
def second_gpu(monkeypatch):
    """Stands in for it; what was waited for."""
    waited = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # no events
    monkeypatch.setattr("torch.cuda.set_device", lambda gpu: None)
    monkeypatch.setattr("torch.cuda.synchronize", waited.append)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda gpu: (9, 10))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda gpu: SimpleNamespace(uuid=gpu))
    return waited


def test_a_callable_whose_weights_nobody_sees_is_found_by_its_answers(second_gpu):
    state = State(workload=Workload(lambda x: on_gpu(2, 3), [torch.ones(2, 3)], samples=2))
    answer = _inference.prepare(state, Prepare("def optimize(model, batches):\n    return model\n", "as given"))
    assert (answer.device, answer.gpu) == ("cuda", "GPU-1")
    assert set(second_gpu) == {1}


@pytest.mark.parametrize(("free", "emptied"), [(4, True), (6, False)])
def test_a_gpu_that_is_half_full_is_emptied_between_slices(free, emptied, second_gpu, monkeypatch):
    """The others of a race need what a paused process keeps; the call that fetches it again is not timed."""
    given_back, calls = [], []
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda gpu: (free, 10))
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: given_back.append(len(calls)))
    batches = itertools.cycle([[torch.ones(1)]])
    state = State(run=calls.append, device="cuda", gpus=(1,), clock=Clock("cuda", (1,)), cycle=batches)
    state.call_ns = 500_000
    timed = [len(take_slice(state, TakeSlice(0.001)).samples_ns) for _ in range(2)]
    assert len(given_back) == 2 * emptied
    assert len(calls) - sum(timed) == emptied


@pytest.mark.parametrize(
    "missing", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetComputeRunningProcesses",
                "nvmlDeviceGetProcessUtilization", "nvmlDeviceGetClockInfo",
                "nvmlDeviceGetCurrentClocksThrottleReasons"],
)  # fmt: skip
def test_a_call_that_is_not_there_decides_nothing(monkeypatch, missing):
    nvml(monkeypatch, missing=missing)
    assert with_gpu(Load(), "GPU-1", {1}).is_quiet


def test_without_nvml_nothing_changes(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    load = Load(waits=0.5)
    assert with_gpu(load, "GPU-1", {1}) is load
    assert gpus_in_use({1}) == []


def test_free_memory_that_nvml_does_not_tell_is_no_end_of_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_memory("GPU-1") == (math.inf, 0.0)
