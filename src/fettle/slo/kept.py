"""What a search keeps of what it measured, so that one that was killed at any moment measures nothing twice."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from fettle.journal import Journal
from fettle.package.host import host_id
from fettle.package.manifest import MANIFEST, SETTINGS, Package
from fettle.package.settings import ServeSettings
from fettle.slo.server_process import ServerStats

_SERVED = ("buckets", "max_queue_rows", "timeout_ms", "max_worker_bytes")
"""Settings of a package that a search leaves as they are."""


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


def open_journal(path: Path | None) -> Journal:
    """What searches have measured, by keys that name all that a measurement depends on: calibrations, overheads and
    load tests. Another machine's numbers say nothing here."""
    return Journal(path, "fettle serve slo", {"host": host_id()})


def package_key(package: Package) -> str:
    """Equal for packages that compute the same and are served alike: what a search sets itself may differ."""
    files = [f"{name}={digest}" for name, digest in sorted(package.manifest.files.items()) if name != SETTINGS]
    usual, own = ServeSettings(), package.settings
    served = [f"{name}={getattr(own, name)}" for name in _SERVED if getattr(own, name) != getattr(usual, name)]
    text = "|".join([MANIFEST, *files, str(sorted(package.manifest.recipe.items())), *served])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
