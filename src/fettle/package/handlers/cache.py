"""The keys and values of the texts that are being generated, kept between their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fettle.package.handlers.parts import FRESH, LAST, PAST, SEEN, Array, output_index
from fettle.package.tensors import TensorSpec


class Cache:
    """Of one batch of texts, where the model is. The first place is empty: a program has no sizes of 0."""

    def __init__(self, runner: Any, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], scores: int) -> None:
        self.runner, self.scores, self.fresh = runner, scores, output_index(outputs, FRESH)
        self.inputs = inputs
        self.shape = next(spec.shape for spec in inputs if spec.name == PAST)
        self.texts: list[int] = []
        """Which text each row is."""
        self.filled = 0
        self.seen = self.past = torch.empty(0)

    @torch.inference_mode()
    def logits(self, texts: Sequence[int], ids: Sequence[Sequence[int]]) -> Array:
        """Scores of the token after each text [texts, vocabulary].

        `texts` names those of the call before, or some of them; each has one token more than then.
        """
        if not self.filled:
            self._begin(len(texts))
            new = ids
        else:
            new = [tokens[-1:] for tokens in ids]
            if len(texts) < len(self.texts):
                rows = torch.tensor([self.texts.index(text) for text in texts], device=self.past.device)
                self.seen, self.past = self.seen[rows], self.past[rows]
        self.texts = list(texts)
        length = max(map(len, new))
        given = {
            "input_ids": torch.tensor([[*tokens, *[0] * (length - len(tokens))] for tokens in new]),
            "attention_mask": torch.tensor([[1] * len(tokens) + [0] * (length - len(tokens)) for tokens in new]),
            LAST: torch.tensor([len(tokens) - 1 for tokens in new]),
        }
        given = {name: tensor.to(self.runner.device) for name, tensor in given.items()}
        kept = {SEEN: self.seen[:, : self.filled], PAST: self.past[..., : self.filled, :]}
        found = self.runner.call([{**given, **kept}[spec.name] for spec in self.inputs])
        self._keep(given["attention_mask"], found[self.fresh])
        scores: Array = found[self.scores].float().cpu().numpy()
        return scores

    def _begin(self, rows: int) -> None:
        _, layers, two, heads, _, size = self.shape
        self.seen = torch.zeros(rows, 1, dtype=torch.long, device=self.runner.device)
        self.past = torch.zeros(rows, layers, two, heads, 1, size, device=self.runner.device)
        self.filled = 1

    def _keep(self, seen: torch.Tensor, fresh: torch.Tensor) -> None:
        """Put new keys and values behind the others; the room for them doubles when it is full."""
        filled, end = self.filled, self.filled + seen.shape[1]
        room = self.past.shape[4]
        if end > room or fresh.dtype != self.past.dtype:
            past, there = self.past, self.seen
            self.past = fresh.new_zeros(*past.shape[:4], max(end, 2 * room), past.shape[5])
            self.seen = there.new_zeros(len(there), max(end, 2 * room))
            self.past[..., :filled, :], self.seen[:, :filled] = past[..., :filled, :], there[:, :filled]
        self.past[..., filled:end, :], self.seen[:, filled:end] = fresh, seen
        self.filled = end
