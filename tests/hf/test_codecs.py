"""Where the model table of an artefact comes from, and where it is kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_cachegen import (
    CompressedStreamingCache,
    ModelTable,
    StoreError,
    TableMismatch,
    profile_model,
    save_cache,
)
from hf_cachegen.bench.local_hub import LocalHub
from hf_cachegen.hf.codecs import load_table
from hf_cachegen.hf.table_hub import push_table
from hf_cachegen.stores import LocalStore
from hf_cachegen.tables import ARRAYS_NAME, RECORD_NAME


@pytest.fixture(scope="module")
def table(tiny_model: Any, tiny_tokenizer: Any, tiny_text: str) -> ModelTable:
    """A profiled table of the tiny model."""
    samples = {"contract": tiny_text}
    return profile_model(tiny_model, tiny_tokenizer, samples, sample_tokens=300, progress=False)


def load(llama: Any, folder: Path, **options: Any) -> CompressedStreamingCache:
    """A cache at a level that needs the table, wholly here."""
    cache = CompressedStreamingCache.from_pretrained(
        folder, model=llama.model, level="coarsest", **options
    )
    cache.wait()
    return cache


def test_embedded_table_lands_in_the_table_cache(llama: Any, table_cache: Path) -> None:
    table = load(llama, llama.folder).table()
    kept = ModelTable.load(LocalStore(table_cache / table.digest))
    assert kept.digest == table.digest
    assert kept.payload == table.payload


def test_table_in_the_table_cache_is_not_fetched_again(
    llama: Any, table_cache: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "a"
    llama.load("delta-0").save_pretrained(folder)
    expected = load(llama, folder).layers[0].keys
    for file in (folder / "table").rglob("*.*"):
        file.unlink()
    assert torch.equal(load(llama, folder).layers[0].keys, expected)
    for file in table_cache.rglob("*.*"):
        file.unlink()
    with pytest.raises(StoreError, match="table"):
        load(llama, folder)


@pytest.mark.parametrize("name", [RECORD_NAME, ARRAYS_NAME])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_entry_of_the_table_cache_is_replaced(
    llama: Any, table_cache: Path, name: str, damage: str
) -> None:
    digest = load(llama, llama.folder).table().digest
    file = table_cache / digest / name
    intact = file.read_bytes()
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(intact[:-9] + (b"" if damage == "cut" else b"#" * 9))
    load(llama, llama.folder)
    assert file.read_bytes() == intact


def test_table_cache_that_cannot_be_written_to_does_no_harm(llama: Any, table_cache: Path) -> None:
    table_cache.parent.mkdir(parents=True)
    table_cache.write_text("a file where the folder should be")
    assert load(llama, llama.folder).get_seq_length() == len(llama.ids)


def test_table_in_the_callers_hands_is_used(llama: Any, table_cache: Path) -> None:
    (folder,) = (llama.folder / "table").iterdir()
    table = ModelTable.load(LocalStore(folder))
    assert load(llama, llama.folder, tables=table).table() is table
    assert not table_cache.exists()


def test_folder_of_a_table(llama: Any, table: ModelTable, tmp_path: Path) -> None:
    table.save(tmp_path / "table")
    manifest = save_cache(llama.model, None, llama.ids, tmp_path / "a", tables=tmp_path / "table")
    assert manifest.identity.table.digest == table.digest
    assert manifest.identity.table.location == "embedded"
    assert load(llama, tmp_path / "a").table().digest == table.digest
    with pytest.raises(TableMismatch, match=table.digest):
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
    assert load(llama, tmp_path / "a", **options).table().digest == table.digest


def test_table_that_its_repository_no_longer_holds_is_refused(
    llama: Any, table: ModelTable, hub: LocalHub, tmp_path: Path
) -> None:
    options = {"endpoint": hub.endpoint, "token": hub.token}
    push_table(table.save(tmp_path / "table"), "me/table", **options)
    save_cache(llama.model, None, llama.ids, tmp_path / "a", tables="me/table", **options)
    other = llama.load().table()
    push_table(other.save(tmp_path / "other"), "me/table", **options)
    with pytest.raises(TableMismatch, match=f"(?s){table.digest}.*{other.digest}"):
        load(llama, tmp_path / "a", **options)


def test_options_of_a_push_need_a_push(llama: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="private"):
        save_cache(llama.model, None, llama.ids, tmp_path / "a", private=True)
    with pytest.raises(ValueError, match="chunk_token"):
        save_cache(llama.model, None, llama.ids, tmp_path / "a", chunk_token=4)
    assert os.listdir(tmp_path) == []
