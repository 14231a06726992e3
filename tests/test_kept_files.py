"""Folders that are kept: whole, sound, bounded."""

import os
import time

import pytest

from fettle import kept_files
from fettle.kept_files import is_sound, keep, whole_folder


def write(text):
    return lambda folder: (folder / "a").write_text(text) and (folder / "b").write_text("more")


def test_what_was_kept_is_sound_until_a_file_is_changed_added_or_lost(tmp_path):
    folder = tmp_path / "cache" / "one"
    assert not is_sound(folder)
    keep(folder, write("text"), 8)
    assert is_sound(folder)
    changes = [
        lambda: (folder / "a").write_text("tex_"), lambda: (folder / "c").touch(), lambda: (folder / "b").unlink(),
        lambda: (folder / kept_files.SUMS).write_text("[]"), lambda: (folder / kept_files.SUMS).write_bytes(b"\xff"),
    ]  # fmt: skip
    for change in changes:
        keep(folder, write("text"), 8)
        assert is_sound(folder)
        change()
        assert not is_sound(folder)


def test_what_could_not_be_written_is_not_kept(tmp_path):
    with pytest.raises(RuntimeError):
        keep(tmp_path / "one", lambda folder: (folder / "a").write_text("half") and fail(), 4)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_stays_what_it_was_until_another_is_whole(tmp_path):
    place = tmp_path / "one"
    for text in ("first", "second"):
        with whole_folder(place) as made:
            (made / "a").write_text(text)
    with pytest.raises(RuntimeError), whole_folder(place) as made:
        (made / "a").write_text("half") and fail()
    assert (place / "a").read_text() == "second"
    assert list(tmp_path.iterdir()) == [place]


def test_what_is_too_large_is_not_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_files, "MOST_BYTES", 100)
    with pytest.raises(OSError, match="no room"):
        keep(tmp_path / "one", lambda folder: fail(), 51)
    assert list(tmp_path.iterdir()) == []


def fail():
    raise RuntimeError


def test_those_used_longest_ago_go_first_and_what_killed_processes_left(tmp_path, monkeypatch):
    abandoned = tmp_path / ".abc"
    abandoned.mkdir()
    os.utime(abandoned, (time.time() - 1e6,) * 2)
    for index in range(3):
        keep(tmp_path / str(index), write("x" * 1000), 1004)
        os.utime(tmp_path / str(index) / kept_files.SUMS, (index, index))
    assert is_sound(tmp_path / "0")  # used
    monkeypatch.setattr(kept_files, "MOST_BYTES", 2600)
    keep(tmp_path / "3", write("x" * 1000), 1004)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["0", "3"]
