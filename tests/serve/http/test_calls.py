"""What a small request costs the process that listens: functions that are called, which no machine's load moves."""

import asyncio
import json
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("httptools")
from fettle.package.settings import ServeSettings
from fettle.package.tensors import TensorSpec
from fettle.serve.engine.metrics import Metrics
from fettle.serve.engine.pool import Pool
from fettle.serve.engine.refusal import Malformed, NoSuchPath
from fettle.serve.engine.registry import Model, Options, Registry
from fettle.serve.http.app import App
from fettle.serve.http.call import path_parts
from fettle.serve.http.connection import Connection
from tests.serve.engine.test_anticipation import Echo

TENSOR = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
BODY = json.dumps({"inputs": [TENSOR]}).encode()
REQUEST = b"POST /v2/models/net/infer HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
MOST = 105
REQUESTS = 50


class Client(asyncio.Transport):
    """Only notes what it is answered."""

    def __init__(self):
        super().__init__()
        self.answers = []

    def write(self, data):
        self.answers.append(data)

    def resume_reading(self):
        pass


def test_a_small_request_is_few_calls():
    async def calls():
        spec = TensorSpec("x", "FP32", (-1, 2))
        manifest = SimpleNamespace(name="net", version="1", inputs=(spec,), outputs=(spec,), shares_calls=True)
        registry = Registry(Metrics(), Options())
        pool = Pool(SimpleNamespace(manifest=manifest), ServeSettings(), registry.metrics.of("net", "1"))
        registry.models["net"] = Model({"1": pool}, "1")
        worker, process = pool.workers[0], Echo()
        process.worker, worker._process, worker.ready = worker, process, True
        client, connection = Client(), Connection(App(registry), set(), asyncio.get_running_loop())
        connection.connection_made(client)
        count = 0

        def on_event(frame, event, _):
            nonlocal count
            module = frame.f_globals.get("__name__", "")
            count += event == "call" and not module.startswith(("asyncio", "selectors", "tests."))

        try:
            for number in range(REQUESTS + 1):
                connection.data_received(REQUEST)
                while len(client.answers) == number:
                    await asyncio.sleep(0)
                sys.setprofile(on_event)  # from the second one on
        finally:
            sys.setprofile(None)
        connection.connection_lost(None)
        worker._alarm.clear()
        assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in client.answers)
        return count / REQUESTS

    assert asyncio.run(calls()) <= MOST


def test_paths_are_read_as_clients_and_proxies_write_them():
    assert path_parts(b"http://a:1/v2/models/") == path_parts(b"/v2/models") == ("v2", "models")
    assert path_parts(b"/v2/a%2Fb") == ("v2", "a/b")
    for wrong in (b"http://[", b"nothing", b"/" + b"a/" * 9):
        with pytest.raises((Malformed, NoSuchPath)):
            path_parts(wrong)
