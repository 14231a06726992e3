"""Writing files whole or not at all, and what JSON can hold."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fettle.errors import UsageError


def check_writable(*paths: str | os.PathLike[str] | None) -> None:
    """Raise `UsageError` for a file that cannot be written: before the work that would be lost, not after it.

    None is not a file. Nothing is written; a folder that is not there is not an error, because writing makes it.
    """
    for path in (Path(given).absolute() for given in paths if given is not None):
        try:
            if path.is_dir():
                raise UsageError(f"cannot write {path}: it is a folder")
            if not _is_device(path):
                with tempfile.TemporaryFile(dir=next(folder for folder in path.parents if folder.exists())):
                    pass
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from error


@contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to, which becomes `path` when the block ends; a block that raises leaves nothing behind.

    Folders that are not there are made. Raises `UsageError` when the place cannot be written.
    """
    path = Path(path)
    try:
        target = path.resolve()  # a link stays a link
        if _is_device(target):
            yield target
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem[:100]}.", suffix=target.suffix)
        os.close(handle)
        try:
            yield Path(name)
            os.chmod(name, 0o644)
            os.replace(name, target)
        except BaseException:  # a full disk must not fill up further with halves
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` as `whole` does."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write `content` as `whole` does."""
    with whole(path) as partial:
        partial.write_bytes(content)


def finite(value: Any) -> Any:
    """The same data with None for NaN and infinity, which JSON has not, also inside dicts and lists."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_device(path: Path) -> bool:
    """Whether it is there and neither a file nor a folder: /dev/null is written to, never replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()
