"""What a person sees of a search: rows, page, curve, JSON; and what a trace says of the waiting."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from fettle.errors import UsageError
from fettle.inputs import Setting
from fettle.inputs._messages import Faults
from fettle.inputs.from_trace import compare_text, waits_in_trace
from fettle.inputs.lint import Lint
from fettle.inputs.report import _limit_text, as_data, curve, facts, page, rows, write_report
from fettle.page import drawn
from tests.conftest import Run
from tests.inputs.test_search import MadeUp

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found():
    """A search with a failed setting, a step, and a lint whose text is hostile."""

    class WithLint(MadeUp):
        def faults(self):
            evil = Lint("slow-transform", "<script>alert(1)</script>", "99%\x1b[31m", "do it once")
            return Faults([evil], ["a note"])

    return WithLint(make_s=0.04, step_s=0.008, cores=4, fails=(6,), given=Setting(6)).search()


def test_the_page_needs_no_network_and_no_script(found) -> None:
    text = page(found)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "\x1b" not in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert text.count("<svg") == 4  # wide and narrow, light and dark
    assert found.verdict in text
    assert "failed: out of memory: it is made up" in text
    assert "a note" in text


def test_rows_and_facts(found) -> None:
    shown = rows(found)
    assert [row["workers"] for row in shown] == sorted((row["workers"] for row in shown), key=int)
    assert sum("take this" in row["note"] for row in shown) == 1
    assert any(line.startswith("A step alone takes 8 ms.") for line in facts(found))


def test_steps_of_seconds_are_not_said_to_be_none_a_second() -> None:
    slow = SimpleNamespace(step_s=4.0, settings=[SimpleNamespace(level=0.01)])
    assert _limit_text(slow).endswith("the loop would make 0.25 batches a second")  # type: ignore[arg-type]


def test_json_has_null_where_nothing_is_known(found) -> None:
    text = json.dumps(as_data(MadeUp(step_s=0.0).search()), allow_nan=False)
    assert json.loads(text)["bound"] is None
    told = as_data(found)
    assert told["waiting"] == pytest.approx(0.04 / 0.048)
    assert any(item["failure"] for item in told["settings"])
    json.dumps(told, allow_nan=False)


def test_the_curve_has_a_dot_for_each_slice_and_a_cross_for_each_failure(found) -> None:
    data = json.dumps(curve(found))
    assert "it is made up" in data
    assert "the step alone" in data


@pytest.mark.parametrize("suffix", [".html", ".svg", ".png"])
def test_files(found, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"curve{suffix}"
    write_report(found, path)
    assert path.read_bytes()[:4] in (b"<!do", b"<svg", b"\x89PNG")


def test_a_report_that_cannot_be_is_refused_before_the_search(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="written as"):
        drawn.check_path(tmp_path / "curve.pdf")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write"):
        drawn.check_path(tmp_path / "file" / "curve.svg")


def test_the_command(tmp_path: Path, run_fettle: Run, forks: None) -> None:
    curve_path = tmp_path / "page.html"
    words = ["--slice", "0.2s", "--json", "-o", curve_path, "--keep", tmp_path / "kept"]
    said = run_fettle("data", f"{HERE / 'loaders.py'}:quick", *words)
    assert said.code == 0, said.err
    told = json.loads(said.out)
    assert told["verdict"].endswith(".")  # which one, from which numbers, is in `test_search`
    assert 1 <= told["bound"] < 2  # beside a step of 150 ms a batch is next to nothing
    assert curve_path.read_text().startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.py:made"], "no such file"),
        (["x.py:made", "--slice", "0s"], "--slice"),
        (["x.py:made", "-o", "x.pdf"], "written as"),
        (["x.py:made", "--device", "tpu"], "device tpu"),
        (["x.py:made", "--after", "x.json"], "--after goes with a trace"),
        (["x.py:made", "--slice", "3m"], "--timeout 2m: a run takes --slice 3m"),
        (["none.json", "--nproc", "2"], "--nproc goes with a loader"),
        (["none.json", "--no-lints"], "--lints goes with a loader"),
        (["none.json"], "none.json"),
    ],
)
def test_bad_usage_is_one_line(tmp_path: Path, monkeypatch, run_fettle, arguments: list[str], words: str) -> None:
    monkeypatch.chdir(tmp_path)
    said = run_fettle("data", *arguments)
    assert said.code == 2
    assert words in said.err
    assert said.err.count("\n") == 1


def event(name: str, begin_us: float, length_us: float, category: str = "user_annotation") -> dict:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": begin_us, "dur": length_us}


def write_trace(path: Path, step_us: float, wait_us: float, steps: int = 5) -> Path:
    events = []
    for number in range(steps):
        begin = 1000 + number * step_us
        events.append(event(f"ProfilerStep#{number}", begin, step_us))
        events.append(event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", begin, wait_us))
        events.append(event("aten::mm", begin + wait_us, step_us - wait_us, "cpu_op"))
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_a_trace_tells_the_waiting_the_bound_and_what_was_reached(tmp_path: Path, run_fettle) -> None:
    before = waits_in_trace(write_trace(tmp_path / "before.json", 1000, 300))
    after = waits_in_trace(write_trace(tmp_path / "after.json", 800, 10))
    assert before.waiting == pytest.approx(0.3, abs=0.01)
    assert before.bound == pytest.approx(1 / 0.7, abs=0.02)
    assert "Reached: 1.25x, within the bound of 1.43x." in compare_text([before, after])

    said = run_fettle("data", str(tmp_path / "before.json"), "--after", str(tmp_path / "after.json"), "--json")
    assert said.code == 0
    assert json.loads(said.out)["achieved"] == pytest.approx(1.25, abs=0.01)


def test_a_trace_without_steps_or_loader_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [event("ProfilerStep#1", 0, 10)]}))
    with pytest.raises(UsageError, match="no range of a DataLoader"):
        waits_in_trace(path)
    path.write_text(json.dumps({"traceEvents": [event("enumerate(DataLoader)#x", 0, 10)]}))
    with pytest.raises(UsageError, match="has no steps"):
        waits_in_trace(path)


def test_ranks_are_those_that_torchrun_says_unless_they_are_named(run_fettle, monkeypatch):
    def stop(*_: object, ranks: int, **__: object) -> None:
        raise UsageError(f"{ranks} ranks")

    monkeypatch.setattr("fettle.inputs.measure_and_search", stop)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    target = f"{HERE / 'loaders.py'}:quick"
    assert run_fettle("data", target).err == "fettle: 1 ranks\n"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert run_fettle("data", target).err == "fettle: 4 ranks\n"
    assert run_fettle("data", target, "--nproc", "2").err == "fettle: 2 ranks\n"
