"""fettle asks nobody: no process of it looks up a name or connects to another machine, when imported or at work."""

import json
import os
import subprocess
import sys

import pytest

WATCH = """
import os, sys

def heard(event, arguments):
    if event == "socket.getaddrinfo" and arguments[0] not in (None, "", "localhost", "127.0.0.1", "::1"):
        asked = f"{event} {arguments[0]}"
    elif event in ("socket.connect", "socket.sendto") and isinstance(arguments[1], tuple):
        if str(arguments[1][0]).startswith("127.") or arguments[1][0] in ("::1", "localhost"):
            return
        asked = f"{event} {arguments[1][0]}"
    else:
        return
    with open(os.environ["ASKED"], "a") as file:
        file.write(f"{asked} by {' '.join(sys.orig_argv)[:200]}\\n")
    raise OSError(f"closed for this test: {asked}")

sys.addaudithook(heard)
open(os.environ["ASKED"] + ".on", "a").close()
"""
MODEL = """
import torch
def workload():
    torch.manual_seed(0)
    return torch.nn.Linear(64, 64).eval(), [torch.randn(8, 64)]
"""


@pytest.fixture
def closed(tmp_path):
    """Runs a command in whose processes every way out of this machine is closed, and says what was asked for."""
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    (tmp_path / "model.py").write_text(MODEL)
    asked = tmp_path / "asked"
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "ASKED": str(asked)}

    def run(*arguments: str) -> tuple[subprocess.CompletedProcess[str], str]:
        done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert asked.with_name("asked.on").exists()  # the watch was on
        return done, asked.read_text() if asked.exists() else ""

    return run


def test_the_watch_sees_who_asks(closed):
    done, asked = closed(sys.executable, "-c", "import socket; socket.create_connection(('pypi.org', 443))")
    assert done.returncode != 0
    assert "pypi.org" in asked


def test_importing_and_looking_ask_nobody(closed):
    done, asked = closed(sys.executable, "-c", "import fettle; fettle.watch, fettle.Workload")
    assert (done.returncode, asked) == (0, ""), done.stderr
    done, asked = closed(sys.executable, "-m", "fettle", "doctor", "--json")
    assert asked == ""
    assert json.loads(done.stdout)


@pytest.mark.slow
def test_a_study_asks_nobody(closed):
    done, asked = closed(sys.executable, "-m", "fettle", "tune", "model.py", "--budget", "40s", "--output", "out")
    assert (done.returncode, asked) == (0, ""), done.stderr
