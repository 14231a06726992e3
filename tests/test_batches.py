"""Inputs as people have them: what each is taken for, and what the caller is asked where it cannot be told."""

import itertools
from collections import OrderedDict, UserDict, deque, namedtuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fettle.batches import FROM_LOADER, misread, read_batches
from fettle.errors import UsageError

X = torch.ones(3, 4)
Point = namedtuple("Point", "x y")


class Two(nn.Module):
    def forward(self, ids, mask):
        return ids * mask


class Named(nn.Module):
    def forward(self, input_ids, attention_mask=None):
        return input_ids


class Wrapped(Named):
    def __call__(self, pixels):
        return super().__call__(pixels)


def loader(*tensors: torch.Tensor, rows: int = 2) -> DataLoader:
    return DataLoader(TensorDataset(*tensors), batch_size=rows)


def one(x):
    return x


@pytest.mark.parametrize(
    ("inputs", "model", "count", "taken_for"),
    [
        (X, one, 1, "one batch of one argument: tensor of 3 x 4"),
        (deque([X, X]), one, 2, "2 batches of one argument: tensor of 3 x 4"),
        ([X], one, 1, "one batch of one argument: tensor of 3 x 4"),
        ([X, X], one, 2, "2 batches of one argument: tensor of 3 x 4"),
        ((X, X), Two(), 1, "one batch of 2 positional arguments"),
        ([(X, X)] * 3, Two(), 3, "3 batches of 2 positional arguments"),
        ({"input_ids": X}, Named(), 1, "one batch of keyword arguments: input_ids"),
        (UserDict(input_ids=X), Named(), 1, "one batch of keyword arguments: input_ids"),
        (OrderedDict(input_ids=X), Named(), 1, "one batch of keyword arguments: input_ids"),
        ([{"input_ids": X}] * 2, Named(), 2, "2 batches of keyword arguments: input_ids"),
        ({"anything": X}, lambda **rest: rest, 1, "one batch of keyword arguments: anything"),
        ({1: X}, one, 1, "one batch of one argument: dict"),
        (Point(1, 2), one, 1, "one batch of one argument: Point"),
        ("text", one, 1, "one batch of one argument: str"),
        (3, abs, 1, "one batch of one argument: int"),
        ((X, X), nn.Sequential, 1, "one batch of 2 positional arguments"),  # whose call nobody can know
        (loader(torch.ones(6, 4)), one, 3, "the DataLoader's first 3 batches of 1 positional argument"),
        (loader(torch.ones(6), torch.ones(6)), Two(), 3, "the DataLoader's first 3 batches of 2 positional arguments"),
    ],
)  # fmt: skip
def test_what_it_is_taken_for(inputs: object, model: object, count: int, taken_for: str) -> None:
    found = read_batches(inputs, model)
    assert (len(found.items), found.taken_for) == (count, taken_for)
    assert len(found.items[:1]) == 1  # some may calibrate


def test_no_more_than_a_few_batches_are_taken_of_a_loader() -> None:
    assert len(read_batches(loader(torch.ones(100, 4)), one).items) == FROM_LOADER


def test_a_call_decides_what_the_model_takes() -> None:
    assert read_batches((X, X), one, call=lambda model, a, b: model(a + b)).taken_for.endswith("2 positional arguments")
    with pytest.raises(UsageError, match="a tuple of 2"):
        read_batches((X, X), Two(), call=lambda model, both: model(*both))


@pytest.mark.parametrize(
    ("inputs", "model", "spellings"),
    [
        ([X, X], Two(), ["inputs=(a, b) for one batch", "inputs=[(a, b), ...] for several"]),
        ((X, X), one, ["inputs=[a, b] for 2 batches", "inputs=[((a, b),)] for one batch"]),
        ({"pixels": X}, Named(), ["inputs=[(batch,)]", "the names of its arguments"]),
        (loader(torch.ones(6, 4), torch.ones(6)), one, ["first for first, *_ in", "(batch,) for batch in"]),
        (TensorDataset(X), one, ["a data set, TensorDataset", "inputs=DataLoader(dataset, batch_size=8)"]),
    ],
)
def test_what_is_ambiguous_is_asked_for_in_both_spellings(inputs: object, model: object, spellings: list[str]) -> None:
    with pytest.raises(UsageError) as asked:
        read_batches(inputs, model)
    assert all(spelling in str(asked.value) for spelling in spellings), str(asked.value)
    assert "\n" not in str(asked.value)


def test_a_list_of_dicts_with_names_that_the_model_has_not_is_asked_for_once_it_was_refused() -> None:
    assert read_batches([{"pixels": X}], Named()).items == [{"pixels": X}]  # a hook may rename it
    assert "inputs=[(batch,) for batch in inputs]" in misread({"pixels": X}, Named())
    assert misread({"input_ids": X}, Named()) == misread({"pixels": X}, lambda **rest: rest) == ""


def test_the_spellings_that_are_shown_are_taken() -> None:
    two = Two()
    assert read_batches((X, X), two).items == [(X, X)]
    assert read_batches([((X, X),)], one).items == [((X, X),)]
    assert read_batches([({"pixels": X},)], Named()).items == [({"pixels": X},)]
    assert read_batches({"pixels": X}, Wrapped()).items == [{"pixels": X}]  # by what its own `__call__` takes
    pairs = loader(torch.ones(6, 4), torch.ones(6))
    assert len(read_batches([first for first, *_ in itertools.islice(pairs, 8)], one).items) == 3
    assert len(read_batches([(batch,) for batch in itertools.islice(pairs, 8)], one).items) == 3


@pytest.mark.parametrize("inputs", [[], (), loader(torch.ones(0, 4))])
def test_nothing_is_no_input(inputs: object) -> None:
    with pytest.raises(UsageError, match="empty"):
        read_batches(inputs, one)
