"""What changes the served models while the server runs: load, unload, default, weights, shadow, batching."""

from __future__ import annotations

from typing import Any

from fettle.serve.engine.refusal import Refusal
from fettle.serve.engine.registry import Registry
from fettle.serve.http.call import Call
from fettle.serve.http.reply import Reply, json_reply


async def manage(call: Call) -> Reply | None:
    """The repository extension's load and unload, and ``/admin/models/NAME``."""
    registry = call.registry
    match call.method, call.parts:
        case "POST", ["v2", "repository", "models", name, "load"]:
            # Triton takes a configuration and whole files here: code from whoever can reach the port. We do not.
            if call.json().get("parameters"):
                raise Refusal(400, "load takes no parameters: models come from the store as they are")
            await registry.load_named(name)
            return json_reply({})
        case "POST", ["v2", "repository", "models", name, "unload"]:
            await registry.unload(name)
            return json_reply({})
        case "PUT", ["admin", "models", name]:
            registry.change(name, call.json())
            return json_reply(_described(name, registry))
        case "GET", ["admin", "models", name]:
            registry.choose(name)
            return json_reply(_described(name, registry))
    return None


def _described(name: str, registry: Registry) -> dict[str, Any]:
    model = registry.models[name]
    return {
        "name": name, "default": model.default, "weights": model.weights, "shadow": model.shadow,
        "versions": {
            number: {
                "state": version.state, "workers": version.settings.workers,
                "max_rows": version.settings.max_rows, "delay_ms": version.settings.delay_ms,
                "recipe": version.package.manifest.recipe, "accuracy": version.package.manifest.accuracy,
            }
            for number, version in model.versions.items()
        },
    }  # fmt: skip
