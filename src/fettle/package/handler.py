"""Handlers: from the bytes that a client sends to tensors, and back. Four steps, as in TorchServe.

A handler has ``initialize(context)``, ``preprocess(requests)``, ``inference(data)`` and ``postprocess(answers)``.
``requests`` is a list of ``{"body": bytes, "type": content type}``; ``postprocess`` returns as many answers, each
bytes, text or something that JSON can say.

Ready handlers (`fettle.package.handlers`) are fettle's own code with settings from the manifest; the one for tensors
serves where a package names none. A package's ``handler.py`` is code: it runs only where the operator named its
SHA-256.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from fettle.errors import UsageError
from fettle.files import read_bytes
from fettle.package import handlers
from fettle.package.handlers.parts import Item
from fettle.package.handlers.running import Running
from fettle.package.manifest import HANDLER, Manifest, Package, check_trust
from fettle.package.model_runner import ModelRunner

_METRIC = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,63}")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
_MOST = 256


class HandlerMetrics:
    """A handler's own numbers, with the calls of TorchServe's ``context.metrics``.

    Counters and times add up over the workers; sizes and percents show the last value. They are seen in ``/metrics`` as
    ``fettle_handler_events_total``, ``fettle_handler_seconds`` and ``fettle_handler_value``, by name. `idx` and
    `dimensions` are taken for TorchServe's sake and not kept.
    """

    def __init__(self) -> None:
        self._values: list[tuple[str, str, float]] = []

    def add_counter(self, name: str, value: float = 1, idx: Any = None, dimensions: Any = None) -> None:
        """Count more of something."""
        self._add("counter", name, value)

    def add_error(self, name: str, value: float = 1, dimensions: Any = None) -> None:
        """Count more of something that went wrong."""
        self._add("counter", name, value)

    def add_time(self, name: str, value: float, idx: Any = None, unit: str = "ms", dimensions: Any = None) -> None:
        """Something took this long: `unit` is s, ms, us or ns."""
        self._add("seconds", name, value * _SECONDS[unit])

    def add_size(self, name: str, value: float, idx: Any = None, unit: str = "MB", dimensions: Any = None) -> None:
        """Something is this large: `unit` is B, kB, MB or GB; shown in bytes."""
        self._add("value", name, value * _BYTES[unit])

    def add_percent(self, name: str, value: float, idx: Any = None, dimensions: Any = None) -> None:
        """A share, in percent."""
        self._add("value", name, value)

    def take(self) -> list[tuple[str, str, float]]:
        """What was counted since the last time: kind, name, value."""
        values, self._values = self._values, []
        return values

    def _add(self, kind: str, name: str, value: float) -> None:
        if not _METRIC.fullmatch(name) or not math.isfinite(value) or (kind != "value" and value < 0):
            raise ValueError(f"not a metric: {name[:80]!r} = {value}")
        if len(self._values) < _MOST:  # of one call; more is a mistake, and must not grow for ever
            self._values.append((kind, name, float(value)))


@dataclass
class Context:
    """What a handler may know: the package's folder and manifest, and the model as a runner."""

    folder: Path
    manifest: Manifest
    runner: ModelRunner
    metrics: HandlerMetrics = field(default_factory=HandlerMetrics)
    """What the handler counts, for ``/metrics``."""


@dataclass
class Steps:
    """A handler, called with bodies and answering bodies."""

    handler: Any
    metrics: HandlerMetrics
    took: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Seconds of the last `handle`: before the model, in it, and after it."""

    def _explained(self, data: Any, explainer: Any) -> list[Any]:
        """By the handler's own ``explain(data, explainer)``; else the attributions of the first input that has any."""
        own = getattr(self.handler, "explain", None)
        if own is not None:
            return list(own(data, explainer))
        if not all(isinstance(item, Item) for item in data):
            raise UsageError("the model's handler has no step explain(data, explainer)")
        attributions = [explainer.attribute(item.arrays) for item in data]
        return [next((a for a in arrays if a.any()), arrays[0]).tolist() for arrays in attributions]

    def running(self, rows: int, cache_bytes: int, prefill_tokens: int) -> Running | None:
        """The texts that a generating model writes together; None for other models. Raises `UsageError`."""
        if not isinstance(self.handler, handlers.generate.Handler):
            return None
        return Running(self.handler, rows, cache_bytes, prefill_tokens)

    def handle(self, bodies: Sequence[bytes], kinds: Sequence[str], explainer: Any = None) -> list[tuple[bytes, str]]:
        """The four steps for a batch of requests; as many answers, with their content types.

        With an `explainer` what moved each answer instead, in the place of the last two steps. Raises `UsageError`.
        """
        requests = [{"body": body, "type": kind} for body, kind in zip(bodies, kinds, strict=True)]
        began = time.perf_counter()
        data = self.handler.preprocess(requests)
        ready = time.perf_counter()
        found = self.handler.inference(data) if explainer is None else self._explained(data, explainer)
        done = time.perf_counter()
        answers = self.handler.postprocess(found) if explainer is None else found
        self.took = (ready - began, done - ready, time.perf_counter() - done)
        if len(answers) != len(bodies):
            raise RuntimeError(f"the handler answered {len(answers)} of {len(bodies)} requests")
        return [_as_body(answer) for answer in answers]


def find_handler(package: Package, runner: ModelRunner, trust: str) -> Steps:
    """The ready handler that the manifest names, or the package's own code if `trust` is its digest."""
    digest = package.handler_digest
    if digest is None:
        handler: Any = handlers.make(package.manifest.handler or handlers.tensors.Settings())
    else:
        check_trust(package, [trust])
        handler = _run(package.folder / HANDLER, digest)
    context = Context(package.folder, package.manifest, runner)
    handler.initialize(context)
    return Steps(handler, context.metrics)


def _run(path: Path, digest: str) -> Any:
    """The handler that this source makes, and no other: Python's own import would run bytecode that lies beside it."""
    source = read_bytes(path)
    if hashlib.sha256(source).hexdigest() != digest:
        raise UsageError(f"{path} was changed: its SHA-256 is not the manifest's")
    module = ModuleType(f"fettle_handler_{digest[:8]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # data classes look their own module up
    exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    made = getattr(module, "Handler", None)
    if made is None:
        raise UsageError(f"{HANDLER} defines no class Handler")
    return made()


def _as_body(answer: Any) -> tuple[bytes, str]:
    if isinstance(answer, (bytes, bytearray)):
        return bytes(answer), "application/octet-stream"
    if isinstance(answer, str):
        return answer.encode(), "text/plain; charset=utf-8"
    return msgspec.json.encode(answer), "application/json"
