"""The command line, the report, the augmented trace, recording, and hostile input."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from fettle import trace as T
from fettle.errors import UsageError
from tests.conftest import Run
from tests.trace.build import Build, training

QUESTIONS = [
    "health",
    "steps",
    "account",
    "idle",
    "kernels",
    "launches",
    "comm",
    "queue",
    "bandwidth",
    "operators",
    "tree",
    "annotations",
    "critical",
    "whatif",
    "host",
    "hta",
]


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_question_in_both_forms(tmp_path: Path, run_fettle: Run, question: str) -> None:
    path = training(3).write(tmp_path / "t.json.gz")
    for more in ([], ["--json"]):
        said = run_fettle("trace", question, path, *more)
        assert said.code == 0
        assert (json.loads(said.out)["uncertain"] == {} if question != "health" else True) if more else said.out


def test_json_of_idle_time_holds_each_stream(tmp_path: Path, run_fettle: Run) -> None:
    path = training(3).write(tmp_path / "t.json")
    rows = json.loads(run_fettle("trace", "idle", path, "--json").out)["streams"]
    assert {row["stream"] for row in rows} == {7, 20}


def test_json_says_which_answers_are_uncertain(tmp_path: Path, run_fettle: Run) -> None:
    whole = training(3).write(tmp_path / "whole.json")
    torn = tmp_path / "torn.json"
    torn.write_text(whole.read_text()[:-200])
    assert "account" in json.loads(run_fettle("trace", "account", torn, "--json").out)["uncertain"]["rank 0"]
    compared = json.loads(run_fettle("trace", "compare", whole, torn, "--json").out)
    assert list(compared["uncertain"]) == ["after"]


def test_of_two_traces_it_says_which_is_uncertain(tmp_path: Path, run_fettle: Run) -> None:
    whole = training(3).write(tmp_path / "whole.json")
    torn = tmp_path / "torn.json"
    torn.write_text(whole.read_text()[:-200])
    said = run_fettle("trace", "compare", whole, torn).err
    assert "torn.json: uncertain: " in said
    assert "whole.json" not in said


def test_of_a_doubt_hears_who_asks_what_it_is_about(tmp_path: Path, run_fettle: Run) -> None:
    profiled = training(3)
    profiled.add("overhead", "Activity Buffer Request", 0, 200, pid=-1, tid=0)
    path = profiled.write(tmp_path / "t.json")
    assert "t.json: uncertain: idle; see" in run_fettle("trace", "idle", path).err
    for question in ("kernels", "critical", "tree"):
        assert "uncertain" not in run_fettle("trace", question, path).err
    path.write_text(path.read_text()[:-200])  # what may be wrong by much all hear
    assert "t.json: uncertain: account, compare, critical path, idle; see" in run_fettle("trace", "tree", path).err


def test_a_name_that_no_kernel_has_is_not_answered(tmp_path: Path, run_fettle: Run) -> None:
    path = training(3).write(tmp_path / "t.json")
    said = run_fettle("trace", "whatif", path, "--kernels", "no_such_kernel")
    assert said.code == 2
    assert "no kernel's name matches 'no_such_kernel'" in said.err
    assert run_fettle("trace", "whatif", path, "--kernels", "(").code == 2


def test_names_and_paths_are_printed_as_they_are(tmp_path: Path, run_fettle: Run, monkeypatch) -> None:
    path = training(3, name="gemm:100:x").write(tmp_path / "t.json")
    monkeypatch.chdir(tmp_path)
    said = run_fettle("trace", "kernels", path, "--output", "c[/x].json")
    assert (said.code, said.err.splitlines()[-1]) == (0, "wrote c[/x].json")
    assert ":100:" in said.out
    assert "[bold]n" in run_fettle("trace", "sql", path, 'select name as "[bold]n" from events').out
    assert run_fettle("trace", "augment", path, "--output", "a[b].json").out.startswith("wrote a[b].json: ")


def test_a_factor_without_kernels_is_refused(tmp_path: Path, run_fettle: Run) -> None:
    said = run_fettle("trace", "whatif", training(3).write(tmp_path / "t.json"), "--factor", "0.5")
    assert (said.code, "--kernels" in said.err) == (2, True)


def test_other_commands(tmp_path: Path, run_fettle: Run) -> None:
    path = training(3).write(tmp_path / "t.json")
    other = training(3, kernel=35).write(tmp_path / "u.json")
    assert json.loads(run_fettle("trace", "compare", path, other, "--json").out)["change_ns"] == 0
    counted = run_fettle("trace", "sql", path, "select count(*) as n from events", "--json")
    assert json.loads(counted.out)["result"] == [{"n": 27}]
    assert run_fettle("trace", "sequences", path, "linear", "--json").code == 0
    any_operator = json.loads(run_fettle("trace", "sequences", path, "--min-kernels", "1", "--json").out)["sequences"]
    assert [(row["operator"], row["count"]) for row in any_operator] == [("aten::linear", 3)]
    assert run_fettle("trace", "account", path, "--output", tmp_path / "c.png").code == 0
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("question", "drawn"),
    [
        (["tree", "--python", "--depth", "3"], "aten::linear"),
        (["sequences", "--min-kernels", "1"], "aten::linear"),
        (["steps"], "usual"),
        (["whatif"], "one graph launched the whole step"),
        (["whatif", "--kernels", "gemm"], "another time"),
    ],
)
def test_charts_of_single_questions(tmp_path: Path, run_fettle: Run, question: list[str], drawn: str) -> None:
    path = training(3).write(tmp_path / "t.json")
    assert run_fettle("trace", question[0], path, *question[1:], "--output", tmp_path / "c.json").code == 0
    assert drawn in (tmp_path / "c.json").read_text()


def test_a_colour_means_one_thing_in_each_chart_of_a_stack(tmp_path: Path, run_fettle: Run) -> None:
    """Streams' idle time and launch calls stand in one picture, each with a legend of its own."""
    path = training(3).write(tmp_path / "t.json")
    assert run_fettle("trace", "hta", path, "--output", tmp_path / "c.json").code == 0
    assert json.loads((tmp_path / "c.json").read_text())["resolve"]["scale"]["color"] == "independent"


def test_where_hta_may_differ_is_said(tmp_path: Path, run_fettle: Run) -> None:
    build = Build().kernel("a", 10, 0, call=0).kernel("b", 10, 5, call=3)
    assert "order of equal times" in run_fettle("trace", "hta", build.write(tmp_path / "ties.json")).out
    lost = Build().kernel("a", 10, 2, call=0).kernel("b", 15, 5).write(tmp_path / "lost.json")
    assert "first event for the launch of work whose launch is not there (1 of 2)" in " ".join(
        run_fettle("trace", "hta", lost).out.split()
    )
    apart = Build().kernel("a", 10, 2, call=0).kernel("b", 15, 5, call=3).write(tmp_path / "apart.json")
    assert "may differ" not in run_fettle("trace", "hta", apart).out


def test_charts_of_a_trace_without_a_device(tmp_path: Path, run_fettle: Run) -> None:
    """Host time where there is no other; and where an answer is empty, one line instead of an empty picture."""
    path = Build().op("aten::mm", 0, 20).op("aten::add", 30, 5).write(tmp_path / "t.json")
    assert run_fettle("trace", "operators", path, "--output", tmp_path / "c.json").code == 0
    assert "aten::mm" in (tmp_path / "c.json").read_text()
    said = run_fettle("trace", "kernels", path, "--output", tmp_path / "kernels.png")
    assert said.code == 2
    assert "nothing to draw" in said.err
    assert not (tmp_path / "kernels.png").exists()


def test_a_chart_of_counters(tmp_path: Path, run_fettle: Run) -> None:
    build = Build().op("aten::mm", 0, 20).call("cudaLaunchKernel", 5, 2, correlation=1)
    build.add("cuda_profiler_range", "gemm", 100, 5, **{"flops.sum": 12.0, "bytes.sum": 7.0})
    path = build.write(tmp_path / "t.json")
    assert run_fettle("trace", "counters", path, "--output", tmp_path / "c.json").code == 0
    drawn = (tmp_path / "c.json").read_text()
    assert "flops.sum" in drawn
    assert "bytes.sum" in drawn


def test_commands_over_ranks(tmp_path: Path, run_fettle: Run) -> None:
    for rank in range(2):
        build = training(3, extra_gap=5.0 * rank, ranks=2)
        build.metadata["distributedInfo"] = {"rank": rank, "world_size": 2}
        build.write(tmp_path / f"{rank}.json")
    found = {}
    for command in ("health", "account", "idle", "kernels", "comm", "queue", "critical", "whatif", "operators", "host"):
        found[command] = json.loads(run_fettle("trace", command, tmp_path, "--json").out)
    assert {row["rank"] for row in found["account"]["steps"]} == {0, 1}
    assert len(found["comm"]["arrival"]) == 3
    assert [row["rank"] for row in found["comm"]["clocks"]] == [0, 1]
    assert found["kernels"]["across_ranks"]


def _drawn(chart: Path) -> list[dict[str, Any]]:
    return [row for rows in json.loads(chart.read_text())["datasets"].values() for row in rows]


def test_of_ranks_each_cause_is_one_bar(tmp_path: Path, run_fettle: Run) -> None:
    for rank in range(2):
        training(3).write(tmp_path / f"rank{rank}.json")
    assert run_fettle("trace", "idle", tmp_path, "--output", tmp_path / "chart.json").code == 0
    labels = [row["label"] for row in _drawn(tmp_path / "chart.json")]
    assert len(labels) == len(set(labels)) > 2


def test_memory_of_ranks_is_a_line_for_each(tmp_path: Path, run_fettle: Run) -> None:
    for rank in range(2):
        build = Build(distributedInfo={"rank": rank})
        for i in range(3):
            build.add("cpu_instant_event", "[memory]", 1e6 * rank + i, 0, ph="i", Bytes=64, Addr=i)
        build.write(tmp_path / f"{rank}.json")
    assert run_fettle("trace", "memory", tmp_path, "--output", tmp_path / "chart.json").code == 0
    rows = _drawn(tmp_path / "chart.json")
    assert len({row["series"] for row in rows}) == 2
    assert max(row["ms"] for row in rows) < 1  # each from its own begin


def test_bandwidth_is_a_line_for_each_device(tmp_path: Path, run_fettle: Run) -> None:
    build = Build()
    for device in range(2):
        build.kernel("Memcpy HtoD", 10, 5, call=1 + device, device=device, cat="gpu_memcpy", bytes=5000)
    path = build.write(tmp_path / "t.json")
    assert run_fettle("trace", "bandwidth", path, "--output", tmp_path / "chart.json").code == 0
    lines = {row["series"] for row in _drawn(tmp_path / "chart.json")}
    assert lines == {"Memcpy HtoD, device 0", "Memcpy HtoD, device 1"}


@pytest.mark.parametrize("question", ["queue", "bandwidth", "tree", "critical"])
def test_a_picture_of_ranks_shows_each_of_them(tmp_path: Path, run_fettle: Run, question: str) -> None:
    (tmp_path / "ranks").mkdir()
    for rank in range(2):
        build = training(3)
        build.metadata["distributedInfo"] = {"rank": rank}
        build.write(tmp_path / "ranks" / f"{rank}.json")
    assert run_fettle("trace", question, tmp_path / "ranks", "--output", tmp_path / "chart.json").code == 0
    texts = [text for row in _drawn(tmp_path / "chart.json") for text in row.values() if isinstance(text, str)]
    assert all(any(f"rank {rank}" in text for text in texts) for rank in range(2))


def test_where_one_rank_is_taken_it_is_said(tmp_path: Path, run_fettle: Run) -> None:
    ranks, out = tmp_path / "ranks", tmp_path / "out"
    ranks.mkdir()
    for rank in (1, 2):
        build = training(3)
        build.metadata["distributedInfo"] = {"rank": rank}
        build.write(ranks / f"{rank}.json")
    for args in (["compare", ranks / "2.json", ranks], ["augment", ranks, "-o", out / "a.json"],
                 ["report", ranks, "--before", ranks, "-o", out / "r.html"]):  # fmt: skip
        said = run_fettle("trace", *args)
        assert said.code == 0
        assert said.err.count("of its 2 ranks only rank 1 is taken") == 1
    assert "is taken" not in run_fettle("trace", "compare", ranks / "1.json", ranks / "2.json").err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["account", "nowhere.json", "--output", "x.bmp"], "ends in .html or .png or .svg or .json"),
        (["compare", "nowhere.json", "nowhere.json", "--output", "x.bmp"], "ends in .html or .png or .svg or .json"),
        (["compare", "nowhere.json", "nowhere.json", "--output", "."], "ends in .html or .png or .svg or .json"),
        (["critical", "nowhere.json", "--overlay", "."], "it is a folder"),
        (["augment", "nowhere.json", "--output", "model.py"], "ends in .json or .gz"),
        (["record", "nowhere.py:step", "--output", "nowhere.py"], "ends in .json or .gz"),
    ],
)
def test_what_cannot_be_written_is_said_before_the_trace_is_read(args: list[str], said: str, run_fettle: Run) -> None:
    told = run_fettle("trace", *args)
    assert told.code == 2
    assert said in told.err


def test_a_moment_is_shown_as_it_is_where_it_was_asked_for(tmp_path: Path, run_fettle: Run) -> None:
    path = training(3).write(tmp_path / "t.json")
    assert "1.000" in run_fettle("trace", "sql", path, "select start_ns from steps where step = 0").out


def test_a_name_in_a_trace_cannot_steer_the_terminal_by_an_error(tmp_path: Path, run_fettle: Run) -> None:
    path = Build().add("user_annotation", "\x1b[31mred", 0, 9).op("aten::mm", 1, 5).write(tmp_path / "t.json")
    said = run_fettle("trace", "account", path, "--annotation", "step")
    assert said.code == 2
    assert "[31mred" in said.err
    assert "\x1b" not in said.err


@pytest.mark.parametrize(
    "args",
    [
        ["health", "nowhere.json"],
        ["critical", "T", "--step", "77"],
        ["account", "T", "--annotation", "nowhere"],
        ["memory", "T"],
        ["counters", "T"],
        ["sql", "T", "selec"],
        ["account", "T", "--output", "x.bmp"],
        ["compare", "T", "T", "--steps-before", "a,b"],
        ["whatif", "T", "--kernels", "("],
        ["record", "nonsense"],
        ["record", "nowhere.py:f"],
        ["record", "no.such.module:f"],
    ],
)
def test_what_the_caller_can_mend_is_one_line_and_two(tmp_path: Path, run_fettle: Run, args: list[str]) -> None:
    path = training(2).write(tmp_path / "t.json")
    said = run_fettle("trace", *[path if a == "T" else a for a in args])
    assert said.code == 2
    assert len(said.err.strip().splitlines()) == 1


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0"])
def test_a_roof_that_cannot_be_is_refused(tmp_path: Path, run_fettle: Run, value: str) -> None:
    path = training(2).write(tmp_path / "t.json")
    for args in (("--peak", value, "--bandwidth", "3350"), ("--peak", "989", "--bandwidth", value)):
        said = run_fettle("trace", "flops", path, *args)
        assert (said.code, len(said.err.strip().splitlines())) == (2, 1)
        assert args[args.index(value) - 1] in said.err


def test_the_report_stands_alone_and_executes_nothing_of_the_trace(tmp_path: Path) -> None:
    evil = '</script><script>alert("x")</script>'
    build = training(3, name=evil)
    build.op(evil, 1400, 50)
    target = tmp_path / "r.html"
    assert T.write_report([build.load(tmp_path)], target) == []
    page = target.read_text()
    assert evil not in page
    assert "<script>alert" not in page
    markup = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert "src=" not in markup
    assert not re.search(r'href="(?!#)', markup)
    for title in (
        "Can the trace be trusted?",
        "Where did the time go?",
        "Why was the device idle?",
        "What held the steps up, and what if not?",
        "Which kernels took the time?",
        "How was the work launched?",
        "Communication",
        "Queues and copies over time",
        "Which operators and lines is it?",
        "The host",
        "Timeline of one step",
    ):
        assert f">{title}</h2>" in page
    # Only what comes first is open, and a cause is said in words.
    assert page.count('<details class="part"') == page.count("</h2></summary>") > 4
    assert page.count('" open>') == 4
    assert "launch latency" in page
    assert not re.search(r"launch_latency|host_untraced|blocking_call", page.split("var specs = ")[1])
    # Every chart has its place, and every place its chart.
    drawn = set(re.findall(r'id="chart-([\w-]+)"', page))
    assert drawn == set(json.loads(page.split("var specs = ")[1].split(", configs = ")[0]))
    assert len(drawn) >= 12


def test_the_report_of_ranks_of_a_cpu_and_beside_an_earlier_trace(tmp_path: Path) -> None:
    ranks = []
    for rank in range(2):
        build = training(8, ranks=2)
        build.metadata = {"distributedInfo": {"rank": rank}}
        for event in build.events:
            if "nccl" in event["name"] and rank == 0:
                event["ts"], event["dur"] = event["ts"] - 5, event["dur"] + 5
        ranks.append(build.load(tmp_path, f"r{rank}.json"))
    target = tmp_path / "r.html"
    assert T.write_report(ranks, target, before=ranks[1]) == []
    page = target.read_text()
    for text in ("What changed since r1.json?", "Who was waited for", "Arrival skew over time", "One path through all"):
        assert text in page
    assert "Device streams of all ranks at that time" in page
    assert "rank 1 device 0 stream 20" in page
    assert "Why are slow steps slower than fast ones?" in page
    host = Build()
    for i in range(6):
        host.step(i, 1000 + 100 * i, 100).op("aten::mm", 1010 + 100 * i, 30 + i)
        host.add("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 1060 + 100 * i, 30)
        host.op("aten::to", 1062 + 100 * i, 4).add("cpu_instant_event", "[memory]", 1063, 0)
    assert T.write_report([host.load(tmp_path, "h.json")], target) == []
    page = target.read_text()
    for text in (
        "outside operators",
        "Small operators",
        "Conversions and copies",
        "Data loading",
        "if the data had been",
    ):
        assert text in page
    assert "Why was the device idle?" not in page


def test_what_is_shown_of_many_ranks_is_said() -> None:
    from fettle.trace.report.section import Section

    section = Section("t")
    assert section.first([1, 2], 2, "ranks") == [1, 2]
    assert section.text == ""
    assert section.first([1, 2, 3], 2, "ranks") == [1, 2]
    assert section.text == " Of 3 ranks the first 2 are shown one by one."


def test_a_chart_of_many_collectives_reaches_to_the_end_of_the_trace() -> None:
    from fettle.trace.report.charts.counts import arrival_chart, collective_chart
    from fettle.trace.report.charts.look import MAX_ROWS

    number = pl.int_range(3 * MAX_ROWS, eager=True)
    each = pl.DataFrame({"rank": 0, "first_ns": number, "skew_ns": number, "last_rank": 1, "bytes": number + 1,
                         "duration_ns": 9, "bus_gb_per_s": 1.0, "collective": "all_reduce"})  # fmt: skip
    assert arrival_chart(each).data["skew_ms"].max() == (3 * MAX_ROWS - 1) / 1e6
    drawn = collective_chart(each).data
    assert MAX_ROWS // 2 < drawn.height <= MAX_ROWS
    assert drawn["bytes"].max() > 2.9 * MAX_ROWS


def test_a_step_of_many_ranks_is_drawn_by_its_longest_events(tmp_path: Path) -> None:
    from fettle.trace.report.charts.look import MAX_ROWS
    from fettle.trace.report.path import timeline

    traces = []
    for rank in range(20):
        build = Build(distributedInfo={"rank": rank}).step(0, 0, 5000)
        for i in range(400):
            build.kernel("gemm", 10 + 10 * i, 5, call=1 + 10 * i)
        traces.append(build.load(tmp_path, f"{rank}.json"))
    section = timeline(traces)
    assert section is not None
    drawn = [len(rows) for rows in section.charts[1].spec["datasets"].values()]
    assert MAX_ROWS // 2 < max(drawn) <= MAX_ROWS


def test_a_chart_of_more_lines_than_are_drawn_says_how_many_there_are() -> None:
    from fettle.trace.report.charts.lines import step_line
    from fettle.trace.report.charts.look import MAX_SERIES

    def title(series: int) -> str:
        frame = pl.DataFrame({"rank": 0, "ts_ns": range(series), "v": 1, "s": [f"stream {i}" for i in range(series)]})
        return step_line(frame, "v", series="s", unit="MiB").to_dict()["encoding"]["x"]["title"]

    assert title(MAX_SERIES) == "milliseconds"
    assert f"{MAX_SERIES} of {MAX_SERIES + 3} series" in title(MAX_SERIES + 3)


def test_thinned_lines_keep_their_peaks() -> None:
    from fettle.trace.report.charts.lines import thin_steps
    from fettle.trace.report.charts.look import MAX_ROWS

    values = [0] * 50_000
    values[31_234], values[7] = 99, -5
    frame = pl.DataFrame({"ts_ns": range(len(values)), "v": values, "s": ["a"] * len(values)})
    thin = thin_steps(frame, "v", "s")
    assert thin.height <= MAX_ROWS
    assert (thin["v"].max(), thin["v"].min(), thin["ts_ns"][0], thin["ts_ns"][-1]) == (99, -5, 0, len(values) - 1)


def test_a_chart_survives_text_that_a_picture_cannot_hold(tmp_path: Path, run_fettle: Run) -> None:
    path = training(3, name="bad\x00\x1b[31m\ud800name").write(tmp_path / "t.json")
    for suffix in ("svg", "png", "html", "json"):
        said = run_fettle("trace", "kernels", path, "--output", tmp_path / f"c.{suffix}")
        assert said.code == 0
        assert "\x1b" not in said.out
    assert "\x1b" not in (tmp_path / "c.svg").read_text()


def test_the_augmented_trace_holds_the_old_and_the_new(tmp_path: Path) -> None:
    for name in ("t.json", "t.json.gz"):
        build = training(3)
        path = build.write(tmp_path / name)
        trace = T.load(path, use_sidecar=False)
        added = T.augment(trace, tmp_path / "new.json", path=T.critical_path(trace))
        events = json.loads((tmp_path / "new.json").read_text())["traceEvents"]
        assert len(events) == added + len(build.events)
        assert events[added:] == build.events
        assert sum(e["dur"] for e in events if e.get("cat") == "critical_path") == pytest.approx(300)
        with pytest.raises(UsageError):
            T.augment(trace, path)


def test_an_augmented_trace_is_compressed_where_its_name_says_so(tmp_path: Path, run_fettle: Run) -> None:
    path = training(3).write(tmp_path / "t.json")
    assert run_fettle("trace", "augment", path, "--output", tmp_path / "new.json.gz").code == 0
    events = json.loads(gzip.decompress((tmp_path / "new.json.gz").read_bytes()))["traceEvents"]
    assert len(events) > len(training(3).events)


def test_a_trace_that_was_cut_off_is_augmented_as_far_as_it_goes(tmp_path: Path, run_fettle: Run) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(training(2000).write(path).read_bytes()[:-500])
    assert run_fettle("trace", "augment", path, tmp_path / "new.json").code == 0
    assert b"queue length" in (tmp_path / "new.json").read_bytes()


def test_record_then_read(tmp_path: Path, run_fettle: Run) -> None:
    program = tmp_path / "program.py"
    (tmp_path / "beside_the_program.py").write_text("size = 32\n")
    program.write_text(
        "import torch\nfrom beside_the_program import size\n"
        "x = torch.rand(size, size)\ndef step():\n    return (x @ x).relu().sum()\n"
    )
    target = tmp_path / "out.json.gz"
    options = ["--active", "3", "--warmup", "1", "--memory"]
    assert run_fettle("trace", "record", f"{program}:step", "-o", target, *options).code == 0
    trace = T.load(target, use_sidecar=False)
    assert T.steps(trace).height == 3
    assert "aten::relu" in T.operator_table(trace)["operator"].to_list()
    assert T.memory_timeline(trace).height > 0
    assert T.time_account(trace)["compute_ns"].min() > 0
    program.write_text("calls = []\ndef step():\n    calls.append(1)\n    assert len(calls) < 3, 'three\\nlines'\n")
    for text, said in (
        (program.read_text(), "raised in step 2: AssertionError: three"), ("def step(:", "SyntaxError"),
        ("def step():\n    return print, [1]\n", "name a function that runs one step"),
    ):  # fmt: skip
        program.write_text(text)
        told = run_fettle("trace", "record", f"{program}:step", "-o", tmp_path / "none.json")
        assert told.code == 2
        assert said in told.err
        assert len(told.err.strip().splitlines()) == 1
        assert not (tmp_path / "none.json").exists()
    with T.record(tmp_path / "block.json"):
        sum(range(10))
    with (
        pytest.raises(RuntimeError, match="fewer than"),
        T.record(tmp_path / "never.json", wait=3, active=5) as profiler,
    ):
        profiler.step()


def test_a_block_that_ends_before_its_steps_is_kept_with_a_warning(tmp_path: Path) -> None:
    def record(name: str, active: int) -> None:
        with T.record(tmp_path / name, active=active) as profiler:
            for _ in range(2):  # the first is thrown away; the end of the block is that of the last
                profiler.step()

    with pytest.warns(UserWarning, match=r"early\.json: 1 of 3 steps were run"):
        record("early.json", 3)
    assert T.load(tmp_path / "early.json", use_sidecar=False).events.height
    with warnings.catch_warnings(record=True) as said:
        record("all.json", 2)
    assert not [one for one in said if "steps were run" in str(one.message)]


def test_import_is_light() -> None:
    heavy = ("torch", "altair", "jinja2", "scipy", "pandas")
    code = f"import sys, fettle.trace; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
