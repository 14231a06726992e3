"""What was measured, on disk as soon as it is known, so that a search that was killed goes on where it was.

A search decides by what was measured and by nothing else, so one that is started again asks the same questions in the
same order, and the journal answers those that were answered before.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from fettle.errors import UsageError

_FORMAT, _VERSION = "journal", 3
_LARGEST = 64 << 20

T = TypeVar("T")


def locked(path: Path, *, wait: bool = False, mode: int = 0o666) -> int:
    """Open a file, made with this `mode` where there is none, and lock it until the descriptor is closed or this
    process ends, however it does. Raises BlockingIOError where another process has it, unless it is to `wait`. Where
    the file system has no locks, nobody is kept out."""
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        pass
    return descriptor


class Line(msgspec.Struct):
    """One answer, or why there is none."""

    key: str
    answer: msgspec.Raw = msgspec.Raw(b"null")
    failure: str = ""


class Journal:
    """Lines by question, of the command that `writer` names. Those are of use that were `made_for` the same. `path`
    None keeps nothing on disk. Raises `UsageError` for a file that is not such a journal or in use."""

    def __init__(self, path: Path | None = None, writer: str = "fettle", made_for: Mapping[str, object] = {}) -> None:
        self.lines: dict[str, Line] = {}
        self.path, self._writer = path, writer
        self._descriptor = -1
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = locked(path)
        except BlockingIOError:
            raise UsageError(f"{path}: another {writer} is writing there; wait for it, or name another place") from None
        except OSError as error:
            raise UsageError(f"{path}: measurements cannot be kept there ({error.strerror}): name another") from None
        try:
            self._read(made_for)
        except BaseException:
            self.close()
            raise

    def answer(self, key: str, form: type[T]) -> T | None:
        """The answer to a question where there is one that can be read as `form`."""
        line = self.lines.get(key)
        try:
            return None if line is None or line.failure else msgspec.json.decode(line.answer, type=form)
        except (ValueError, RecursionError):
            return None

    def put(self, key: str, answer: object = None, failure: str = "") -> Line:
        """Keep an answer, or why there is none: on disk when this returns."""
        line = self.lines[key] = Line(key, msgspec.Raw(msgspec.json.encode(answer)), failure)
        if self._descriptor >= 0:
            self._write(msgspec.json.encode(line) + b"\n")
        return line

    def close(self, *, delete: bool = False) -> None:
        """Let go of the file, and `delete` it where nobody will ask again."""
        if self._descriptor >= 0:
            if delete and self.path is not None:
                self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1

    def _read(self, made_for: Mapping[str, object]) -> None:
        head = msgspec.json.encode({"format": f"{self._writer} {_FORMAT} {_VERSION}", **made_for})
        size = os.fstat(self._descriptor).st_size
        if size > _LARGEST:
            raise UsageError(f"{self.path}: too large for measurements of {self._writer}; name another file")
        text = os.pread(self._descriptor, size, 0)
        first, _, rest = text.partition(b"\n")
        if text and f"{self._writer} {_FORMAT}".encode() not in first[:64]:
            raise UsageError(f"{self.path} holds no measurements of {self._writer}; name another file")
        missing = b"\n" if text and not text.endswith(b"\n") else b""
        if first == head:
            for raw in rest.split(b"\n"):
                with contextlib.suppress(ValueError, RecursionError):  # cut short by the end of a process
                    line = msgspec.json.decode(raw, type=Line)
                    self.lines[line.key] = line
        else:  # it is of another version, program, machine or length of slices: measured anew
            os.ftruncate(self._descriptor, 0)
            missing = head + b"\n"
        os.lseek(self._descriptor, 0, os.SEEK_END)
        self._write(missing)

    def _write(self, data: bytes) -> None:
        """Append all of it, or nothing where there is no room: the next line would be glued to a part."""
        end = os.lseek(self._descriptor, 0, os.SEEK_CUR)
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
            os.fsync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, end)
            os.lseek(self._descriptor, end, os.SEEK_SET)
            raise
