"""The reference: what the answers should be.

The workload in eval mode, eager, in float64 where that is affordable, else in its own precision. It is run in that
first, and once more with other seeds: how far the two runs are apart is the model's own noise.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch

from fettle.errors import UsageError, first_line
from fettle.files import plain, whole
from fettle.measure._accuracy import Outputs, compare, outputs_of, user_metric, worst
from fettle.measure._state import seed_all
from fettle.measure.messages import Reference
from fettle.procs.limits import granted_memory_bytes
from fettle.techniques import state_kept, to_eval
from fettle.workload import Workload, fresh, is_numbers, leaves, map_tensors

SECONDS = 60.0
"""What a float64 reference may take, by an estimate from the float32 run."""
_HAVE_FAST_PATH = (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)
_PADDING = (
    "without gradients torch.nn.TransformerEncoder leaves out what is padded, and answers otherwise there (relative "
    "error {off:.2g}): where nobody reads those places, a `call` that returns only what is read lets such recipes win"
)
_ONE_BATCH = (
    "recipes are judged on the one batch that was given: {why}; a second batch would show whether a recipe "
    "only fits the first"
)
_OTHER_SHAPES = "the answers have other shapes with another seed: recipes are compared on seed 0 alone"
_DRAWS = "it draws random numbers, and would draw others in float64"
_NO_TENSOR = (
    "the model's output holds no tensor, so its answers cannot be checked: return one (in a `call` of the workload, "
    "where the model keeps or yields it), or give a metric and say how far it may fall, `max_metric_drop`"
)
_NOTHING, _OFF = 1e-4, 0.1
"""An output below this share of the largest one's typical size and above this relative error as given is rounding."""


def write_reference(workload: Workload, path: str, derived_check: bool = False) -> Reference:
    """Compute the outputs of all batches and save them; changes the workload's model for good.

    Batches run in order, inputs before check inputs, each with seed 0, from the model's initial state. With
    `derived_check` the last one is made from the first, where that could be, and is left out where the model does not
    take it.
    """
    started, model = time.perf_counter(), workload.model
    module = model if isinstance(model, torch.nn.Module) else None
    if module is not None:
        to_eval(module)
    runs, drawing = _Runs(workload, derived_check), _SeesGenerators()
    with torch.no_grad(), _fast_path(False):  # the model as given is called with gradients, so without a fast path
        timed = time.perf_counter()
        try:
            with drawing:
                answers = runs.outputs()
        except Exception as error:
            where = getattr(error, "__notes__", ["a batch"])[-1]
            raise UsageError(f"the model does not take {where} of the inputs: {first_line(error)}") from error
        float32_s = time.perf_counter() - timed
        runs.derived_check = False  # later runs are of the same batches
        only_metric = not any(answers)
        _check_answers(answers, workload, runs)
        noise = _noise(runs, answers, module) if float32_s < SECONDS / 2 else 0.0
        with state_kept(model):
            own = model if workload.call is None else functools.partial(workload.call, model)
            metric, problem = user_metric(workload.metric, own)

        dtype, why, best = _own_dtype(module), "", answers
        if dtype != "float64":
            draws = drawing.seen or (runs.draws and (noise > _NOTHING or runs.seeds_itself))
            why = _DRAWS if draws else _why_not_float64(module, float32_s)
            if not why:
                assert module is not None
                try:
                    module.double()
                    best, dtype = runs.outputs(cast=_to_double), "float64"
                except Exception as error:
                    text = str(error).splitlines()
                    why = f"it does not run in float64: {text[0][:120] if text else type(error).__name__}"
        unjudged = _only_rounding(answers, best)
        if any(unjudged):
            runs.notes.append(f"zero but for rounding, and not judged: the output's {_by_path(unjudged)}")
        best = [{key: value for key, value in outputs.items() if key not in small}
                for outputs, small in zip(best, unjudged, strict=True)]  # fmt: skip
        with whole(path) as partial:  # a resumed study trusts what is there
            torch.save(best, partial)
    return Reference(
        dtype=dtype,
        why=why,
        noise=plain(noise) or 0.0,
        notes=runs.notes,
        only_metric=only_metric,
        metric=plain(metric),
        metric_problem=problem,
        seconds=time.perf_counter() - started,
    )


class _Runs:
    """Runs the model on all batches, and keeps what was seen meanwhile."""

    def __init__(self, workload: Workload, derived_check: bool) -> None:
        self.workload, self.derived_check = workload, derived_check
        self.batches = [*workload.inputs, *workload.check_inputs]
        alone = derived_check and not workload.check_inputs
        self.notes = [_ONE_BATCH.format(why="nothing in it could be in another order")] if alone else []
        self.draws = False
        """Whether a batch has changed the state of a generator."""
        self.not_compared: set[str] = set()
        self.ended: dict[int, list[torch.Tensor]] = {}
        """The generators' states after the last batch, by the seed before it."""

    @property
    def seeds_itself(self) -> bool:
        return len(self.ended) > 1 and any(map(torch.equal, self.ended[0], self.ended[1]))

    def outputs(self, seed: int = 0, cast: Callable[[Any], Any] = lambda batch: batch) -> list[Outputs]:
        answers: list[Outputs] = []
        with state_kept(self.workload.model):
            for number, batch in enumerate(list(self.batches), 1):
                seed_all(seed)
                seeded = _random_states()
                try:
                    answers.append(self._outputs_of(batch, cast))
                except Exception as error:  # not of the first batch: the probe would have reported it
                    if self.derived_check and number == len(self.batches) > 1:
                        why = f"the model does not take its rows in another order ({first_line(error)})"
                        self.notes.append(_ONE_BATCH.format(why=why))
                        self.batches.pop()
                        break
                    error.add_note(f"batch {number} of {len(self.batches)}")
                    raise
                self.ended[seed] = _random_states()
                self.draws = self.draws or not all(map(torch.equal, seeded, self.ended[seed]))
        return answers

    def _outputs_of(self, batch: Any, cast: Callable[[Any], Any]) -> Outputs:
        output = self.workload.judged(self.workload.run(self.workload.model, cast(fresh(batch))), batch)
        tensors = outputs_of(output)
        self.not_compared.update(_no_numbers(output))
        return tensors


def _check_answers(answers: list[Outputs], workload: Workload, runs: _Runs) -> None:
    """Raise `UsageError` for answers that nothing can be compared with; note what of them is not compared."""
    compared = any(answers)
    if workload.metric is None:
        if not compared:
            raise UsageError(_NO_TENSOR)
        if runs.not_compared:
            some = ", ".join(sorted(runs.not_compared)[:3])
            runs.notes.append(
                f"tensors and numbers alone are judged, and not the output's {some}: a metric could judge it"
            )
    if compared and not any(tensor.numel() for outputs in answers for tensor in outputs.values()):
        raise UsageError("the model's outputs are empty, so its answers cannot be checked: give inputs it answers")
    if all(_is_nan(outputs) for outputs in answers):
        raise UsageError("the model's answers are NaN throughout, so no recipe's answers can be checked")


def _noise(runs: _Runs, answers: list[Outputs], module: torch.nn.Module | None) -> float:
    """How far the answers are from those with another seed; a note where their shapes differ, or where torch's fast
    path would change them."""
    others = runs.outputs(seed=1)
    noise = _distance(others, answers)
    if _shapes(others) != _shapes(answers):
        runs.notes.append(_OTHER_SHAPES)
    if module is not None and any(isinstance(child, _HAVE_FAST_PATH) for child in module.modules()):
        with _fast_path(True):
            off = _distance(runs.outputs(), answers)
        if off > max(_NOTHING, 2 * noise):
            runs.notes.append(_PADDING.format(off=off))
    return noise


def _no_numbers(output: Any) -> set[str]:
    """Where in an output there are texts and pictures, which are not compared."""
    found = [path for path, leaf in leaves(output) if isinstance(leaf, (str, bytes))
             or (hasattr(leaf, "__array_interface__") and not is_numbers(leaf))]  # fmt: skip
    return {re.sub(r"(?<=.)\[\d+\]$", "", path) for path in found}


class _SeesGenerators(torch.overrides.TorchFunctionMode):
    """Notes whether anything is drawn from a generator that is not torch's own."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or (kwargs or {}).get("generator") is not None
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _fast_path(enabled: bool) -> Iterator[None]:
    """With or without the faster kernels that torch.nn's transformer layers have for calls without gradients."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def read_reference(path: str) -> list[Outputs]:
    """The outputs that `write_reference` saved; tensors only, nothing is executed."""
    kept = torch.load(path, weights_only=True)
    assert isinstance(kept, list)
    return kept


def _distance(outputs: list[Outputs], reference: list[Outputs]) -> float:
    accuracy = worst(compare(y, r) for y, r in zip(outputs, reference, strict=True))
    return math.inf if accuracy.problem else accuracy.error


def _random_states() -> list[torch.Tensor]:
    """The states of torch's, NumPy's and Python's own generators."""
    state: Any = numpy.random.get_state()
    others = [torch.tensor([*state[1].tolist(), state[2]]), torch.tensor(random.getstate()[1])]
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return [torch.random.get_rng_state(), *on_gpus, *others]


def _shapes(answers: list[Outputs]) -> list[dict[str, torch.Size]]:
    return [{path: value.shape for path, value in outputs.items()} for outputs in answers]


def _only_rounding(outputs: list[Outputs], reference: list[Outputs]) -> list[set[str]]:
    """By batch the paths of outputs that are zero but for rounding, such as a mean of normalised values: next to
    nothing beside the batch's largest output, and far off the reference already as given, in that batch or another."""
    found, off = list[set[str]](), set[str]()
    for own, exact in zip(outputs, reference, strict=True):
        sizes = {path: float(value.abs().double().square().mean().sqrt()) for path, value in exact.items()
                 if value.numel() and (value.is_floating_point() or value.is_complex())}  # fmt: skip
        largest = max((size for size in sizes.values() if math.isfinite(size)), default=0.0)
        small = {path for path, size in sizes.items() if size < _NOTHING * largest}
        off |= {path for path in small if compare(own, {path: exact[path]}).error > _OFF}
        found.append(small)
    return [small & off for small in found]


def _by_path(unjudged: list[set[str]]) -> str:
    """The paths, with their batches where the same path is judged in other batches."""
    shown = []
    for path in sorted(set[str]().union(*unjudged)):
        numbers = [str(number) for number, small in enumerate(unjudged, 1) if path in small]
        shown.append(path if len(numbers) == len(unjudged) else f"{path} (batch {', '.join(numbers)})")
    return ", ".join(shown)


def _why_not_float64(module: torch.nn.Module | None, float32_s: float) -> str:
    """Why a float64 reference is not affordable. Its time is put at eight times the float32 run's."""
    if module is None:
        return "the model is a plain callable"
    if float32_s * 8 > SECONDS:
        return f"it would take about {float32_s * 8:.0f} s"
    size = sum(p.numel() * 8 for p in module.parameters())
    if any(p.device.type == "cuda" for p in module.parameters()):
        free = torch.cuda.mem_get_info()[0]
    else:
        free = granted_memory_bytes()
    return "it does not fit into memory" if size * 3 > free else ""


def _is_nan(outputs: Outputs) -> bool:
    """Whether all outputs are floating and hold nothing but NaN."""
    floating = [tensor for tensor in outputs.values() if tensor.is_floating_point() or tensor.is_complex()]
    return bool(floating) and len(floating) == len(outputs) and all(bool(t.isnan().all()) for t in floating)


def _own_dtype(module: torch.nn.Module | None) -> str:
    for parameter in module.parameters() if module is not None else ():
        if parameter.is_floating_point():
            return str(parameter.dtype).removeprefix("torch.")
    return "float32"


def _to_double(batch: Any) -> Any:
    return map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, batch, caches=True)
