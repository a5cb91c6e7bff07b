"""Folders that are replaced whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hf_cachegen.artifact.files import check_writable, holds_files, replace_folder
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
