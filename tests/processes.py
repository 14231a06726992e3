"""Which of fettle's own processes are alive, for tests that none stays behind."""

import os
import time
import uuid

import psutil

MARK = "FETTLE_TEST_RUN"
os.environ[MARK] = uuid.uuid4().hex  # what this process starts inherits it: other tests run at the same time


def alive(*words: str) -> set[int]:
    """Processes with one of the words in their command line that this one started, or that those started, and forks
    (`tests/forking.py`) that run a module of this name."""
    found = set()
    for process in psutil.process_iter(["pid", "cmdline", "name", "status"]):
        line, name = " ".join(process.info["cmdline"] or ()), process.info["name"]
        if process.info["pid"] == os.getpid() or process.info["status"] == psutil.STATUS_ZOMBIE:
            continue
        if any(word in line or word[-15:] == name for word in words) and _is_ours(process):
            found.add(process.info["pid"])
    return found


def left_behind(before: set[int], *words: str) -> set[int]:
    """Those that were not there before and have not ended after a minute."""
    deadline = time.monotonic() + 60
    while (left := alive(*words) - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _is_ours(process: psutil.Process) -> bool:
    try:
        return process.environ().get(MARK) == os.environ[MARK]
    except psutil.Error:
        return False
