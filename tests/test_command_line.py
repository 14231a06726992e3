"""What is the same for every command."""

import subprocess
import sys

import pytest

import fettle


def test_the_version(run_fettle) -> None:
    said = run_fettle("--version")
    assert (said.code, said.out) == (0, f"fettle {fettle.__version__}\n")


def test_help_names_the_commands_and_waits_for_no_torch() -> None:
    code = "import sys; from fettle.cli import build; print(sorted(build().registered_commands, key=str) != [])"
    code += "; print(sorted({'torch', 'optuna', 'altair'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["True", "[]"]


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


def test_an_empty_target_is_not_this_folder(run_fettle) -> None:
    said = run_fettle("diagnose", "")
    assert said.code == 2
    assert "is no target" in said.err


def test_an_interrupt_is_one_line(run_fettle, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fettle.report.load_result", stop)
    said = run_fettle("report", "anywhere")
    assert (said.code, said.out, said.err.strip()) == (130, "", "fettle: interrupted")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["join", "nowhere"], "is no address: write HOST:PORT"),
        (["join", "10.0.0.1:99999"], "is no address: write HOST:PORT"),
        (["join", "127.0.0.1:29400"], "set FETTLE_KEY"),
    ],
)
def test_a_study_that_cannot_be_joined_is_one_line(run_fettle, monkeypatch, words: list[str], says: str) -> None:
    monkeypatch.delenv("FETTLE_KEY", raising=False)
    said = run_fettle(*words)
    assert said.code == 2
    assert said.err.count("\n") == 1
    assert says in said.err
