"""What a package needs of the machine that serves it: libraries, by the names that pip knows, and their versions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from fettle.errors import UsageError
from fettle.machine import installed

_HANDLERS = {"image": ["pillow"], "detection": ["pillow"], "text": ["tokenizers"], "generate": ["tokenizers"]}
_RUNTIMES = {
    "openvino": ["openvino"], "onnxruntime": ["onnxruntime", "onnx", "onnxscript"], "tensorrt": ["torch_tensorrt"]
}  # fmt: skip
_WROTE = ("torch", "openvino", "tokenizers")
"""Libraries that wrote a file of the package: an older one may not be able to read it."""
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?"


def needed(runtime: str, handler: str, own: Sequence[str] = ()) -> dict[str, str]:
    """What a package needs that is made here: version specifiers by library. `own` are those of a ``handler.py``."""
    runtime = runtime.partition("-")[0]
    wanted = dict.fromkeys(["torch", *_RUNTIMES.get(runtime, []), *_HANDLERS.get(handler, [])], "")
    for name in wanted:
        here = _installed(name)
        if name in _WROTE and here is not None:
            wanted[name] = f">={here.major}.{here.minor}"
    for text in own:
        match = re.fullmatch(rf"({_NAME})\s*(.{{0,200}})", text.strip())
        name, versions = match.groups() if match is not None else (text, "")
        wanted[name] = versions
    specifiers(wanted)
    return wanted


def specifiers(requires: Mapping[str, str]) -> dict[str, SpecifierSet]:
    """By library. Raises `UsageError` for anything else: no addresses, no options, nothing but versions."""
    by_name = {}
    for name, versions in requires.items():
        try:
            if not re.fullmatch(_NAME, name) or len(versions) > 200:
                raise InvalidSpecifier
            by_name[name] = SpecifierSet(f">={versions}" if versions[:1].isdigit() else versions)
        except InvalidSpecifier:
            text = name + versions
            raise UsageError(f"{text[:80]!r} is not a requirement: write scipy, or 'scipy>=1.10'") from None
    return by_name


def check_here(model: str, requires: Mapping[str, str]) -> None:
    """Raise `UsageError` where a library that the model needs is not installed, or has another version."""
    for name, versions in specifiers(requires).items():
        here = _installed(name)
        if here is None:
            raise UsageError(f"{model} needs {name}, which is not installed: pip install '{name}{versions}'")
        if not versions.contains(here.base_version, prereleases=True):
            raise UsageError(
                f"{model} needs {name}{versions}, and {here} is installed: pip install '{name}{versions}', or package "
                "the model again with what is here"
            )


def _installed(name: str) -> Version | None:
    try:
        return Version(installed([name])[name])
    except (KeyError, ValueError):
        return None
