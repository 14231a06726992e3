"""Explanations: how much each element of the input moved the answer, by Captum. Runs in the worker.

Float inputs: integrated gradients from zeros (Sundararajan et al. 2017, "Axiomatic Attribution for Deep Networks"); the
attributions of a row add up to the difference that the input makes to the score. Models with integer inputs only, which
have no gradient: each element is set to 0 in turn (feature ablation).

The tuned model may be compiled or have its gradients off, so the model is loaded a second time as it was exported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fettle.errors import UsageError, needing
from fettle.package.manifest import Package
from fettle.package.model_runner import load_samples
from fettle.package.program import load_program

Array = np.ndarray[Any, Any]
STEPS = 50
"""Points of the path from zeros to the input."""
MAX_ABLATED = 1024
"""Elements of a row that are set to 0 in turn: each is a call of the model."""


class Explainer:
    """The exported model with gradients. Raises `UsageError` where Captum is missing or the model has no rows."""

    def __init__(self, package: Package, device: str = "cpu") -> None:
        with needing("explain", "explanations need Captum"):
            from captum import attr
        if package.manifest.model != "exported":
            raise UsageError(f"{package.manifest.name} cannot be explained: OpenVINO computes no gradients")
        self.inputs = package.manifest.inputs
        if not all(spec.batched for spec in (*self.inputs, *package.manifest.outputs)):
            raise UsageError(f"{package.manifest.name} cannot be explained: its tensors do not all have rows")
        self._attr, self._device = attr, device
        self._most = package.manifest.max_rows
        self._model = load_program(package.folder, device)
        self._dtypes = [tensor.dtype for tensor in load_samples(package)]

    def attribute(self, arrays: Sequence[Array], target: int = -1) -> list[Array]:
        """Attributions for every input, float32 of its shape: zeros for inputs that were not varied.

        They are for the first output's element `target` of each row, or its largest where that is -1.
        """
        tensors = [torch.from_numpy(np.array(array)).to(self._device) for array in arrays]
        varied = [i for i, tensor in enumerate(tensors) if tensor.is_floating_point()]
        with torch.no_grad():
            scores = self._scores(*tensors)
        if not -1 <= target < scores.shape[1]:
            raise UsageError(f"the target is one of the {scores.shape[1]} elements of a row of the first output")
        wanted = scores.argmax(1) if target < 0 else torch.full((len(scores),), target, device=self._device)
        attributions = self._gradients(tensors, varied, wanted) if varied else self._ablation(tensors, wanted)
        return [
            attributions.get(i, torch.zeros_like(tensor)).detach().to("cpu", torch.float32).contiguous().numpy()
            for i, tensor in enumerate(tensors)
        ]

    def _scores(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The first output, a row of elements for each row."""
        answer = self._model(*(tensor.to(dtype) for tensor, dtype in zip(tensors, self._dtypes, strict=True)))
        first = answer if isinstance(answer, torch.Tensor) else answer[0]
        return first.reshape(len(first), -1).float()

    def _gradients(
        self, tensors: list[torch.Tensor], varied: list[int], wanted: torch.Tensor
    ) -> dict[int, torch.Tensor]:
        fixed = [i for i in range(len(tensors)) if i not in varied]

        def call(*varying: torch.Tensor) -> torch.Tensor:
            by_place = dict(zip([*varied, *fixed], varying, strict=True))
            return self._scores(*(by_place[i] for i in range(len(tensors))))

        attributions = self._attr.IntegratedGradients(call).attribute(
            tuple(tensors[i] for i in varied), target=wanted, n_steps=STEPS, internal_batch_size=self._most,
            additional_forward_args=tuple(tensors[i] for i in fixed) or None,
        )  # fmt: skip
        return dict(zip(varied, attributions, strict=True))

    def _ablation(self, tensors: list[torch.Tensor], wanted: torch.Tensor) -> dict[int, torch.Tensor]:
        if tensors[0][0].numel() > MAX_ABLATED:
            raise UsageError(f"only inputs of up to {MAX_ABLATED} elements a row can be explained without gradients")
        with torch.no_grad():
            attributions = self._attr.FeatureAblation(self._scores).attribute(
                tensors[0], target=wanted, additional_forward_args=tuple(tensors[1:]) or None
            )
        return {0: attributions}
