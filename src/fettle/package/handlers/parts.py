"""What the ready handlers share: two of the four steps, scores with labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from fettle.errors import UsageError, first_line
from fettle.files import read_text
from fettle.package.tensors import TensorSpec
from fettle.units import count_text

Array = np.ndarray[Any, Any]
Scores = Literal["softmax", "sigmoid", "none"]
"""How a model's scores become probabilities; ``none``: they are already."""
Top = Annotated[int, Meta(ge=1, le=100_000)]
"""The classes to name."""
LABELS = "labels.txt"
MAX_LABELS_BYTES = 16 << 20
LAST = "last"
"""A generating model's input that says which position's next token is wanted."""
SOURCE, SOURCE_MASK = "source", "source_mask"
"""The prompts of an encoder with a decoder, which has input_ids of its own."""
LOGITS = "logits"
SEEN, PAST, FRESH = "seen", "past", "fresh"
"""The inputs of a model that is given the keys and values of the tokens before, and the output that joins them."""
READ, CROSSED = "read", "crossed"
"""How many of these are a prompt's, where a decoder has an encoder, and the output of a prompt that is read: they come
first."""


@dataclass
class Item:
    """One request between two steps: its arrays, and what a later step must know of it."""

    arrays: list[Array]
    note: Any = None


class ItemHandler:
    """A handler whose requests are items; what it lacks are `preprocess` and `postprocess`."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def initialize(self, context: Any) -> None:
        """Keep the runner, and what its model takes and gives."""
        self.runner, self.max_rows = context.runner, context.manifest.max_rows
        self.inputs, self.outputs = context.manifest.inputs, context.manifest.outputs

    def inference(self, items: list[Item]) -> list[Item]:
        """The outputs of every request. Those with inputs of like shapes share a call of at most `max_rows` rows."""
        if not all(spec.batched for spec in (*self.inputs, *self.outputs)):
            return [Item(self.runner.run([item.arrays], 0), item.note) for item in items]
        groups: dict[Any, list[list[int]]] = {}
        for index, item in enumerate(items):
            group_of = groups.setdefault(tuple(array.shape[1:] for array in item.arrays), [[]])
            rows = sum(len(items[other].arrays[0]) for other in group_of[-1])
            if group_of[-1] and rows + len(item.arrays[0]) > self.max_rows:
                group_of.append([])
            group_of[-1].append(index)
        answers: list[Item] = [Item([]) for _ in items]
        for group in (one for group_of in groups.values() for one in group_of):
            outputs, place = self.runner.run([items[index].arrays for index in group], 0), 0
            for index in group:
                rows = len(items[index].arrays[0])
                answers[index] = Item([output[place : place + rows] for output in outputs], items[index].note)
                place += rows
        return answers

    def check_rows(self, rows: int) -> None:
        """Raise `UsageError` where one request asks for more than a call can hold."""
        if rows > self.max_rows:
            raise UsageError(f"a request may have at most {count_text(self.max_rows, 'row')}, not {rows}")


def read_labels(folder: Path) -> list[str]:
    """``labels.txt`` of a package: the name of each class on a line of its own; empty where there is none."""
    path = folder / LABELS
    if not path.is_file():
        return []
    return read_text(path, MAX_LABELS_BYTES).splitlines()


def labels_file(path: Path) -> bytes:
    """``labels.txt`` out of the user's file. Raises `UsageError`.

    It has a line for each class, or is JSON: ``["cat", ...]`` or ``{"0": "cat", ...}``, where TorchServe's
    ``index_to_name.json`` may have ``["n02123045", "cat"]`` for a name.
    """
    try:
        text = read_text(path, MAX_LABELS_BYTES)
        labels: Any = text.splitlines()
        if path.suffix == ".json":
            labels = msgspec.json.decode(text.encode(), type=list[str] | dict[str, str | list[str]])
        names = _in_order(labels, path) if isinstance(labels, dict) else labels
    except (OSError, ValueError, IndexError, RecursionError) as error:
        raise UsageError(f"{path} holds no labels: a line for each class, or JSON ({first_line(error)})") from error
    return "".join(" ".join(name.split()) + "\n" for name in names).encode()


def _in_order(labels: Mapping[str, str | list[str]], path: Path) -> list[str]:
    """The names of classes by number; a number that is left out is its own name."""
    by_number = {int(number): name if isinstance(name, str) else name[-1] for number, name in labels.items()}
    if min(by_number, default=0) < 0 or max(by_number, default=0) > 1_000_000:
        raise UsageError(f"{path} numbers its classes beyond a million")
    return [by_number.get(number, str(number)) for number in range(max(by_number, default=-1) + 1)]


def label(labels: Sequence[str], index: int) -> str:
    """What a class is called: its number where nobody named it."""
    return labels[index] if index < len(labels) else str(index)


def softmax(scores: Array) -> Array:
    """Along the last axis, in float64, so that large scores do not overflow."""
    wide = scores.astype(np.float64)
    powers = np.exp(wide - wide.max(axis=-1, keepdims=True))
    shares: Array = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def sigmoid(scores: Array) -> Array:
    return 0.5 * (1.0 + np.tanh(0.5 * scores.astype(np.float64)))


def probabilities(scores: Array, how: Scores) -> Array:
    return softmax(scores) if how == "softmax" else sigmoid(scores) if how == "sigmoid" else scores.astype(np.float64)


def top_classes(scores: Array, labels: Sequence[str], top: int) -> list[dict[str, Any]]:
    """The best `top` classes of one row, best first: ``{"label", "index", "score"}``."""
    best = np.argsort(-scores, kind="stable")[:top]
    return [{"label": label(labels, int(i)), "index": int(i), "score": float(scores[i])} for i in best]


def output_index(outputs: Sequence[TensorSpec], name: str) -> int:
    """Where an output stands. Raises `UsageError` where there is none of that name."""
    names = [spec.name for spec in outputs]
    if name not in names:
        raise UsageError(f"the model has no output {name!r}: {', '.join(names)}")
    return names.index(name)
