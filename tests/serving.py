"""Small packages and a running server that the tests of this room share."""

import asyncio
import subprocess
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from fettle.package.export import write_package
from fettle.package.settings import ServeSettings
from fettle.recipe import Recipe
from fettle.serve.engine.registry import Options
from fettle.serve.server import Address, Server
from fettle.workload import Workload
from tests.forking import forked

SMALL = ServeSettings(max_rows=8, threads=1)


def net(scale=1.0):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
    with torch.no_grad():
        model[2].weight.mul_(scale)
        model[2].bias.mul_(scale)
    return model


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """Two versions of ``net``, and ``echo``, whose handler misbehaves when it is told to."""
    folder = tmp_path_factory.mktemp("store")
    for version, scale in (("1", 1.0), ("2", 2.0)):
        work = Workload(net(scale), [torch.rand(4, 4)])
        write_package(work, Recipe(), folder / f"net-{version}", name="net", version=version, settings=SMALL)
    handler = folder.parent / "handler.py"
    handler.write_text(HANDLER)
    write_package(Workload(net(), [torch.rand(4, 4)]), Recipe(), folder / "echo", name="echo", settings=ECHO,
                  handler=handler)  # fmt: skip
    return folder


ECHO = ServeSettings(max_rows=8, threads=1, timeout_ms=4000)
"""A call that takes longer is taken for one that hangs: on a busy machine no other call does."""
HANDLER = """
import os, time

class Handler:
    def initialize(self, context):
        self.leak = []
    def preprocess(self, requests):
        return [request["body"].decode() for request in requests]
    def inference(self, data):
        for text in data:
            if text == "raise":
                raise ValueError("a secret path /etc/secret")
            if text == "die":
                os._exit(3)
            if text == "hang":
                time.sleep(60)
            if text == "slow":
                time.sleep(0.3)
        return data
    def postprocess(self, answers):
        return [answer.upper() for answer in answers]
"""


def until(condition):
    """Wait until it holds, at most two minutes."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="session")
def certified(tmp_path_factory):
    """A folder with a certificate for 127.0.0.1, its key, and both in one file."""
    folder = tmp_path_factory.mktemp("certificate")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=test "
        "-addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out certificate.pem"
    )
    try:
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    (folder / "both.pem").write_text((folder / "certificate.pem").read_text() + (folder / "key.pem").read_text())
    return folder


@contextmanager
def running(packages, options=None, *, workers_begin=forked, **address):
    """A server in a thread of its own; gives it with `call`, which runs a coroutine there."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def call(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(120)

    async def make():
        return Server(Address(port=0, **address), options or Options())

    server = call(make())
    with workers_begin():
        try:
            call(server.start(packages))
            server.url = f"http://127.0.0.1:{server.ports[0]}"
            server.call = call
            yield server
        finally:
            call(server.close())
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()
