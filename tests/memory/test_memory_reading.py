"""Every historical format, and what is done with files that are odd."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from memory_machine import MIB, Machine, healthy_training, stack

from fettle.errors import UsageError
from fettle.memory import analyse, parse, read
from fettle.memory.invariants import check
from fettle.memory.snapshot import State
from fettle.procs import limits


def test_a_present_day_file(tmp_path: Path) -> None:
    machine = healthy_training()
    snapshot = read(machine.save(tmp_path / "now.pickle"))
    assert len(snapshot.traces[0]) == len(machine.events)
    assert snapshot.settings["expandable_segments"] is False
    assert snapshot.annotations[0].name == "Optimizer.step#SGD.step"
    assert not snapshot.notes
    assert not check(snapshot)


def test_a_bare_list_of_segments() -> None:
    machine = healthy_training()
    analysis = analyse(parse(machine.data()["segments"]))
    assert analysis.replay.peak_bytes == analysis.replay.end_bytes == machine.in_use
    assert not analysis.violations
    assert not analysis.leaks.judged


def _as_torch_2_0(data: dict[str, Any]) -> dict[str, Any]:
    """Blocks with a history and no address, segments without pools, events without times."""
    old = copy.deepcopy({key: data[key] for key in ("segments", "device_traces")})
    for segment in old["segments"]:
        for key in ("segment_pool_id", "is_expandable", "frames"):
            del segment[key]
        for block in segment["blocks"]:
            frames, address = block.pop("frames"), block.pop("address")
            if block["state"] != "inactive":
                block["history"] = [{"addr": address, "real_size": block["requested_size"], "frames": frames}]
    for event in old["device_traces"][0]:
        del event["time_us"]
    return old


def test_the_format_of_torch_2_0_says_the_same() -> None:
    data = healthy_training().data()
    new, old = analyse(parse(data)), analyse(parse(_as_torch_2_0(data)))
    assert old.snapshot.blocks.address.tolist() == new.snapshot.blocks.address.tolist()
    assert (old.replay.start_bytes, old.replay.peak_bytes) == (new.replay.start_bytes, new.replay.peak_bytes)
    assert [row.bytes for row in old.holders] == [row.bytes for row in new.holders]
    assert [row.own_line for row in old.holders] == [row.own_line for row in new.holders]
    assert not old.violations
    assert old.holders[0].median_lifetime_ms is None


def test_before_requested_sizes_were_kept_the_history_or_the_rounded_size_stands_in() -> None:
    old = _as_torch_2_0(healthy_training().data())
    for segment in old["segments"]:
        del segment["requested_size"]
        for block in segment["blocks"]:
            del block["requested_size"]
    analysis = analyse(parse(old["segments"]))
    assert analysis.replay.end_bytes == healthy_training().in_use


def test_both_names_of_the_pending_state() -> None:
    for name in ("active_pending_free", "active_awaiting_free"):
        machine = Machine()
        machine.free(machine.alloc(5 * MIB, stack("f")), complete=False)
        data = machine.data()
        data["segments"][0]["blocks"][0]["state"] = name
        snapshot = parse(data)
        assert snapshot.blocks.state[0] == State.PENDING_FREE
        assert analyse(snapshot).replay.end_bytes == 5 * MIB


def test_unknown_actions_keys_and_states_are_tolerated_and_told() -> None:
    machine = healthy_training()
    machine.note("workspace_snapshot", 5, [], addr=1)
    data = machine.data()
    data["segments"][0]["registration_counter"] = 3
    data["segments"][-1]["blocks"][-1]["state"] = "dreaming"
    snapshot = parse(data)
    assert any("workspace_snapshot" in note for note in snapshot.notes)
    assert any("unknown block state" in note for note in snapshot.notes)


def test_a_ring_written_from_its_first_slot_is_turned_back() -> None:
    machine = healthy_training()
    data = machine.data()
    events = data["device_traces"][0]
    data["device_traces"][0] = events[-7:] + events[:-7]
    assert np.array_equal(parse(data).traces[0].time_us, parse(machine.data()).traces[0].time_us)


def test_addresses_of_64_bits_are_read() -> None:
    machine = Machine()
    machine.next_address = 0xFF00_0000_0000_0000
    machine.free(machine.alloc(4 * MIB, stack("f")))
    machine.alloc(4 * MIB, stack("f"))
    snapshot = parse(machine.data())
    assert not snapshot.notes
    assert not check(snapshot)
    assert analyse(snapshot).replay.peak_bytes == 4 * MIB


def test_equal_stacks_are_one_stack_whether_shared_or_not() -> None:
    machine = Machine()
    machine.alloc(MIB, stack("f:1", "g:2"))
    machine.alloc(MIB, stack("f:1", "g:2"))
    assert len(parse(machine.data()).stacks) == 2  # the empty one and this one


def test_text_from_outside_cannot_steer_a_terminal() -> None:
    machine = Machine()
    machine.alloc(MIB, [{"name": "f\x1b[2Jg\n", "filename": "C:\\Users\\me\\train.py", "line": 3}])
    frame = parse(machine.data()).stacks[1][0]
    assert frame.name.isprintable() or "\ufffd" in frame.name
    assert "\x1b" not in frame.name
    assert "\n" not in frame.name
    assert frame.filename == "C:/Users/me/train.py"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("segments"), "not a memory snapshot"),
        (lambda data: data.update(segments={}), "not a memory snapshot"),
        (lambda data: data.update(device_traces={}), "not a list of lists"),
        (lambda data: data["device_traces"].append([3]), "not a dictionary"),
        (lambda data: data["segments"].append("x"), "not a dictionary"),
        (lambda data: data["segments"][0].update(total_size="big"), "not a whole number"),
        (lambda data: data["segments"][0].update(blocks=3), "not a list"),
        (lambda data: data["segments"][0].update(segment_pool_id=5), "not a pair"),
        (lambda data: data["segments"][0].update(segment_pool_id=("a", 1)), "not a whole number"),
        (lambda data: data["segments"][0]["blocks"][0].update(size=None), "no whole number"),
        (lambda data: [event.pop("addr") for event in data["device_traces"][0]], "is missing"),
    ],
)
def test_bad_data_gives_one_clear_line(change: Any, message: str) -> None:
    data = copy.deepcopy(healthy_training().data())
    change(data)
    with pytest.raises(UsageError, match=message) as caught:
        parse(data, name="f.pickle")
    assert str(caught.value).startswith("f.pickle: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda events: events.insert(3, 5), "event 3 is not a dictionary"),
        (lambda events: events[3].pop("addr"), "event 3 has no addr"),
        (lambda events: events[3].update(size=2**70), "event 3 has a size that does not fit in 64 bits"),
        (lambda events: events[3].update(size=True), "event 3 has a size that is not a whole number"),
    ],
)
def test_one_bad_event_is_named_and_the_others_are_read(change: Any, told: str) -> None:
    data = copy.deepcopy(healthy_training().data())
    change(data["device_traces"][0])
    snapshot = parse(data)
    assert len(snapshot.traces[0]) == len(data["device_traces"][0]) - 1
    assert any(told in note and "1 event could not be read" in note for note in snapshot.notes)


def test_one_list_repeated_a_million_times_is_refused(tmp_path: Path) -> None:
    events = [{"action": "alloc", "addr": 1, "size": 1}] * 2000
    file = tmp_path / "laughs.pickle"
    file.write_bytes(pickle.dumps({"segments": [], "device_traces": [events] * 2000}, protocol=4))
    assert file.stat().st_size < 20_000
    with pytest.raises(UsageError, match="more segments, blocks, events and frames than"):
        read(file)


def test_a_file_that_would_not_fit_into_memory_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = healthy_training().save(tmp_path / "honest.pickle")
    bomb = tmp_path / "bomb.pickle"
    bomb.write_bytes(b"\x80\x02](" + b"}" * 1_000_000 + b"e.")  # a megabyte that becomes 72
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=64 << 20))
    assert read(honest).devices == [0]
    with pytest.raises(UsageError, match=r"could take 0\.3 GB of memory, 0\.1 GB are available"):
        read(bomb)


def test_a_file_that_a_container_has_no_memory_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = tmp_path / "bomb.pickle"
    bomb.write_bytes(b"\x80\x02](" + b"}" * 1_000_000 + b"e.")
    (tmp_path / "memory.max").write_text(str(64 << 20))
    monkeypatch.setattr(limits, "_GROUPS", tmp_path)
    with pytest.raises(UsageError, match=r"could take 0\.3 GB of memory, 0\.1 GB are available"):
        read(bomb)


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read(tmp_path / "missing.pickle")
    with pytest.raises(UsageError, match="not a file"):
        read(tmp_path)
    large = tmp_path / "large.pickle"
    with large.open("wb") as file:
        file.truncate(3 << 30)
    with pytest.raises(UsageError, match="over the limit"):
        read(large)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=4 << 30))
    with pytest.raises(UsageError, match=r"could take 38\.7 GB of memory"):
        read(large, max_file_bytes=4 << 30)


def test_nothing_to_analyse() -> None:
    with pytest.raises(UsageError, match="neither segments nor events"):
        analyse(parse({"segments": [], "device_traces": [[]]}))
    with pytest.raises(UsageError, match="nothing of device 3"):
        analyse(parse(healthy_training().data()), 3)
