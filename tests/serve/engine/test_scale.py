"""The number of workers, changed while requests come: none of them fails, no core is given out twice."""

import asyncio
import json
import os
import signal
import threading

import msgspec
import psutil
import pytest

from fettle.package.manifest import open_package
from fettle.procs.limits import affinity
from fettle.serve.engine.registry import Options
from fettle.serve.engine.worker_link import WorkerLink
from tests.serve.test_server import TOKEN, ask, asking, infer, manage
from tests.serving import running, until

CORES = len(affinity())
two_cores = pytest.mark.skipif(CORES < 2, reason="needs two cores that processes can be bound to")


@pytest.fixture(scope="module")
def managed(store, tmp_path_factory):
    """``echo`` is given to the start, ``net`` is loaded: the state file has what was loaded."""
    package = open_package(store / "echo")
    state = tmp_path_factory.mktemp("state") / "state.json"
    options = Options(store=store, state=state, trust=(package.handler_digest,))
    with running([package], options, management_port=0, management_token=TOKEN) as server:
        server.admin = f"http://127.0.0.1:{server.ports[1]}"
        server.call(server.registry.load_named("net", "1"))
        yield server


def test_what_cannot_be_is_one_sentence_and_changes_nothing(managed):
    pool = managed.registry.choose("net")
    before = pool.workers[0].pid
    for query, said, status in (
        ("min_worker=0", "unregister", 400), ("min_worker=2&max_worker=1", "no less", 400),
        ("min_worker=-1", "number", 400), ("min_worker=a", "number", 400),
        ("min_worker=9999", "9,999 workers of net would need 9,999 cores, and there are", 409),
        ("min_worker=9999&synchronous=true", "9,999 workers of net would need 9,999 cores, and there are", 409),
    ):  # fmt: skip
        found, answer, _ = manage(managed, f"/models/net?{query}", b"", "PUT")
        assert (found, said in json.dumps(answer)) == (status, True), answer
    for query in ("batch_size=9999", "batch_size=a", "initial_workers=a"):
        assert manage(managed, f"/models?url=net&{query}", b"", "POST")[0] == 400
    assert manage(managed, "/models/none?min_worker=1", b"", "PUT")[0] == 404
    assert manage(managed, "/models/net/9?min_worker=1", b"", "PUT")[0] == 404
    assert [worker.pid for worker in pool.workers] == [before]


@two_cores
def test_a_start_that_fails_leaves_everything_as_it_was(managed, monkeypatch):
    pool = managed.registry.choose("net")
    before = [worker.pid for worker in pool.workers]

    async def failing(self, spawned):
        spawned.process.close()
        spawned.link.close()
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(WorkerLink, "start", failing)
    status, answer, _ = manage(managed, "/models/net?min_worker=2&synchronous=true", b"", "PUT")
    assert (status, "Cannot allocate memory" in json.dumps(answer)) == (503, True)
    assert [worker.pid for worker in pool.workers] == before
    assert (pool.settings.workers, pool.ready) == (1, True)
    assert infer(managed, [[1, 2, 3, 4]])[0] == 200


def test_batching_that_is_set_while_workers_start_stays(managed, monkeypatch):
    pool = managed.registry.choose("net")
    before = pool.settings

    async def meanwhile(workers):
        pool.change(msgspec.structs.replace(pool.settings, delay_ms=7.0))

    monkeypatch.setattr(pool, "start", meanwhile)
    managed.call(pool.scale(before, [worker.cores for worker in pool.workers]))
    assert (pool.settings.delay_ms, pool.settings.workers) == (7.0, before.workers)

    async def back():
        pool.change(before)

    managed.call(back())


@two_cores
def test_more_and_fewer_workers_without_a_failed_request(managed, store, tmp_path):
    pool = managed.registry.choose("net")
    with asking(managed) as found:
        status, answer, _ = manage(managed, "/models/net?min_worker=2&synchronous=true", b"", "PUT")
        assert (status, answer["status"]) == (200, "Workers scaled to 2 for model: net")
        bound = [psutil.Process(worker.pid).cpu_affinity() for worker in pool.workers if worker.ready]
        assert [len(cores) for cores in bound] == [1, 1]
        assert not set(bound[0]) & set(bound[1])
        assert pool.ready
        described = manage(managed, "/models/net")[1][0]
        assert (described["minWorkers"], described["maxWorkers"]) == (2, 2)
        until(lambda: len(pool.workers) == 2)
        before = [worker.pid for worker in pool.workers]
        assert manage(managed, "/admin/models/net", {"batch": {"delay_ms": 1}}, "PUT")[0] == 200
        killed = managed.registry.options.state.read_text()
        # The other way, for the version, without being waited for; the one that stays is not started again.
        status, answer, _ = manage(managed, "/models/net/1?min_worker=1", b"", "PUT")
        assert (status, answer["status"]) == (202, "Processing worker updates...")
        until(lambda: len(pool.workers) == 1)
        assert pool.workers[0].pid == before[0]
        assert not psutil.pid_exists(before[1])
        manage(managed, "/models/net?min_worker=1&max_worker=2&synchronous=true", b"", "PUT")  # it is between
        assert len(pool.workers) == 1
    assert set(found) == {200}

    # What a server that was killed with two workers left behind.
    options = Options(store=store, state=tmp_path / "state.json")
    assert json.loads(killed)["net"]["changed"] == {"1": {"workers": 2, "delay_ms": 1.0}}
    options.state.write_text(killed)
    with running([], options) as again:  # without trust in echo's handler, which it says and leaves out
        pool = again.registry.choose("net")
        assert (len(pool.workers), pool.settings.delay_ms) == (2, 1.0)
        assert pool.package.settings.workers == 1
        assert json.loads(options.state.read_text())["net"] == json.loads(killed)["net"]


@two_cores
def test_a_worker_that_leaves_answers_what_it_has(managed):
    """The first of two is bound to a core now, so the one that was there is replaced, and has a batch all the time."""
    if "net" in managed.registry.models:  # its last worker may be bound to a core, which nobody else gets
        managed.call(managed.registry.unload("net"))
    pool = managed.registry.choose("echo")
    old = pool.workers[0]
    answers, stop = [], threading.Event()

    def slow():
        while not stop.is_set():
            answers.append(ask(managed.url + "/predictions/echo", b"slow")[:2])

    thread = threading.Thread(target=slow)
    thread.start()
    until(lambda: old.batch is not None)
    managed.call(managed.registry.scale("echo", None, 2))
    until(lambda: len(pool.workers) == 2)
    stop.set()
    thread.join()
    assert old not in pool.workers
    assert not psutil.pid_exists(old.pid)
    assert set(answers) == {(200, b"SLOW")}
    # One that is lost while it leaves fails what it had, and is not replaced.
    found = []
    thread = threading.Thread(target=lambda: found.append(ask(managed.url + "/predictions/echo", b"slow")[0]))
    thread.start()
    until(lambda: any(worker.batch for worker in pool.workers))
    leaving = next(worker for worker in pool.workers if worker.batch)

    async def lose():
        leaving.leave()
        os.kill(leaving.pid, signal.SIGKILL)

    managed.call(lose())
    thread.join()
    assert found == [500]
    assert leaving not in pool.workers
    assert leaving.restarts == 0
    wanted = "/models?url=echo.zip&batch_size=4&initial_workers=1&max_batch_delay=2"  # loaded afresh
    assert manage(managed, wanted, b"", "POST")[1]["status"].endswith("registered with 1 initial workers")
    pool = managed.registry.choose("echo")
    assert (len(pool.workers), pool.settings.max_rows, pool.settings.delay_ms) == (1, 4, 2)
    assert ask(managed.url + "/predictions/echo", b"again")[1] == b"AGAIN"
    # One that is lost while its pool closes: what it had is answered, and the end need not wait.
    found.clear()
    thread = threading.Thread(target=lambda: found.append(ask(managed.url + "/predictions/echo", b"slow")[0]))
    thread.start()
    until(lambda: pool.workers[0].batch)

    async def end():
        ending = asyncio.ensure_future(managed.registry.unload("echo"))
        while not pool.closing:
            await asyncio.sleep(0)
        os.kill(pool.workers[0].pid, signal.SIGKILL)
        await ending

    managed.call(end())
    thread.join()
    assert found == [500]
