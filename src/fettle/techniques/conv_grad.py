"""How the weight gradient of a convolution is computed: by the library's kernel, or as plain matrix products.

oneDNN has one kernel for it where the forward pass has several, and in bfloat16 it is slow on small images: on a
ResNet-18 for images of 64 x 64 (torch 2.13) it took eight to ten times as long as the forward pass of the same layer on
a CPU with AMX (brgconv_bwd_w); on one with AVX-512 only (jit_bf16) 1.3 times on images of 16 x 16 and three times on
4 x 4. The gradient is the products of the output's gradient with the input as each row of the kernel sees it. Which is
the faster depends on the layer and the machine, so each layer takes both in turn in its first backward passes and then
stays with the faster, as cuDNN's benchmark mode does for its kernels. Compiled with the model, where nothing can be
timed, all are products.
"""

from typing import Any, ClassVar

import torch

from fettle.recipe import Recipe
from fettle.techniques._base import Code, Facts, Level, Technique


def taps_inside(tap: int, stride: int, padding: int, size: int, made: int) -> tuple[int, int, slice]:
    """The outputs (first, last) that see the image and not its padding through this tap, and what they see of it."""
    first = max(0, -(-(padding - tap) // stride))
    last = max(first, min(made, (size - 1 + padding - tap) // stride + 1))
    start = first * stride + tap - padding
    return first, last, slice(start, start + (last - first) * stride, stride)


def weight_by_products(grad: Any, x: Any, shape: Any, stride: Any, padding: Any) -> Any:
    """The gradient of a convolution's weight of this `shape`: one matrix product for each row of the kernel."""
    made, channels, tall, wide = shape
    _, _, height, width = grad.shape
    # Lines come first in memory, then images: those that a row of the kernel sees lie together for all images, and what
    # only multiplies padding is left out: more than half of it where an image of 2 x 2 meets a kernel of 3 x 3.
    grad, lines = grad.permute(2, 0, 3, 1).contiguous(), x.permute(2, 0, 3, 1)
    seen = x.new_zeros((len(lines), len(x), width, wide, channels))
    for tap in range(wide):
        first, last, pixels = taps_inside(tap, stride[1], padding[1], x.shape[3], width)
        if first < last:
            seen[:, :, first:last, tap] = lines[:, :, pixels]
    rows = []
    for tap in range(tall):
        first, last, below = taps_inside(tap, stride[0], padding[0], len(lines), height)
        part = seen[below] if first < last else seen[:0]
        rows.append(grad[first:last].reshape(-1, made).t() @ part.reshape(-1, wide * channels))
    return torch.stack(rows, 1).view(made, tall, wide, channels).permute(0, 3, 1, 2)


def gradient_by_kernel(grad: Any, x: Any, weight: Any, stride: Any, padding: Any, of_x: bool) -> Any:
    """The library's gradient of what the convolution is given, or of its weight."""
    rest = (None, stride, padding, (1, 1), False, (0, 0), 1, (of_x, not of_x, False))
    return torch.ops.aten.convolution_backward(grad, x, weight, *rest)[0 if of_x else 1]


class ProductGradient(torch.autograd.Function):
    """A 2-D convolution with one group and no dilation, its weight gradient made of products where they are faster.

    `times` are the seconds that both took on images of a shape, three each: {shape: ([kernel's], [products'])}; None
    where nothing is to be timed: all are products.
    """

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, times: Any) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding, ctx.has_bias, ctx.times = stride, padding, bias is not None, times
        return torch.nn.functional.conv2d(x, weight, bias, stride, padding)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = gradient_by_kernel(grad, x, weight, ctx.stride, ctx.padding, True)
        if ctx.needs_input_grad[1]:
            ways = (
                lambda: gradient_by_kernel(grad, x, weight, ctx.stride, ctx.padding, False),
                lambda: weight_by_products(grad, x, weight.shape, ctx.stride, ctx.padding),
            )
            of_weight = ways[1]() if ctx.times is None else the_faster(ways, ctx.times.setdefault(x.shape, ([], [])))
        of_bias = grad.sum((0, 2, 3)) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return of_x, of_weight, of_bias, None, None, None


def the_faster(ways: Any, times: Any) -> Any:
    """What the ways give alike: three times each by one after the other, then by the one with the shortest time."""
    import time

    if len(times[1]) == 3:
        return ways[min(times[1]) < min(times[0])]()
    turn = len(times[0]) > len(times[1])
    began = time.perf_counter()
    made = ways[turn]()
    times[turn].append(time.perf_counter() - began)
    return made


def convolve(layer: Any, x: torch.Tensor) -> Any:
    """The forward pass of a convolution whose weight gradient may be made of products."""
    times = None if torch.compiler.is_compiling() else layer.__dict__.setdefault("gradient_times", {})
    given = (x, layer.weight, layer.bias, layer.stride, layer.padding, times)
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
            Level("products", "matrix products, in the layers where they prove faster than the kernel", why_not),
        ]

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        if level == self.given:
            return ""
        if recipe.levels.get("precision") == "autocast-fp16":
            return "its backward pass is in bfloat16 or float32"
        return ""

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        ways = (taps_inside, weight_by_products, gradient_by_kernel, the_faster)
        helpers = (*ways, ProductGradient, convolve, gradients_by_products)
        return Code(helpers=helpers, prepare=("gradients_by_products(model)",))
