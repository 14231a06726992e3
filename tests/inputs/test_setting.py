"""What a search may use: quotas and limits of control groups in both layouts, shares of ranks, /dev/shm."""

import os
from pathlib import Path

import psutil
import pytest

from fettle.inputs import Setting
from fettle.inputs.setting import Room, room, why_not
from fettle.procs import limits

GIB = 1 << 30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 cores without control groups; tests write theirs."""
    monkeypatch.setattr(limits, "_GROUPS", tmp_path)
    monkeypatch.setattr(limits, "_OWN", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_quota_of_the_second_version_counts_wherever_it_lies(groups: Path) -> None:
    assert room().cores == 64
    write(groups / "own", "0::/slice/job\n")
    write(groups / "slice" / "job" / "cpu.max", "max 100000\n")
    write(groups / "slice" / "cpu.max", "250000 100000\n")
    assert room().cores == 3  # 2.5 cores are asked for as three workers
    assert "2.5 cores" in room().why
    assert room(ranks=2).cores == 1
    assert "2 ranks" in room(ranks=2).why


def test_a_quota_of_the_first_version(groups: Path) -> None:
    write(groups / "own", "4:cpu,cpuacct:/job\n")
    write(groups / "cpu,cpuacct" / "job" / "cpu.cfs_quota_us", "400000")
    write(groups / "cpu,cpuacct" / "job" / "cpu.cfs_period_us", "100000")
    assert room().cores == 4


def test_memory_is_what_the_group_still_grants(groups: Path) -> None:
    write(groups / "own", "0::/job\n")
    write(groups / "job" / "memory.max", str(3 << 20))
    write(groups / "job" / "memory.current", str(1 << 20))
    assert room().memory_bytes == 2 << 20
    assert limits.total_memory_bytes() == 3 << 20
    assert room(ranks=2).memory_bytes == 1 << 20
    # A data set that was read fills the group with files, which are no reason to run no workers.
    write(groups / "job" / "memory.current", str(3 << 20))
    write(groups / "job" / "memory.stat", f"anon {1 << 20}\ninactive_file {1 << 20}\nactive_file {1 << 19}\nshmem 7\n")
    assert room().memory_bytes == 3 << 19
    write(groups / "job" / "memory.max", "max")
    assert room().memory_bytes > 2 << 20


def test_memory_of_the_first_version(groups: Path) -> None:
    write(groups / "own", "4:memory:/job\n")
    write(groups / "memory" / "job" / "memory.limit_in_bytes", str(3 << 20))
    write(groups / "memory" / "job" / "memory.usage_in_bytes", str(2 << 20))
    stat = "inactive_file 5\nactive_file 5\ntotal_inactive_file 100\ntotal_active_file 50\n"
    write(groups / "memory" / "job" / "memory.stat", stat)
    assert room().memory_bytes == (1 << 20) + 150


def test_a_group_path_that_leaves_the_tree_is_not_followed(groups: Path) -> None:
    write(groups / "own", "0::/../../etc\n")
    write(groups / "cpu.max", "100000 100000")
    assert 1 <= room().cores <= 64


def test_broken_group_files_count_as_none(groups: Path) -> None:
    write(groups / "own", "nonsense\n0::/job\n")
    write(groups / "job" / "cpu.max", "100000 0")
    write(groups / "job" / "memory.max", "much")
    assert room().cores == 64
    assert room().memory_bytes <= psutil.virtual_memory().total


def test_what_does_not_fit_is_left_out_with_the_reason() -> None:
    here = Room(8, memory_bytes=8 * GIB, shared_bytes=GIB)
    assert why_not(Setting(4), 10 << 20, 100 << 20, here) == ""
    assert "/dev/shm" in why_not(Setting(8, prefetch_factor=8), 10 << 20, 0, here)
    assert "workers and batches would hold" in why_not(Setting(8), 1 << 20, GIB, here)
    assert why_not(Setting(0), 1 << 50, 0, here) == ""
