from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import polars as pl
import pytest

from fettle.errors import UsageError
from fettle.trace import Kind, load, load_all, trace_health
from fettle.trace.io import parallel, sidecar, stream
from fettle.trace.io.assemble import assemble
from tests.trace.build import Build, training


def plain(path: Path) -> pl.DataFrame:
    return load(path, use_sidecar=False).events


@pytest.mark.parametrize("block", [64, 200, 1000, 8 << 20])
def test_chunks_of_any_size_give_the_same_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    path = training(20).write(tmp_path / "t.json")
    whole = plain(path)
    monkeypatch.setattr(stream, "BLOCK_BYTES", block)
    assert plain(path).equals(whole)
    assert whole.height == 20 * 9


@pytest.mark.parametrize("shape", ["compact", "pretty", "list", "gzip", "metadata_last", "bom", "two_members"])
def test_layouts(tmp_path: Path, shape: str) -> None:
    build = training(2)
    expected = plain(build.write(tmp_path / "a.json"))
    document = json.loads(build.text())
    path = tmp_path / "b.json"
    if shape == "compact":
        path.write_text(json.dumps(document, separators=(",", ":")))
    elif shape == "pretty":
        path.write_text(json.dumps(document, indent=4))
    elif shape == "list":
        path.write_text(json.dumps(document["traceEvents"]))
    elif shape == "gzip":
        path.write_bytes(gzip.compress(build.text().encode()))
    elif shape == "metadata_last":
        path.write_text(json.dumps({"traceEvents": document["traceEvents"], "distributedInfo": {"rank": 5}}))
        assert load(path, use_sidecar=False).rank == 5
    elif shape == "bom":
        path.write_bytes(b"\xef\xbb\xbf" + build.text().encode())
    else:
        text = build.text().encode()
        path.write_bytes(gzip.compress(text[:500]) + gzip.compress(text[500:]))
    assert plain(path).drop("name", "thread", "shape").equals(expected.drop("name", "thread", "shape"))


@pytest.mark.parametrize(
    ("ts", "expected"),
    [
        ("100.123", 100_123),
        ("3743411230047.485", 3_743_411_230_047_485),
        ("1623142623529071.123", 1_623_142_623_529_071_123),  # beyond what a float64 can hold
        ("1623142623529071", 1_623_142_623_529_071_000),
        ("-5.5", -5_500),
    ],
)
def test_clocks_are_exact_to_the_nanosecond(tmp_path: Path, ts: str, expected: int) -> None:
    path = tmp_path / "t.json"
    path.write_text(
        '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 1, "ts": '
        + ts
        + ', "dur": 0.001}]}'
    )
    assert plain(path)["ts_ns"].to_list() == [expected]
    assert plain(path)["dur_ns"].to_list() == [1]


@pytest.mark.parametrize("wrong", [-(2**63), 2**63 - 1, 2**70, 10**400, 1e300])
def test_what_no_clock_shows_is_dropped_and_counted(tmp_path: Path, wrong: float) -> None:
    build = Build().add("cpu_op", "fine", 0, 5)
    build.add("cpu_op", "begin", 0, 5).add("cpu_op", "length", 0, 5)
    for event, field in ((1, "ts"), (2, "dur")):
        build.events[event][field] = wrong
    trace = load(build.write(tmp_path / "t.json"), use_sidecar=False)
    assert trace.name_of(range(trace.events.height)) == ["fine"]
    assert trace.facts.absurd_times == 2


def test_old_and_new_categories_and_every_vendor(tmp_path: Path) -> None:
    build = Build()
    pairs = [
        ("Operator", Kind.OPERATOR),
        ("Kernel", Kind.KERNEL),
        ("Memcpy", Kind.MEMCPY),
        ("Memset", Kind.MEMSET),
        ("Runtime", Kind.RUNTIME),
        ("cuda_driver", Kind.RUNTIME),
        ("xpu_runtime", Kind.RUNTIME),
        ("mtia_ccp_events", Kind.KERNEL),
        ("python_function", Kind.PYTHON),
        ("cuda_sync", Kind.SYNC),
        ("never heard of", Kind.OTHER),
    ]
    for i, (category, _) in enumerate(pairs):
        build.add(category, "x", i * 10, 5)
    trace = build.load(tmp_path)
    assert trace.kind.tolist() == [int(k) for _, k in pairs]
    assert trace.facts.unknown_categories == ["never heard of"]


def test_ids_as_text_or_number_are_one_thread_and_streams_as_text_count(tmp_path: Path) -> None:
    build = Build()
    build.add("Operator", "a", 0, 5, pid=1, tid="25738").add("Operator", "b", 10, 5, pid="1", tid=25738)
    build.add("Kernel", "k", 20, 5, pid=0, tid="stream 7").add(
        "Kernel", "k", 30, 5, pid=0, tid=0, device="1", stream="0"
    )
    trace = build.load(tmp_path)
    assert trace.column("thread")[0] == trace.column("thread")[1]
    assert trace.column("stream").tolist()[2:] == [7, 0]
    assert trace.column("device").tolist()[2:] == [0, 1]


def test_a_truncated_file_gives_what_is_whole_and_says_so(tmp_path: Path) -> None:
    text = training(5).text()
    path = tmp_path / "t.json"
    for cut in (len(text) // 2, len(text) - 3, len(text) - 40):
        path.write_text(text[:cut])
        trace = load(path, use_sidecar=False)
        assert trace.facts.truncated
        assert "account" in trace_health(trace).uncertain
    packed = gzip.compress(text.encode())
    (tmp_path / "t.json.gz").write_bytes(packed[: len(packed) // 2])
    assert load(tmp_path / "t.json.gz", use_sidecar=False).facts.truncated
    (tmp_path / "t.json.gz").write_bytes(packed[:-8] + b"\0" * 8)  # all is there, and its checksum is another's
    damaged = load(tmp_path / "t.json.gz", use_sidecar=False)
    assert damaged.facts.truncated
    assert damaged.events.height == 5 * 9


def test_damage_is_mended_or_counted(tmp_path: Path) -> None:
    event = '{"ph": "X", "cat": "cpu_op", "name": "%s", "pid": 1, "tid": 1, "ts": %s, "dur": %s, "args": {%s}}'
    bodies = [
        event % ("fine", 1, 2, ""),
        event % ("bad \xff utf", 10, 2, ""),
        event % ("control \x01\n character", 20, 2, ""),
        event % ('quote " inside', 30, 2, ""),
        event % ("huge correlation", 40, 2, '"correlation": 123456789012345678901234567890'),
        event % ("text correlation", 50, 2, '"correlation": "12", "External id": 1.5, "bytes": [1]'),
        event % ("half a character", 55, 2, '"correlation": "x", "Input Dims": ["\\ud800"]'),
        event % ("negative", 60, -2, ""),
        event % ("absurd", 70, 9e15, ""),
        event % ("not finite", "NaN", 2, ""),
        event % ("no duration", 80, "null", ""),
        event % ("nested", 90, 2, '"list": [{"a": 1}, {"ph": "X"}, {"name": "b"}]'),
        "[1, 2]",
        event % ("last", 100, 2, ""),
    ]
    path = tmp_path / "t.json"
    path.write_bytes(('{"traceEvents": [' + ", ".join(bodies) + "]}").encode("latin-1"))
    trace = load(path, use_sidecar=False)
    names = trace.name_of(trace.events.select(pl.int_range(pl.len())).to_series().to_numpy())
    assert {"fine", "huge correlation", "text correlation", "half a character", "negative", "nested", "last"} <= set(
        names
    )
    assert not {"absurd", "not finite", "no duration"} & set(names)
    assert trace.facts.skipped_events >= 1
    assert trace.facts.negative_durations == 1
    assert trace.facts.repaired_bytes_chunks >= 1
    assert trace.column("correlation")[names.index("text correlation")] == 12


def test_work_on_a_device_that_nobody_names_is_on_the_first(tmp_path: Path) -> None:
    """Not on -1, which stands for the host."""
    build = Build().op("aten::mm", 0, 40).add("kernel", "gemm", 10, 20, pid="GPU", tid=7)
    assert build.load(tmp_path).device_keys == [0]


def test_a_kernel_from_another_age_is_dropped(tmp_path: Path) -> None:
    trace = training(3).kernel("overflown", 1e13, 5).load(tmp_path)
    assert "overflown" not in trace.name_of(trace.device_rows)
    assert trace.facts.absurd_times == 1
    assert trace.side["collectives"].height == 3


@pytest.mark.parametrize("helpers", ["help", "die", "are not there", "cannot be had"])
def test_several_processes_read_what_one_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, helpers: str) -> None:
    build = training(300)
    for i in range(20):
        build.add("cpu_instant_event", "[memory]", 1000 + i, 0, ph="i", tid=2 + i % 3, Bytes=64, Addr=i)
    path = build.write(tmp_path / "t.json")
    shares: list[float] = []
    one = load(path, use_sidecar=False, processes=1, on_progress=shares.append)
    assert shares[-1] == 1.0
    if helpers == "die":
        monkeypatch.setattr(parallel, "_HELPER", "raise SystemExit(3)")
    elif helpers == "are not there":
        monkeypatch.setattr(parallel.sys, "executable", "")
    elif helpers == "cannot be had":
        monkeypatch.setattr(parallel, "Process", Mock(side_effect=BlockingIOError(11, "no more processes")))
    size = path.stat().st_size
    shares.clear()
    columns, metadata = parallel.read_in_parallel(path, size, 2, 10**9, 20_000, on_progress=shares.append)
    assert shares == sorted(shares)
    assert 0 <= shares[0] < 1
    assert metadata == one.metadata
    two = assemble(path, columns, metadata)
    assert two.names == one.names
    assert two.events.drop("thread").equals(one.events.drop("thread"))
    # Threads are numbered as they are met: the numbers may differ, what they stand for may not.
    assert [two.threads[t] for t in two.column("thread")] == [one.threads[t] for t in one.column("thread")]
    assert [two.threads[t] for t in two.side["memory"]["thread"]] == [
        one.threads[t] for t in one.side["memory"]["thread"]
    ]
    assert all(
        two.side[t].drop("thread", strict=False).equals(one.side[t].drop("thread", strict=False)) for t in one.side
    )
    assert two.facts == one.facts


def test_of_a_file_that_grows_meanwhile_is_read_what_was_there(tmp_path: Path) -> None:
    path = training(300).write(tmp_path / "t.json")
    size = path.stat().st_size * 2 // 3  # of a file that ended there, within an event
    (tmp_path / "cut.json").write_bytes(path.read_bytes()[:size])
    wanted = load(tmp_path / "cut.json", use_sidecar=False, processes=1)
    columns, metadata = parallel.read_in_parallel(path, size, 2, 10**9, 20_000)
    assert assemble(path, columns, metadata).facts == wanted.facts
    assert wanted.facts.truncated


def test_what_a_helper_leaves_is_what_it_would_have_decoded_here(tmp_path: Path) -> None:
    path = training(50).write(tmp_path / "t.json")
    pattern = stream.boundary_of(b"ph").pattern.hex()
    text = path.read_bytes()
    start = text.index(b"[", text.index(b"traceEvents")) + 1
    plan = {"path": str(path), "cuts": [start, len(text)], "pattern": pattern, "max_events": 10**9}
    (tmp_path / "plan.json").write_text(json.dumps({**plan, "reader": os.getppid()}))
    parallel.help_with(str(tmp_path))
    part, here = parallel._fetch(tmp_path, 0), parallel._decode(plan, 0)
    assert part is not None
    assert part.rows == here.rows == 50 * 9
    assert list(part.names) == list(here.names)
    for there, chunk in zip(part.chunks, here.chunks, strict=True):
        assert all(there[name].tolist() == values.tolist() for name, values in chunk.items())


def test_a_helper_of_a_reader_that_was_killed_leaves_nothing(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    plan = {"path": str(training(50).write(tmp_path / "t.json")), "cuts": [0, 1000], "reader": os.getpid()}
    (scratch / "plan.json").write_text(json.dumps(plan))
    parallel.help_with(str(scratch))  # our parent is another process
    assert not scratch.exists()


def test_a_large_trace_opens_from_a_script_without_a_main_guard(tmp_path: Path) -> None:
    training(100).write(tmp_path / "t.json")
    script = tmp_path / "script.py"
    script.write_text(
        "from fettle.trace import load\n"
        "from fettle.trace.io import reader\n"
        "reader.PARALLEL_ABOVE_BYTES = 1000\n"
        "print(load('t.json', use_sidecar=False, processes=2).events.height)\n"
    )
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("900", "")


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"hello", b'{"traceEvents": []}', b"\x1f\x8bnot gzip", b"\x00" * 5000, b'{"traceEvents": 5}'],
)
def test_what_is_no_trace_is_one_clear_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load(path, use_sidecar=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "event",
    [{"ph": "X", "name": "fusion.1", "dur": 90}, {"ph": "B", "cat": "cpu_op", "name": "a"}, {"ph": "M", "name": "b"}],
)
def test_a_trace_of_another_writer_is_one_clear_line(tmp_path: Path, event: dict[str, object]) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [{"pid": 1, "tid": 1, "ts": at, **event} for at in range(30)]}))
    with pytest.raises(UsageError, match="none of its 30 events is a complete one") as caught:
        load(path, use_sidecar=False)
    assert "\n" not in str(caught.value)


def test_events_that_are_in_no_answer_are_counted(tmp_path: Path) -> None:
    build = training(3).add("", "fusion.1", 10, 5)
    health = trace_health(build.load(tmp_path))
    assert health.uncertain == ()
    assert {f.what: f.count for f in health.findings}["events without a category"] == 1
    for phase in "BE":
        build.add("cpu_op", "a", 20, 0, ph=phase)
    health = trace_health(build.load(tmp_path))
    assert "account" in health.uncertain
    assert {f.what: f.count for f in health.findings}["begins and ends (ph B and E)"] == 2


def test_both_spellings_of_an_external_id_in_one_chunk(tmp_path: Path) -> None:
    """As torch up to 1.12 writes them."""
    build = Build().add("Operator", "aten::mm", 0, 100, **{"External id": 7})
    build.add("Kernel", "gemm", 200, 50, pid=0, tid="stream 7", device=0, **{"external id": 7})
    build.add("Operator", "aten::mm", 300, 100, **{"External id": 8})  # the last one is read by itself
    assert build.load(tmp_path).column("external").tolist() == [7, 7, 8]


@pytest.mark.parametrize("block_bytes", [500, 1 << 20])
def test_what_follows_the_events_may_look_like_events(tmp_path: Path, monkeypatch, block_bytes: int) -> None:
    monkeypatch.setattr(stream, "BLOCK_BYTES", block_bytes)
    path = training(9).write(tmp_path / "t.json")
    usual, events = load(path, use_sidecar=False), json.loads(path.read_text())["traceEvents"]
    more = [{"name": "a" * 99, "ph": number} for number in range(9)]
    path.write_text(json.dumps({"traceEvents": events, "more": more, "distributedInfo": {"rank": 5}}))
    found = load(path, use_sidecar=False)
    assert (found.rank, found.metadata["more"], found.facts.notes) == (5, more, [])
    assert found.events.equals(usual.events)


def test_more_events_than_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BLOCK_BYTES", 500)
    with pytest.raises(UsageError, match="more than 10 events"):
        load(training(50).write(tmp_path / "t.json"), use_sidecar=False, max_events=10)


def test_columns_that_do_not_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BLOCK_BYTES", 500)
    monkeypatch.setattr(stream, "granted_memory_bytes", lambda: stream.SPARE_BYTES + 100)
    training(2).write(tmp_path / "s.json")
    with pytest.raises(UsageError, match=r"t\.json: no memory is left for all of its events"):
        load(training(50).write(tmp_path / "t.json"), use_sidecar=False)
    with pytest.raises(UsageError, match=r"t\.json: no memory is left"):  # and is not left out of its folder
        load_all(tmp_path, use_sidecar=False)


def test_a_folder_of_ranks(tmp_path: Path) -> None:
    for i, rank in enumerate((1, 0, 1)):
        build = training(2)
        build.metadata = {"distributedInfo": {"rank": rank}}
        build.write(tmp_path / f"{i}.json{'.gz' if i else ''}")
    (tmp_path / "broken.json").write_text("{")
    traces = load_all(tmp_path, use_sidecar=False)
    assert [t.rank for t in traces] == [0, 1, 2]
    assert any("claimed" in note for t in traces for note in t.facts.notes)
    with pytest.raises(UsageError):
        load_all(tmp_path / "nothing")


def test_the_rank_of_compact_json_and_of_a_file_name(tmp_path: Path) -> None:
    path = tmp_path / "trace_rank_12.json"
    path.write_text(training(1).text().replace('"distributedInfo": {"rank": 0, "world_size": 1}, ', ""))
    assert load(path, use_sidecar=False).rank == 12
    path.write_text(
        json.dumps({"distributedInfo": {"rank": 3}, "traceEvents": training(1).events}, separators=(",", ":"))
    )
    assert load(path, use_sidecar=False).rank == 3


def test_sidecar_serves_the_same_file_and_never_a_changed_one(tmp_path: Path) -> None:
    path = training(3).write(tmp_path / "t.json")
    trace = load(path, use_sidecar=False)
    key = sidecar.key_of(path)
    assert key is not None
    sidecar.write(trace, key)
    again = load(path)
    assert again.facts.from_sidecar
    assert again.events.equals(trace.events)
    assert again.names == trace.names
    assert all(again.side[t].equals(trace.side[t]) for t in trace.side)
    # Same length, same times, other content.
    before = path.stat()
    path.write_text(path.read_text().replace("gemm", "mmeg"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    changed = load(path)
    assert not changed.facts.from_sidecar
    assert any("mmeg" in n for n in changed.names)


def test_a_trace_opens_where_there_is_no_folder_to_keep_its_columns_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = training(3).write(tmp_path / "t.json")
    for name in ("HOME", "FETTLE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where the system knows no such user
    assert load(path).events.height == 27


def test_a_rank_that_was_given_is_not_kept(tmp_path: Path) -> None:
    build = training(3)
    build.metadata["note"] = "x" * (1 << 20)  # smaller files are not kept at all
    path = build.write(tmp_path / "t.json")
    assert load(path, rank=3).rank == 3
    again = load(path)
    assert (again.facts.from_sidecar, again.rank) == (True, 0)
    assert load(path, rank=2).rank == 2


def test_what_was_read_longest_ago_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = [load(training(3).write(tmp_path / f"{name}.json"), use_sidecar=False) for name in "abc"]
    keys = [sidecar.key_of(trace.path) or {} for trace in traces]
    for age, trace, key in zip((200, 100), traces, keys, strict=False):
        sidecar.write(trace, key)
        os.utime(sidecar._place(key) / "facts.json", (time.time() - age,) * 2)
    assert load(traces[0].path).facts.from_sidecar
    size = sum(file.stat().st_size for file in sidecar._place(keys[0]).iterdir())
    monkeypatch.setattr(sidecar, "MOST_BYTES", 2 * size + size // 2)
    sidecar.write(traces[2], keys[2])
    assert [load(trace.path).facts.from_sidecar for trace in traces] == [True, False, True]
    monkeypatch.setattr(sidecar, "MOST_BYTES", 0)  # the newest stays
    sidecar.write(traces[1], keys[1])
    assert [load(trace.path).facts.from_sidecar for trace in traces] == [False, True, False]


def test_a_damaged_sidecar_is_ignored(tmp_path: Path) -> None:
    path = training(3).write(tmp_path / "t.json")
    key = sidecar.key_of(path)
    assert key is not None
    for damage in ("events.arrow", "facts.json", "copies.arrow"):
        sidecar.write(load(path, use_sidecar=False), key)
        (sidecar._place(key) / damage).write_bytes(b"ARROW1 nonsense")
        assert not load(path).facts.from_sidecar


def test_a_file_of_a_folder_that_cannot_be_read_is_told(tmp_path: Path, run_fettle) -> None:
    made = Build().step(0, 0, 1000)
    made.op("aten::mm", 100, 500)
    made.write(tmp_path / "rank0.json")
    (tmp_path / "rank1.json").write_text('{"traceEv')
    assert "left out of the folder: rank1.json" in load_all(tmp_path)[0].facts.notes[-1]
    said = run_fettle("trace", "account", str(tmp_path))
    assert said.code == 0
    assert "left out of the folder: rank1.json" in " ".join(said.err.split())


@pytest.mark.parametrize(
    ("name", "between"),
    [
        (b"aten::\xff", b""),
        (b"aten::mm", b'{"ph": "X", "cat": "cpu_op", "name": "unended", "pid": 1, "tid": 1, "ts": 1},'),
    ],
    ids=["a name that is not UTF-8", "an event without a duration"],
)
def test_one_odd_event_costs_the_others_no_digits(tmp_path: Path, name: bytes, between: bytes) -> None:
    event = b'{"ph": "X", "cat": "cpu_op", "name": "%s", "pid": 1, "tid": 1, "ts": 1700000000000000.%d, "dur": 1.001}'
    (tmp_path / "t.json").write_bytes(
        b'{"traceEvents": [%s, %s %s]}' % (event % (name, 123), between, event % (b"aten::add", 457))
    )
    trace = load(tmp_path / "t.json", use_sidecar=False)
    assert trace.ts.tolist() == [1_700_000_000_000_000_123, 1_700_000_000_000_000_457]


@pytest.mark.parametrize(
    "odd",
    [b"1e999990", b'1, "args": {"x": ' + b"[" * 5000 + b"]" * 5000 + b"}"],
    ids=["a clock that is no time", "deep nesting"],
)
def test_what_no_event_holds_costs_no_time_beside_clocks_since_1970(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: bytes
) -> None:
    monkeypatch.setattr(stream, "BLOCK_BYTES", 2000)
    event = b'{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "dur": 1, "ts": %s}'
    events = b", ".join(event % ts for ts in (b"1700000000000000.5", odd, *[b"1700000000000001.5"] * 99))
    (tmp_path / "t.json").write_bytes(b'{"traceEvents": [%s]}' % events)
    assert load(tmp_path / "t.json", use_sidecar=False).events.height == 100


def test_a_rank_claimed_twice_does_not_push_others_aside(tmp_path: Path) -> None:
    for name, rank in (("a", 0), ("b", 0), ("c", 1)):
        Build(distributedInfo={"rank": rank}).op(name, 0, 1).write(tmp_path / f"{name}.json")
    traces = load_all(tmp_path, use_sidecar=False)
    assert [(trace.rank, trace.names) for trace in traces] == [(0, ["a"]), (1, ["c"]), (2, ["b"])]
    assert traces[1].facts.notes == []
    assert traces[2].facts.notes == ["rank 0 is claimed by another file too; called 2 here"]
