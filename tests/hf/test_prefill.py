"""Filling a cache piece by piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_cachegen.hf.contents import cached_layers
from hf_cachegen.hf.prefill import prefill


@pytest.mark.parametrize("piece_tokens", [1, 20, 69, 70, 1000])
def test_pieces_give_the_cache_of_one_pass(published: Any, piece_tokens: int) -> None:
    pieces = prefill(published.model, published.ids, piece_tokens=piece_tokens, progress=False)
    whole = published.native(recording=True)
    assert pieces.get_seq_length() == len(published.ids)
    for ours, native in zip(pieces.layers, whole.layers, strict=True):
        assert torch.allclose(ours.keys, native.keys, atol=1e-4)
        assert torch.allclose(ours.values, native.values, atol=1e-4)
        assert not ours.keys.requires_grad


def test_contents_know_where_a_window_begins(gemma: Any) -> None:
    whole = cached_layers(prefill(gemma.model, gemma.ids, progress=False))
    windowed = cached_layers(gemma.native())
    assert [layer.first for layer in whole] == [0, 0, 0, 0]
    assert [layer.first for layer in windowed] == [55, 0, 55, 0]
    for layer, part in zip(whole, windowed, strict=True):
        for ours, native in zip(layer.tokens(60, 70), part.tokens(60, 70), strict=True):
            assert torch.equal(ours, native)
