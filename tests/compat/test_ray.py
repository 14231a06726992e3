"""The Ray Serve application: the settings that are written, and (slow) the same answers as fettle's own server."""

import asyncio
import importlib
import json
import shutil
import socket
import subprocess
import sys
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from fettle.compat.ray_files import most_ongoing, scale, write_ray
from fettle.errors import UsageError
from fettle.package.host import host_id
from fettle.package.manifest import open_package
from fettle.package.settings import CostCurve, ServeSettings
from tests.package.test_generate import events, expected, packaged
from tests.serve.test_server import ask
from tests.serving import running

CURVE = CostCurve((1, 2, 4, 8), (0.010, 0.012, 0.016, 0.024), host_id())


def test_a_replica_gets_as_many_requests_as_littles_law_says():
    settings = ServeSettings(max_rows=8, limit_ms=60.0, curve=CURVE)
    found = scale(settings, host_id())
    assert "requests/s" in found.why
    # At most 8 rows in 24 ms leave at once: 333 a second, of which 90% may be asked for; nobody waits above 60 ms.
    assert 1 < found.target < 0.9 * 8 / 0.024 * 0.060
    tight = msgspec.structs.replace(settings, limit_ms=20.0)
    assert 1 <= scale(tight, host_id()).target < found.target
    assert "alone takes longer" in scale(msgspec.structs.replace(settings, limit_ms=5.0), host_id()).why
    for without in (ServeSettings(max_rows=8), msgspec.structs.replace(settings, limit_ms=0.0)):
        assert "fettle serve slo" in scale(without, host_id()).why
    assert "fettle serve slo" in scale(settings, "another machine").why  # its curve is not believed here


def test_the_written_files_make_ray_fast_and_closed(store, tmp_path):
    package = open_package(store / "net-1")
    write_ray(package, tmp_path / "out", max_replicas=3)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "app.py", "env.sh", "package", "serve.yaml", "start.sh"
    ]  # fmt: skip
    environment = (tmp_path / "out" / "env.sh").read_text()
    for line in ("HA_PROXY=1", "THROUGHPUT_OPTIMIZED=1", "RAY_AUTH_MODE=token"):
        assert line in environment
    config = loaded(tmp_path / "out")
    deployment = config["applications"][0]["deployments"][0]
    assert config["http_options"]["host"] == "127.0.0.1"
    assert deployment["max_ongoing_requests"] == most_ongoing(package.settings) == 16
    assert deployment["max_queued_requests"] == 1024
    assert deployment["autoscaling_config"]["max_replicas"] == 3
    assert deployment["user_config"]["max_rows"] == 8
    assert open_package(tmp_path / "out" / "package").manifest == package.manifest
    with pytest.raises(UsageError, match="exists already"):
        write_ray(package, tmp_path / "out")
    without = subprocess.run(
        ["/bin/sh", tmp_path / "out" / "start.sh"], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert (without.returncode, "pip install 'ray[serve]" in without.stderr) == (2, True)


def test_code_of_a_package_needs_trust_here_too(store, tmp_path):
    package = open_package(store / "echo")
    with pytest.raises(UsageError, match="`trust="):
        write_ray(package, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    write_ray(package, tmp_path / "out", trust=package.handler_digest)
    assert loaded(tmp_path / "out")["applications"][0]["args"]["trust"] == package.handler_digest


def test_nothing_is_written_into_the_package_itself(store, tmp_path):
    shutil.copytree(store / "net-1", tmp_path / "net-1")
    package = open_package(tmp_path / "net-1")
    with pytest.raises(UsageError, match="inside of the package"):
        write_ray(package, package.folder / "ray")
    assert not (package.folder / "ray").exists()


def test_a_replica_is_healthy_while_one_of_its_workers_is_ready(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=None))
    monkeypatch.delitem(sys.modules, "fettle.compat.ray", raising=False)
    health = importlib.import_module("fettle.compat.ray").Replica.check_health
    del sys.modules["fettle.compat.ray"]
    workers = [SimpleNamespace(ready=False), SimpleNamespace(ready=True)]
    versions = [("net", "1", SimpleNamespace(workers=workers))]
    registry = SimpleNamespace(models=["net"], versions=lambda: versions)
    replica = SimpleNamespace(name="net", registry=registry)
    asyncio.run(health(replica))
    workers[1].ready = False
    with pytest.raises(RuntimeError, match="net is not served"):
        asyncio.run(health(replica))


def loaded(folder):
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((folder / "serve.yaml").read_text())


@pytest.mark.slow
def test_same_requests_same_answers_as_on_fettles_own_server(store, tmp_path, monkeypatch):
    """The contract: one package, one set of requests, byte for byte the same answers from both."""
    ray = pytest.importorskip("ray")
    from ray import serve
    from ray.serve.schema import ServeDeploySchema

    from fettle.compat.ray import application as make

    package = open_package(store / "net-1")
    write_ray(package, tmp_path / "out")
    config = loaded(tmp_path / "out")
    ServeDeploySchema.model_validate(config)
    application, (options,) = config["applications"][0], config["applications"][0]["deployments"]
    monkeypatch.syspath_prepend(str(tmp_path / "out"))
    monkeypatch.delitem(sys.modules, "app", raising=False)
    import app

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    requests = list(conversation())
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        built = app.build(application["args"])
        options = {key: value for key, value in options.items() if key not in ("name", "autoscaling_config")}
        serve.run(make(application["args"], num_replicas=1, **options), name="net", route_prefix="/")
        assert built is not None
        url = f"http://127.0.0.1:{port}"
        on_ray = [ask(url + path, *rest) for path, *rest in requests]
        serve.delete("net")
        adder = packaged(tmp_path / "adder")  # tokens as they come, through Ray's proxy
        serve.run(make({"package": str(adder.folder), "threads": 1}), name="adder", route_prefix="/")
        said = {"text_input": "1 2 4", "parameters": {"max_tokens": 6}}
        status, body, headers = ask(url + "/v2/models/adder/generate_stream", said)
        assert (status, headers["content-type"]) == (200, "text/event-stream")
        assert "".join(event["text_output"] for event in events(body)) == expected([1, 2, 4], 6)
    finally:
        serve.shutdown()
        ray.shutdown()
    with running([package]) as server:
        here = [ask(server.url + path, *rest) for path, *rest in requests]
    for (path, *_), (status, body, _), (wanted, same, _) in zip(requests, on_ray, here, strict=True):
        assert (path, status, body) == (path, wanted, same)
    assert {status for status, _, _ in here} == {200, 400, 404}


def conversation():
    """Requests of every kind: path, body, method, headers."""
    for path in ("/v2", "/v2/health/ready", "/v2/models/net", "/v2/models/net/config", "/v2/models/none", "/ping"):
        yield path, None, None, None
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 3, 8, 9):
        x = torch.rand(rows, 4, generator=generator).numpy()
        tensor = {"name": "input", "shape": [rows, 4], "datatype": "FP32"}
        yield "/v2/models/net/infer", {"id": "a", "inputs": [{**tensor, "data": x.ravel().tolist()}]}, None, None
        head = json.dumps(
            {
                "inputs": [{**tensor, "parameters": {"binary_data_size": x.nbytes}}],
                "parameters": {"binary_data_output": True},
            }
        ).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        yield "/v2/models/net/infer", head + x.astype(np.float32).tobytes(), None, headers
        yield "/predictions/net", x.tolist(), None, None
    yield "/v2/models/net/infer", b"{", None, None
