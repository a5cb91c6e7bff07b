"""Streamed contexts in caches of transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_cachegen.hf.joining import fill_cache

NEW = torch.tensor([[7, 9, 11]])


def test_filled_cache_is_the_native_one(published: Any) -> None:
    cache, mask = fill_cache(DynamicCache(config=published.model.config), published.load())
    assert torch.equal(mask, torch.ones(1, 70, dtype=torch.long))
    assert cache.get_seq_length() == 70
    assert {layer.get_seq_length() for layer in cache.layers} == {70}
    native = published.native()
    assert torch.equal(published.forward(cache, NEW), published.forward(native, NEW))


def test_source_stays_as_it_is(published: Any) -> None:
    source = published.load()
    cache, _ = fill_cache(DynamicCache(config=published.model.config), source)
    published.forward(cache, NEW)
    assert source.get_seq_length() == 70
    native = published.native()
    assert torch.equal(published.forward(source, NEW), published.forward(native, NEW))


def test_shorter_context_is_padded_on_the_left(llama: Any) -> None:
    short = llama.load()
    short.crop(-9)
    cache, mask = fill_cache(DynamicCache(config=llama.model.config), short, llama.load())
    assert mask.tolist() == [[0] * 9 + [1] * 61, [1] * 70]
    assert torch.equal(cache.layers[0].keys[0, :, 9:], llama.native().layers[0].keys[0, :, :61])


def test_what_does_not_fit_is_refused(llama: Any) -> None:
    target = DynamicCache(config=llama.model.config)
    with pytest.raises(ValueError, match="at least one context"):
        fill_cache(target)
    with pytest.raises(ValueError, match="an empty cache"):
        fill_cache(llama.native(), llama.load())
    batch = llama.native()
    batch.batch_repeat_interleave(2)
    with pytest.raises(ValueError, match="one row"):
        fill_cache(target, batch)
