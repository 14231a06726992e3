"""The model package: a folder or a zip that holds a tuned model as data, with what it was tuned and judged by.

    manifest.json        what it is: format, name, version, inputs, outputs, recipe, accuracy, SHA-256 of every file
    graph.json           the model as an exported program, and
    weights.safetensors  its weights; or, of a recipe with runtime=openvino,
    openvino.xml, openvino.bin   the model as OpenVINO's own files
    samples.safetensors  one batch, for calibrating the recipe and for warming up
    serve.toml           how to serve it: batch rows, delay, workers, threads, and the measured cost curve
    labels.txt, tokenizer.json   optional: what the ready handler that the manifest names reads
    handler.py           optional: the user's own code, run only where the operator trusts its digest

Opening a package parses and checks it; nothing in it is run or unpickled. Applying the recipe runs fettle's own code.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import tomli_w

from fettle.errors import UsageError, first_line
from fettle.serve.archive import unzip
from fettle.serve.handlers import Settings as HandlerSettings
from fettle.serve.policy import BatchSettings, CostCurve
from fettle.serve.requires import specifiers
from fettle.serve.tensors import TensorSpec

MANIFEST, SAMPLES, SETTINGS, HANDLER = "manifest.json", "samples.safetensors", "serve.toml", "handler.py"
FORMAT = 1
MAX_FILES = 256
MAX_THREADS = 1024
_MAX_TEXT = 1 << 20


_DEVICE = re.compile(r"[a-z]{2,16}(:\d{1,3})?")


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``manifest.json`` says."""

    format: int
    name: str
    version: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_rows: int
    files: dict[str, str]
    """SHA-256 of every other file."""
    recipe: dict[str, str] = {}
    applied: tuple[str, ...] = ()
    """Techniques of the recipe that are in what is stored: calibrated int8, another runtime, rewritten attention. The
    others are applied when the model is loaded."""
    accuracy: dict[str, Any] = {}
    requires: dict[str, str] = {}
    """Libraries that must be here to serve it, by the names that pip knows: ``{"torch": ">=2.13"}``."""
    machine: dict[str, str] = {}
    model: str = "exported"
    """How the model is stored: ``exported`` or ``openvino``."""
    handler: HandlerSettings | None = None
    """The ready handler between a client's bytes and the model's tensors. None: tensors as JSON, or ``handler.py``."""
    created: str = ""


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


class CurveTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured cost curve as ``serve.toml`` holds it."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    machine: str = ""
    """`fettle.machine.Machine.id` where it was measured: elsewhere it is not believed."""


class ServeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``serve.toml`` says: the knobs of one model's batcher and workers."""

    max_rows: int = 8
    delay_ms: float = 0.0
    policy: str = "curve"
    pad: bool = False
    buckets: tuple[int, ...] = ()
    max_queue_rows: int = 1024
    workers: int = 1
    threads: int = 0
    """Of each worker; 0: the machine's cores divided among the workers."""
    devices: tuple[str, ...] = ("cpu",)
    """Where the workers are, one after the other: ``["cuda:0", "cuda:1"]`` with two workers is one on each."""
    timeout_ms: float = 30_000.0
    """The longest that a request may take where it does not say itself, and the longest that a batch may take."""
    max_worker_bytes: int = 0
    """A worker that has grown beyond this is replaced between two batches; 0: never."""
    limit_ms: float = 0.0
    """The latency limit that these settings were chosen for: slower answers are counted. 0: none."""
    curve: CurveTable | None = None

    def batching(self) -> BatchSettings:
        """For the batcher. Raises ValueError for settings that cannot be."""
        if self.policy not in ("greedy", "curve"):
            raise ValueError(f"no such policy: {self.policy!r}")
        if not self.devices or not all(_DEVICE.fullmatch(device) for device in self.devices):
            raise ValueError('devices are named as torch does: "cpu", "cuda", "cuda:1"')
        if not (0 <= self.threads <= MAX_THREADS and 0 < self.timeout_ms < 1e9 and 0 <= self.limit_ms < math.inf):
            raise ValueError(f"threads is 0 to {MAX_THREADS}, timeout_ms a time, limit_ms 0 or more")
        return BatchSettings(
            max_rows=self.max_rows, max_delay_s=self.delay_ms / 1e3, policy=self.policy, pad=self.pad,  # type: ignore[arg-type]
            buckets=self.buckets, max_queue_rows=self.max_queue_rows, workers=self.workers,
        )  # fmt: skip

    def cost_curve(self, machine: str) -> CostCurve | None:
        """The measured curve, if it is of this machine."""
        if self.curve is None or (self.curve.machine and self.curve.machine != machine):
            return None
        return CostCurve(self.curve.rows, self.curve.seconds)


def seal(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` over the files that are in the folder now."""
    files = {file.name: _digest(file) for file in sorted(folder.iterdir()) if file.name != MANIFEST}
    sealed = msgspec.structs.replace(manifest, files=files)
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(sealed), indent=1))


def open_package(path: Path, unpack_to: Path | None = None) -> Package:
    """Open a package and check that it is whole. A zip is unpacked, to `unpack_to` or a folder beside it.

    Raises `UsageError` with one line for anything that is not a sound package.
    """
    if path.is_file():
        path = unpack(path, unpack_to or path.with_suffix(""))
    if not (path / MANIFEST).is_file():
        raise UsageError(f"{path} is no package: it has no {MANIFEST}")
    if (path / MANIFEST).stat().st_size > _MAX_TEXT:
        raise UsageError(f"{path / MANIFEST} is too large")
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(f"{path / MANIFEST} cannot be read: {first_line(error)}") from error
    if manifest.format != FORMAT:
        raise UsageError(f"{path} has package format {manifest.format}; this fettle reads format {FORMAT}")
    check_name(manifest.name, manifest.version)
    specifiers(manifest.requires)
    for name, digest in manifest.files.items():
        file = path / name
        if PurePosixPath(name).name != name or name.startswith("."):
            raise UsageError(f"{path} names a file outside itself: {name[:80]!r}")
        if file.is_symlink() or not file.is_file():
            raise UsageError(f"{path} lacks {name}")
        if _digest(file) != digest:
            raise UsageError(f"{path / name} is damaged or was changed: its SHA-256 is not the manifest's")
    return Package(path, manifest, read_settings(path, manifest))


def read_settings(folder: Path, manifest: Manifest) -> ServeSettings:
    """``serve.toml`` of a package, or what holds where there is none; checked."""
    path = folder / (SETTINGS if SETTINGS in manifest.files else MANIFEST)
    try:
        settings = ServeSettings(max_rows=manifest.max_rows)
        if path.name == SETTINGS:
            if path.stat().st_size > _MAX_TEXT:
                raise UsageError(f"{path} is too large")
            settings = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), ServeSettings)
        settings.batching()
        settings.cost_curve("")
    except (OSError, ValueError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} cannot be used: {first_line(error)}") from error
    if settings.max_rows > manifest.max_rows:
        raise UsageError(f"{path} asks for {settings.max_rows} rows; the model takes {manifest.max_rows}")
    return settings


def write_settings(package: Package, settings: ServeSettings) -> Package:
    """Other settings for a package that is a folder; its manifest is sealed anew."""
    (package.folder / SETTINGS).write_text(tomli_w.dumps(as_toml_data(settings)), encoding="utf-8")
    seal(package.folder, package.manifest)
    return open_package(package.folder)


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack a package's zip: flat names only, no links, no bombs. Raises `UsageError`; then nothing is left behind."""
    if folder.exists():
        if not (folder / MANIFEST).is_file():
            raise UsageError(f"{archive} cannot be unpacked: {folder} is in the way")
        return folder
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        unzip(archive, scratch, what="package", max_files=MAX_FILES)
        os.rename(scratch, folder)
    except OSError as error:
        raise UsageError(f"{archive} cannot be unpacked: {first_line(error)}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def check_name(name: str, version: str) -> None:
    """Raise `UsageError` unless these can stand in a URL, a file name and a label."""
    import re

    for what, text in (("name", name), ("version", version)):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", text):
            raise UsageError(f"{text[:80]!r} is no {what} of a model: letters, digits, dot, dash and underline")


def as_toml_data(settings: ServeSettings) -> dict[str, Any]:
    """Settings as what ``serve.toml`` can hold."""
    data = {key: value for key, value in msgspec.to_builtins(settings).items() if value is not None}
    return json.loads(json.dumps(data))  # type: ignore[no-any-return]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
