"""Calibration: costs by rows, and workers that fail."""

import json
import os
import shutil
import signal
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch

from fettle.measure import Surroundings
from fettle.package.export import write_package
from fettle.package.manifest import MANIFEST, open_package
from fettle.package.settings import ServeSettings
from fettle.recipe import Recipe
from fettle.slo.calibrate import Calibration, _steps, _Time, _Worker, calibrate, sizes_up_to
from fettle.slo.proof import sample_requests
from fettle.slo.stopping import Stopped
from fettle.workload import Workload
from tests.processes import alive

pytestmark = pytest.mark.usefixtures("forks")


class FailsFromEight(torch.nn.Module):
    """Looks a number up that its table does not have, once a call has eight rows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(8))

    def forward(self, x):
        rows = torch.ones_like(x[:, 0]).sum().long()
        return x + self.table.index_select(0, rows.reshape(1))


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd")
    work = Workload(FailsFromEight().eval(), [torch.rand(2, 4)])
    return write_package(work, Recipe(), folder / "odd", name="odd", settings=ServeSettings(max_rows=16))


def test_a_model_given_in_bfloat16_is_asked_in_float32(tmp_path):
    x = torch.rand(2, 4, dtype=torch.bfloat16)
    package = write_package(Workload(torch.nn.Linear(4, 3).bfloat16(), [x]), Recipe(), tmp_path / "m", name="m")
    requests = sample_requests(package, "http://127.0.0.1:8080")
    for request, row in zip(requests, x.float().numpy(), strict=True):
        assert request.data.endswith(row.tobytes())


def test_sizes():
    assert sizes_up_to(1) == [1]
    assert sizes_up_to(16) == [1, 2, 3, 4, 6, 8, 12, 16]
    assert sizes_up_to(10)[-1] == 10


def test_memory_of_a_size_on_a_gpu_is_its_own(monkeypatch):
    """And what it needed while it was compiled is in it."""
    began = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", began.append)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 7)
    worker = _Worker()
    worker.device, worker.runner = "cuda:1", SimpleNamespace(sample=lambda size: [], run=lambda parts, size: None)
    assert [worker._timed(_Time(2, seconds, 1)).memory for seconds in (0.0, 0.001)] == [7, 7]
    assert began == ["cuda:1"]


def test_an_error_at_a_size_ends_there_and_is_kept(odd):
    made = calibrate(odd, most=16, seconds=0.01)
    assert {1, 2, 4, 6} <= made.samples.keys()
    assert max(made.samples) < 8
    assert list(made.failures) == [8]
    assert "index" in made.failures[8]
    assert made.memory_at(6) >= made.memory_at(1) > 0
    assert msgspec.json.decode(msgspec.json.encode(made), type=Calibration) == made
    earlier = {**msgspec.to_builtins(made), "pad_error": 0.5}  # kept by an earlier version
    assert msgspec.json.decode(msgspec.json.encode(earlier), type=Calibration) == made


def test_a_size_that_failed_is_not_asked_again():
    curve = {1: (0.001,), 4: (0.001,), 6: (0.009,), 8: (0.01,)}
    assert _steps(Calibration(curve)) == [2, 5, 7]
    assert _steps(Calibration(curve, {5: "a guard failed"})) == [2, 7]


def test_a_recipe_that_cannot_work_on_a_device_is_its_failure(store, tmp_path):
    """Another device may do: the search goes on with it."""
    shutil.copytree(store / "net-1", tmp_path / "net")
    manifest = json.loads((tmp_path / "net" / MANIFEST).read_text())
    (tmp_path / "net" / MANIFEST).write_text(json.dumps({**manifest, "recipe": {"cudnn_benchmark": "on"}}))
    made = calibrate(open_package(tmp_path / "net"), most=4, seconds=0.01)
    assert not made.samples
    assert made.failures == {0: "the recipe cannot work here: cudnn_benchmark=on: cuDNN runs on CUDA devices only"}


def test_a_worker_that_is_killed_costs_its_size(store):
    def kill(text):
        if text.startswith("cost of 4 rows"):
            for worker in alive("fettle.slo.calibrate"):
                os.kill(worker, signal.SIGKILL)

    made = calibrate(open_package(store / "net-1"), most=8, seconds=0.01, on_progress=kill)
    assert {1, 2, 3} <= made.samples.keys()
    assert "SIGKILL" in made.failures[4]


def test_a_package_whose_calls_have_eight_rows_is_timed_at_eight(store):
    package = open_package(store / "net-1")
    package = replace(package, settings=msgspec.structs.replace(package.settings, buckets=(8,)))
    made = calibrate(package, most=8, limit_s=60.0, seconds=0.01)
    assert (list(made.samples), made.failures) == ([8], {})


def test_a_package_that_cannot_be_loaded_is_a_failure(store, monkeypatch):
    made = calibrate(open_package(store / "net-1"), most=4, device="cuda:99")
    assert made.samples == {}
    assert list(made.failures) in ([0], [1])


def test_it_can_be_stopped(store):
    with pytest.raises(Stopped):
        calibrate(open_package(store / "net-1"), most=4, around=Surroundings(stopped=lambda: True))


def test_it_is_stopped_while_a_worker_does_not_answer(store):
    """One that compiles may take minutes."""
    told = []

    def suspend(text):
        for worker in alive("fettle.slo.calibrate"):
            os.kill(worker, signal.SIGSTOP)
        told.append(text)

    with pytest.raises(Stopped):
        calibrate(open_package(store / "net-1"), most=1, on_progress=suspend, around=Surroundings(stopped=lambda: told))
