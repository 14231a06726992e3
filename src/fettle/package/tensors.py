"""Tensors as clients name them: the datatypes of the Open Inference Protocol and what numpy calls them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

TO_NUMPY: dict[str, Any] = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
    "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64,
    "FP16": np.float16, "FP32": np.float32, "FP64": np.float64,
}  # fmt: skip
TO_NUMPY = {name: np.dtype(kind).newbyteorder("<") for name, kind in TO_NUMPY.items()}
FROM_NUMPY: dict[Any, str] = {kind: name for name, kind in TO_NUMPY.items()}


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Name, datatype and shape of an input or output. -1 is any size; `batched` says that the first is the rows."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    batched: bool = True

    @property
    def kind(self) -> Any:
        """The numpy dtype, little-endian."""
        return TO_NUMPY[self.datatype]

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of that shape may be given here."""
        if len(shape) != len(self.shape):
            return False
        for want, have in zip(self.shape, shape, strict=True):  # noqa: SIM110 # asked of every request
            if want not in (-1, have):
                return False
        return True
