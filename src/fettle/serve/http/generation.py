"""Texts that a model writes: how any protocol asks for one, and Triton's generate extension."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from typing import Any

import msgspec

from fettle.package.handlers.asking import Ask, Piece, pieces
from fettle.package.handlers.generate import Settings
from fettle.package.handlers.sampling import Sampling
from fettle.serve.engine.pool import Pool
from fettle.serve.engine.refusal import TOO_LONG, Malformed, Refusal
from fettle.serve.engine.registry import Registry
from fettle.serve.engine.request import Request
from fettle.serve.http.aside import aside
from fettle.serve.http.call import Call
from fettle.serve.http.openapi import operation, ref
from fettle.serve.http.reply import GONE, Error, Reply, json_reply

EVENTS = b"text/event-stream"
NO_CACHE = ((b"cache-control", b"no-cache"),)


class Parameters(Sampling, frozen=True, forbid_unknown_fields=True):
    """What a request of Triton's extension may ask for."""

    stream: bool | None = None
    """Clients say it again; the path decides."""


class Prompt(msgspec.Struct, frozen=True):
    """A request of Triton's generate extension."""

    text_input: str
    id: str = ""
    parameters: Parameters = Parameters()

    @property
    def ask(self) -> Ask:
        """What is to be written."""
        parameters = {name: getattr(self.parameters, name) for name in Sampling.__struct_fields__}
        return Ask(text=self.text_input, sampling=Sampling(**parameters))


class Text(msgspec.Struct, omit_defaults=True):
    """Text that was written: all of it, or the next piece."""

    model_name: str
    model_version: str
    text_output: str
    id: str = ""


_prompts = msgspec.json.Decoder(Prompt)


class Writing:
    """A text that is being written for a client: its pieces as they come. It is given up when the client goes."""

    def __init__(self, call: Call, version: Pool, ask: Ask) -> None:
        self._pool, self._gone = version, call.gone
        self._came: asyncio.Queue[bytes | None] = asyncio.Queue()
        body = msgspec.json.encode(ask)
        if len(body) > _most_bytes(version):  # before a copy of it waits for each of several answers
            raise Refusal(400, "the prompt is longer than this model takes", code=TOO_LONG)
        self._request = Request(1, "text", body=body, gone=call.gone, piece=self._came.put_nowait)
        self.answer = self._pool.submit(self._request)
        self.answer.add_done_callback(lambda _: self._came.put_nowait(None))
        self._first: bytes | None = None
        self._begun = False

    async def begin(self) -> None:
        """Wait for the first piece: what is refused is refused by its status, before a stream has begun."""
        if self._begun:
            return
        self._first, self._begun = await self._came.get(), True
        if self._first is None:
            await self.answer

    async def pieces(self) -> AsyncIterator[Piece]:
        """All of them; fewer where the client goes. Raises `Refusal` where the writing breaks off."""
        await self.begin()
        piece = self._first
        while piece is not None:
            if self._gone():
                self.stop()
                return
            yield pieces.decode(piece)
            piece = await self._came.get()
        if not self.answer.cancelled():
            await self.answer

    async def whole(self) -> list[Piece]:
        """All pieces. Raises `Refusal`."""
        try:
            pieces = [piece async for piece in self.pieces()]
        finally:
            self.stop()
        if self.answer.cancelled():
            raise Refusal(GONE, "the client went away")
        return pieces

    def stop(self) -> None:
        """Nobody wants it any more, if it is not whole."""
        if not self.answer.done():
            self._pool.stop(self._request)


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _most_bytes(version: Pool) -> int:
    """No prompt that the model takes is longer as JSON: six bytes a character, eight a token, and the rest."""
    settings = version.package.manifest.handler
    assert isinstance(settings, Settings)
    return 6 * settings.max_characters + 8 * settings.max_tokens + (64 << 10)


def generates(version: Pool) -> bool:
    """Whether it answers prompts."""
    return isinstance(version.package.manifest.handler, Settings)


def writer(call: Call, name: str, number: str | None) -> Pool:
    """The version that writes texts under this name. Raises `Refusal`."""
    version = call.choose(name, number)
    if not generates(version):
        raise Refusal(400, f"the model {name} generates no text")
    return version


def read_prompt(body: bytes) -> Prompt:
    """The request that a body holds. Raises `Malformed`."""
    try:
        return _prompts.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"the body is not a request to generate: {str(error)[:200]}") from None


async def whole_text(call: Call, version: Pool, ask: Ask) -> str:
    """All that a model writes. Raises `Refusal`."""
    return "".join(piece.text for piece in await Writing(call, version, ask).whole())


async def generate(call: Call) -> Reply | None:
    """``POST /v2/models/NAME[/versions/V]/generate`` and ``/generate_stream``."""
    match call.method, call.model_path:
        case "POST", (name, number, ["generate" | "generate_stream" as how]):
            writer(call, name, number)
        case _:
            return None
    prompt = await aside(len(call.sent), partial(read_prompt, call.sent))
    version = writer(call, name, number)  # another may have taken its place meanwhile
    manifest = version.package.manifest

    def text(written: str) -> Text:
        return Text(manifest.name, manifest.version, written, prompt.id)

    if how == "generate":
        return json_reply(text(await whole_text(call, version, prompt.ask)))
    writing = Writing(call, version, prompt.ask)
    await writing.begin()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            async for piece in writing.pieces():
                if piece.text:
                    yield event(text(piece.text))
        except Refusal:
            yield event(Error("the model failed"))
        finally:
            writing.stop()

    return Reply(200, kind=EVENTS, headers=NO_CACHE, events=events())


def paths(registry: Registry) -> dict[str, Any]:
    """For the OpenAPI document."""
    entries: dict[str, Any] = {}
    for name, model in sorted(registry.models.items()):
        if any(generates(made) for made in model.versions.values()):
            whole = operation(f"Text that {name} generates", ref("Prompt"), ref("Text"))
            pieces = operation("The same as it comes, as server-sent events", ref("Prompt"), {}, "text/event-stream")
            entries |= {
                f"/v2/models/{name}/generate": {"post": whole},
                f"/v2/models/{name}/generate_stream": {"post": pieces},
            }
    return entries
