"""Folders of files that took long to make, kept for the next process: whole, checked by hash, and bounded in size."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MOST_BYTES = 8 << 30
"""The most that all folders beside each other may hold; those used longest ago go first."""
SUMS = "sums.json"
"""The SHA-256 of each file. Its own time is when the folder was last used."""
_ABANDONED_S = 86400.0
"""After which a folder that was never finished is one whose process was killed."""


def is_sound(folder: Path) -> bool:
    """Whether a folder was kept and holds the files it was kept with, and no others. It counts as used now."""
    try:
        sums = json.loads((folder / SUMS).read_text(encoding="utf-8"))
        if not isinstance(sums, dict) or sums != _sums(folder):
            return False
        os.utime(folder / SUMS)
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def whole_folder(place: Path) -> Iterator[Path]:
    """A new folder beside `place` to fill, which takes its place when the block ends; a block that raises changes
    nothing.

    Raises OSError where that cannot be.
    """
    made = Path(tempfile.mkdtemp(dir=place.parent, prefix="."))
    try:
        yield made
        shutil.rmtree(place, ignore_errors=True)
        os.rename(made, place)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def keep(folder: Path, write: Callable[[Path], object], size_bytes: int) -> None:
    """Let `write` fill a new folder with about `size_bytes`, put it in the place of `folder`, and let those go that
    were used longest ago.

    Raises OSError where the place cannot be written, or that many bytes are more than half of what may be kept or of
    what is free there, and what `write` raises: nothing is kept then.
    """
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if 2 * size_bytes > min(MOST_BYTES, shutil.disk_usage(folder.parent).free):
        raise OSError(errno.ENOSPC, "there is no room for it")
    with whole_folder(folder) as made:
        write(made)
        (made / SUMS).write_text(json.dumps(_sums(made)), encoding="utf-8")
    let_go(folder.parent, SUMS, MOST_BYTES)


def _sums(folder: Path) -> dict[str, str]:
    sums = {}
    for path in sorted(folder.iterdir()):
        if path.name != SUMS:
            with path.open("rb") as file:
                sums[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def let_go(parent: Path, mark: str, most_bytes: int) -> None:
    """Delete folders until they hold no more than `most_bytes`, and what killed processes have left.

    Those go first whose file `mark` was touched longest ago; the last one stays.
    """
    kept = []
    for folder in parent.iterdir():
        with contextlib.suppress(OSError):  # another process was first, or it is nothing of ours
            if not folder.name.startswith("."):
                used = (folder / mark).stat().st_mtime_ns
                kept.append((used, sum(file.stat().st_size for file in folder.iterdir()), folder))
            elif time.time() - folder.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(folder, ignore_errors=True)
    left = sum(size for _, size, _ in kept)
    for _, size, folder in sorted(kept)[:-1]:
        if left <= most_bytes:
            return
        shutil.rmtree(folder, ignore_errors=True)
        left -= size
