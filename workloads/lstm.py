"""A tagger of plain parts: embedding, two-layer bidirectional LSTM, linear. 3.7 million parameters, 16 x 128 tokens.

Own architecture, sized like the classic part-of-speech taggers (10000 words, 17 tags). Random weights. The output is a
tuple: the scores, and the last state as nn.LSTM gives it.
"""

import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self, words: int = 10_000, tags: int = 17, width: int = 128, hidden: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, hidden, num_layers=2, batch_first=True, dropout=0.3, bidirectional=True)
        self.head = nn.Linear(2 * hidden, tags)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        features, state = self.lstm(self.embed(tokens))
        return self.head(features), state


def workload() -> dict:
    torch.manual_seed(0)
    return {
        "model": Tagger(),
        "inputs": [torch.randint(10_000, (16, 128)) for _ in range(4)],
        "check_inputs": [torch.randint(10_000, (16, 128)) for _ in range(2)],
        "name": "lstm",
    }
