"""The handler for tensors, used where a package names no other: JSON in, JSON out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from fettle.errors import UsageError
from fettle.package.handlers.parts import Array, Item, ItemHandler
from fettle.package.tensors import TensorSpec


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="tensor"):
    """There are none."""


def suggest(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], files: set[str]) -> Settings:
    """Every model takes tensors."""
    return Settings()


def _as_kind(given: Array, kind: Any) -> Array:
    """The values of JSON as an input takes them. ValueError, TypeError or ArithmeticError where they are none such."""
    large = given.dtype.kind == "O" and {int, float}.issuperset(map(type, given.flat))  # beyond 64 bits
    if kind.kind == "f" and given.dtype.kind not in "iuf" and not large:
        raise ValueError  # null would be NaN, and "1" a number
    with np.errstate(over="raise", invalid="raise"):
        array = given.astype(np.float64 if kind.kind == "f" else kind).astype(kind)  # as `/infer` reads them
    if kind.kind != "f" and not np.array_equal(array, given):
        raise ValueError  # 1.5 would be 1, and any text true
    return array


class Handler(ItemHandler):
    """An array for the only input, or an object of arrays by the inputs' names; the answer alike.

    An array with the dimensions of one row stands for one row.
    """

    def preprocess(self, requests: Sequence[dict[str, Any]]) -> list[Item]:
        return [Item(self._arrays(request["body"])) for request in requests]

    def postprocess(self, answers: list[Item]) -> list[Any]:
        if len(self.outputs) == 1:
            return [answer.arrays[0].tolist() for answer in answers]
        names = [spec.name for spec in self.outputs]
        return [{name: array.tolist() for name, array in zip(names, a.arrays, strict=True)} for a in answers]

    def _arrays(self, body: bytes) -> list[Array]:
        try:
            values = msgspec.json.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError("the body is not JSON") from error
        if isinstance(values, dict) and "instances" in values:  # the form of TensorFlow Serving and KServe v1
            values = values["instances"]
        if not isinstance(values, dict):
            if len(self.inputs) != 1:
                names = ", ".join(spec.name for spec in self.inputs)
                raise UsageError(f"the model has several inputs: give an object with {names}")
            values = {self.inputs[0].name: values}
        arrays = []
        for spec in self.inputs:
            if spec.name not in values:
                raise UsageError(f"the input {spec.name} is missing")
            try:
                array = _as_kind(np.asarray(values[spec.name]), spec.kind)
            except (ValueError, TypeError, ArithmeticError) as error:
                raise UsageError(f"the input {spec.name} is not an array of {spec.datatype}") from error
            if spec.batched and array.ndim == len(spec.shape) - 1:
                array = array[None]
            if not spec.fits(array.shape) or 0 in array.shape:
                raise UsageError(f"the input {spec.name} has shape {list(array.shape)}; {list(spec.shape)} is wanted")
            arrays.append(array)
        rows = {len(a) for a, spec in zip(arrays, self.inputs, strict=True) if spec.batched}
        if len(rows) > 1:
            raise UsageError("the inputs differ in their number of rows")
        self.check_rows(max(rows, default=1))
        return arrays
