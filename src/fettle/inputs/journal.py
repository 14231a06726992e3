"""What a search has measured so far, on disk after each slice, so that a killed search goes on where it was.

A search decides by what was measured and by nothing else, so one that is started again asks the same questions in the
same order, and the journal answers those that were answered before.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec

from fettle.errors import UsageError
from fettle.inputs.setting import Setting

_FORMAT, _VERSION = "fettle data journal", 3
_LARGEST = 16 << 20


class Line(msgspec.Struct):
    """One answer, or why there is none: of a setting in a round, or of a named question."""

    key: str
    answer: msgspec.Raw = msgspec.Raw(b"null")
    failure: str = ""


class Journal:
    """Lines by question. `path` None keeps nothing. Raises `UsageError` for a file that is not a journal or in use."""

    def __init__(self, path: Path | None, made_for: dict[str, Any]) -> None:
        self.lines: dict[str, Line] = {}
        self.path = path
        self._descriptor = -1
        if path is None:
            return
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{path}: another fettle data writes there; wait for it, or give `keep`") from None
        except OSError as error:
            raise UsageError(f"{path}: the measurements cannot be kept there ({error.strerror}); give `keep`") from None
        self._read(made_for)

    def get(self, key: str) -> Line | None:
        """What is known of a question."""
        return self.lines.get(key)

    def put(self, key: str, answer: object = None, failure: str = "") -> Line:
        """Keep an answer, or why there is none: on disk when this returns."""
        line = self.lines[key] = Line(key, msgspec.Raw(msgspec.json.encode(answer)), failure)
        if self._descriptor >= 0:
            os.write(self._descriptor, msgspec.json.encode(line) + b"\n")
            os.fsync(self._descriptor)
        return line

    def close(self, done: bool) -> None:
        """A search that came to its end needs no journal; the next one measures anew."""
        if self._descriptor >= 0:
            if done and self.path is not None:
                self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1

    def _read(self, made_for: dict[str, Any]) -> None:
        head = msgspec.json.encode({"format": f"{_FORMAT} {_VERSION}", **made_for})
        size = os.fstat(self._descriptor).st_size
        if size > _LARGEST:
            raise UsageError(f"{self.path}: too large for measurements of fettle data; give `keep` another file")
        text = os.pread(self._descriptor, size, 0)
        first, _, rest = text.partition(b"\n")
        if text and _FORMAT.encode() not in first[:64]:
            raise UsageError(f"{self.path} holds no measurements of fettle data; give `keep` another file")
        kept = [head]
        if first == head:  # else it is of another version, program, machine or length of slices: measured anew
            for raw in rest.split(b"\n"):
                try:
                    line = msgspec.json.decode(raw, type=Line)
                except msgspec.MsgspecError:
                    break  # cut short by the end of the process
                self.lines[line.key] = line
                kept.append(raw)
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        os.write(self._descriptor, b"\n".join(kept) + b"\n")
        os.fsync(self._descriptor)


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


def key(setting: Setting, number: int) -> str:
    """The question: this setting in this round."""
    return f"{number} {setting.name}"
