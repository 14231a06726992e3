"""Against the running server: other people's clients, a fuzzer, a million tagged requests, a soak, a full disk."""

import asyncio
import json
import os
import re
import resource
import socket
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import torch

from fettle.package.export import write_package
from fettle.package.manifest import open_package
from fettle.package.settings import ServeSettings
from fettle.recipe import Recipe
from fettle.workload import Workload
from tests.serve.test_server import ask
from tests.serving import running

MAIN = [sys.executable, "-c", "from fettle.cli import main; main()"]


# -- answers go to whoever asked ---------------------------------------------------------------------------------------


class Tagged(torch.nn.Module):
    """Answers what it was given, turned around: exact in float32, and no row looks like another's."""

    def forward(self, x):
        return 1.0 - x.flip(1)


LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


def shot(rows, model="tag", name="x"):
    """A request with binary tensors, as bytes."""
    said = {"inputs": [{"name": name, "datatype": "FP32", "shape": list(rows.shape),
                        "parameters": {"binary_data_size": rows.nbytes}}],
            "parameters": {"binary_data_output": True}}  # fmt: skip
    head = json.dumps(said).encode()
    lines = [
        f"POST /v2/models/{model}/infer HTTP/1.1", "Host: a", f"Content-Length: {len(head) + rows.nbytes}",
        f"Inference-Header-Content-Length: {len(head)}",
    ]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode() + head + rows.tobytes()


async def tagged(port, first, count, depth=32):
    """Send `count` requests with tags from `first` on over one connection, `depth` at a time; errors found."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    wrong = 0
    for start in range(first, first + count, depth):
        tags = range(start, min(start + depth, first + count))
        asked = [
            (tag + np.arange(4 * (1 + tag % 3), dtype=np.float32).reshape(-1, 4) / 16).astype(np.float32)
            for tag in tags
        ]
        writer.write(b"".join(shot(rows) for rows in asked))
        for rows in asked:
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(int(LENGTH.search(head)[1]))
            wanted = (1 - rows[:, ::-1]).tobytes()
            wrong += not (head.startswith(b"HTTP/1.1 200 ") and body.endswith(wanted) and body[-len(wanted) - 1] == 125)
    writer.close()
    return wrong


@pytest.fixture(scope="module")
def tag_folder(tmp_path_factory):
    settings = ServeSettings(max_rows=64, threads=1, max_queue_rows=4096)
    path = tmp_path_factory.mktemp("tag") / "tag"
    write_package(Workload(Tagged(), [{"x": torch.rand(4, 4)}]), Recipe(), path, name="tag", settings=settings)
    return path


@pytest.fixture(scope="module")
def server(tag_folder):
    with running([open_package(tag_folder)]) as made:
        yield made


@pytest.mark.parametrize("count", [8_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_no_answer_is_anybody_elses(server, count):
    """Tags of 8 connections at once, pipelined, 1 to 3 rows each, batched together by the server."""

    async def clients(port):
        each = count // 8
        # Tags below 2^20: sums with sixteenths are exact in float32.
        return sum(await asyncio.gather(*(tagged(port, n * each, each) for n in range(8))))

    def seen():
        stats = ask(server.url + "/v2/models/tag/stats")[1]["model_stats"][0]
        return np.array([stats["inference_stats"]["success"]["count"], stats["execution_count"]])

    before = seen()
    assert asyncio.run(clients(server.ports[0])) == 0
    answered, executions = seen() - before
    assert answered == count
    assert executions < count / 2  # many shared a batch, or this would show nothing


# -- a soak ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_stays_bounded(tag_folder):
    """A minute and a half of good, wrong and abandoned requests: no process may grow after the first third."""
    server = subprocess.Popen(
        [*MAIN, "serve", str(tag_folder), "--port", "0", "--json"], stdout=subprocess.PIPE, text=True
    )
    try:
        said = json.loads(server.stdout.readline())
        port = said["ports"][0]
        family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        seen = []
        for step in range(90):
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                assert asyncio.run(tagged(port, step * 1000, 256)) == 0
                for body in (b"{", b'{"inputs": []}', b"x" * 100_000):
                    assert ask(said["url"] + "/v2/models/tag/infer", body)[0] == 400
                assert ask(f"{said['url']}/{os.urandom(8).hex()}/{step}")[0] == 404
                with socket.create_connection(("127.0.0.1", port)) as gone:
                    gone.sendall(shot(np.ones((64, 4), np.float32)))
                assert ask(said["url"] + "/metrics")[0] == 200
            seen.append([process.memory_info().rss for process in family])
        grown = np.median(seen[-10:], axis=0) - np.median(seen[30:40], axis=0)
        assert (grown < 8 << 20).all(), [f"{value / 2**20:.1f} MiB" for value in grown]
    finally:
        server.kill()
        server.wait()


# -- a full disk -------------------------------------------------------------------------------------------------------


def test_a_full_disk_stops_nothing_and_breaks_no_file(store, tmp_path):
    """No file may grow beyond 16 bytes: what is served cannot be remembered, and is served."""
    state = tmp_path / "state.json"
    state.write_text("{}\n")
    server = subprocess.Popen(
        [*MAIN, "serve", str(store / "net-1"), "--port", "0", "--json", "--state", str(state)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16)),
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},  # Python would keep the first 16 bytes of what it compiles
    )  # fmt: skip
    try:
        said = json.loads(server.stdout.readline())
        tensor = {"name": "input", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
        assert ask(said["url"] + "/v2/models/net/infer", {"inputs": [tensor]})[0] == 200
        assert state.read_text() == "{}\n"
        assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
        server.terminate()
        assert "could not be remembered" in server.stderr.read()
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()


# -- other people's clients --------------------------------------------------------------------------------------------

KSERVE = """
import asyncio, sys
import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

async def main(url):
    client = InferenceRESTClient(RESTConfig(protocol="v2", timeout=30))
    assert await client.is_server_ready(url) and await client.is_server_live(url)
    assert await client.is_model_ready(url, "tag")
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    for binary_in in (True, False):
        for binary_out in (True, False):
            given = InferInput("x", [2, 4], "FP32")
            given.set_data_from_numpy(x, binary_data=binary_in)
            outputs = [RequestedOutput(NAME, parameters={"binary_data": binary_out})]
            request = InferRequest(model_name="tag", infer_inputs=[given], request_outputs=outputs)
            answer = await client.infer(url, request, model_name="tag")
            np.testing.assert_array_equal(answer.outputs[0].as_numpy(), 1 - x[:, ::-1])
    print("conform")

asyncio.run(main(sys.argv[1]))
"""


def test_kserves_client(server):
    """In an environment of its own where FETTLE_KSERVE_PYTHON names one: its pins are other than ours."""
    python = os.environ.get("FETTLE_KSERVE_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import kserve"], capture_output=True, check=False).returncode:
        pytest.skip("kserve is not installed")
    name = server.registry.choose("tag").output_specs[0].name
    code = KSERVE.replace("NAME", repr(name))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([python, "-c", code, server.url], capture_output=True, text=True, timeout=120,
                          env=environment, check=False)  # fmt: skip
    assert done.stdout.strip() == "conform", done.stderr[-2000:]


@pytest.mark.slow
def test_the_fuzzer_finds_no_answer_that_the_openapi_page_does_not_announce(tag_folder, store):
    """Schemathesis makes requests from /openapi.json: no 5xx, no undocumented status, type or form of an answer."""
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis import checks

    wanted = (
        checks.not_a_server_error, checks.status_code_conformance, checks.content_type_conformance,
        checks.response_schema_conformance, checks.unsupported_method,
    )  # fmt: skip
    with running([open_package(tag_folder), open_package(store / "net-1")]) as server:
        schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
        count = 0
        for found in schema.get_all_operations():
            operation = found.ok()

            @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck),
                      phases=[Phase.explicit, Phase.generate])  # fmt: skip
            @given(case=operation.as_strategy())
            def check(case):
                case.call_and_validate(checks=list(wanted))

            check()
            count += 1
        assert count >= 18
        assert ask(server.url + "/v2/health/ready")[0] == 200
        assert all(v.workers[0].restarts == 0 for _, _, v in server.registry.versions())


def test_the_page_announces_what_the_server_answers(server):
    status, document, _ = ask(server.url + "/openapi.json")
    assert status == 200
    for path, methods in document["paths"].items():
        for method in methods:
            assert ask(server.url + path, b"{}" if method == "post" else None, method.upper())[0] in (200, 400)
        status, _, headers = ask(server.url + path, None, "DELETE")
        assert (status, set(headers["allow"].split(", "))) == (405, {method.upper() for method in methods})
    page = ask(server.url + "/docs")[1].decode()
    assert all(path in page for path in document["paths"])
