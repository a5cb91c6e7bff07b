"""What is wrong with a save is told before any work: before the model runs, or is even loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch
from huggingface_hub import HfApi
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MambaConfig

from hf_cachegen import (
    FormatError,
    IdentityError,
    ModelTable,
    StoreError,
    TableMismatch,
    record_cache,
    save_cache,
)
from hf_cachegen.artifact import EMBEDDED
from hf_cachegen.bench.local_hub import LocalHub
from hf_cachegen.hf import cache as streamed
from hf_cachegen.hf import saving, settings
from hf_cachegen.hf.codecs import load_table
from hf_cachegen.hf.settings import check_push, choose


@pytest.fixture(scope="module")
def table(llama: Any, transform_table: Callable[..., ModelTable]) -> ModelTable:
    return transform_table(llama.model)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass of the model, no profile of a cache and no encoding from now on."""
    for work in ("prefill", "profile_cache", "_encode_chunk"):
        monkeypatch.setattr(saving, work, None)  # would not be callable


def _file(folder: Path) -> None:
    folder.write_text("a file where the folder should be")


def _file_above(folder: Path) -> None:
    _file(folder.parent)


def _file_inside(folder: Path) -> None:
    folder.mkdir(parents=True)
    _file(folder / "chunks")


def _damaged(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "cache.json").write_text("{}")


# Folders: how each comes to be, what is saved to it then, and what is told.

TARGETS: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "other tokens": ({"ids": "flipped"}, {}, IdentityError, "holds a cache of other tokens"),
    "other tokens, no table": (
        {"ids": "flipped", "tables": None},
        {"tables": None},
        IdentityError,
        "differ at position 0",
    ),
    "a longer context": (
        {"ids": "longer", "tables": None},
        {"tables": None},
        IdentityError,
        "end at position 70",
    ),
    "a shorter context, a table of its own": ({"ids": "shorter"}, {}, IdentityError, "of its own"),
    "another model": ({"model": "gemma"}, {}, IdentityError, "architecture"),
    "other chunks": ({"chunk_tokens": 9}, {}, IdentityError, "chunk_tokens: expected 1500"),
    "other levels": (
        {"levels": ["delta-1"]},
        {},
        IdentityError,
        r"levels: expected \['delta-0', .*'lossless'\], found \['delta-1'\]",
    ),
    "another table": ({}, {"tables": "{table}"}, IdentityError, "table"),
    "another importance": (
        {"tables": "{table}"},
        {"tables": "{table}", "importance": "recent"},
        IdentityError,
        "importance",
    ),
    "a file": (_file, {}, StoreError, "is a file"),
    "a file above": (_file_above, {}, StoreError, "is a file"),
    "a file among its own": (_file_inside, {}, StoreError, "chunks is a file"),
    "a damaged artefact": (_damaged, {}, FormatError, "overwrite=True"),
}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_a_folder_is_checked_before_anything_is_done(
    llama: Any,
    gemma: Any,
    table: ModelTable,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    name: str,
    given: bool,
) -> None:
    made, options, kind, message = TARGETS[name]
    folder = tmp_path / "above" / "kv"

    def filled(options: dict[str, Any]) -> dict[str, Any]:
        return {k: table if v == "{table}" else v for k, v in options.items()}

    if callable(made):
        folder.parent.parent.mkdir(exist_ok=True)
        if made is _file:
            folder.parent.mkdir()
        made(folder)
    else:
        made = {"ids": "same", "model": "llama", **filled(made)}
        ids = {
            "same": llama.ids,
            "flipped": llama.ids.flip(0),
            "longer": torch.cat((llama.ids, llama.ids)),
            "shorter": llama.ids[:40],
        }[made.pop("ids")]
        model = {"llama": llama, "gemma": gemma}[made.pop("model")].model
        save_cache(model, None, ids, folder, progress=False, **made)
    cache = llama.native() if given else None
    before = _files(tmp_path)
    request.getfixturevalue("idle")
    with pytest.raises(kind, match=message):
        save_cache(llama.model, None, llama.ids, folder, cache=cache, **filled(options))
    assert _files(tmp_path) == before


def _files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def test_a_folder_that_another_save_writes_to_is_told_at_once(
    llama: Any, tmp_path: Path, idle: None
) -> None:
    with (
        filelock.FileLock(tmp_path / ".lock"),
        pytest.raises(StoreError, match="another save is writing"),
    ):
        save_cache(llama.model, None, llama.ids, tmp_path)
    assert not (tmp_path / "chunks").exists()


def test_what_a_save_may_do_to_a_folder_it_still_does(
    llama: Any, gemma: Any, table: ModelTable, tmp_path: Path
) -> None:
    context = (llama.model, None)
    save_cache(*context, llama.ids[:40], tmp_path, tables=table, chunk_tokens=20)
    save_cache(*context, llama.ids, tmp_path, tables=table, chunk_tokens=20)  # longer
    save_cache(*context, llama.ids, tmp_path, tables=table, chunk_tokens=20)  # the same
    save_cache(*context, llama.ids, tmp_path, overwrite=True)  # another table
    next(tmp_path.glob("table/*/table.json")).unlink()
    save_cache(*context, llama.ids, tmp_path)  # the same, repaired
    assert len(list(tmp_path.glob("table/*/table.json"))) == 1
    save_cache(gemma.model, None, llama.ids, tmp_path, overwrite=True)
    (tmp_path / "cache.json").write_text("{}")
    manifest = save_cache(*context, llama.ids, tmp_path, overwrite=True)
    assert manifest.identity.architecture == "LlamaForCausalLM"


# Tables and levels.


def test_a_table_of_another_model_is_told_after_one_token(
    llama: Any, transform_table: Any, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    torch.manual_seed(0)
    config = llama.model.config.to_dict() | {"num_key_value_heads": 1}
    other = LlamaForCausalLM(LlamaConfig(**config)).eval()
    prefill, lengths = saving.prefill, []

    def counting(model: Any, ids: Any, **options: Any) -> Any:
        lengths.append(len(ids))
        return prefill(model, ids, **options)

    monkeypatch.setattr(saving, "prefill", counting)
    with pytest.raises(TableMismatch, match="another layout"):
        save_cache(llama.model, None, llama.ids, tmp_path / "a", tables=transform_table(other))
    assert lengths == [1]
    assert not (tmp_path / "a").exists()
    lengths.clear()
    save_cache(llama.model, None, llama.ids, tmp_path / "a", tables=transform_table(llama.model))
    assert lengths == [70]


def test_a_table_and_its_location_are_taken_together(
    llama: Any, table: ModelTable, tmp_path: Path, monkeypatch: Any
) -> None:
    folder = table.save(tmp_path / "table")
    pair = load_table(folder)
    assert pair[1] == EMBEDDED
    monkeypatch.setattr(settings, "load_table", None)
    manifest = save_cache(llama.model, None, llama.ids, tmp_path / "a", tables=pair)
    assert manifest.identity.table.codecs == table.record.digests
    manifest = save_cache(
        llama.model, None, llama.ids, tmp_path / "b", tables=(pair[0], "me/table")
    )
    assert manifest.identity.table.location == "me/table"
    assert not (tmp_path / "b" / "table").exists()


@pytest.mark.parametrize("tables", ["auto", None, "{table}"])
def test_levels_are_those_of_the_table_there_will_be(table: ModelTable, tables: Any) -> None:
    given = table if tables == "{table}" else tables
    lossy = {"auto": "delta", None: None, "{table}": "transform"}[tables]
    names = [level.name for level in choose(given, None).levels]
    assert [name.split("-")[0] for name in names] == [lossy] * (len(names) - 1) + ["lossless"]
    for name in names:
        assert name in [level.name for level in choose(given, [name]).levels]
    with pytest.raises(ValueError, match=rf"unknown level 'best'.*{', '.join(names)}, raw"):
        choose(given, ["best"])


@pytest.mark.since("5.24")  # serves Mamba
@pytest.mark.parametrize("tables", ["auto", "{table}"])
def test_states_alone_have_no_use_for_a_table(table: ModelTable, tables: Any) -> None:
    model = AutoModelForCausalLM.from_config(
        MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, state_size=4)
    )
    given = table if tables == "{table}" else tables
    choice = choose(given, None, model)
    assert choice.tables == (None if given is table else "auto")
    assert choice.reference(choice.levels) is None
    assert [level.name for level in choice.levels] == ["lossless"]
    with pytest.raises(ValueError, match=r"unknown level 'delta-1'.*lossless, raw"):
        choose(given, ["delta-1"], model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": ["delta-9"]}, "unknown level 'delta-9'.*delta-3, lossless, raw"),
        ({"levels": []}, "none given"),
        ({"levels": ["delta-1"], "tables": None}, "unknown level 'delta-1'.*lossless, raw"),
        ({"chunk_tokens": 0}, "chunks of 1 to"),
        ({"chunk_tokens": 1 << 21}, "chunks of 1 to"),
        ({"importance": "best"}, "expected importance"),
        ({"importance": torch.ones(3)}, "expected importance"),
        ({"importance": torch.ones(70, dtype=torch.bool)}, "expected importance"),
        ({"importance": torch.ones(70, dtype=torch.complex64)}, "expected importance"),
        ({"private": True}, "without push_to_hub"),
        ({"push_to_hub": "me/x", "privat": True}, "unknown privat; a push takes"),
        ({"push_to_hub": "no/such/name"}, "Repo id"),
    ],
)
@pytest.mark.parametrize("given", [False, True])
def test_settings_are_checked_before_anything_is_done(
    llama: Any, tmp_path: Path, idle: None, options: Any, message: str, given: bool
) -> None:
    cache = llama.native() if given else None
    with pytest.raises(ValueError, match=message):
        save_cache(llama.model, None, llama.ids, tmp_path / "a", cache=cache, **options)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"levels": ["delta-9"]}, ValueError, "unknown level"),
        ({"tables": "{missing}"}, StoreError, "folder"),
        ({"level": ["delta-1"]}, ValueError, "expected no level"),
        ({"cache": None}, TypeError, "multiple values"),
        ({"push_to_hub": "no/such/name"}, ValueError, "Repo id"),
        ({"out": "file"}, StoreError, "is a file"),
        ({"chunk_tokens": 0}, ValueError, "chunks of 1 to"),
        ({"importance": "best"}, ValueError, "expected importance"),
    ],
)
def test_settings_of_a_recording_are_checked_before_it_begins(
    llama: Any, tmp_path: Path, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / options.pop("out", "a")
    if options.get("tables"):
        options = {"tables": tmp_path / "missing"}
    with pytest.raises(kind, match=message), record_cache(llama.model, out, **options):
        pytest.fail("the block was run")
    assert not llama.model._forward_hooks
    assert not (tmp_path / "a").exists()


# Publishing.


def test_a_token_that_the_hub_does_not_know_is_told_before_the_pass(
    llama: Any, hub: LocalHub, tmp_path: Path, idle: None, monkeypatch: Any
) -> None:
    monkeypatch.setattr(settings, "get_token", lambda: None)
    context = (llama.model, None, llama.ids, tmp_path / "a")
    for options, message in (
        ({"endpoint": hub.endpoint, "token": "hf_wrong"}, "cannot push to me/x: .*token=..."),
        ({"endpoint": hub.endpoint}, "cannot push to me/x: .*token"),
        ({"endpoint": "http://127.0.0.1:9", "token": hub.token}, "cannot push to me/x"),
    ):
        with pytest.raises(StoreError, match=message):
            save_cache(*context, push_to_hub="me/x", **options)
    assert not (tmp_path / "a").exists()
    api = HfApi(endpoint=hub.endpoint, token=hub.token)
    check_push("me/x", {"private": True}, endpoint=hub.endpoint, token=hub.token)
    assert not api.repo_exists("me/x")  # nothing is made before there is something to push


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"privat": True}, ValueError, "unknown privat; a push takes"),
        ({"repo_id": "no/such/name"}, ValueError, "Repo id"),
        ({"token": "hf_wrong"}, StoreError, "cannot push to me/x: .*token=..."),
        ({"endpoint": "http://127.0.0.1:9"}, StoreError, "cannot push to me/x"),
    ],
)
def test_what_is_wrong_with_a_push_of_a_streamed_cache_is_told_before_it_is_saved(
    llama: Any,
    hub: LocalHub,
    tmp_path: Path,
    monkeypatch: Any,
    options: dict[str, Any],
    kind: type[Exception],
    message: str,
) -> None:
    monkeypatch.setattr(streamed, "save_extended", None)  # would not be callable
    asked = {"repo_id": "me/x", "endpoint": hub.endpoint, "token": hub.token, **options}
    with contextlib.closing(llama.load()) as cache:
        with pytest.raises(kind, match=message):
            cache.save_pretrained(tmp_path / "a", push_to_hub=True, **asked)
        with pytest.raises(kind, match=message):
            cache.push_to_hub(**asked)
        with pytest.raises(ValueError, match="got push_to_hub='me/x'; name the repository with"):
            cache.save_pretrained(tmp_path / "a", push_to_hub="me/x")
        with pytest.raises(ValueError, match="expected no private without push_to_hub"):
            cache.save_pretrained(tmp_path / "a", private=True)
    assert not (tmp_path / "a").exists()
