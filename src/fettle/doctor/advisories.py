"""Releases that are known to be compromised: data with a date and sources, in a file that a newer one may replace."""

from __future__ import annotations

import re
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from msgspec import DecodeError, Meta, Struct, ValidationError, toml

from fettle.errors import UsageError
from fettle.files import read_bytes

_MOST_BYTES = 1 << 20
# No control characters: what is in the file is printed on a terminal.
Text = Annotated[str, Meta(min_length=1, max_length=400, pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")]
Name = Annotated[str, Meta(max_length=100, pattern=r"^[a-z0-9]+(-[a-z0-9]+)*\Z")]
Version = Annotated[str, Meta(max_length=60, pattern=r"^[A-Za-z0-9.+!_-]+\Z")]
Sha256 = Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]


class Marker(Struct, frozen=True, forbid_unknown_fields=True):
    """A file that such a release leaves behind."""

    path: Annotated[str, Meta(min_length=1, max_length=300, pattern=r"^[A-Za-z0-9._/ -]+\Z")]
    """Below a folder of installed packages, or from the root."""
    sha256: Sha256 = ""
    """Hash of its content; empty where the name alone says it."""


class Advisory(Struct, frozen=True, forbid_unknown_fields=True):
    """One package, and those of its releases that are compromised."""

    package: Name
    versions: Annotated[tuple[Version, ...], Meta(min_length=1, max_length=200)]
    published: date
    does: Text
    """What the release does, and when."""
    sources: Annotated[tuple[Text, ...], Meta(min_length=1, max_length=20)]
    level: Literal["error", "warning"] = "error"
    """A warning where sources disagree."""
    markers: Annotated[tuple[Marker, ...], Meta(max_length=20)] = ()


class Advisories(Struct, frozen=True, forbid_unknown_fields=True):
    """All that is known up to a day."""

    format: Literal[1] = 1
    checked: date = date.min
    """The day up to which releases were looked through."""
    advisory: Annotated[tuple[Advisory, ...], Meta(max_length=5000)] = ()


@lru_cache(maxsize=1)
def shipped_advisories() -> Advisories:
    """The advisories that came with fettle."""
    return read_advisories(Path(__file__).with_name("advisories.toml"))


def read_advisories(path: Path) -> Advisories:
    """Read a file of them, which may come from anywhere. Raises `UsageError` where it is not one."""
    content = read_bytes(path, _MOST_BYTES, "the list of advisories ")
    try:
        advisories = toml.decode(content, type=Advisories)
    except (ValidationError, DecodeError, ValueError, RecursionError, OverflowError) as error:
        reason = re.sub(r"[^\x20-\x7e]+", " ", str(error))[:200]
        raise UsageError(f"{path} is not a list of advisories: {reason}") from error
    if advisories.checked == date.min:
        raise UsageError(f"{path} is not a list of advisories: it does not say when it was checked")
    return advisories
