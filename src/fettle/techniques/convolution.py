"""How convolutions are computed in training: by the library's kernels, or as plain matrix products.

oneDNN's kernels fill a core on large images and less so on small ones, where much of what they multiply is padding;
worst is the weight gradient in bfloat16. On a ResNet-18 for images of 64 x 64 (torch 2.13) it took eight to ten times
as long as the forward pass of the same layer on a CPU with AMX (brgconv_bwd_w), and on one with AVX-512 only (jit_bf16)
1.3 times on images of 16 x 16, twice on 2 x 2. As products of what a row of the kernel reads, the three passes of the
layers on 2 x 2 took a third to two thirds of the kernels' time there, those on 16 x 16 1.2 to 1.5 times. So each layer
takes both in turn in its first calls and then stays with the faster, for each pass and shape, as cuDNN's benchmark mode
does among its kernels; so two runs may round differently. Where nothing is timed, compiled with the model or under
``torch.use_deterministic_algorithms``, weight gradients are products and the rest is not.
"""

from typing import Any

import torch

from fettle.techniques._base import TRAINING, Code, Facts, Level, Recipe, Technique, register


def inside_image(tap: int, stride: int, padding: int, size: int, outputs: int) -> tuple[int, int, slice]:
    """The outputs (first, last) whose input at this place of the kernel is not padding, and the pixels they read."""
    first = max(0, -(-(padding - tap) // stride))
    last = max(first, min(outputs, (size - 1 + padding - tap) // stride + 1))
    start = first * stride + tap - padding
    return first, last, slice(start, start + (last - first) * stride, stride)


def unfold_rows(x: Any, wide: int, stride: int, padding: int, width: int) -> Any:
    """im2col along the width alone: what each of `width` outputs reads of a row, (rows, images, width, wide, channels).

    Rows come first in memory, then images: those that a row of the kernel reads lie together for all images, and none
    is kept for padding above and below: a third of all where an image of 2 x 2 meets a kernel of 3 x 3.
    """
    count, channels, height, size = x.shape
    rows, columns = x.permute(2, 0, 3, 1), x.new_zeros((height, count, width, wide, channels))
    for tap in range(wide):
        first, last, pixels = inside_image(tap, stride, padding, size, width)
        if first < last:
            columns[:, :, first:last, tap] = rows[:, :, pixels]
    return columns


def convolve_by_products(x: Any, rows: Any, out_channels: int, kernel: Any, stride: Any, padding: Any) -> Any:
    """A convolution as one product for each row of its kernel: ``rows(i)`` is (wide * channels, out_channels)."""
    (tall, wide), (count, channels) = kernel, x.shape[:2]
    height, width = (
        (size + 2 * around - of_kernel) // step + 1
        for size, around, of_kernel, step in zip(x.shape[2:], padding, kernel, stride, strict=True)
    )
    columns = unfold_rows(x, wide, stride[1], padding[1], width)
    out = x.new_zeros((height, count, width, out_channels))
    for tap in range(tall):
        first, last, below = inside_image(tap, stride[0], padding[0], len(columns), height)
        if first < last:
            out[first:last].view(-1, out_channels).addmm_(columns[below].reshape(-1, wide * channels), rows(tap))
    innermost = x.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if innermost else torch.contiguous_format
    return out.permute(1, 3, 0, 2).contiguous(memory_format=layout)


def forward_by_products(x: Any, weight: Any, bias: Any, stride: Any, padding: Any) -> Any:
    """``torch.nn.functional.conv2d`` with one group and no dilation."""
    out_channels, _, tall, wide = weight.shape
    by_row = weight.permute(2, 0, 3, 1)
    out = convolve_by_products(
        x, lambda row: by_row[row].reshape(out_channels, -1).t(), out_channels, (tall, wide), stride, padding
    )
    return out if bias is None else out + bias[:, None, None]


def input_gradient_by_products(grad: Any, weight: Any, padding: Any) -> Any:
    """The gradient of a stride-1 convolution's input: a convolution of the output's with the kernel flipped."""
    _, channels, tall, wide = weight.shape

    def rows(row: int) -> Any:
        return torch.stack([weight[:, :, tall - 1 - row, wide - 1 - tap] for tap in range(wide)]).view(-1, channels)

    around = (tall - 1 - padding[0], wide - 1 - padding[1])
    return convolve_by_products(grad, rows, channels, (tall, wide), (1, 1), around)


def weight_gradient_by_products(grad: Any, x: Any, shape: Any, stride: Any, padding: Any) -> Any:
    """The gradient of a convolution's weight of this `shape`: one product for each row of the kernel."""
    out_channels, channels, tall, wide = shape
    _, _, height, width = grad.shape
    grad, columns = grad.permute(2, 0, 3, 1).contiguous(), unfold_rows(x, wide, stride[1], padding[1], width)
    rows = []
    for tap in range(tall):
        first, last, below = inside_image(tap, stride[0], padding[0], len(columns), height)
        part = columns[below] if first < last else columns[:0]
        rows.append(grad[first:last].reshape(-1, out_channels).t() @ part.reshape(-1, wide * channels))
    return torch.stack(rows, 1).view(out_channels, tall, wide, channels).permute(0, 3, 1, 2)


def the_faster(times: Any, key: Any, *ways: Any) -> Any:
    """What the ways give alike: three times each by one after the other, then by the one with the shortest time."""
    import time

    first, second = times.setdefault(key, ([], []))
    if len(second) == 3:
        return ways[min(second) < min(first)]()
    turn = len(first) > len(second)
    began = time.perf_counter()
    result = ways[turn]()
    times[key][turn].append(time.perf_counter() - began)
    return result


class FasterConvolution(torch.autograd.Function):
    """A 2-D convolution with one group and no dilation, each pass by the library's kernel or by products.

    `times` are the seconds that both took, three each, by pass and shape; None where nothing can be timed.
    """

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, times: Any) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding, ctx.has_bias, ctx.times = stride, padding, bias is not None, times
        if times is None:
            return torch.nn.functional.conv2d(x, weight, bias, stride, padding)
        return the_faster(
            times, ("forward", x.shape),
            lambda: torch.nn.functional.conv2d(x, weight, bias, stride, padding),
            lambda: forward_by_products(x, weight, bias, stride, padding),
        )  # fmt: skip

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Any) -> Any:
        (x, weight), stride, padding, times = ctx.saved_tensors, ctx.stride, ctx.padding, ctx.times
        of_x = of_weight = None

        def by_kernel(index: int) -> Any:
            wanted = (index == 0, index == 1, False)
            rest = (None, stride, padding, (1, 1), False, (0, 0), 1, wanted)
            return torch.ops.aten.convolution_backward(grad, x, weight, *rest)[index]

        if ctx.needs_input_grad[0]:
            turned = tuple(stride) == (1, 1) and padding[0] < weight.shape[2] and padding[1] < weight.shape[3]
            of_x = by_kernel(0) if times is None or not turned else the_faster(
                times, ("input", x.shape), lambda: by_kernel(0),
                lambda: input_gradient_by_products(grad, weight, padding),
            )  # fmt: skip
        if ctx.needs_input_grad[1]:
            given = (grad, x, weight.shape, stride, padding)
            of_weight = weight_gradient_by_products(*given) if times is None else the_faster(
                times, ("weight", x.shape), lambda: by_kernel(1), lambda: weight_gradient_by_products(*given),
            )  # fmt: skip
        of_bias = grad.sum((0, 2, 3)) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return of_x, of_weight, of_bias, None, None, None


def convolve(layer: Any, x: torch.Tensor) -> Any:
    """The forward pass of a convolution that may be made of products."""
    if x.dim() != 4:
        return layer._conv_forward(x, layer.weight, layer.bias)
    timed = not torch.compiler.is_compiling() and not torch.are_deterministic_algorithms_enabled()
    times = layer.__dict__.setdefault("times_of_passes", {}) if timed else None
    given = (x, layer.weight, layer.bias, layer.stride, layer.padding, times)
    return FasterConvolution.apply(*given)  # type: ignore[no-untyped-call]


def is_wide(layer: Any) -> bool:
    """Whether it is a plain convolution with enough channels to fill a product."""
    plain = type(layer) is torch.nn.Conv2d and layer.padding_mode == "zeros"
    plain = plain and layer.groups == 1 and layer.dilation == (1, 1) and not isinstance(layer.padding, str)
    return bool(plain and layer.in_channels >= 16)


def convolutions_by_products(model: torch.nn.Module) -> int:
    """Change the convolutions of a model that are wide; returns how many."""
    import functools

    found: list[Any] = [layer for layer in model.modules() if is_wide(layer)]
    for layer in found:
        layer.forward = functools.partial(convolve, layer)
    if not found:
        raise RuntimeError("no convolution has 16 channels, one group and no dilation")
    return len(found)


def products(facts: Facts) -> dict[str, str]:
    """The level where the weights' gradients in bfloat16 are what a CPU is slow at."""
    return {"convolution": "products"} if facts.device == "cpu" and facts.has_bf16 and facts.num_wide_conv else {}


@register
class Convolution(Technique):
    name = "convolution"
    order = 540
    modes = TRAINING
    rung = 6
    title = "convolutions"
    default = "kernel"

    def levels(self, facts: Facts) -> list[Level]:
        why_not = "" if facts.num_wide_conv else "no 2-D convolution has 16 channels, one group and no dilation"
        why_not = why_not or ("" if facts.device == "cpu" else "it is for CPUs: cuDNN has kernels of its own")
        return [
            Level("kernel", "the library's kernels, as given"),
            Level("products", "matrix products, in the passes and layers where they prove faster", why_not),
        ]

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        half = recipe.levels.get("precision") == "autocast-fp16"
        return "its backward pass is in bfloat16 or float32" if half else ""

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        passes = (forward_by_products, input_gradient_by_products, weight_gradient_by_products)
        parts = (inside_image, unfold_rows, convolve_by_products, *passes, the_faster, FasterConvolution, convolve)
        return Code(helpers=(*parts, is_wide, convolutions_by_products), prepare=("convolutions_by_products(model)",))
