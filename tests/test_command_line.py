"""What is the same for every command."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fettle
from fettle.cli import COMMANDS, _options, _show
from fettle.cli._console import console
from fettle.cli._old_spellings import as_options, renewed
from fettle.errors import UsageError
from fettle.page import Table
from fettle.techniques import Level


def test_the_versions(run_fettle) -> None:
    said = run_fettle("--version")
    versions = dict(line.split(" ", 1) for line in said.out.splitlines())
    assert said.code == 0
    assert said.out.startswith(f"fettle {fettle.__version__}\npython 3.")
    assert versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]


def test_a_library_that_finds_no_memory_is_one_line(run_fettle, monkeypatch) -> None:
    said = ImportError("Original error was: libopenblas.so: failed to map segment from shared object")
    for error in (said, MemoryError()):
        monkeypatch.setattr(fettle.cli, "build", lambda error=error: lambda **_: (_ for _ in ()).throw(error))
        answer = run_fettle("doctor")
        assert (answer.code, answer.err.count("\n")) == (2, 1)
        assert answer.err.startswith("fettle: out of memory")


def test_the_first_page_of_help_names_the_commands_and_imports_none_of_them() -> None:
    code = """
import sys
sys.argv = ["fettle", "--help"]
from fettle.cli import main
try:
    main()
finally:
    heavy = {"torch", "optuna", "altair", "polars", "numpy", "jinja2", "msgspec", "scipy"} & set(sys.modules)
    print("imported:", sorted(heavy | {name for name in sys.modules if name.startswith("fettle.cli.t")}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "imported: []" in done.stdout
    assert all(f" {name} " in done.stdout for commands in COMMANDS.values() for name in commands)
    assert len(done.stdout.splitlines()) < 47


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("apply r.toml m.py", "check r.toml m.py", "'fettle apply' is now 'fettle check'"),
        ("slo p --head-room 5%", "serve slo p --headroom 5%", "--head-room is now --headroom"),
        ("slo m.py --study a/study.db --study-name n", "serve slo m.py --storage a/study.db --study n", "--storage"),
        ("load http://a:1 -c 1", "serve load http://a:1 -c 1", "serve load"),
        ("load u --csv=a.csv --markdown a.md", "serve load u --output=a.csv --output a.md", "--csv is now --output"),
        ("package m.py -o x", "serve package m.py -o x", "serve package"),
        ("export ray p --out x", "serve export ray p --output x", "--out is now --output"),
        ("import-mar a.mar", "serve import-mar a.mar", "serve import-mar"),
        ("memory s.pickle --report r.html", "memory s.pickle --output r.html", "--report is now --output"),
        ("plan m.py --report=r.svg", "plan m.py --output=r.svg", "--report is now --output"),
        ("trace idle t.json --chart i.png", "trace idle t.json --output i.png", "--chart is now --output"),
        ("serve slo p --seconds 2s", "serve slo p --duration 2s", "--seconds is now --duration"),
        ("data m.py --ranks 4", "data m.py --nproc 4", "--ranks is now --nproc"),
        ("report out --charts c", "report out --output c", "--charts is now --output"),
        ("tune m.py --allow-batch --json", "tune m.py --allow batch-size --json", "--allow batch-size"),
    ],
)
def test_old_spellings_work_and_say_how_they_are_written_now(old: str, new: str, says: str) -> None:
    found, said = renewed(old.split())
    assert found == new.split()
    assert any(says in line for line in said), said
    assert renewed(found) == (found, [])


def test_a_job_of_workers_is_no_old_spelling() -> None:
    for words in ("export ray m.py --study night", "export ray --storage=postgresql://db/studies", "export ray --help"):
        assert renewed(words.split()) == (words.split(), [])


def test_serve_with_a_package_runs_it() -> None:
    assert renewed(["serve", "digits-1", "--port", "0"]) == (["serve", "run", "digits-1", "--port", "0"], [])
    assert renewed(["serve", "--store", "models"]) == (["serve", "run", "--store", "models"], [])
    for stays in (["serve"], ["serve", "--help"], ["serve", "slo", "x"], ["tune", "serve"]):
        assert renewed(stays) == (stays, [])


def test_an_old_command_tells_on_standard_error(run_fettle) -> None:
    said = run_fettle("apply", "absent.toml", "model.py")
    assert said.err.splitlines()[0] == "fettle: 'fettle apply' is now 'fettle check'"
    assert (said.code, said.out, len(said.err.splitlines())) == (2, "", 2)


def test_errors_of_the_library_are_told_in_the_commands_words() -> None:
    assert as_options("`nproc=2` is for training: write `mode='training'`") == (
        "--nproc 2 is for training: write --mode training"
    )
    assert as_options("choose another `study`, or `max_metric_drop`") == "choose another --study, or --max-metric-drop"
    assert as_options("raise `max_file_bytes`") == "raise --max-file-size"
    assert as_options("the limit `max_ttft_ms`, within `budget_s`") == "the limit --max-ttft, within --budget"
    assert as_options("`device_only=True`: no device") == "--device-only: no device"
    assert as_options("no 'quotes' here") == "no 'quotes' here"
    known = {"--output"}
    assert as_options("`int`, not `a=b`: another `output`", known) == "int, not a=b: another --output"


def test_what_another_library_quotes_is_no_option(run_fettle, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[levels]\nprecision = 3\n")
    said = run_fettle("check", recipe, "model.py")
    assert said.err.endswith("levels.precision: Expected str, got int\n")


LOUD = """
import logging, os, sys, warnings
import torch

def workload(seed=0):
    warnings.warn("a warning of a library")
    logging.getLogger("library").error("a log of a library")
    os.write(2, b"what C++ code prints\\n"), os.write(1, b"what a program prints\\n")
    print("a print"), print("another", file=sys.stderr), sys.stdout.buffer.write(b"bytes")
    sys.stdout.reconfigure(line_buffering=True), sys.stderr.fileno()  # as programs do
    assert sys.argv[1:] == [] and sys.stdin.read() == ""  # no arguments of fettle's, and nobody to ask
    return {"model": torch.nn.Linear(4, 2), "optimizer": torch.optim.SGD, "data": [torch.ones(3, 4)],
            "loss": lambda model, batch: model(batch).mean()}

def served():
    made = workload()
    return made["model"].eval(), made["data"]

def step():
    workload()
"""


COMMANDS_IN_TURN = """
import sys
import fettle.doctor
from fettle.cli import main
del fettle.doctor.CHECKS["changed-files"]  # reads every file of this environment, which takes seconds
for line in sys.argv[1:]:
    sys.argv = ["fettle", *line.split()]
    try:
        main()
    except SystemExit as left:
        print(chr(0))
        assert not left.code, line
"""


def test_what_libraries_print_does_not_reach_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(LOUD)
    lines = [
        "plan loud.py --world-size 2 --strategy ddp --json",
        "serve package loud.py:served --json",
        "trace record loud.py:step --active 1 --warmup 1 --json",
        "doctor loud.py --fail-on never --json",
    ]
    command = [sys.executable, "-c", COMMANDS_IN_TURN, *lines]
    done = subprocess.run(command, input="typed", capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.split("\0\n")
    assert all(json.loads(text) for text in said[:-1])
    assert (len(said[:-1]), said[-1]) == (len(lines), "")


def test_a_server_shows_no_library_before_it_serves(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(LOUD)
    command = [sys.executable, "-c", "from fettle.cli import main; main()", "serve", "run", "loud.py:served", "no.zip"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    said = [line.partition(":")[0] for line in done.stderr.splitlines()]
    assert (done.returncode, done.stdout, said) == (2, "", ["packaged as loud-served-1", "fettle"])


def test_a_terminal_of_no_width_has_help(run_fettle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1")
    assert run_fettle("bench", "--help").code == 0


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    code = f"import os; os.chdir({str(tmp_path)!r}); os.rmdir({str(tmp_path)!r}); from fettle.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "bench", "model.py"], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "the current folder cannot be used (No such file or directory)" in done.stderr


def test_standard_streams_that_are_closed_lead_nowhere() -> None:
    code = """
import os
os.closerange(0, 3)
import fettle.cli
nowhere = os.stat(os.devnull)
there = lambda **_: os._exit(not all(os.path.samestat(os.fstat(number), nowhere) for number in range(3)))
fettle.cli.build = lambda: there
fettle.cli.main()
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("words", ["--version", "--help", "trace --help"])
def test_output_that_nobody_reads_changes_nothing(words: str) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as unread:
        command = [sys.executable, "-m", "fettle", *words.split()]
        done = subprocess.run(command, stdout=unread, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_bug_still_shows_its_traceback(tmp_path: Path) -> None:
    code = "import fettle.cli\ndef bug(*given): raise ZeroDivisionError\nfettle.cli.build = bug\nfettle.cli.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, "ZeroDivisionError" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("text", "found"),
    [("90s", 90.0), ("10m", 600.0), ("1h", 3600.0), ("5ms", 0.005), (".5s", 0.5), ("90", 90.0)],
)
def test_durations(text: str, found: float) -> None:
    assert _options.duration_s(text, "--budget") == pytest.approx(found)


def test_a_bare_delay_is_in_milliseconds_as_it_was() -> None:
    assert _options.duration_s("5", "--delay", bare="ms") == _options.duration_s("5ms", "--delay")


def test_shares_devices_and_outputs_have_one_form() -> None:
    assert _options.share("20%", "--headroom") == _options.share("0.2", "--headroom") == 0.2
    assert _options.share("150%", "--fail-memory", below=10) == 1.5
    assert _options.devices(["cpu,cuda:0", "cuda:1"]) == ["cpu", "cuda:0", "cuda:1"]
    assert _options.one_device("cuda:3") == "cuda:3"
    paths = _options.outputs([Path("a.csv"), Path("folder")], ".csv", folder=True)
    assert paths == {".csv": Path("a.csv"), "": Path("folder")}
    for wrong in (
        lambda: _options.share("120%", "--headroom"), lambda: _options.devices("tpu"),
        lambda: _options.one_device("cpu,cuda"), lambda: _options.outputs([Path("a.pdf")], ".csv", ".md"),
        lambda: _options.outputs([Path("a.csv"), Path("b.csv")], ".csv"),
    ):  # fmt: skip
        with pytest.raises(UsageError):
            wrong()


def test_a_files_name_is_no_folder(run_fettle, tmp_path: Path) -> None:
    for wrong in (["tune", "m.py"], ["improve", "m.py"], ["study", "m.py"], ["container", "r.toml"],
                  ["bench", "m.py", "--against", "main"]):  # fmt: skip
        said = run_fettle(*wrong, "--output", "out.html")
        assert (said.code, said.err.count("\n")) == (2, 1)
        assert "a folder" in said.err
    (tmp_path / "old.html").mkdir()
    for folder in (Path("run-1.5"), tmp_path / "old.html"):
        assert _options.output_folder(folder) == folder


def test_a_page_takes_no_place_of_a_model_a_trace_or_a_snapshot(run_fettle, tmp_path: Path) -> None:
    for command in (["diagnose"], ["memory"], ["trace", "report"]):
        source = tmp_path / f"{command[0]}.py"
        source.write_text("mine")
        said = run_fettle(*command, source, "--output", source)
        assert (said.code, "name a file that ends in .html" in said.err) == (2, True)
        assert source.read_text() == "mine"


TRICKY = "a:100:b[bold]c[/x]"
"""What rich would read as an emoji, a style, and the end of one that never began."""


def test_texts_are_printed_as_they_are(run_fettle, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    assert run_fettle("diagnose", f"{TRICKY}.json").err == f"fettle: no such trace file: {TRICKY}.json\n"
    _show.print_table(console(), Table([f"column {TRICKY}"], [[f"cell {TRICKY}"]]), f"title {TRICKY}")
    printed = capsys.readouterr().out
    assert all(f"{part} {TRICKY}" in printed for part in ("title", "column", "cell"))
    levels = [Level("fast", f"summary {TRICKY}", f"needs {TRICKY}")]
    made_up = SimpleNamespace(name="made-up", title="", default="off", modes=("inference",), levels=lambda _: levels)
    monkeypatch.setattr("fettle.techniques.CATALOGUE", [made_up])
    monkeypatch.setenv("COLUMNS", "120")
    said = run_fettle("techniques").out
    assert f"summary {TRICKY}" in said
    assert f"needs {TRICKY}" in said


@pytest.mark.parametrize(
    ("command", "room"), [("bench", "comparing.bench"), ("improve", "improve.improve"), ("study", "studies.study")]
)
def test_a_metric_decides_alone_wherever_one_judges(run_fettle, monkeypatch, tmp_path, command: str, room: str) -> None:
    def stop(*given: object, limits: object = None, **_: object) -> None:
        raise UsageError(str(limits or given[1].limits))  # type: ignore[attr-defined]

    monkeypatch.setattr(f"fettle.{room}", stop)
    monkeypatch.chdir(tmp_path)
    said = run_fettle(command, "model.py", "--max-metric-drop", "0.01")
    assert "max_error=None" in said.err
    assert "max_metric_drop=0.01" in said.err
    both = run_fettle(command, "model.py", "--max-metric-drop", "0.01", "--max-error", "0.001")
    assert "max_error=0.001" in both.err
    assert "max_metric_drop=0.01" in both.err


def test_an_error_of_the_file_system_is_one_line(run_fettle) -> None:
    said = run_fettle("diagnose", "a" * 300 + ".json")
    assert said.code == 2
    assert said.err.count("\n") == 1
    assert said.err.startswith("fettle: aaa")


def test_no_command_shows_the_help_and_nothing_else(run_fettle) -> None:
    said = run_fettle()
    assert (said.code, said.err) == (2, "")
    assert "Usage" in said.out


@pytest.mark.parametrize(
    "text", ["", "syncs", "syncs=²", "syncs=-1", "speed=0", "syncs=0,syncs=9", "syncs=" + "9" * 5000]
)
def test_limits_for_ci_that_say_nothing_are_refused(run_fettle, text: str) -> None:
    said = run_fettle("diagnose", "model.py", "--fail-on", text)
    assert said.code == 2
    assert "write NAME=NUMBER" in said.err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("bench m.py --against main --nproc 2", "--nproc is for recipes"),
        ("bench m.py --bisect a..b --fail-memory 5%", "--fail-memory is for --against"),
        ("bench m.py --against main --rounds 2", "--rounds must be 3 or more"),
        ("bench m.py --against main --confidence 1", "--confidence is a share"),
        ("data t.json --output p.html", "fettle trace report draws a trace"),
        ("diagnose m.py --max-metric-drop 0.1", "give --verify"),
        ("doctor m.py --lock r.lock", "leave out TARGET"),
        ("plan m.py --device-memory 0", "give the memory of one device"),
        ("study m.py --enqueue", "give it one, --study NAME"),
        ("study --from-csv t.csv --enqueue", "leave out the targets and how to measure"),
        ("study m.py --storage s.db --study night --enqueue --atlas a.parquet", "--enqueue measures nothing"),
        ("study --storage s.db --study night --design ladder", "leave out how to measure, or name them"),
        ("serve load http://a --ttft 1s -c 1", "give its URL with /v1"),
        ("serve package m.py --chat-template t.jinja", "for --handler generate"),
        ("serve run --store absent", "no such folder: absent"),
        ("serve slo m.py --p99 0", "--p99 must be more than 0"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(run_fettle, monkeypatch, tmp_path, line: str, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text("workload = dict\n")
    said = run_fettle(*line.split())
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1 + ("is now" in said.err))
    assert says in said.err


@pytest.mark.parametrize(
    "words", ["tune x.py", "bench x.py", "bench x.py --against HEAD", "study x.py", "check x.toml x.py",
              "diagnose x.py", "improve x.py", "data x.py", "plan x.py", "serve package x.py",
              "serve slo x.py --p99 1ms", "serve load ftp://x"],
)  # fmt: skip
def test_with_json_an_error_leaves_standard_output_empty(run_fettle, monkeypatch, tmp_path, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    said = run_fettle(*words.split(), "--json")
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)


def test_lines_are_whole_where_no_terminal_shows_them(monkeypatch, capsys) -> None:
    monkeypatch.delenv("COLUMNS")
    console().print("inputs   " + "x FP32[-1, 3] " * 40)
    assert capsys.readouterr().out.count("\n") == 1


def test_an_empty_target_is_not_this_folder(run_fettle) -> None:
    said = run_fettle("diagnose", "")
    assert said.code == 2
    assert "is not a target" in said.err


def test_a_full_disk_is_one_line(run_fettle, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fettle.report.load_result", full)
    said = run_fettle("report", "anywhere")
    assert (said.code, said.out, said.err.strip()) == (2, "", "fettle: cannot write: No space left on device")


def test_no_temporary_folder_is_one_line_and_only_where_one_is_needed(run_fettle, monkeypatch, tmp_path: Path) -> None:
    def none(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("fettle.report.load_result", none)
    said = run_fettle("report", "anywhere")
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert "found in ['/tmp']: set TMPDIR" in said.err
    code = "import tempfile, fettle.cli\ndel tempfile._get_default_tempdir\nfettle.cli.main()"
    subprocess.run([sys.executable, "-c", code, "--version"], check=True, capture_output=True, cwd=tmp_path)


def test_an_interrupt_is_one_line(run_fettle, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fettle.report.load_result", stop)
    said = run_fettle("report", "anywhere")
    assert (said.code, said.out, said.err.strip()) == (130, "", "fettle: interrupted")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_whoever_ends_a_command_interrupts_it(run_fettle, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def stop(*_: object, **__: object) -> None:
        if not (fork := os.fork()):
            os.kill(os.getpid(), number)
            os._exit(3)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]))
        os.kill(os.getpid(), number)

    ends: list[int] = []
    monkeypatch.setattr("fettle.report.load_result", stop)
    before = signal.getsignal(number)
    said = run_fettle("report", "anywhere")
    assert (said.code, said.out, said.err.strip()) == (130, "", "fettle: interrupted")
    assert ends == [-number]  # a process of its own ends as it would anywhere
    assert signal.getsignal(number) == before


def test_nohup_is_heeded(run_fettle, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        raise UsageError("it went on")

    monkeypatch.setattr("fettle.report.load_result", stop)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        said = run_fettle("report", "anywhere")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (said.code, said.err.strip()) == (2, "fettle: it went on")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["join", "nowhere"], "is not an address: write HOST:PORT"),
        (["join", "10.0.0.1:99999"], "is not an address: write HOST:PORT"),
        (["join", "127.0.0.1:29400"], "set FETTLE_KEY"),
    ],
)
def test_a_study_that_cannot_be_joined_is_one_line(run_fettle, monkeypatch, words: list[str], says: str) -> None:
    monkeypatch.delenv("FETTLE_KEY", raising=False)
    said = run_fettle(*words)
    assert said.code == 2
    assert said.err.count("\n") == 1
    assert says in said.err


def test_long_work_says_now_and_then_where_it_is_also_without_a_terminal(monkeypatch, capsys):
    def says(text):
        said, deadline = "", time.monotonic() + 60
        while text not in said and time.monotonic() < deadline:
            said += capsys.readouterr().err
        return text in said

    with _show.status_line("starting") as progress:
        progress("too short to be said")
    assert not capsys.readouterr().err
    monkeypatch.setattr(_show, "_EVERY_S", 0.01)
    with _show.status_line("starting") as progress:
        assert says("starting (")
        progress("compiling")
        assert says("compiling (")
    with _show.status_line("starting", quiet=True) as progress:
        progress("never said")
    assert "never" not in capsys.readouterr().err
