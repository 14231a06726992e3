"""Numbers that no allocator would write give an answer with a warning, or one clear line; never a crash."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_machine import MIB, Machine, healthy_training, stack

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


def _huge(event: dict[str, Any]) -> None:
    event["size"] = 2**63 - 1


def _far(event: dict[str, Any]) -> None:
    for key in event.keys() & {"addr", "address"}:
        event[key] += 2**63 - MIB - 0x7F00_0000_0000


@pytest.mark.parametrize("change", [_huge, _far])
def test_what_64_bits_do_not_hold_at_the_moment_of_a_failed_request(change: Callable[[dict[str, Any]], None]) -> None:
    machine = Machine()
    address = machine.alloc(8 * MIB, stack("f"))
    machine.note("oom", 17 * MIB, stack("g"), device_free=MIB)
    machine.free(address)
    data = machine.data()
    blocks = [block for segment in data["segments"] for block in segment["blocks"]]
    for row in (*data["device_traces"][0], *data["segments"], *(blocks if change is _far else ())):
        change(row)
    assert analyse(parse(data)).fit is not None


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
