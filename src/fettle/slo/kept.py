"""What a search has measured already, in one file: calibrations, overheads and load tests.

Written whole after each of them, so that a search that was killed at any moment measures nothing twice.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from fettle.errors import UsageError
from fettle.files import read_bytes, write_text
from fettle.package.host import host_id
from fettle.package.manifest import MANIFEST, SETTINGS, Package
from fettle.slo.calibrate import Calibration
from fettle.slo.overheads import Overheads
from fettle.slo.server_process import ServerStats
from fettle.slo.text_costs import TextCosts

_MAX_BYTES = 256 << 20


class Tested(msgspec.Struct, forbid_unknown_fields=True):
    """One load test."""

    rate: float
    """Requests a second that were due."""
    held: bool
    """Whether the limit was kept: nothing failed, nothing was refused, and the p99 was within it."""
    run: dict[str, Any]
    """`fettle.load.run.as_data`."""
    inside: ServerStats
    predicted_p99_ms: float | None = None
    """By simulation, before the test; None where the queue would only grow. Of texts: to the first token."""
    slower: float | None = None
    """Time of the model's calls over what it was to be by simulation: 1 where the machine was as when calibrated."""
    predicted_itl_ms: float | None = None
    """As `predicted_p99_ms`, of the time between two tokens of a text."""


class _Kept(msgspec.Struct, forbid_unknown_fields=True):
    host: str
    format: int = 1
    calibrations: dict[str, Calibration] = {}
    overheads: dict[str, Overheads] = {}
    tests: dict[str, Tested] = {}
    text_costs: dict[str, TextCosts] = {}


class Journal:
    """The tables, by keys that name all that a measurement depends on. Without a path nothing is kept."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        kept = _Kept(host_id(), 1, {}, {}, {}, {})
        if path is not None and path.exists():
            try:
                read = msgspec.json.decode(read_bytes(path, _MAX_BYTES), type=_Kept)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{path} holds no measurements of a search: delete it") from error
            if (read.host, read.format) == (kept.host, kept.format):  # another machine's numbers say nothing here
                kept = read
        self._kept = kept
        self.calibrations, self.overheads, self.tests = kept.calibrations, kept.overheads, kept.tests
        self.text_costs = kept.text_costs

    def save(self) -> None:
        """Write all of it, whole or not at all."""
        if self.path is not None:
            write_text(self.path, msgspec.json.encode(self._kept).decode() + "\n")


def package_key(package: Package) -> str:
    """Equal for packages that compute the same: their settings may differ."""
    files = [f"{name}={digest}" for name, digest in sorted(package.manifest.files.items()) if name != SETTINGS]
    text = "|".join([MANIFEST, *files, str(sorted(package.manifest.recipe.items()))])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
