"""Handlers: from the bytes that a client sends to tensors, and back. Four steps, as in TorchServe.

A handler has ``initialize(context)``, ``preprocess(requests)``, ``inference(data)`` and ``postprocess(answers)``.
``requests`` is a list of ``{"body": bytes, "type": content type}``; ``postprocess`` returns as many answers, each
bytes, text or something that JSON can say. `TensorHandler` serves where a package has no ``handler.py`` of its own.

A package's ``handler.py`` is code: it runs only where the operator named its SHA-256.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fettle.errors import UsageError
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


class TensorHandler:
    """JSON in, JSON out: an array for the only input, or an object of arrays by the inputs' names.

    An array with the dimensions of one row stands for one row. The answer is the only output's array, or an object.
    """

    def initialize(self, context: Context) -> None:
        """Keep the runner."""
        self.runner = context.runner
        self.inputs, self.outputs = context.manifest.inputs, context.manifest.outputs

    def preprocess(self, requests: Sequence[dict[str, Any]]) -> list[list[Any]]:
        """The arrays of every request."""
        return [self._arrays(request["body"]) for request in requests]

    def inference(self, data: list[list[Any]]) -> list[list[Any]]:
        """One call where all requests are alike, else one for each."""
        shapes = {tuple(array.shape[1:] for array in arrays) for arrays in data}
        if len(shapes) > 1 or not all(spec.batched for spec in (*self.inputs, *self.outputs)):
            return [self.runner.run([arrays], 0) for arrays in data]
        answers, place, found = self.runner.run(data, 0), 0, []
        for arrays in data:
            rows = len(arrays[0])
            found.append([answer[place : place + rows] for answer in answers])
            place += rows
        return found

    def postprocess(self, answers: list[list[Any]]) -> list[Any]:
        """Plain lists."""
        if len(self.outputs) == 1:
            return [answer[0].tolist() for answer in answers]
        names = [spec.name for spec in self.outputs]
        return [{name: array.tolist() for name, array in zip(names, a, strict=True)} for a in answers]

    def _arrays(self, body: bytes) -> list[Any]:
        try:
            said = msgspec.json.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError("the body is no JSON") from error
        if isinstance(said, dict) and "instances" in said:  # the form of TensorFlow Serving and KServe v1
            said = said["instances"]
        if not isinstance(said, dict):
            if len(self.inputs) != 1:
                names = ", ".join(spec.name for spec in self.inputs)
                raise UsageError(f"the model has several inputs: give an object with {names}")
            said = {self.inputs[0].name: said}
        arrays = []
        for spec in self.inputs:
            if spec.name not in said:
                raise UsageError(f"the input {spec.name} is missing")
            try:
                array = np.asarray(said[spec.name], dtype=spec.kind)
            except (ValueError, TypeError, OverflowError) as error:
                raise UsageError(f"the input {spec.name} is no array of {spec.datatype}") from error
            if spec.batched and array.ndim == len(spec.shape) - 1:
                array = array[None]
            if not spec.fits(array.shape) or 0 in array.shape:
                raise UsageError(f"the input {spec.name} has shape {list(array.shape)}; {list(spec.shape)} is wanted")
            arrays.append(array)
        rows = {len(a) for a, spec in zip(arrays, self.inputs, strict=True) if spec.batched}
        if len(rows) > 1:
            raise UsageError("the inputs differ in their number of rows")
        return arrays


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
    """The package's handler if `trust` is its digest, or the one for tensors where it has none."""
    digest = package.handler_digest
    if digest is None:
        handler: Any = TensorHandler()
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
