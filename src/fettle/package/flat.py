"""A workload's model from tensors to tensors: what can be exported, with the names and sizes that clients see."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fettle.errors import UsageError
from fettle.package.model_runner import as_array
from fettle.package.program import TOGETHER
from fettle.package.tensors import FROM_NUMPY, TensorSpec
from fettle.recipe import Recipe
from fettle.techniques import find, to_eval
from fettle.workload import Workload, device_of, is_numbers, leaves, map_tensors, spread, tensors

MOST_JUDGED = 2
"""Batches on which a package's answers are compared with the model's, beside the sample."""
_LOOSE, _ROUNDED = 0.02, 0.25
"""How far, relative, roundings may move an answer where a call has other rows; in 16 bits a deep model's by a tenth."""
_FEW = 0.05
"""Share of an answer's values that may be further apart: of two that are as good, the other may be chosen."""


class Flat(torch.nn.Module):
    """The workload's model in eval mode, from tensors to a tuple of tensors, with their names and dynamic sizes."""

    def __init__(self, workload: Workload, recipe: Recipe) -> None:
        super().__init__()
        assert isinstance(workload.model, torch.nn.Module)
        self.inner = workload.model
        to_eval(self.inner)
        self.run: Callable[[Any], Any] = lambda batch: workload.run(self.inner, batch)
        self.workload = workload
        first = workload.inputs[0]
        paths = [path for path, leaf in leaves(first) if isinstance(leaf, torch.Tensor)]
        if not paths:
            raise UsageError("the model's inputs hold no tensor: nothing can be served")
        _check_constants([*workload.inputs, *workload.check_inputs], paths)
        batches = _alike(workload.inputs, paths)
        rows = workload.rows
        self.rows, self.batches = rows, batches
        self.samples = batches[0]
        kinds = [datatype(tensor) for tensor in self.samples]
        self.device = device_of(self.inner, first)
        """Type of the device that the model lies on."""
        self.names = _input_names(workload, paths)
        self.shapes = [_dynamic(index, batches, rows) for index in range(len(paths))]
        self.paths: list[str] = []
        self.inputs = tuple(
            TensorSpec(
                name,
                kind,
                tuple(-1 if dim in dynamic else size for dim, size in enumerate(tensor.shape)),
                batched=dynamic.get(0) == "rows",
            )
            for name, kind, tensor, dynamic in zip(self.names, kinds, self.samples, self.shapes, strict=True)
        )
        self.calibration = _alike(workload.calibration, paths)
        """Batches that a recipe may be calibrated on, and"""
        self.judged = self._fitting(
            _alike(workload.check_inputs or workload.inputs[len(workload.calibration) :], paths)
        )
        """others, on which answers are compared. Where there is one batch only it is that."""
        self.questions = [self.samples, *self.judged[:MOST_JUDGED]]
        before = {name: one.clone() for name, one in self.inner.named_buffers() if one.layout == torch.strided}
        self.wanted = [self._answers(question) for question in self.questions]
        for answer in self.wanted[0]:
            datatype(answer)
        self.cuts = 0
        """How many of the questions, at the beginning, are a few rows of the sample."""
        for cut in [self._cut(size) for size in (2, 1) if size < rows]:
            with contextlib.suppress(Exception):  # one that was traced may take its own number of rows only
                self.wanted.insert(0, self._answers(cut))
                self.questions.insert(0, cut)
                self.cuts += 1
        now = dict(self.inner.named_buffers())
        for name, was in before.items():
            if name in now and now[name].shape == was.shape and not _same(now[name], was):
                raise UsageError(
                    f"the model writes to its buffer {name}: what one client leaves there would be in the next one's "
                    "answer. Make it an input and an output of the model, or leave it out"
                )
        self._check_repeats()
        if any(spec.batched for spec in self.inputs):
            self._check_rows()
        # Only now, so that answers are compared with those of the model as it was given.
        self.inner = _rewritten(workload, self.inner, recipe)
        held = [*self.parameters(), *self.buffers()]
        if "torchao" in sys.modules and any(map(is_traceable_wrapper_subclass, held)):
            from torchao.utils import unwrap_tensor_subclass

            # What torchao has quantised becomes plain tensors, in modules of our own that share the tensors.
            self.inner = copy.deepcopy(self.inner, {id(tensor): tensor for tensor in held})
            unwrap_tensor_subclass(self)

    def to_16_bits(self, level: str) -> None:
        """Let the model compute as `precision` with this level has it; its inputs and outputs keep their types."""
        from fettle.applying import apply

        self.inner = copy.deepcopy(self.inner)  # the caller's stays as it was given
        fast = apply(self.inner, Recipe({"precision": level}), list(self.workload.inputs), call=self.workload.call)

        def run(batch: Any) -> Any:
            args, kwargs = spread(batch)
            return fast(*args, **kwargs)

        self.run = run

    def twice(self) -> list[torch.Tensor]:
        """The sample with its rows twice over."""
        return [torch.cat([t, t]) if spec.batched else t for t, spec in zip(self.samples, self.inputs, strict=True)]

    def _check_repeats(self) -> None:
        """Raise `UsageError` where an answer depends on the calls before it, with torch's random numbers the same: what
        the model keeps in an attribute would be exported as it is then."""
        answers = []
        with torch.random.fork_rng():
            for turned in (False, True, False):  # it asks something else between
                torch.manual_seed(0)
                with contextlib.suppress(Exception) if turned else contextlib.nullcontext():
                    found = self._answers([t.flip(0) if turned and t.dim() else t for t in self.samples])
                    answers += [] if turned else [found]
        for path, one, again in zip(self.paths, *answers, strict=True):
            if one.shape != again.shape or _differ(one, again, rounded=False):
                raise UsageError(
                    f"the model's output {path.lstrip('.')!r} differs when it is asked the same again: it keeps "
                    "something from one call for the next, which may be another client's, or draws random numbers that "
                    "torch's seed does not set. Make it an input and an output of the model, or leave it out"
                )

    def _check_rows(self) -> None:
        """Raise `UsageError` where the answer to a row depends on other rows: they would be another client's.

        The model as given is asked. Answers that differ each time are not judged; where an answer is as long as the
        longest row of a batch, the part that both have is compared.
        """
        whole, sees = self.wanted[self.cuts], _Sees16Bits()
        with contextlib.suppress(Exception), sees:  # a compiled model may refuse such a mode
            self._answers(self.samples)
        rounded = sees.seen or any(map(_has_16_bits, (*self.inner.parameters(), *self.inner.buffers(), *self.samples)))
        try:
            again, double = self._answers(self.samples), self._answers(self.twice())
        except Exception:  # one that was traced may take its own number of rows only
            return
        for place, path in enumerate(self.paths):
            one, two = whole[place], double[place]
            if one.shape[:1] != (self.rows,) or two.shape[:1] != (2 * self.rows,):
                continue  # it has no rows
            if one.shape != again[place].shape or _differ(one, again[place], rounded):
                continue
            pairs = [(half, one) for half in torch.split(two, self.rows)]
            for answers in self.wanted[: self.cuts]:
                few = answers[place]
                common = tuple(map(slice, map(min, few.shape, one.shape)))
                pairs.append((few[common], one[common]))
            if any(found.shape != right.shape or _differ(found, right, rounded) for found, right in pairs):
                raise UsageError(
                    f"the model's output {path.lstrip('.')!r} mixes rows: what it says of one depends on the others in "
                    f"the call, which may be other clients'. Put the batch first in every input. {TOGETHER}"
                )

    def _cut(self, rows: int) -> list[torch.Tensor]:
        """The sample with so many rows only."""
        return [t[:rows] if spec.batched else t for t, spec in zip(self.samples, self.inputs, strict=True)]

    def _fitting(self, batches: Sequence[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """The batches that the exported model takes, but for the sample."""

        def fits(tensor: torch.Tensor, spec: TensorSpec) -> bool:
            return spec.fits(tuple(tensor.shape)) and not (spec.batched and len(tensor) > self.rows)

        return [batch for batch in batches if batch[0] is not self.samples[0]
                and all(map(fits, batch, self.inputs))]  # fmt: skip

    def _answers(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            return [tensor.clone() for tensor in self(*[tensor.clone() for tensor in tensors])]

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Put the tensors where the batch had them, call the model, and take its tensors out again."""
        left = iter(tensors)
        batch = map_tensors(lambda tensor: next(left), self.workload.inputs[0])
        if next(left, None) is not None:
            raise UsageError("the model's inputs can be tuples, lists, dicts and dataclasses of tensors only")
        outputs = list(leaves(self.run(batch)))
        self.paths = [path for path, leaf in outputs if isinstance(leaf, torch.Tensor)]
        return tuple(leaf for _, leaf in outputs if isinstance(leaf, torch.Tensor))


def _alike(batches: Sequence[Any], paths: Sequence[str]) -> list[list[torch.Tensor]]:
    """The tensors of those batches that have tensors at the same places."""
    by_batch = [[leaf for leaf in leaves(batch) if isinstance(leaf[1], torch.Tensor)] for batch in batches]
    return [[tensor for _, tensor in batch] for batch in by_batch if [path for path, _ in batch] == list(paths)]


def _check_constants(batches: Sequence[Any], paths: Sequence[str]) -> None:
    """Raise `UsageError` where batches that have tensors at the same places differ in a number, a text or an array:
    clients send tensors only, and every call would have the first batch's."""
    first: dict[str, str] | None = None
    for batch in batches:
        found = dict(leaves(batch))
        if [path for path, leaf in found.items() if isinstance(leaf, torch.Tensor)] != list(paths):
            continue
        values = {
            path: repr(leaf.tolist() if is_numbers(leaf) else leaf)
            for path, leaf in found.items()
            if is_numbers(leaf) or isinstance(leaf, (str, int, float, complex))
        }
        first = values if first is None else first
        for path in first | values:
            if first.get(path) != values.get(path):
                raise UsageError(
                    f"the model's input {path.lstrip('.')!r} is no tensor and differs between the sample batches: a "
                    "package takes tensors only, and would answer with the first batch's. Make it a tensor, or give "
                    "batches that are alike in it"
                )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same bytes: NaN, too, and whatever type cannot be compared."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


class _Sees16Bits(torch.overrides.TorchFunctionMode):
    """Notes whether something is computed in 16 bits while it is active."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.seen = self.seen or any(map(_has_16_bits, tensors(output)))
        return output


def _has_16_bits(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() < 4


def _differ(one: torch.Tensor, other: torch.Tensor, rounded: bool) -> bool:
    """Whether more than a few values are further apart than roundings, which in 16 bits may fall to another class."""
    if not one.numel() or (rounded and not one.is_floating_point()):
        return False
    if one.is_floating_point():
        one, other, loose = one.float(), other.float(), _ROUNDED if rounded else _LOOSE
        usual = float(other.abs().nanmedian().nan_to_num())
        far = ~torch.isclose(one, other, rtol=loose, atol=loose * usual, equal_nan=True)
    else:
        far = one != other
    return float(far.float().mean()) > _FEW


def _rewritten(workload: Workload, model: torch.nn.Module, recipe: Recipe) -> torch.nn.Module:
    """The workload's model after the techniques that change its own modules."""
    from fettle.applying import apply

    levels = {name: level for name, level in recipe.levels.items() if find(name).before_export}
    if not levels:
        return model
    changed = apply(workload, Recipe(levels))
    return changed if isinstance(changed, torch.nn.Module) else model  # changed in place


def _input_names(workload: Workload, paths: Sequence[str]) -> list[str]:
    """What a client calls each tensor: its keyword, else the name of the argument that it is, else its path."""
    batch, arguments = workload.inputs[0], _arguments(workload)
    if isinstance(batch, torch.Tensor):
        by_path = {"output": arguments[0] if arguments else "input"}
    else:
        arguments = getattr(batch, "_fields", arguments)  # of a named tuple
        by_path = {f"[{place}]": name for place, name in enumerate(arguments)} if isinstance(batch, tuple) else {}
    names = []
    for index, path in enumerate(paths):
        plain = path.lstrip(".")
        if plain.isidentifier() and path != "output":
            names.append(plain)
        elif path in by_path:
            names.append(by_path[path])
        else:
            names.append("".join(c if c.isalnum() else "_" for c in plain).strip("_") or f"input_{index}")
    return names if len(set(names)) == len(names) else [f"input_{index}" for index in range(len(paths))]


def _arguments(workload: Workload) -> list[str]:
    """Names of what the workload is called with: those of its own call, unless it passes on whatever it is given."""
    model: Any = workload.model
    try:
        if workload.call is not None:
            _, *given = inspect.signature(workload.call).parameters.values()
            if not any(one.kind is one.VAR_POSITIONAL for one in given):
                return [one.name for one in given]
        return [name for name in inspect.signature(model.forward).parameters if name != "self"]
    except (TypeError, ValueError):
        return []


def _dynamic(index: int, batches: Sequence[Sequence[torch.Tensor]], rows: int) -> dict[int, str]:
    """Which dimensions of an input change: the rows, and those that differ between the sample batches.

    Dimensions that take the same sizes in the same order are one dimension: a sequence and its mask.
    """
    sizes = [batch[index].shape for batch in batches]
    dynamic = {}
    for dim in range(len(sizes[0])):
        lengths = [size[dim] for size in sizes]
        if dim == 0 and lengths[0] == rows:
            dynamic[0] = "rows"
        elif len(set(lengths)) > 1:
            dynamic[dim] = "n" + hashlib.sha256(str(lengths).encode()).hexdigest()[:6]
    return dynamic


def datatype(tensor: torch.Tensor) -> str:
    """What clients call a tensor's type. Raises `UsageError` for one that has no name."""
    if tensor.is_nested or tensor.layout != torch.strided:
        raise UsageError(f"{'nested' if tensor.is_nested else 'sparse'} tensors cannot be served: make them dense ones")
    kind = as_array(tensor[:0] if tensor.dim() else tensor).dtype
    if kind not in FROM_NUMPY:
        raise UsageError(f"tensors of type {tensor.dtype} cannot be served")
    return FROM_NUMPY[kind]
