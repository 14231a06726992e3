import math
import os
import shlex
import stat
import struct
import tempfile
from pathlib import Path

import pytest

from fettle.errors import UsageError
from fettle.files import (
    cache_folder,
    check_writable,
    for_compilers,
    plain,
    read_bytes,
    read_text,
    read_toml,
    whole,
    write_bytes,
    write_text,
)


def test_a_file_is_written_whole_and_its_folder_made(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "müsli.txt"
    check_writable(path, None)
    assert not path.parent.exists()
    write_text(path, "eins")
    write_text(path, "zwei ½")
    assert path.read_text(encoding="utf-8") == "zwei ½"
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_a_name_of_the_most_bytes_that_there_may_be_is_written(tmp_path: Path) -> None:
    path = tmp_path / f"{'模' * 83}.json"
    write_text(path, "")
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_a_file_is_for_those_whom_the_umask_lets_read_it(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_text(tmp_path / "own", "")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o600


def test_a_block_that_raises_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    write_bytes(path, b"before")
    with pytest.raises(KeyboardInterrupt), whole(path) as partial:  # noqa: PT012
        partial.write_bytes(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"before"
    assert [item.name for item in tmp_path.iterdir()] == ["kept"]


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path: Path) -> None:
    write_text(tmp_path / "real", "before")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_text(tmp_path / "link", "after")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "after"
    check_writable(os.devnull)
    write_text(os.devnull, "nothing")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


@pytest.mark.parametrize("place", [".", "file/below", "a" * 300, "/proc/nothing/here"])
def test_what_cannot_be_written_is_said_before_and_after(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    if place.startswith("a"):
        with pytest.raises(UsageError, match="cannot write"):
            write_text(tmp_path / place, "x")
        return
    for refused in (check_writable, lambda path: write_text(path, "x")):
        with pytest.raises(UsageError, match="cannot write"):
            refused(tmp_path / place)
    assert [item.name for item in tmp_path.iterdir()] == ["file"]


def test_a_file_from_outside_is_read_or_one_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("\ufeffhalf ½".encode())
    assert read_text(tmp_path / "text") == "half ½"
    (tmp_path / "binary").write_bytes(b"\xff" * 2048)
    assert read_bytes(tmp_path / "binary", 2048) == b"\xff" * 2048
    for path, most, words in [
        ("binary", 2047, "is too large: more than 0.00195 MiB"),
        ("binary", 4096, "is not text in UTF-8"),
        ("missing", 10, "cannot read .*missing: No such file or directory"),
        (".", 10, "Is a directory"),
    ]:
        with pytest.raises(UsageError, match=words):
            read_text(tmp_path / path, most)


def test_what_json_cannot_hold_becomes_what_it_can() -> None:
    class Odd:
        def __str__(self) -> str:
            return "odd"

    found = plain({1: (math.nan, -math.inf, 2.5), "odd": Odd(), "special": Odd}, {type: lambda kind: kind.__name__})
    assert found == {"1": [None, None, 2.5], "odd": "odd", "special": "Odd"}


def test_a_compiler_is_told_a_path_that_needs_no_quotes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert for_compilers(tmp_path / "cache") == str(tmp_path / "cache")
    folders = [tmp_path / "my models" / "cache", tmp_path / "bob's" / "cache"]
    links = [Path(for_compilers(folder)) for folder in folders]
    assert [for_compilers(folder) for folder in folders] == [str(link) for link in links]
    for link, folder in zip(links, folders, strict=True):
        (link / "made").write_text("here")
        assert (folder / "made").read_text() == "here"
        assert shlex.quote(str(link)) == str(link)
    links[0].unlink()
    links[0].symlink_to(tmp_path)  # somebody else's is not followed
    assert for_compilers(folders[0]) == str(folders[0])


def test_what_a_killed_compiler_left_half_written_is_compiled_again(tmp_path: Path) -> None:
    library = bytearray(4096 + 10 * 64)  # ten section headers at its end
    library[:5] = b"\x7fELF\x02"
    struct.pack_into("<Q", library, 40, 4096)
    struct.pack_into("<HH", library, 58, 64, 10)
    for name, data, seconds_ago in (
        ("whole.so", library, 60), ("empty.so", b"", 60), ("torn.so", library[:-1], 60), ("blank.o", bytes(4096), 60),
        ("written.so", b"", 0), ("empty.cpp", b"", 60),
    ):  # fmt: skip
        file = tmp_path / "ab" / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(data)
        os.utime(file, (file.stat().st_mtime - seconds_ago,) * 2)
    for_compilers(tmp_path)
    assert sorted(file.name for file in tmp_path.glob("*/*")) == ["empty.cpp", "whole.so", "written.so"]


def test_a_user_without_a_folder_is_told_to_set_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "FETTLE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where the system knows no such user
    with pytest.raises(UsageError, match="set HOME to a folder"):
        cache_folder("one")
    monkeypatch.setenv("FETTLE_CACHE", str(tmp_path))
    assert cache_folder("one") == tmp_path / "fettle" / "one"


@pytest.mark.parametrize("text", [".".join(["a"] * 200) + " = 1", "[x . " + ' . "y z"' * 200 + "]"])
def test_a_key_of_very_many_parts_is_not_parsed(tmp_path: Path, text: str) -> None:
    path = tmp_path / "one.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match="a hundred parts"):
        read_toml(path)
    path.write_text("a.b.c = [" + "0.5, " * 200 + "]")
    assert len(read_toml(path)["a"]["b"]["c"]) == 200
