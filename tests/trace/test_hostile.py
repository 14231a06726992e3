"""No input does worse than one clear line: mutated traces, and events whose fields hold anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fettle.errors import UsageError
from fettle.trace import call_tree, load, write_report
from fettle.trace.io.mend import read_event_by_event
from tests.conftest import examples
from tests.trace import fuzzing
from tests.trace.build import Build

ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
TIME = st.integers(0, 300) | st.floats(0, 300) | ANY
NAMES = ["aten::mm", "ProfilerStep#1", "[memory]", "ncclDevKernel_AllReduce", "Memcpy HtoD", "cudaStreamSynchronize",
         "cudaLaunchKernel", "cudaGraphLaunch", "autograd::engine::evaluate_function: X"]  # fmt: skip
CATEGORIES = ["cpu_op", "kernel", "cuda_runtime", "user_annotation", "gpu_memcpy", "python_function", "cuda_sync",
              "cuda_profiler_range", "overhead", "Operator", "cpu_instant_event"]  # fmt: skip
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "stream": st.integers(0, 3) | ANY, "device": st.integers(0, 1) | ANY, "correlation": st.integers(1, 5) | ANY,
        "External id": st.integers(1, 5) | ANY, "Sequence number": st.integers(0, 3) | ANY,
        "Input Dims": ANY, "Input type": ANY, "Concrete Inputs": ANY,
        "bytes": ANY, "memory bandwidth (GB/s)": ANY, "Collective name": st.just("allreduce") | ANY, "Group size": ANY,
        "In msg nelems": ANY, "dtype": ANY, "Addr": ANY, "Bytes": ANY, "Total Allocated": ANY, "Device Id": ANY,
        "cuda_sync_kind": ANY, "wait_on_stream": ANY, "Call stack": ANY, "kernel_file": ANY,
    },
)  # fmt: skip
EVENTS = st.fixed_dictionaries(
    {"ph": st.sampled_from(["X", "X", "X", "i", "M", "s"]) | ANY, "cat": st.sampled_from(CATEGORIES) | ANY},
    optional={
        "name": st.sampled_from(NAMES) | ANY, "pid": st.integers(0, 2) | ANY, "tid": st.integers(0, 2) | ANY,
        "ts": TIME, "dur": TIME, "args": ARGUMENTS | ANY,
    },
)  # fmt: skip


@settings(max_examples=examples(80), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_mutated_traces_never_crash(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("m") / "t.json"
    path.write_bytes(fuzzing.case(seed))
    fuzzing.answer_everything(path)


@settings(max_examples=examples(60), deadline=None)
@given(events=st.lists(EVENTS, min_size=1, max_size=12))
def test_events_that_hold_anything_never_crash(events: list[object], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("m") / "t.json"
    path.write_text(json.dumps({"traceEvents": events}))
    fuzzing.answer_everything(path)


@pytest.mark.parametrize("seed", range(8))
def test_the_report_of_a_mutated_trace_answers_every_question(seed: int, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(fuzzing.case(seed))
    try:
        trace = load(tmp_path / "t.json", use_sidecar=False)
    except UsageError:
        return
    assert write_report([trace], tmp_path / "r.html") == []


def test_a_run_that_was_ended_goes_on(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    assert fuzzing.run_cases(0, 3, tmp_path, state) == []
    assert json.loads(state.read_text())["next"] == 3
    state.write_text(json.dumps({"next": 5, "failed": ["seed 1: kept"]}))
    assert fuzzing.run_cases(0, 6, tmp_path, state) == ["seed 1: kept"]


def test_the_seeds_are_traces(tmp_path: Path) -> None:
    for text in fuzzing.SEEDS:
        (tmp_path / "t.json").write_bytes(text)
        assert load(tmp_path / "t.json", use_sidecar=False).events.height >= 3


@pytest.mark.slow
def test_ten_thousand_mutated_traces_never_crash(tmp_path: Path) -> None:
    assert fuzzing.run_cases(0, 10_000, tmp_path) == []


def test_what_could_be_an_event_in_another_a_hundred_deep_is_not_read_a_hundred_times(monkeypatch) -> None:
    plain, read = json.JSONDecoder.raw_decode, []
    monkeypatch.setattr(json.JSONDecoder, "raw_decode", lambda *given: read.append(given[2]) or plain(*given))
    text = b'{"ph":[{},' * 100 + b"1," * 9_000 + b'@},{"ph":"X"}'
    events, rest, _ = read_event_by_event(text)
    assert (events, rest) == ([{"ph": "X"}], b"")
    assert len(read) < 12


def test_a_few_long_names_above_many_calls_fill_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fettle.trace.analyses.operators._MOST_TEXT", 800_000)
    build = Build().add("user_annotation", "x" * 8_000, 0, 1000)
    for i in range(90):
        build.op(f"op{i}", 2 * i, 1)
    assert call_tree(build.load(tmp_path)).height == 91
    for i in range(90, 110):
        build.op(f"op{i}", 2 * i, 1)
    with pytest.raises(UsageError, match="too long at depth 6"):
        call_tree(build.load(tmp_path))
