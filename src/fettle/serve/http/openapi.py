"""The parts of the OpenAPI document, which each protocol fills with its own paths, and the document as a page."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

OBJECT = {"type": "object"}
_JSON = "application/json"


def ref(name: str) -> dict[str, str]:
    """A schema of the document's components."""
    return {"$ref": f"#/components/schemas/{name}"}


_ERROR = {
    "description": "refused or failed",
    "content": {_JSON: {"schema": {"anyOf": [ref("Error"), ref("TorchServeError"), ref("OpenAIError")]}}},
}


def operation(
    text: str, body: Mapping[str, Any] | None = None, answer: Mapping[str, Any] = OBJECT, kind: str = _JSON
) -> dict[str, Any]:
    """One method of a path, for which `text` says what it does."""
    described: dict[str, Any] = {
        "summary": text,
        "responses": {"200": {"description": "done", "content": {kind: {"schema": answer}}}, "default": _ERROR},
    }
    if body is not None:
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": body}}}
        if "inputs" in body.get("properties", {}):  # raw tensors may follow the JSON, in request and answer
            raw = {"schema": {"type": "string", "format": "binary"}}
            described["requestBody"]["content"]["application/octet-stream"] = raw
            described["responses"]["200"]["content"]["application/octet-stream"] = raw
    return described


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
