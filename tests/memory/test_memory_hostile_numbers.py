"""Numbers that no allocator would write give an answer with a warning, or one clear line; never a crash."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_machine import healthy_training

from fettle.errors import UsageError
from fettle.memory import analyse, as_json, compare, parse, verdict
from fettle.memory.invariants import check
from fettle.memory.report import render

DATA = healthy_training(8).data()
numbers = st.sampled_from([-(2**63), -(2**40), -1, 0, 1, 511, 2**31, 2**32, 2**53, 2**62, 2**63 - 1])


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [place for key, inner in value.items() for place in _places(inner, (*path, key))]
    if isinstance(value, list):
        return [place for index, inner in enumerate(value) for place in _places(inner, (*path, index))]
    return [path] if type(value) is int else []


PLACES = _places(DATA)


@given(st.lists(st.tuples(st.integers(0, len(PLACES) - 1), numbers), min_size=1, max_size=6), numbers)
@settings(max_examples=40, deadline=None)
def test_any_number_anywhere(changes: list[tuple[int, int]], request_bytes: int) -> None:
    data = copy.deepcopy(DATA)
    for place, number in changes:
        *path, key = PLACES[place]
        inner: Any = data
        for step in path:
            inner = inner[step]
        inner[key] = number
    try:
        snapshot = parse(data)
        analysis = analyse(snapshot, request_bytes=max(request_bytes, 0))
        compare(snapshot, snapshot, analysis.device)
    except UsageError as error:
        message = str(error)
    else:
        message = verdict(analysis)
        as_json(analysis)
        render(analysis)
    assert "\n" not in message


def test_negative_sizes_are_told() -> None:
    data = copy.deepcopy(DATA)
    data["device_traces"][0][1]["size"] = -5
    assert any(row.rule == "negative sizes" for row in check(parse(data)))


def test_no_floating_point_warnings_on_an_empty_machine() -> None:
    with np.errstate(all="raise"):
        segment = {"device": 0, "address": 0, "total_size": 0, "blocks": []}
        analysis = analyse(parse({"segments": [segment], "device_traces": [[]]}), request_bytes=1)
        assert analysis.fit is not None
        render(analysis)
