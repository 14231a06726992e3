"""A stored model made ready once for every number of rows, and kept for the next start.

That is a library compiled by AOTInductor, or a graph that ONNX Runtime has optimised. Making it takes seconds to
minutes, loading it a fraction of a second. It is made on this machine from the package's checked graph and lies in the
user's own cache: a package never brings machine code. Its SHA-256 lies beside it, and its folder's name gives package,
recipe, machine and versions: what does not fit, or was changed, is made again.

OpenVINO's models are not kept a second time: its CPU plugin imports what it has cached no sooner than it compiles the
package's own files (`bench/warm_start.py --openvino-cache` asks that of a machine).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fettle.errors import first_line
from fettle.files import cache_folder, sha256_of
from fettle.kept_files import is_sound, keep
from fettle.kernels import block_products
from fettle.machine import installed
from fettle.package.function import Blocks, in_blocks
from fettle.package.host import cores, host_id
from fettle.package.program import GRAPH, WEIGHTS, load_program
from fettle.procs.process import Process, how_it_ended
from fettle.recipe import Recipe

MOST_ERROR = 0.02
"""How far a library's answers may be off from what it was compiled from, relative, in L2: roundings fall otherwise."""
COMPILING = ("compile", "freeze", "region", "shapes", "runtime", "grad")
"""Techniques that say how a model is compiled: here that is once, ahead of time. The runner needs no gradients."""
LIBRARY, ONNX = "model.pt2", "model.onnx"
_MOST_ONNX = 1900 << 20
"""Bytes of weights: one file of ONNX holds no more than 2 GiB."""
_LOAD_S = 120.0

log = logging.getLogger(__name__)


def wanted(recipe: Recipe, device: str = "cpu") -> bool:
    """Does this recipe compile a model in a way that one file for all sizes can stand for?

    Not in calibrated int8: compiled for any number of rows by torch 2.13 its answers are off by a quarter.
    """
    from fettle.techniques import loads_cuda_libraries

    levels = recipe.levels
    if device != "cpu" and not loads_cuda_libraries():
        return False
    if levels.get("shapes") == "static" or levels.get("quantize", "none") != "none":
        return False
    if levels.get("runtime") == "onnxruntime":
        return device == "cpu"
    return levels.get("runtime") == "aoti" or levels.get("compile") == "default"


def compiled(
    folder: Path, recipe: Recipe, samples: Sequence[torch.Tensor], device: str, blocks: Blocks | None = None
) -> Callable[..., list[torch.Tensor]] | None:
    """The stored program with a recipe, from the cache or compiled now. None where it cannot be: it is then compiled by
    its first call, as the recipe says.

    `samples` are one batch, on `device`; where one is a part of a larger tensor, what takes its place has its strides.
    With `blocks` linear layers hold their weights in them.
    """
    if blocks is not None:
        block_products()  # makes the operator known to a library that was kept
    name = ONNX if recipe.levels.get("runtime") == "onnxruntime" else LIBRARY
    kept = cache_folder("compiled") / _key(folder, recipe, device, samples, blocks)
    began = time.perf_counter()
    if is_sound(kept):
        try:
            program = _load(kept / name, samples)
            log.info("compiled before: loaded in %.2g s", time.perf_counter() - began)
            return program
        except Exception as error:  # of another system's libraries, say
            log.info("what was compiled before cannot be loaded (%s): compiling again", first_line(error))
    try:
        with tempfile.TemporaryDirectory() as scratch:
            made = Path(scratch) / name
            module = load_program(folder, device)
            tuned = _Tuned(module, in_blocks(module, blocks)) if blocks else _tuned(module, recipe, samples)
            _compile(tuned, recipe, samples, made)
            if device != "cpu":
                _try_to_load(made, samples[0].device.index)
            program = _load(made, samples)
            _compare(program, tuned, samples)
            took_s = time.perf_counter() - began
            try:
                keep(kept, partial(shutil.copy, made), made.stat().st_size)
                log.info("compiled in %.3g s, kept for the next start", took_s)
            except OSError as error:
                log.info("compiled in %.3g s, which could not be kept: %s", took_s, first_line(error))
        return program
    except Exception as error:
        log.info("not compiled ahead of time: %s", first_line(error))
        return None


def _key(folder: Path, recipe: Recipe, device: str, samples: Sequence[torch.Tensor], blocks: Blocks | None) -> str:
    """What must be equal for a file to fit: the model, its recipe, how it is compiled, the machine, torch, ONNX Runtime
    where it runs it, and the threads, whose number stands in the code."""
    from fettle.techniques.runtime import aoti_files

    digest = hashlib.sha256()
    makers = (__file__, block_products.__code__.co_filename, aoti_files.__code__.co_filename)
    for path in (folder / GRAPH, folder / WEIGHTS, *map(Path, makers)):
        digest.update(bytes.fromhex(sha256_of(path)))
    parts = [recipe.without("grad").levels, device, host_id(), cores(), torch.__version__, torch.get_num_threads()]
    parts += [tensor.stride() for tensor in samples if not tensor.is_contiguous()]
    parts += [blocks.only] if blocks is not None and blocks.only else []
    if recipe.levels.get("runtime") == "onnxruntime":
        parts.append(installed(("onnxruntime",)))
    digest.update(json.dumps(parts, sort_keys=True, default=dict).encode())
    return digest.hexdigest()[:40]


def _tuned(module: torch.nn.Module, recipe: Recipe, samples: Sequence[torch.Tensor]) -> _Tuned:
    """The program with the rest of its recipe, before it is compiled."""
    from fettle.applying import apply

    rest = recipe.without(*COMPILING)
    return _Tuned(module, apply(module, rest, [tuple(samples)]) if rest.levels else module)


def _compile(tuned: _Tuned, recipe: Recipe, samples: Sequence[torch.Tensor], path: Path) -> None:
    """Export the program once more with the rest of its recipe in it, and compile that to `path`."""
    from fettle.techniques import exported_program
    from fettle.techniques.runtime import aoti_files

    graph: Any = tuned.module.graph
    places = [node.meta["val"].shape for node in graph.nodes if node.op == "placeholder"]
    free = [[dim for dim, size in enumerate(place) if isinstance(size, torch.SymInt)] for place in places]
    examples = [
        tensor.repeat(2, *[1] * (tensor.dim() - 1)) if 0 in dims and len(tensor) == 1 else tensor
        for tensor, dims in zip(samples, free, strict=True)
    ]
    with torch.inference_mode(False), torch.no_grad():
        own = [_laid_out(one, one).clone() if one.is_contiguous() else one for one in examples]
        if path.name == ONNX:
            return _optimise(exported_program(tuned, own, free), path)
        options = {"freezing": recipe.levels.get("freeze") == "on", "aot_inductor.check_lowerbound": False}
        aoti_files(tuned, own, free, options, str(path.parent))


def _optimise(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write the graph as ONNX Runtime has optimised it for this machine, weights and all in one file."""
    import onnxruntime

    if sum(tensor.nbytes for tensor in program.state_dict.values()) > _MOST_ONNX:
        raise ValueError("it is larger than one file of ONNX can be")
    made: Any = torch.onnx.export(program, dynamo=True, optimize=True, verbose=False)
    plain = path.with_name("plain.onnx")
    made.save(str(plain), external_data=False)
    options = _session_options()
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(str(plain), options, providers=["CPUExecutionProvider"])


def _session_options() -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    return options


def _try_to_load(library: Path, gpu: int) -> None:
    """Load it in a process of its own first, which may end with a segmentation fault. Raises RuntimeError."""
    code = "import sys, torch; torch._inductor.aoti_load_package(sys.argv[1], device_index=int(sys.argv[2]))"
    with Process(["-c", code, str(library), str(gpu)]) as process:
        if (ended := process.wait(_LOAD_S)) is None:
            raise RuntimeError(f"a process that loads it takes longer than {_LOAD_S:.0f} s")
        if ended:
            raise RuntimeError(f"a process that loads it {how_it_ended(ended)}: {process.last_words()}")


def _compare(library: Callable[..., list[torch.Tensor]], tuned: _Tuned, samples: Sequence[torch.Tensor]) -> None:
    """Raise ValueError where the library answers otherwise than what it was compiled from."""
    with torch.no_grad():
        for answer, right in zip(library(*samples), tuned(*samples), strict=True):
            far = (answer.double() - right.double()).norm() / right.double().norm().clamp_min(1e-12)
            if right.is_floating_point() and not far <= MOST_ERROR:
                raise ValueError(f"compiled ahead of time, its answers are off by {far:.2g}")


class _Tuned(torch.nn.Module):
    """A program with what a recipe put around it, from tensors to a tuple of tensors."""

    def __init__(self, module: torch.nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.run = module, run

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = self.run(*tensors)
        return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def _load(path: Path, samples: Sequence[torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    """What a file holds, ready to be called with tensors like the samples, of whatever type and strides."""
    run: Any
    if path.name == ONNX:
        run = _session(path)
    else:
        # Without this check it would read beyond inputs that are larger than the model takes.
        os.environ.setdefault("AOTI_RUNTIME_CHECK_INPUTS", "1")
        place = samples[0].device
        # A library for several threads asks the GPU what it has done: while a CUDA graph is recorded, an error.
        alone, gpu = place.type == "cuda", -1 if place.index is None else place.index
        # torch's own loader of such libraries, without `torch._inductor`, whose import takes longer than the loading
        run = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", alone, 1, gpu).run
    return lambda *tensors: run([_laid_out(tensor, sample) for tensor, sample in zip(tensors, samples, strict=True)])


def _laid_out(tensor: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    """A tensor in the type of the sample and with its strides: those of its shape, also in dimensions of size 1, or
    those of the larger tensor that it is a part of."""
    tensor = tensor.to(sample.dtype)
    if sample.is_contiguous():
        return tensor.reshape(-1).view(tensor.shape)
    if tensor.stride() == sample.stride():
        return tensor
    return torch.empty_strided(tensor.shape, sample.stride(), dtype=tensor.dtype).copy_(tensor)


def _session(path: Path) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    import onnxruntime

    options = _session_options()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # it was done before
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_inputs()]

    def run(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        feed = {name: value.detach().numpy() for name, value in zip(names, tensors, strict=True)}
        return [torch.from_numpy(result) for result in session.run(None, feed)]

    return run
