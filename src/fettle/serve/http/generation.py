"""Triton's generate extension: a prompt in; the text out, whole, or as it comes by server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec

from fettle.errors import UsageError
from fettle.package.handlers import generate as prompts
from fettle.serve.engine.pool import Pool
from fettle.serve.engine.refusal import Rejected
from fettle.serve.engine.registry import Registry, Version
from fettle.serve.engine.request import Answer, Request
from fettle.serve.http.call import Call
from fettle.serve.http.openapi import operation, ref
from fettle.serve.http.reply import GONE, Error, Reply, json_reply


class Text(msgspec.Struct, omit_defaults=True):
    """Text that was generated: all of it, or the next piece."""

    model_name: str
    model_version: str
    text_output: str
    id: str = ""


def generates(version: Version) -> bool:
    """Whether it answers prompts."""
    return isinstance(version.package.manifest.handler, prompts.Settings)


async def generate(call: Call) -> Reply | None:
    """``POST /v2/models/NAME[/versions/V]/generate`` and ``/generate_stream``."""
    match call.method, call.model_path:
        case "POST", (name, number, ["generate" | "generate_stream" as how]):
            return await _generate(call, name, number, stream=how == "generate_stream")
    return None


async def _generate(call: Call, name: str, number: str | None, *, stream: bool) -> Reply:
    body = call.body()
    version = call.choose(name, number)
    if not generates(version):
        raise Rejected(400, f"the model {name} generates no text")
    try:
        prompt = prompts.read_prompt(body)
    except UsageError as error:
        raise Rejected(400, str(error)) from None
    gone = call.gone
    pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
    request = Request(1, "generate", body=body, kind="application/json", gone=gone, piece=pieces.put_nowait)
    answer = version.pool.submit(request)
    answer.add_done_callback(lambda _: pieces.put_nowait(None))
    first = await pieces.get()  # what is refused is refused by its status, before a stream has begun
    if first is None:
        await answer
    manifest = version.package.manifest

    def text(said: str) -> Text:
        return Text(manifest.name, manifest.version, said, prompt.id)

    events = _events(version.pool, answer, first, pieces, text, gone)
    if stream:
        return Reply(200, kind=b"text/event-stream", headers=((b"cache-control", b"no-cache"),), events=events)
    async for _ in events:
        pass
    if answer.cancelled():
        raise Rejected(GONE, "the client went away")
    return json_reply(text(msgspec.json.decode((await answer).body)["text_output"]))


async def _events(
    pool: Pool, answer: asyncio.Future[Answer], first: bytes | None, pieces: asyncio.Queue[bytes | None],
    text: Callable[[str], Text], gone: Callable[[], bool] | None,
) -> AsyncGenerator[bytes, None]:  # fmt: skip
    """Server-sent events of a text that is being generated. Where the client goes away, the generating stops."""
    piece = first
    try:
        while piece is not None:
            if gone is not None and gone():
                return
            yield b"data: " + msgspec.json.encode(text(piece.decode())) + b"\n\n"
            piece = await pieces.get()
        if answer.done() and not answer.cancelled() and answer.exception() is not None:
            yield b"data: " + msgspec.json.encode(Error("the model failed")) + b"\n\n"
    finally:
        if not answer.done():
            pool.stop(answer)


def paths(registry: Registry) -> dict[str, Any]:
    """For the OpenAPI document."""
    found: dict[str, Any] = {}
    for name, model in sorted(registry.models.items()):
        if any(generates(made) for made in model.versions.values()):
            whole = operation(f"Text that {name} generates", ref("Prompt"), ref("Text"))
            pieces = operation("The same as it comes, as server-sent events", ref("Prompt"), {}, "text/event-stream")
            found |= {
                f"/v2/models/{name}/generate": {"post": whole},
                f"/v2/models/{name}/generate_stream": {"post": pieces},
            }
    return found
