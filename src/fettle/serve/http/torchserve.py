"""TorchServe's URLs, so that its clients stay as they are: predictions by the handler, and management."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from email.message import Message
from email.parser import BytesHeaderParser
from typing import Any

from fettle.package.handlers.asking import Ask
from fettle.serve.engine.pool import Pool
from fettle.serve.engine.refusal import Malformed, Refusal
from fettle.serve.engine.registry import Registry
from fettle.serve.engine.request import Request
from fettle.serve.http.call import Call
from fettle.serve.http.generation import generates, read_prompt, whole_text
from fettle.serve.http.openapi import OBJECT, operation
from fettle.serve.http.reply import Reply, json_reply

log = logging.getLogger("fettle.serve")
MAX_PARTS = 64
MAX_HEAD = 8 << 10
"""Parts of a form, and bytes of one part's headers."""


async def predict(call: Call) -> Reply | None:
    """``/predictions/NAME[/V]``, ``/explanations/NAME[/V]``, ``/v1/models/NAME:predict`` and ``:explain``."""
    match call.method, call.parts:
        case "POST" | "PUT", ["predictions", name, *numbers] if len(numbers) < 2:
            explain = False
        case "POST", ["explanations", name, *numbers] if len(numbers) < 2:
            explain = True
        case "POST", ["v1", "models", path] if path.endswith((":predict", ":explain")):
            name, _, what = path.rpartition(":")
            numbers, explain = [], what == "explain"
        case _:
            return None
    version = call.choose(name, *numbers)
    body, kind = call.sent, call.header(b"content-type")[:200]
    if kind.lower().startswith("multipart/form-data"):
        body = read_field(body, kind, ("data", "body"))
    if generates(version):
        if explain:
            raise Refusal(400, "explanations are not available for generated text")
        ask = read_prompt(body).ask if "json" in kind else Ask(text=_plain_text(body))
        text = await whole_text(call, version, ask)
        return Reply(200, text.encode(), b"text/plain; charset=utf-8")
    request = Request(1, "body", body=body, kind=kind, gone=call.gone, explain=explain)
    answer = await version.submit(request)
    return Reply(200, answer.body, answer.kind.encode("latin-1"), answer=answer)


def read_field(body: bytes, kind: str, names: Collection[str]) -> bytes:
    """The first field of a multipart form (RFC 7578) that has one of these names, as ``curl -F data=@file`` sends it.
    `kind` is the form's content type. Raises `Malformed`.

    The library's parser reads a message line by line: a picture of 64 MB would stop the event loop for seconds.
    """
    try:
        return _field(body, kind, names)
    except (TypeError, ValueError) as error:  # of parameters in forms that do not go together (RFC 2231)
        raise Malformed("the headers of the form cannot be read") from error


def _field(body: bytes, kind: str, names: Collection[str]) -> bytes:
    message = Message()
    message["content-type"] = kind
    boundary = message.get_boundary()
    if not boundary:
        raise Malformed("the form's content type names no boundary")
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("latin-1", "replace"), MAX_PARTS + 1)
    if len(parts) > MAX_PARTS + 1:
        raise Malformed("the form has too many parts")
    for part in parts[1:]:
        if part.startswith(b"--"):
            break
        end = part.find(b"\r\n\r\n", 0, MAX_HEAD)
        if end < 0:
            raise Malformed("a part of the form has no headers, or too many")
        headers = BytesHeaderParser().parsebytes(part[: end + 2].lstrip())
        if headers.get_param("name", header="content-disposition") in names:
            if str(headers.get("content-transfer-encoding", "binary")).lower() not in ("binary", "8bit", "7bit"):
                raise Malformed("the field's Content-Transfer-Encoding is not supported", 415)
            return part[end + 4 :]
    raise Malformed(f"the form has no field {' or '.join(names)}")


def _plain_text(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError:
        raise Malformed("the body is not text in UTF-8") from None


async def ping(call: Call) -> Reply | None:
    """``GET /ping``."""
    if (call.method, call.parts) != ("GET", ("ping",)):
        return None
    return json_reply({"status": "Healthy"}) if call.registry.ready else json_reply({"status": "Unhealthy"}, 500)


def paths(registry: Registry) -> dict[str, Any]:
    """For the OpenAPI document."""
    entries: dict[str, Any] = {"/ping": {"get": operation("TorchServe's health check")}}
    for name, model in sorted(registry.models.items()):
        entries[f"/predictions/{name}"] = {"post": operation(f"Call {name}'s handler with a body", {}, {}, "*/*")}
        if any(made.explains for made in model.versions.values()):
            text = f"What moved {name}'s answer to a body"
            entries[f"/explanations/{name}"] = {"post": operation(text, OBJECT, {})}
    return entries


# -- management -------------------------------------------------------------------------------------------------------


async def manage(call: Call) -> Reply | None:
    """``/models``: list, describe, register by name, unregister, scale, set the default version."""
    registry = call.registry
    match call.method, call.parts:
        case "GET", ["models"]:
            names = [{"modelName": name, "modelUrl": name} for name in sorted(registry.models)]
            return json_reply({"models": names})
        case "GET", ["models", name, "all"]:
            registry.choose(name)
            return json_reply([_described(n, made) for n, _, made in registry.versions() if n == name])
        case "GET", ["models", name, *numbers] if len(numbers) < 2:
            return json_reply([_described(name, registry.choose(name, *numbers))])
        case "POST", ["models"]:
            return await _register(call)
        case "DELETE", ["models", name, *numbers] if len(numbers) < 2:
            await registry.unload(name, *numbers)
            return json_reply({"status": f'Model "{name}" unregistered'})
        case "PUT", ["models", name, number, "set-default"]:
            registry.change(name, {"default": number})
            return json_reply({"status": f'Default version successfully updated for model "{name}" to "{number}"'})
        case "PUT", ["models", name, *numbers] if len(numbers) < 2:
            return await _scale(call, name, *numbers)
    return None


async def _register(call: Call) -> Reply:
    query = call.query()
    wanted = query.get("url", "")
    if "/" in wanted or "\\" in wanted or ":" in wanted or not wanted:
        raise Refusal(400, "url names a package of the store; addresses and paths are not taken")
    named = {"initial_workers": "workers", "batch_size": "max_rows", "max_batch_delay": "delay_ms"}
    # No workers at first is TorchServe's way to say: later.
    changed = {ours: _number(query, name, 1) for name, ours in named.items() if query.get(name, "0") != "0"}
    loaded = await call.registry.load_named(query.get("model_name") or wanted.removesuffix(".zip"), changed=changed)
    manifest, count = loaded.package.manifest, loaded.settings.workers
    text = f'Model "{manifest.name}" Version: {manifest.version} registered with {count} initial workers'
    return json_reply({"status": text})


async def _scale(call: Call, name: str, number: str | None = None) -> Reply:
    """At least ``min_worker`` and at most ``max_worker`` workers. Without ``synchronous`` the answer comes at once."""
    registry, query = call.registry, call.query()
    least = _number(query, "min_worker", 1)
    most = _number(query, "max_worker", least)
    if not 1 <= least <= most:
        raise Refusal(400, "min_worker is 1 or more and max_worker no less; to have no worker, unregister the model")
    count = min(max(registry.find_version(name, number).settings.workers, least), most)
    registry.share(name, number, count)  # what cannot be is said now, also to those who do not wait
    if query.get("synchronous", "").lower() != "true":
        registry.later(_scaled(registry, name, number, count))
        return json_reply({"status": "Processing worker updates..."}, 202)
    await registry.scale(name, number, count)
    version = f", version: {number}" if number else ""
    return json_reply({"status": f"Workers scaled to {count} for model: {name}{version}"})


async def _scaled(registry: Registry, name: str, number: str | None, count: int) -> None:
    try:
        await registry.scale(name, number, count)
    except Refusal as error:
        log.error("%s was not scaled to %d workers: %s", name, count, error.reason)


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, str(default))
    if not re.fullmatch(r"\d{1,4}", text, re.ASCII):
        raise Refusal(400, f"{name} is a number")
    return int(text)


def _described(name: str, pool: Pool) -> dict[str, Any]:
    workers = [
        {"id": str(worker.index),
         "startTime": datetime.fromtimestamp(worker.started_at, UTC).isoformat(timespec="milliseconds"),
         "memoryUsage": worker.rss, "pid": worker.pid, "status": "READY" if worker.ready else "UNREADY",
         "gpu": worker.device != "cpu"}
        for worker in pool.workers
    ]  # fmt: skip
    count = pool.settings.workers
    return {
        "modelName": name, "modelVersion": pool.package.manifest.version, "modelUrl": name, "engine": "Torch",
        "runtime": "python", "minWorkers": count, "maxWorkers": count, "batchSize": pool.settings.max_rows,
        "maxBatchDelay": int(pool.settings.delay_ms), "loadedAtStartup": True, "workers": workers,
        "jobQueueStatus": {
            "remainingCapacity": max(0, pool.settings.max_queue_rows - pool.waiting_rows),
            "pendingRequests": pool.queue.requests,
        },
    }  # fmt: skip
