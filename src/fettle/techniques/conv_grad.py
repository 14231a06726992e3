"""How the weight gradient of a convolution is computed: by the library's kernel, or as plain matrix products.

On a CPU with AMX, oneDNN's kernel for it (brgconv_bwd_w, torch 2.13) takes eight to ten times as long in bfloat16 as
the forward pass of the same layer (seen with ONEDNN_VERBOSE on a ResNet-18 for images of 64 x 64). The gradient is the
products of the output's gradient with the input as each row of the kernel sees it: plain matrix products. In float32
the kernel is the faster one. Compiled with the model (torch.compile keeps it in one graph) it trains alike; on that
network it was no faster than eager.
"""

from typing import Any, ClassVar

import torch

from fettle.recipe import Recipe
from fettle.techniques._base import Code, Facts, Level, Technique


class ProductGradient(torch.autograd.Function):
    """A 2-D convolution with one group and no dilation; its weight gradient is one product for each kernel row."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, stride: Any, padding: Any) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding, ctx.has_bias = stride, padding, bias is not None
        return torch.nn.functional.conv2d(x, weight, bias, stride, padding)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Any) -> Any:
        (x, weight), (down, right), (top, left) = ctx.saved_tensors, ctx.stride, ctx.padding
        made, channels, tall, wide = weight.shape
        count, _, height, width = grad.shape
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            rest = (None, ctx.stride, ctx.padding, (1, 1), False, (0, 0), 1, (True, False, False))
            of_x = torch.ops.aten.convolution_backward(grad, x, weight, *rest)[0]
        if ctx.needs_input_grad[1]:
            columns = grad.permute(0, 2, 3, 1).reshape(-1, made).t()
            inner = torch.nn.functional.pad(x.permute(0, 2, 3, 1), (0, 0, left, left, top, top)).contiguous()
            image, line, pixel, one = inner.stride()
            rows = []
            for row in range(tall):  # `wide` neighbours lie side by side in memory: a view that overlaps itself
                size, strides = (count, height, width, wide * channels), (image, down * line, right * pixel, one)
                seen = inner.as_strided(size, strides, row * line)  # `pad` made it: it begins where its memory does
                rows.append(columns @ seen.reshape(-1, wide * channels))
            of_weight = torch.stack(rows, 1).view(made, tall, wide, channels).permute(0, 3, 1, 2)
        of_bias = grad.sum((0, 2, 3)) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return of_x, of_weight, of_bias, None, None


def convolve(layer: Any, x: torch.Tensor) -> Any:
    """The forward pass of a convolution whose weight gradient is made of products."""
    given = (x, layer.weight, layer.bias, layer.stride, layer.padding)
    return ProductGradient.apply(*given)  # type: ignore[no-untyped-call]


def gradients_by_products(model: torch.nn.Module) -> int:
    """Change the plain convolutions of a model that have enough channels to fill a product; returns how many."""
    import functools

    found = [
        layer for layer in model.modules()
        if type(layer) is torch.nn.Conv2d and layer.groups == 1 and layer.dilation == (1, 1)
        and layer.padding_mode == "zeros" and not isinstance(layer.padding, str) and layer.in_channels >= 16
    ]  # fmt: skip
    for layer in found:
        layer.forward = functools.partial(convolve, layer)  # type: ignore[method-assign]
    if not found:
        raise RuntimeError("no convolution has 16 channels, one group and no dilation")
    return len(found)


class ConvGrad(Technique):
    name = "conv_grad"
    modes: ClassVar[frozenset[str]] = frozenset({"training"})
    rung = 6
    title = "weight gradients of convolutions"
    given = "kernel"

    def levels(self, facts: Facts) -> list[Level]:
        why_not = "" if facts.num_conv else "the model has no 2-D convolution"
        why_not = why_not or ("" if facts.device == "cpu" else "it is for CPUs: cuDNN has kernels of its own")
        return [
            Level("kernel", "the library's kernel, as given"),
            Level("products", "matrix products, one for each row of the kernel", why_not),
        ]

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        if level == self.given:
            return ""
        if recipe.levels.get("precision") == "autocast-fp16":
            return "its backward pass is in bfloat16 or float32"
        return ""

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        helpers = (ProductGradient, convolve, gradients_by_products)
        return Code(helpers=helpers, prepare=("gradients_by_products(model)",))
