"""Where the model table of an artefact comes from, and where it is kept."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_cachegen import (
    CompressedStreamingCache,
    FormatError,
    ModelTable,
    StoreError,
    TableMismatch,
    profile_model,
    save_cache,
)
from hf_cachegen.artifact import EMBEDDED, LevelRecord, TableRef
from hf_cachegen.bench.local_hub import LocalHub
from hf_cachegen.codec.delta import DeltaConfig
from hf_cachegen.codec.transform_tables import TransformTables
from hf_cachegen.hf.codecs import LevelCodecs, load_table
from hf_cachegen.hf.table_hub import push_table, table_card
from hf_cachegen.levels import lossy_levels
from hf_cachegen.stores import LocalStore, open_store
from hf_cachegen.tables import RECORD_NAME, TableRecord

DELTA, TRANSFORM = "delta.safetensors", "transform.safetensors"


@pytest.fixture(scope="module")
def table(tiny_model: Any, tiny_tokenizer: Any, tiny_text: str) -> ModelTable:
    """A profiled table of the tiny model, for ``delta``."""
    return profile_model(
        tiny_model,
        tiny_tokenizer,
        {"contract": tiny_text},
        configs=[DeltaConfig()],
        sample_tokens=300,
        progress=False,
    )


@pytest.fixture(scope="module")
def both(table: ModelTable, random_transform_tables: Callable[..., TransformTables]) -> ModelTable:
    """The same with statistics for ``transform``, which are of no model."""
    record = table.record
    return ModelTable.build(
        random_transform_tables(record.layout),
        table.tables["delta"],
        model_id="me/it",
        config=record.config,
        layout=record.layout,
        data=record.data,
    )


@pytest.fixture
def published_table(both: ModelTable, hub: LocalHub, tmp_path: Path) -> dict[str, Any]:
    """``both`` as the repository me/table; the options to reach it."""
    options = {"endpoint": hub.endpoint, "token": hub.token}
    push_table(both.save(tmp_path / "table"), "me/table", **options)
    return options


def refer(table: ModelTable, location: str, *codecs: str) -> TableRef:
    digests = table.record.digests
    return TableRef(name="t", codecs={codec: digests[codec] for codec in codecs}, location=location)


def level_codecs(
    table: ModelTable, reference: TableRef, store: LocalStore, **options: Any
) -> LevelCodecs:
    """Of an artefact with the levels of ``delta``."""
    levels = lossy_levels(table, "delta")
    return LevelCodecs(levels, table.record.layout, reference, store, **options)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def kept(table_cache: Path) -> set[str]:
    """Names of the files in the table cache but the records."""
    return {path.name for path in table_cache.rglob("*.*") if path.is_file()} - {RECORD_NAME}


def load(llama: Any, folder: Path, **options: Any) -> CompressedStreamingCache:
    """A cache at a level that needs the table, wholly here."""
    cache = CompressedStreamingCache.from_pretrained(
        folder, model=llama.model, level="coarsest", **options
    )
    cache.wait()
    return cache


def test_table_in_the_callers_hands_is_used(llama: Any, table_cache: Path) -> None:
    (folder,) = (llama.folder / "table").iterdir()
    table = ModelTable.load(LocalStore(folder))
    assert load(llama, llama.folder, tables=table).table() is table
    assert not table_cache.exists()


def test_folder_of_a_table(llama: Any, table: ModelTable, tmp_path: Path) -> None:
    table.save(tmp_path / "table")
    manifest = save_cache(llama.model, None, llama.ids, tmp_path / "a", tables=tmp_path / "table")
    assert manifest.identity.table.codecs == table.record.digests
    assert manifest.identity.table.location == "embedded"
    assert load(llama, tmp_path / "a").table().record == table.record
    with pytest.raises(TableMismatch, match=table.record.digests["delta"]):
        CompressedStreamingCache.from_pretrained(
            llama.folder, model=llama.model, tables=tmp_path / "table"
        )


def test_exact_levels_need_no_table(llama: Any, tmp_path: Path) -> None:
    manifest = save_cache(llama.model, None, llama.ids, tmp_path / "a", tables=None)
    assert manifest.identity.table is None
    assert not (tmp_path / "a" / "table").exists()
    assert load(llama, tmp_path / "a").table() is None
    with pytest.raises(ValueError, match="delta-0"):
        save_cache(llama.model, None, llama.ids, tmp_path / "b", tables=None, levels=["delta-0"])


def test_table_on_the_hub_is_referred_to(
    llama: Any, table: ModelTable, hub: LocalHub, tmp_path: Path
) -> None:
    options = {"endpoint": hub.endpoint, "token": hub.token}
    push_table(table.save(tmp_path / "table"), "me/table", private=True, **options)
    assert load_table("me/table", **options)[1] == "me/table"
    manifest = save_cache(
        llama.model, None, llama.ids, tmp_path / "a", tables="me/table", **options
    )
    assert manifest.identity.table.location == "me/table"
    assert not (tmp_path / "a" / "table").exists()
    assert load(llama, tmp_path / "a", **options).table().record == table.record


def test_table_that_its_repository_no_longer_holds_is_refused(
    llama: Any, table: ModelTable, hub: LocalHub, tmp_path: Path
) -> None:
    options = {"endpoint": hub.endpoint, "token": hub.token}
    push_table(table.save(tmp_path / "table"), "me/table", **options)
    save_cache(llama.model, None, llama.ids, tmp_path / "a", tables="me/table", **options)
    shutil.rmtree(tmp_path / "hf-home")
    other = llama.load().table()
    push_table(other.save(tmp_path / "other"), "me/table", **options)
    digests = [one.record.digests["delta"] for one in (table, other)]
    with pytest.raises(TableMismatch, match="(?s)" + ".*".join(digests)):
        load(llama, tmp_path / "a", **options)


def test_artefact_embeds_only_the_codecs_of_its_levels(
    llama: Any, table: ModelTable, both: ModelTable, tmp_path: Path
) -> None:
    options = {"tables": both, "levels": ["delta-1", "lossless"]}
    manifest = save_cache(llama.model, None, llama.ids, tmp_path / "a", **options)
    reference = manifest.identity.table
    assert names_in(tmp_path / "a" / reference.folder) == {RECORD_NAME, DELTA}
    assert load(llama, tmp_path / "a").table().record.digests == table.record.digests
    # What else the table holds makes no difference: this is the very same cache.
    alone = save_cache(llama.model, None, llama.ids, tmp_path / "b", **{**options, "tables": table})
    assert alone.identity.digest == manifest.identity.digest
    assert alone.identity.table.codecs == reference.codecs
    assert [one.name for one in alone.chunks] == [two.name for two in manifest.chunks]
    for given in (table, both):
        cache = load(llama, tmp_path / "a", tables=given)
        assert torch.equal(cache.layers[0].keys, load(llama, tmp_path / "b").layers[0].keys)


def test_exact_levels_name_no_table(llama: Any, both: ModelTable, tmp_path: Path) -> None:
    manifest = save_cache(
        llama.model, None, llama.ids, tmp_path / "a", tables=both, levels=["lossless"]
    )
    assert manifest.identity.table is None
    assert not (tmp_path / "a" / "table").exists()


def test_only_the_codec_of_a_level_is_read(
    both: ModelTable, table_cache: Path, tmp_path: Path, recording_store: Any
) -> None:
    reference = refer(both, EMBEDDED, "transform", "delta")
    both.save(tmp_path / reference.folder)
    store = recording_store(tmp_path)
    codecs = level_codecs(both, reference, store)
    assert store.paths == []
    assert [codecs[level].name for level in (0, 1, 0)] == ["delta"] * 3
    assert store.paths == [f"{reference.folder}/{name}" for name in (RECORD_NAME, DELTA)]
    store.reads.clear()
    whole = codecs.table()
    assert store.paths == [f"{reference.folder}/{name}" for name in (RECORD_NAME, TRANSFORM)]
    assert whole.record.digests == reference.codecs
    assert codecs[2].name == "delta"
    assert whole.tables["delta"] is codecs.table().tables["delta"]
    assert not table_cache.exists()  # it is no nearer than the artefact


def test_reader_fetches_one_file_of_a_table_on_the_hub(
    llama: Any,
    both: ModelTable,
    published_table: dict[str, Any],
    table_cache: Path,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "a"
    levels = ["delta-0", "lossless"]
    save_cache(
        llama.model, None, llama.ids, folder, tables="me/table", levels=levels, **published_table
    )
    shutil.rmtree(table_cache)
    load(llama, folder, **published_table)
    assert kept(table_cache) == {DELTA}


def test_whole_table_is_fetched_when_it_is_asked_for(
    both: ModelTable, published_table: dict[str, Any], table_cache: Path, tmp_path: Path
) -> None:
    reference = refer(both, "me/table", "transform", "delta")
    store = LocalStore(tmp_path)
    codecs = level_codecs(both, reference, store, hub_options=published_table)
    assert codecs[0].name == "delta"
    assert kept(table_cache) == {DELTA}
    assert codecs.table().record == both.record
    assert kept(table_cache) == {DELTA, TRANSFORM}
    assert names_in(table_cache / reference.codecs["transform"]) == {RECORD_NAME, TRANSFORM}
    # From now on the table cache has it all, so the Hub need not be there.
    offline = {"endpoint": "http://127.0.0.1:9", "cache_dir": tmp_path / "nothing"}
    again = level_codecs(both, reference, store, hub_options=offline)
    assert again.table().record == both.record
    (table_cache / reference.codecs["transform"] / TRANSFORM).unlink()
    with pytest.raises(StoreError, match="me/table"):
        level_codecs(both, reference, store, hub_options=offline).table()


def test_location_of_a_table_is_checked_at_once_and_read_when_needed(
    both: ModelTable, table_cache: Path, tmp_path: Path
) -> None:
    folder = both.save(tmp_path / "table")
    reference = refer(both, EMBEDDED, "delta")
    codecs = level_codecs(both, reference, LocalStore(tmp_path), tables=folder)
    (folder / TRANSFORM).unlink()
    assert codecs[0].name == "delta"
    assert codecs.table().record.digests == reference.codecs
    assert not table_cache.exists()
    wrong = TableRef(name="t", codecs={"delta": "12" * 16}, location=EMBEDDED)
    with pytest.raises(TableMismatch, match=r"delta has the digest 1212.*the given table has"):
        level_codecs(both, wrong, LocalStore(tmp_path), tables=folder)


def test_table_without_a_codec_that_the_cache_uses_is_refused(
    table: ModelTable, both: ModelTable, table_cache: Path, tmp_path: Path
) -> None:
    reference = refer(both, EMBEDDED, "delta", "transform")
    with pytest.raises(TableMismatch, match=r"transform has the digest \w+, .* has none"):
        level_codecs(both, reference, LocalStore(tmp_path), tables=table)
    table.save(tmp_path / reference.folder)
    codecs = level_codecs(both, reference, LocalStore(tmp_path))
    assert codecs[0].name == "delta"
    with pytest.raises(TableMismatch, match="holds delta; expected transform"):
        codecs.table()


def test_level_of_a_codec_that_the_reference_does_not_name_is_refused(
    both: ModelTable, table_cache: Path, tmp_path: Path
) -> None:
    reference = refer(both, EMBEDDED, "transform")
    both.save(tmp_path / reference.folder)
    with pytest.raises(TableMismatch, match="'delta' but names a table for transform only"):
        level_codecs(both, reference, LocalStore(tmp_path))[0]


def test_table_of_another_layout_is_refused(
    llama: Any, table: ModelTable, table_cache: Path, tmp_path: Path
) -> None:
    reference = refer(table, EMBEDDED, "delta")
    table.save(tmp_path / reference.folder)
    layout = table.record.layout.model_copy(update={"layers": table.record.layout.layers[:1]})
    levels = lossy_levels(table, "delta")
    with pytest.raises(TableMismatch, match="another layout"):
        LevelCodecs(levels, layout, reference, LocalStore(tmp_path))[0]


def test_level_of_a_newer_codec_is_refused_without_a_read(
    both: ModelTable, table_cache: Path, tmp_path: Path, recording_store: Any
) -> None:
    level = LevelRecord(name="new", codec="newer", exact=False)
    reference = TableRef(name="t", codecs={"newer": "12" * 16}, location=EMBEDDED)
    store = recording_store(tmp_path)
    with pytest.raises(FormatError, match="unknown codec 'newer'; upgrade"):
        LevelCodecs([level], both.record.layout, reference, store)[0]
    assert store.paths == []


def test_push_removes_files_of_the_table_before(
    table: ModelTable, both: ModelTable, published_table: dict[str, Any], tmp_path: Path
) -> None:
    push_table(table.save(tmp_path / "alone"), "me/table", **published_table)
    with open_store("me/table", **published_table) as store:
        assert TableRecord.read(store) == table.record
        found = [name for name in (DELTA, TRANSFORM) if store.exists(name)]
    assert found == [DELTA]


def test_card_tells_each_codec(both: ModelTable) -> None:
    card = table_card(both)
    for codec, digest in both.record.digests.items():
        assert f"## Codec `{codec}`" in card
        assert digest in card
    assert "`transform-0`, `transform-1`, coarse to fine" in card
    assert "| `step` | 0.5 |" in card
    for entry in both.record.codecs:
        assert f"fetches {entry.arrays.size_bytes / 1e6:.2f} MB" in card


def test_options_of_a_push_need_a_push(llama: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="private"):
        save_cache(llama.model, None, llama.ids, tmp_path / "a", private=True)
    with pytest.raises(ValueError, match="chunk_token"):
        save_cache(llama.model, None, llama.ids, tmp_path / "a", chunk_token=4)
    assert os.listdir(tmp_path) == []
