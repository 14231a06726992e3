"""The handler for images: a JPEG, PNG or WebP in, the best classes with their labels out.

The image is decoded by Pillow, cut and resized in one step, and normalised. Its size is read from its header and
refused there: a file of a few kilobytes can announce gigabytes of pixels.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from fettle.errors import UsageError, needing
from fettle.package.handlers.parts import (
    Array,
    Item,
    ItemHandler,
    Scores,
    Top,
    output_index,
    probabilities,
    read_labels,
    top_classes,
)  # fmt: skip
from fettle.package.tensors import TensorSpec

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MAX_SIDE = 8192
"""Pixels of a side of what the model takes."""
Side = Annotated[int, Meta(ge=1, le=MAX_SIDE)]
Format = Literal["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"]


class Decoding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From the bytes of an image to the model's tensor."""

    size: tuple[Side, Side]
    """Height and width that the model takes."""
    resize: Annotated[int, Meta(ge=0, le=MAX_SIDE)] = 0
    """The shorter side before the middle is cut out. 0: the whole image is stretched to `size`."""
    mean: tuple[float, ...] = IMAGENET_MEAN
    """Taken off each channel, of values between 0 and 1."""
    std: tuple[float, ...] = IMAGENET_STD
    """Each channel is divided by it."""
    formats: Annotated[tuple[Format, ...], Meta(min_length=1)] = ("JPEG", "PNG", "WEBP")
    """What may be sent, as Pillow calls it. Every further format is a further decoder that strangers can feed."""
    max_pixels: Annotated[int, Meta(ge=1, le=1 << 30)] = 50_000_000
    """The largest image, width times height."""

    def __post_init__(self) -> None:
        if len(self.mean) not in (1, 3) or len(self.mean) != len(self.std) or not all(s > 0 for s in self.std):
            raise ValueError("mean and std have a number for each channel, 1 or 3, and std is above 0")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="image"):
    """Settings of the image handler."""

    decoding: Decoding
    output: str
    """The output that holds a score for each class."""
    scores: Scores = "softmax"
    top: Top = 5


def suggest(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], files: set[str]) -> Settings:
    """Sizes off the model's input; cut and normalised as is usual for ImageNet."""
    spec = image_input(inputs)
    if len(inputs) != 1:
        raise UsageError(f"the image handler fills one input, and the model has {len(inputs)}")
    classes = [output for output in outputs if len(output.shape) == 2]
    if not classes:
        raise UsageError("the image handler needs an output of shape [rows, classes]; the tensor handler takes any")
    decoding = suggest_decoding(spec)
    short = min(decoding.size)
    return Settings(msgspec.structs.replace(decoding, resize=round(short * 256 / 224)), classes[0].name)


def suggest_decoding(spec: TensorSpec, free: int = 224) -> Decoding:
    """The decoding for an input; sides that may have any size become `free`."""
    height, width = (free if side == -1 else side for side in spec.shape[2:])
    if spec.shape[1] == 1:
        return Decoding((height, width), mean=(0.0,), std=(1.0,))
    return Decoding((height, width))


def image_input(inputs: Sequence[TensorSpec]) -> TensorSpec:
    """The input that takes images. Raises `UsageError` where there is none."""
    for spec in inputs:
        if len(spec.shape) == 4 and spec.shape[1] in (1, 3) and spec.kind.kind == "f" and spec.batched:
            return spec
    shapes = ", ".join(f"{spec.name} {list(spec.shape)}" for spec in inputs)
    raise UsageError(f"no input takes images, which is [rows, 1 or 3, height, width] of floats: {shapes}")


class Images(ItemHandler):
    """What handlers of images share: the input that takes them, and the labels."""

    def initialize(self, context: Any) -> None:
        """Find the input, and read the labels. Raises `UsageError` where the decoded image does not fit the input."""
        super().initialize(context)
        import_pillow()
        decoding, self.image = self.settings.decoding, image_input(self.inputs)
        shape = (1, len(decoding.mean), *decoding.size)
        if not self.image.fits(shape):
            wanted = f"the input {self.image.name} is {list(self.image.shape)}"
            raise UsageError(f"the handler makes {list(shape)}, and {wanted}")
        self.labels = read_labels(context.folder)


class Handler(Images):
    """The best classes of every image."""

    def initialize(self, context: Any) -> None:
        super().initialize(context)
        self.place = output_index(self.outputs, self.settings.output)

    def preprocess(self, requests: Sequence[dict[str, Any]]) -> list[Item]:
        return [Item([decode(r["body"], self.settings.decoding)[0].astype(self.image.kind)]) for r in requests]

    def postprocess(self, answers: list[Item]) -> list[Any]:
        """``[{"label", "index", "score"}, ...]``, best first."""
        settings = self.settings
        return [
            top_classes(probabilities(answer.arrays[self.place][0], settings.scores), self.labels, settings.top)
            for answer in answers
        ]


def import_pillow() -> Any:
    """Pillow. `UsageError` where it is not installed."""
    with needing("serve", "images need Pillow"):
        from PIL import Image
    return Image


def decode(body: bytes, decoding: Decoding) -> tuple[Array, tuple[int, int]]:
    """An image as float32 [1, channels, height, width], and its own width and height. Raises `UsageError`."""
    pillow = import_pillow()
    try:
        with pillow.open(io.BytesIO(body), formats=decoding.formats) as image:
            width, height = image.size
            if width * height > decoding.max_pixels:
                raise UsageError(f"an image may have at most {decoding.max_pixels} pixels, not {width} x {height}")
            image.load()
            # One step from the wanted part to the wanted size: nothing is as large as a resized stripe could be.
            small = image.convert("L" if len(decoding.mean) == 1 else "RGB").resize(
                decoding.size[::-1], pillow.Resampling.BILINEAR, box=_box(width, height, decoding)
            )
    except UsageError:
        raise
    except pillow.DecompressionBombError:
        raise UsageError(f"an image may have at most {decoding.max_pixels} pixels") from None
    except Exception as error:  # decoders of damaged files raise nearly everything
        wanted = ", ".join(decoding.formats)
        raise UsageError(f"the body is not an image that can be read: {wanted} are") from error
    values = np.asarray(small, np.float32)[..., None] if len(decoding.mean) == 1 else np.asarray(small, np.float32)
    scaled = (values / np.float32(255) - np.array(decoding.mean, np.float32)) / np.array(decoding.std, np.float32)
    return np.ascontiguousarray(scaled.transpose(2, 0, 1))[None], (width, height)


def _box(width: int, height: int, decoding: Decoding) -> tuple[float, float, float, float]:
    """The part of the image that will be seen: all of it, or the middle that `resize` leaves."""
    if not decoding.resize:
        return (0, 0, width, height)
    scale = min(width, height) / decoding.resize
    wide, high = min(width, decoding.size[1] * scale), min(height, decoding.size[0] * scale)
    left, top = (width - wide) / 2, (height - high) / 2
    return (left, top, left + wide, top + high)
