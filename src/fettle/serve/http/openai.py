"""OpenAI's protocol for texts: ``/v1/completions``, ``/v1/chat/completions`` and ``/v1/models``.

Parameters that would change the answer and are not known here are refused, with the protocol's own error.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from fettle.package.handlers.asking import Ask, Piece, TokenLogprob
from fettle.package.handlers.sampling import LogitBias, Sampling
from fettle.serve.engine.pool import Pool
from fettle.serve.engine.refusal import NO_MODEL, Malformed, Refusal
from fettle.serve.engine.registry import Registry
from fettle.serve.http.aside import aside
from fettle.serve.http.call import Call
from fettle.serve.http.generation import EVENTS, NO_CACHE, Writing, event, generates, writer
from fettle.serve.http.openapi import OBJECT, operation, ref
from fettle.serve.http.reply import ErrorOf, OpenAIError, Reply, json_reply

MAX_CHOICES = 128
_Tokens = Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)]


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a stream."""

    include_usage: bool = False
    """Send the counts after the last piece."""


class _Common(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both calls may ask for. Fields of the second part are not in OpenAI's protocol; others have them too."""

    model: str
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | Annotated[tuple[str, ...], Meta(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: LogitBias | None = None
    seed: int | None = None
    user: str | None = None
    metadata: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    """Nobody reads it, and so it is not made into objects."""
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=1, le=1)] | None = None
    """As vLLM's own benchmark sends it; none is applied."""
    ignore_eos: bool | None = None


class Completions(_Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for the text that follows a prompt."""

    prompt: str | Annotated[tuple[str | int | _Tokens, ...], Meta(min_length=1, max_length=1 << 20)]
    """A text, its tokens, or several of either."""
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """How the answer is to be written."""

    type: str = ""


class Chat(_Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for the next message of a conversation."""

    messages: Annotated[tuple[dict[str, Any], ...], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    modalities: tuple[Literal["text"], ...] | None = None
    tools: tuple[msgspec.Raw, ...] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Not in OpenAI's protocol; vLLM and llama.cpp have it."""


_Body = TypeVar("_Body", Completions, Chat)


async def answer(call: Call) -> Reply | None:
    """``POST /v1/completions``, ``POST /v1/chat/completions``, ``GET /v1/models`` and ``/v1/models/NAME``."""
    match call.method, call.parts:
        case "POST", ["v1", "completions"]:
            return await _completions(call)
        case "POST", ["v1", "chat", "completions"]:
            return await _chat(call)
        case "GET", ["v1", "models"]:
            return json_reply({"object": "list", "data": list(_models(call.registry).values())})
        case "GET", ["v1", "models", name]:
            reason, models = f"no model that writes texts is called {name}", _models(call.registry)
            if name not in models:
                raise Refusal(404, reason, param="model", code=NO_MODEL)
            return json_reply(models[name])
    return None


def _models(registry: Registry) -> dict[str, dict[str, Any]]:
    """What is said of the models that write texts, by name."""
    models = {}
    for name, model in sorted(registry.models.items()):
        if generating := [version for version in model.versions.values() if generates(version)]:
            began = int(min(worker.started_at for version in generating for worker in version.workers))
            models[name] = {"id": name, "object": "model", "created": began, "owned_by": "fettle"}
    return models


async def _read(call: Call, kind: type[_Body]) -> _Body:
    try:
        return await aside(len(call.sent), lambda: msgspec.json.decode(call.sent, type=kind))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error)[:300]
        param = reason.partition("`$.")[2].partition("`")[0] or reason.partition("field `")[2].partition("`")[0] or None
        raise Malformed(f"this request cannot be answered: {reason}", param=param) from None


def _sampling(wanted: _Common, logprobs: int | None, most: int | None) -> Sampling:
    given = {name: value for name in Sampling.__struct_fields__ if (value := getattr(wanted, name, None)) is not None}
    stop = (wanted.stop,) if isinstance(wanted.stop, str) else wanted.stop or ()
    # Of several answers each gets a seed of its own.
    fields = {"temperature": 1.0, **given, "max_tokens": most, "logprobs": logprobs, "stop": stop, "seed": None}
    try:
        return msgspec.convert(fields, Sampling)
    except msgspec.ValidationError as error:
        raise Malformed(str(error), param="stop") from None


async def _completions(call: Call) -> Reply:
    wanted = await _read(call, Completions)
    version = writer(call, wanted.model, None)
    sampling = _sampling(wanted, wanted.logprobs, wanted.max_tokens or 16)
    strict = wanted.max_tokens is not None  # fewer than the protocol's usual 16 are no error
    asks = [msgspec.structs.replace(ask, sampling=sampling, strict=strict) for ask in _prompts(wanted.prompt)]
    return await _Answer(call, version, wanted, asks, chat=False).reply()


def _prompts(prompts: Any) -> list[Ask]:
    if isinstance(prompts, str):
        return [Ask(text=prompts)]
    kinds = {type(one) for one in prompts}
    if len(kinds) > 1:
        raise Malformed("a prompt is a text, its tokens, or several of either", param="prompt")
    if kinds == {int}:
        if min(prompts) < 0:
            raise Malformed("tokens are 0 or more", param="prompt")
        return [Ask(tokens=prompts)]
    return [Ask(text=one) if isinstance(one, str) else Ask(tokens=one) for one in prompts]


async def _chat(call: Call) -> Reply:
    wanted = await _read(call, Chat)
    version = writer(call, wanted.model, None)
    if wanted.response_format is not None and wanted.response_format.type != "text":
        raise Malformed("the only response_format here is text", param="response_format")
    if wanted.tools:
        raise Malformed("no model here calls tools: leave tools out", param="tools")
    if wanted.top_logprobs is not None and not wanted.logprobs:
        raise Malformed("top_logprobs needs logprobs", param="top_logprobs")
    logprobs = (wanted.top_logprobs or 0) if wanted.logprobs else None
    sampling = _sampling(wanted, logprobs, wanted.max_completion_tokens or wanted.max_tokens)
    messages = tuple(map(_message, wanted.messages))
    ask = Ask(messages=messages, template=wanted.chat_template_kwargs, sampling=sampling, strict=True)
    return await _Answer(call, version, wanted, [ask], chat=True).reply()


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its content as text: parts of type text are put together. A developer speaks as the system, which
    every chat template knows, and what is null is left out, as a template may only ask whether it is there."""
    message = {"content": "", **{name: value for name, value in message.items() if value is not None}}
    content = message["content"]
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise Malformed("the parts of a message are texts", param="messages")
        content = "".join(part["text"] for part in content)
    if not isinstance(message.get("role"), str) or not isinstance(content, str):
        raise Malformed("a message has a role and a content, as text", param="messages")
    return {**message, "role": "system" if message["role"] == "developer" else message["role"], "content": content}


class _Answer:
    """One answer with all its choices."""

    def __init__(self, call: Call, version: Pool, wanted: _Common, asks: Sequence[Ask], *, chat: bool) -> None:
        count = wanted.n or 1
        if len(asks) * count > MAX_CHOICES:
            raise Malformed(f"a request has at most {MAX_CHOICES} answers", param="n")
        self.wanted, self.chat, self.count = wanted, chat, count
        self.logprobs = asks[0].sampling.logprobs is not None
        self.writings: list[Writing] = []
        try:
            for ask in asks:
                for index in range(count):
                    seed = None if wanted.seed is None else (wanted.seed + index) % (1 << 63)
                    sampling = msgspec.structs.replace(ask.sampling, seed=seed)
                    self.writings.append(Writing(call, version, msgspec.structs.replace(ask, sampling=sampling)))
        except BaseException:
            self.stop()
            raise
        self.head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex, "created": int(time.time()),
            "model": wanted.model,
        }  # fmt: skip
        self.offsets = [0] * len(self.writings)

    def stop(self) -> None:
        """Give up what is not whole."""
        for writing in self.writings:
            writing.stop()

    async def reply(self) -> Reply:
        """The answer, whole or as a stream. Raises `Refusal`."""
        if not self.wanted.stream:
            try:
                texts = await asyncio.gather(*(writing.whole() for writing in self.writings))
            finally:
                self.stop()
            choices = [self._whole(index, pieces) for index, pieces in enumerate(texts)]
            kind = "chat.completion" if self.chat else "text_completion"
            ends = [pieces[-1] for pieces in texts]
            return json_reply({**self.head, "object": kind, "choices": choices, "usage": self._usage(ends)})
        try:  # each prompt's first choice: the others may have to wait until it is whole
            await asyncio.gather(*(writing.begin() for writing in self.writings[:: self.count]))
        except BaseException:
            self.stop()
            raise
        return Reply(200, kind=EVENTS, headers=NO_CACHE, events=self._events())

    def _usage(self, ends: Sequence[Piece]) -> dict[str, int]:
        """Tokens of all prompts and answers, `ends` in the order of the choices; a prompt that is answered several
        times counts once."""
        prompt = sum(end.prompt_tokens for end in ends[:: self.count])
        written = sum(end.tokens for end in ends)
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    def _whole(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        likely = [one for piece in pieces for one in piece.logprobs]
        logprobs = self._logprobs(index, likely) if self.logprobs else None  # of an empty text, too
        choice = {"index": index, "finish_reason": pieces[-1].reason, "logprobs": logprobs}
        return {**choice, "message": {"role": "assistant", "content": text}} if self.chat else {**choice, "text": text}

    def _logprobs(self, index: int, likely: Sequence[TokenLogprob]) -> dict[str, Any]:
        if self.chat:
            return {"content": [
                {**_chat_token(one.token, one.logprob), "top_logprobs": [_chat_token(*pair) for pair in one.top]}
                for one in likely
            ]}  # fmt: skip
        offsets = []
        for one in likely:
            offsets.append(self.offsets[index])
            self.offsets[index] += len(one.token)
        return {
            "tokens": [one.token for one in likely], "token_logprobs": [one.logprob for one in likely],
            "top_logprobs": [dict([*one.top, (one.token, one.logprob)]) for one in likely], "text_offset": offsets,
        }  # fmt: skip

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events of all choices as they come."""
        came: asyncio.Queue[tuple[int, Piece | None]] = asyncio.Queue()

        async def listen(index: int, writing: Writing) -> None:
            try:
                async for piece in writing.pieces():
                    came.put_nowait((index, piece))
            except Refusal as refusal:
                failed.append(refusal)
            finally:
                came.put_nowait((index, None))

        failed: list[Refusal] = []
        listening = [asyncio.ensure_future(listen(*pair)) for pair in enumerate(self.writings)]
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        usage = self.wanted.stream_options is not None and self.wanted.stream_options.include_usage
        head = {**self.head, "object": kind, **({"usage": None} if usage else {})}

        ends: dict[int, Piece] = {}
        left = len(self.writings)
        try:
            if self.chat:
                for index in range(left):
                    begin = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                    yield event({**head, "choices": [begin]})
            while left and not failed:
                index, piece = await came.get()
                if piece is None:
                    left -= 1
                    continue
                if piece.reason:
                    ends[index] = piece
                if piece.text or piece.reason or piece.logprobs:
                    yield event({**head, "choices": [self._chunk(index, piece)]})
            if failed:
                yield event(OpenAIError(ErrorOf(failed[0].reason, "server_error")))
                return
            if len(ends) < len(self.writings):
                return  # the client has gone
            if usage:
                yield event({**head, "choices": [], "usage": self._usage([ends[index] for index in sorted(ends)])})
            yield b"data: [DONE]\n\n"
        finally:
            for task in listening:
                task.cancel()
            self.stop()

    def _chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        logprobs = self._logprobs(index, piece.logprobs) if piece.logprobs else None
        choice = {"index": index, "finish_reason": piece.reason or None, "logprobs": logprobs}
        if not self.chat:
            return {**choice, "text": piece.text}
        return {**choice, "delta": {"content": piece.text} if piece.text else {}}


def _chat_token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


def paths(registry: Registry) -> dict[str, Any]:
    """For the OpenAPI document."""
    if not any(generates(version) for _, _, version in registry.versions()):
        return {}
    return {
        "/v1/completions": {"post": operation("Text after a prompt, by OpenAI's protocol", ref("Completions"), OBJECT)},
        "/v1/chat/completions": {"post": operation("The next message, by OpenAI's protocol", ref("Chat"), OBJECT)},
        "/v1/models": {"get": operation("The models that write texts, by OpenAI's protocol")},
    }
