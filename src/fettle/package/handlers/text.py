"""The handler for texts: classes, sentence vectors or plain tensors out of what a model says of tokens.

The tokenizer is a ``tokenizer.json`` of the `tokenizers` library, kept in the package. It is data: normaliser,
splitting and vocabulary as JSON, read by that library's Rust code.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from fettle.errors import UsageError, needing, refusing
from fettle.files import read_bytes
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

TOKENIZER = "tokenizer.json"
MAX_TOKENIZER_BYTES = 256 << 20
FIELDS = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
"""Input of the model -> what the tokenizer calls it."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="text"):
    """Settings of the text handler."""

    output: str
    """The output that is answered."""
    answer: Literal["classes", "vector", "tensor"]
    """``classes`` of an output [rows, classes]; ``vector``, which is the output [rows, size], or the mean over the
    tokens of [rows, tokens, size]; or ``tensor``, the output as it is."""
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 20)]
    """Longer texts are cut."""
    fixed: bool = False
    """Fill every text up to `max_tokens`, for models that take one length only."""
    normalize: bool = True
    """Vectors get the length 1."""
    scores: Scores = "softmax"
    """Scores of classes."""
    top: Top = 5
    max_characters: Annotated[int, Meta(ge=1)] = 200_000
    """Longer bodies are refused before the tokenizer sees them."""


def suggest(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], files: set[str]) -> Settings:
    """Classes where an output has two dimensions, else vectors; lengths off the model's input."""
    if TOKENIZER not in files:
        raise UsageError("the text handler needs a tokenizer: give a `tokenizer`, its tokenizer.json")
    check_inputs(inputs)
    length = inputs[0].shape[1]
    two = [spec for spec in outputs if len(spec.shape) == 2]
    three = [spec for spec in outputs if len(spec.shape) == 3]
    if not two and not three:
        raise UsageError("the text handler needs an output [rows, classes] or [rows, tokens, size]")
    # Of hidden states and a pooled vector, the mean of the former is what sentence models are trained for.
    tokens, fixed = (512, False) if length == -1 else (length, True)
    if three:
        return Settings(three[0].name, "vector", tokens, fixed=fixed)
    return Settings(two[0].name, "classes", tokens, fixed=fixed)


def check_inputs(inputs: Sequence[TensorSpec]) -> None:
    """Raise `UsageError` unless a tokenizer can fill all of them."""
    if not any(spec.name == "input_ids" for spec in inputs):
        raise UsageError(f"no input is called input_ids: {', '.join(spec.name for spec in inputs)}")
    for spec in inputs:
        if spec.name not in FIELDS or len(spec.shape) != 2 or spec.kind.kind not in "iub" or not spec.batched:
            raise UsageError(
                f"no tokenizer fills the input {spec.name} {spec.datatype}{list(spec.shape)}: "
                f"the inputs must be {', '.join(FIELDS)}, integers of shape [rows, tokens]"
            )


class Handler(ItemHandler):
    """A text, or a JSON list of texts, to as many answers."""

    def initialize(self, context: Any) -> None:
        super().initialize(context)
        check_inputs(self.inputs)
        self.ids = next(i for i, spec in enumerate(self.inputs) if spec.name == "input_ids")
        self.masked = any(spec.name == "attention_mask" for spec in self.inputs)
        self.place = output_index(self.outputs, self.settings.output)
        self.by_token = self.outputs[self.place].shape[1:2] == (-1,)
        self.labels = read_labels(context.folder)
        self.tokenizer = read_tokenizer(context.folder)
        self.tokenizer.enable_truncation(self.settings.max_tokens)
        self.pad = self.tokenizer.padding or _padding(self.tokenizer)
        self.tokenizer.no_padding()

    def preprocess(self, requests: Sequence[dict[str, Any]]) -> list[Item]:
        """Tokens. The texts of all requests are filled up to the longest, so that they can share a call; those of each
        request by itself where the model is not told what was filled: its answer must not depend on others."""
        requested = [read_texts(request, self.settings.max_characters) for request in requests]
        for texts, _ in requested:
            self.check_rows(len(texts))
        encodings = iter(self.tokenizer.encode_batch([text for texts, _ in requested for text in texts]))
        encoded = [[next(encodings) for _ in texts] for texts, _ in requested]
        longest = [max(1, *(len(row.ids) for row in rows)) for rows in encoded]
        for rows, own in zip(encoded, longest, strict=True):
            length = self.settings.max_tokens if self.settings.fixed else max(longest) if self.masked else own
            for row in rows:
                row.pad(length, pad_id=self.pad["pad_id"], pad_token=self.pad["pad_token"],
                        pad_type_id=self.pad["pad_type_id"])  # fmt: skip
        return [
            Item([np.array([getattr(row, FIELDS[spec.name]) for row in rows], spec.kind) for spec in self.inputs],
                 (single, np.array([row.attention_mask for row in rows])))
            for rows, (_, single) in zip(encoded, requested, strict=True)
        ]  # fmt: skip

    def postprocess(self, answers: list[Item]) -> list[Any]:
        """One answer for a text, a list for a list."""
        found = []
        for answer in answers:
            single, mask = answer.note
            rows = self._rows(answer.arrays[self.place], mask)
            found.append(rows[0] if single else rows)
        return found

    def explain(self, data: list[Item], explainer: Any) -> list[Any]:
        """``[{"token", "score"}, ...]`` for a text, a list of them for a list."""
        answers = []
        for item in data:
            scores = explainer.attribute(item.arrays)[0]
            rows = [
                [{"token": self.tokenizer.id_to_token(int(token)), "score": float(score)}
                 for token, score, real in zip(*row, strict=True) if real]
                for row in zip(item.arrays[self.ids], scores, item.note[1], strict=True)
            ]  # fmt: skip
            answers.append(rows[0] if item.note[0] else rows)
        return answers

    def _rows(self, output: Array, mask: Array) -> list[Any]:
        settings = self.settings
        if settings.answer == "tensor":
            if self.by_token:  # without what others' texts filled it up to
                output = output[:, : int(mask.sum(1).max())]
            plain: list[Any] = output.tolist()
            return plain
        if settings.answer == "classes":
            return [top_classes(row, self.labels, settings.top) for row in probabilities(output, settings.scores)]
        vectors = output.astype(np.float64)
        if vectors.ndim == 3:
            weight = mask[:, :, None]
            vectors = (vectors * weight).sum(axis=1) / np.maximum(1, weight.sum(axis=1))
        if settings.normalize:
            vectors = vectors / np.maximum(1e-12, np.linalg.norm(vectors, axis=-1, keepdims=True))
        rows: list[Any] = vectors.tolist()
        return rows


def read_texts(request: dict[str, Any], max_characters: int) -> tuple[list[str], bool]:
    """The texts of a body, and whether it was one text. Plain UTF-8, or a JSON string or list of strings."""
    body = request["body"]
    if len(body) > 4 * max_characters:
        raise UsageError(f"a body may have at most {max_characters} characters")
    try:
        if "json" in request["type"]:
            decoded = msgspec.json.decode(body)
            decoded = decoded.get("instances", decoded) if isinstance(decoded, dict) else decoded
            texts, single = ([decoded], True) if isinstance(decoded, str) else (decoded, False)
        else:
            texts, single = [body.decode("utf-8")], True
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError("the body is not text: UTF-8, or JSON with a string or a list of strings") from error
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise UsageError("the body must be a text, or JSON with a string or a list of strings")
    if sum(len(text) for text in texts) > max_characters:
        raise UsageError(f"a body may have at most {max_characters} characters")
    return texts, single


def read_tokenizer(folder: Path) -> Any:
    """``tokenizer.json`` of a package. Raises `UsageError` where it cannot be read, or the library is not installed."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the worker's threads are the model's
    with needing("text", "texts need the library tokenizers"):
        from tokenizers import Tokenizer
    path = folder / TOKENIZER
    content = read_bytes(path, MAX_TOKENIZER_BYTES)
    with refusing(f"{path} is not a tokenizer:"):  # the library raises plain Exception
        return Tokenizer.from_buffer(content)


def _padding(tokenizer: Any) -> dict[str, Any]:
    """How to fill up: by the token that is called so, else by token 0, which the attention mask hides."""
    known = (token for token in ("[PAD]", "<pad>", "<|endoftext|>") if tokenizer.token_to_id(token) is not None)
    token = next(known, "")
    return {"pad_id": tokenizer.token_to_id(token) or 0, "pad_token": token, "pad_type_id": 0}
