"""One connection's HTTP, against an application that says what it was asked."""

import asyncio
import contextlib
import functools
import gzip
import json
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest

pytest.importorskip("httptools")
from fettle.loop import run
from fettle.serve.engine.metrics import Metrics
from fettle.serve.engine.registry import Options, Registry
from fettle.serve.http.app import App
from fettle.serve.http.asgi import Asgi
from fettle.serve.http.call import Call, Limits
from fettle.serve.http.connection import Connection
from fettle.serve.http.reply import Reply, json_reply

LONG = 1 << 20


class Echo(App):
    """Says path, headers and body; `/slow` takes a moment, `/long` a MiB, `/events` says three pieces of it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.under_way = self.unanswered = 0

    def call(self, method: str, target: bytes, headers: dict[bytes, bytes], gone: Callable[[], bool]) -> Call:
        return Call(method, target, headers, gone, None, self.limits)  # type: ignore[arg-type]

    def refusal(self, call: Call) -> Reply | None:
        return json_reply({"error": "no"}, 401) if b"x-refuse" in call.headers else None

    def _noted(self, call: Call, reply: Reply) -> Reply:
        return reply

    async def answer(self, call: Call) -> Reply:
        self.under_way += 1
        if call.target == b"/slow":
            await asyncio.sleep(0.05)
        if call.target == b"/long":
            return Reply(200, b"x" * LONG)
        if call.target in (b"/events", b"/broken"):
            return Reply(200, events=_events(broken=call.target == b"/broken"))
        names = sorted(name.decode() for name in call.headers)
        return json_reply(
            {"target": call.target.decode(), "method": call.method, "headers": names, "sent": len(call.sent)}
        )


async def _events(*, broken: bool) -> AsyncGenerator[bytes, None]:
    for piece in (b"one", b"two", b"three"):
        yield piece
        await asyncio.sleep(0)
        if broken:
            raise RuntimeError("a planted fault")


Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter, Echo, set[Connection]], Awaitable[None]]


def talk(what: Talk, limits: Limits | None = None) -> None:
    """Run a conversation with a server of `Echo`."""

    async def both() -> None:
        app, every, loop = Echo(limits or Limits()), set[Connection](), asyncio.get_running_loop()
        server = await loop.create_server(functools.partial(Connection, app, every, loop), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1], limit=1 << 26)
        try:
            await asyncio.wait_for(what(reader, writer, app, every), 60)
        finally:
            writer.close()
            server.close()
            for connection in list(every):
                connection.abort()

    run(both())


async def read(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes], bytes]:
    """One answer that tells its length."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.rstrip(b"\r\n").split(b"\r\n")
    headers = dict(line.split(b": ", 1) for line in lines)
    return int(first.split()[1]), headers, await reader.readexactly(int(headers[b"content-length"]))


def get(path: str = "/", *more: str) -> bytes:
    return "".join(f"{line}\r\n" for line in (f"GET {path} HTTP/1.1", "Host: a", *more, "")).encode()


def test_requests_sent_together_are_answered_in_their_order() -> None:
    async def what(reader, writer, app, every):
        writer.write(get("/slow") + b"".join(get(f"/{number}") for number in range(3000)))
        asked = [json.loads((await read(reader))[2])["target"] for _ in range(3001)]
        assert asked == ["/slow", *(f"/{number}" for number in range(3000))]
        writer.write(get("/again"))
        assert (await read(reader))[0] == 200

    talk(what)


def test_a_request_in_single_bytes_is_the_same_request() -> None:
    async def what(reader, writer, app, every):
        for byte in b"POST /a%20b?c=d HTTP/1.1\r\nHost: a\r\nX-Name: value\r\nContent-Length: 3\r\n\r\nabc":
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        found = json.loads((await read(reader))[2])
        assert found == {"target": "/a%20b?c=d", "method": "POST", "headers": ["content-length", "host", "x-name"],
                         "sent": 3}  # fmt: skip

    talk(what)


def test_an_answer_may_take_longer_than_a_client_may_be_idle() -> None:
    async def what(reader, writer, app, every):
        writer.write(get("/slow"))
        assert (await read(reader))[0] == 200
        assert await reader.read() == b""  # idle again, and for too long

    talk(what, Limits(idle_s=0.02))


def test_a_wish_for_another_protocol_is_passed_over() -> None:
    """Java's client asks so with its first request, whose body the parser leaves unread."""

    async def what(reader, writer, app, every):
        wish = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAA\r\n"
        writer.write(b"POST /first HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n" + wish + b"\r\nhello" + get("/second"))
        first, second = [json.loads((await read(reader))[2]) for _ in range(2)]
        assert (first["target"], first["sent"], second["target"]) == ("/first", 5, "/second")
        assert "upgrade" not in first["headers"]
        writer.write(b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await read(reader))[0] == 400
        assert await reader.read() == b""

    talk(what)


def test_what_is_no_http_ends_the_connection_after_the_answers_before_it() -> None:
    async def what(reader, writer, app, every):
        writer.write(get("/slow") + b"nonsense\r\n\r\n" + get("/never"))
        assert json.loads((await read(reader))[2])["target"] == "/slow"
        status, headers, body = await read(reader)
        assert (status, headers[b"connection"], json.loads(body)) == (
            400,
            b"close",
            {"error": "this is not an HTTP request"},
        )
        assert await reader.read() == b""
        assert app.under_way == 1

    talk(what)


@pytest.mark.parametrize(
    "body",
    [
        b"Content-Length: 9\r\n\r\n123456789",
        b"Transfer-Encoding: chunked\r\n\r\n9\r\n123456789\r\n0\r\n\r\n",
    ],
)
def test_a_body_that_is_refused_is_read_past(body: bytes) -> None:
    async def what(reader, writer, app, every):
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nX-Refuse: yes\r\n" + body + get("/next"))
        assert (await read(reader))[0] == 401
        assert json.loads((await read(reader))[2])["target"] == "/next"
        writer.write(b"POST /large HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(40):
            writer.write(b"64\r\n" + b"x" * 100 + b"\r\n")
        writer.write(b"0\r\n\r\n" + get("/last"))
        assert (await read(reader))[0] == 413
        assert json.loads((await read(reader))[2])["target"] == "/last"
        assert app.under_way == 2

    talk(what, Limits(max_body=1000))


def test_bodies_of_all_connections_together_are_bounded() -> None:
    async def what(reader, writer, app, every):
        head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 700\r\n\r\n"
        other_reader, other = await asyncio.open_connection(*writer.get_extra_info("peername"))
        other.write(head + b"x" * 600)
        while app.unanswered < 600:
            await asyncio.sleep(0.005)
        writer.write(head + b"x" * 700)
        status, headers, _ = await read(reader)
        assert (status, headers[b"retry-after"]) == (503, b"1")
        other.write(b"x" * 100)
        assert json.loads((await read(other_reader))[2])["sent"] == 700
        writer.write(head + b"x" * 700 + head + b"x" * 300)
        assert (await read(reader))[0] == 200
        while app.unanswered != 300:
            await asyncio.sleep(0.005)
        writer.transport.abort()
        while app.unanswered:
            await asyncio.sleep(0.005)
        other.close()

    talk(what, Limits(max_unanswered=1000))


def test_a_byte_after_the_last_request_is_of_no_body() -> None:
    async def what(reader, writer, app, every):
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 700\r\n\r\n" + b"x" * 701)
        assert (await read(reader))[0] == 200
        await reader.read()
        assert app.unanswered == 0

    talk(what, Limits(max_unanswered=1000))


def test_events_come_in_chunks_or_until_the_connection_ends() -> None:
    async def what(reader, writer, app, every):
        writer.write(get("/events") + get("/next"))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head
        assert await reader.readuntil(b"0\r\n\r\n") == b"3\r\none\r\n3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n"
        assert (await read(reader))[0] == 200
        writer.write(b"GET /events HTTP/1.0\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"chunked" not in head
        assert b"connection: close" in head
        assert await reader.read() == b"onetwothree"

    talk(what)


def test_events_that_break_off_are_no_whole_answer() -> None:
    async def what(reader, writer, app, every):
        writer.write(get("/broken") + get("/next"))
        with contextlib.suppress(ConnectionError):
            assert not (await reader.read()).endswith(b"0\r\n\r\n")
        assert app.under_way == 1

    talk(what)


def test_events_hear_that_the_client_has_gone_before_the_first() -> None:
    heard = []

    class Late(Echo):
        async def answer(self, call: Call) -> Reply:
            self.under_way += 1
            await asyncio.sleep(0.1)

            async def events() -> AsyncGenerator[bytes, None]:
                heard.append(call.gone())
                yield b"nobody reads this"

            return Reply(200, events=events())

    async def what(reader, writer, app, every):
        app.__class__ = Late
        writer.write(get())
        while not app.under_way:
            await asyncio.sleep(0.005)
        writer.transport.abort()
        while not heard:
            await asyncio.sleep(0.005)
        assert heard == [True]

    talk(what)


def test_answers_wait_for_a_client_that_does_not_take_them_and_not_for_ever() -> None:
    async def what(reader, writer, app, every):
        writer.write(get("/long") * 200)
        while app.under_way < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert app.under_way < 100  # what the system's buffers hold, and one more
        while every:
            await asyncio.sleep(0.05)

    # The reader's own buffer holds as much as its limit; here it must not read on for us.
    async def unread(reader, writer, app, every):
        writer.transport.pause_reading()
        await what(reader, writer, app, every)

    talk(unread, Limits(body_s=1.0))


@pytest.mark.parametrize("sent", [b"G", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf"])
def test_a_client_that_does_not_read_gains_no_time_by_what_it_sends(sent: bytes) -> None:
    class Huge(Echo):
        async def answer(self, call: Call) -> Reply:
            self.under_way += 1
            return Reply(200, b"x" * (48 << 20))

    async def what(reader, writer, app, every):
        app.__class__ = Huge
        writer.transport.pause_reading()
        writer.write(get())
        while not app.under_way:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        writer.write(sent)
        while every:
            await asyncio.sleep(0.05)

    talk(what, Limits(body_s=1.0))


def test_a_stream_that_ends_after_the_server_has_begun_to_ends_the_connection() -> None:
    begun = asyncio.Event()

    class Slow(Echo):
        async def answer(self, call: Call) -> Reply:
            async def events() -> AsyncGenerator[bytes, None]:
                yield b"one"
                await begun.wait()
                yield b"two"

            return Reply(200, events=events())

    async def what(reader, writer, app, every):
        app.__class__ = Slow
        writer.write(get())
        await reader.readuntil(b"one\r\n")
        for connection in list(every):
            connection.finish()
        begun.set()
        assert (await reader.read()).endswith(b"two\r\n0\r\n\r\n")

    talk(what, Limits(idle_s=1000.0))


def test_what_follows_the_last_chunk_is_no_header() -> None:
    async def what(reader, writer, app, every):
        writer.write(
            b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n0\r\nX-Late: 1\r\n\r\n"
        )
        found = json.loads((await read(reader))[2])
        assert (found["headers"], found["sent"]) == (["host", "transfer-encoding"], 4)

    talk(what)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"Host: a\r\nHost: b\r\n\r\n", 400),
        (b"Host: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (b"Host: a\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501),
        (b"Host: a\r\nTransfer-Encoding: Chunked\r\n\r\n0\r\n\r\n", 200),
    ],
)
def test_what_a_server_before_us_could_read_differently_is_refused(head: bytes, status: int) -> None:
    class Checking(Echo):
        refusal, _guarded = App.refusal, False

    async def what(reader, writer, app, every):
        app.__class__ = Checking
        writer.write(b"POST /first HTTP/1.1\r\n" + head + get("/next"))
        assert (await read(reader))[0] == status
        assert json.loads((await read(reader))[2])["target"] == "/next"

    talk(what)


def test_a_compressed_body_counts_as_large_as_it_becomes() -> None:
    app = App(Registry(Metrics(), Options()), limits=Limits(max_unanswered=1000))
    call = app.call("POST", b"/predictions/a", {b"content-encoding": b"gzip"}, lambda: False)
    call.parts, call.sent = ("predictions", "a"), gzip.compress(b"x" * 900)
    app.unanswered = 200 + len(call.sent)
    assert run(app.answer(call)).status == 503
    assert (len(call.sent), app.unanswered) == (900, 1100)  # whoever counted it takes it off again


def test_a_server_that_ends_answers_what_was_asked() -> None:
    async def what(reader, writer, app, every):
        writer.write(get("/slow") + get("/too"))
        while not app.under_way:
            await asyncio.sleep(0.005)
        for connection in list(every):
            connection.finish()
        assert (await read(reader))[0] == 200
        status, headers, _ = await read(reader)
        assert (status, headers[b"connection"]) == (200, b"close")
        assert await reader.read() == b""

    talk(what)


def test_a_handlers_type_cannot_add_a_header() -> None:
    class Split(Echo):
        async def answer(self, call: Call) -> Reply:
            return Reply(200, b"{}", b"text/plain\r\nSet-Cookie: a=b", ((b"x-said", b"a\r\n\r\nb"),))

    async def both() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(functools.partial(Connection, Split(Limits()), set(), loop), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
        writer.write(get())
        status, headers, body = await read(reader)
        assert (status, body, sorted(headers)) == (200, b"{}", [b"content-length", b"content-type", b"x-said"])
        writer.close()
        server.close()

    run(both())


@pytest.mark.parametrize(
    ("pieces", "status"),
    [((b"abc", b"de"), 200), ((b"x" * 900, b"x" * 900), 413), ((b"abc", None), 408), ((b"abc", "gone"), None)],
)
def test_behind_another_server_the_same_limits_hold(pieces: tuple, status: int | None) -> None:
    """Whole, too large, too slow, and given up: as ASGI's messages say it."""
    left, said_back = list(pieces), []

    async def receive():
        piece = left.pop(0)
        if piece is None:
            await asyncio.sleep(60)
        if piece == "gone":
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": piece, "more_body": bool(left)}

    async def send(message):
        said_back.append(message)

    scope = {"type": "http", "method": "POST", "path": "/a", "query_string": b"b=c", "headers": [(b"host", b"a")]}
    run(Asgi(Echo(Limits(max_body=1000, body_s=0.1)))(scope, receive, send))
    assert [message["status"] for message in said_back if "status" in message] == ([status] if status else [])
    if status == 200:
        found = json.loads(said_back[1]["body"])
        assert (found["target"], found["sent"]) == ("/a?b=c", 5)


def test_behind_another_server_a_stream_hears_that_its_client_has_gone() -> None:
    came: list[bytes] = []

    class Endless(Echo):
        async def answer(self, call: Call) -> Reply:
            async def events():
                while not call.gone():
                    yield b"more"
                    await asyncio.sleep(0)

            return Reply(200, events=events())

    async def receive():
        if not came:
            return {"type": "http.request", "body": b"x"}
        return {"type": "http.disconnect"}

    async def send(message):
        came.append(message.get("body", b""))

    async def whole() -> None:
        scope = {"type": "http", "method": "POST", "path": "/a", "headers": [(b"host", b"a")]}
        async with asyncio.timeout(60):
            await Asgi(Endless(Limits()))(scope, receive, send)

    run(whole())
    assert b"more" in came
