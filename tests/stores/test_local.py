"""Local folders as stores, the path rules of all stores, and the choice of a store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_cachegen.errors import StoreError, StoreNotFound
from hf_cachegen.stores import HttpStore, LocalStore, open_store

CHUNK = "chunks/00.kv"


def test_reads_whole_files_and_ranges(folder: Path, chunk: bytes) -> None:
    with open_store(folder) as store:
        assert store.read("cache.json", max_bytes=100) == b'{"version": 1}'
        assert store.read(CHUNK, 10, 20, max_bytes=20) == chunk[10:30]
        assert store.read(CHUNK, len(chunk) - 5, max_bytes=5) == chunk[-5:]
        assert store.read(CHUNK, len(chunk), max_bytes=5) == b""
        assert store.read("empty", max_bytes=0) == b""
        assert store.exists(CHUNK)
        assert not store.exists("chunks")
        assert not store.exists("missing")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(0, 300_000), st.integers(0, 300_000))
def test_stream_is_the_slice(folder: Path, chunk: bytes, offset: int, size: int) -> None:
    size = min(size, len(chunk) - offset)
    streamed = b"".join(LocalStore(folder).stream(CHUNK, offset, size))
    assert streamed == chunk[offset : offset + size]


def test_large_files_come_in_pieces(folder: Path) -> None:
    (folder / "large").write_bytes(bytes(5 << 20))
    sizes = [len(piece) for piece in LocalStore(folder).stream("large", 0, 5 << 20)]
    assert sum(sizes) == 5 << 20
    assert max(sizes) <= 1 << 20


def test_refuses_more_than_allowed(folder: Path) -> None:
    store = LocalStore(folder)
    with pytest.raises(StoreError, match="300000 bytes where at most 1000"):
        store.read(CHUNK, max_bytes=1000)
    with pytest.raises(StoreError, match="at most 1000"):
        store.read(CHUNK, 0, 1001, max_bytes=1000)


def test_refuses_ranges_past_the_end(folder: Path, chunk: bytes) -> None:
    store = LocalStore(folder)
    with pytest.raises(StoreError, match="truncated"):
        list(store.stream(CHUNK, len(chunk) - 1, 2))
    with pytest.raises(ValueError, match="range"):
        store.stream(CHUNK, -1, 2)
    with pytest.raises(ValueError, match="range"):
        store.read(CHUNK, 0, -1, max_bytes=5)


def test_a_missing_file_or_folder_is_named(folder: Path) -> None:
    with pytest.raises(StoreNotFound, match=r"missing\.json"):
        LocalStore(folder).read("missing.json", max_bytes=1)
    with pytest.raises(StoreNotFound, match="nowhere"):
        open_store(folder / "nowhere")
    with pytest.raises(StoreNotFound, match="chunks"):
        LocalStore(folder).read("chunks", max_bytes=1)


@pytest.mark.parametrize(
    "path", ["", ".", "..", "../cache.json", "/etc/passwd", "a//b", "a/./b", "a\\b", "a\0b", "a/"]
)
def test_paths_that_could_leave_the_store(folder: Path, path: str) -> None:
    store = LocalStore(folder)
    with pytest.raises(ValueError, match="relative POSIX path"):
        store.read(path, max_bytes=10)
    with pytest.raises(ValueError, match="relative POSIX path"):
        store.stream(path, 0, 1)
    with pytest.raises(ValueError, match="relative POSIX path"):
        store.exists(path)


def test_links_may_not_leave_the_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (folder / "out").symlink_to(tmp_path / "secret")
    (folder / "in").symlink_to(folder / "cache.json")
    (folder / "loop").symlink_to("loop")
    store = LocalStore(folder)
    assert store.read("in", max_bytes=100) == b'{"version": 1}'
    with pytest.raises(StoreError, match="leaves the folder"):
        store.read("out", max_bytes=100)
    with pytest.raises(StoreError):
        store.read("loop", max_bytes=100)


def test_a_pipe_is_no_file(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    with pytest.raises(StoreNotFound):
        LocalStore(folder).read("pipe", max_bytes=1)


def test_location_forms(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_store(str(folder)), LocalStore)
    assert isinstance(open_store("http://127.0.0.1:9/some/folder"), HttpStore)
    monkeypatch.chdir(folder.parent)
    (folder.parent / "org" / "name").mkdir(parents=True)
    assert isinstance(open_store("org/name"), LocalStore)
    for wrong in ("nowhere", "a/b/c", "ftp://host/x", "hf://", "org/name@", ""):
        with pytest.raises(ValueError, match="expected an existing folder, a URL"):
            open_store(wrong)
