"""Which of fettle's own processes are alive, for tests that none stays behind."""

import os
import time

import psutil


def alive(*words: str) -> set[int]:
    """Processes with one of the words in their command line."""
    found = set()
    for process in psutil.process_iter(["pid", "cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if any(word in line for word in words) and process.info["pid"] != os.getpid():
            found.add(process.info["pid"])
    return found


def left_behind(before: set[int], *words: str) -> set[int]:
    """Those that were not there before and have not ended after ten seconds."""
    deadline = time.monotonic() + 10
    while (left := alive(*words) - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
