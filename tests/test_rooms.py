"""Rooms use only what stands below them: the order is in pyproject.toml."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_rooms_stand_on_what_they_use() -> None:
    # In a process of its own: import-linter configures logging for the whole process, and switches others' off.
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run([sys.executable, "-c", code, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
