"""Reading files from outside, writing files whole or not at all, and what JSON can hold."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import re
import secrets
import shlex
import struct
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from fettle.errors import UsageError, refusing

_STILL_WRITTEN_S = 5.0
"""A compiler may still be at a file that it has touched since."""
MOST_BYTES = 64 << 20
"""The most that is read of a file from outside, where nothing larger is to be expected."""
_LONG_KEY = re.compile(
    r"""(?<![\w"'-])(?:(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){100}""",
)


def home() -> Path:
    """The user's own folder. Raises `UsageError` for one that the system does not know, as containers have them."""
    try:
        return Path.home()
    except RuntimeError as error:
        raise UsageError("nothing says where this user's own files are: set HOME to a folder") from error


def cache_folder(name: str) -> Path:
    """Where what can be made again is kept: $FETTLE_CACHE or the user's cache folder."""
    root = os.environ.get("FETTLE_CACHE") or os.environ.get("XDG_CACHE_HOME") or home() / ".cache"
    return Path(root) / "fettle" / name


def for_compilers(folder: Path) -> str:
    """The path of a folder as torch can hand it to a C++ compiler: it puts paths into a command line as they are, so
    one with a space or a quote goes by a link in the temporary folder, the same in every run. What a compiler was
    killed at is removed from the folder: torch would take it for whole."""
    for place, _, names in os.walk(folder):
        for file in (Path(place, name) for name in names if name.endswith((".so", ".o"))):
            with suppress(OSError):
                if time.time() - file.stat().st_mtime > _STILL_WRITTEN_S and _is_torn(file):
                    file.unlink()
    path = str(folder.resolve())
    if shlex.quote(path) == path:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    link = Path(tempfile.gettempdir()) / f"fettle-{os.getuid()}-{name}"
    try:
        link.symlink_to(path)
    except OSError:  # it is there, or cannot be made
        is_ours = link.is_symlink() and link.lstat().st_uid == os.getuid() and os.readlink(link) == path
        return str(link) if is_ours else path
    return str(link)


def _is_torn(library: Path) -> bool:
    """Whether a library or an object file (64-bit ELF) ends before its section headers do, or has no header yet."""
    with library.open("rb") as file:
        head = file.read(64)
    if len(head) < 64 or not any(head):
        return True
    (start,), (size, count) = struct.unpack_from("<Q", head, 40), struct.unpack_from("<HH", head, 58)
    return head.startswith(b"\x7fELF\x02") and bool(start + size * count > library.stat().st_size)


def check_writable(*paths: str | os.PathLike[str] | None) -> None:
    """Raise `UsageError` for a file that cannot be written: before the work that would be lost, not after it.

    None is not a file. Nothing is written; a folder that is not there is not an error, because writing makes it.
    """
    for path in (Path(path).absolute() for path in paths if path is not None):
        with refusing(f"cannot write {path}:", OSError):
            if path.is_dir():
                raise UsageError(f"cannot write {path}: it is a folder")
            if not _is_device(path):
                with tempfile.TemporaryFile(dir=next(folder for folder in path.parents if folder.exists())):
                    pass


@contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to, which becomes `path` when the block ends; a block that raises leaves nothing behind.

    Folders that are not there are made. Raises `UsageError` when the place cannot be written.
    """
    path = Path(path)
    with refusing(f"cannot write {path}:", OSError):
        target = Path(os.path.realpath(path))  # a link stays a link
        if _is_device(target):
            yield target
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.stem[:40]}.{secrets.token_hex(4)}{target.suffix}")
        partial.touch(exist_ok=False)
        try:
            yield partial
            os.replace(partial, target)
        except BaseException:  # a full disk must not fill up further with halves
            partial.unlink(missing_ok=True)
            raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` as `whole` does."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write `content` as `whole` does."""
    with whole(path) as partial:
        partial.write_bytes(content)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_bytes(path: str | os.PathLike[str], most: int = MOST_BYTES, what: str = "") -> bytes:
    """A file from outside, whole. Raises `UsageError` where it cannot be read, or has more than `most` bytes.

    `what` stands before its path there: ``"the recipe "``.
    """
    with refusing(f"cannot read {what}{path}:", OSError), open(path, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UsageError(f"{path} is too large: more than {most / 2**20:.3g} MiB")
    return content


def read_text(path: str | os.PathLike[str], most: int = MOST_BYTES, what: str = "") -> str:
    """The same as text in UTF-8, a byte order mark left out."""
    try:
        return read_bytes(path, most, what).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text in UTF-8") from error


def read_toml(path: str | os.PathLike[str], most: int = MOST_BYTES, what: str = "") -> dict[str, Any]:
    """The same as TOML. Raises ValueError or RecursionError where it is none that can be read."""
    text = read_text(path, most, what)
    if _LONG_KEY.search(text):  # the parser takes memory and time by the square of a key's parts
        raise ValueError("a key of a hundred parts or more")
    return tomllib.loads(text)


def plain(value: Any, special: Mapping[type, Callable[[Any], Any]] | None = None) -> Any:
    """The same as JSON can hold it: dataclasses and structs are dictionaries, NaN and infinity None, what JSON does not
    know is text. What is of a `special` type is what its function makes of it."""
    special = special or {}
    if type(value) in special:
        return special[type(value)](value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name), special) for item in dataclasses.fields(value)}
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name), special) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): plain(item, special) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, special) for item in value]
    if hasattr(value, "item"):  # a NumPy or torch scalar
        return plain(value.item(), special)
    return str(value)


def _is_device(path: Path) -> bool:
    """Whether it is there and neither a file nor a folder: /dev/null is written to, never replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()
