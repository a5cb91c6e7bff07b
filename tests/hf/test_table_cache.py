"""The table cache: each table once, for all artefacts that share it, and nothing else."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import filelock
import pytest

from hf_cachegen import (
    CompressedStreamingCache,
    FormatError,
    ModelTable,
    StoreError,
    TableMismatch,
    save_cache,
)
from hf_cachegen.artifact import EMBEDDED, Artifact, TableRef
from hf_cachegen.bench.link import LinkServer
from hf_cachegen.bench.local_hub import LocalHub
from hf_cachegen.bench.loopback import Link
from hf_cachegen.hf.calibration import machine_rates
from hf_cachegen.hf.codecs import LevelCodecs
from hf_cachegen.hf.contents import cached_layers
from hf_cachegen.hf.describe import describe_layout
from hf_cachegen.hf.table_hub import push_table
from hf_cachegen.levels import lossy_levels
from hf_cachegen.stores import HttpStore, LocalStore
from hf_cachegen.stores.download import part_of
from hf_cachegen.streaming.meter import Meter
from hf_cachegen.streaming.pipeline import RECONSIDER_S
from hf_cachegen.streaming.rates import PrefillCost
from hf_cachegen.tables import RECORD_NAME, download

TRANSFORM = "transform.safetensors"


@pytest.fixture(scope="module")
def table(llama: Any, transform_table: Callable[..., ModelTable]) -> ModelTable:
    """A table that any artefact of the model may share."""
    return transform_table(llama.model)


@pytest.fixture(scope="module")
def folders(llama: Any, table: ModelTable, tmp_path_factory: Any) -> Path:
    """Artefacts ``a`` and ``b`` of two contexts with one table, and ``own`` with its own."""
    root = tmp_path_factory.mktemp("artefacts")
    for name, ids in (("a", llama.ids), ("b", llama.ids.flip(0))):
        save_cache(llama.model, None, ids, root / name, tables=table, progress=False)
    save_cache(llama.model, None, llama.ids, root / "own", progress=False)
    return root


@pytest.fixture
def server(folders: Path) -> Iterator[LinkServer]:
    """All of them over HTTP."""
    with LinkServer(folders) as server:
        yield server


def load(llama: Any, location: str | Path, **options: Any) -> ModelTable:
    """The table of an artefact that has been decoded with it."""
    cache = CompressedStreamingCache.from_pretrained(
        location, model=llama.model, level="coarsest", **options
    )
    cache.wait()
    table = cache.table()
    assert table is not None
    return table


def fetched(server: LinkServer) -> set[str]:
    """Which artefacts' tables have been fetched."""
    paths = (record.path.strip("/") for record in server.requests if "/table/" in record.path)
    return {path.split("/")[0] for path in paths}


def entries(table_cache: Path) -> set[str]:
    return {path.name for path in table_cache.iterdir()} if table_cache.exists() else set()


def test_table_that_artefacts_share_is_fetched_and_kept_once(
    llama: Any, table: ModelTable, server: LinkServer, table_cache: Path
) -> None:
    for name in ("a", "b", "a"):
        assert load(llama, f"{server.url}/{name}").record == table.record
    assert fetched(server) == {"a"}
    digest = table.record.digests["transform"]
    assert entries(table_cache) == {digest}
    kept = ModelTable.load(LocalStore(table_cache / digest))
    assert (kept.record, kept.payloads) == (table.record, table.payloads)


def test_table_of_one_context_is_not_kept(
    llama: Any, server: LinkServer, table_cache: Path
) -> None:
    for _ in range(2):
        load(llama, f"{server.url}/own")
    assert fetched(server) == {"own"}
    assert entries(table_cache) == set()


@pytest.mark.parametrize("name", ["a", "own"])
def test_damage_of_a_local_artefact_shows(
    llama: Any,
    folders: Path,
    server: LinkServer,
    table_cache: Path,
    tmp_path: Path,
    name: str,
) -> None:
    load(llama, f"{server.url}/{name}")  # so that a table that is kept would serve
    before = entries(table_cache)
    load(llama, folders / name)
    assert entries(table_cache) == before
    (file,) = (folders / name).glob("table/*/*.safetensors")
    intact = file.read_bytes()
    file.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    try:
        with pytest.raises(FormatError, match=f"{file.name}.*damaged"):
            load(llama, folders / name)
    finally:
        file.write_bytes(intact)


@pytest.mark.parametrize("name", [RECORD_NAME, TRANSFORM])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_entry_is_replaced(
    llama: Any, server: LinkServer, table_cache: Path, name: str, damage: str
) -> None:
    digest = load(llama, f"{server.url}/a").record.digests["transform"]
    file = table_cache / digest / name
    intact = file.read_bytes()
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(intact[:-9] + (b"" if damage == "cut" else b"#" * 9))
    load(llama, f"{server.url}/b")
    assert file.read_bytes() == intact


def test_another_table_under_a_digest_is_replaced(
    llama: Any, table: ModelTable, server: LinkServer, folders: Path, table_cache: Path
) -> None:
    digest = table.record.digests["transform"]
    load(llama, folders / "own").save(table_cache / digest)
    levels = lossy_levels(table, "transform")
    reference = TableRef(name="t", codecs={"transform": digest}, location=EMBEDDED)
    with HttpStore(f"{server.url}/a") as store:
        codecs = LevelCodecs(levels, table.record.layout, reference, store)
        assert codecs.table().record == table.record
    assert ModelTable.load(LocalStore(table_cache / digest)).record == table.record


def test_table_cache_that_cannot_be_written_to_does_no_harm(
    llama: Any, table: ModelTable, server: LinkServer, table_cache: Path
) -> None:
    table_cache.parent.mkdir(parents=True)
    table_cache.write_text("a file where the folder should be")
    assert load(llama, f"{server.url}/a").record == table.record


def test_whoever_holds_the_table_cache_does_not_hold_up_others(
    llama: Any,
    table: ModelTable,
    server: LinkServer,
    table_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(download, "LOCK_WAIT_S", 0.2)
    (digest,) = table.record.digests.values()
    held = part_of(table_cache / digest)
    held.mkdir(parents=True)
    with filelock.FileLock(held / download.LOCK_NAME):
        assert load(llama, f"{server.url}/a").record == table.record
        assert entries(table_cache) == {held.name}
    load(llama, f"{server.url}/a")
    assert entries(table_cache) == {digest}


@pytest.fixture(scope="module")
def large(llama: Any, random_transform_tables: Any) -> ModelTable:
    """A table of the model that is larger than what it encodes."""
    layout = describe_layout(
        llama.model, [layer.tensors for layer in cached_layers(llama.native())]
    )
    return ModelTable.build(
        random_transform_tables(layout, group=3),
        model_id="me/it",
        config="ab" * 16,
        layout=layout,
        data=(("a", 1),),
    )


@pytest.mark.parametrize(("policy", "location"), [("robust", EMBEDDED), ("layered", "me/table")])
def test_sessions_that_are_too_short_for_the_table_get_it_together(
    llama: Any,
    large: ModelTable,
    hub: LocalHub,
    table_cache: Path,
    tmp_path: Path,
    threads_end: Callable[[], bool],
    policy: str,
    location: str,
) -> None:
    """Each ends with text long before the table has come, and the next one asks for the rest."""
    options: dict[str, Any] = {"endpoint": hub.endpoint, "token": hub.token}
    push_table(large.save(tmp_path / "table"), "me/table", **options)
    save_cache(
        llama.model, None, llama.ids, tmp_path / "a", tables=(large, location), progress=False
    )
    digest, size = large.record.digests["transform"], len(large.payloads[TRANSFORM])
    part = table_cache / f"{digest}.part" / f"{TRANSFORM}.part"
    there = []
    with LinkServer(tmp_path / "a") as server:
        while digest not in entries(table_cache):
            assert len(there) < 50
            there.append(part.stat().st_size if part.exists() else 0)
            # However busy the machine is, not even the first one gets all of it.
            server.link = Link([(0.0, size / 2 if any(there) else size / 30)])
            hub.link = hub.storage.link = server.link
            server.requests.clear()
            hub.storage.requests.clear()
            model = copy.deepcopy(llama.model)  # what its sessions have measured is forgotten
            machine_rates(model).prefill = PrefillCost(0.0, 0.02, 0.0)
            cache = CompressedStreamingCache.from_pretrained(
                server.url, model=model, policy=policy, ttft_target_s=0.5, **options
            )
            cache.wait()
            cache.close()
            assert threads_end()
            requests = (*server.requests, *hub.storage.requests)
            asked = [request.start for request in requests if request.stop == size]
            assert asked in ([], there[-1:])
    assert len(set(there)) > 1
    assert load(llama, tmp_path / "a", **options).record == large.record


@pytest.mark.parametrize("policy", ["robust", "layered", "paper", "soonest:coarsest"])
def test_a_table_on_its_way_is_no_link_that_stands_still(
    llama: Any, large: ModelTable, table_cache: Path, tmp_path: Path, policy: str
) -> None:
    """It comes in far less time than the model takes, and in more than a stall may last.

    The model takes so long that a machine which stands still for a while makes no difference.
    """
    folder, size = tmp_path / "a", len(large.payloads[TRANSFORM])
    save_cache(llama.model, None, llama.ids, folder, tables=large, progress=False)
    model = copy.deepcopy(llama.model)
    machine_rates(model).prefill = PrefillCost(0.0, 1000.0, 0.0)
    target = {} if policy.startswith("soonest") else {"ttft_target_s": 8.0}
    with LinkServer(folder, rate_bytes_per_s=size / (3 * RECONSIDER_S)) as server:
        cache = CompressedStreamingCache.from_pretrained(
            server.url, model=model, policy=policy, **target
        )
        cache.wait()
        assert "exact" not in cache.chunk_sources()
        cache.close()
    assert [path.name for path in table_cache.iterdir()] == [large.record.digests["transform"]]


def test_exact_levels_do_not_wait_for_a_table(
    llama: Any, large: ModelTable, table_cache: Path, tmp_path: Path
) -> None:
    levels = ["transform-0", "lossless"]
    folder = tmp_path / "a"
    save_cache(llama.model, None, llama.ids, folder, tables=large, levels=levels, progress=False)
    with LinkServer(folder) as server, HttpStore(server.url) as store:
        manifest = Artifact.open(store).manifest
        server.link = Link([(0.0, 2e3)])
        codecs = LevelCodecs(
            manifest.levels, manifest.identity.layout, manifest.identity.table, store
        )
        with ThreadPoolExecutor(1) as pool:
            table = pool.submit(codecs.prepare, 0, Meter())
            while not table_cache.exists() and not table.done():
                time.sleep(0.01)
            assert codecs[1].name == "lossless"
            assert not table.done()
            store.close()
            with pytest.raises(StoreError):
                table.result(timeout=20)


def test_local_artefact_ends_the_download_of_its_table_with_its_stream(
    llama: Any, large: ModelTable, hub: LocalHub, table_cache: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"endpoint": hub.endpoint, "token": hub.token}
    push_table(large.save(tmp_path / "table"), "me/table", **options)
    folder = tmp_path / "a"
    save_cache(llama.model, None, llama.ids, folder, tables=(large, "me/table"), progress=False)
    hub.storage.link = Link([(0.0, 3e3)])
    cache = CompressedStreamingCache.from_pretrained(
        folder, model=llama.model, level="coarsest", **options
    )
    (digest,) = large.record.digests.values()
    part = table_cache / f"{digest}.part" / f"{TRANSFORM}.part"
    while not (part.exists() and part.stat().st_size):
        time.sleep(0.01)
    cache.close()
    assert 0 < part.stat().st_size < len(large.payloads[TRANSFORM])
    hub.storage.link = Link(None)
    assert load(llama, folder, **options).record == large.record
    assert entries(table_cache) == {digest}


class RecordingMeter(Meter):
    """A meter that notes what it is told of, in ``arrivals``."""

    def __init__(self) -> None:
        super().__init__()
        self.arrivals: list[int] = []

    def received(self, size_bytes: int) -> None:
        super().received(size_bytes)
        self.arrivals.append(size_bytes)


def codecs_of(store: HttpStore, **options: Any) -> LevelCodecs:
    manifest = Artifact.open(store).manifest
    identity = manifest.identity
    return LevelCodecs(manifest.levels, identity.layout, identity.table, store, **options)


@pytest.fixture
def large_server(llama: Any, large: ModelTable, tmp_path: Path) -> Iterator[LinkServer]:
    """An artefact with the large table, over HTTP; pieces of it are small."""
    folder, levels = tmp_path / "a", ["transform-0", "lossless"]
    save_cache(llama.model, None, llama.ids, folder, tables=large, levels=levels, progress=False)
    with LinkServer(folder, rate_bytes_per_s=5 * len(large.payloads[TRANSFORM])) as server:
        yield server


@pytest.mark.parametrize("way", ["kept", "held by another", "nowhere to keep it", "of one cache"])
def test_meter_learns_of_a_table_however_it_comes(
    large: ModelTable,
    large_server: LinkServer,
    table_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    size, (digest,) = len(large.payloads[TRANSFORM]), large.record.digests.values()
    monkeypatch.setattr(download, "LOCK_WAIT_S", 0.5)
    meter = RecordingMeter()
    with HttpStore(large_server.url) as store, contextlib.ExitStack() as stack:
        codecs = codecs_of(store)
        if way == "nowhere to keep it":
            table_cache.parent.mkdir(parents=True)
            table_cache.write_text("a file where the folder should be")
        elif way == "of one cache":
            monkeypatch.setattr("hf_cachegen.hf.codecs.is_of_one_cache", lambda record: True)
        elif way == "held by another":
            held = part_of(table_cache / digest)
            held.mkdir(parents=True)
            part_of(held / TRANSFORM).write_bytes(large.payloads[TRANSFORM][: size // 2])
            stack.enter_context(filelock.FileLock(held / download.LOCK_NAME))
        codecs.prepare(0, meter)
    assert (sum(meter.arrivals), meter.left_bytes) == (size, 0)
    assert 0 not in meter.arrivals
    if way == "held by another":  # who then gives up waiting, and begins at the first byte
        assert meter.arrivals[:2] == [size // 2, -(size // 2)]
        meter.arrivals[:2] = []
    assert len(meter.arrivals) > 2
    assert all(0 < n_bytes < size for n_bytes in meter.arrivals)


def test_meter_sees_what_another_process_fetches(
    large: ModelTable,
    large_server: LinkServer,
    table_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(download, "LOCK_WAIT_S", 600.0)
    payload, (digest,) = large.payloads[TRANSFORM], large.record.digests.values()
    held = part_of(table_cache / digest)
    held.mkdir(parents=True)
    meter = RecordingMeter()
    with HttpStore(large_server.url) as store, ThreadPoolExecutor(1) as pool:
        codecs = codecs_of(store)
        with filelock.FileLock(held / download.LOCK_NAME):
            prepared = pool.submit(codecs.prepare, 0, meter)
            for size in (1, len(payload) // 2, len(payload) - 1):
                part_of(held / TRANSFORM).write_bytes(payload[:size])
                while meter.size_bytes != size and not prepared.done():
                    time.sleep(0.01)
                assert not prepared.done()
                assert meter.left_bytes == len(payload) - size
        prepared.result(timeout=60)
        asked = [record.start for record in large_server.requests if TRANSFORM in record.path]
    assert asked == [len(payload) - 1]
    assert sum(meter.arrivals) == len(payload)


def test_what_is_missing_is_known_without_a_request(
    llama: Any, large: ModelTable, large_server: LinkServer, table_cache: Path, tmp_path: Path
) -> None:
    size, (digest,) = len(large.payloads[TRANSFORM]), large.record.digests.values()
    large.save(tmp_path / "table")
    with LinkServer(tmp_path / "table") as tables, HttpStore(large_server.url) as store:
        unknown, known = codecs_of(store), codecs_of(store, tables=tables.url)
        given = codecs_of(store, tables=large)
        for server in (large_server, tables):
            server.requests.clear()
        assert [unknown.missing_bytes(level) for level in (0, 1)] == [None, 0]
        assert [known.missing_bytes(level) for level in (0, 1)] == [size, 0]
        assert [given.missing_bytes(level) for level in (0, 1)] == [0, 0]
        part = part_of(part_of(table_cache / digest) / TRANSFORM)
        part.parent.mkdir(parents=True)
        for here in (0, 1000, size, size + 1):
            part.write_bytes(large.payloads[TRANSFORM][:here] + b"#" * (here > size))
            assert known.missing_bytes(0) == max(size - here, 0)
        assert unknown.missing_bytes(0) is None
        part.write_bytes(large.payloads[TRANSFORM][:1000])
        assert not large_server.requests
        assert not tables.requests
        meter = RecordingMeter()
        unknown.prepare(0, meter)
        assert sum(meter.arrivals) == size
        assert sum(meter.arrivals[1:]) == size - 1000  # what had been said to be missing
        assert [codecs.missing_bytes(0) for codecs in (unknown, known)] == [0, 0]
    local = Artifact.open(LocalStore(tmp_path / "a"))
    identity = local.manifest.identity
    codecs = LevelCodecs(local.manifest.levels, identity.layout, identity.table, local.store)
    assert codecs.missing_bytes(0) == 0
    none = LevelCodecs(local.manifest.levels[1:], identity.layout, None, local.store)
    assert none.missing_bytes(0) == 0


def test_what_is_missing_is_known_once_a_fetch_has_begun(
    large: ModelTable, large_server: LinkServer, table_cache: Path
) -> None:
    size, (digest,) = len(large.payloads[TRANSFORM]), large.record.digests.values()
    part = part_of(part_of(table_cache / digest) / TRANSFORM)
    with HttpStore(large_server.url) as store, ThreadPoolExecutor(1) as pool:
        codecs = codecs_of(store)
        large_server.link = Link([(0.0, 3e3)])
        fetching = pool.submit(codecs.prepare, 0, Meter())
        while not (part.exists() and part.stat().st_size) and not fetching.done():
            time.sleep(0.01)
        store.close()
        with pytest.raises(StoreError):
            fetching.result(timeout=60)
        assert codecs.missing_bytes(0) == size - part.stat().st_size
        assert 0 < part.stat().st_size < size


def test_level_without_a_table_is_refused_by_who_prepares_it(
    table: ModelTable, server: LinkServer
) -> None:
    levels = lossy_levels(table, "transform")
    reference = TableRef(name="t", codecs={"delta": "12" * 16}, location=EMBEDDED)
    with HttpStore(f"{server.url}/a") as store:
        codecs = LevelCodecs(levels, table.record.layout, reference, store)
        assert codecs.missing_bytes(0) is None
        with pytest.raises(TableMismatch, match="names a table for delta only"):
            codecs.prepare(0, Meter())
