"""The model package: a folder or a zip that holds a tuned model as data, with what it was tuned and judged by.

    manifest.json        what it is: format, name, version, inputs, outputs, recipe, accuracy, SHA-256 of every file
    graph.json           the model as an exported program, and
    weights.safetensors  its weights; or, of a recipe with runtime=openvino,
    openvino.xml, openvino.bin   the model as OpenVINO's own files
    samples.safetensors  one batch, for calibrating the recipe and for warming up
    serve.toml           how to serve it: batch rows, delay, workers, threads, and the measured cost curve (`settings`)
    labels.txt, tokenizer.json   optional: what the ready handler that the manifest names reads
    handler.py           optional: the user's own code, run only where the operator trusts its digest

Opening a package parses and checks it; nothing in it is run or unpickled. Applying the recipe runs fettle's own code.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from fettle.errors import UsageError, first_line, refusing
from fettle.files import read_bytes, read_toml, sha256_of, whole, write_bytes
from fettle.package.archive import bounded, unzip
from fettle.package.handlers import Settings as HandlerSettings
from fettle.package.requires import specifiers
from fettle.package.settings import ServeSettings, as_toml, settings_from
from fettle.package.tensors import TensorSpec

MANIFEST, SAMPLES, SETTINGS, HANDLER = "manifest.json", "samples.safetensors", "serve.toml", "handler.py"
FORMAT = 1
MAX_FILES = 256
_MAX_TEXT = 1 << 20


class _Versioned(msgspec.Struct):
    """What is read first: another format has other fields."""

    format: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``manifest.json`` says."""

    format: int
    name: str
    version: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_rows: int
    files: dict[str, str]
    """SHA-256 of every other file; of ``serve.toml`` those of before and after while it is written."""
    recipe: dict[str, str] = {}
    applied: tuple[str, ...] = ()
    """Techniques of the recipe that are in what is stored: calibrated int8, another runtime, rewritten attention. The
    others are applied when the model is loaded."""
    four_bits: tuple[str, ...] = ()
    """Of a recipe that has 4 bits in a part of the layers: these, by their names in the model."""
    accuracy: dict[str, Any] = {}
    requires: dict[str, str] = {}
    """Libraries that must be here to serve it, by the names that pip knows: ``{"torch": ">=2.13"}``."""
    machine: dict[str, str] = {}
    model: str = "exported"
    """How the model is stored: ``exported`` or ``openvino``."""
    handler: HandlerSettings | None = None
    """The ready handler between a client's bytes and the model's tensors. None: tensors as JSON, or ``handler.py``."""
    created: str = ""

    @property
    def shares_calls(self) -> bool:
        """Whether requests may share a call of the model: no output is about all rows of a call together."""
        return all(spec.batched for spec in self.outputs) or not any(spec.batched for spec in self.inputs)


@dataclass(frozen=True)
class Package:
    """An opened package: parsed and checked, nothing loaded yet."""

    folder: Path
    manifest: Manifest
    settings: ServeSettings

    @property
    def handler_digest(self) -> str | None:
        """SHA-256 of the handler's code, None where there is none."""
        return self.manifest.files.get(HANDLER)


def check_trust(package: Package, trust: Collection[str]) -> None:
    """Raise `UsageError` where a package brings code and its digest is not in `trust`."""
    digest = package.handler_digest
    if digest and digest not in trust:
        raise UsageError(f"{package.manifest.name} brings code of its own; to let it run, give `trust='{digest}'`")


def seal(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` over the files that are in the folder now, but for hidden ones."""
    files = {
        file.name: sha256_of(file)
        for file in sorted(folder.iterdir())
        if file.is_file() and file.name != MANIFEST and not file.name.startswith(".")
    }
    _write(folder, manifest, files)
    for name in files:  # safetensors lets nobody but their owner read the files that it writes
        shutil.copymode(folder / MANIFEST, folder / name)


def _write(folder: Path, manifest: Manifest, files: dict[str, str]) -> None:
    sealed = msgspec.structs.replace(manifest, files=files)
    write_bytes(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(sealed), indent=1))


def open_package(path: Path) -> Package:
    """Open a package and check that it is whole. A zip is unpacked to a folder beside it, once.

    Raises `UsageError` with one line for anything that is not a sound package.
    """
    if path.is_file() and path.suffix:
        path = unpack(path, path.with_suffix(""))
    if not (path / MANIFEST).is_file():
        raise UsageError(f"{path} is not a package: it has no {MANIFEST}")
    manifest = read_manifest(path)
    check_name(manifest.name, manifest.version)
    specifiers(manifest.requires)
    with refusing(f"{path} cannot be read:", OSError):  # what is read need not be named: labels are where there are any
        if links := [file.name for file in path.iterdir() if file.is_symlink() and not file.name.startswith(".")]:
            raise UsageError(f"{path} is not a sound package: {links[0][:80]!r} is a link")
    for name, digest in manifest.files.items():
        file = path / name
        if PurePosixPath(name).name != name or name.startswith("."):
            raise UsageError(f"{path} names a file outside itself: {name[:80]!r}")
        if not file.is_file():
            raise UsageError(f"{path} lacks {name}")
        if sha256_of(file) not in digest.split():
            raise UsageError(f"{path / name} is damaged or was changed: its SHA-256 is not the manifest's")
    if SAMPLES not in manifest.files:
        raise UsageError(f"{path} is not a whole package: its manifest names no {SAMPLES}")
    return Package(path, manifest, read_settings(path, manifest))


def read_manifest(path: Path) -> Manifest:
    """What the folder or the zip of a package says of it; whether that is so is not looked at. Raises `UsageError`."""
    with refusing(f"{path / MANIFEST} cannot be read:"):  # a damaged zip raises nearly everything
        if not path.is_file():
            text = read_bytes(path / MANIFEST, _MAX_TEXT)
        else:
            with zipfile.ZipFile(path) as file, file.open(bounded(file.getinfo(MANIFEST))) as entry:
                text = entry.read(_MAX_TEXT)
        if (version := msgspec.json.decode(text, type=_Versioned).format) != FORMAT:
            raise UsageError(f"{path} has package format {version}; this fettle reads format {FORMAT}")
        return msgspec.json.decode(text, type=Manifest)


def read_settings(folder: Path, manifest: Manifest) -> ServeSettings:
    """``serve.toml`` of a package, or what holds where there is none; checked."""
    path = folder / (SETTINGS if SETTINGS in manifest.files else MANIFEST)
    with refusing(f"{path} cannot be used:", (ValueError, RecursionError)):
        settings = ServeSettings(max_rows=manifest.max_rows)
        if path.name == SETTINGS:
            settings = settings_from(read_toml(path, _MAX_TEXT), str(path))
    if settings.max_rows > manifest.max_rows:
        raise UsageError(f"{path} asks for {settings.max_rows} rows; the model takes {manifest.max_rows}")
    return settings


def write_settings(package: Package, settings: ServeSettings) -> Package:
    """Other settings for a package that is a folder; its manifest is sealed anew. Cut short at any moment, the package
    is sound. Raises `UsageError` where it cannot be written."""
    files = package.manifest.files  # and no others: a handler that ran has left its bytecode there
    with whole(package.folder / SETTINGS) as partial:
        partial.write_text(as_toml(settings), encoding="utf-8")
        digest = sha256_of(partial)
        if SETTINGS in files:
            _write(package.folder, package.manifest, {**files, SETTINGS: f"{files[SETTINGS]} {digest}"})
    _write(package.folder, package.manifest, {**files, SETTINGS: digest})
    return open_package(package.folder)


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack a package's zip: flat names only, no links, no bombs. Raises `UsageError`; then nothing is left behind.

    A folder that it was unpacked to before is taken as it is."""
    if folder.exists():
        if not (folder / MANIFEST).is_file():
            raise UsageError(f"{archive} cannot be unpacked: {folder} is in the way")
        if not _was_unpacked(archive, folder):
            raise UsageError(f"{folder} was not unpacked from what is in {archive} now: move the folder away")
        return folder
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as text:
            scratch = Path(text) / folder.name
            scratch.mkdir()
            unzip(archive, scratch, what="package", max_files=MAX_FILES)
            os.rename(scratch, folder)
    except OSError as error:
        if not _was_unpacked(archive, folder):  # by another process, meanwhile
            raise UsageError(f"{archive} cannot be unpacked: {first_line(error)}") from error
    return folder


def _was_unpacked(archive: Path, folder: Path) -> bool:
    """Whether a folder holds the package of an archive; how it is served may have been set since."""

    def manifest(path: Path) -> Manifest:
        read = read_manifest(path)
        return msgspec.structs.replace(read, files={n: d for n, d in read.files.items() if n != SETTINGS})

    try:
        return manifest(archive) == manifest(folder)
    except UsageError:
        return False


def check_place(place: Path) -> None:
    """Raise `UsageError` for a place that a package may not take: a folder of something else, which would be lost."""
    names = {item.name for item in place.iterdir()} if place.is_dir() else {place.name} if place.exists() else set()
    if names and not names & {MANIFEST, SAMPLES, SETTINGS}:
        raise UsageError(f"{place} exists already and is not a package: give another `output`")


def check_apart(package: Package, folder: Path) -> None:
    """Raise `UsageError` for a folder in the package, which would be copied into itself without end."""
    if folder.resolve().is_relative_to(package.folder.resolve()):
        raise UsageError(f"{folder} is inside of the package: give another `output`")


def check_name(name: str, version: str) -> None:
    """Raise `UsageError` unless these can stand in a URL, a file name and a label."""
    for what, text in (("name", name), ("version", version)):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", text):
            raise UsageError(
                f"{text[:80]!r} is not a {what} of a model: use letters, digits, dots, dashes and underscores"
            )


def name_for(target: str) -> str:
    """What the model of a target is called by default: the target's name, without what `check_name` refuses."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", target).strip("_.-")[:100] or "model"
