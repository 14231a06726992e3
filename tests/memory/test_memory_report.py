"""The report is one file without network; the command prints what the analysis says."""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
from memory_machine import MIB, Machine, healthy_training, stack
from test_memory_questions import _churning as churning
from test_memory_questions import _leaking as leaking

from fettle.errors import UsageError
from fettle.memory import analyse, compare, parse, write_report
from fettle.memory.report import render


def _payload(page: str) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    facts = json.loads(re.search(r'id="facts">(.*?)</script>', page, re.S)[1])
    raw = zlib.decompress(base64.b64decode(re.search(r'id="columns">(.*?)</script>', page, re.S)[1]))
    columns, offset = {}, 0
    for name, kind, length in facts["layout"]:
        dtype = np.dtype({"f64": "<f8", "i32": "<i4", "u32": "<u4"}[kind])
        columns[name] = np.frombuffer(raw, dtype, length, offset)
        offset += -(-length * dtype.itemsize // 8) * 8
    return facts, columns


def test_the_page_needs_no_network() -> None:
    page = render(analyse(parse(healthy_training().data())))
    assert not re.findall(r"https?://", page)
    assert not re.findall(r"<(?:link|img|iframe)\b|\bsrc=|@import|fetch\(|XMLHttpRequest", page)
    assert "default-src 'none'" in page


def test_the_columns_in_the_page_are_the_whole_history() -> None:
    machine = healthy_training()
    analysis = analyse(parse(machine.data()))
    facts, columns = _payload(render(analysis))
    used = facts["start"] + np.cumsum(columns["change"])
    assert used.tolist() == machine.used
    alive = (columns["birth"] <= facts["peak_event"]) & (columns["death"] > facts["peak_event"])
    assert columns["size"][alive].sum() == max(machine.used)
    assert columns["segment_size"].sum() == analysis.reserved_bytes
    assert np.cumsum(columns["time_us"])[-1] == machine.events[-1]["time_us"] - machine.events[0]["time_us"]


def test_segments_freed_in_the_window_are_in_the_page_with_their_lives() -> None:
    machine = Machine()
    machine.free(machine.alloc(30 * MIB, stack("f")))
    machine.give_back(stack("empty_cache"))
    machine.alloc(20 * MIB, stack("f"))
    _, columns = _payload(render(analyse(parse(machine.data()))))
    assert columns["segment_size"].tolist() == [20 * MIB, 30 * MIB]
    assert columns["segment_birth"].tolist() == [5, 0]
    assert columns["segment_death"].tolist() == [len(machine.events), 4]


def test_names_from_the_file_are_text_not_markup() -> None:
    machine = Machine()
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    machine.alloc(MIB, [{"name": evil, "filename": "a.py", "line": 1}])
    page = render(analyse(parse(machine.data(), name=evil)))
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    facts, _ = _payload(page)
    assert any(evil in name for name in facts["frames"])


@pytest.mark.parametrize("case", ["bare list", "no events", "cpu", "difference"])
def test_every_kind_of_snapshot_can_be_reported(case: str, tmp_path: Path) -> None:
    data = healthy_training().data()
    difference = None
    if case == "bare list":
        data = data["segments"]
    elif case == "no events":
        data["device_traces"] = [[]]
    elif case == "cpu":
        data["fettle"] = {"allocator": "cpu"}
    snapshot = parse(data)
    if case == "difference":
        difference = compare(snapshot, parse(healthy_training(12).data()), 0)
    file = tmp_path / "report.html"
    write_report(analyse(snapshot), file, difference=difference)
    events = case in ("cpu", "difference")
    assert ("Who holds the peak" in file.read_text()) == events
    assert ("Not judged: the snapshot has no events" in file.read_text()) == (not events)
    assert ("Reserved memory" in file.read_text()) == (case != "cpu")
    assert ("Compared with" in file.read_text()) == (case == "difference")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_no_request_is_asked_of_memory_without_a_cache() -> None:
    snapshot = parse(healthy_training().data() | {"fettle": {"allocator": "cpu"}})
    with pytest.raises(UsageError, match="no cache"):
        analyse(snapshot, request_bytes=MIB)


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        write_report(analyse(parse(healthy_training().data())), tmp_path)


def test_the_command_prints_json_tables_and_a_report(tmp_path: Path, run_fettle) -> None:
    machine = healthy_training()
    file = machine.save(tmp_path / "snapshot.pickle")
    done = run_fettle(
        "memory", file, "--json", "--request", "3GiB", "--device-free", "0", "--output", tmp_path / "r.html"
    )
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["peak_bytes"] == max(machine.used)
    assert result["unexplained_bytes"] == 0
    assert result["fit"]["answer"] == "no"
    assert result["leaks"]["judged"] is True
    assert (tmp_path / "r.html").exists()
    text = run_fettle("memory", file)
    assert text.code == 0
    assert "Who holds the peak" in text.out
    assert "Leaks: none seen" in text.out


def test_a_file_whose_name_is_not_utf_8_is_reported(tmp_path: Path, run_fettle) -> None:
    file = healthy_training().save(tmp_path / os.fsdecode(b"caf\xe9.pickle"))
    assert run_fettle("memory", file, "--output", tmp_path / "report.html").code == 0
    assert "caf\ufffd.pickle" in (tmp_path / "report.html").read_text()


def test_the_command_tells_of_leaks_spikes_and_churn(tmp_path: Path, run_fettle) -> None:
    machine = Machine()
    machine.alloc(20 * MIB, stack("base:1"))
    for number in range(80):
        machine.free(machine.alloc(300 * MIB if number == 40 else MIB // 2, stack("logits_to_float:3")))
    told = {
        "spikes": (machine, "Spikes"), "leaks": (leaking("tensor"), "Leak: 5.00 MiB a step (tensor); 100% of 14"),
        "few": (leaking("tensor", steps=4), "Leaks: not judged: 4 steps"), "churn": (churning("empty_cache"), "Churn:"),
    }  # fmt: skip
    for name, (made, line) in told.items():
        done = run_fettle("memory", made.save(tmp_path / f"{name}.pickle"))
        assert (done.code, line in done.out) == (0, True), done.out + done.err


def test_the_command_compares_two(tmp_path: Path, run_fettle) -> None:
    first = healthy_training().save(tmp_path / "a.pickle")
    more = healthy_training()
    more.alloc(9 * MIB, stack("new:77"))
    second = more.save(tmp_path / "b.pickle")
    result = json.loads(run_fettle("memory", first, second, "--json").out)
    assert result["difference"]["at_end"][0]["own_line"] == "model.py:77 in new"
    assert "model.py:77 in new" in run_fettle("memory", first, second).out
    asked = run_fettle("memory", first, second, "--request", "3GiB", "--device-free", "0")
    assert "Would 3.00 GiB more have fitted in the first? " in asked.out


def test_what_is_odd_about_the_second_of_two_is_said(tmp_path: Path, run_fettle) -> None:
    first, second = healthy_training().save(tmp_path / "a.pickle"), tmp_path / "b.pickle"
    odd = healthy_training().data()
    odd["segments"][0]["total_size"] += 512
    odd["segments"][0]["blocks"][0]["state"] = "asleep"
    second.write_bytes(pickle.dumps(odd, protocol=4))
    said = "".join(run_fettle("memory", first, second).out.split())  # a path may be broken anywhere
    assert "b.pickle:1unknownblockstate,countedasinactive" in said
    assert "b.picklecontradictsitselfin" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["missing.pickle"],
        ["{file}", "--request", "lots"],
        ["{file}", "--device-free", "1GiB"],
        ["{file}", "--device", "9"],
        ["{file}", "--output", "{file}/r.html"],
        ["{file}", "--device", "cpu"],
        ["{file}", "--device", "cuda:9"],
    ],
)
def test_bad_use_is_one_line_and_exit_code_2(arguments: list[str], tmp_path: Path, run_fettle) -> None:
    file = healthy_training().save(tmp_path / "s.pickle")
    done = run_fettle("memory", *(argument.format(file=file) for argument in arguments))
    assert done.code == 2
    assert done.out == ""
    assert len(done.err.strip().splitlines()) == 1


def test_rich_markup_in_a_file_is_printed_as_it_is(tmp_path: Path, run_fettle) -> None:
    machine = Machine()
    machine.alloc(MIB, [{"name": "[bold]f[/nope]", "filename": "a.py", "line": 1}])
    done = run_fettle("memory", machine.save(tmp_path / "s.pickle"))
    assert done.code == 0, done.err
    assert "[bold]f[/nope]" in done.out.replace("\n", "")
