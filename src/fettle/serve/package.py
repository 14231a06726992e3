"""The model package: a folder or a zip that holds a tuned model as data, with what it was tuned and judged by.

    manifest.json        what it is: format, name, version, inputs, outputs, recipe, accuracy, SHA-256 of every file
    graph.json           the model as an exported program, and
    weights.safetensors  its weights
    samples.safetensors  one batch, for calibrating the recipe and for warming up
    serve.toml           how to serve it: batch rows, delay, workers, threads, and the measured cost curve
    handler.py           optional: the user's own code, run only where the operator trusts its digest

Opening a package parses and checks it; nothing in it is run or unpickled. Applying the recipe runs fettle's own code.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import numpy as np
import tomli_w
import torch

from fettle.errors import UsageError, first_line
from fettle.recipe import Recipe
from fettle.serve.policy import BatchSettings, CostCurve
from fettle.serve.program import export_program, load_program, save_program
from fettle.serve.tensors import FROM_NUMPY, TensorSpec
from fettle.workload import Workload, leaves

MANIFEST, SAMPLES, SETTINGS, HANDLER = "manifest.json", "samples.safetensors", "serve.toml", "handler.py"
FORMAT = 1
MAX_FILES, MAX_BYTES, MAX_RATIO = 256, 64 << 30, 200
"""Of an archive: entries, bytes when unpacked, and how many times larger an entry may be than its packed form."""
_MAX_TEXT = 1 << 20
_BEFORE_EXPORT = ("attention", "mode")
"""Techniques that rewrite the model's own modules, which an exported program no longer has."""
_NOT_SERVED = ("mode", "batch", "allocator", "threads")
"""Settings of the process or of the call: the server has its own place for them."""


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
    accuracy: dict[str, Any] = {}
    requires: dict[str, str] = {}
    machine: dict[str, str] = {}
    model: str = "exported"
    """``exported``, or ``none`` where the handler brings a model of its own."""
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
        return BatchSettings(
            max_rows=self.max_rows, max_delay_s=self.delay_ms / 1e3, policy=self.policy, pad=self.pad,  # type: ignore[arg-type]
            buckets=self.buckets, max_queue_rows=self.max_queue_rows, workers=self.workers,
        )  # fmt: skip

    def cost_curve(self, machine: str) -> CostCurve | None:
        """The measured curve, if it is of this machine."""
        if self.curve is None or (self.curve.machine and self.curve.machine != machine):
            return None
        return CostCurve(self.curve.rows, self.curve.seconds)


def write_package(
    workload: Workload,
    recipe: Recipe,
    path: Path,
    *,
    name: str,
    version: str = "1",
    settings: ServeSettings | None = None,
    handler: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Package:
    """Export a workload's model with its recipe to `path`, a folder or a ``.zip``; open and check what was written.

    Raises `UsageError` where the model cannot be exported, or the recipe cannot be applied to the exported model.
    """
    if path.exists():
        raise UsageError(f"{path} exists already: give another --output or another --version")
    check_name(name, version)
    settings = settings or ServeSettings()
    if not isinstance(workload.model, torch.nn.Module):
        raise UsageError(f"the model is a {type(workload.model).__name__}: only an nn.Module can be packaged")
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        tell("exporting the model")
        flat = _Flat(workload, recipe)
        most = max(settings.max_rows, flat.rows)
        save_program(export_program(flat, flat.samples, flat.shapes, 2 * most), scratch)
        _save_samples(flat, scratch)
        tell("applying the recipe to the exported model")
        rest = recipe.without(*_BEFORE_EXPORT, *_NOT_SERVED)
        outputs, accuracy = _judge(flat, scratch, rest)
        (scratch / SETTINGS).write_text(tomli_w.dumps(_plain(settings)), encoding="utf-8")
        if handler is not None:
            shutil.copyfile(handler, scratch / HANDLER)
        manifest = Manifest(
            format=FORMAT, name=name, version=version, inputs=flat.inputs, outputs=outputs,
            max_rows=2 * most, files={}, recipe=dict(rest.levels), accuracy=accuracy,
            requires={"torch": torch.__version__.partition("+")[0]}, machine=_machine(), created=_now(),
        )  # fmt: skip
        seal(scratch, manifest)
        if path.suffix == ".zip":
            _zip(scratch, path)
        else:
            os.rename(scratch, path)
            os.chmod(path, 0o755)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return open_package(path)


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
    """``serve.toml`` of a package, checked."""
    if SETTINGS not in manifest.files:
        return ServeSettings(max_rows=manifest.max_rows)
    try:
        if (folder / SETTINGS).stat().st_size > _MAX_TEXT:
            raise UsageError(f"{folder / SETTINGS} is too large")
        data = tomllib.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        settings = msgspec.convert(data, ServeSettings)
        settings.batching()
        settings.cost_curve("")
    except (OSError, ValueError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{folder / SETTINGS} cannot be used: {first_line(error)}") from error
    if settings.max_rows > manifest.max_rows:
        raise UsageError(f"{folder / SETTINGS} asks for {settings.max_rows} rows; the model takes {manifest.max_rows}")
    return settings


def write_settings(package: Package, settings: ServeSettings) -> Package:
    """Other settings for a package that is a folder; its manifest is sealed anew."""
    (package.folder / SETTINGS).write_text(tomli_w.dumps(_plain(settings)), encoding="utf-8")
    seal(package.folder, package.manifest)
    return open_package(package.folder)


def load_model(package: Package) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """The tuned model, a callable from tensors to a tuple of tensors, and one batch of samples."""
    from safetensors.torch import load_file

    from fettle.applying import apply

    module = load_program(package.folder)
    samples = load_file(package.folder / SAMPLES)
    try:
        tensors = [samples[spec.name] for spec in package.manifest.inputs]
    except KeyError as error:
        raise UsageError(f"{SAMPLES} has no tensor {error}") from error
    recipe = Recipe(package.manifest.recipe)
    run = apply(module, recipe, [tuple(tensors)]) if recipe.levels else module
    return run, tensors


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack a package's zip: flat names only, no links, no bombs. Raises `UsageError`; then nothing is left behind."""
    if folder.exists():
        return folder if (folder / MANIFEST).is_file() else _refuse(archive, f"{folder} is in the way")
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        with zipfile.ZipFile(archive) as file:
            entries = file.infolist()
            if len(entries) > MAX_FILES or sum(entry.file_size for entry in entries) > MAX_BYTES:
                _refuse(archive, "it is too large")
            names = [entry.filename for entry in entries]
            if len(set(names)) != len(names):
                _refuse(archive, "it holds a name twice")
            for entry in entries:
                place = scratch / entry.filename
                if entry.is_dir() or "/" in entry.filename or "\\" in entry.filename or entry.filename.startswith("."):
                    _refuse(archive, f"a package holds plain files only, not {entry.filename[:80]!r}")
                if not place.resolve().is_relative_to(scratch.resolve()):
                    _refuse(archive, f"{entry.filename[:80]!r} leaves the folder")
                if stat.S_ISLNK(entry.external_attr >> 16):
                    _refuse(archive, f"{entry.filename[:80]!r} is a link")
                if entry.file_size > MAX_RATIO * max(entry.compress_size, 1) and entry.file_size > _MAX_TEXT:
                    _refuse(archive, f"{entry.filename[:80]!r} is packed suspiciously well")
                _copy_bounded(file, entry, place)
        os.rename(scratch, folder)
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise UsageError(f"{archive} cannot be unpacked: {first_line(error)}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _copy_bounded(file: zipfile.ZipFile, entry: zipfile.ZipInfo, place: Path) -> None:
    left = entry.file_size  # what the directory says may be a lie: never write more than it
    with file.open(entry) as source, place.open("wb") as sink:
        while block := source.read(1 << 20):
            left -= len(block)
            if left < 0:
                raise UsageError(f"{entry.filename[:80]!r} is larger than it says")
            sink.write(block)


def _refuse(archive: Path, why: str) -> Path:
    raise UsageError(f"{archive} is no sound package: {why}")


def check_name(name: str, version: str) -> None:
    """Raise `UsageError` unless these can stand in a URL, a file name and a label."""
    import re

    for what, text in (("name", name), ("version", version)):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", text):
            raise UsageError(f"{text[:80]!r} is no {what} of a model: letters, digits, dot, dash and underline")


# -- from a workload to tensors ---------------------------------------------------------------------------------------


class _Flat(torch.nn.Module):
    """The workload's model in eval mode, from tensors to a tuple of tensors, with their names and moving sizes."""

    def __init__(self, workload: Workload, recipe: Recipe) -> None:
        super().__init__()
        assert isinstance(workload.model, torch.nn.Module)
        self.inner = _rewritten(workload.model.eval(), recipe, workload)
        self.workload = workload
        first = workload.inputs[0]
        found = [[leaf for leaf in leaves(batch) if isinstance(leaf[1], torch.Tensor)] for batch in workload.inputs]
        paths = [path for path, _ in found[0]]
        batches = [[tensor for _, tensor in batch] for batch in found if [path for path, _ in batch] == paths]
        if not paths:
            raise UsageError("the model's inputs hold no tensor: nothing can be served")
        rows = workload.samples or int(batches[0][0].shape[0] if batches[0][0].dim() else 1)
        self.rows, self.batches = rows, batches
        self.samples = batches[0]
        self.names = _input_names(self.inner, first, paths)
        self.shapes = [_moving(index, batches, rows) for index in range(len(paths))]
        self.paths: list[str] = []
        with torch.no_grad():
            self.reference = [tensor.clone() for tensor in self(*self.samples)]
        self.inputs = tuple(
            TensorSpec(
                name,
                _datatype(tensor),
                tuple(-1 if dim in moving else size for dim, size in enumerate(tensor.shape)),
                batched=moving.get(0) == "rows",
            )
            for name, tensor, moving in zip(self.names, self.samples, self.shapes, strict=True)
        )

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Put the tensors where the batch had them, call the model, and take its tensors out again."""
        given = iter(tensors)
        batch = _with_tensors(self.workload.inputs[0], given)
        found = list(leaves(self.workload.run(self.inner, batch)))
        self.paths = [path for path, leaf in found if isinstance(leaf, torch.Tensor)]
        return tuple(leaf for _, leaf in found if isinstance(leaf, torch.Tensor))


def _rewritten(model: torch.nn.Module, recipe: Recipe, workload: Workload) -> torch.nn.Module:
    """The model after the techniques that change its own modules."""
    from fettle.applying import apply

    levels = {name: level for name, level in recipe.levels.items() if name in _BEFORE_EXPORT and name != "mode"}
    if not levels:
        return model
    changed = apply(model, Recipe(levels), list(workload.inputs))
    return changed if isinstance(changed, torch.nn.Module) else model


def _with_tensors(tree: Any, tensors: Any) -> Any:
    """The same tree with other tensors, taken in order. Dataclasses are copied, other leaves stay."""
    import dataclasses

    if isinstance(tree, torch.Tensor):
        return next(tensors)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type) and not isinstance(tree, Mapping):
        return dataclasses.replace(
            tree, **{item.name: _with_tensors(getattr(tree, item.name), tensors) for item in dataclasses.fields(tree)}
        )
    if isinstance(tree, Mapping):
        return {key: _with_tensors(value, tensors) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_with_tensors(value, tensors) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_with_tensors(value, tensors) for value in tree)
    return tree


def _input_names(model: torch.nn.Module, batch: Any, paths: Sequence[str]) -> list[str]:
    """What a client calls each tensor: its keyword, else the name of the argument of ``forward``, else its path."""
    import inspect

    try:
        arguments = [name for name in inspect.signature(model.forward).parameters if name != "self"]
    except (TypeError, ValueError):
        arguments = []
    names = []
    for index, path in enumerate(paths):
        plain = path.lstrip(".")
        if plain.isidentifier() and path != "output":
            names.append(plain)
        elif (isinstance(batch, (tuple, torch.Tensor))) and index < len(arguments) and path.count("[") <= 1:
            names.append(arguments[index])
        else:
            names.append("".join(c if c.isalnum() else "_" for c in plain).strip("_") or f"input_{index}")
    return names if len(set(names)) == len(names) else [f"input_{index}" for index in range(len(paths))]


def _moving(index: int, batches: Sequence[Sequence[torch.Tensor]], rows: int) -> dict[int, str]:
    """Which dimensions of an input change: the rows, and those that differ between the sample batches.

    Dimensions that take the same sizes in the same order are one dimension: a sequence and its mask.
    """
    sizes = [batch[index].shape for batch in batches]
    moving = {}
    for dim in range(len(sizes[0])):
        seen = [size[dim] for size in sizes]
        if dim == 0 and seen[0] == rows:
            moving[0] = "rows"
        elif len(set(seen)) > 1:
            moving[dim] = "n" + hashlib.sha256(str(seen).encode()).hexdigest()[:6]
    return moving


def _save_samples(flat: _Flat, folder: Path) -> None:
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().clone() for name, tensor in zip(flat.names, flat.samples, strict=True)}
    save_file(tensors, folder / SAMPLES)


def _judge(flat: _Flat, folder: Path, recipe: Recipe) -> tuple[tuple[TensorSpec, ...], dict[str, Any]]:
    """Load what was written as a server would, and compare it with the model as given."""
    from fettle.applying import apply

    module = load_program(folder)
    run = apply(module, recipe, [tuple(flat.samples)]) if recipe.levels else module
    with torch.inference_mode():
        answers = _tensors(run(*[tensor.clone() for tensor in flat.samples]))
        more = _tensors(run(*[_twice(t) if s.batched else t for t, s in zip(flat.samples, flat.inputs, strict=True)]))
    worst = 0.0
    for answer, wanted in zip(answers, flat.reference, strict=True):
        if answer.shape != wanted.shape:
            raise UsageError(f"the exported model answers in shape {tuple(answer.shape)}, not {tuple(wanted.shape)}")
        if wanted.is_floating_point():
            error = float((answer.float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-12))
            worst = max(worst, error)
    # Sizes that differ for another batch are free.
    sizes = [tensor.shape for tensor in flat.samples]
    other = next((batch for batch in flat.batches if [tensor.shape for tensor in batch] != sizes), flat.samples)
    with torch.inference_mode():
        elsewhere = _tensors(run(*[tensor.clone() for tensor in other]))
    outputs = []
    for path, answer, double, there in zip(flat.paths, answers, more, elsewhere, strict=True):
        batched = answer.dim() > 0 and double.shape[0] == 2 * answer.shape[0]
        fixed = [size if size == b else -1 for size, b in zip(answer.shape, there.shape, strict=True)]
        shape = (-1, *fixed[1:]) if batched else tuple(fixed)
        outputs.append(TensorSpec(_output_name(path), _datatype(answer), shape, batched))
    if not any(spec.batched for spec in outputs) and any(spec.batched for spec in flat.inputs):
        raise UsageError("the model's outputs do not have a row for each row of the input: it cannot be batched")
    names = [spec.name for spec in outputs]
    if len(set(names)) != len(names):
        outputs = [msgspec.structs.replace(spec, name=f"output_{i}") for i, spec in enumerate(outputs)]
    return tuple(outputs), {"relative_error": worst, "batches": 1, "against": "the model as given, in eval mode"}


def _output_name(path: str) -> str:
    plain = path.lstrip(".")
    if path.startswith("[") and path.count("[") == 1:
        return f"output_{path.strip('[]')}"
    return plain if plain.isidentifier() else "".join(c if c.isalnum() else "_" for c in plain).strip("_")


def _twice(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor])


def _tensors(outputs: Any) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor as clients can read it: 16-bit brain floats, which numpy lacks, become float32."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return tensor.contiguous().numpy()


def _datatype(tensor: torch.Tensor) -> str:
    kind = as_array(tensor[:0] if tensor.dim() else tensor).dtype
    if kind not in FROM_NUMPY:
        raise UsageError(f"tensors of type {tensor.dtype} cannot be served")
    return FROM_NUMPY[kind]


def _zip(folder: Path, path: Path) -> None:
    with zipfile.ZipFile(
        path, "w", zipfile.ZIP_STORED
    ) as file:  # weights do not compress; a stored zip is fast to open
        for item in sorted(folder.iterdir()):
            file.write(item, item.name)


def _plain(settings: ServeSettings) -> dict[str, Any]:
    data = {key: value for key, value in msgspec.to_builtins(settings).items() if value is not None}
    return json.loads(json.dumps(data))  # type: ignore[no-any-return]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _machine() -> dict[str, str]:
    from fettle.machine import this_machine

    machine = this_machine()
    return {"id": machine.id, "summary": machine.summary}


def _now() -> str:
    from datetime import UTC, datetime

    return datetime.now(UTC).isoformat(timespec="seconds")
