"""The handler for detection: an image in, boxes with labels and scores out, from models that answer as DETR does.

Such a model gives, for each of its queries, a score for every class and a box as centre, width and height in shares
of the image (Carion et al. 2020, "End-to-End Object Detection with Transformers").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from fettle.errors import UsageError
from fettle.package.handlers.image import Decoding, Images, decode, image_input, suggest_decoding
from fettle.package.handlers.parts import Item, label, output_index, probabilities
from fettle.package.tensors import TensorSpec

MASK = "pixel_mask"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="detection"):
    """Settings of the detection handler."""

    decoding: Decoding
    logits: str
    """The output [rows, queries, classes]."""
    boxes: str
    """The output [rows, queries, 4]."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """``softmax``: the last class is "no object", as in DETR. ``sigmoid``: every class is an object's, as in Deformable
    DETR and RT-DETR."""
    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5
    max_boxes: Annotated[int, Meta(ge=1)] = 100


def suggest(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], files: set[str]) -> Settings:
    """The two outputs by their shapes; where two have the same, by DETR's names for them."""
    extra = [spec.name for spec in inputs if spec is not image_input(inputs) and spec.name != MASK]
    if extra:
        raise UsageError(f"the detection handler cannot fill the input {extra[0]}")
    three = [spec for spec in outputs if len(spec.shape) == 3]
    boxes = [spec for spec in three if spec.shape[2] == 4]
    boxes = [spec for spec in boxes if "box" in spec.name] or boxes
    logits = [spec for spec in three if spec not in boxes]
    logits = [spec for spec in logits if spec.name in ("logits", "pred_logits")] or logits
    if not boxes or not logits:
        raise UsageError("the detection handler needs outputs [rows, queries, classes] and [rows, queries, 4]")
    return Settings(suggest_decoding(image_input(inputs), 800), logits[0].name, boxes[0].name)


class Handler(Images):
    """Boxes in pixels of the image that was sent."""

    def initialize(self, context: Any) -> None:
        super().initialize(context)
        self.logits = output_index(self.outputs, self.settings.logits)
        self.boxes = output_index(self.outputs, self.settings.boxes)

    def preprocess(self, requests: Sequence[dict[str, Any]]) -> list[Item]:
        """One row for each image; a mask says that all of its pixels are the image's."""
        items = []
        for request in requests:
            pixels, size = decode(request["body"], self.settings.decoding)
            arrays = [
                pixels.astype(spec.kind) if spec is self.image else np.ones((1, *pixels.shape[2:]), spec.kind)
                for spec in self.inputs
            ]
            items.append(Item(arrays, size))
        return items

    def postprocess(self, answers: list[Item]) -> list[Any]:
        """``[{"label", "index", "score", "box": [left, top, right, bottom]}, ...]``, best first."""
        return [self._objects(answer) for answer in answers]

    def _objects(self, answer: Item) -> list[dict[str, Any]]:
        settings, (width, height) = self.settings, answer.note
        scores = probabilities(answer.arrays[self.logits][0], settings.scores)
        if settings.scores == "softmax":
            scores = scores[:, :-1]
        classes, best = scores.argmax(axis=1), scores.max(axis=1)
        centre, size = np.split(answer.arrays[self.boxes][0].astype(np.float64), 2, axis=1)
        corners = np.concatenate([centre - size / 2, centre + size / 2], axis=1).clip(0, 1)
        corners *= np.array([width, height, width, height])
        order = [i for i in np.argsort(-best, kind="stable")[: settings.max_boxes] if best[i] >= settings.threshold]
        return [
            {"label": label(self.labels, int(classes[i])), "index": int(classes[i]), "score": float(best[i]),
             "box": [round(float(value), 2) for value in corners[i]]}
            for i in order
        ]  # fmt: skip
