"""The documentation's Python blocks run, in order, each page in a folder of its own."""

import re
from pathlib import Path

import pytest

from fettle.cli import _COMMANDS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
COMMANDS = {name for commands in _COMMANDS.values() for name in commands}
BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "docs"}
    for head, code in BLOCK.findall(page.read_text()):
        if "no-run" in head:
            continue
        exec(compile(code, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    assert set(re.findall(r"^\$ fettle ([a-z-]+)", page.read_text(), re.MULTILINE)) <= COMMANDS


def test_every_command_has_its_line() -> None:
    listed = re.findall(r"^\| `fettle ([a-z-]+)", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE)
    assert set(listed) == COMMANDS
