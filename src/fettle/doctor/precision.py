"""Precision: TF32, 16-bit types and the shapes that their units want."""

from __future__ import annotations

from collections.abc import Iterator

from fettle.doctor._check import Finding, check, error, note, warning
from fettle.doctor.environment import Environment


@check()
def mixed_tf32(here: Environment) -> Iterator[Finding]:
    """TF32 set by the old names and by the new."""
    if here.program.tf32_mixed:
        yield error("TF32 was set by allow_tf32 and by fp32_precision.",
                    "torch raises where the setting is read (torch.compile does), and which one counts is not defined.",
                    "torch.backends.fp32_precision = 'tf32'  # and allow_tf32 nowhere")  # fmt: skip


@check()
def no_bfloat16(here: Environment) -> Iterator[Finding]:
    """A model in bfloat16 on a GPU without units for it."""
    old = [gpu for gpu in here.gpus if (0, 0) < gpu.capability < (8, 0)]
    for model in here.program.models:
        if model.device == "cuda" and "bfloat16" in model.dtypes and old:
            yield warning(f"{model.name} is in bfloat16, and {old[0].name} has no units for it.",
                          "Products are emulated: slower than float16, and than float32.", "model.half()")  # fmt: skip


@check()
def odd_sides(here: Environment) -> Iterator[Finding]:
    """16-bit products with sides that are not a multiple of 8."""
    for model in here.program.models:
        if model.odd and model.device == "cuda" and {"float16", "bfloat16"} & set(model.dtypes):
            yield warning(f"{len(model.odd)} linear layers of {model.name} have a side that is not a multiple of 8: "
                          f"{', '.join(model.odd[:3])}.", "Their 16-bit products do not fill the matrix units.",
                          "pad the layer to the next multiple of 8, and cut its answer")  # fmt: skip


@check()
def double(here: Environment) -> Iterator[Finding]:
    """float64 as the default, or in weights."""
    if "float64" in here.program.switches:
        yield warning("The default type is float64.", "Everything takes twice the time and memory, on most GPUs "
                      "32 times.", "torch.set_default_dtype(torch.float32)")  # fmt: skip
    for model in here.program.models:
        if "float64" in model.dtypes and "float64" not in here.program.switches:
            yield warning(f"{model.name} has weights in float64.", "Its products take twice the time and memory, on "
                          "most GPUs 32 times.", "model.float()")  # fmt: skip
        if {"float16", "bfloat16"} <= set(model.dtypes):
            yield note(f"{model.name} has weights in float16 and in bfloat16.",
                       "Where they meet, both are converted to float32.", "model.bfloat16()")  # fmt: skip
