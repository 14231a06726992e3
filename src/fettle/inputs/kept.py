"""Where what a search of an input pipeline has measured is kept by default, and of which version of the program."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def default_path(target: str) -> Path | None:
    """Beside the target's file, or in the current folder; None where nothing can be written there."""
    place, _, name = target.rpartition(":")
    folder = Path(place).parent if place.endswith(".py") else Path()
    if (place.endswith(".py") and not Path(place).is_file()) or not os.access(folder, os.W_OK):
        return None
    stem = Path(place).stem if place.endswith(".py") else place.replace("/", ".")
    return folder / f".{stem}-{name.replace('/', '.')}.fettle-data"


def content_hash(target: str) -> str:
    """Hash of the target's own file, so that a changed pipeline is measured anew; empty for a module."""
    place = Path(target.rpartition(":")[0])
    try:
        return hashlib.sha256(place.read_bytes()).hexdigest()[:16] if place.suffix == ".py" else ""
    except OSError:
        return ""
