"""A package's tuned model, loaded in this process: numpy arrays in, numpy arrays out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fettle.errors import UsageError
from fettle.package.compiled import COMPILING, compiled, wanted
from fettle.package.function import Blocks, Function, as_function
from fettle.package.manifest import SAMPLES, Manifest, Package
from fettle.package.program import load_program
from fettle.recipe import Recipe

Array = np.ndarray[Any, Any]
COMPILED_STEP = "static-compiled"
"""The level of `kv_cache` whose steps are compiled."""
PART = "int4-part"
"""The level of `weights` that has 4 bits in chosen layers."""
BITS = {"int8-blocks": 8, "int4-blocks": 4, PART: 4}
"""Bits of the weights, by the level of `weights`: those of these levels are stored as given, and packed when loaded."""


class ModelRunner:
    """A loaded model. `run` is not thread-safe: one runner, one thread that calls it."""

    def __init__(self, package: Package, device: str = "cpu") -> None:
        self.inputs, self.outputs = package.manifest.inputs, package.manifest.outputs
        self._package, self.device = package, device
        if device.startswith("cuda:"):
            torch.cuda.set_device(device)  # CUDA graphs are recorded on the current one
        levels = package.manifest.recipe
        self.may_be_recorded = device.startswith("cuda") and not _records_graphs(Recipe(levels))
        """Whether a call can be part of a CUDA graph: it is none itself."""
        self._compiles_steps = levels.get("kv_cache") == COMPILED_STEP and device == "cpu"
        self._model: Callable[..., Any] | None = None
        if self._compiles_steps:
            samples = load_samples(package, device)
        else:
            self._model, samples = load_model(package, device)
        self._samples = [as_array(tensor) for tensor in samples]
        self._dtypes = [tensor.dtype for tensor in samples]
        self._fills = package.manifest.shares_calls  # else an output would be about the padding rows, too

    def run(self, parts: Sequence[Sequence[Array]], size: int) -> list[Array]:
        """One call for several requests: `parts` holds each one's arrays in the order of the manifest's inputs.

        Batched inputs are joined along their rows and, where all outputs have rows, filled up to `size` rows, or to the
        next size that the settings allow, with copies of the last one; of those that are not batched the first
        request's is taken. Returns the outputs, batched ones with the joined rows and without the filling. RuntimeError
        where the model gives an output another number of rows.
        """
        tensors, rows, filled = [], 0, 0
        for index, (spec, dtype) in enumerate(zip(self.inputs, self._dtypes, strict=True)):
            if not spec.batched:
                tensors.append(torch.from_numpy(np.array(parts[0][index])).to(dtype))
                continue
            joined = parts[0][index] if len(parts) == 1 else np.concatenate([part[index] for part in parts])
            rows = len(joined)
            filled = max(size, self._package.settings.call_rows(rows)) if self._fills else rows
            if filled > rows:
                joined = np.concatenate([joined, np.repeat(joined[-1:], filled - rows, axis=0)])
            elif len(parts) == 1:
                joined = np.array(joined)  # what came over the wire is read-only
            tensor = torch.from_numpy(joined)
            tensors.append(tensor if tensor.dtype is dtype else tensor.to(dtype))  # bfloat16 comes in float32
        if self.device != "cpu":
            tensors = [tensor.to(self.device, non_blocking=True) for tensor in tensors]
        answers = []
        for tensor, spec in zip(self.call(tensors), self.outputs, strict=True):
            array = as_array(tensor).astype(spec.kind, copy=False)  # clients read the bytes as the manifest's type
            if spec.batched and len(array) != filled:
                raise RuntimeError(f"the model answers {len(array)} rows for {filled}: it cannot be batched")
            answers.append(array[:rows] if spec.batched else array)
        return answers

    def call(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One call with tensors that are on the device already; the answers stay there."""
        if self._model is None:
            self._model = load_model(self._package, self.device)[0]
        with torch.inference_mode():
            outputs = self._model(*tensors)
        return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)

    def part(self, tensors: Sequence[torch.Tensor], outputs: tuple[int, ...]) -> list[torch.Tensor]:
        """Some of a call's outputs; of a program that is run as it is no more is computed."""
        if not isinstance(self._model, Function):
            made = self.call(tensors)
            return [made[place] for place in outputs]
        with torch.inference_mode():
            return list(self._model.part(tensors, outputs))

    def compile_for(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have a model that keeps keys and values compiled for tensors that lie in memory as these do, if its recipe
        says so and it can be; on a GPU its calls are recorded instead. Where it was compiled before, what it was
        compiled from is not loaded."""
        if self._compiles_steps:
            manifest = self._package.manifest
            rest = Recipe(manifest.recipe).without(*manifest.applied, "kv_cache")
            self._model = compiled(self._package.folder, rest, tensors, "cpu", _blocks(rest, manifest.four_bits))

    def sample(self, rows: int) -> list[Array]:
        """The package's own inputs, repeated or cut to so many rows."""
        return [
            np.resize(array, (rows, *array.shape[1:])) if spec.batched else array
            for array, spec in zip(self._samples, self.inputs, strict=True)
        ]

    def warm(self, sizes: Sequence[int]) -> None:
        """Run every batch size, so that nothing is compiled while clients wait; on a GPU twice, as a CUDA graph is
        recorded at the second call."""
        for size in sizes:
            for _ in range(1 if self.device == "cpu" else 2):
                self.run([self.sample(size)], size)


def load_model(package: Package, device: str = "cpu") -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """The tuned model, a callable from tensors to a tuple of tensors, and one batch of samples, all on `device`."""
    samples = load_samples(package, device)
    return tuned(package.folder, package.manifest, samples, device), samples


def load_samples(package: Package, device: str = "cpu") -> list[torch.Tensor]:
    """One batch of samples, on `device`. Raises `UsageError`."""
    from safetensors.torch import load_file

    manifest = package.manifest
    if manifest.model == "openvino" and device != "cpu":
        raise UsageError(f"the package is OpenVINO's, which runs on the CPU here, not on {device}")
    samples = load_file(package.folder / SAMPLES)
    try:
        return [samples[spec.name].to(device) for spec in manifest.inputs]
    except KeyError as error:
        raise UsageError(f"{SAMPLES} has no tensor {error}") from error


def tuned(folder: Path, manifest: Manifest, samples: Sequence[torch.Tensor], device: str) -> Callable[..., Any]:
    """What is stored in a folder, with the rest of its recipe applied. Raises `UsageError`."""
    from fettle.applying import apply

    if manifest.model == "openvino":
        from fettle.package.openvino import OpenvinoModel

        return OpenvinoModel(folder, manifest.recipe.get("runtime", "openvino"))
    if manifest.model != "exported":
        raise UsageError(f"the package's model is stored as {manifest.model[:40]!r}, which this fettle does not know")
    step = (*COMPILING, "kv_cache") if "kv_cache" in manifest.recipe else ()  # which is compiled by itself, later
    recipe = Recipe(manifest.recipe).without(*step)
    rest = recipe.without(*manifest.applied)
    if blocks := _blocks(rest, manifest.four_bits):
        if device != "cpu":
            raise UsageError(f"weights={rest.levels['weights']} is for CPUs: package the model without it for {device}")
        try:
            return as_function(load_program(folder, device), blocks)
        except ImportError as error:
            raise UsageError(f"the package cannot be served here: {error}") from error
    if wanted(recipe, device) and (library := compiled(folder, rest, samples, device)) is not None:
        return library
    module = load_program(folder, device)
    if not rest.without("grad").levels:  # the runner calls it in inference mode anyway
        return as_function(module)
    batches = [tuple(samples)]
    if rest.levels.get("shapes") == "static":
        # Each number of rows is compiled for itself, and after a few torch would give up and run uncompiled.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
        batches.append(tuple(tensor[:1] for tensor in samples))  # shapes=static needs a second shape
    return apply(module, rest, batches)


def _records_graphs(recipe: Recipe) -> bool:
    from fettle.techniques import changed  # a server on a CPU starts without the catalogue

    return any(level in technique.records for technique, level in changed(recipe))


def _blocks(recipe: Recipe, four_bits: tuple[str, ...]) -> Blocks | None:
    """How weights are held in blocks; None where they are not."""
    bits = BITS.get(recipe.levels.get("weights", ""))
    return None if bits is None else Blocks(bits, four_bits)


def as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor as clients can read it: 16-bit brain floats, which numpy lacks, become float32."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return tensor.contiguous().numpy()
