"""What the server says of itself: metrics, and the page and document of what can be called."""

from __future__ import annotations

from typing import Any

import msgspec
from prometheus_client import generate_latest

from fettle import __version__
from fettle.serve.engine.registry import Registry
from fettle.serve.http import generation, oip, openai, torchserve
from fettle.serve.http.call import Call
from fettle.serve.http.openapi import operation, page
from fettle.serve.http.protocol import Outputs
from fettle.serve.http.reply import Error, OpenAIError, Reply, TorchServeError, json_reply

_SCHEMAS: dict[str, Any] = msgspec.json.schema_components(
    (Error, TorchServeError, OpenAIError, Outputs, generation.Prompt, generation.Text, openai.Completions, openai.Chat),
    ref_template="#/components/schemas/{name}",
)[1]
_NO_SCRIPTS = (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'")


async def read(call: Call) -> Reply | None:
    """``/metrics``, ``/openapi.json`` and ``/docs``."""
    match call.method, call.parts:
        case "GET", ["metrics"]:
            return Reply(200, _metrics(call.registry), b"text/plain; version=0.0.4; charset=utf-8")
        case ("GET", ["openapi.json"]) | ("OPTIONS", []):
            return json_reply(document(call.registry))
        case "GET", ([] | ["docs"]):
            html = page(document(call.registry))
            return Reply(200, html, b"text/html; charset=utf-8", (_NO_SCRIPTS,))
    return None


def document(registry: Registry) -> dict[str, Any]:
    """What can be called, for the models that are served now, by OpenAPI 3.1."""
    paths = {"/metrics": {"get": operation("Prometheus metrics", kind="text/plain", answer={"type": "string"})}}
    for protocol in (oip, generation, openai, torchserve):
        paths |= protocol.paths(registry)
    info = {"title": "fettle", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": _SCHEMAS}}


def _metrics(registry: Registry) -> bytes:
    every = registry.metrics
    for gauge in (every.queue_rows, every.inflight, every.worker_bytes):
        gauge.clear()  # of models and workers that are no more
    for name, number, version in registry.versions():
        every.queue_rows.labels(name, number).set(version.waiting_rows)
        every.inflight.labels(name, number).set(version.inflight)
        for worker in version.workers:
            every.worker_bytes.labels(name, number, str(worker.index)).set(worker.rss)
    return generate_latest(every.registry)
