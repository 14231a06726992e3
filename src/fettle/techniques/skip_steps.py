"""Steps of a sampling that are not computed: what the model would answer is extrapolated from its last two answers.

Neighbouring steps differ little, and what a denoiser answers changes less than what it is given (Liu et al. 2025,
*TaylorSeer*, to first order). Unlike cached blocks (`step_cache`) it needs no UNet, and such a step costs nothing. It
is another way to the picture, which the workload's metric has to judge.
"""

import inspect
from typing import Any

import torch

from fettle.techniques._base import Bundle, Code, Facts, Level, Recipe, Technique, register
from fettle.techniques._exported import flatten
from fettle.techniques.step_cache import ANEW, Steps, sampled_in_openvino


def denoiser_of(module: Any) -> tuple[str, int]:
    """Of a denoiser of diffusers: the name of its first argument, and the place of `timestep`; empty of others."""
    if not type(module).__module__.startswith("diffusers.models."):
        return ("", 0)
    names = list(inspect.signature(module.forward).parameters)
    return (names[0], names.index("timestep")) if "timestep" in names else ("", 0)


class SkippedSteps(Steps):
    """A denoiser of which only every few steps are computed. `sample` is the name of its first argument, `place` that
    of the timestep."""

    def __init__(self, model: Any, every: int, sample: str, place: int) -> None:
        super().__init__(every)
        self.model, self.name, self.at = model, sample, place
        self.shapes: list[Any] = []
        self.sizes: list[int] = []
        self.form: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch.utils import _pytree as pytree

        sample = args[0] if args else kwargs[self.name]
        time = kwargs["timestep"] if "timestep" in kwargs else args[self.at]
        expected = self.expected(sample, time)
        if expected is not None:
            parts = expected.split(self.sizes)
            return pytree.tree_unflatten(
                [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)], self.form
            )
        output = self.model(*args, **kwargs)
        leaves, self.form = flatten(output)
        if any(not isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise RuntimeError("skip_steps: the model answers with more than tensors")
        self.shapes, self.sizes = [leaf.shape for leaf in leaves], [leaf.numel() for leaf in leaves]
        self.keep(torch.cat([leaf.reshape(-1) for leaf in leaves]))
        return output


@register
class SkipSteps(Technique):
    name = "skip_steps"
    order = 690
    title = "steps left out"
    default = "off"
    of_module = True
    packages = ("diffusers",)

    def levels(self, facts: Facts) -> list[Level]:
        why_not = ""
        if not facts.denoiser[0]:
            why_not = "it is not a denoiser of diffusers"
        elif facts.calls < 3:
            why_not = "it is not called for step after step"
        return [Level("off", "as given"), Level("2", "the model is called in every second step", why_not)]

    def bundles(self, facts: Facts) -> list[Bundle]:
        return sampled_in_openvino(8, {"skip_steps": "2"}, facts)

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        name, place = facts.denoiser
        return Code(
            helpers=(flatten, Steps, SkippedSteps),
            prepare=(f"model = SkippedSteps(model, {level}, {name!r}, {place})",),
            whole=ANEW,
        )
