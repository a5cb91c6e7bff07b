"""Tables that come in pieces, to several at once, and to processes that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import filelock
import pytest

from hf_cachegen.bench.link import LinkServer
from hf_cachegen.bench.loopback import Link
from hf_cachegen.codec.transform_tables import TransformTables
from hf_cachegen.errors import FormatError, StoreError
from hf_cachegen.layout import KVLayout, LayerSpec, TensorSpec
from hf_cachegen.stores import HttpStore, LocalStore
from hf_cachegen.stores.download import part_of
from hf_cachegen.tables import RECORD_NAME, ModelTable, TableRecord
from hf_cachegen.tables import download as tables_download
from hf_cachegen.tables.download import LOCK_NAME, arrived_bytes, download_table, stream_table

TENSORS = tuple(TensorSpec(name=name, heads=4, dim=32) for name in ("keys", "values"))
LAYOUT = KVLayout(
    dtype="float32", ropes={}, layers=(LayerSpec(kind="full_attention", tensors=TENSORS),) * 4
)
TRANSFORM = "transform.safetensors"

FETCH = """
import sys
from pathlib import Path
from hf_cachegen.stores import HttpStore
from hf_cachegen.tables import TableRecord
from hf_cachegen.tables.download import download_table

with HttpStore(sys.argv[1]) as store:
    download_table(TableRecord.read(store), store, "", Path(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def build(random_transform_tables: Callable[..., TransformTables]) -> Callable[[int], ModelTable]:
    """``build(seed)``: a table of some 500 kB."""

    def build(seed: int) -> ModelTable:
        fields = {"model_id": "me/it", "config": "ab" * 16, "layout": LAYOUT, "data": (("a", 1),)}
        return ModelTable.build(random_transform_tables(LAYOUT, seed), **fields)

    return build


@pytest.fixture(scope="module")
def table(build: Callable[[int], ModelTable]) -> ModelTable:
    return build(0)


@pytest.fixture
def folder(table: ModelTable, tmp_path: Path) -> Path:
    """Where the table is."""
    return table.save(tmp_path / "published")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Where it is to go; the folder it is in has nothing else."""
    return tmp_path / "copies" / "table"


def fetch(folder: Path, target: Path) -> ModelTable:
    store = LocalStore(folder)
    return download_table(TableRecord.read(store), store, "", target)


def sent_bytes(server: LinkServer) -> int:
    """Of the statistics."""
    return sum(record.sent_bytes for record in server.requests if record.path == TRANSFORM)


def check_alone(target: Path, table: ModelTable) -> None:
    """The table is there, and nothing beside it."""
    assert ModelTable.load(LocalStore(target)).payloads == table.payloads
    assert os.listdir(target.parent) == [target.name]
    assert {path.name for path in target.iterdir()} == {RECORD_NAME, TRANSFORM}


def test_table_is_copied_once(
    table: ModelTable, folder: Path, target: Path, recording_store: type
) -> None:
    found = fetch(folder, target)
    assert (found.record, found.payloads) == (table.record, table.payloads)
    check_alone(target, table)
    store = recording_store(folder)
    seen: list[int] = []
    download_table(table.record, store, "", target, progress=seen.append)
    assert store.paths == []
    assert sum(seen) == len(table.payloads[TRANSFORM])


@pytest.mark.parametrize("name", [RECORD_NAME, TRANSFORM])
@pytest.mark.parametrize("damage", [None, b"", b"{}"])
def test_only_what_is_damaged_is_copied_again(
    table: ModelTable,
    folder: Path,
    target: Path,
    recording_store: type,
    name: str,
    damage: bytes | None,
) -> None:
    fetch(folder, target)
    (target / name).unlink() if damage is None else (target / name).write_bytes(damage)
    store = recording_store(folder)
    download_table(table.record, store, "", target)
    assert store.paths == ([] if name == RECORD_NAME else [TRANSFORM])
    check_alone(target, table)


def test_another_table_stays_until_the_new_one_is_complete(
    build: Callable[[int], ModelTable], table: ModelTable, folder: Path, target: Path
) -> None:
    other = build(1)
    other.save(target)
    data = (folder / TRANSFORM).read_bytes()
    (folder / TRANSFORM).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(FormatError, match=TRANSFORM):
        fetch(folder, target)
    assert ModelTable.load(LocalStore(target)).payloads == other.payloads
    (folder / TRANSFORM).write_bytes(data)
    fetch(folder, target)
    check_alone(target, table)


def test_folder_of_other_files_is_not_touched(folder: Path, target: Path) -> None:
    target.mkdir(parents=True)
    (target / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="holds other files"):
        fetch(folder, target)
    assert os.listdir(target.parent) == [target.name]


def test_those_who_come_at_once_share_one_copy(
    table: ModelTable, folder: Path, target: Path
) -> None:
    with LinkServer(folder, rate_bytes_per_s=2e6) as server, ThreadPoolExecutor(8) as pool:

        def copy(_: int) -> ModelTable:
            with HttpStore(server.url) as store:
                return download_table(table.record, store, "", target)

        found = list(pool.map(copy, range(8)))
        assert sent_bytes(server) == len(table.payloads[TRANSFORM])
    assert all(one.payloads == table.payloads for one in found)
    check_alone(target, table)


def test_who_waits_for_another_may_give_up(table: ModelTable, folder: Path, target: Path) -> None:
    part_of(target).mkdir(parents=True)
    wanted = threading.Event()
    wanted.set()
    with filelock.FileLock(part_of(target) / LOCK_NAME), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            download_table, table.record, LocalStore(folder), "", target, is_wanted=wanted.is_set
        )
        time.sleep(0.1)
        assert not waiting.done()
        wanted.clear()
        with pytest.raises(StoreError, match="not wanted any more"):
            waiting.result(timeout=20)
    assert not target.exists()
    fetch(folder, target)
    check_alone(target, table)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize("end", ["stops", "completes", "was wrong"])
def test_who_waits_for_another_sees_what_arrives(
    table: ModelTable,
    folder: Path,
    target: Path,
    recording_store: type,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
) -> None:
    """And is told of each byte once, whatever the other one leaves."""
    monkeypatch.setattr(tables_download, "LOCK_WAIT_S", 600.0)
    payload = table.payloads[TRANSFORM]
    part = part_of(part_of(target) / TRANSFORM)
    part.parent.mkdir(parents=True)
    seen: list[int] = []
    store = recording_store(folder)
    with ThreadPoolExecutor(1) as pool:
        with filelock.FileLock(part.parent / LOCK_NAME):
            waiting = pool.submit(
                download_table, table.record, store, "", target, progress=seen.append
            )
            for size in (1000, 1001, len(payload) // 2, len(payload) - 1):
                part.write_bytes(payload[:size])
                wait_for(lambda size=size: sum(seen) == size)
            assert not waiting.done()
            if end == "completes":
                table.save(target)
                part.unlink()
            elif end == "was wrong":
                part.write_bytes(b"x" * (len(payload) - 1))
        assert waiting.result(timeout=60).payloads == table.payloads
    assert sum(seen) == len(payload)
    assert 0 not in seen
    assert len(store.paths) == (0 if end == "completes" else 1 + (end == "was wrong"))
    check_alone(target, table)


def test_remains_that_are_too_long_count_as_what_they_can_be(
    table: ModelTable, target: Path
) -> None:
    part = part_of(part_of(target) / TRANSFORM)
    assert arrived_bytes(table.record, target) == 0
    part.parent.mkdir(parents=True)
    size = len(table.payloads[TRANSFORM])
    for n_bytes in (0, 7, size, size + 1):
        part.write_bytes(b"x" * n_bytes)
        assert arrived_bytes(table.record, target) == min(n_bytes, size)
    part.rename(part.with_suffix(""))  # of a table of several files, this one is complete
    assert arrived_bytes(table.record, target) == size


class DamagingStore(LocalStore):
    """Sends small pieces; of the first files, damaged ones."""

    def __init__(self, folder: Path, damage: int) -> None:
        super().__init__(folder)
        self._damage = damage

    def _pieces(
        self, path: str, offset: int, size: int | None, max_bytes: int
    ) -> Generator[bytes, None, None]:
        data = b"".join(super()._pieces(path, offset, size, max_bytes))
        if self._damage:
            self._damage -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        for start in range(0, len(data), 50_000):
            yield data[start : start + 50_000]


@pytest.mark.parametrize("damage", [0, 1, 2])
def test_table_that_is_not_kept_tells_as_it_arrives(
    table: ModelTable, folder: Path, damage: int
) -> None:
    seen: list[int] = []

    def read() -> ModelTable:
        store = DamagingStore(folder, damage)
        return stream_table(table.record, store, "", progress=seen.append, is_wanted=lambda: True)

    size = len(table.payloads[TRANSFORM])
    if damage < 2:
        assert read().payloads == table.payloads
    else:
        with pytest.raises(FormatError, match=f"{TRANSFORM} in {folder}.*damaged"):
            read()
    assert sum(seen) == (size if damage < 2 else 0)
    assert max(seen) == 50_000
    assert seen.count(-size) == damage


def test_table_that_is_not_kept_ends_when_nobody_wants_it(table: ModelTable, folder: Path) -> None:
    seen: list[int] = []
    with pytest.raises(StoreError, match="not wanted any more"):
        stream_table(
            table.record,
            DamagingStore(folder, 0),
            "",
            progress=seen.append,
            is_wanted=lambda: len(seen) < 3,
        )
    assert len(seen) == 3


class HeldLink(Link):
    """A link that carries so many bytes, and more once ``go`` is set."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(None)
        self.go = threading.Event()
        self._left_bytes = size_bytes

    def book(self, size_bytes: int, ongoing: bool) -> float:
        self._left_bytes -= size_bytes
        if self._left_bytes < 0:
            self.go.wait()
        return super().book(size_bytes, ongoing)


@pytest.fixture
def link(table: ModelTable) -> HeldLink:
    """Half of the table goes through at once."""
    return HeldLink(len(table.payloads[TRANSFORM]) // 2)


@pytest.fixture
def fetching(
    folder: Path, target: Path, table: ModelTable, link: HeldLink
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has a quarter of the table and more, and waits for the rest."""
    size = len(table.payloads[TRANSFORM])
    part = part_of(part_of(target) / TRANSFORM)
    server = LinkServer(folder)
    server.link = link
    with server:
        command = [sys.executable, "-c", FETCH, server.url, str(target)]
        with subprocess.Popen(command) as process:
            try:
                deadline = time.monotonic() + 60
                while not (part.exists() and part.stat().st_size > size / 4):
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                yield process
            finally:
                link.go.set()
                process.kill()


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_process_that_is_stopped_keeps_nobody_for_long(
    table: ModelTable,
    folder: Path,
    target: Path,
    fetching: subprocess.Popen[bytes],
    link: HeldLink,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables_download, "LOCK_WAIT_S", 0.2)
    fetching.send_signal(signal.SIGSTOP)
    with pytest.raises(TimeoutError, match=f"{part_of(target)}.*another process"):
        fetch(folder, target)
    assert not target.exists()
    fetching.send_signal(signal.SIGCONT)
    link.go.set()
    assert fetching.wait(60) == 0
    check_alone(target, table)


def test_link_in_the_place_of_the_folder_is_not_followed(
    table: ModelTable, folder: Path, target: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / TRANSFORM).write_bytes(b"precious")
    target.parent.mkdir()
    part_of(target).symlink_to(elsewhere, target_is_directory=True)
    fetch(folder, target)
    check_alone(target, table)
    assert os.listdir(elsewhere) == [TRANSFORM]
    assert (elsewhere / TRANSFORM).read_bytes() == b"precious"


def test_process_that_is_killed_leaves_what_it_has(
    table: ModelTable, folder: Path, target: Path, fetching: subprocess.Popen[bytes]
) -> None:
    fetching.kill()
    fetching.wait(60)
    assert not target.exists()
    with LinkServer(folder) as server, HttpStore(server.url) as store:
        download_table(TableRecord.read(store), store, "", target)
        assert sent_bytes(server) < 0.8 * len(table.payloads[TRANSFORM])
    check_alone(target, table)
