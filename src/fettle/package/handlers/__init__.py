"""Ready handlers: bytes to tensors and back for images, texts, detection, generation and plain tensors.

They are fettle's own code and their settings are data in the manifest, so a package that uses one needs no trust.
Each is a module with its `Settings`, a function `suggest`, which reads them off the model's inputs and outputs, and a
`Handler` with the four steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import msgspec

from fettle.errors import UsageError
from fettle.package.handlers import detection, generate, image, tensors, text
from fettle.package.tensors import TensorSpec

Settings = tensors.Settings | image.Settings | detection.Settings | text.Settings | generate.Settings
"""Settings of any ready handler; ``kind`` says which."""
READY: dict[str, ModuleType] = {
    "tensor": tensors,
    "image": image,
    "detection": detection,
    "text": text,
    "generate": generate,
}


def make(settings: Settings) -> Any:
    """The handler of these settings."""
    return READY[msgspec.to_builtins(settings)["kind"]].Handler(settings)


def settle(
    kind: str, wanted: dict[str, Any], inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], files: set[str]
) -> Settings:
    """The settings of a ready handler for a model: what its inputs and outputs suggest, `wanted` above it.

    `files` are the names in the package. Raises `UsageError` where the model does not fit this handler.
    """
    if kind not in READY:
        raise UsageError(f"no ready handler is called {kind!r}: {', '.join(READY)}, or the path of your handler.py")
    suggested = msgspec.to_builtins(READY[kind].suggest(inputs, outputs, files))
    unknown = set(wanted) - set(suggested)
    if unknown:
        raise UsageError(f"the {kind} handler has no setting {min(unknown)!r}: {', '.join(sorted(suggested))}")
    merged = {
        key: {**value, **wanted[key]} if isinstance(value, dict) and isinstance(wanted.get(key), dict)
        else wanted.get(key, value)
        for key, value in suggested.items()
    }  # fmt: skip
    try:
        return msgspec.convert(merged, Settings)  # type: ignore[no-any-return]
    except msgspec.ValidationError as error:
        raise UsageError(f"the {kind} handler cannot have these settings: {error}") from error
