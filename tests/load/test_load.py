"""Load and simulation: against theory, against a server, and against what goes wrong."""

import asyncio
import io
import json
import math
import os
import socket
import threading
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from fettle.cli.serve import load
from fettle.errors import UsageError
from fettle.load import loops
from fettle.load.arrivals import constant, poisson, read_schedule
from fettle.load.client import Connection, http_request, model_request, server_processes
from fettle.load.loops import _inconsistent, _Load, closed_loop, open_loop
from fettle.load.run import LOST, UNANSWERED, Run, as_data, warm_up
from fettle.load.texts import text_lines, text_requests
from fettle.load.torchserve import COLUMNS, torchserve_row
from fettle.measure import Load
from fettle.package.manifest import open_package
from fettle.package.settings import ServeSettings
from fettle.report.load_page import headline
from fettle.slo.simulate import Costs, capacity, simulate
from tests.serving import running

# -- simulation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_constant_service_is_md1(load):
    """Mean time in an M/D/1 queue: D + rho D / 2(1 - rho) (Pollaczek-Khinchine)."""
    seen = simulate(
        poisson(load / 0.01, 3000), ServeSettings(max_rows=1, max_queue_rows=10**6), Costs({1: (0.01,)}, 0, 0)
    )
    assert seen.latency_s.mean() == pytest.approx(0.01 + load * 0.01 / (2 * (1 - load)), rel=0.05)
    assert seen.utilisation == pytest.approx(load, rel=0.03)


def test_exponential_service_is_mm1():
    """Mean time in an M/M/1 queue: 1 / (mu - lambda)."""
    samples = tuple(np.random.default_rng(1).exponential(0.01, 20_000))
    seen = simulate(poisson(50, 6000), ServeSettings(max_rows=1, max_queue_rows=10**6), Costs({1: samples}, 0, 0))
    assert seen.latency_s.mean() == pytest.approx(1 / (100 - 50), rel=0.1)


def test_what_is_added_is_added():
    seen = simulate([0.0, 10.0], ServeSettings(max_rows=4), Costs({1: (0.01,)}, request_s=0.002, batch_s=0.003))
    assert seen.latency_s.tolist() == pytest.approx([0.015, 0.015])
    waited = simulate([0.0, 10.0], ServeSettings(max_rows=4, delay_ms=50), Costs({1: (0.01,)}, 0, 0))
    assert waited.latency_s.tolist() == pytest.approx([0.06, 0.06])


@given(
    gaps=st.lists(st.floats(0, 0.05), min_size=1, max_size=200),
    cost=st.lists(st.floats(0.001, 0.05), min_size=4, max_size=4),
    workers=st.integers(1, 3),
    delay_ms=st.sampled_from([0.0, 10.0]),
)
@settings(max_examples=60, deadline=None)
def test_every_request_is_answered_once(gaps, cost, workers, delay_ms):
    setting = ServeSettings(max_rows=4, workers=workers, delay_ms=delay_ms, max_queue_rows=10**6)
    costs = Costs({n + 1: (seconds,) for n, seconds in enumerate(cost)}, 0, 0)
    seen = simulate(np.cumsum(gaps), setting, costs)
    assert len(seen.latency_s) == len(gaps) == sum(rows * count for rows, count in seen.batch_rows.items())
    assert seen.latency_s.min() >= min(cost) - 1e-9


def test_a_model_slower_than_the_limit_has_no_capacity():
    assert capacity(ServeSettings(max_rows=2), Costs({1: (0.2,), 2: (0.3,)}), 0.1) == (0.0, None)


# -- load -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(store):
    with running([open_package(store / "net-1")]) as made:
        yield made


def test_an_open_loop_sends_what_is_due(server):
    due = poisson(200, 2, seed=3)
    run = asyncio.run(open_loop([model_request(server.url)], due, limit_s=60.0))
    assert 0.5 * len(due) <= sum(run.statuses.values()) <= len(due)  # those of the warm-up are left out
    assert set(run.statuses) == {200}
    assert run.stable
    assert not run.void
    intervals = as_data(run)["intervals_ms"]
    assert set(intervals) == {"p50", "p90", "p95", "p99"}
    assert intervals["p50"][0] <= intervals["p50"][1]
    assert run.within == 1
    data = as_data(run)
    assert data["latency_ms"]["p50"] <= data["latency_ms"]["p99"] <= data["latency_ms"]["p100"]
    assert list(torchserve_row(data, "u")) == list(COLUMNS)


@pytest.mark.parametrize("clients", [1, 8, 32, 128])
@pytest.mark.parametrize("seconds", [2.0, 2.03])
def test_a_closed_loop_counts_what_was_answered_while_it_asked(clients, seconds):
    """A server that answers up to 8 clients every 63 ms: its rate, also where each waits for most of the run."""

    async def counted():
        load = _Load([], 0.0)
        load.until = seconds
        waiting, now = [0.0] * clients, 0.0
        while waiting:
            now += 0.063
            done, waiting = waiting[:8], waiting[8:]
            for asked in done:
                load.note(asked, asked, now, 200)
            waiting += [now] * len(done) if now <= seconds else []
        return load.result("closed")

    run = asyncio.run(counted())
    assert run.throughput == pytest.approx(min(clients, 8) / 0.063, rel=0.06)
    assert run.percentile(50) == pytest.approx(max(1, clients // 8) * 0.063, rel=0.01)


@pytest.mark.parametrize("kept", [True, False])
def test_a_closed_loop_asks_nothing_twice_before_it_has_asked_all(kept):
    """A prompt that was asked just before is half an answer already."""
    asked = []

    async def handle(reader, writer):
        while head := await reader.readuntil(b"\r\n\r\n"):
            asked.append(head.split()[1])
            more = b"" if kept else b"Connection: close\r\n"
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n" + more + b"\r\n")
            if not kept:
                return writer.close()

    async def run():
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await closed_loop([http_request(f"{url}/{number}", b"", {}) for number in range(40)], 4, 0.5)
        server.close()

    asyncio.run(run())
    assert len(set(asked[:30])) == 30


def test_a_request_that_has_ended_takes_little_memory():
    """A soak test has ten million of them."""

    async def taken():
        load = _Load([], 0.0)
        tracemalloc.start()
        for n in range(20_000):
            load._move(1)
            load.note(n + 0.5, n + 0.6, n + 0.7, 200)
            load._move(-1)
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return size / 20_000

    assert asyncio.run(taken()) < 100


def test_what_fails_when_a_closed_loop_ends_is_counted():
    async def counted():
        load = _Load([], 0.0)
        load.until = 1.0
        for n in range(10):
            load.note(0.1 * n, 0.1 * n, 0.1 * n + 0.1, 200)
        load.note(0.5, 0.5, 11.0, UNANSWERED)
        return load.result("closed")

    assert asyncio.run(counted()).failed == 1


def test_requests_that_are_all_due_at_once_have_the_rate_of_their_answers():
    async def counted():
        load = _Load([], 0.0)
        for n in range(50):
            load.note(0.0, 0.0, 0.1 * (n + 1), 200)
        return load.result("open")

    assert asyncio.run(counted()).throughput == pytest.approx(50 / 5.0)


@pytest.mark.parametrize("sent", [0, 1])
def test_ctrl_c_ends_an_open_loop_that_waits(sent):
    """For its next request, an hour from now, or for an answer that does not come."""
    stop = asyncio.Event()

    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        stop.set()

    async def run():
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        request = http_request(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", b"", {})
        due = np.array([0.0, 3600.0][: 2 - sent])
        found = await asyncio.wait_for(open_loop([request], due, patience_s=3600.0, stop=stop), 60)
        server.close()
        return found

    found = asyncio.run(run())
    assert found.interrupted
    assert found.statuses == {UNANSWERED: 1}


def test_what_is_due_does_not_wait_for_a_connection_of_another(monkeypatch):
    """Connections that take a tenth of a second to make, each used once."""
    plain = _Load._open

    async def slow(self):
        await asyncio.sleep(0.1 if self.start else 0)
        return await plain(self)

    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async def run():
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        request = http_request(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", b"", {})
        found = await open_loop([request], np.arange(100) / 100, limit_s=60.0)
        server.close()
        return found

    monkeypatch.setattr(_Load, "_open", slow)
    found = asyncio.run(run())
    assert set(found.statuses) == {200}
    assert found.percentile(99) < 5  # one after the other: nine seconds
    assert not found.void


def test_a_closed_loop_keeps_its_clients_busy(server):
    run = asyncio.run(closed_loop([model_request(server.url)], 4, 0.8))
    assert run.answered > 20
    assert 3 < run.mean_inflight <= 4.01
    assert run.failed == run.shed == 0


def test_a_client_of_a_closed_loop_that_found_no_connection_asks_again(monkeypatch):
    """Each answer closes its connection, and the first three that are made anew fail."""
    plain, stop = _Load._open, asyncio.Event()
    failures = iter(range(3))

    async def open_(self):
        if self.start and next(failures, None) is not None:
            raise UsageError("nothing answers")
        return await plain(self)

    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        handle.count += 1
        if handle.count >= 20:
            stop.set()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async def run():
        handle.count = 0
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        request = http_request(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", b"", {})
        await closed_loop([request], 2, 60.0, stop=stop)
        server.close()

    monkeypatch.setattr(_Load, "_open", open_)
    asyncio.run(run())
    assert handle.count >= 20
    assert next(failures, None) is None


def test_what_fails_or_is_refused_misses_the_limit():
    """A server that answers quickly, half of the time with a refusal."""

    async def handle(reader, writer):
        while await reader.readuntil(b"\r\n\r\n"):
            handle.count += 1
            status = b"200 OK" if handle.count % 2 else b"503 Busy"
            writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            writer.close()

    async def run():
        handle.count = 0
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        request = http_request(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", b"", {})
        found = await open_loop([request], np.arange(100) / 200, limit_s=60.0)
        server.close()
        return found

    found = asyncio.run(run())
    assert 0.4 < found.within < 0.6
    assert found.shed >= 20  # of the 50 or more that are left when the beginning is cut


def slow_server(seconds):
    """A server that answers one request at a time."""

    async def handle(reader, writer):
        while await reader.readuntil(b"\r\n\r\n"):
            async with handle.lock:
                await asyncio.sleep(seconds)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async def start():
        handle.lock = asyncio.Lock()
        made = await asyncio.start_server(handle, "127.0.0.1", 0)
        return made, http_request(f"http://127.0.0.1:{made.sockets[0].getsockname()[1]}/", b"", {})

    return start


def test_waiting_counts_from_the_moment_a_request_was_due():
    async def run():
        server, request = await slow_server(0.1)()
        found = await open_loop([request], np.array([0.0, 0.001, 0.002, 0.003]))
        server.close()
        return found

    found = asyncio.run(run())
    assert np.all(np.sort(found.latency_s) > np.array([0.095, 0.19, 0.29, 0.39]))


def test_a_backlog_that_only_grows_ends_the_run(monkeypatch):
    monkeypatch.setattr(loops, "WINDOW_S", 0.25)

    async def run():
        server, request = await slow_server(0.03)()
        found = await open_loop([request], poisson(100, 30), limit_s=0.1)
        server.close()
        return found

    found = asyncio.run(run())
    assert not found.stable
    assert found.duration_s < 30  # it ended before its schedule did


def test_a_backlog_that_grows_for_as_long_as_an_answer_takes_does_not(monkeypatch):
    """A server that keeps up with any rate, and takes eight windows for each answer."""
    monkeypatch.setattr(loops, "WINDOW_S", 0.1)

    async def handle(reader, writer):
        while await reader.readuntil(b"\r\n\r\n"):
            await asyncio.sleep(0.8)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async def run():
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        request = http_request(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", b"", {})
        found = await open_loop([request], constant(50, 2.0))
        server.close()
        return found

    found = asyncio.run(run())
    assert found.stable
    assert found.failed == 0


def test_connections_that_break_are_failures():
    async def run():
        async def handle(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.transport.abort()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        request = http_request(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", b"", {})
        found = await open_loop([request], np.arange(20) / 100)
        server.close()
        return found

    found = asyncio.run(run())
    assert found.answered == 0
    assert found.failed > 0
    assert found.errors == {"connection lost": found.failed}


def test_a_connection_that_the_server_closes_after_an_answer_is_no_failure():
    """llama.cpp's server does that after every text, without saying so."""

    async def run():
        async def handle(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        request = http_request(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", b"", {})
        found = await closed_loop([request], 3, 0.5)
        server.close()
        return found

    found = asyncio.run(run())
    assert found.answered > 10
    assert found.failed == 0


def test_answers_that_never_come_are_told_from_connections_that_break():
    async def run():
        async def handle(reader, writer):
            await reader.readuntil(b"\r\n\r\n")

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        request = http_request(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", b"", {})
        found = await open_loop([request], np.arange(20) / 100, patience_s=0.1)
        server.close()
        return found

    found = asyncio.run(run())
    assert found.errors == {"no answer": found.failed}
    assert not found.stable


def test_a_run_whose_count_and_times_disagree_is_void():
    """Little's law: what is counted on its way is the rate times the time of one, both seen for themselves."""
    sound = Run("open", 100, 10, np.full(1000, 0.04), statuses={200: 1000}, mean_inflight=4.1, expected_inflight=4.0)
    assert _inconsistent(sound) == ""
    assert "Little's law is off by 1.50" in _inconsistent(replace(sound, mean_inflight=6.0))
    few = replace(sound, statuses={200: 50}, mean_inflight=6.0)
    assert _inconsistent(few) == ""  # too much beginning and end to say


def test_the_beginning_that_differs_is_left_out():
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(10, 1, 200), rng.normal(1, 0.1, 2000)])
    assert 190 <= warm_up(values) <= 260
    assert warm_up(rng.normal(1, 0.1, 2000)) < 1000


def test_intervals_need_enough_answers():
    few = Run("open", 1, 1, np.ones(50), statuses={200: 50})
    assert few.interval(99) is None
    many = Run("open", 1, 1, np.random.default_rng(0).exponential(1, 20_000), statuses={200: 20_000})
    low, high = many.interval(99)
    assert low < -math.log(0.01) < high


def test_an_interval_holds_its_percentile_and_no_time_below_zero():
    uneven = np.full(6000, 0.007)
    uneven[2400:2700] = 0.24
    run = Run("open", 1, 1, uneven, statuses={200: 6000})
    low, high = run.interval(99)
    assert 0 < low <= run.percentile(99) <= high


def test_schedules_from_files(tmp_path):
    (tmp_path / "a").write_text("5\n# comment\n3\n4.5\n")
    assert read_schedule(tmp_path / "a").tolist() == [0, 1.5, 2]
    for bad in ("", "x", "1 2 x", "nan", "-1", "1 2\n3"):
        (tmp_path / "b").write_text(bad)
        with pytest.raises(UsageError):
            read_schedule(tmp_path / "b")


def test_what_arrives_at_random_arrives_at_least_once():
    assert min(len(poisson(0.01, 1.0, seed)) for seed in range(9)) == 1


def test_an_address_is_asked_as_it_was_given():
    request = http_request("http://[::1]:81/a?b=1", b"", {})
    assert request.data.startswith(b"POST /a?b=1 HTTP/1.1\r\nHost: [::1]:81\r\n")
    assert (request.host, request.port) == ("::1", 81)


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH_9\r\n", b"HTTP/1.1 200 OK\r\n\r\nhello", b"HTTP/1.1 200 OK\r\n\r\n[]",
        b'HTTP/1.1 200 OK\r\n\r\n{"models": null, "data": null}',
        b'HTTP/1.1 200 OK\r\n\r\n{"models": ["a"], "data": [1]}',
        b'HTTP/1.1 200 OK\r\n\r\n{"models": ["a"], "inputs": [{}], "data": [{}]}',
    ],
)  # fmt: skip
def test_what_is_no_inference_server_is_one_line(said):
    def answer():
        while True:
            try:
                link, _ = listening.accept()
            except OSError:
                return
            with link:
                link.recv(1 << 16)
                link.sendall(said)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        for how in (lambda: model_request(url), lambda: text_requests(url + "/v1", text_lines("1", "1", count=1))):
            with pytest.raises(UsageError) as refused:
                how()
            assert "\n" not in str(refused.value)
        listening.shutdown(socket.SHUT_RDWR)


def test_who_speaks_before_being_asked_speaks_no_http():
    done = []
    connection = Connection(lambda *what: done.append(what))
    connection.data_received(b"SSH-2.0-OpenSSH_9\r\n")
    assert (done, connection.alive) == ([], False)


@pytest.mark.parametrize(
    "url", ["ftp://a/b", "file:///etc/passwd", "nothing", "https://", "http://127.0.0.1:99999/a", "http://a:b/c"]
)
def test_only_http(url):
    with pytest.raises(UsageError):
        model_request(url)
    with pytest.raises(UsageError):
        http_request(url, b"", {})


def test_the_commands(server, store, tmp_path, run_fettle):
    url = server.url
    done = run_fettle(
        "serve",
        "load",
        url,
        "-c",
        "2",
        "--rate",
        "50",
        "-d",
        "0.5s",
        "--p99",
        "60s",
        "--json",
        "--output",
        str(tmp_path / "c.csv"),
        "--output",
        str(tmp_path / "c.html"),
    )
    assert done.code == 0, done.err
    assert "answers a second within the limits" in (tmp_path / "c.html").read_text()
    closed, opened = json.loads(done.out)
    assert (closed["mode"], opened["mode"]) == ("closed", "open")
    assert (tmp_path / "c.csv").read_text().startswith("Benchmark,TS failed requests,")
    (tmp_path / "earlier.json").write_text(done.out)
    done = run_fettle(
        "serve", "load", url, "-c", "2", "-d", "0.5s", "--baseline", str(tmp_path / "earlier.json"), "--json"
    )
    changes = json.loads(done.out)["changes"]
    assert [change["measure"] for change in changes] == ["answers/s", "p50", "p99"]
    assert done.code == any(change["verdict"] == "worse" for change in changes)
    package = str(store / "net-1")
    (tmp_path / "token").write_bytes(b"\xff")
    for wrong in (["load", url], ["load", "http://127.0.0.1:9", "--rate", "1"], ["run"], ["slo", "x", "--p99", "1s"],
                  ["slo", package, "--p99", "100"], ["load", url, "-c", "1", "--p99", "50"],
                  [str(tmp_path)], [package, "--host", "0.0.0.0"], [package, "--delay", "soon"],
                  ["load", url, "--rate", "inf"],
                  ["package", "nothing.py"], ["load", url, "-c", "1", "--output", str(tmp_path)],
                  ["load", url, "-c", "1", "--baseline", str(tmp_path / "none")],
                  ["load", f"{url}/v1", "-c", "1", "--body", __file__],
                  ["load", url, "-c", "1", "--token-file", str(tmp_path / "token")],
                  ["slo", package, "--p99", "1s", "--recipe", "precision=bf16"],
                  ["slo", package, "--p99", "1s", "--headroom", "120%"],
                  ["slo", package, "--p99", "1s", "--rate", "inf"],
                  ["slo", package, "--p99", "1s", "--price-per-hour", "much"],
                  ["slo", package, "--p99", "1s", "--device", "tpu"]):  # fmt: skip
        done = run_fettle("serve", *wrong)
        assert done.code == 2, (wrong, done.err)
        assert len(done.err.strip().splitlines()) == 1, done.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("/v1 -c 1 --rows 2", "--rows is for other URLs"),
        ("/v1 -c 1 --content-type text/csv", "--content-type is for other URLs"),
        ("/v1 -c 1 --texts t.jsonl --output-tokens 16", "--output-tokens is for texts that are made up"),
        (" -c 1 --model bert", "--model is for a server that writes texts: give its URL with /v1"),
        (" -c 1 --prompt-tokens 16", "--prompt-tokens is for a server that writes texts"),
        (" -c 1 --body b --rows 2", "--rows is for values that are made up"),
        (" -c 1 --content-type text/csv", "--content-type is for --body FILE"),
        (" -c 1 --even", "--even is for --rate"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(words, says, run_fettle):
    done = run_fettle("serve", "load", *f"http://127.0.0.1:9{words}".split())
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert says in done.err


def test_what_others_had_of_the_machine_is_said_first():
    run = Run("closed", 1, 1, np.full(9, 0.1), 1, {200: 9}, load=Load(others=0.5))
    assert load._cells(run)["note"] == "on a busy machine (others took 50% of the cores)"
    told = as_data(run)
    assert (told["is_quiet"], told["load"]["others"], told["load"]["steal"]) == (False, 0.5, None)
    assert headline([told], ["1 client"]).startswith("On a busy machine (others took 50% of the cores): 9 answers")
    out = io.StringIO()
    load._print([run, replace(run, load=Load())], [], Console(file=out, width=200))
    assert out.getvalue().startswith("On a busy machine (others took 50% of the cores): expect other figures")


def test_a_server_on_this_machine_is_none_of_the_others():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        request = http_request(f"http://localhost:{listening.getsockname()[1]}/", b"", {})
        assert server_processes(request) == {os.getpid()}
    assert server_processes(request) is None
    assert server_processes(http_request("http://192.0.2.1:80/", b"", {})) == set()


def test_no_answer_has_no_time():
    cells = load._cells(Run("open", 80, 8, np.array([]), statuses={-1: 640}))
    assert not [name for name, text in cells.items() if "nan" in text and name.endswith(" ms")]


def test_a_server_that_is_not_there_is_said_to_be_missing():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(UsageError, match=rf"nothing listens at http://127\.0\.0\.1:{port}"):
        model_request(f"http://127.0.0.1:{port}")


def test_a_note_does_not_break_the_markdown_table(monkeypatch):
    monkeypatch.setattr(load, "_cells", lambda run: {"load": "80/s", "note": "said a | b\nand c"})
    assert load._markdown([None]).splitlines() == ["| load | note |", "| --- | --- |", r"| 80/s | said a \| b and c |"]


@pytest.mark.parametrize(
    ("said", "statuses"),
    [(b"HTTP/1.0 200 OK\r\n\r\nok", {200}), (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", {LOST})],
)
def test_an_answer_without_a_length_ends_with_its_connection_and_one_with_a_length_does_not(said, statuses):
    """Python's own `http.server` tells no length by itself."""

    async def run():
        async def handle(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(said)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        request = http_request(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", b"", {})
        found = await open_loop([request], np.arange(20) / 100)
        server.close()
        return found

    assert set(asyncio.run(run()).statuses) == statuses


def test_a_host_that_does_not_answer_at_all_is_not_waited_for_long(monkeypatch):
    async def never(self):
        await asyncio.sleep(3600)

    monkeypatch.setattr(_Load, "_open", never)
    monkeypatch.setattr(loops, "CONNECT_S", 0.01)
    with pytest.raises(UsageError, match=r"nothing answers at 192\.0\.2\.1:80: no connection within 0\.01 s"):
        asyncio.run(closed_loop([http_request("http://192.0.2.1/", b"", {})], 1, 1.0))


def test_requests_that_wait_as_the_server_has_too_many_do_not_make_the_client_late(monkeypatch):
    monkeypatch.setattr(loops, "MAX_CONNECTIONS", 4)

    async def run():
        server, request = await slow_server(0.01)()
        found = await open_loop([request], constant(1000, 0.1), limit_s=60.0)
        server.close()
        return found

    found = asyncio.run(run())
    assert set(found.statuses) == {200}
    assert found.void == ""


def test_what_a_server_answered_before_it_hung_is_counted():
    async def counted():
        load = _Load([], 0.0)
        load.until = 5.0
        for n in range(100):
            load.note(0.05 * n, 0.05 * n, 0.05 * n + 0.05, 200)
        for _ in range(128):
            load.note(5.0, 5.0, 15.0, UNANSWERED)
        return load.result("closed")

    run = asyncio.run(counted())
    assert run.answered >= 50  # half of them may be the beginning
    assert run.failed == 128
    assert run.throughput == pytest.approx(20, rel=0.1)


def test_a_server_is_asked_what_it_serves_by_no_proxy(server, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert model_request(server.url).path.endswith("/infer")


def test_an_address_that_cannot_be_is_one_line():
    for url in ("http://a/\udcff", "http://a\udcff/"):
        with pytest.raises(UsageError, match="printable characters"):
            http_request(url, b"", {})
    with pytest.raises(UsageError, match="nothing answers at"):
        asyncio.run(closed_loop([http_request("http://ä..b:1/", b"", {})], 1, 0.0))


def test_more_clients_than_connections_of_an_open_loop_have_one_each(monkeypatch):
    """Also where the server closes each after its answer."""
    monkeypatch.setattr(loops, "MAX_CONNECTIONS", 2)
    active, at_once = [], []

    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        active.append(writer)
        at_once.append(len(active))
        await asyncio.sleep(0.05)
        active.remove(writer)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async def run():
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        request = http_request(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", b"", {})
        found = await closed_loop([request], 6, 1.0)
        server.close()
        return found

    assert set(asyncio.run(run()).statuses) == {200}
    assert max(at_once[12:]) > 3
