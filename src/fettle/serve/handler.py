"""Handlers: from the bytes that a client sends to tensors, and back. Four steps, as in TorchServe.

A handler has ``initialize(context)``, ``preprocess(requests)``, ``inference(data)`` and ``postprocess(answers)``.
``requests`` is a list of ``{"body": bytes, "type": content type}``; ``postprocess`` returns as many answers, each
bytes, text or something that JSON can say.

Ready handlers (`fettle.serve.handlers`) are fettle's own code with settings from the manifest; the one for tensors
serves where a package names none. A package's ``handler.py`` is code: it runs only where the operator named its
SHA-256.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fettle.errors import UsageError
from fettle.serve import handlers
from fettle.serve.package import HANDLER, Manifest, Package
from fettle.serve.runner import Runner


@dataclass
class Context:
    """What a handler may know: the package's folder and manifest, and the model as a runner."""

    folder: Path
    manifest: Manifest
    runner: Runner
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers that the handler wants to be seen as gauges."""


@dataclass
class Steps:
    """A handler, called with bodies and answering bodies."""

    handler: Any

    def handle(self, bodies: Sequence[bytes], kinds: Sequence[str]) -> list[tuple[bytes, str]]:
        """The four steps for a batch of requests; as many answers, with their content types."""
        requests = [{"body": body, "type": kind} for body, kind in zip(bodies, kinds, strict=True)]
        answers = self.handler.postprocess(self.handler.inference(self.handler.preprocess(requests)))
        if len(answers) != len(bodies):
            raise RuntimeError(f"the handler answered {len(answers)} of {len(bodies)} requests")
        return [_as_body(answer) for answer in answers]


def find_handler(package: Package, runner: Runner, trust: str) -> Steps:
    """The ready handler that the manifest names, or the package's own code if `trust` is its digest."""
    digest = package.handler_digest
    if digest is None:
        handler: Any = handlers.make(package.manifest.handler or handlers.tensors.Settings())
    elif digest != trust:
        raise UsageError(f"{package.manifest.name} brings code of its own; to let it run, start with --trust {digest}")
    else:
        spec = importlib.util.spec_from_file_location(f"fettle_handler_{digest[:8]}", package.folder / HANDLER)
        if spec is None or spec.loader is None:
            raise UsageError(f"{HANDLER} cannot be read")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        made = getattr(module, "Handler", None)
        if made is None:
            raise UsageError(f"{HANDLER} defines no class Handler")
        handler = made()
    handler.initialize(Context(package.folder, package.manifest, runner))
    return Steps(handler)


def _as_body(answer: Any) -> tuple[bytes, str]:
    if isinstance(answer, (bytes, bytearray)):
        return bytes(answer), "application/octet-stream"
    if isinstance(answer, str):
        return answer.encode(), "text/plain; charset=utf-8"
    return msgspec.json.encode(answer), "application/json"
