"""TorchServe's model archives (.mar) as packages: read as a zip of data, its code run only where it is trusted.

An archive is a zip with ``MAR-INF/MANIFEST.json``, weights (a pickled state dict, a TorchScript program, or anything
that its handler knew to read), and Python code: the model's class, the handler, whatever else they import. Weights are
read by ``torch.load(weights_only=True)``. The model's class and TorchScript are programs: they run only where the
operator names the archive's SHA-256, or are not needed because the operator brings the class.
Source of the format: github.com/pytorch/serve, model-archiver/README.md.
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from fettle.errors import UsageError, first_line, refusing, type_text
from fettle.files import sha256_of
from fettle.package.archive import bounded, unzip
from fettle.package.export import Positional, check_free, check_installed, write_package
from fettle.package.handlers import READY
from fettle.package.handlers.parts import LABELS, labels_file
from fettle.package.manifest import Package, check_name
from fettle.package.settings import ServeSettings
from fettle.package.tensors import TO_NUMPY
from fettle.recipe import Recipe
from fettle.workload import Workload

MANIFEST = "MAR-INF/MANIFEST.json"
MAX_MANIFEST, MAX_FILES = 1 << 20, 10_000
_INPUT = re.compile(r"([A-Z]+[0-9]+|BOOL)\[(-?\d+(?:,-?\d+)*)\]")
_FREE = (16, 24)
"""Two sizes for a dimension that may have any."""
_KNOWN_HANDLERS = {"image_classifier": "image"}
"""TorchServe's own handlers that have a counterpart here."""
_NAMES = {"name": "modelName", "version": "modelVersion", "weights": "serializedFile", "code": "modelFile"}
"""What a manifest calls the facts of a `Mar`."""


class _Model(msgspec.Struct, rename=_NAMES):
    name: str
    version: str = "1"
    weights: str = ""
    """Name of the file with the weights in the archive; empty where there is none."""
    code: str = ""
    """Name of the file with the model's class; empty where there is none."""
    handler: str = ""


class _Manifest(msgspec.Struct):
    model: _Model
    runtime: str = "python"


class Mar(_Model, kw_only=True):
    """What an archive says of itself; nothing of it has been unpacked."""

    path: Path
    digest: str
    """SHA-256 of the whole archive: what the operator names to trust it."""


def read_mar(path: Path) -> Mar:
    """Read the manifest of an archive, and nothing else. Raises `UsageError`."""
    if not path.is_file():
        raise UsageError(f"{'not a file' if path.exists() else 'no such file'}: {path}")
    with refusing(f"{path} is not a model archive:"):  # a damaged zip raises nearly everything
        digest = sha256_of(path)
        with zipfile.ZipFile(path) as archive:
            if MANIFEST not in archive.namelist():
                raise UsageError(f"{path} is not a model archive: it has no {MANIFEST}")
            with archive.open(bounded(archive.getinfo(MANIFEST))) as entry:
                text = entry.read(MAX_MANIFEST + 1)
        if len(text) > MAX_MANIFEST:
            raise ValueError("its manifest is too large")
        manifest = msgspec.json.decode(text, type=_Manifest)
    mar = Mar(**msgspec.structs.asdict(manifest.model), path=path, digest=digest)
    if not manifest.runtime.lower().startswith("python"):
        raise UsageError(f"{path} is for the runtime {manifest.runtime[:40]!r}: only Python's can be converted")
    check_name(mar.name, mar.version)
    return mar


def import_mar(
    mar: Mar,
    path: Path,
    *,
    trust: str = "",
    workload: Workload | None = None,
    inputs: Sequence[str] = (),
    handler: Path | str | None = None,
    handler_settings: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    settings: ServeSettings | None = None,
    name: str = "",
    on_progress: Callable[[str], None] = lambda text: None,
) -> Package:
    """Convert an archive to a package at `path`.

    With a `workload` its model gets the archive's weights, and none of the archive's code runs. Without one the
    archive's own code builds the model: `trust` must be the archive's digest, and `inputs` says what it takes, as
    ``FP32[-1,3,224,224]``. Raises `UsageError`; then nothing is written.
    """
    check_installed()
    check_free(path)
    if not mar.weights and workload is None and not mar.code:
        raise UsageError(f"{mar.path} holds neither weights nor a model's class: there is nothing to convert")
    if workload is None and trust != mar.digest:
        raise UsageError(
            f"{mar.path} builds its model by running code; look at it, then give `trust='{mar.digest}'`, "
            "or bring the model's class yourself with `target='FILE.py:factory'`"
        )
    kind = _handler(mar, handler)
    with tempfile.TemporaryDirectory(prefix="fettle-mar-") as scratch:
        folder = Path(scratch)
        on_progress("unpacking the archive")
        unzip(mar.path, folder, what="model archive", max_files=MAX_FILES, folders=True)
        named = dict(files or {})
        names = folder / "index_to_name.json"
        if kind in ("image", "detection") and LABELS not in named and names.is_file():
            named[LABELS] = labels_file(names)
        on_progress("reading the weights")
        weights = _member(folder, mar.weights)
        if workload is not None:
            if weights is not None:
                _load_weights(workload.model, weights)
        else:
            batches = _batches(inputs, kind)
            workload = Workload(_model(folder, mar, weights, batches[0]), batches)
        return write_package(
            workload, Recipe(), path, name=name or mar.name, version=mar.version, settings=settings,
            handler=kind, handler_settings=handler_settings, files=named, on_progress=on_progress,
        )  # fmt: skip


def _handler(mar: Mar, handler: Path | str | None) -> Path | str | None:
    """The handler that was asked for, else the counterpart of TorchServe's own."""
    if handler is not None:
        return handler
    if not mar.handler or mar.handler == "base_handler":
        return None
    if mar.handler in _KNOWN_HANDLERS:
        return _KNOWN_HANDLERS[mar.handler]
    ready = ", ".join(READY)
    raise UsageError(
        f"the handler {mar.handler[:80]!r} of {mar.path} was written for TorchServe: give `handler` with one of "
        f"{ready}, or with your own handler.py of the four steps"
    )


def _member(folder: Path, name: str) -> Path | None:
    """A file that the manifest names, inside the folder."""
    if not name:
        return None
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
        raise UsageError(f"the archive lacks {name[:80]!r}, which its manifest names")
    return path


def _model(folder: Path, mar: Mar, weights: Path | None, batch: tuple[torch.Tensor, ...]) -> torch.nn.Module:
    """The model that the archive's own code builds. Only called where that code is trusted."""
    if weights is not None and _is_torchscript(weights):
        return _from_torchscript(weights, batch)
    code = _member(folder, mar.code)
    if code is None:
        raise UsageError(f"{mar.path} has no class for its weights: bring it with `target='FILE.py:factory'`")
    module = _run(code, folder)
    made = [
        thing
        for thing in vars(module).values()
        if isinstance(thing, type) and issubclass(thing, torch.nn.Module) and thing.__module__ == module.__name__
    ]
    if len(made) != 1:
        raise UsageError(f"{mar.code[:80]} defines {len(made)} models: bring the one with `target='FILE.py:factory'`")
    with refusing(f"{made[0].__name__} of {mar.code[:80]} cannot be built:"):
        model = made[0]()
    if weights is not None:
        _load_weights(model, weights)
    return model.eval()


def _run(code: Path, folder: Path) -> Any:
    """Import the archive's code, which may import its neighbours."""
    spec = importlib.util.spec_from_file_location("fettle_mar_model", code)
    if spec is None or spec.loader is None:
        raise UsageError(f"{code.name[:80]} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(folder))
    sys.modules[spec.name] = module  # data classes look their own module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script may leave
        raise UsageError(f"{code.name[:80]} cannot be imported: {first_line(error)}") from error
    finally:
        sys.path.remove(str(folder))
        del sys.modules[spec.name]
    return module


def _load_weights(model: Any, path: Path) -> None:
    """Put a state dict into a model. Only tensors are read: a pickle with anything else is refused."""
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"the target's model is {type_text(model)}: only an nn.Module takes weights")
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        with refusing(f"{path.name[:80]} holds no weights:", (OSError, SafetensorError)):
            state: Any = load_file(path)
    else:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged pickle raises nearly everything
            raise UsageError(
                f"{path.name[:80]} holds more than weights, or is damaged; save model.state_dict() instead"
            ) from error
    for key in ("state_dict", "model_state_dict"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UsageError(f"{path.name[:80]} holds no state dict")
    others = state.keys().isdisjoint(model.state_dict())
    if others and all(str(name).startswith("module.") for name in state):  # saved out of DataParallel
        state = {str(name).removeprefix("module."): value for name, value in state.items()}
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UsageError(f"the weights are not this model's: {' '.join(lines[:2])[:300]}") from error


def _is_torchscript(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as file:
            return any(name.count("/") == 1 and name.endswith("/constants.pkl") for name in file.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def _from_torchscript(path: Path, batch: tuple[torch.Tensor, ...]) -> torch.nn.Module:
    """A TorchScript program as an exported one, answering as it did."""
    with refusing(f"the TorchScript program {path.name[:80]} cannot be converted:"):
        from torch._export.converter import TS2EPConverter

        script = torch.jit.load(str(path), map_location="cpu").eval()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            converted = TS2EPConverter(script, batch).convert().module()
            wanted, answer = script(*batch), converted(*batch)
        torch.testing.assert_close(answer, wanted, rtol=1e-3, atol=1e-4)
    return Positional(converted)


def _batches(inputs: Sequence[str], kind: Path | str | None) -> list[tuple[torch.Tensor, ...]]:
    """Two batches of random inputs; where a size is free, they differ in it."""
    texts = list(inputs) or (["FP32[-1,3,224,224]"] if kind == "image" else [])
    if not texts:
        raise UsageError("say what the model takes, for example `input='FP32[-1,3,224,224]'`; -1 is any size")
    torch.manual_seed(0)
    return [tuple(_random(text, free) for text in texts) for free in _FREE]


def _random(text: str, free: int) -> torch.Tensor:
    match = _INPUT.fullmatch(text.replace(" ", ""))
    if not match or match[1] not in TO_NUMPY:
        kinds = ", ".join(TO_NUMPY)
        raise UsageError(
            f"`input={text!r}` is not an input: a type of {kinds} and sizes, for example FP32[-1,3,224,224]"
        )
    sizes = [int(size) for size in match[2].split(",")]
    if any(size == 0 or size < -1 for size in sizes):
        raise UsageError(f"`input={text!r}` has a size below 1")
    shape = [2 if i == 0 and size == -1 else free if size == -1 else size for i, size in enumerate(sizes)]
    if math.prod(shape) > 1 << 28:
        raise UsageError(f"`input={text!r}` is too large for a sample")
    kind = torch.from_numpy(np.zeros(0, TO_NUMPY[match[1]])).dtype
    return torch.rand(shape).to(kind) if kind.is_floating_point else torch.ones(shape, dtype=kind)
