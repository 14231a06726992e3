"""The server, spoken to over HTTP: protocols, versions, faults, and what strangers may not do."""

import contextlib
import json
import os
import re
import resource
import signal
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import psutil
import pytest
import torch

from fettle.errors import UsageError
from fettle.package.manifest import open_package
from fettle.package.settings import ServeSettings
from fettle.serve.engine.registry import Options
from fettle.serve.http import Limits, protocol
from fettle.serve.http.aside import LARGE
from fettle.serve.server import Address, clients_token, token_from
from tests.forking import Begun
from tests.serving import net, running, until

TOKEN = "t" * 43


def ask(url, data=None, method=None, headers=None):
    """Status, body as JSON where it is some, and headers."""
    data = json.dumps(data).encode() if isinstance(data, (dict, list)) else data
    request = urllib.request.Request(url, data=data, method=method, headers=headers or {})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            status, body, found = answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        status, body, found = error.code, error.read(), error.headers
    try:
        return status, json.loads(body), found
    except ValueError:
        return status, body, found


def infer(server, rows, version=None, **parameters):
    path = "/v2/models/net" + (f"/versions/{version}" if version else "") + "/infer"
    x = np.asarray(rows, np.float32)
    tensor = {"name": "input", "shape": list(x.shape), "datatype": "FP32", "data": x.ravel().tolist()}
    return ask(server.url + path, {"inputs": [tensor], "parameters": parameters, "id": "a"})


def values(answer):
    output = answer["outputs"][0]
    return np.array(output["data"], np.float32).reshape(output["shape"])


@pytest.fixture(scope="module")
def server(store):
    packages = [open_package(store / name) for name in ("net-1", "net-2", "echo")]
    digest = packages[2].handler_digest
    with running(packages, Options(trust=(digest,))) as made:
        yield made


def test_tensors_come_back_as_the_model_gives_them(server):
    rows = np.random.rand(3, 4).astype(np.float32)
    status, answer, headers = infer(server, rows)
    assert (status, headers["content-type"]) == (200, "application/json")
    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("net", "1", "a")
    np.testing.assert_allclose(values(answer), net()(torch.from_numpy(rows)).detach(), atol=1e-6)


def test_others_are_answered_while_a_large_body_is_read(server, monkeypatch):
    began, answered, read = threading.Event(), threading.Event(), protocol.read_request

    def slowly(*request):
        began.set()
        assert answered.wait(60)
        return read(*request)

    monkeypatch.setattr(protocol, "read_request", slowly)
    tensor = {"name": "input", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
    body = json.dumps({"inputs": [tensor]}).encode() + b" " * LARGE
    with ThreadPoolExecutor(1) as threads:
        large = threads.submit(ask, server.url + "/v2/models/net/infer", body)
        assert began.wait(60)
        assert ask(server.url + "/v2/health/live")[0] == 200
        answered.set()
        assert large.result()[0] == 200


@pytest.mark.parametrize("kind", ["multipart/form-data", "Multipart/Form-Data"])
def test_the_file_of_a_form_is_what_the_handler_gets(server, kind):
    form = b'--xyz\r\nContent-Disposition: form-data; name="data"; filename="a.txt"\r\n\r\na word\r\n--xyz--\r\n'
    kind = {"Content-Type": f"{kind}; boundary=xyz"}
    assert ask(server.url + "/predictions/echo", form, headers=kind)[:2] == (200, b"A WORD")
    status, answer, _ = ask(server.url + "/predictions/echo", form.replace(b"data", b"other"), headers=kind)
    assert (status, answer["message"]) == (400, "the form has no field data or body")


def test_what_the_server_says_of_itself(server):
    assert ask(server.url + "/v2")[1]["extensions"]
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/net/ready", "/ping", "/openapi.json", "/docs"):
        assert ask(server.url + path)[0] == 200
    assert ask(server.url + "/v2/models/net")[1]["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 4]}]
    assert ask(server.url + "/v2/models/net/config")[1]["max_batch_size"] == 8
    index = ask(server.url + "/v2/repository/index", b"", "POST")[1]
    assert {(row["name"], row["version"], row["state"]) for row in index} >= {
        ("net", "1", "READY"),
        ("net", "2", "READY"),
    }
    nested = b'{"more": ' + b"[" * 50 + b"]" * 50 + b', "ready": true}'
    assert ask(server.url + "/v2/repository/index", nested, "POST")[1] == index
    for wrong in (b"[]", b"{", b'{"ready": "yes"}', b'{"more": ' + b"[" * 100_000):
        assert ask(server.url + "/v2/repository/index", wrong, "POST")[0] == 400
    assert b"fettle_model_seconds_bucket" in ask(server.url + "/metrics")[1]
    stats = ask(server.url + "/v2/models/net/stats")[1]["model_stats"]
    assert {row["version"] for row in stats} == {"1", "2"}


@pytest.mark.parametrize(
    ("path", "data", "status"),
    [
        ("/v2/models/none/infer", {}, 404), ("/v2/models/net/versions/9/infer", {}, 404), ("/nothing", None, 404),
        ("/v2/models/net/infer", b"{", 400), ("/v2/repository/models/net/load", {}, 403), ("/models", None, 404),
        ("/v2/models/../../etc/passwd", None, 404), ("/v2/models/" + "a" * 5000, None, 404),
    ],
)  # fmt: skip
def test_wrong_requests_are_answered_in_json(server, path, data, status):
    found, answer, headers = ask(server.url + path, data)
    assert found in (status, 400 if status == 404 and data == {} else status)
    assert headers["content-type"] == "application/json"
    assert isinstance(answer, dict)


def test_what_a_model_or_a_server_cannot_do_is_said(server):
    status, answer, _ = ask(server.url + "/v2/models/net/generate", b'{"text_input": "a"}')
    assert (status, answer["error"]) == (400, "the model net generates no text")
    assert ask(server.url + "/v2/models/none/generate", b"{}")[0] == 404
    tensor = {"name": "input", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
    status, answer, _ = ask(server.url + "/v2/models/net/explain", {"inputs": [tensor]})
    assert (status, answer["error"]) == (501, "explanations are off on this server")
    assert ask(server.url + "/explanations/net", [[1, 2, 3, 4]])[0] == 501
    assert "/explanations/net" not in json.dumps(ask(server.url + "/openapi.json")[1])
    binary = {"Inference-Header-Content-Length": "many"}
    assert ask(server.url + "/v2/models/net/infer", b"{}", headers=binary)[0] == 400
    assert ask(server.url + "/v1/models/echo:predict", b"a word")[:2] == (200, b"A WORD")
    status, answer, _ = ask(server.url + "/v1/models/none:predict", b"a word")
    assert (status, answer["type"]) == (404, "ModelNotFoundException")


def test_nobody_gets_another_ones_answer(server):
    """Tagged rows from many clients at once; batches are mixed, answers are not."""
    reference = net()

    def client(number):
        for step in range(40):
            rows = np.full((1 + (number + step) % 3, 4), number + step / 100, np.float32)
            status, answer, _ = infer(server, rows)
            assert status == 200
            np.testing.assert_allclose(values(answer), reference(torch.from_numpy(rows)).detach(), atol=1e-4)

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(client, range(16)))
    stats = ask(server.url + "/v2/models/net/versions/1/stats")[1]["model_stats"][0]
    assert stats["execution_count"] < stats["inference_stats"]["success"]["count"]  # some were batched


def test_a_request_that_failed_fails_alone_and_names_nothing(server):
    def call(text):
        return ask(server.url + "/predictions/echo", text.encode())

    with ThreadPoolExecutor(8) as threads:
        blocker = threads.submit(call, "slow")  # the others wait together meanwhile
        time.sleep(0.1)
        texts = ["a", "b", "raise", "c"]
        found = dict(zip(texts, threads.map(call, texts), strict=True))
        assert blocker.result()[1] == b"SLOW"
    assert [found[text][1] for text in "abc"] == [b"A", b"B", b"C"]
    status, answer, _ = found["raise"]
    assert status == 500
    assert "secret" not in json.dumps(answer)


@pytest.mark.parametrize("how", ["die", "hang"])
def test_a_worker_that_ends_or_hangs_is_replaced(server, how):
    pool = server.registry.choose("echo")
    before = pool.workers[0].restarts
    status, _, _ = ask(server.url + "/predictions/echo", how.encode())
    assert status == 500
    until(lambda: pool.ready and pool.workers[0].restarts > before)
    assert ask(server.url + "/predictions/echo", b"again")[1] == b"AGAIN"


@contextmanager
def asking(server):
    """Clients that ask all the time; gives the list of the statuses that they got."""
    found, stop = [], threading.Event()

    def client():
        while not stop.is_set():
            found.append(infer(server, [[1, 2, 3, 4]])[0])

    threads = [threading.Thread(target=client) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_killed_worker_loses_no_request_silently(server, caplog):
    pool = server.registry.choose("net")
    before = pool.workers[0].restarts
    with asking(server) as found:
        until(lambda: len(found) >= 8)
        assert set(found) == {200}
        os.kill(pool.workers[0].pid, signal.SIGKILL)
        until(lambda: pool.ready and pool.workers[0].restarts > before)
        assert infer(server, [[1, 2, 3, 4]])[0] == 200
    assert set(found) <= {200, 500, 503}
    assert "worker 0 of net was killed by SIGKILL, as the kernel does when memory runs out" in caplog.text


def test_a_request_whose_time_is_over_is_not_computed(store):
    package = open_package(store / "net-1")
    with running([package], Options(override={"delay_ms": 200.0})) as server:
        status, answer, _ = infer(server, [[1, 2, 3, 4]], timeout=1000)  # a millisecond, of a wait of 200
        assert status == 504
        assert "time was over" in answer["error"]
        assert server.registry.choose("net").metrics.model.count == 0


def test_a_full_queue_refuses_at_once_and_says_when_to_come_again(store):
    package = open_package(store / "echo")
    options = Options(trust=(package.handler_digest,), override={"max_queue_rows": 2, "max_rows": 1})
    with running([package], options) as server, ThreadPoolExecutor(12) as threads:
        found = list(threads.map(lambda _: ask(server.url + "/predictions/echo", b"slow"), range(12)))
    refused = [headers for status, _, headers in found if status == 429]
    assert refused
    assert all(int(headers["retry-after"]) >= 1 for headers in refused)
    assert sum(status == 200 for status, _, _ in found) >= 2


def test_a_full_queue_refuses_before_it_reads(store):
    """Under overload refusing must be cheap: a body that could not wait anyway is not even parsed."""
    package = open_package(store / "net-1")
    with (
        running([package], Options(override={"delay_ms": 800.0, "max_queue_rows": 1})) as server,
        ThreadPoolExecutor(1) as threads,
    ):
        url = server.url + "/v2/models/net/infer"
        assert ask(url, b"no JSON")[0] == 400
        first = threads.submit(infer, server, [[1, 2, 3, 4]])
        seen = {ask(url, b"no JSON")[0] for _ in iter(lambda: not first.done(), False)}
        assert first.result()[0] == 200
    assert 429 in seen


def test_bodies_are_bounded(store):
    with running([open_package(store / "net-1")], limits=Limits(max_body=1000, body_s=1.0)) as server:
        assert ask(server.url + "/v2/models/net/infer", b"x" * 2000)[0] == 413
        with socket.create_connection(("127.0.0.1", server.ports[0])) as link:  # a gigabyte, announced
            link.sendall(b"POST /v2/models/net/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 1073741824\r\n\r\n")
            assert b" 413 " in link.recv(100)
        with socket.create_connection(("127.0.0.1", server.ports[0])) as link:  # chunks without an end
            link.sendall(b"POST /v2/models/net/infer HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
            link.sendall(b"400\r\n" + b"x" * 1024 + b"\r\n")
            assert b" 413 " in link.recv(100)
        with socket.create_connection(("127.0.0.1", server.ports[0])) as link:  # a body that does not come
            link.sendall(b"POST /v2/models/net/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n")
            assert b" 408 " in link.recv(100)
        assert infer(server, [[1, 2, 3, 4]])[0] == 200


def test_connections_that_say_nothing_or_half_are_closed(store):
    with running([open_package(store / "net-1")], limits=Limits(idle_s=0.6)) as server:
        address = ("127.0.0.1", server.ports[0])
        for begun in (b"", b"POST /v2/models/net/infer HTTP/1.1\r\nHost: a\r\nX-Slow: "):
            with socket.create_connection(address, timeout=30) as link:
                link.sendall(begun)
                assert link.recv(100) == b""
        with socket.create_connection(address, timeout=30) as link:  # one that has been served, too
            link.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n")
            said = b""
            while part := link.recv(1000):
                said += part
            assert b" 200 " in said
        assert infer(server, [[1, 2, 3, 4]])[0] == 200


def test_headers_are_bounded(server):
    """Many of them, one without an end, and some after the last chunk of a body."""
    begun = b"POST /v2/models/net/infer HTTP/1.1\r\nHost: a\r\n"
    for start, more in (
        (begun, b"X-Many: a\r\n" * 1000),
        (begun + b"X-Long: ", b"a" * 10_000),
        (begun + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X-Many: a\r\n" * 1000),
        (begun + b"Transfer-Encoding: chunked\r\n\r\n1;", b"a" * 10_000),
    ):
        with socket.create_connection(("127.0.0.1", server.ports[0]), timeout=30) as link:
            link.sendall(start)
            with contextlib.suppress(ConnectionError):
                for _ in range(2000):  # 20 MB, if they were taken
                    link.sendall(more)
                pytest.fail("all of it was taken")
    body = json.dumps({"inputs": [{"name": "input", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]})
    chunks = b"".join(b"1\r\n" + bytes([byte]) + b"\r\n" for byte in (" " * 20_000 + body).encode())
    with socket.create_connection(("127.0.0.1", server.ports[0]), timeout=30) as link:  # small chunks are no headers
        link.sendall(begun + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
        assert b" 200 " in link.recv(1000)


def test_a_handler_runs_only_where_it_is_trusted(store, capfd):
    package = open_package(store / "echo")
    with pytest.raises(UsageError, match="`trust="), running([package]):
        pass
    assert "Traceback" not in capfd.readouterr().err
    with pytest.raises(UsageError, match="`trust="), running([package], Options(trust=("0" * 64,))):
        pass


# -- management -------------------------------------------------------------------------------------------------------


@pytest.fixture
def managed(store, tmp_path):
    options = Options(store=store, state=tmp_path / "state.json")
    with running([open_package(store / "net-1")], options, management_port=0, management_token=TOKEN) as server:
        server.admin = f"http://127.0.0.1:{server.ports[1]}"
        yield server


def manage(server, path, data=None, method=None, token=TOKEN, **headers):
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return ask(server.admin + path, data, method, headers)


def test_management_asks_for_its_token_and_host(managed):
    for path in ("/models", "/v2/repository/models/net/unload", "/admin/models/net", "/anything", "/v2"):
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
            assert manage(managed, path, method=method, token="")[0] == 401
            assert manage(managed, path, method=method, token="wrong")[0] == 401
    assert manage(managed, "/models", Host="evil.example")[0] == 403
    assert manage(managed, "/models")[0] == 200


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_management_knows_its_ipv6_address_as_clients_write_it():
    with running([], host="::", insecure=True, management_port=0, management_token=TOKEN) as server:
        server.admin = f"http://127.0.0.1:{server.ports[1]}"
        assert manage(server, "/models", Host=f"[::]:{server.ports[1]}")[0] == 200
        assert manage(server, "/models", Host="[fd00::1]")[0] == 403


def test_nothing_is_loaded_from_an_address_or_a_path(managed):
    for url in ("http://evil.example/a.zip", "file:///etc/passwd", "../net-2", "/etc", "a\\b"):
        assert manage(managed, "/models?url=" + urllib.parse.quote(url, safe=""), b"", "POST")[0] == 400
    assert manage(managed, "/v2/repository/models/none/load", b"", "POST")[0] == 404
    bad = {"parameters": {"config": "{}", "file:1/model.pt": "AAAA"}}
    assert manage(managed, "/v2/repository/models/net/load", bad, "POST")[0] == 400


def test_management_says_what_it_does_and_what_cannot_be(managed):
    assert manage(managed, "/admin/models/net")[1]["versions"]["1"]["state"] == "READY"
    assert [row["modelVersion"] for row in manage(managed, "/models/net/all")[1]] == ["1"]
    for path, data, method, status in (
        ("/v2/models/net/infer", b"{}", "POST", 404), ("/predictions/net", b"a", "POST", 404),
        ("/admin/models/net", b"{", "PUT", 400), ("/admin/models/net", [], "PUT", 400),
        ("/admin/models/net", {"weights": {"1": 0}}, "PUT", 400), ("/admin/models/net", {"batch": 3}, "PUT", 400),
        ("/v2/repository/models/a%20b/load", b"", "POST", 400), ("/models/net/9", None, "DELETE", 404),
        ("/models?" + "&".join(f"a{n}=1" for n in range(40)), b"", "POST", 400),
    ):  # fmt: skip
        assert manage(managed, path, data, method)[0] == status, path
    assert manage(managed, "/admin/models/net", {"shadow": "1"}, "PUT")[0] == 200
    assert manage(managed, "/v2/repository/models/net/unload", b"", "POST")[0] == 200
    assert manage(managed, "/v2/repository/models/net/unload", b"", "POST")[0] == 404
    assert ask(managed.url + "/v2/health/ready")[0] == 503


def test_versions_swap_under_load_without_a_failed_request(managed):
    found, stop = [], threading.Event()

    def client():
        while not stop.is_set():
            status, answer, _ = infer(managed, [[1, 2, 3, 4]])
            found.append((status, answer.get("model_version")))

    threads = [threading.Thread(target=client) for _ in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: found)
    assert manage(managed, "/v2/repository/models/net/load", b"", "POST")[0] == 200  # version 2, the highest
    assert manage(managed, "/models/net/2/set-default", b"", "PUT")[0] == 200
    assert manage(managed, "/models/net/1", method="DELETE")[0] == 200
    until(lambda: found[-1][1] == "2")
    stop.set()
    for thread in threads:
        thread.join()
    assert {status for status, _ in found} == {200}
    assert found[0][1] == "1"
    state = json.loads(managed.registry.options.state.read_text())
    assert list(state["net"]["versions"]) == ["2"]


def test_weights_are_sticky_and_shadows_are_silent(managed):
    managed.call(managed.registry.load_named("net", "2"))
    wanted = {"weights": {"1": 0.5, "2": 0.5}}
    assert manage(managed, "/admin/models/net", wanted, "PUT")[0] == 200
    for session in range(8):
        seen = set()
        for _ in range(4):
            tensor = {"name": "input", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
            headers = {"X-Session-Id": str(session)}
            seen.add(
                ask(managed.url + "/v2/models/net/infer", {"inputs": [tensor]}, headers=headers)[1]["model_version"]
            )
        assert len(seen) == 1
    rolled_back = manage(managed, "/admin/models/net", {"default": "1", "shadow": "2"}, "PUT")
    assert (rolled_back[0], rolled_back[1]["weights"]) == (200, {})  # whoever names a default means all requests
    before = managed.registry.choose("net", "2").metrics.requests.count
    assert infer(managed, [[1, 2, 3, 4]])[1]["model_version"] == "1"
    until(lambda: managed.registry.choose("net", "2").metrics.requests.count > before)
    assert managed.registry.choose("net", "2").metrics.requests.count == before + 1
    for bad in (
        {"weights": {"9": 1}},
        {"weights": {"1": -1}},
        {"default": "9"},
        {"default": ["1"]},
        {"shadow": {"1": 1}},
        {"unknown": 1},
        {"batch": {"max_rows": 99}},
    ):
        assert manage(managed, "/admin/models/net", bad, "PUT")[0] == 400


def test_a_restart_serves_what_was_served(store, tmp_path):
    options = Options(store=store, state=tmp_path / "state.json")
    with running([open_package(store / "net-2")], options):
        pass
    (tmp_path / "state.json").write_text(json.dumps({"net": {"versions": {"2": str(store / "net-2")}, "default": "2"}}))
    with running([], options) as again:
        assert infer(again, [[1, 2, 3, 4]])[1]["model_version"] == "2"
    for damaged in ("{", "[]", '{"net": {"versions": [1]}}', '{"net": {"changed": {"2": 5}}}'):
        (tmp_path / "state.json").write_text(damaged)
        with pytest.raises(UsageError, match="state file"), running([], options):
            pass
        assert (tmp_path / "state.json").read_text() == damaged


@pytest.mark.parametrize("weights", [{}, {"1": 0.0, "2": 0.0, "3": 1.0}])
def test_what_one_start_cannot_serve_is_there_for_the_next(store, tmp_path, weights):
    """A package that is away, as a store that is not mounted yet: the others are served as they were set, and the state
    file keeps it."""
    state, away = tmp_path / "state.json", tmp_path / "net-3"
    versions = {"1": str(store / "net-1"), "2": str(store / "net-2"), "3": str(away)}
    changed = {"3": {"delay_ms": 1.0}}
    said = {"versions": versions, "default": "2", "weights": weights, "shadow": "3", "changed": changed}
    state.write_text(json.dumps({"net": said}))
    with running([], Options(store=store, state=state)) as server:
        assert infer(server, [[1, 2, 3, 4]])[1]["model_version"] == "2"
        assert json.loads(state.read_text())["net"] == said
        server.call(server.registry.unload("net", "1"))
        kept = json.loads(state.read_text())["net"]
        assert (kept["default"], kept["changed"]) == ("2", said["changed"])
        assert kept["versions"] == {number: versions[number] for number in ("2", "3")}
        server.call(server.registry.unload("net", "3"))
        assert list(json.loads(state.read_text())["net"]["versions"]) == ["2"]
        server.call(server.registry.unload("net"))
        assert json.loads(state.read_text()) == {}


# -- starting ---------------------------------------------------------------------------------------------------------


def test_other_hosts_need_a_token_or_a_word():
    for wrong in (
        Address(host="0.0.0.0"),
        Address(management_port=0),
        Address(management_port=0, management_token="short"),
    ):
        with pytest.raises(UsageError):
            wrong.check()
    Address(host="0.0.0.0", token=TOKEN).check()
    Address(host="0.0.0.0", insecure=True).check()


def test_a_token_is_asked_of_every_request(store):
    with running([open_package(store / "net-1")], token=TOKEN) as server:
        for path in ("/v2", "/metrics", "/v2/models/net/infer", "/ping", "/docs"):
            assert ask(server.url + path)[0] == 401
        assert ask(server.url + "/v2", headers={"Authorization": f"Bearer {TOKEN}"})[0] == 200


def test_token_files(tmp_path, monkeypatch):
    monkeypatch.delenv("FETTLE_TOKEN", raising=False)
    token = token_from(tmp_path / "token")
    assert (clients_token(tmp_path / "token"), clients_token(None), len(token) >= 22) == (token, "", True)
    monkeypatch.setenv("FETTLE_TOKEN", "theirs")  # that of the management port stays its own
    assert (clients_token(None), clients_token(tmp_path / "token")) == ("theirs", "theirs")
    assert (tmp_path / "token").stat().st_mode & 0o077 == 0
    assert token_from(tmp_path / "token") == token
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        token_from(tmp_path / "token")
    with pytest.raises(UsageError, match="no token can be kept in"):
        token_from(tmp_path / "token" / "token")
    (tmp_path / "token").write_bytes(b"\xff" * 30)
    (tmp_path / "token").chmod(0o600)
    with pytest.raises(UsageError, match="not text in UTF-8"):
        token_from(tmp_path / "token")
    (tmp_path / "folder").mkdir(0o700)
    with pytest.raises(UsageError, match="cannot read"):
        token_from(tmp_path / "folder")


def test_settings_that_cannot_be_are_one_line(store):
    package = open_package(store / "net-1")
    for override in ({"max_rows": 10_000}, {"workers": 0}):
        with pytest.raises(UsageError), running([package], Options(override=override)):
            pass
    assert package.settings == ServeSettings(max_rows=8, threads=1)


def test_clients_of_the_protocol(server):
    http = pytest.importorskip("tritonclient.http")
    client = http.InferenceServerClient(server.url.removeprefix("http://"))
    assert client.is_server_ready()
    assert client.is_model_ready("net")
    x = np.random.rand(2, 4).astype(np.float32)
    wanted = net()(torch.from_numpy(x)).detach().numpy()
    for binary_in in (True, False):
        for binary_out in (True, False, None):
            given = http.InferInput("input", [2, 4], "FP32")
            given.set_data_from_numpy(x, binary_data=binary_in)
            outputs = None if binary_out is None else [http.InferRequestedOutput("output", binary_data=binary_out)]
            found = client.infer("net", [given], outputs=outputs, request_compression_algorithm="gzip")
            np.testing.assert_allclose(found.as_numpy("output"), wanted, atol=1e-6)


def begun(folder, package, *more):
    """A server in a process of its own, and what it has said."""
    program = "from tests.forking import forked_here\nwith forked_here():\n    from fettle.cli import main; main()"
    server = Begun(folder, program, "serve", str(package), "--port", "0", "--json", *more)
    until(lambda: server.out.read_text().endswith("\n") or server.has_ended())
    return server, json.loads(server.out.read_text())


def test_a_server_that_is_killed_takes_its_workers_along(store, tmp_path):
    server, said = begun(tmp_path, store / "net-1")
    assert ask(said["url"] + "/v2/health/ready")[0] == 200
    family = psutil.Process(server.pid).children(recursive=True)
    assert len(family) == 2  # what it is forked from, and one worker: that which began ahead of all else has been taken
    server.send(signal.SIGKILL)
    server.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


def test_ctrl_c_answers_what_was_accepted_and_ends_with_0(store, tmp_path):
    server, said = begun(tmp_path, store / "net-1", "--delay", "2000")
    tensor = {"name": "input", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(ask, said["url"] + "/v2/models/net/infer", {"inputs": [tensor]})
        waiting = re.compile(rb"^fettle_queue_rows{.*} 1", re.MULTILINE)
        until(lambda: waiting.search(ask(said["url"] + "/metrics")[1]) or answer.done())
        server.send(signal.SIGINT)
        assert answer.result()[0] == 200
    assert server.wait() == 0


def test_a_thousand_connections_that_say_nothing_stop_nobody(server):
    links = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # both ends of each are this process's
    try:
        for _ in range(1000):
            links.append(socket.create_connection(("127.0.0.1", server.ports[0])))
        assert infer(server, [[1, 2, 3, 4]])[0] == 200
    finally:
        for link in links:
            link.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_http_says_of_a_connection_is_kept(store):
    """Old clients, HEAD, two requests at once, and a client that asks before it sends its body."""

    def said(request, later=b""):
        with socket.create_connection(("127.0.0.1", server.ports[0]), timeout=30) as link:
            link.sendall(request)
            found = b""
            if later:
                found = link.recv(1000)
                link.sendall(later)
            while piece := link.recv(1 << 16):  # until the server closes
                found += piece
        return found

    body = json.dumps(
        {"inputs": [{"name": "input", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
    ).encode()
    head = b"POST /v2/models/net/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(body)
    close = b"Connection: close\r\n"
    with running([open_package(store / "net-1")]) as server:
        old = said(b"GET /ping HTTP/1.0\r\n\r\n")
        assert old.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"connection: close" in old
        head_only = said(b"HEAD /v2 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert head_only.startswith(b"HTTP/1.1 200 OK\r\n")
        assert head_only.endswith(b"\r\n\r\n")
        two = said(head + b"\r\n" + body + head + close + b"\r\n" + body)
        assert two.count(b"HTTP/1.1 200 OK") == two.count(b'"model_name":"net"') == 2
        assert two.count(b"connection: close") == 1
        waited = said(head + close + b"Expect: 100-continue\r\n\r\n", later=body)
        assert waited.startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert waited.count(b"HTTP/1.1 200 OK") == 1
