"""What goes wrong in production, made to go wrong here: nothing is lost silently, and nobody else notices."""

import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
import torch

from fettle.package.export import write_package
from fettle.package.manifest import open_package
from fettle.package.settings import ServeSettings
from fettle.recipe import Recipe
from fettle.serve.engine.registry import Options
from fettle.workload import Workload
from tests.serve.test_conformance import shot
from tests.serve.test_server import ask
from tests.serving import net, running, until

HANDLER = """
import os, time

KEPT, GATE = [], "the gate"

class Handler:
    def initialize(self, context):
        pass
    def preprocess(self, requests):
        return [request["body"].decode() for request in requests]
    def inference(self, data):
        if data.count("big") > 1:
            raise MemoryError("cannot allocate")
        for text in data:
            if text == "leak":
                KEPT.append(bytearray(b"x") * (200 << 20))
            while text == "slow" and not os.path.exists(GATE):
                time.sleep(0.01)
        return data
    def postprocess(self, answers):
        return [answer.upper() for answer in answers]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    (folder / "handler.py").write_text(HANDLER.replace("the gate", str(folder / "gate")))
    settings = ServeSettings(max_rows=8, threads=1, workers=2)
    package = write_package(Workload(net(), [torch.rand(4, 4)]), Recipe(), folder / "m", name="m", settings=settings,
                            handler=folder / "handler.py")  # fmt: skip
    with running([package], Options(trust=(package.handler_digest,))) as made:
        made.gate = folder / "gate"
        yield made


def call(server, text):
    status, body, _ = ask(server.url + "/predictions/m", text.encode())
    return status, body


def metric(server, name, **labels):
    """The value of a counter in /metrics; 0 where it has not been counted yet."""
    wanted = {f'{key}="{value}"' for key, value in labels.items()}
    for line in ask(server.url + "/metrics")[1].decode().splitlines():
        match = re.fullmatch(rf"{name}{{(.*)}} (\S+)", line)
        if match and wanted <= set(match[1].split(",")):
            return float(match[2])
    return 0.0


@contextmanager
def busy(server):
    """Both workers are busy until `release` is called; gives threads for what shall wait meanwhile, and `release`."""
    pool = server.registry.choose("m")
    server.gate.unlink(missing_ok=True)
    with ThreadPoolExecutor(16) as threads:
        blockers = []
        try:
            for count in (1, 2):  # one after the other: both in a batch would leave one worker free
                blockers.append(threads.submit(call, server, "slow"))
                until(lambda count=count: pool.inflight == count)
            yield threads, server.gate.touch
        finally:
            server.gate.touch()
        assert [blocker.result()[0] for blocker in blockers] == [200, 200]


def test_a_batch_that_is_too_large_for_memory_is_computed_one_by_one(server):
    pool = server.registry.choose("m")
    with busy(server) as (threads, release):
        asked = [threads.submit(call, server, text) for text in ("big", "a", "big", "big")]
        until(lambda: pool.waiting_rows == 4)
        release()
        found = [one.result() for one in asked]
    assert found == [(200, b"BIG"), (200, b"A"), (200, b"BIG"), (200, b"BIG")]


@pytest.mark.slow
def test_a_worker_that_leaks_is_replaced_between_two_batches_without_a_failed_request(server):
    pool = server.registry.choose("m")
    assert call(server, "a") == (200, b"A")
    most = max(worker.rss for worker in pool.workers) + (100 << 20)
    before, kept = metric(server, "fettle_worker_restarts_total", model="m", reason="grown"), pool.settings
    pool.settings = msgspec.structs.replace(kept, max_worker_bytes=most)
    found, stop = [], threading.Event()

    def client():
        while not stop.is_set():
            found.append(call(server, "b"))

    threads = [threading.Thread(target=client) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        assert call(server, "leak") == (200, b"LEAK")
        time.sleep(0.7)  # the size of a worker is read twice a second
        deadline = time.time() + 60
        while time.time() < deadline and not (pool.ready and sum(worker.restarts for worker in pool.workers)):
            time.sleep(0.05)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        pool.settings = kept
    assert set(found) == {(200, b"B")}
    assert metric(server, "fettle_worker_restarts_total", model="m", reason="grown") == before + 1


def test_a_client_that_hung_up_is_not_computed_and_is_counted(server):
    before = metric(server, "fettle_shed_total", model="m", reason="disconnected")
    seen = metric(server, "fettle_batch_rows_sum", model="m")
    pool = server.registry.choose("m")
    with busy(server):
        with socket.create_connection(("127.0.0.1", server.ports[0])) as link:
            link.sendall(b"POST /predictions/m HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\ngone")
            until(lambda: pool.waiting_rows == 1)
        assert ask(server.url + "/v2/health/ready")[0] == 200  # answered after it has seen the other one go
    assert call(server, "a")[0] == 200
    assert metric(server, "fettle_shed_total", model="m", reason="disconnected") == before + 1
    assert metric(server, "fettle_batch_rows_sum", model="m") == seen + 3


def test_a_client_that_does_not_read_stops_nobody(server):
    request = shot(np.ones((8, 4), np.float32), "m", "input")
    with socket.create_connection(("127.0.0.1", server.ports[0])) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.settimeout(0.5)
        sent = 0
        try:
            while sent < 32 << 20:  # until nobody takes more of it: the server is waiting for us to read
                sent += link.send(request * 16)
        except TimeoutError:
            pass
        assert sent < 32 << 20  # what it takes from one connection is bounded
        assert call(server, "a") == (200, b"A")
        assert ask(server.url + "/v2/health/ready")[0] == 200


def test_large_and_small_requests_get_their_own_answers_also_after_a_worker_was_killed(tmp_path):
    """Large bodies stand in memory that server and worker share: nothing of one call may show in another."""

    class Turned(torch.nn.Module):
        def forward(self, x):
            return 1 - x.flip(1)

    settings = ServeSettings(max_rows=4, threads=1)
    inputs = [torch.rand(2, size) for size in (3, 5)]
    package = write_package(Workload(Turned(), inputs), Recipe(), tmp_path / "m", name="turned", settings=settings)

    def infer(number):
        rows, size = 1 + number % 3, (400_000, 4, 900_000, 70)[number % 4]  # of 4 bytes: either way goes
        x = number + np.arange(rows * size, dtype=np.float32).reshape(rows, size) / size
        tensor = {"name": "x", "shape": list(x.shape), "datatype": "FP32", "parameters": {"binary_data_size": x.nbytes}}
        head = msgspec.json.encode({"inputs": [tensor], "parameters": {"binary_data_output": True}})
        headers = {"Inference-Header-Content-Length": str(len(head))}
        status, body, _ = ask(server.url + "/v2/models/turned/infer", head + x.tobytes(), headers=headers)
        return status, status != 200 or body.endswith((1 - x[:, ::-1]).tobytes())

    with running([package]) as server, ThreadPoolExecutor(6) as threads:
        worker = server.registry.choose("turned").workers[0]
        assert worker._process._memory is not None or not hasattr(os, "memfd_create")
        assert set(threads.map(infer, range(40))) == {(200, True)}
        os.kill(worker.pid, signal.SIGKILL)
        assert {right for _, right in threads.map(infer, range(12))} == {True}
        until(lambda: worker.ready and worker.restarts)
        assert set(threads.map(infer, range(12))) == {(200, True)}


def test_states_without_rows_go_to_no_other_client_and_wrong_sizes_are_the_clients(tmp_path):
    class Places(torch.nn.Module):
        """No more than 8 places, as many as the mask has."""

        def __init__(self):
            super().__init__()
            self.places = torch.nn.Parameter(torch.randn(8, 4))

        def forward(self, x, mask):
            last = ((x + self.places[: x.shape[1]]) * mask[..., None]).sum(1)
            return {"last": last, "state": last[None]}

    model = Places().eval()
    inputs = [{"x": torch.randn(2, places, 4), "mask": torch.ones(2, places)} for places in (3, 5)]
    package = write_package(Workload(model, inputs), Recipe(), tmp_path / "m", name="m",
                            settings=ServeSettings(max_rows=4, threads=1))  # fmt: skip

    def infer(x, mask):
        tensors = [
            {"name": name, "shape": list(value.shape), "datatype": "FP32", "data": value.ravel().tolist()}
            for name, value in (("x", x), ("mask", mask))
        ]
        return ask(server.url + "/v2/models/m/infer", {"inputs": tensors})

    with running([package], Options(override={"delay_ms": 50.0})) as server, ThreadPoolExecutor(4) as threads:
        rows = [torch.randn(1, 3, 4) for _ in range(4)]
        for x, (status, answer, _) in zip(rows, threads.map(infer, rows, [torch.ones(1, 3)] * 4), strict=True):
            with torch.no_grad():
                wanted = model(x, torch.ones(1, 3))
            assert status == 200
            for output in answer["outputs"]:
                found = np.array(output["data"], np.float32).reshape(output["shape"])
                np.testing.assert_allclose(found, wanted[output["name"]], atol=1e-5)
        for x, mask in ((torch.ones(1, 9, 4), torch.ones(1, 9)), (torch.ones(1, 3, 4), torch.ones(1, 5))):
            status, answer, _ = infer(x, mask)
            assert (status, answer["error"].partition(":")[0]) == (400, "the model takes no inputs of these sizes")


def test_nan_stays_in_its_own_row(server):
    x = np.array([[np.nan] * 4, [1, 2, 3, 4]], np.float32)
    wanted = net()(torch.from_numpy(x[1:])).detach().numpy()

    def infer(row):
        tensor = {"name": "input", "shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}
        head = msgspec.json.encode({"inputs": [tensor]})
        headers = {"Inference-Header-Content-Length": str(len(head))}
        return ask(server.url + "/v2/models/m/infer", head + row.tobytes(), headers=headers)[1]["outputs"][0]["data"]

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(infer, [x[0], x[1]] * 8))
    assert all(value == [None] * 3 for value in found[::2])  # JSON has no NaN
    np.testing.assert_allclose(found[1::2], np.repeat(wanted, 8, axis=0), atol=1e-6)


def test_what_is_under_way_when_a_model_goes_is_answered(store, monkeypatch):
    monkeypatch.setattr("fettle.serve.engine.registry.DRAIN_S", 0.2)
    echo = open_package(store / "echo")
    with running([echo], Options(trust=(echo.handler_digest,))) as server, ThreadPoolExecutor(1) as thread:
        pool = server.registry.choose("echo")
        asked = thread.submit(ask, server.url + "/predictions/echo", b"hang")
        until(lambda: pool.inflight)
        server.call(server.registry.unload("echo"))
        status, answer, _ = asked.result(60)
    assert (status, "unloaded" in str(answer)) == (503, True)
