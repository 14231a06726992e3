"""Tensors as clients name them: the datatypes of the Open Inference Protocol and what numpy calls them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

TO_NUMPY: dict[str, Any] = {
    "BOOL": np.dtype("?"), "UINT8": np.dtype("u1"), "UINT16": np.dtype("<u2"), "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"), "INT8": np.dtype("i1"), "INT16": np.dtype("<i2"), "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"), "FP16": np.dtype("<f2"), "FP32": np.dtype("<f4"), "FP64": np.dtype("<f8"),
}  # fmt: skip
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
