"""What can be called, as an OpenAPI document, and as a page for people."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

import msgspec

from fettle.package.handlers import generate
from fettle.serve.http.generation import Text, generates
from fettle.serve.http.protocol import Outputs
from fettle.serve.http.reply import Error, TorchServeError

if TYPE_CHECKING:
    from fettle.serve.engine.registry import Registry, Version

_OBJECT = {"type": "object"}
_JSON = "application/json"
_ERROR = {
    "description": "refused or failed",
    "content": {_JSON: {"schema": {"anyOf": [{"$ref": "#/components/schemas/Error"},
                                             {"$ref": "#/components/schemas/TorchServeError"}]}}},
}  # fmt: skip
_SCHEMAS: dict[str, Any] = msgspec.json.schema_components(
    (Error, TorchServeError, Outputs, generate.Prompt, Text), ref_template="#/components/schemas/{name}"
)[1]


def openapi(registry: Registry, version: str) -> dict[str, Any]:
    """What can be called, for the models that are served now."""
    paths: dict[str, Any] = {
        "/v2": {"get": _operation("The server")},
        "/v2/health/live": {"get": _operation("Is the server alive?")},
        "/v2/health/ready": {"get": _operation("Are all models ready?")},
        "/v2/models": {"get": _operation("The models")},
        "/v2/models/stats": {"get": _operation("Statistics of all models")},
        "/v2/repository/index": {"post": _operation("Models, versions and their states", answer={"type": "array"})},
        "/ping": {"get": _operation("TorchServe's health check")},
        "/metrics": {"get": _operation("Prometheus metrics", kind="text/plain", answer={"type": "string"})},
    }
    for name in sorted(registry.models):
        versions = list(registry.models[name].versions.values())
        paths[f"/v2/models/{name}"] = {"get": _operation(f"Inputs and outputs of {name}")}
        paths[f"/v2/models/{name}/ready"] = {"get": _operation(f"Is {name} ready?")}
        paths[f"/v2/models/{name}/config"] = {"get": _operation(f"How {name} batches")}
        paths[f"/v2/models/{name}/stats"] = {"get": _operation(f"Statistics of {name}")}
        tensors = _tensors(versions[0]) if versions else _OBJECT
        answer = {"$ref": "#/components/schemas/Outputs"}
        paths[f"/v2/models/{name}/infer"] = {"post": _operation(f"Call {name} with tensors", tensors, answer)}
        if any(made.pool.explains for made in versions):
            text = f"What moved {name}'s answer"
            paths[f"/v2/models/{name}/explain"] = {"post": _operation(text, tensors, answer)}
            paths[f"/explanations/{name}"] = {"post": _operation(f"{text} to a body", _OBJECT, {})}
        if any(generates(made) for made in versions):
            prompt, whole = {"$ref": "#/components/schemas/Prompt"}, {"$ref": "#/components/schemas/Text"}
            paths[f"/v2/models/{name}/generate"] = {"post": _operation(f"Text that {name} generates", prompt, whole)}
            paths[f"/v2/models/{name}/generate_stream"] = {
                "post": _operation("The same as it comes, as server-sent events", prompt, {}, "text/event-stream")
            }
        paths[f"/predictions/{name}"] = {"post": _operation(f"Call {name}'s handler with a body", {}, {}, "*/*")}
    info = {"title": "fettle", "version": version}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": _SCHEMAS}}


def page(document: Mapping[str, Any]) -> bytes:
    """The document as a page for people: no scripts, nothing from elsewhere."""
    rows = [
        f"<tr><td>{method.upper()}<td><code>{escape(path)}</code><td>{escape(call['summary'])}"
        for path, calls in document["paths"].items()
        for method, call in calls.items()
    ]
    style = (
        ":root{color-scheme:light dark}body{font:16px system-ui;margin:2em auto;max-width:60em;padding:0 1em}"
        "td{padding:.3em 1em .3em 0;vertical-align:top}td:first-child{white-space:nowrap}"
        "code{overflow-wrap:anywhere}@media(max-width:40em){td,tr{display:block;padding:0}tr{margin:0 0 1em}}"
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>fettle</title><style>{style}</style>"
        f"<h1>fettle serves</h1><table>{''.join(rows)}</table>"
        "<p>Tensors by the Open Inference Protocol v2; machine-readable: <code>/openapi.json</code>."
    ).encode()


def _operation(
    text: str, body: Mapping[str, Any] | None = None, answer: Mapping[str, Any] = _OBJECT, kind: str = _JSON
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "summary": text,
        "responses": {"200": {"description": "done", "content": {kind: {"schema": answer}}}, "default": _ERROR},
    }
    if body is not None:
        found["requestBody"] = {"required": True, "content": {_JSON: {"schema": body}}}
        if "inputs" in body.get("properties", {}):  # raw tensors may follow the JSON, in request and answer
            raw = {"schema": {"type": "string", "format": "binary"}}
            found["requestBody"]["content"]["application/octet-stream"] = raw
            found["responses"]["200"]["content"]["application/octet-stream"] = raw
    return found


def _tensors(version: Version) -> dict[str, Any]:
    """The body of an inference request for this model."""
    inputs = [
        {
            "type": "object", "required": ["name", "shape", "datatype", "data"],
            "properties": {
                "name": {"const": spec.name}, "datatype": {"const": spec.datatype}, "data": {"type": "array"},
                "shape": {"type": "array", "minItems": len(spec.shape), "maxItems": len(spec.shape),
                          "items": {"type": "integer", "minimum": 1}},
            },
        }
        for spec in version.pool.specs
    ]  # fmt: skip
    return {
        "type": "object", "required": ["inputs"],
        "properties": {
            "id": {"type": "string"}, "parameters": _OBJECT,
            "inputs": {"type": "array", "minItems": len(inputs), "maxItems": len(inputs), "items": {"anyOf": inputs}},
        },
    }  # fmt: skip
