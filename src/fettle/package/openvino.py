"""A model as OpenVINO's own files: a graph in XML and weights beside it, checked before OpenVINO reads them.

Reading them runs no code of theirs: operators are names that OpenVINO knows, and a package cannot bring extensions.
Still a package comes from outside, so the XML must be plain (no document type, entities, comments or instructions),
its operators must be of OpenVINO's own sets and keep nothing from one request to the next, and its constants must lie
inside the weights. What is trusted beyond that is OpenVINO's reader, as torch's is for exported programs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn
from xml.parsers import expat

import torch

from fettle.errors import UsageError, needing, refusing
from fettle.files import read_bytes
from fettle.techniques import (
    Facts,
    OpenvinoRequest,
    cpu_flags,
    int8_part,
    openvino_core,
    openvino_model,
    openvino_precision,
    openvino_saturates,
)

GRAPH, WEIGHTS = "openvino.xml", "openvino.bin"
MAX_GRAPH_BYTES, MAX_DEPTH = 256 << 20, 64
_WEIGHTS = ["fettle", "weights_in_8_bits"]
"""Where the graph says how large they get: ``whole``, or ``small`` enough for CPUs without VNNI."""
_OPERATOR, _SET = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}"), re.compile(r"opset[0-9]{1,2}")
_REMEMBERS = {"ReadValue", "Assign"}
"""Operators that keep a value between calls: one client's tensors in another's answer."""


def save_model(
    program: torch.export.ExportedProgram, level: str, batches: Sequence[Sequence[torch.Tensor]], folder: Path,
    facts: Facts,
) -> None:  # fmt: skip
    """Convert a program, calibrate it on `batches` where `level` is one in int8, and write both files.

    `facts` has what a choice of layers goes by: the limit, or the layers that were chosen before.

    Raises `UsageError` where OpenVINO cannot do it.
    """
    with needing("openvino", "runtime=openvino needs OpenVINO"):
        import openvino
    with refusing("OpenVINO cannot take the model:"):
        model = openvino_model(program, list(batches), level, int8_part(facts))
        for node in ("conversion_parameters", "nncf", "Runtime_version"):  # where and how it was made: paths, settings
            if model.has_rt_info([node]):
                model.set_rt_info("", [node])
        if "int8" in level:
            model.set_rt_info("small" if openvino_saturates() else "whole", _WEIGHTS)
        openvino.save_model(model, str(folder / GRAPH), compress_to_fp16=False)
    _check(folder)  # a package that could not be loaded is refused now


class OpenvinoModel:
    """The stored model on this machine's CPU, for any number of rows: tensors in, a tuple of tensors out."""

    def __init__(self, folder: Path, level: str) -> None:
        _check(folder)
        config = {
            "INFERENCE_PRECISION_HINT": openvino_precision(level, cpu_flags()),
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "PERFORMANCE_HINT": "LATENCY",
        }
        with refusing("OpenVINO cannot read the package's model:"), needing("openvino", "the package needs OpenVINO"):
            core = openvino_core()
            model = core.read_model(str(folder / GRAPH), str(folder / WEIGHTS))
            small = model.has_rt_info(_WEIGHTS) and model.get_rt_info(_WEIGHTS).astype(str) == "small"
            if "int8" in level and not small and openvino_saturates():
                raise UsageError(
                    "the package's weights in 8 bits were made for CPUs with VNNI, and this one has none: sums of its "
                    "products would be cut off; package the model on this machine"
                )
            self._request = OpenvinoRequest(core.compile_model(model, "CPU", config))

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One call. Not for two threads at once."""
        return tuple(self._request.answer(tensors))


def _check(folder: Path) -> None:
    """Raise `UsageError` unless the graph is plain XML of known operators whose constants lie in the weights."""
    with refusing(f"the package's {GRAPH} cannot be used:", (OSError, ValueError, expat.ExpatError)):
        text, there = read_bytes(folder / GRAPH, MAX_GRAPH_BYTES), (folder / WEIGHTS).stat().st_size
        if b"\0" in text:
            raise ValueError("it is not text")
        text.decode("utf-8")
        _parse(text, there)


def _parse(text: bytes, weight_bytes: int) -> None:
    parser, depth, layer = expat.ParserCreate("utf-8"), 0, ""

    def refuse(*what: Any) -> NoReturn:
        raise ValueError("document types, comments, instructions and sections may not be in it")

    def begin(name: str, attributes: dict[str, str]) -> None:
        nonlocal depth, layer
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        if depth == 1 and name != "net":
            raise ValueError("it is not a graph of OpenVINO")
        if name == "layer":
            layer, version = attributes.get("type", ""), attributes.get("version", "")
            if not _OPERATOR.fullmatch(layer) or not _SET.fullmatch(version) or layer in _REMEMBERS:
                raise ValueError(f"the operator {layer[:60]!r} of {version[:30]!r} may not be in a package")
        if name == "data" and layer == "Const":
            first, size = _count(attributes.get("offset", "")), _count(attributes.get("size", ""))
            if first + size > weight_bytes:
                raise ValueError("a constant lies outside the weights")

    def end(name: str) -> None:
        nonlocal depth
        depth -= 1

    parser.StartElementHandler, parser.EndElementHandler = begin, end
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = parser.CommentHandler = refuse
    parser.ProcessingInstructionHandler = parser.StartCdataSectionHandler = refuse
    parser.Parse(text, True)


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ValueError(f"not a number of bytes: {text[:30]!r}")
    return int(text)
