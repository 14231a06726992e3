"""How far outputs are from the reference. Missing, NaN or of another shape is a problem, never a pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fettle.errors import first_line, type_text
from fettle.measure._trial import Accuracy
from fettle.workload import is_numbers, leaves, map_tensors, rows_of, tensors

Outputs = dict[str, torch.Tensor]
"""The tensor leaves of one output by path, on the CPU."""


def outputs_of(output: Any) -> Outputs:
    """Copy the tensor leaves of an output to the CPU; numbers and NumPy's arrays of such count as tensors, other leaves
    are passed over."""
    outputs: Outputs = {}
    for path, leaf in leaves(output):
        if isinstance(leaf, torch.Tensor):
            value = leaf.detach().dequantize() if leaf.is_quantized else leaf.detach()
            if value.is_nested or value.layout != torch.strided:
                value = value.to_padded_tensor(0.0) if value.is_nested else value.to_dense()
            outputs[path] = value.to("cpu", copy=True)
        elif isinstance(leaf, (bool, int, float, complex)):
            outputs[path] = torch.tensor(leaf)
        elif is_numbers(leaf):
            outputs[path] = torch.as_tensor(leaf.copy())  # torch takes no array that runs backwards
    return outputs


def compare(outputs: Outputs, reference: Outputs) -> Accuracy:
    """One batch's outputs against the reference's: the worst leaf of each measure."""
    error, cosine, max_abs, agreement = 0.0, math.nan, 0.0, math.nan
    for path, wanted in reference.items():
        got = outputs.get(path)
        if got is None:
            return Accuracy(problem=f"the output has no {path}, which the reference has")
        if got.shape != wanted.shape:
            return Accuracy(problem=f"{path} has shape {tuple(got.shape)}, the reference {tuple(wanted.shape)}")
        if got.is_complex() != wanted.is_complex():
            return Accuracy(problem=f"{path} is {got.dtype}, the reference {wanted.dtype}")
        if not wanted.is_floating_point() and not wanted.is_complex():
            numbers = got if got.is_floating_point() else got.to(wanted.dtype)  # no 1.9 is a 1, and no NaN true
            different = (numbers != wanted).double().mean().item() if wanted.numel() else 0.0
            error = max(error, different)
            continue
        y, r = _real(got), _real(wanted)
        bad = ~torch.isfinite(y) & torch.isfinite(r)
        if bad.any():
            return Accuracy(problem=f"{path} has {int(bad.sum())} values that are NaN or infinite")
        finite = torch.isfinite(r)
        if not torch.allclose(y[~finite], r[~finite], rtol=0, atol=0, equal_nan=True):
            return Accuracy(problem=f"{path} differs where the reference is NaN or infinite")
        y, r = y[finite], r[finite]
        if r.numel() == 0:
            continue
        norm, size = float(r.norm()), float(y.norm())
        distance = float((y - r).norm())
        # A leaf of zeros has no relative error: its distance is then taken as it is.
        error = max(error, distance / norm if norm > 0 else distance)
        max_abs = max(max_abs, float((y - r).abs().max()))
        if norm > 0 and size > 0:
            angle = float(torch.dot(y.reshape(-1), r.reshape(-1))) / (norm * size)
            cosine = angle if math.isnan(cosine) else min(cosine, angle)
        if looks_like_logits(path, wanted, len(reference)) and not wanted.isnan().any():
            same = _real(got).argmax(-1) == _real(wanted).argmax(-1)
            share = same.double().mean().item()
            agreement = share if math.isnan(agreement) else min(agreement, share)
    return Accuracy(error, cosine, max_abs, agreement, finite=True, judged_batches=1)


def worst(accuracies: Iterable[Accuracy]) -> Accuracy:
    """The worst of several batches, measure by measure; the first problem stands."""
    batches = list(accuracies)
    problem = next((item.problem for item in batches if item.problem), "")
    if not batches or problem:
        return Accuracy(problem=problem or "no batch was judged", judged_batches=len(batches))
    return Accuracy(
        error=max(item.error for item in batches),
        cosine=_least([item.cosine for item in batches]),
        max_abs=max(item.max_abs for item in batches),
        agreement=_least([item.agreement for item in batches]),
        finite=all(item.finite for item in batches),
        judged_batches=len(batches),
    )


def looks_like_logits(path: str, leaf: torch.Tensor, num_leaves: int) -> bool:
    """Whether a leaf's largest entry in the last dimension is a decision: named so, or one lone matrix of rows."""
    if not leaf.is_floating_point() or leaf.dim() < 2 or leaf.shape[-1] < 2:
        return False
    return path.endswith("logits") or (num_leaves == 1 and leaf.dim() == 2)


def user_metric(metric: Callable[[Any], float] | None, run: Callable[..., Any]) -> tuple[float, str]:
    """The user's metric of `run` (NaN where there is none), and what is wrong with it: it raised, or gave no finite
    number."""
    if metric is None:
        return math.nan, ""
    try:
        value = metric(run)
    except Exception as error:
        return math.nan, f"the metric raised {first_line(error)}"
    try:
        number = float(value)
    except (TypeError, ValueError):
        return math.nan, f"the metric returned {type_text(value)}, not a number"
    return (number, "") if math.isfinite(number) else (math.nan, f"the metric is {number}")


def with_metric(accuracy: Accuracy, metric: Callable[[Any], float] | None, run: Callable[..., Any]) -> Accuracy:
    """The same with the user's metric of `run`."""
    value, problem = user_metric(metric, run)
    return replace(accuracy, metric=value, problem=accuracy.problem or problem)


def repeat_rows(batch: Any, factor: int, rows: int) -> Any:
    """The batch `factor` times over: every tensor with `rows` in its first dimension is repeated along it. Of a batch
    with other rows than the first one, or where the user counts something else, it is as many as its first tensor has.

    Raises where nothing can be repeated: the batch would be taken for a larger one.
    """
    if factor == 1:
        return batch
    found = rows_of(batch)
    if not found:
        raise RuntimeError("a batch has no rows that could be repeated")
    rows = rows if rows in (tensor.size(0) for tensor in tensors(batch) if tensor.dim()) else found

    def grow(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor] * factor) if tensor.dim() and tensor.shape[0] == rows else tensor

    return map_tensors(grow, batch, caches=True)


def first_rows(outputs: Outputs, factor: int, reference: Outputs) -> Outputs:
    """Cut outputs of a batch grown by `factor` back to the rows that the reference has, in whatever dimension they are:
    recurrent layers have theirs in the second."""

    def cut(value: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        grown = [dim for dim, (now, then) in enumerate(zip(value.shape, shape, strict=False)) if now != then]
        if value.dim() == len(shape) and len(grown) == 1 and value.shape[grown[0]] == factor * shape[grown[0]]:
            return value.narrow(grown[0], 0, shape[grown[0]])
        return value

    return {path: cut(value, reference[path].shape) if path in reference else value for path, value in outputs.items()}


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """In float64, complex numbers as pairs. The largest number of a type, which masks are filled with and which is
    another one in each type, is infinity."""
    own = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    wide = own.to(torch.float64)
    if not own.is_floating_point() or own.element_size() == 1:
        return wide
    masked = own.abs() >= min(torch.finfo(own.dtype).max, torch.finfo(torch.bfloat16).max)
    return wide * torch.where(masked, math.inf, 1.0) if masked.any() else wide


def _least(values: Sequence[float]) -> float:
    numbers = [value for value in values if not math.isnan(value)]
    return min(numbers) if numbers else math.nan
