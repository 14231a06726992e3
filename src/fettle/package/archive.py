"""Unpacking what a stranger packed: nothing leaves the folder, nothing is a link, nothing explodes."""

from __future__ import annotations

import stat
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from fettle.errors import UsageError, first_line

MAX_BYTES, MAX_RATIO = 64 << 30, 200
"""Limits of an archive: bytes when unpacked, and how many times larger an entry may be than its packed form."""
_SMALL = 1 << 20
"""Entries below this may be packed as well as they like."""


def unzip(archive: Path, folder: Path, *, what: str, max_files: int, folders: bool = False) -> None:
    """Unpack a zip into an empty folder. `folders` allows entries in folders. Raises `UsageError` with one line.

    Every entry is checked before the first is written, and none is written beyond the size that it claims.
    """
    try:
        with zipfile.ZipFile(archive) as file:
            entries = file.infolist()
            _check(entries, folder, max_files, folders)
            for entry in entries:
                place = folder / entry.filename
                if entry.is_dir():
                    place.mkdir(parents=True, exist_ok=True)
                    continue
                place.parent.mkdir(parents=True, exist_ok=True)
                _copy_bounded(file, entry, place)
    except _Unsound as error:
        raise UsageError(f"{archive} is not a sound {what}: {error}") from error
    # zipfile says NotImplementedError of a compression that it does not know, RuntimeError of a password.
    except (OSError, zipfile.BadZipFile, RuntimeError, EOFError, ValueError, zlib.error) as error:
        raise UsageError(f"{archive} cannot be unpacked: {first_line(error)}") from error


def bounded(entry: zipfile.ZipInfo) -> zipfile.ZipInfo:
    """The entry, if it can be unpacked a little at a time; else BadZipFile: bzip2 and LZMA make gigabytes at once."""
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise zipfile.BadZipFile(f"{entry.filename[:80]!r} is neither stored nor deflated")
    return entry


class _Unsound(Exception):
    """What is wrong with an archive."""


def _check(entries: list[zipfile.ZipInfo], folder: Path, max_files: int, folders: bool) -> None:
    if len(entries) > max_files or sum(entry.file_size for entry in entries) > MAX_BYTES:
        raise _Unsound("it is too large")
    names = [entry.filename.rstrip("/") for entry in entries]
    if len({name.casefold() for name in names}) != len(names):
        raise _Unsound("it holds a name twice")
    for entry, name in zip(entries, names, strict=True):
        shown = repr(bounded(entry).filename[:80])
        parts = PurePosixPath(name).parts
        plain = all(part not in ("", ".", "..") and "\\" not in part and "\0" not in part for part in parts)
        if not folders and (entry.is_dir() or len(parts) != 1 or name.startswith(".") or not plain):
            raise _Unsound(f"it may hold plain files only, not {shown}")
        if not plain or not parts or name.startswith("/") or len(name) > 500:
            raise _Unsound(f"{shown} is not a path inside it")
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise _Unsound(f"{shown} leaves the folder")
        if stat.S_ISLNK(entry.external_attr >> 16):
            raise _Unsound(f"{shown} is a link")
        if entry.file_size > MAX_RATIO * max(entry.compress_size, 1) and entry.file_size > _SMALL:
            raise _Unsound(f"{shown} is packed suspiciously well")


def _copy_bounded(file: zipfile.ZipFile, entry: zipfile.ZipInfo, place: Path) -> None:
    left = entry.file_size  # what the directory says may be a lie: never write more than it
    with file.open(entry) as source, place.open("xb") as sink:
        while block := source.read(1 << 20):
            left -= len(block)
            if left < 0:
                raise _Unsound(f"{entry.filename[:80]!r} is larger than it says")
            sink.write(block)
