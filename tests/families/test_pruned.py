"""Every family with full attention goes on from a cache from which tokens were evicted, or refuses.

The truth is the whole native cache with a mask that hides what was evicted.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, FalconConfig, FalconForCausalLM

from hf_cachegen import CompressedStreamingCache, UnsupportedError, save_cache
from hf_cachegen.hf.compat import cache_argument, token_layers
from hf_cachegen.hf.families import BIASED_MODELS

KEPT = torch.tensor([*range(4), *range(5, 60, 2), 61, 62, 66, 69])
NEW = torch.tensor([[7, 9, 11]])


def evict(cache: DynamicCache) -> DynamicCache:
    """The same tokens of every layer."""
    for index in token_layers(cache.layers):
        layer = cache.layers[index]
        layer.keys, layer.values = layer.keys[:, :, KEPT], layer.values[:, :, KEPT]
    return cache


@torch.no_grad()
def test_family_goes_on_from_what_is_kept_or_refuses(
    token_family: Any, warm_of: Callable[..., Any], tmp_path: Path
) -> None:
    warm, options = warm_of(token_family), {"levels": ["delta-3", "lossless"], "progress": False}
    folder, name = tmp_path / "pruned", cache_argument(warm.model)
    save = {"positions": KEPT, "chunk_tokens": 16, **options}
    if token_family.layers != "full" or token_family.model_type in BIASED_MODELS:
        with pytest.raises(UnsupportedError, match="cannot go on from a cache from which tokens"):
            save_cache(warm.model, None, warm.ids, folder, cache=warm.native(), **save)
        assert not folder.exists()
        return
    model = copy.deepcopy(warm.model)
    save_cache(model, None, warm.ids, folder, cache=evict(warm.native()), **save)
    ours = {
        level: CompressedStreamingCache.from_pretrained(folder, model=model, level=level)
        for level in ("delta-3", "lossless")
    }
    hiding = torch.zeros(1, 70 + NEW.shape[1], dtype=torch.long)
    hiding[:, KEPT] = hiding[:, 70:] = 1
    places = torch.arange(70, 73)[None]
    truth = model(NEW, attention_mask=hiding, position_ids=places, **{name: warm.native()}).logits
    whole = model(NEW, **{name: warm.native()}).logits
    exact = model(NEW, **{name: ours["lossless"]}).logits
    assert (exact - truth).norm() < 1e-5 * truth.norm() < 1e-2 * (whole - truth).norm()
    lossy = model(NEW, **{name: ours["delta-3"]}).logits
    assert 0 < (lossy - truth).norm() < 0.3 * truth.norm()


def test_family_refused_for_its_biases_takes_no_positions(
    token_family: Any, warm_of: Callable[..., Any]
) -> None:
    # Once it does, the refusal has lost its reason.
    takes = "position_ids" in inspect.signature(warm_of(token_family).model.forward).parameters
    assert takes == (token_family.model_type not in BIASED_MODELS)


def test_biases_of_falcon_are_a_setting(tmp_path: Path) -> None:
    config = FalconConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, alibi=True
    )
    model = FalconForCausalLM(config).eval()
    with pytest.raises(UnsupportedError, match="ALiBi"):
        save_cache(model, None, range(3, 40), tmp_path, cache=DynamicCache(), positions=range(9))
