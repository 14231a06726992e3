"""Pipelines whose cost is known: they merely wait. No time is asserted, only what follows from ratios of many."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fettle.errors import UsageError
from fettle.inputs import bucket_by_length, measure_and_search, padding_waste
from fettle.inputs.search import Measured, Setting, candidates, cannot_help, run_once, smallest_of_the_best

HEAD = """
import os, time
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
class Rows(Dataset):
    def __init__(self, item):
        self.item = item
    def __len__(self):
        return 256
    def __getitem__(self, row):
        return self.item(row)
def wait(row):
    time.sleep(0.004)
    return torch.ones(4)
"""


def write(folder: Path, body: str) -> str:
    path = folder / "pipe.py"
    path.write_text(HEAD + textwrap.dedent(body))
    return f"{path}:made"


def test_workers_are_found_where_loading_waits_and_the_bound_is_stated(tmp_path: Path) -> None:
    target = write(
        tmp_path,
        """
        def made():
            return DataLoader(Rows(wait), batch_size=8), lambda batch: time.sleep(0.01)
        """,
    )
    found = measure_and_search(target, slice_s=0.4)
    assert found.waiting > 0.5  # 32 ms of loading beside 10 ms of work
    assert found.bound > 2
    assert found.best.setting.num_workers >= 2
    assert found.best.rate > 1.5 * found.given.rate
    assert f"num_workers={found.best.setting.num_workers}" in found.code
    assert not [c for c in psutil.Process().children(recursive=True) if "fettle.inputs._run" in " ".join(c.cmdline())]


def test_workers_that_cannot_help_are_not_recommended(tmp_path: Path) -> None:
    target = write(
        tmp_path,
        """
        def made():
            return DataLoader(Rows(lambda row: torch.ones(4)), batch_size=8), lambda batch: time.sleep(0.05)
        """,
    )
    found = measure_and_search(target, slice_s=0.3)
    assert found.verdict.startswith("Workers cannot help")
    assert found.best is found.given


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("def made():\n    return 3", "returned a int"),
        ("def made():\n    raise KeyError('x')", "raised KeyError"),
        ("def made():\n    return DataLoader([])", "gives no batch"),
        (
            "def bad(row):\n    raise ValueError(f'row {row} is broken')\ndef made():\n    return Rows(bad)",
            "row 0 is broken",
        ),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        measure_and_search(write(tmp_path, body), slice_s=0.1)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_worker_that_hangs_or_dies_is_one_failed_run_and_leaves_no_orphan(tmp_path: Path) -> None:
    target = write(
        tmp_path,
        """
        from torch.utils.data import get_worker_info
        def hang(row):
            if get_worker_info() is not None:
                open(os.environ["MARK"], "w").write(str(os.getpid()))
                time.sleep(300)
            return torch.ones(1)
        def die(row):
            if get_worker_info() is not None:
                os._exit(3)
            return torch.ones(1)
        def made():
            return Rows(hang)
        def dies():
            return Rows(die)
        """,
    )
    mark = tmp_path / "pid"
    os.environ["MARK"] = str(mark)
    answer = run_once(target, Setting(1), 0.1, 12.0)
    assert "timed out" in answer["error"]
    for _ in range(50):
        if not psutil.pid_exists(int(mark.read_text())):
            break
        time.sleep(0.1)
    else:
        pytest.fail("the loader's worker outlived its run")
    answer = run_once(target.replace(":made", ":dies"), Setting(1), 0.1, 60.0)
    assert "exited unexpectedly" in answer["error"]


def test_lints_show_their_evidence(tmp_path: Path) -> None:
    target = write(
        tmp_path,
        """
        class Stream(IterableDataset):
            def __iter__(self):
                return iter(torch.arange(200).float())
        def made():
            return DataLoader(Stream(), batch_size=4)
        def slow(row):
            total = 0
            for i in range(20000):
                total += i
            return torch.ones(1)
        def transform():
            return Rows(slow)
        def ragged():
            return DataLoader(Rows(lambda row: torch.ones(1 + row * 7 % 61)), batch_size=8, collate_fn=list)
        class Big(Rows):
            def __init__(self):
                super().__init__(lambda row: torch.ones(1))
                self.names = [str(i) for i in range(100_000)]
        def big():
            return Big()
        """,
    )
    for factory, name in (("made", "duplicate-data"), ("transform", "slow-transform"), ("ragged", "padding"),
                          ("big", "growing-workers")):  # fmt: skip
        answer = run_once(target.replace(":made", f":{factory}"), None, 0, 60, do="lint")
        assert [item["name"] for item in answer["lints"]] == [name], (factory, answer)
        assert answer["lints"][0]["evidence"]


def test_the_command(tmp_path: Path) -> None:
    target = write(tmp_path, "def made():\n    return DataLoader(Rows(wait), batch_size=4)")
    command = [sys.executable, "-c", "from fettle.cli import main; main()", "data"]
    curve = tmp_path / "curve.svg"
    done = subprocess.run(
        [*command, target, "--slice", "0.2s", "--json", "-o", str(curve)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["settings"]
    assert curve.read_text().startswith("<svg")
    wrong = subprocess.run([*command, str(tmp_path / "none.py:made")], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "no such file" in wrong.stderr


def test_the_given_setting_stays_unless_something_is_clearly_faster() -> None:
    given = Measured(Setting(4), [98.0])
    others = [Measured(Setting(1), [60.0]), Measured(Setting(2), [99.0]), Measured(Setting(8), [100.0])]
    assert smallest_of_the_best([given, *others], given) is given
    slow = Measured(Setting(0), [50.0])
    assert smallest_of_the_best([slow, *others], slow).setting.num_workers == 2


def test_more_workers_than_cores_only_where_loading_waits() -> None:
    alone = {"cpu_share": 0.1, "waits": [0.1], "cuda": False, "batch_bytes": 100}
    assert max(s.num_workers for s in candidates(alone, 0.1, 0.01, 2, Setting())) == 8
    busy = {**alone, "cpu_share": 1.0}
    assert max(s.num_workers for s in candidates(busy, 0.1, 0.01, 2, Setting())) == 2
    huge = {**alone, "batch_bytes": 1 << 50}
    assert candidates(huge, 0.1, 0.01, 2, Setting()) == []
    assert cannot_help(0.1, 0.1, 1, 0.99)
    assert not cannot_help(0.1, 0.1, 2, 0.99)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 500), min_size=1, max_size=200), size=st.integers(1, 9), ranks=st.integers(1, 4),
    pool=st.integers(1, 20), drop=st.booleans(), epoch=st.integers(0, 3),
)  # fmt: skip
def test_buckets_cover_every_row_once(lengths, size, ranks, pool, drop, epoch) -> None:
    seen: list[int] = []
    per_rank = []
    for rank in range(ranks):
        sampler = bucket_by_length(lengths, size, pool=pool, drop_last=drop, rank=rank, ranks=ranks, seed=3)
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert batches == list(sampler)  # the same epoch, the same order
        assert len(batches) == len(sampler)
        assert all(len(batch) <= size for batch in batches)
        per_rank.append(len(batches))
        seen += [row for batch in batches for row in batch]
    assert len(set(per_rank)) == 1  # ranks that run out first would hang the others
    if drop:
        assert len(seen) == len(set(seen))
    else:
        assert set(seen) == set(range(len(lengths)))


def test_bucketing_cuts_padding_and_bad_arguments_are_told() -> None:
    import random

    draw = random.Random(0)
    lengths = [int(draw.lognormvariate(4.5, 0.8)) + 1 for _ in range(3200)]
    rows = list(range(3200))
    plain = padding_waste(lengths, [rows[i : i + 32] for i in range(0, 3200, 32)])
    assert padding_waste(lengths, list(bucket_by_length(lengths, 32))) < 0.4 * plain
    for options in ({"batch_size": 0}, {"batch_size": 2, "pool": 0}, {"batch_size": 2, "rank": 2, "ranks": 2}):
        with pytest.raises(UsageError):
            bucket_by_length([1, 2, 3], **options)
    with pytest.raises(UsageError):
        bucket_by_length([], 2)
