"""Tables that come in pieces, to several at once, and to processes that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import filelock
import pytest

from hf_cachegen.bench.link import LinkServer
from hf_cachegen.codec.transform_tables import TransformTables
from hf_cachegen.errors import FormatError, StoreError
from hf_cachegen.layout import KVLayout, LayerSpec, TensorSpec
from hf_cachegen.stores import HttpStore, LocalStore
from hf_cachegen.stores.download import part_of
from hf_cachegen.tables import RECORD_NAME, ModelTable, TableRecord
from hf_cachegen.tables import download as tables_download
from hf_cachegen.tables.download import LOCK_NAME, LOCK_POLL_S, download_table

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


@pytest.fixture
def fetching(folder: Path, target: Path, table: ModelTable) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has a quarter of the table and needs seconds for the rest."""
    size = len(table.payloads[TRANSFORM])
    part = part_of(part_of(target) / TRANSFORM)
    with LinkServer(folder, rate_bytes_per_s=size / 4) as server:
        command = [sys.executable, "-c", FETCH, server.url, str(target)]
        with subprocess.Popen(command) as process:
            deadline = time.monotonic() + 60
            while not (part.exists() and part.stat().st_size > size / 4):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            yield process
            process.kill()


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_process_that_is_stopped_keeps_nobody_for_long(
    table: ModelTable,
    folder: Path,
    target: Path,
    fetching: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables_download, "LOCK_WAIT_S", 0.2)
    fetching.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=f"{part_of(target)}.*another process"):
        fetch(folder, target)
    assert time.monotonic() - started < 0.2 + 4 * LOCK_POLL_S
    assert not target.exists()
    fetching.send_signal(signal.SIGCONT)
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
