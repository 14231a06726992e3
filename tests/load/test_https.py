"""Load on a server whose certificate is its own."""

import asyncio
import json

import pytest

from fettle.errors import UsageError
from fettle.load.client import http_request, model_request, trusting
from fettle.load.loops import closed_loop
from fettle.package.manifest import open_package
from tests.serving import running


@pytest.fixture(scope="module")
def url(store, certified):
    packages = [open_package(store / "net-1")]
    with running(packages, certificate=certified / "certificate.pem", key=certified / "key.pem") as server:
        yield server.url.replace("http:", "https:")


def test_a_certificate_that_is_trusted(url, certified, run_fettle):
    trusted = str(certified / "certificate.pem")
    done = run_fettle("serve", "load", url, "-c", "2", "-d", "0.5s", "--ca-file", trusted, "--json")
    assert done.code == 0, done.err
    (run,) = json.loads(done.out)
    assert list(run["statuses"]) == ["200"]


def test_one_that_is_not_is_one_line(url, run_fettle):
    for more in ([], ["--body", "pyproject.toml"]):  # asked first what it serves, and not
        done = run_fettle("serve", "load", url, "-c", "1", *more)
        assert (done.code, len(done.err.splitlines())) == (2, 1)
        assert "self-signed certificate; a certificate of one's own is trusted with --ca-file" in done.err


def test_a_server_without_https_is_one_line(server_url, certified):
    tls = trusting(certified / "certificate.pem")
    with pytest.raises(UsageError, match="no secure connection") as refused:
        model_request(server_url.replace("http:", "https:"), tls=tls)
    assert "\n" not in str(refused.value)
    request = http_request(server_url.replace("http:", "https:"), b"", {}, tls)
    with pytest.raises(UsageError, match="no secure connection"):
        asyncio.run(closed_loop([request], 1, 0.1))


@pytest.fixture(scope="module")
def server_url(store):
    with running([open_package(store / "net-1")]) as server:
        yield server.url


def test_a_file_that_holds_no_certificate(tmp_path):
    (tmp_path / "text.pem").write_text("none")
    for name, said in (("text.pem", "holds no certificate"), ("missing.pem", "No such file")):
        with pytest.raises(UsageError, match=said):
            trusting(tmp_path / name)


def test_the_port_of_https():
    assert http_request("https://a.example/b", b"", {}).port == 443
