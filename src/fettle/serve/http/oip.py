"""The Open Inference Protocol v2: inference, and what can be read of models. `protocol` has its bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from fettle import __version__
from fettle.package.tensors import TensorSpec
from fettle.serve.engine.pool import Pool
from fettle.serve.engine.refusal import Malformed, Refusal
from fettle.serve.engine.registry import Registry
from fettle.serve.engine.request import Request
from fettle.serve.http import protocol
from fettle.serve.http.aside import LARGE, aside
from fettle.serve.http.call import Call
from fettle.serve.http.openapi import OBJECT, operation, ref
from fettle.serve.http.reply import Reply, json_reply

EXTENSIONS = ["generate", "binary_tensor_data", "model_repository", "model_configuration", "statistics"]


async def infer(call: Call) -> Reply | None:
    """``POST /v2/models/NAME[/versions/V]/infer`` and ``/explain``."""
    match call.method, call.model_path:
        case "POST", (name, number, ["infer" | "explain" as what]):
            explain = what == "explain"
        case _:
            return None
    pool = call.choose(name, number)
    pool.admit()
    json_bytes = _header_length(call)
    size = len(call.sent) if json_bytes is None else json_bytes
    read = partial(protocol.read_request, call.sent, json_bytes, pool.specs, pool.output_specs, pool.settings.max_rows)
    inference = read() if size < LARGE else await aside(size, read)  # no coroutine for each small request
    if pool.closing:  # a version of the same number took its place while the body was read
        newer = call.choose(name, number)
        if (newer.specs, newer.output_specs) == (pool.specs, pool.output_specs):
            pool = newer
    key = _key(inference, pool.specs)
    request = Request(inference.rows, key, inference.arrays, gone=call.gone, explain=explain)
    if explain:
        request.target = _target(inference.parameters)
    answer = pool.submit(request, inference.timeout_s)
    shadow = call.registry.shadow_of(name, pool)
    if shadow is not None and not explain:
        call.registry.later(_shadowed(shadow, inference, key))
    answered = await answer
    if explain:  # an attribution for each input, called and shaped as that is
        binary = inference.parameters.get("binary_data_output") is True
        outputs = [(spec, array, binary) for spec, array in zip(pool.attribution_specs, answered.outputs, strict=True)]
    else:
        outputs = [(pool.output_specs[index], answered.outputs[index], binary) for index, binary in inference.wanted]
    manifest = pool.package.manifest
    size = sum([array.nbytes for _, array, binary in outputs if not binary])
    write = partial(protocol.write_answer, inference.id, manifest.name, manifest.version, outputs)
    body, json_length = write() if size < LARGE else await aside(size, write)
    if json_length is None:
        return Reply(200, body, answer=answered)
    more = ((b"inference-header-content-length", str(json_length).encode()),)
    return Reply(200, body, b"application/octet-stream", more, answered)


def _header_length(call: Call) -> int | None:
    length = call.headers.get(b"inference-header-content-length")
    if length is None:
        return None
    if not length.isdigit() or len(length) > 11:
        raise Malformed("Inference-Header-Content-Length is not a number")
    return int(length)


def _key(inference: protocol.Inference, specs: Sequence[TensorSpec]) -> Hashable:
    """Requests with equal keys may share a call: the same shapes but for the rows, and the same unbatched values."""
    key: list[Any] = []
    for array, spec in zip(inference.arrays, specs, strict=True):
        key.append(array.shape[1:] if spec.batched else (array.shape, array.tobytes()))
    return tuple(key)


def _target(parameters: Mapping[str, Any]) -> int:
    """Which element of the first output to explain; -1, the largest, where nothing is said."""
    target = parameters.get("target", -1)
    if not isinstance(target, int) or isinstance(target, bool) or not -1 <= target < 1 << 31:
        raise Malformed("the parameter target is the number of an element of the first output")
    return target


class _Index(msgspec.Struct):
    """What a client may ask of the index. Whatever else it sends is skipped, and not made into objects."""

    ready: bool = False


def _wanted(body: bytes) -> _Index:
    try:
        return msgspec.json.decode(body or b"{}", type=_Index)
    except (ValueError, RecursionError):
        raise Malformed('the body must be a JSON object in which "ready" is true or false') from None


async def _shadowed(pool: Pool, inference: protocol.Inference, key: Hashable) -> None:
    with contextlib.suppress(Refusal):
        await pool.submit(Request(inference.rows, key, inference.arrays))


# -- what can be read -------------------------------------------------------------------------------------------------


async def read(call: Call) -> Reply | None:
    """The server's and the models' health, metadata, configuration and statistics."""
    registry = call.registry
    match call.method, call.parts:
        case "GET", ["v2"]:
            return json_reply({"name": "fettle", "version": __version__, "extensions": EXTENSIONS})
        case "GET", ["v2", "health", "live"]:
            return json_reply({"live": True})
        case "GET", ["v2", "health", "ready"]:
            if not registry.ready:
                return json_reply({"error": "not ready", "ready": False, "live": True}, 503)
            return json_reply({"ready": True, "live": True})
        case "GET", ["v2", "models"]:
            return json_reply({"models": sorted(registry.models)})
        case "GET", ["v2", "models", "stats"]:
            return json_reply({"model_stats": [_statistics(*row) for row in registry.versions()]})
        case "POST", ["v2", "repository", "index"]:
            index = registry.index()
            if _wanted(call.sent).ready:
                index = [entry for entry in index if entry[2] == "READY"]
            return json_reply(
                [dict(zip(("name", "version", "state", "reason"), entry, strict=True)) for entry in index]
            )
        case "POST", ["v2", "repository", "models", _, "load" | "unload"]:
            raise Refusal(403, "models are loaded and unloaded on the management port")
    match call.method, call.model_path:
        case "GET", (name, number, []):
            pool, numbers = registry.choose(name, number), sorted(registry.models[name].versions)
            return json_reply(protocol.metadata(name, numbers, pool.specs, pool.output_specs))
        case "GET", (name, number, ["ready"]):
            if not registry.choose(name, number).ready:
                return json_reply({"error": f"the model {name} is not ready", "name": name, "ready": False}, 503)
            return json_reply({"name": name, "ready": True})
        case "GET", (name, number, ["config"]):
            return json_reply(_configuration(name, registry.choose(name, number)))
        case "GET", (name, number, ["stats"]):
            registry.choose(name, number)
            rows = [row for row in registry.versions() if row[0] == name and number in (None, row[1])]
            return json_reply({"model_stats": [_statistics(*row) for row in rows]})
    return None


def _statistics(name: str, number: str, version: Pool) -> dict[str, Any]:
    metrics = version.metrics
    calls, requests = metrics.model.count, metrics.requests.count

    def row(count: int, seconds: float) -> dict[str, int]:
        return {"count": count, "ns": int(seconds * 1e9)}

    batches = [
        {"batch_size": rows, "compute_input": row(calls, join_s), "compute_infer": row(calls, model_s),
         "compute_output": row(calls, 0)}
        for rows, (calls, join_s, model_s) in sorted(metrics.by_size.items())
    ]  # fmt: skip
    return {
        "name": name, "version": number, "last_inference": version.last_ms, "inference_count": int(metrics.rows.sum),
        "execution_count": calls,
        "inference_stats": {
            "success": row(requests, metrics.requests.sum), "fail": row(metrics.failed, 0),
            "queue": row(requests, metrics.queue.sum), "compute_input": row(calls, metrics.join.sum + metrics.pre.sum),
            "compute_infer": row(calls, metrics.model.sum), "compute_output": row(calls, metrics.post.sum),
        },
        "batch_stats": batches,
    }  # fmt: skip


def _configuration(name: str, pool: Pool) -> dict[str, Any]:
    batched = all(spec.batched for spec in (*pool.specs, *pool.output_specs))

    def tensor(spec: TensorSpec) -> dict[str, Any]:
        dims = spec.shape[1:] if batched else spec.shape
        return {"name": spec.name, "data_type": f"TYPE_{spec.datatype}", "dims": list(dims)}

    return {
        "name": name, "platform": "pytorch_fettle", "backend": "fettle",
        "max_batch_size": pool.settings.max_rows if batched else 0,
        "input": [tensor(spec) for spec in pool.specs], "output": [tensor(spec) for spec in pool.output_specs],
        "dynamic_batching": {"max_queue_delay_microseconds": int(pool.settings.delay_ms * 1e3)},
    }  # fmt: skip


# -- for the document -------------------------------------------------------------------------------------------------


def paths(registry: Registry) -> dict[str, Any]:
    """What can be called by this protocol, for the models that are served now."""
    entries: dict[str, Any] = {
        "/v2": {"get": operation("The server")},
        "/v2/health/live": {"get": operation("Is the server alive?")},
        "/v2/health/ready": {"get": operation("Are all models ready?")},
        "/v2/models": {"get": operation("The models")},
        "/v2/models/stats": {"get": operation("Statistics of all models")},
        "/v2/repository/index": {"post": operation("Models, versions and their states", answer={"type": "array"})},
    }
    for name, model in sorted(registry.models.items()):
        base, versions = f"/v2/models/{name}", list(model.versions.values())
        entries[base] = {"get": operation(f"Inputs and outputs of {name}")}
        entries[f"{base}/ready"] = {"get": operation(f"Is {name} ready?")}
        entries[f"{base}/config"] = {"get": operation(f"How {name} batches")}
        entries[f"{base}/stats"] = {"get": operation(f"Statistics of {name}")}
        tensors = _tensors(versions[0]) if versions else OBJECT
        entries[f"{base}/infer"] = {"post": operation(f"Call {name} with tensors", tensors, ref("Outputs"))}
        if any(made.explains for made in versions):
            entries[f"{base}/explain"] = {"post": operation(f"What moved {name}'s answer", tensors, ref("Outputs"))}
    return entries


def _tensors(version: Pool) -> dict[str, Any]:
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
        for spec in version.specs
    ]  # fmt: skip
    return {
        "type": "object", "required": ["inputs"],
        "properties": {
            "id": {"type": "string"}, "parameters": OBJECT,
            "inputs": {"type": "array", "minItems": len(inputs), "maxItems": len(inputs), "items": {"anyOf": inputs}},
        },
    }  # fmt: skip
