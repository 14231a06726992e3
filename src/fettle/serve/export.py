"""Export: from a workload and a recipe to a model package, judged before it is called one."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tomli_w
import torch

from fettle.errors import UsageError
from fettle.recipe import Recipe
from fettle.serve import handlers
from fettle.serve.generating import generating
from fettle.serve.handler import Context
from fettle.serve.host import host_id
from fettle.serve.package import (
    FORMAT,
    HANDLER,
    SAMPLES,
    SETTINGS,
    Manifest,
    Package,
    ServeSettings,
    as_toml_data,
    check_name,
    open_package,
    seal,
)  # fmt: skip
from fettle.serve.program import export_program, load_program, save_program
from fettle.serve.runner import as_array
from fettle.serve.tensors import FROM_NUMPY, TensorSpec
from fettle.techniques import find
from fettle.workload import Workload, leaves

_BEFORE_EXPORT = ("attention", "mode")
"""Techniques that rewrite the model's own modules, which an exported program no longer has."""
_NOT_SERVED = ("mode", "batch", "allocator", "threads")
"""Settings of the process or of the call: the server has its own place for them."""


def write_package(
    workload: Workload,
    recipe: Recipe,
    path: Path,
    *,
    name: str,
    version: str = "1",
    settings: ServeSettings | None = None,
    handler: Path | str | None = None,
    handler_settings: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Package:
    """Export a workload's model with its recipe to `path`, a folder or a ``.zip``; open and check what was written.

    `handler` is the name of a ready handler, with `handler_settings` above what the model suggests, or the path of the
    user's own ``handler.py``. `files` are further files for it, by their names in the package: labels, a tokenizer.

    Raises `UsageError` where the model cannot be exported, or the recipe cannot be applied to the exported model.
    """
    if path.exists():
        raise UsageError(f"{path} exists already: give another --output or another --version")
    check_name(name, version)
    settings = settings or ServeSettings()
    _check_exportable(recipe)
    if not isinstance(workload.model, torch.nn.Module):
        raise UsageError(f"the model is a {type(workload.model).__name__}: only an nn.Module can be packaged")
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        tell("exporting the model")
        if handler == "generate":
            workload = generating(workload)
        flat = _Flat(workload, recipe)
        most = max(settings.max_rows, flat.rows)
        save_program(export_program(flat, flat.samples, flat.shapes, 2 * most), scratch)
        _save_samples(flat, scratch)
        tell("applying the recipe to the exported model")
        rest = recipe.without(*_BEFORE_EXPORT, *_NOT_SERVED)
        outputs, accuracy = _judge(flat, scratch, rest)
        (scratch / SETTINGS).write_text(tomli_w.dumps(as_toml_data(settings)), encoding="utf-8")
        ready = _add_handler(scratch, handler, handler_settings or {}, files or {}, flat.inputs, outputs)
        manifest = Manifest(
            format=FORMAT, name=name, version=version, inputs=flat.inputs, outputs=outputs,
            max_rows=2 * most, files={}, recipe=dict(rest.levels), accuracy=accuracy, handler=ready,
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


def _check_exportable(recipe: Recipe) -> None:
    """Refuse levels that are calibrated: on modules that an exported model no longer has, and on several batches."""
    for name, level in recipe.levels.items():
        if level in find(name).calibrated:
            raise UsageError(
                f"{name}={level} cannot be packaged: it is calibrated on the model's own layers, and an exported model "
                f"has none. Tune without it: fettle tune TARGET --technique {name}={find(name).given}"
            )


def _add_handler(
    folder: Path, handler: Path | str | None, wanted: Mapping[str, Any], files: Mapping[str, bytes],
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec],
) -> handlers.Settings | None:  # fmt: skip
    """Copy what the handler reads; the settings of a ready one, checked by starting it."""
    for name, data in files.items():
        (folder / name).write_bytes(data)
    if wanted and not isinstance(handler, str):
        raise UsageError("handler settings are for a ready handler; your own handler.py knows its own")
    if isinstance(handler, Path):
        if not handler.is_file():
            raise UsageError(f"no such file: {handler}")
        shutil.copyfile(handler, folder / HANDLER)
        return None
    if handler is None:
        return None
    settings = handlers.settle(handler, dict(wanted), inputs, outputs, set(files))
    manifest = Manifest(FORMAT, "check", "1", tuple(inputs), tuple(outputs), 1, {})
    handlers.make(settings).initialize(Context(folder, manifest, runner=None))  # type: ignore[arg-type] # nothing runs
    return settings


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


def _machine() -> dict[str, str]:
    from fettle.machine import this_machine

    machine = this_machine()
    return {"id": host_id(), "summary": machine.summary}


def _now() -> str:
    from datetime import UTC, datetime

    return datetime.now(UTC).isoformat(timespec="seconds")
