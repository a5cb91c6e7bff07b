"""The longest stored beginning of a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_cachegen import save_cache
from hf_cachegen.hf.compat import cache_argument
from hf_cachegen.hf.prefixes import load_longest_prefix

CHUNK_TOKENS = 32
OPTIONS = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}


@pytest.fixture
def store(llama: Any, tmp_path: Path) -> Path:
    """Artefacts of 20, 70 and 100 tokens that begin alike; the last differs from token 50 on."""
    longest = torch.cat((llama.ids[:50], torch.arange(50) + 3))
    for name, ids in (("short", llama.ids[:20]), ("a/whole", llama.ids), ("a/b/other", longest)):
        options = {"chunk_tokens": CHUNK_TOKENS, "tables": None, "progress": False}
        save_cache(llama.model, None, ids, tmp_path / name, **options)
    return tmp_path


def answer(model: Any, cache: Any, prompt: torch.Tensor) -> torch.Tensor:
    return model.generate(
        prompt[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        **{cache_argument(model): cache},
        **OPTIONS,
    )


@pytest.mark.parametrize(
    ("kept", "found"),
    [(70, 70), (69, 64), (65, 64), (40, 32), (31, 20), (20, 20), (19, None)],
)
def test_most_tokens_that_agree_are_loaded(
    llama: Any, store: Path, kept: int, found: int | None
) -> None:
    prompt = torch.cat((llama.ids[:kept], torch.tensor([7, 9, 11])))
    cache = load_longest_prefix(store, prompt, model=llama.model)
    if found is None:
        assert cache is None
        return
    assert cache is not None
    assert cache.get_seq_length() == cache.context_length == found
    native = llama.native()
    native.crop(found - 70)
    assert torch.equal(answer(llama.model, cache, prompt), answer(llama.model, native, prompt))


def test_only_chunks_that_are_needed_are_fetched(llama: Any, store: Path) -> None:
    for chunk in (store / "a/whole/chunks").iterdir():
        for other in (store / "a/b/other/chunks").glob(chunk.name):
            other.unlink()  # the first chunk is in both; the one of "whole" will do
    prompt = torch.cat((llama.ids[:33], torch.tensor([7, 9, 11])))
    (store / "a/b/other/cache.json").unlink()
    cache = load_longest_prefix(store, prompt, model=llama.model)
    assert cache is not None
    cache.wait()
    assert len(cache.stream_report()) == 1


def test_prefix_can_be_saved_again(llama: Any, store: Path, tmp_path: Path) -> None:
    cache = load_longest_prefix(store, llama.ids[:69], model=llama.model)
    assert cache is not None
    cache.save_pretrained(tmp_path / "again")
    assert (
        load_longest_prefix(tmp_path / "again", llama.ids, model=llama.model).context_length == 64
    )


def test_window_that_is_not_stored_is_passed_over(gemma: Any) -> None:
    folder = gemma.folder.parent
    assert load_longest_prefix(folder, gemma.ids, model=gemma.model).context_length == 70
    assert load_longest_prefix(folder, gemma.ids[:69], model=gemma.model) is None


def test_artefacts_of_other_models_are_passed_over(llama: Any, gemma: Any) -> None:
    assert load_longest_prefix(llama.folder, llama.ids, model=gemma.model) is None


def test_damaged_artefact_is_passed_over_with_a_warning(llama: Any, store: Path) -> None:
    (store / "a/whole/cache.json").write_bytes(b"{")
    with pytest.warns(UserWarning, match=r"whole.cache\.json is passed over"):
        cache = load_longest_prefix(store, llama.ids, model=llama.model)
    assert cache is not None
    assert cache.context_length == 32


def test_a_folder_that_is_not_there_is_a_mistake(llama: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected a folder with artefacts, found none at"):
        load_longest_prefix(tmp_path / "typo", llama.ids, model=llama.model)


def test_a_text_is_no_prompt_here(llama: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected token ids \[T\] or \[1, T\], got str"):
        load_longest_prefix(tmp_path, "hello", model=llama.model)


def test_empty_folder_has_nothing(llama: Any, tmp_path: Path) -> None:
    assert load_longest_prefix(tmp_path, llama.ids, model=llama.model) is None
