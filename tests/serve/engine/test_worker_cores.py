"""Cores and devices of workers: nothing is given out twice."""

import os
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fettle.errors import UsageError
from fettle.package.manifest import open_package
from fettle.package.settings import ServeSettings
from fettle.procs.limits import affinity
from fettle.serve.engine.registry import Options
from fettle.serve.engine.worker import Worker
from fettle.serve.engine.worker_start import cores_for
from tests.serving import running


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 4)), max_size=6),
    st.sets(st.integers(0, 63), max_size=32),
)
def test_no_core_is_given_to_two_workers(pools, usable):
    taken: set[int] = set()
    for workers, threads in pools:
        found = cores_for(workers, threads, sorted(usable), taken)
        assert len(found) in (0, workers)
        given_out = [core for cores in found for core in cores]
        assert len(set(given_out)) == len(given_out)
        assert not taken & set(given_out)
        assert set(given_out) <= usable
        assert all(len(cores) == (threads or len(cores)) and cores for cores in found)
        taken |= set(given_out)


def test_one_worker_a_device_before_any_gets_a_second():
    pool = SimpleNamespace(settings=ServeSettings(workers=3, devices=("cuda:0", "cuda:1")))
    assert [Worker(pool, index, 1).device for index in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]


@pytest.mark.skipif(len(affinity()) < 2, reason="needs two cores that processes can be bound to")
def test_two_workers_run_on_cores_of_their_own(store):
    with running([open_package(store / "net-1")], Options(override={"workers": 2, "threads": 1})) as server:
        pids = [worker.pid for worker in server.registry.choose("net").workers]
        bound = [set(psutil.Process(pid).cpu_affinity()) for pid in pids]
    assert all(len(cores) == 1 for cores in bound)
    assert not bound[0] & bound[1]
    assert bound[0] | bound[1] <= os.sched_getaffinity(0)


def test_serve_toml_names_the_devices_of_its_workers(store):
    """The processor twice stands for two devices; what cannot be one is a line."""
    override = {"workers": 2, "threads": 1, "devices": ("cpu", "cpu:0")}
    with running([open_package(store / "net-1")], Options(override=override)) as server:
        workers = server.registry.choose("net").workers
        assert [worker.device for worker in workers] == ["cpu", "cpu:0"]
        assert all(worker.ready for worker in workers)
    for device in ("../cuda", "cuda:x", ""):
        with (
            pytest.raises(UsageError),
            running([open_package(store / "net-1")], Options(override={"devices": (device,)})),
        ):
            pass
    with (
        pytest.raises(UsageError, match="nowhere"),
        running([open_package(store / "net-1")], Options(device="nowhere")),
    ):
        pass
