"""Cores that a process may use: whole ones and threads of them, also where OpenMP has bound who asks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fettle.procs import limits

BOUND = """
import os, torch
from fettle.procs.limits import affinity_cores
from fettle.procs.process import Process
print(len(os.sched_getaffinity(0)), affinity_cores())
with Process(["-c", "import os; print(len(os.sched_getaffinity(0)))"]) as child:
    child.wait()
    print(child.last_words(), len(os.sched_getaffinity(0)))
"""


@pytest.mark.parametrize(
    ("now", "wanted"),
    [((1024, 1 << 20), [(65536, 1 << 20)]), ((1024, 4096), [(4096, 4096)]), ((1024, -1), [(65536, -1)]),
     ((1 << 17, 1 << 20), []), ((-1, -1), [])],
)  # fmt: skip
def test_as_many_files_may_be_open_as_the_system_allows(monkeypatch, now, wanted) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr("resource.getrlimit", lambda kind: now)
    monkeypatch.setattr("resource.setrlimit", lambda kind, both: asked.append(both))
    limits.allow_open_files()
    assert asked == wanted


@pytest.mark.skipif(limits.affinity_cores() < 2, reason="needs two cores")
def test_what_openmp_binds_is_neither_counted_nor_inherited() -> None:
    environment = {**os.environ, "OMP_PROC_BIND": "close", "OMP_PLACES": "threads"}
    done = subprocess.run([sys.executable, "-c", BOUND], capture_output=True, text=True, check=True, env=environment)
    every = limits.affinity_cores()
    assert done.stdout.split() == ["1", str(every), str(every), "1"]


@pytest.mark.parametrize(
    ("allowed", "siblings", "cores"),
    [
        (range(8), lambda core: f"{core % 64},{core % 64 + 64}", 8),  # the first threads of eight cores
        ([0, 1, 64, 65], lambda core: f"{core % 64},{core % 64 + 64}", 2),
        (range(8), lambda core: f"{core // 2 * 2}-{core // 2 * 2 + 1}", 4),
        (range(4), lambda core: "", 4),
    ],
)
def test_physical_cores_are_those_that_are_allowed(monkeypatch, tmp_path: Path, allowed, siblings, cores) -> None:
    import psutil

    monkeypatch.setattr(limits, "_CORES", tmp_path)
    monkeypatch.setattr(limits, "affinity", lambda: set(allowed))
    monkeypatch.setattr(limits, "quota_cores", lambda: 64.0)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8)
    for core in allowed:
        file = tmp_path / f"cpu{core}" / "topology" / "thread_siblings_list"
        file.parent.mkdir(parents=True)
        file.write_text(siblings(core) + "\n")
    assert limits.usable_cores() == cores
