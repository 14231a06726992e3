"""How a processor is named: those that a virtual machine hides are told apart. What a device reaches."""

import hashlib
import math
import time
from pathlib import Path

import pytest
import torch

from fettle import machine
from fettle.machine import cpu_name


@pytest.mark.parametrize(("said", "name"), [
    ("AMD EPYC 9B14", "AMD EPYC 9B14"),
    ("Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz", "Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz"),
    ("AMD EPYC", "AMD EPYC (family 26, model 2)"),
    ("Intel(R) Xeon(R) CPU @ 2.20GHz", "Intel(R) Xeon(R) CPU @ 2.20GHz (family 26, model 2)"),
])  # fmt: skip
def test_a_name_without_a_number_is_told_with_its_family_and_model(monkeypatch, said, name):
    one = f"processor\t: 0\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: {said}\nflags\t\t: fpu avx2\n\n"
    monkeypatch.setattr(Path, "read_text", lambda self, **options: one + one)
    assert cpu_name() == name


def test_one_that_tells_no_family_keeps_its_name(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda self, **options: "processor\t: 0\nmodel name\t: ARMv8\n")
    assert cpu_name() == "ARMv8"


def test_numbers_of_other_threads_or_fewer_cores_are_those_of_another_machine(monkeypatch):
    for name in machine._DECIDES:
        monkeypatch.delenv(name, raising=False)
    ids = []
    for quota, variables in ((math.inf, {}), (0.5, {}), (math.inf, {"OMP_NUM_THREADS": "1"}), (math.inf, {})):
        monkeypatch.setattr(machine, "quota_cores", lambda quota=quota: quota)
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            ids.append(machine.this_machine.__wrapped__().id)
    assert len(set(ids)) == 3
    here = machine.this_machine()
    text = "|".join([here.cpu, str(here.cores), *here.gpus, here.versions["torch"]])
    assert ids[0] == ids[3] == hashlib.sha256(text.encode()).hexdigest()[:12]  # as earlier versions of fettle had it


def test_a_device_without_room_for_them_has_no_peaks(monkeypatch):
    def full(run, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(machine, "_best_s", full)
    assert machine.measure_peaks.__wrapped__("cpu") == {}


def test_peaks_of_any_accelerator_are_of_work_that_is_done(monkeypatch):
    pending = []

    def wait(device=None):
        while pending:
            time.sleep(pending.pop())

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", wait)
    assert machine._best_s(lambda: pending.append(0.02), "mps") >= 0.02
