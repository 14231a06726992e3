"""Each lint finds what is planted, with evidence, and keeps silent where the fault is not."""

import time

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from fettle.inputs import growth, lints, profile
from fettle.inputs.growth import big_containers, growing_workers
from fettle.inputs.lints import duplicates, getitems_differ, lint, padding, rows_that_raise
from fettle.inputs.profile import profile_rows
from tests.inputs import loaders


def names(found: list) -> list[str]:
    assert all(item.evidence and item.advice for item in found)
    return [item.name for item in found]


def test_a_stream_that_every_worker_reads_whole_is_shown_by_its_rows() -> None:
    found = duplicates(DataLoader(loaders.Stream(), batch_size=4))
    assert names(found) == ["duplicate-data"]
    assert "64 came 2 times from two workers" in found[0].evidence
    assert duplicates(DataLoader(loaders.Shared(), batch_size=4)) == []


class Counted(torch.utils.data.IterableDataset):
    read = 0

    def __iter__(self):
        for row in range(200):
            self.read += 1
            yield torch.tensor(row)


def test_a_slow_stream_is_read_for_a_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lints, "SECONDS", 0.0)
    slow = Counted()
    assert names(duplicates(DataLoader(slow, batch_size=4))) == ["duplicate-data"]
    assert slow.read == 1


def split_in_init(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    info.dataset.mine = (info.id, info.num_workers)


class SplitByInit(torch.utils.data.IterableDataset):
    mine = (0, 1)

    def __iter__(self):
        return iter(torch.arange(200).float()[self.mine[0] :: self.mine[1]])


def test_a_stream_that_is_split_by_worker_init_fn_is_no_fault() -> None:
    assert duplicates(DataLoader(SplitByInit(), batch_size=4, worker_init_fn=split_in_init)) == []
    assert names(duplicates(DataLoader(SplitByInit(), batch_size=4))) == ["duplicate-data"]


def test_the_slow_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # Between a row of 10 us and one of milliseconds, far from both: a machine that halts for a moment is no slow row.
    monkeypatch.setattr(profile, "_LEAST_S", 5e-4)
    found = profile_rows(DataLoader(loaders.Rows(loaders.slow, 32), batch_size=8))
    assert names(found) == ["slow-transform"]
    assert "slow at loaders.py:" in found[0].says
    assert "over 32 rows" in found[0].evidence
    assert profile_rows(DataLoader(loaders.Rows(loaders.one), batch_size=8)) == []


def test_pictures_decoded_larger_than_used_and_what_draft_mode_saves() -> None:
    found = [item for item in profile_rows(DataLoader(loaders.Pictures(), batch_size=8)) if "decoded" in item.name]
    assert names(found) == ["decoded-too-large"]
    assert "640 x 480 made 128 x 96: 25 pixels decoded for each one used" in found[0].evidence
    assert "at 1/4 in draft mode" in found[0].evidence
    assert "image.draft" in found[0].advice
    assert "decoded-too-large" not in names(profile_rows(DataLoader(loaders.Pictures(draft=True), batch_size=8)))
    stored = profile_rows(DataLoader(loaders.Pictures(kind="PNG"), batch_size=8))
    assert "store them" in next(item for item in stored if item.name == "decoded-too-large").advice


def test_a_builtin_is_named_with_the_users_line_that_calls_it() -> None:
    found = profile_rows(DataLoader(loaders.Rows(loaders.hashed), batch_size=8))
    assert names(found) == ["slow-transform"]
    assert "pbkdf2_hmac" in found[0].says
    assert "called from hashed at loaders.py" in found[0].says


@pytest.mark.parametrize("as_list", [False, True])
def test_padding_before_and_after_with_its_memory(as_list: bool) -> None:
    def row(number: int) -> object:
        length = 1 + number * 7 % 61
        return [0] * length if as_list else torch.ones(length)

    found = padding(DataLoader(loaders.Rows(row), batch_size=8, shuffle=True, collate_fn=list))
    assert names(found) == ["padding"]
    assert "256 rows of 1 to 61 positions" in found[0].evidence
    assert "the largest batch goes from" in found[0].evidence
    assert "bucket_by_length(lengths, 8)" in found[0].advice
    assert padding(DataLoader(loaders.Rows(loaders.one), batch_size=8)) == []


def test_workers_that_copy_what_they_were_forked_with() -> None:
    found = growing_workers(DataLoader(Subset(loaders.Big(), range(256)), batch_size=8))
    assert names(found) == ["growing-workers"]
    assert "200,000 Python objects in .dataset.names" in found[0].says
    assert big_containers(loaders.Rows(loaders.one)) is None


def test_small_whole_numbers_are_shared_by_all() -> None:
    rows = loaders.Rows(loaders.one)
    rows.targets = [number % 10 for number in range(200_000)]
    assert big_containers(rows) is None
    rows.targets[::200] = range(1000, 2000)
    assert big_containers(rows)


def test_a_leak_grows_with_each_pass_over_the_same_rows_and_a_cache_does_not() -> None:
    found = growing_workers(DataLoader(loaders.Leaking(), batch_size=8))
    assert names(found) == ["leaking-worker"]
    assert "a row" in found[0].evidence
    assert growing_workers(DataLoader(loaders.Caching(), batch_size=8)) == []


def test_slow_rows_are_read_again_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def slow(row: int) -> torch.Tensor:
        read.append(row)
        return torch.ones(1)

    monkeypatch.setattr(growth, "_SECONDS", 0.0)
    assert growth._grow(DataLoader(loaders.Rows(slow, 64), batch_size=8))[1] == 4
    monkeypatch.setattr("fettle.inputs.lint.SECONDS", 0.0)
    read.clear()
    assert getitems_differ(DataLoader(loaders.Batched(slow), batch_size=8)) == []
    assert read == [0, 0, 0]


def broken_tenths(row: int) -> torch.Tensor:
    if row % 10 == 7:
        raise RuntimeError("\x1b[31mno such\nfile")
    return torch.ones(1)


def test_rows_that_raise_are_counted_and_the_first_is_named() -> None:
    (found,) = rows_that_raise(loaders.bad_item())
    assert found.says == "A run over this data set ends with an error: item 137 raised ValueError: cannot be read."
    assert found.evidence.startswith("1 of 256 rows that were read raises (item 137)")
    (found,) = rows_that_raise(DataLoader(loaders.Rows(broken_tenths, 100), batch_size=8))
    assert "item 7 raised RuntimeError: no such." in found.says
    assert found.evidence == "10 of 100 rows that were read raise (item 7, and 9 more: 17, 27, 37, 47)."
    again = DataLoader(loaders.Rows(broken_tenths, 100), batch_size=8, sampler=[7, 7, 8, 7, 9])
    assert rows_that_raise(again)[0].evidence == "1 of 3 rows that were read raises (item 7)."
    assert rows_that_raise(DataLoader(loaders.Rows(loaders.one), batch_size=8)) == []
    assert rows_that_raise(DataLoader(loaders.Stream(), batch_size=4)) == []


def waiting(row: int) -> torch.Tensor:
    time.sleep(0.005)
    return torch.ones(1)


def test_rows_that_wait_are_told_to_be_fetched_concurrently() -> None:
    (found,) = profile_rows(DataLoader(loaders.Rows(waiting, 24), batch_size=8))
    assert found.name == "row-waits"
    assert "waiting in" in found.says
    assert "called from waiting at test_lints.py" in found.says
    assert "concurrently" in found.advice
    assert "once beforehand" not in found.advice


def test_getitems_that_gives_other_rows() -> None:
    assert names(getitems_differ(DataLoader(loaders.WrongBatched(loaders.row_number)))) == ["batch-fetch-differs"]
    assert getitems_differ(DataLoader(loaders.Batched(loaders.row_number))) == []


def test_a_lint_that_fails_is_a_note_and_the_others_go_on() -> None:
    found, notes = lint(loaders.bad_item())
    assert names(found) == ["row-raises"]
    assert notes
    assert any("cannot be read" in note for note in notes)
    assert all("\n" not in note for note in notes)
