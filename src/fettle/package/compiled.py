"""A stored model compiled ahead of time by AOTInductor: one library for every number of rows, kept for the next start.

Compiling takes seconds to minutes, loading what was compiled a fraction of a second. The library is made on this
machine from the package's checked graph and lies in the user's own cache: a package never brings machine code. Its
SHA-256 lies beside it, and its name tells package, recipe, machine and versions: what does not fit, or was changed, is
compiled again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fettle.errors import UsageError, first_line
from fettle.files import cache_folder, whole
from fettle.package.host import cores, host_id
from fettle.package.program import GRAPH, WEIGHTS, load_program
from fettle.recipe import Recipe

KEEP = 20
"""Libraries in the cache; those used longest ago go first."""
MOST_ERROR = 0.02
"""By which a library's answers may be off from what it was compiled from, relative, in L2: roundings fall otherwise."""
COMPILING = ("compile", "freeze", "region", "shapes", "runtime", "grad")
"""Techniques that say how a model is compiled: here that is once, ahead of time. The runner needs no gradients."""

log = logging.getLogger(__name__)


def wanted(recipe: Recipe) -> bool:
    """Does this recipe compile a model in a way that one library for all sizes can stand for?

    Not in calibrated int8: compiled for any number of rows by torch 2.13 its answers are off by a quarter.
    """
    levels = recipe.levels
    if levels.get("shapes") == "static" or levels.get("quantize", "none") != "none":
        return False
    return levels.get("runtime") == "aoti" or levels.get("compile") == "default"


def compiled(
    folder: Path, recipe: Recipe, samples: Sequence[torch.Tensor], device: str
) -> Callable[..., list[torch.Tensor]] | None:
    """The stored program with a recipe as a library, from the cache or compiled now. None where it cannot be: it is
    then compiled by its first call, as the recipe says.

    `samples` are one batch, on `device`.
    """
    path = cache_folder("compiled") / f"{_key(folder, recipe, device)}.pt2"
    began = time.perf_counter()
    if _sound(path):
        try:
            found = _load(path)
            log.info("compiled before: loaded in %.2g s", time.perf_counter() - began)
            return found
        except Exception as error:  # of another system's libraries, say
            log.info("what was compiled before cannot be loaded (%s): compiling again", first_line(error))
    try:
        with tempfile.TemporaryDirectory() as scratch:
            made = Path(scratch) / "model.pt2"
            tuned = _tuned(load_program(folder, device), recipe, samples)
            _compile(tuned, recipe, samples, made)
            found = _load(made)
            _compare(found, tuned, samples)
            _keep(made, path)
        log.info("compiled in %.3g s, kept for the next start", time.perf_counter() - began)
        return found
    except Exception as error:
        log.info("not compiled ahead of time: %s", first_line(error))
        return None


def _key(folder: Path, recipe: Recipe, device: str) -> str:
    """What must be equal for a library to fit: the model, its recipe, the machine, torch, and the threads, whose
    number stands in the code."""
    digest = hashlib.sha256()
    for name in (GRAPH, WEIGHTS):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    said = [recipe.without("grad").levels, device, host_id(), cores(), torch.__version__, torch.get_num_threads()]
    digest.update(json.dumps(said, sort_keys=True, default=dict).encode())
    return digest.hexdigest()[:40]


def _tuned(module: torch.nn.Module, recipe: Recipe, samples: Sequence[torch.Tensor]) -> _Tuned:
    """The program with the rest of its recipe, before it is compiled."""
    from fettle.applying import apply

    rest = recipe.without(*COMPILING)
    return _Tuned(module, apply(module, rest, [tuple(samples)]) if rest.levels else module)


def _compile(tuned: _Tuned, recipe: Recipe, samples: Sequence[torch.Tensor], path: Path) -> None:
    """Export the program once more with the rest of its recipe in it, and compile that to `path`."""
    graph: Any = tuned.module.graph
    places = [node.meta["val"].shape for node in graph.nodes if node.op == "placeholder"]
    shapes = tuple(
        {i: torch.export.Dim.AUTO for i, size in enumerate(place) if isinstance(size, torch.SymInt)} for place in places
    )
    examples = [
        tensor.repeat(2, *[1] * (tensor.dim() - 1)) if 0 in dims and len(tensor) == 1 else tensor
        for tensor, dims in zip(samples, shapes, strict=True)
    ]
    with torch.inference_mode(False), torch.no_grad():
        examples = [tensor.clone() for tensor in examples]
        program = torch.export.export(tuned, tuple(examples), dynamic_shapes={"tensors": shapes})
        options = {"freezing": True} if recipe.levels.get("freeze") == "on" else {}
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)


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
        """As the program."""
        found = self.run(*tensors)
        return (found,) if isinstance(found, torch.Tensor) else tuple(found)


def _load(path: Path) -> Callable[..., list[torch.Tensor]]:
    """torch's own loader of such libraries, without `torch._inductor`, whose import takes longer than the loading."""
    runner = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
    return lambda *tensors: runner.run(list(tensors))


def _sound(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == path.with_suffix(".sha256").read_text()
    except OSError:
        return False


def _keep(made: Path, path: Path) -> None:
    """Copy a library into the cache, and let those go that were used longest ago."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for old in sorted(path.parent.glob("*.pt2"), key=lambda file: file.stat().st_atime)[: 1 - KEEP]:
            old.unlink(missing_ok=True)
            old.with_suffix(".sha256").unlink(missing_ok=True)
        with whole(path) as here:
            shutil.copyfile(made, here)
        with path.open("rb") as file, whole(path.with_suffix(".sha256")) as here:
            here.write_text(hashlib.file_digest(file, "sha256").hexdigest())
    except (OSError, UsageError) as error:
        log.info("what was compiled could not be kept: %s", first_line(error))
