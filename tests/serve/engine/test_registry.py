"""What the registry says of its versions, with pools that only pretend."""

import asyncio
import shutil
import threading
from types import SimpleNamespace

import pytest
from prometheus_client import generate_latest

from fettle.package.settings import ServeSettings
from fettle.serve.engine import registry as room
from fettle.serve.engine.metrics import Metrics
from fettle.serve.engine.refusal import Refusal
from fettle.serve.engine.registry import Options, Registry


class Pool:
    """Starts and drains when it is let, or fails."""

    def __init__(self, package, settings, metrics, **rest):
        self.package, self.settings, self.metrics = package, settings, metrics
        self.ready, self.cores, self.workers, self.state = True, set(), [], "LOADING"
        self.go, self.problem = asyncio.Event(), package.problem

    async def start(self, workers):
        await self.go.wait()
        if self.problem:
            raise Refusal(503, self.problem)

    async def close(self, drain_s):
        self.go.clear()
        await self.go.wait()


@pytest.fixture
def registry(monkeypatch):
    made = []

    def pool(*given, **named):
        made.append(Pool(*given, **named))
        return made[-1]

    monkeypatch.setattr(room, "Pool", pool)
    monkeypatch.setattr(room, "check_here", lambda name, requires: None)
    found = Registry(Metrics(), Options())
    found.made = made
    return found


def package(number, problem=""):
    manifest = SimpleNamespace(name="net", version=number, requires=(), max_rows=8)
    return SimpleNamespace(manifest=manifest, settings=ServeSettings(), handler_digest="", folder="", problem=problem)


async def loaded(registry, number):
    return await (await began(registry, package(number), go=True))


async def began(registry, given, go=False):
    """A load that has come as far as its workers, which start where they are let `go`."""
    there = len(registry.made)
    task = asyncio.ensure_future(registry.load(given))
    while len(registry.made) == there:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0)
    if go:
        registry.made[-1].go.set()
    return task


def test_the_index_shows_what_comes_and_goes_and_what_failed(registry):
    async def test():
        coming = await began(registry, package("1"))
        assert registry.index() == [("net", "1", "LOADING", "")]
        registry.made[0].go.set()
        version = await coming
        assert registry.index() == [("net", "1", "READY", "")]
        version.ready = False
        assert registry.index() == [("net", "1", "UNAVAILABLE", "a worker is not ready")]
        version.ready = True
        failing = await began(registry, package("2", "no memory"), go=True)
        with pytest.raises(Refusal):
            await failing
        assert registry.index()[1] == ("net", "2", "UNAVAILABLE", "no memory")
        await loaded(registry, "2")
        assert registry.index()[1] == ("net", "2", "READY", "")
        going = asyncio.ensure_future(registry.unload("net", "2"))
        await asyncio.sleep(0.01)
        assert registry.index() == [("net", "1", "READY", ""), ("net", "2", "UNLOADING", "")]
        registry.made[-1].go.set()
        await going
        assert registry.index() == [("net", "1", "READY", "")]
        given_up = await began(registry, package("3"))
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert registry.index() == [("net", "1", "READY", "")]

    asyncio.run(test())


def test_no_worker_starts_for_code_that_nobody_trusts(registry):
    given = package("1")
    given.handler_digest = "ab12"
    with pytest.raises(Refusal, match=r"code of its own.*ab12"):
        asyncio.run(registry.load(given))
    assert registry.made == []


def test_what_has_gone_is_shown_no_more_in_the_metrics(registry):
    """Else they grow with each version that a server has ever had; one that is replaced goes on counting."""

    def shown():
        metrics = generate_latest(registry.metrics.registry).decode()
        return {number for number in "12" if f'version="{number}"' in metrics}

    async def test():
        for number in ("1", "2"):
            version = await loaded(registry, number)
            version.metrics.response(200)
            version.metrics.shed("full")
            version.metrics.handler([("counter", "seen", 1.0), ("seconds", "took", 0.1)])
        replacing = asyncio.ensure_future(loaded(registry, "1"))
        await asyncio.sleep(0.01)
        registry.made[0].go.set()
        await replacing
        assert shown() == {"1", "2"}
        going = asyncio.ensure_future(registry.unload("net", "2"))
        await asyncio.sleep(0.01)
        registry.made[1].go.set()
        await going
        assert shown() == {"1"}

    asyncio.run(test())


def test_a_shadow_gets_no_copies_of_what_it_does_not_take(registry):
    async def test():
        one, two = await loaded(registry, "1"), await loaded(registry, "2")
        registry.models["net"].shadow = "2"
        one.specs = two.specs = ("FP32[-1,4]",)
        assert registry.shadow_of("net", one) is two
        assert registry.shadow_of("net", two) is None
        two.specs = ("INT64[-1,4]",)
        assert registry.shadow_of("net", one) is None

    asyncio.run(test())


def test_where_packages_lie_is_remembered_for_a_start_elsewhere(registry, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    registry.state.path = tmp_path / "state.json"
    given = package("1")
    given.folder = "models/net-1"

    async def test():
        await (await began(registry, given, go=True))

    asyncio.run(test())
    assert registry.state.read()["net"].versions == {"1": str(tmp_path / "models" / "net-1")}


def test_when_the_default_goes_the_highest_version_is_the_default(registry):
    async def test():
        for number in ("8", "9", "10"):
            await loaded(registry, number)
        assert registry.models["net"].default == "8"
        going = asyncio.ensure_future(registry.unload("net", "8"))
        await asyncio.sleep(0.01)
        registry.made[0].go.set()
        await going
        assert registry.models["net"].default == "10"

    asyncio.run(test())


def test_when_all_that_has_weight_goes_the_default_answers(registry):
    async def test():
        for number in ("1", "2"):
            await loaded(registry, number)
        registry.change("net", {"weights": {"1": 1.0, "2": 0.0}})
        going = asyncio.ensure_future(registry.unload("net", "1"))
        await asyncio.sleep(0.01)
        left = registry.models["net"].versions["2"]
        assert [registry.choose("net", sticky=session) for session in ("", "a")] == [left, left]
        registry.made[0].go.set()
        await going

    asyncio.run(test())


def test_of_a_store_only_the_package_that_is_asked_for_is_read(store, tmp_path, monkeypatch, caplog):
    for name in ("net-1", "net-2", "echo"):
        shutil.copytree(store / name, tmp_path / name)
    (tmp_path / "none.zip").write_bytes(b"no zip")
    opened, open_package = [], room.open_package
    monkeypatch.setattr(room, "open_package", lambda path: opened.append(path.name) or open_package(path))
    assert room.find_package(tmp_path, "net").manifest.version == "2"
    assert room.find_package(tmp_path, "net", "1").manifest.version == "1"
    assert opened == ["net-2", "net-1"]
    assert "none.zip" in caplog.text
    (tmp_path / "net-2" / "graph.json").write_text("{}")
    assert room.find_package(tmp_path, "net").manifest.version == "1"
    assert "damaged or was changed" in caplog.text
    with pytest.raises(Refusal, match="has no model net version 2"):
        room.find_package(tmp_path, "net", "2")


def test_packages_are_read_while_others_are_served(registry, monkeypatch, tmp_path):
    def find(store, name, number):
        read_in.append(threading.get_ident())
        raise Refusal(404, "not there")

    read_in = []
    monkeypatch.setattr(room, "find_package", find)
    registry.options = Options(store=tmp_path)
    with pytest.raises(Refusal):
        asyncio.run(registry.load_named("net"))
    assert read_in != [threading.get_ident()]
