"""Export: from a workload and a recipe to a model package, judged before it is called one."""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import torch

from fettle.errors import UsageError, extra, first_line, refusing, type_text
from fettle.files import check_writable, whole
from fettle.machine import this_machine
from fettle.measure._accuracy import compare
from fettle.package import handlers
from fettle.package.flat import Flat, datatype
from fettle.package.generating import generating, of_model
from fettle.package.handler import Context, find_handler
from fettle.package.handlers.parts import LOGITS, PAST, SOURCE
from fettle.package.host import host_id
from fettle.package.manifest import (
    FORMAT,
    HANDLER,
    SAMPLES,
    SETTINGS,
    Manifest,
    Package,
    check_name,
    open_package,
    seal,
)
from fettle.package.model_runner import BITS, COMPILED_STEP, PART, ModelRunner, tuned
from fettle.package.program import TOGETHER, export_program, save_program
from fettle.package.requires import needed
from fettle.package.settings import ServeSettings, as_toml, powers
from fettle.package.tensors import TensorSpec
from fettle.recipe import Recipe
from fettle.techniques import (
    CATALOGUE,
    DTYPES,
    Facts,
    canonical,
    changed,
    cpu_flags,
    dtype_of,
    find,
    handed_on,
    quantize_exported,
)
from fettle.workload import Workload, device_of

MORE_ERROR = 1.25
"""A package may be this factor above the error that its recipe was tuned with."""
_STATIC = "int8-static"


def check_installed() -> None:
    """Raise `UsageError` where what packages are written with is not installed."""
    if find_spec("safetensors") is None:
        raise extra("a package needs safetensors", "serve")


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
    requires: Sequence[str] = (),
    evidence: Mapping[str, Any] | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Package:
    """Export a workload's model with its recipe to `path`, a folder or a ``.zip``; open and check what was written.

    `handler` is the name of a ready handler, with `handler_settings` above what the model suggests, or the path of the
    user's own ``handler.py``. `files` are further files for it, by their names in the package: labels, a tokenizer.
    `requires` names what a ``handler.py`` imports, as pip would be told.
    `evidence` is that of ``recipe.toml``: a package whose answers are worse than it allows is refused.

    Raises `UsageError` where the model cannot be exported, or the recipe cannot be applied to the exported model.
    """
    check_installed()
    check_free(path)
    check_name(name, version)
    model = _model_of(workload)
    settings = settings or ServeSettings()
    recipe, evidence = canonical(recipe), evidence or {}
    served = as_served(recipe)
    if served.levels.get("weights") in BITS:  # what is left to compute is little, and in float32
        served = served.without("precision", "matmul")
    _check_levels(served, evidence, Facts(device=device_of(model, workload.inputs[0]), dtype=dtype_of(model)))
    path.parent.mkdir(parents=True, exist_ok=True)
    from safetensors import SafetensorError  # what a full disk is there

    with (
        refusing(f"cannot write {path}:", SafetensorError),
        tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.", ignore_cleanup_errors=True) as made,
    ):  # on NFS what is still mapped cannot be deleted
        scratch = Path(made) / "package"
        scratch.mkdir()
        on_progress("exporting the model")
        choices = [workload]
        if handler == "generate":
            handler_settings = of_model(workload.model, handler_settings)
            choices = generating(workload, handler_settings.get("max_tokens"))
            if choices[1:]:  # keys and values are kept, by an attention of the package's own
                served, recipe = served.without("attention"), recipe.without("attention")
        flat, program, most = _exported(choices, recipe, served.levels.get("precision"), settings.max_rows)
        compiles = recipe.levels.get("compile") == "default" or recipe.levels.get("kv_cache", "").startswith("static-")
        if compiles and PAST in flat.names and SOURCE not in flat.names:
            served = Recipe({**served.without("compile").levels, "kv_cache": COMPILED_STEP})
        on_progress("storing it with its recipe")
        kept = Manifest(FORMAT, name, version, flat.inputs, (), most, {})
        kept = _store(program, flat, served, scratch, kept, evidence)
        _save_samples(flat, scratch)
        is_compiled = "compile" in kept.recipe or kept.recipe.get("runtime") == "aoti"
        on_progress("compiling it, for this machine, and " * is_compiled + "comparing its answers with the model's")
        kept = _judge(flat, scratch, kept, evidence, writes=handler == "generate")
        if kept.recipe.get("shapes") == "static":
            settings = msgspec.structs.replace(settings, buckets=tuple(powers(most)))  # each is compiled for itself
        if flat.device != "cpu":
            settings = msgspec.structs.replace(settings, devices=(flat.device,))
        (scratch / SETTINGS).write_text(as_toml(settings), encoding="utf-8")
        kind, here = handler if isinstance(handler, str) else "", this_machine()
        seal(scratch, msgspec.structs.replace(
            kept, handler=_add_handler(scratch, handler, handler_settings or {}, files or {}, kept),
            requires=needed(kept.recipe.get("runtime", "torch"), kind, requires),
            machine={**here.versions, "id": host_id(), "summary": here.summary},
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        ))  # fmt: skip
        _put(scratch, path)
    package = open_package(path)
    if kept.recipe.get("kv_cache") == COMPILED_STEP and flat.device == "cpu":
        on_progress("compiling its step, for this machine: what the first start would wait for")
        with suppress(UsageError):  # no room for a cache here, say: the server will tell
            find_handler(package, ModelRunner(package), "").running(settings.max_rows, settings.cache_bytes, 1)
    return package


def check_free(path: Path) -> None:
    """Raise `UsageError` where a package cannot be written: before the work that would be lost."""
    unpacked = path.with_suffix("") if path.suffix == ".zip" else path
    if there := next((place for place in (path, unpacked) if place.exists()), None):
        raise UsageError(f"{there} exists already: give another `output` or another `version`")
    check_writable(path)


def _model_of(workload: Workload) -> torch.nn.Module:
    """The one model that is packaged. Raises `UsageError` where there is none."""
    if workload.parts:
        raise UsageError("the workload is a pipeline, and a package holds one model: package the part that is served")
    if not isinstance(workload.model, torch.nn.Module):
        raise UsageError(f"the model is {type_text(workload.model)}: only an nn.Module can be packaged")
    return workload.model


def _put(folder: Path, path: Path) -> None:
    """Move a package to its place, as a folder or as a zip, whose weights are stored: they would not compress."""
    if path.suffix != ".zip":
        os.rename(folder, path)
        return
    with whole(path) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as file:
        for item in sorted(folder.iterdir()):
            file.write(item, item.name)


def as_served(recipe: Recipe) -> Recipe:
    """What a package holds of a recipe."""
    return recipe.without(*(technique.name for technique in CATALOGUE if not technique.served))


def _check_levels(recipe: Recipe, evidence: Mapping[str, Any], facts: Facts) -> None:
    """Raise `UsageError` for levels that cannot be stored."""
    for technique, level in changed(recipe):
        what = f"{technique.name}={level}"
        if why := technique.unpackaged(level, recipe, facts):
            raise UsageError(f"{what} cannot be packaged: {why}")
        if level == PART and not handed_on(recipe, evidence):
            raise UsageError(f"{what} names no layers: package the recipe.toml of the study that chose them")


def _exported(
    choices: Sequence[Workload], recipe: Recipe, precision: str | None, max_rows: int
) -> tuple[Flat, torch.export.ExportedProgram, int]:
    """The first of the workloads that can be exported, and the most rows that it takes."""
    try:
        flat = Flat(choices[0], recipe)
        if precision in DTYPES:
            # A graph of float32 does not say what is float32 under any precision, and what is in the weights' type.
            flat.to_16_bits(precision)
        most = 2 * max(max_rows, flat.rows)
        return flat, export_program(flat, flat.samples, flat.shapes, most), most
    except UsageError:
        if not choices[1:]:
            raise
        return _exported(choices[1:], recipe, precision, max_rows)


def _store(
    program: torch.export.ExportedProgram, flat: Flat, recipe: Recipe, folder: Path, manifest: Manifest,
    evidence: Mapping[str, Any],
) -> Manifest:  # fmt: skip
    """Write the model with those levels that must be in it, and say so; the others are applied when it is loaded."""
    levels = dict(recipe.levels)
    calibrated = [name for name, level in levels.items() if level in find(name).calibrated and level != PART]
    if calibrated and not flat.calibration:
        what = f"{calibrated[0]}={levels[calibrated[0]]}"
        raise UsageError(f"{what} has no batches to calibrate on: give the workload at least two")
    if levels.get("runtime", "").startswith("openvino"):
        from fettle.package.openvino import save_model

        allowed = evidence.get("limits", {}).get("max_error")
        facts = Facts(
            cpu_flags=cpu_flags(), learned=handed_on(recipe, evidence),
            **({} if allowed is None else {"max_error": allowed}),
        )  # fmt: skip
        save_model(program, levels["runtime"], flat.calibration, folder, facts)
        return msgspec.structs.replace(manifest, model="openvino", recipe=levels, applied=tuple(levels))
    if levels.get("quantize") == _STATIC:
        with refusing(f"quantize={_STATIC} cannot be applied to the model:"), torch.inference_mode(False):
            converted = quantize_exported(program.module(), [tuple(batch) for batch in flat.calibration])
        program = export_program(Positional(converted), flat.samples, flat.shapes, manifest.max_rows)
    save_program(program, folder)
    applied = tuple(
        name for name, level in levels.items() if find(name).before_export or name in calibrated or level in DTYPES
    )
    four_bits = tuple(handed_on(recipe, evidence).get("int4_layers", ()))
    return msgspec.structs.replace(manifest, recipe=levels, applied=applied, four_bits=four_bits)


class Positional(torch.nn.Module):
    """An exported program, whose inputs have names of their own, as a module that is given tensors in their order, and
    whose mode nobody changes."""

    def __init__(self, program: torch.nn.Module) -> None:
        super().__init__()
        program.train = lambda mode=True: program  # type: ignore[method-assign] # exported programs raise here
        self.inner = program  # not `graph`: a loaded module has one of its own

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.inner(*tensors)


def _add_handler(
    folder: Path, handler: Path | str | None, wanted: Mapping[str, Any], files: Mapping[str, bytes], manifest: Manifest
) -> handlers.Settings | None:
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
    settings = handlers.settle(handler, dict(wanted), manifest.inputs, manifest.outputs, set(files))
    handlers.make(settings).initialize(Context(folder, manifest, runner=None))  # type: ignore[arg-type] # nothing runs
    return settings


def _save_samples(flat: Flat, folder: Path) -> None:
    from safetensors.torch import save_file

    rows = [tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for tensor in flat.samples]
    save_file(dict(zip(flat.names, rows, strict=True)), folder / SAMPLES)


def _judge(flat: Flat, folder: Path, kept: Manifest, evidence: Mapping[str, Any], writes: bool) -> Manifest:
    """Load what was written as a server would, ask what a server may, and compare with the model as it was given. One
    that was tuned to write text (its evidence has a perplexity) is judged by the divergence of the next token.

    Returns what `kept` says with outputs and accuracy, and with the recipe that runs."""
    try:
        own_answers = _answers(flat, folder, kept)
    except UsageError:
        raise
    except Exception as error:
        # The compiler's code for any number of rows fails for some models: then each size gets code of its own.
        if kept.recipe.get("compile", "off") == "off" or "shapes" in kept.recipe:
            raise UsageError(f"the tuned model fails: {first_line(error)}") from error
        kept = msgspec.structs.replace(kept, recipe={**kept.recipe, "shapes": "static"})
        return _judge(flat, folder, kept, evidence, writes)
    errors = [_error(flat.paths, *pair) for pair in zip(own_answers, flat.wanted, strict=False)]
    # As the study judged: whole batches. A row alone may be further off than all of them together.
    worst = max(errors[flat.cuts :])
    calibrated = any(level in find(name).calibrated and level != PART for name, level in kept.recipe.items())
    accuracy: dict[str, Any] = {
        "relative_error": worst, "batches": len(errors) - flat.cuts, "against": "the model as given, in eval mode",
    }  # fmt: skip
    if flat.cuts:
        accuracy["relative_error_of_few_rows"] = max(errors[: flat.cuts])
    if calibrated:
        accuracy["calibrated_on"] = len(flat.calibration)
    allowed, found = evidence.get("limits", {}).get("max_error"), "a relative error"
    is_text = "perplexity" in evidence.get("accuracy", {})
    if writes and is_text:
        pairs = zip(own_answers[flat.cuts :], flat.wanted[flat.cuts :], strict=False)
        place = next(number for number, path in enumerate(flat.paths) if LOGITS in path)
        worst, found = max(_divergence(answers[place], wanted[place]) for answers, wanted in pairs), "a divergence"
        accuracy["divergence"] = worst
    if "error" in evidence.get("accuracy", {}):
        name = "divergence" if is_text else "relative_error"
        accuracy["tuned"] = {name: evidence["accuracy"]["error"], "allowed": allowed}
    # Fewer batches are judged here than by the study: a little more is not a surprise.
    if isinstance(allowed, int | float) and not worst <= MORE_ERROR * allowed:
        raise UsageError(f"the packaged model's answers have {found} of {worst:.2g}; fettle tune allowed {allowed:g}")
    return msgspec.structs.replace(kept, outputs=_outputs(flat, own_answers), accuracy=accuracy)


def _divergence(answer: torch.Tensor, wanted: torch.Tensor) -> float:
    """The mean KL divergence of scores [rows, vocabulary] from those of the model as given, in nats."""
    said, right = answer.float().log_softmax(-1), wanted.float().log_softmax(-1)
    return float((right.exp() * (right - said)).nansum(-1).mean())  # a score of -inf has no part in it


def _error(paths: Sequence[str], answers: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The largest relative L2 error of the outputs, as a study judges it. Raises `UsageError` where it cannot be had:
    for another shape, or what is not finite."""
    judged = compare(*(dict(zip(paths, some, strict=True)) for some in (answers, wanted)))
    if judged.problem:
        raise UsageError(f"the packaged model answers otherwise than the model as given: {judged.problem}")
    return judged.error


def _answers(flat: Flat, folder: Path, kept: Manifest) -> list[list[torch.Tensor]]:
    """To each of `Flat.questions`, then to the sample twice over, then to a sample of other sizes."""
    run = tuned(folder, kept, flat.samples, flat.device)
    sizes = [tensor.shape for tensor in flat.samples]
    other = next((batch for batch in flat.batches if [tensor.shape for tensor in batch] != sizes), flat.samples)
    answers = []
    with torch.inference_mode():
        for question in (*flat.questions, flat.twice(), other):
            answer = run(*[tensor.clone() for tensor in question])
            answers.append([tensor.clone() for tensor in ([answer] if isinstance(answer, torch.Tensor) else answer)])
    return answers


def _outputs(flat: Flat, answers: Sequence[Sequence[torch.Tensor]]) -> tuple[TensorSpec, ...]:
    """What the outputs are called, and which of their sizes move with the input's."""
    sample = answers[flat.cuts]  # the few rows come first; exporting copies lists, so identity says nothing
    outputs = []
    for path, answer, double, there in zip(flat.paths, sample, answers[-2], answers[-1], strict=True):
        batched = (answer.shape[:1], double.shape[:1]) == ((flat.rows,), (2 * flat.rows,))
        sizes = zip(answer.shape, double.shape, there.shape, strict=True)
        fixed = [size if size == two == other else -1 for size, two, other in sizes]
        shape = (-1, *fixed[1:]) if batched else tuple(fixed)
        outputs.append(TensorSpec(_output_name(path), datatype(answer), shape, batched))
    if not any(spec.batched for spec in outputs) and any(spec.batched for spec in flat.inputs):
        raise UsageError(f"the model's outputs do not have a row for each row of the input. {TOGETHER}")
    names = [spec.name for spec in outputs]
    if len(set(names)) != len(names):
        outputs = [msgspec.structs.replace(spec, name=f"output_{i}") for i, spec in enumerate(outputs)]
    return tuple(outputs)


def _output_name(path: str) -> str:
    plain = path.lstrip(".")
    if path.startswith("[") and path.endswith("]") and path.count("[") == 1:
        return f"output_{path.strip('[]')}"
    return plain if plain.isidentifier() else "".join(c if c.isalnum() else "_" for c in plain).strip("_")
