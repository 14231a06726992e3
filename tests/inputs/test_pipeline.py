"""Batches as collate functions make them: any class may hold their tensors."""

import collections
import dataclasses
import math

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from fettle.inputs.pipeline import batch_bytes, fetches
from fettle.inputs.setting import AS_GIVEN, ONE_BY_ONE


class Rows(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, row):
        return torch.full((4,), float(row))

    def __getitems__(self, rows):
        return [self[row] for row in rows]


@dataclasses.dataclass
class Example:
    x: torch.Tensor
    names: list[str]


class Encoding(collections.UserDict):
    """As the collators of transformers return it."""


class Opaque:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


COLLATE = {
    "array": lambda rows: np.stack([row.numpy() for row in rows]),
    "arrays": lambda rows: [row.numpy() for row in rows],
    "dataclass": lambda rows: Example(torch.stack(rows), ["x"] * len(rows)),
    "mapping": lambda rows: Encoding(x=torch.stack(rows)),
    "nan": lambda rows: (torch.stack(rows) * math.nan, math.nan),
}


@pytest.mark.parametrize("kind", COLLATE)
def test_batches_of_any_class_are_compared_and_counted(kind: str) -> None:
    loader = DataLoader(Rows(), batch_size=8, collate_fn=COLLATE[kind])
    assert fetches(loader) == ([AS_GIVEN, ONE_BY_ONE], [])
    assert batch_bytes(next(iter(loader))) == 8 * 4 * 4


def test_what_cannot_be_compared_is_a_note_and_the_search_goes_on() -> None:
    ways, notes = fetches(DataLoader(Rows(), batch_size=8, collate_fn=Opaque))
    assert ways == [AS_GIVEN]
    assert "does not compare as equal" in notes[0]
