"""Every way to save a cache, and what the artefact then says and holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import HfApi
from torch import Tensor
from transformers import (
    DynamicCache,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_cachegen import (
    CompressedStreamingCache,
    IdentityError,
    ModelTable,
    PromptMismatch,
    StoreError,
    UnsupportedError,
    push_artifact,
    record_cache,
    save_cache,
)
from hf_cachegen.artifact import EXACT, Artifact, Manifest
from hf_cachegen.bench.local_hub import LocalHub
from hf_cachegen.hf.compat import cache_argument
from hf_cachegen.stores import HubStore, LocalStore

SUFFIX = torch.tensor([7, 9, 11])
ANSWER = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


def read(folder: Path) -> tuple[Manifest, list[int]]:
    """The manifest and ids of an intact artefact."""
    artifact = Artifact.open(LocalStore(folder))
    artifact.verify()
    return artifact.manifest, artifact.token_ids.tolist()


def chunk_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "chunks").iterdir()}


def same_logits(published: Any, folder: Path, native: Any, level: str = "lossless") -> bool:
    """Whether a saved cache continues as ``native`` does."""
    cache = CompressedStreamingCache.from_pretrained(folder, model=published.model, level=level)
    found, expected = (published.forward(c, SUFFIX[None]) for c in (cache, native))
    return torch.equal(found, expected)


def grow(published: Any, cache: Any) -> Tensor:
    """Answer a question; returns all ids."""
    return published.model.generate(**cache.inputs(input_ids=SUFFIX), **ANSWER)


def test_text_and_ids_give_the_same_artefact(
    llama: Any, tiny_tokenizer: Any, tiny_text: str, tmp_path: Path
) -> None:
    options = {"chunk_tokens": 200, "tables": None, "prefill_tokens": 300, "progress": False}
    ids = tiny_tokenizer(tiny_text)["input_ids"]
    for name, context in (("text", tiny_text), ("ids", ids), ("rows", torch.tensor([ids]))):
        save_cache(llama.model, tiny_tokenizer, context, tmp_path / name, **options)
        manifest, found = read(tmp_path / name)
        assert found == ids
        assert manifest.chunk_tokens == 200
        assert [level.name for level in manifest.levels] == ["lossless"]
        assert chunk_files(tmp_path / name) == chunk_files(tmp_path / "text")


def test_existing_cache_is_saved_as_it_is(published: Any, tmp_path: Path) -> None:
    native = published.native()
    ids = torch.cat((published.ids, SUFFIX))  # the last three are not cached yet
    save_cache(published.model, None, ids, tmp_path / "a", cache=native, tables=None)
    assert read(tmp_path / "a")[1] == published.ids.tolist()
    assert same_logits(published, tmp_path / "a", native)


def test_context_shorter_than_the_window_and_the_sinks(published: Any, tmp_path: Path) -> None:
    for length in (1, 3, 4, 5, 15, 16, 17):
        ids, folder = published.ids[:length], tmp_path / str(length)
        save_cache(published.model, None, ids, folder)
        native = DynamicCache(config=published.model.config)
        published.forward(native, ids[None])
        assert same_logits(published, folder, native)
        cache = CompressedStreamingCache.from_pretrained(folder, model=published.model)
        cache.wait()
        assert cache.get_seq_length() == length


@pytest.mark.parametrize(
    "ids", [[], torch.ones(2, 5, dtype=torch.long), torch.ones(1, 1, 5, dtype=torch.long)]
)
def test_ids_of_no_one_context_are_refused(llama: Any, tmp_path: Path, ids: Any) -> None:
    with pytest.raises(ValueError, match="one"):
        save_cache(llama.model, None, ids, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_text_needs_a_tokenizer(llama: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        save_cache(llama.model, None, "text", tmp_path / "a")


def test_fewer_ids_than_cached_tokens_are_refused(llama: Any, tmp_path: Path) -> None:
    with pytest.raises(PromptMismatch, match="all 70 cached tokens, got 69"):
        save_cache(llama.model, None, llama.ids[:-1], tmp_path / "a", cache=llama.native())


def test_batch_is_refused(llama: Any, tmp_path: Path) -> None:
    native = llama.native()
    native.batch_repeat_interleave(2)
    with pytest.raises(UnsupportedError, match="batch of 2"):
        save_cache(llama.model, None, llama.ids, tmp_path / "a", cache=native)
    with (
        pytest.raises(UnsupportedError, match="batch of 2"),
        record_cache(llama.model, tmp_path / "a"),
    ):
        llama.model.generate(llama.ids.repeat(2, 1), **ANSWER)
    assert not (tmp_path / "a").exists()


def _recurrent_gemma() -> RecurrentGemmaForCausalLM:
    return RecurrentGemmaForCausalLM(
        RecurrentGemmaConfig(
            vocab_size=320,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=1,
            lru_width=16,
        )
    )


def _t5() -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=320, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )


@pytest.mark.parametrize("make", [_recurrent_gemma, _t5])
def test_unsupported_family_is_refused_by_name(make: Any, tmp_path: Path) -> None:
    model = make()
    with pytest.raises(UnsupportedError, match=type(model).__name__):
        save_cache(model, None, torch.arange(10), tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_a_lossy_level_cannot_hold_are_refused(
    llama: Any, tmp_path: Path, value: float
) -> None:
    table = llama.load().table()
    native = llama.native()
    native.layers[1].values[0, 1, 20, 3] = value
    options = {"cache": native, "chunk_tokens": 32}
    with pytest.raises(ValueError, match=r"layer 1.*lossless"):
        save_cache(llama.model, None, llama.ids, tmp_path / "a", tables=table, **options)
    with pytest.raises(ValueError, match="layer 1"):
        save_cache(llama.model, None, llama.ids, tmp_path / "a", tables="auto", **options)
    assert not (tmp_path / "a" / "cache.json").exists()
    save_cache(llama.model, None, llama.ids, tmp_path / "a", tables=None, **options)
    found = CompressedStreamingCache.from_pretrained(tmp_path / "a", model=llama.model)
    assert torch.equal(
        found.layers[1].values.view(torch.int32), native.layers[1].values.view(torch.int32)
    )


@pytest.fixture(scope="module")
def table(llama: Any, transform_table: Any) -> Any:
    return transform_table(llama.model)


def importances(length: int) -> dict[str, Any]:
    ramp = torch.linspace(-2, 2, length)
    return {"flat": "flat", "predicted": "predicted", "recent": "recent", "a": ramp, "b": -ramp}


def test_encodings_of_other_importance_are_kept_apart(
    llama: Any, table: Any, tmp_path: Path
) -> None:
    names: set[str] = set()
    labels: set[str] = set()
    for name, importance in importances(len(llama.ids)).items():
        options = {"tables": table, "chunk_tokens": 32, "importance": importance}
        save_cache(llama.model, None, llama.ids, tmp_path / name, **options)
        manifest, _ = read(tmp_path / name)
        labels |= {str(level.params.get("importance")) for level in manifest.levels}
        assert not names & {chunk.name for chunk in manifest.chunks}
        names |= {chunk.name for chunk in manifest.chunks}
        assert same_logits(llama, tmp_path / name, llama.native())
        cache = CompressedStreamingCache.from_pretrained(
            tmp_path / name, model=llama.model, level="transform-2"
        )
        assert llama.forward(cache, SUFFIX[None]).isfinite().all()
    assert {"None", "flat", "predicted", "recent"} < labels
    assert len(labels) == 6
    with pytest.raises(IdentityError, match="overwrite"):
        save_cache(llama.model, None, llama.ids, tmp_path / "flat", tables=table, chunk_tokens=32)


def test_tokens_that_matter_more_are_closer(llama: Any, table: Any, tmp_path: Path) -> None:
    weights = torch.zeros(len(llama.ids))
    weights[40:50] = 8
    errors = {}
    for name, importance in (("plain", "predicted"), ("weighted", weights)):
        options = {"tables": table, "importance": importance}
        save_cache(llama.model, None, llama.ids, tmp_path / name, **options)
        cache = CompressedStreamingCache.from_pretrained(
            tmp_path / name, model=llama.model, level="transform-1"
        )
        errors[name] = sum(
            (ours.keys - theirs.keys).square()[0].sum((0, 2))
            for ours, theirs in zip(cache.layers, llama.native().layers, strict=True)
        )
    assert errors["weighted"][40:50].sum() < errors["plain"][40:50].sum() / 2
    assert torch.equal(errors["weighted"][:40], errors["plain"][:40])


@pytest.mark.parametrize(
    "importance",
    [
        torch.zeros(69),
        torch.zeros(71),
        torch.zeros(70, 1),
        torch.zeros(()),
        torch.full((70,), float("nan")),
        torch.full((70,), float("inf")),
        [1e300] * 70,
        [0.0] * 69,
        [[0.0] * 70],
        [[0.0], [0.0, 1.0]],
        [None] * 70,
        ["high"] * 70,
        {"first": 1.0},
        0.5,
        "best",
    ],
)
def test_importance_of_another_shape_or_name_is_refused(
    llama: Any, table: Any, tmp_path: Path, importance: Any
) -> None:
    with pytest.raises(ValueError, match="expected importance"):
        save_cache(
            llama.model, None, llama.ids, tmp_path / "a", tables=table, importance=importance
        )
    assert not (tmp_path / "a").exists()


def test_importance_is_any_numbers(llama: Any, table: Any, tmp_path: Path) -> None:
    weights = np.linspace(-2, 2, 70)
    given = {
        "tensor": torch.tensor(weights),
        "parameter": torch.tensor(weights, dtype=torch.float32, requires_grad=True),
        "array": weights,
        "view": weights[::-1].copy()[::-1],
        "list": weights.tolist(),
        "tuple": tuple(weights),
    }
    for name, importance in given.items():
        save_cache(
            llama.model, None, llama.ids, tmp_path / name, tables=table, importance=importance
        )
        assert read(tmp_path / name)[0].levels == read(tmp_path / "tensor")[0].levels
        assert chunk_files(tmp_path / name) == chunk_files(tmp_path / "tensor")
    options = {"tables": table, "importance": [1] * 70}
    save_cache(llama.model, None, llama.ids, tmp_path / "whole numbers", **options)
    label = read(tmp_path / "whole numbers")[0].levels[0].params["importance"]
    assert label != read(tmp_path / "tensor")[0].levels[0].params["importance"]


@pytest.fixture(scope="module")
def keen_table(table: ModelTable) -> ModelTable:
    """The same, by which the last tokens matter much more than a random model's do."""
    tables, record = table.tables["transform"], table.record
    slope = np.float32([-2, 0])  # of the log of a token's distance from the end; constant
    groups = (replace(g, recency=np.r_[g.importance[:-1], slope]) for g in tables.groups)
    return ModelTable.build(
        replace(tables, groups=tuple(groups)),
        **{name: getattr(record, name) for name in ("model_id", "config", "layout", "data")},
    )


@pytest.fixture
def grown(llama: Any, keen_table: ModelTable, tmp_path: Path) -> Any:
    """``grown(importance)``: a cache of a context that was encoded so, and all ids in it."""

    def grown(importance: Any) -> tuple[CompressedStreamingCache, Tensor]:
        options = {"tables": keen_table, "chunk_tokens": 32, "importance": importance}
        save_cache(llama.model, None, llama.ids, tmp_path / "context", **options, overwrite=True)
        cache = CompressedStreamingCache.from_pretrained(
            tmp_path / "context", model=llama.model, level="lossless"
        )
        return cache, grow(llama, cache)

    return grown


def test_what_a_cache_grew_by_is_encoded_with_the_importance_of_its_levels(
    llama: Any, grown: Any, tmp_path: Path
) -> None:
    last = set()
    for mode in ("flat", "predicted", "recent"):
        cache, ids = grown(mode)
        cache.save_pretrained(tmp_path / mode, token_ids=ids)
        parent, manifest = read(tmp_path / "context")[0], read(tmp_path / mode)[0]
        assert manifest.levels == parent.levels
        assert manifest.levels[0].params["importance"] == mode
        assert manifest.chunks[:2] == parent.chunks[:2]
        said = tmp_path / f"{mode}, as said"
        save_cache(llama.model, None, ids, said, cache=cache, importance=mode)
        assert chunk_files(said) == chunk_files(tmp_path / mode)
        last.add((tmp_path / mode / manifest.chunks[-1].path).read_bytes())
    assert len(last) == 3


def test_streamed_levels_keep_their_importance_when_saved_by_hand(
    llama: Any, keen_table: ModelTable, grown: Any, tmp_path: Path
) -> None:
    cache, ids = grown("recent")
    parent, _ = read(tmp_path / "context")
    for name, options in (("own", {}), ("given", {"tables": keen_table})):
        save_cache(llama.model, None, ids, tmp_path / name, cache=cache, **options)
        manifest, _ = read(tmp_path / name)
        assert manifest.levels == parent.levels
        assert manifest.chunks[:2] == parent.chunks[:2]
    other = {"tables": keen_table, "levels": ["transform-0"]}
    for name, options, importance in (
        ("other levels", other, "predicted"),
        ("other importance", {"importance": "flat"}, "flat"),
    ):
        save_cache(llama.model, None, ids, tmp_path / name, cache=cache, **options)
        manifest, _ = read(tmp_path / name)
        assert manifest.levels[0].params["importance"] == importance
    native = llama.native()
    save_cache(llama.model, None, llama.ids, tmp_path / "new", cache=native, tables=keen_table)
    assert read(tmp_path / "new")[0].levels[0].params["importance"] == "predicted"


def test_what_was_encoded_with_weights_is_copied_but_grows_only_with_new_ones(
    llama: Any, grown: Any, tmp_path: Path
) -> None:
    cache, ids = grown([0.5] * 70)
    folder = tmp_path / "grown"
    with pytest.raises(ValueError, match=r"tokens 64 to 77 .* save_cache\(.*importance="):
        cache.save_pretrained(folder, token_ids=ids)
    with pytest.raises(ValueError, match=r"tokens 64 to 77 .* save_cache\(.*importance="):
        save_cache(llama.model, None, ids, folder, cache=cache)
    assert not (folder / "cache.json").exists()
    assert not chunk_files(folder)
    save_cache(llama.model, None, ids, folder, cache=cache, importance=[0.5] * 77)
    assert same_logits(llama, folder, cache)
    unchanged = CompressedStreamingCache.from_pretrained(tmp_path / "context", model=llama.model)
    unchanged.save_pretrained(tmp_path / "copy")
    save_cache(llama.model, None, llama.ids, tmp_path / "by hand", cache=unchanged)
    for name in ("copy", "by hand"):
        assert chunk_files(tmp_path / name) == chunk_files(tmp_path / "context")


def test_a_longer_context_extends_an_artefact_of_the_same_importance(
    llama: Any, table: Any, tmp_path: Path
) -> None:
    options = {"tables": table, "chunk_tokens": 32, "importance": "recent"}
    save_cache(llama.model, None, llama.ids[:64], tmp_path / "a", **options)
    before = chunk_files(tmp_path / "a")
    save_cache(llama.model, None, llama.ids, tmp_path / "a", **options)
    after = chunk_files(tmp_path / "a")
    assert before.items() <= after.items()
    assert len(after) == 3


def test_unchanged_cache_is_copied_byte_for_byte(published: Any, tmp_path: Path) -> None:
    published.load("delta-0").save_pretrained(tmp_path / "copy")
    assert chunk_files(tmp_path / "copy") == chunk_files(published.folder)
    manifest, ids = read(tmp_path / "copy")
    assert ids == published.ids.tolist()
    assert {chunk.source for chunk in manifest.chunks} == {EXACT}
    again = CompressedStreamingCache.from_pretrained(tmp_path / "copy", model=published.model)
    published.forward(again, SUFFIX[None])
    from_window = tmp_path / "from-window"
    save_cache(published.model, None, ids, from_window, cache=published.native(), tables=None)
    copy = CompressedStreamingCache.from_pretrained(from_window, model=published.model)
    copy.save_pretrained(tmp_path / "again")
    assert chunk_files(tmp_path / "again") == chunk_files(from_window)


def test_grown_cache_needs_its_ids(published: Any, tmp_path: Path) -> None:
    cache = published.load()
    ids = grow(published, cache)
    with pytest.raises(ValueError, match="token_ids"):
        cache.save_pretrained(tmp_path / "a")
    with pytest.raises(PromptMismatch):
        cache.save_pretrained(tmp_path / "a", token_ids=ids[:, 1:])
    with pytest.raises(ValueError, match="one sequence"):
        cache.save_pretrained(tmp_path / "a", token_ids=ids.repeat(2, 1))
    assert not (tmp_path / "a").exists()
    cache.save_pretrained(tmp_path / "a", token_ids=ids)
    assert read(tmp_path / "a")[1] == ids[0, :-1].tolist()
    assert same_logits(published, tmp_path / "a", cache)


def test_cropped_and_regrown_cache_needs_its_ids_too(llama: Any, tmp_path: Path) -> None:
    cache = llama.load()
    cache.crop(-20)
    llama.forward(cache, SUFFIX[None])  # shorter than the context, and not its beginning
    with pytest.raises(ValueError, match="token_ids"):
        cache.save_pretrained(tmp_path / "a")
    ids = torch.cat((llama.ids[:50], SUFFIX))
    cache.save_pretrained(tmp_path / "a", token_ids=ids)
    assert read(tmp_path / "a")[1] == ids.tolist()
    assert same_logits(llama, tmp_path / "a", cache)


def test_cache_without_tokens_is_not_saved(llama: Any, tmp_path: Path) -> None:
    cache = llama.load()
    cache.reset()
    with pytest.raises(PromptMismatch, match="at least one"):
        cache.save_pretrained(tmp_path / "a")


def test_second_turn_into_its_own_folder_writes_only_new_files(llama: Any, tmp_path: Path) -> None:
    folder = tmp_path / "chat"
    save_cache(llama.model, None, llama.ids[:64], folder, chunk_tokens=32)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.*") if path.is_file()}
    cache = CompressedStreamingCache.from_pretrained(folder, model=llama.model, level="finest")
    cache.save_pretrained(folder, token_ids=grow(llama, cache))
    manifest, _ = read(folder)
    assert [chunk.n_tokens for chunk in manifest.chunks] == [32, 32, 7]
    kept = {path for path in before if path.parent.name == "chunks" or "table" in str(path)}
    assert len(kept) == 2 + 2
    assert all(path.stat().st_mtime_ns == before[path] for path in kept)
    assert same_logits(llama, folder, cache)


def test_what_grew_from_a_lossy_level_says_so(published: Any, tmp_path: Path) -> None:
    cache = published.load("delta-1")
    cache.save_pretrained(tmp_path / "a", token_ids=grow(published, cache))
    sources = [chunk.source for chunk in read(tmp_path / "a")[0].chunks]
    assert sources[-1] == "delta-1"
    assert sources[0] == EXACT  # copied, since neither its tokens nor its windows have changed


def test_streamed_cache_keeps_its_settings_when_saved_by_hand(llama: Any, tmp_path: Path) -> None:
    cache = llama.load("delta-1")
    ids = grow(llama, cache)
    save_cache(llama.model, None, ids, tmp_path / "a", cache=cache)
    manifest, _ = read(tmp_path / "a")
    parent, _ = read(llama.folder)
    assert (manifest.levels, manifest.chunk_tokens) == (parent.levels, parent.chunk_tokens)
    assert manifest.identity == parent.identity
    assert [chunk.source for chunk in manifest.chunks] == [EXACT, EXACT, "delta-1"]
    save_cache(llama.model, None, ids, tmp_path / "b", cache=cache, tables=None)
    assert {chunk.source for chunk in read(tmp_path / "b")[0].chunks} == {"delta-1"}


def test_recorded_generation(published: Any, tmp_path: Path) -> None:
    with record_cache(published.model, tmp_path / "a", chunk_tokens=32, progress=False):
        output = published.model.generate(
            published.ids[None], return_dict_in_generate=True, **ANSWER
        )
    assert read(tmp_path / "a")[1] == output.sequences[0, :-1].tolist()
    native = next(output[key] for key in ("cache", "past_key_values") if key in output)
    assert same_logits(published, tmp_path / "a", native)
    assert not published.model._forward_hooks
    assert not published.model._forward_pre_hooks


def test_recorded_second_turn_on_a_streamed_cache(published: Any, tmp_path: Path) -> None:
    cache = published.load()
    with record_cache(published.model, tmp_path / "a", progress=False):
        first = grow(published, cache)
        second = published.model.generate(
            **cache.inputs(input_ids=SUFFIX, previous=first), **ANSWER
        )
    assert read(tmp_path / "a")[1] == second[0, :-1].tolist()
    assert same_logits(published, tmp_path / "a", cache)


def test_recording_follows_the_last_cache_used(llama: Any, tmp_path: Path) -> None:
    other = llama.ids.flip(0)
    with record_cache(llama.model, tmp_path / "a", tables=None):
        llama.model.generate(other[None], **ANSWER)
        cache = llama.load()
        ids = grow(llama, cache)
    assert read(tmp_path / "a")[1] == ids[0, :-1].tolist()


def test_recording_that_is_cut_short_writes_nothing(llama: Any, tmp_path: Path) -> None:
    def interrupted() -> None:
        with record_cache(llama.model, tmp_path / "a"):
            llama.model.generate(llama.ids[None], **ANSWER)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not (tmp_path / "a").exists()
    assert not llama.model._forward_hooks
    assert not llama.model._forward_pre_hooks


def _nothing(llama: Any, native: Any) -> None:
    pass


def _unknown_beginning(llama: Any, native: Any) -> None:
    llama.forward(native, SUFFIX[None])


def _padding(llama: Any, native: Any) -> None:
    mask = torch.ones(1, len(llama.ids), dtype=torch.long)
    mask[0, :5] = 0
    llama.model.generate(llama.ids[None], attention_mask=mask, **ANSWER)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (_nothing, "no forward pass"),
        (_unknown_beginning, "70 tokens whose ids"),
        (_padding, "padding"),
    ],
)
def test_recording_that_cannot_be_right_is_refused(
    llama: Any, tmp_path: Path, work: Any, message: str
) -> None:
    native = llama.native()
    with (
        pytest.raises(UnsupportedError, match=message),
        record_cache(llama.model, tmp_path / "a"),
    ):
        work(llama, native)
    assert not (tmp_path / "a").exists()


def test_artefact_of_something_else_is_not_overwritten(
    llama: Any, gemma: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "a"
    save_cache(llama.model, None, llama.ids, folder, tables=None)
    with pytest.raises(IdentityError, match="overwrite"):
        save_cache(gemma.model, None, llama.ids, folder, tables=None)
    with pytest.raises(IdentityError, match="overwrite"):
        save_cache(llama.model, None, llama.ids.flip(0), folder, tables=None)
    assert read(folder)[1] == llama.ids.tolist()
    save_cache(gemma.model, None, llama.ids, folder, tables=None, overwrite=True)
    assert read(folder)[0].identity.architecture == "Gemma3ForCausalLM"


@pytest.fixture
def remote(hub: LocalHub, llama: Any) -> dict[str, Any]:
    """Options for a private repository ``me/context`` with the Llama artefact."""
    options = {"endpoint": hub.endpoint, "token": hub.token}
    push_artifact(llama.folder, "me/context", private=True, **options)
    return options


def test_pushed_artefact_is_streamed_back(llama: Any, remote: dict[str, Any]) -> None:
    def logits(**options: Any) -> Tensor:
        cache = CompressedStreamingCache.from_pretrained(
            "me/context", model=llama.model, level="finest", **options
        )
        return llama.forward(cache, SUFFIX[None])

    expected = llama.forward(llama.native(), SUFFIX[None])
    assert torch.equal(logits(**remote), expected)
    commit = HfApi(**remote).repo_info("me/context").sha
    HfApi(**remote).delete_file("cache.json", "me/context")
    assert torch.equal(logits(**remote, revision=commit), expected)
    with pytest.raises(StoreError):
        logits(**remote)
    with pytest.raises(StoreError, match="token"):
        logits(endpoint=remote["endpoint"], token=False)
    HubStore("me/context", revision=commit, **remote).download(progress=False)
    offline = {"local_files_only": True, "revision": commit, "endpoint": "http://127.0.0.1:9"}
    assert torch.equal(logits(**offline), expected)


def test_streamed_cache_is_pushed_with_its_card(llama: Any, remote: dict[str, Any]) -> None:
    cache = CompressedStreamingCache.from_pretrained("me/context", model=llama.model, **remote)
    cache.push_to_hub("me/copy", token_ids=grow(llama, cache), **remote)
    api = HfApi(**remote)
    files = api.list_repo_files("me/copy")
    assert {"README.md", "cache.json"} <= set(files)
    assert not any(".lock" in file or file.endswith(".tmp") for file in files)
    card = Path(api.hf_hub_download("me/copy", "README.md")).read_text()
    assert "77 tokens" in card
    assert "library_name: hf-cachegen" in card
    assert "delta-3" in card
    copy = CompressedStreamingCache.from_pretrained(
        "me/copy", model=llama.model, level="finest", **remote
    )
    assert copy.context_length == 77


def test_folder_name_is_the_default_repository(
    llama: Any, remote: dict[str, Any], tmp_path: Path
) -> None:
    llama.load().save_pretrained(f"{tmp_path}/named/", push_to_hub=True, **remote)
    assert HfApi(**remote).file_exists("local-user/named", "cache.json")


def test_cache_argument_is_that_of_the_model(llama: Any) -> None:
    assert cache_argument(llama.model) in llama.load().inputs(input_ids=SUFFIX)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["a", "b"], "expected token ids"),
        ([1.5, 2.5], "expected token ids as integers"),
        ([True, False], "expected token ids as integers"),
        ([3, 10**6], "which the model knows, got 3 to 1000000"),
        ([-1, 3], "which the model knows, got -1 to 3"),
    ],
)
def test_ids_are_checked_before_the_model_runs(
    llama: Any, tmp_path: Path, ids: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        save_cache(llama.model, None, ids, tmp_path / "a")
    assert not (tmp_path / "a").exists()
