"""Copies that break, meet what others have left, or find the file damaged."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_cachegen.bench.link import Gone, LinkServer
from hf_cachegen.errors import FormatError, StoreError, StoreNotFound, StoreUnreachable
from hf_cachegen.stores import HttpStore, LocalStore
from hf_cachegen.stores.download import RemoteFile, download, part_of

CHUNK = "chunks/00.kv"
PIECE_BYTES = 7_000


class BreakingStore(LocalStore):
    """Breaks after so many bytes of each read, and damages so many reads.

    Attributes
    ----------
    sent
        (offset, bytes) of each read so far.
    """

    def __init__(self, folder: Path, breaks: list[int] | None = None, damage: int = 0) -> None:
        super().__init__(folder)
        self.sent: list[tuple[int, int]] = []
        self._breaks = breaks or []
        self._damage = damage

    def _pieces(
        self, path: str, offset: int, size: int | None, max_bytes: int
    ) -> Generator[bytes, None, None]:
        data = b"".join(super()._pieces(path, offset, size, max_bytes))
        at = self._breaks.pop(0) if self._breaks else len(data)
        self.sent.append((offset, min(at, len(data))))
        if self._damage:
            self._damage -= 1
            data = bytes([data[0] ^ 1]) + data[1:]
        for start in range(0, min(at, len(data)), PIECE_BYTES):
            yield data[start : min(start + PIECE_BYTES, at)]
        if at < len(data):
            raise StoreError("the link is down")


@pytest.fixture
def file(chunk: bytes) -> RemoteFile:
    """What is known of the chunk."""
    return RemoteFile(CHUNK, len(chunk), hashlib.sha256(chunk).hexdigest())


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Where it is to go."""
    (tmp_path / "copy").mkdir()
    return tmp_path / "copy" / "00.kv"


def attempt(store: LocalStore, file: RemoteFile, target: Path) -> int | None:
    """What the progress adds up to; None if the link broke."""
    seen: list[int] = []
    try:
        download(store, file, target, progress=seen.append)
        return sum(seen)
    except StoreError as error:
        message = str(error)
    kept = part_of(target).stat().st_size
    assert kept == 0 or f"{kept} of {file.size_bytes} bytes are kept" in message
    assert kept == sum(seen)
    assert not target.exists()
    return None


@given(breaks=st.lists(st.integers(0, 320_000), max_size=8))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_byte_is_read_twice(
    folder: Path, chunk: bytes, file: RemoteFile, target: Path, breaks: list[int]
) -> None:
    target.unlink(missing_ok=True)
    store = BreakingStore(folder, list(breaks))
    results = [attempt(store, file, target)]
    while results[-1] is None:
        results.append(attempt(store, file, target))
    assert results[-1] == len(chunk)
    assert target.read_bytes() == chunk
    assert os.listdir(target.parent) == [target.name]
    ends = [0]
    for offset, size in store.sent:
        assert offset == ends[-1]
        ends.append(offset + size)
    assert ends[-1] == len(chunk)


@pytest.mark.parametrize("size", [0, 1, 150_000, 300_000, 300_001])
def test_remains_of_another_file_are_replaced(
    folder: Path, chunk: bytes, file: RemoteFile, target: Path, size: int
) -> None:
    part_of(target).write_bytes(b"x" * size)
    assert attempt(LocalStore(folder), file, target) == len(chunk)
    assert target.read_bytes() == chunk
    assert os.listdir(target.parent) == [target.name]


def test_what_is_there_is_not_read(
    folder: Path, chunk: bytes, file: RemoteFile, target: Path, recording_store: Any
) -> None:
    store = recording_store(folder)
    part_of(target).write_bytes(chunk)  # complete, but not yet in its place
    for _ in range(2):
        assert attempt(store, file, target) == len(chunk)
        assert target.read_bytes() == chunk
    assert store.reads == []
    target.write_bytes(b"#" + chunk[1:])
    assert attempt(store, file, target) == len(chunk)
    assert target.read_bytes() == chunk


def test_damage_on_the_way_is_made_good_and_damage_in_the_store_is_told(
    folder: Path, chunk: bytes, file: RemoteFile, target: Path
) -> None:
    assert attempt(BreakingStore(folder, damage=1), file, target) == len(chunk)
    target.unlink()
    seen: list[int] = []
    with pytest.raises(FormatError, match=f"{CHUNK}.*{file.digest}.*damaged there"):
        download(BreakingStore(folder, damage=2), file, target, progress=seen.append)
    assert sum(seen) == 0
    assert os.listdir(target.parent) == []


def test_missing_file(folder: Path, file: RemoteFile, target: Path) -> None:
    (folder / CHUNK).unlink()
    with pytest.raises(StoreNotFound) as caught:
        download(LocalStore(folder), file, target)
    assert "kept" not in str(caught.value)
    assert not target.exists()


@pytest.mark.parametrize("begun", [0, 100_000, 300_000, 300_001])
@pytest.mark.parametrize("over_http", [False, True])
def test_size_that_the_file_cannot_have(
    folder: Path, chunk: bytes, file: RemoteFile, target: Path, begun: int, over_http: bool
) -> None:
    """However much is there, of that file or longer, asking again would change nothing."""
    part_of(target).write_bytes((chunk + b"#")[:begun])
    wrong = dataclasses.replace(file, size_bytes=1 << 50)
    seen: list[int] = []
    with LinkServer(folder) as server:
        store = HttpStore(server.url) if over_http else LocalStore(folder)
        with store, pytest.raises(FormatError, match=r"truncated.*nothing of it is kept"):
            download(store, wrong, target, progress=seen.append)
    assert sum(seen) == 0
    assert os.listdir(target.parent) == []


@pytest.fixture(params=["file", "nothing", "folder"])
def elsewhere(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What a link may point to, outside the folder that is written to."""
    place = tmp_path / "elsewhere"
    if request.param == "file":
        place.write_bytes(b"precious")
    elif request.param == "folder":
        place.mkdir()
    return place


def state_of(place: Path) -> object:
    """What changes if somebody writes there."""
    if place.is_dir():
        return os.listdir(place)
    return place.read_bytes() if place.exists() else None


def test_links_are_not_written_through(
    folder: Path, chunk: bytes, file: RemoteFile, target: Path, elsewhere: Path
) -> None:
    before = state_of(elsewhere)
    for link in (part_of(target), target):
        target.unlink(missing_ok=True)
        link.symlink_to(elsewhere)
        assert attempt(LocalStore(folder), file, target) == len(chunk)
        assert target.read_bytes() == chunk
        assert not target.is_symlink()
        assert os.listdir(target.parent) == [target.name]
        assert state_of(elsewhere) == before


def test_empty_file(folder: Path, target: Path) -> None:
    download(LocalStore(folder), RemoteFile("empty", 0, hashlib.sha256().hexdigest()), target)
    assert target.read_bytes() == b""


def test_copy_that_is_not_wanted_any_more_keeps_what_came(
    folder: Path, chunk: bytes, file: RemoteFile, target: Path
) -> None:
    wanted = iter([True, True, False])
    with pytest.raises(StoreError, match="not wanted any more"):
        download(BreakingStore(folder), file, target, is_wanted=lambda: next(wanted))
    assert part_of(target).read_bytes() == chunk[: 3 * PIECE_BYTES]


def test_several_may_copy_the_same_file_at_once(
    folder: Path, chunk: bytes, file: RemoteFile, target: Path
) -> None:
    with LinkServer(folder, rate_bytes_per_s=6e6) as server, ThreadPoolExecutor(6) as pool:

        def copy(_: int) -> bytes:
            with HttpStore(server.url) as store:
                download(store, file, target)
                return target.read_bytes()

        assert list(pool.map(copy, range(6))) == [chunk] * 6
    assert os.listdir(target.parent) == [target.name]


def test_server_that_is_gone_and_comes_back(
    folder: Path, chunk: bytes, file: RemoteFile, target: Path
) -> None:
    with LinkServer(folder, faults=[Gone(0, 200_000)], rate_bytes_per_s=2e5) as server:
        with HttpStore(server.url, retries=0) as store:
            with pytest.raises(StoreUnreachable, match=r"of 300000 bytes are kept"):
                download(store, file, target)
            kept = part_of(target).stat().st_size
            assert 0 < kept <= 200_000
            server.is_gone = False
            download(store, file, target)
        assert target.read_bytes() == chunk
        assert [record.start for record in server.requests] == [0, kept]
