"""The one exception that means: the person who called fettle can fix this.

Commands print its single line and leave with exit code 2; nothing has been written by then.
"""

import functools
import importlib.util
import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

_HERE = os.path.dirname(__file__) + os.sep
_INSTALLED = ("/site-packages/", "/dist-packages/", "/lib/python3", *(("/Lib/",) if os.name == "nt" else ()))
_COLOURS = re.compile("\x1b\\[[0-9;]*m")
_OPENVINO = re.compile(r"(Check '.*' failed at|Exception from) \S+:\d+:$")


class UsageError(Exception):
    """Bad usage or input. The message is one line: what is wrong, and what to do."""

    exit_code: ClassVar[int] = 2

    def _render_traceback_(self) -> list[str]:  # what a notebook shows in place of a traceback
        return [f"fettle: {self}"]


@contextmanager
def refusing(
    what: str, kinds: type[BaseException] | tuple[type[BaseException], ...] = Exception
) -> Iterator[None]:  # fmt: skip
    """Raise `UsageError` for errors of these kinds: `what`, such as ``cannot write out.csv:``, and what the error says.
    A `UsageError` says enough by itself, unless it is the kind that is named."""
    try:
        yield
    except kinds as error:
        if isinstance(error, UsageError) and kinds is not UsageError:
            raise
        own = type(error).__module__.startswith("fettle.")  # a sentence already
        said = str(error) if own else getattr(error, "strerror", None) or first_line(error)
        raise UsageError(f"{what} {said}") from error


@contextmanager
def needing(name: str, what: str = "") -> Iterator[None]:
    """Raise `extra` where what is imported in the block is not installed: it is in the extra `name`."""
    try:
        yield
    except ImportError as error:
        raise extra(what or f"{error.name} is not installed", name) from error


def extra(what: str, name: str) -> UsageError:
    """The error that says which optional packages are missing: ``extra("images need Pillow", "serve")``."""
    return UsageError(f"{what}: pip install {_with(name)}")


def _with(name: str) -> str:
    """What pip has to install for an extra: from where fettle itself was installed from, if that is known."""
    import json
    from importlib import metadata
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:  # PEP 610
        origin = json.loads(metadata.distribution("torch-fettle").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        origin = {}
    if "dir_info" not in origin:
        kind = origin.get("vcs_info")
        place = f"{kind['vcs']}+{origin['url']}@{kind['commit_id']}" if kind else origin.get("url")
        return f"'torch-fettle[{name}] @ {place}'" if place else f"'torch-fettle[{name}]'"
    folder = url2pathname(urlsplit(origin["url"]).path)
    return f"{'-e ' if origin['dir_info'].get('editable') else ''}'{folder}[{name}]'"


def type_text(value: object) -> str:
    """A value of the wrong type, for a message: ``an int``, ``a DataLoader``, ``None``."""
    name = type(value).__name__
    return "None" if value is None else f"an {name}" if name[0] in "aeioAEIO" else f"a {name}"


def place(error: BaseException) -> str:
    """Where the caller's code went wrong, `` at model.py:12``: the innermost line that is not installed, if any."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_program(frame.filename)]
    return f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def is_users(file: str) -> bool:
    """Whether a line of this file is the caller's to change: not torch's, not fettle's, not made up in memory."""
    return not file.startswith((_HERE, _torchs_folder(), "<"))


@functools.cache
def _torchs_folder() -> str:
    """Found without importing it."""
    spec = importlib.util.find_spec("torch")
    return os.path.dirname(spec.origin) + os.sep if spec and spec.origin else _HERE


def is_program(file: str) -> bool:
    """Whether a file is the program's own, and not of an installed package or the standard library."""
    return is_users(file) and file not in ("", "~") and not any(part in file for part in _INSTALLED)


def first_line(error: BaseException) -> str:
    """What an error's text says first, on one line and with its type: ``ValueError: too few channels``.

    Back-quotes become plain ones: in messages of our own they stand around arguments.
    """
    while type(error).__module__.startswith("torch.onnx") and error.__cause__ is not None:
        error = error.__cause__  # it says which of its steps failed, and what to do about torch
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    if lines and lines[0].startswith("Constraints violated"):  # by torch.export, which then says which
        lines = [line.removeprefix("- ") for line in lines[1:]] or lines
    if lines and _OPENVINO.match(lines[0]):  # the place in its source, headings, then what is wrong
        lines = [line.removeprefix("-- ") for line in lines if not line.endswith(":")] or lines
        lines.sort(key=lambda line: not line.startswith("No conversion rule"))
    said = lines[0].partition(" This could be because the operator")[0] if lines else ""
    return f"{type(error).__name__}: {said}".replace("`", "'") if lines else type(error).__name__
