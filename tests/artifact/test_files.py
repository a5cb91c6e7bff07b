"""Folders that are replaced whole or not at all."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hf_cachegen.artifact.files import (
    check_writable,
    holds_files,
    replace_folder,
    temporaries,
    write_file,
)
from hf_cachegen.errors import StoreError


def test_folder_holds_files_if_all_their_bytes_are_there(tmp_path: Path) -> None:
    files = {"a": b"1", "b": b""}
    assert not holds_files(tmp_path / "none", files)
    replace_folder(tmp_path / "one", files)
    assert holds_files(tmp_path / "one", files)
    assert holds_files(tmp_path / "one", {"a": b"1"})
    assert not holds_files(tmp_path / "one", {"a": b"2"})
    assert not holds_files(tmp_path / "one", {**files, "c": b""})


def test_replaced_folder_has_the_new_files_only(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "folder"
    replace_folder(target, {"a": b"1", "b": b"2"})
    replace_folder(target, {"b": b"3"})
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {"b": b"3"}
    assert os.listdir(target.parent) == ["folder"]


def test_folder_that_cannot_be_written_stays_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    replace_folder(target, {"a": b"1"})
    with pytest.raises(OSError, match="missing"):
        replace_folder(target, {"a": b"2", "missing/b": b"3"})
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {"a": b"1"}
    assert os.listdir(tmp_path) == ["folder"]


def test_folder_comes_back_if_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "folder"
    replace_folder(target, {"a": b"1"})
    rename = Path.rename

    def failing(path: Path, to: Path) -> Path:
        if path.name == "new":
            raise OSError("the disk is full")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="the disk is full"):
        replace_folder(target, {"a": b"2"})
    assert (target / "a").read_bytes() == b"1"
    assert os.listdir(tmp_path) == ["folder"]


def test_file_is_replaced_whole_or_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "file"
    for data in (b"one", b"two"):
        write_file(place, data)
        assert place.read_bytes() == data
    for error in (OSError("the disk is full"), KeyboardInterrupt()):

        def fail(*_: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises((StoreError, KeyboardInterrupt)):
            write_file(place, b"three")
        assert place.read_bytes() == b"two"
        assert os.listdir(tmp_path) == ["file"]


def test_file_replaces_a_link(tmp_path: Path) -> None:
    elsewhere, place = tmp_path / "elsewhere", tmp_path / "file"
    elsewhere.write_bytes(b"precious")
    place.symlink_to(elsewhere)
    write_file(place, b"mine")
    assert not place.is_symlink()
    assert (place.read_bytes(), elsewhere.read_bytes()) == (b"mine", b"precious")


def test_those_who_write_a_file_at_once_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, both = tmp_path / "file", threading.Barrier(2, timeout=60)
    fsync = os.fsync

    def fsync_together(descriptor: int) -> None:
        both.wait()  # the temporary files of both are there, and none has its name yet
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync_together)
    contents = [b"a" * 1000, b"b" * 10]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda data: write_file(place, data), contents))
    assert place.read_bytes() in contents
    assert os.listdir(tmp_path) == ["file"]


def test_temporaries_are_what_an_interrupted_write_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.tmp").write_text("mine")
    monkeypatch.setattr(os, "replace", lambda *_: None)
    write_file(tmp_path / "file", b"data")
    assert [path.read_bytes() for path in temporaries(tmp_path)] == [b"data"]


def test_folder_that_can_be_made_or_written_to(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, tmp_path / "a" / "b", Path("a"), Path(".")):
        check_writable(folder)
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "a" / "b", Path("file/a")):
        with pytest.raises(StoreError, match="is a file"):
            check_writable(folder)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can add to")
@pytest.mark.parametrize("folder", [Path("/proc/a"), Path("/proc/self"), Path("/proc/self/a/b")])
def test_folder_that_nobody_can_write_to(folder: Path) -> None:
    """Not even a superuser, whom permissions do not stop."""
    with pytest.raises(StoreError, match=f"cannot write to {folder}: .*; choose another folder"):
        check_writable(folder)


def test_folder_without_permission(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    if os.access(closed, os.W_OK):
        pytest.skip("a superuser may write anywhere")
    for folder in (closed, closed / "a"):
        with pytest.raises(StoreError, match=f"cannot write to {folder}: Permission denied"):
            check_writable(folder)


def test_name_that_no_folder_can_have(tmp_path: Path) -> None:
    for folder in (tmp_path / ("a" * 300), tmp_path / ("a" * 300) / "b"):
        with pytest.raises(StoreError, match=r"cannot write to .*; choose another folder"):
            check_writable(folder)
