"""Commands on caches from which tokens were evicted: what is kept is told, checked and copied."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_cachegen import CompressedStreamingCache, save_cache
from hf_cachegen.hf.compat import cache_argument

Run = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tiny_model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every second of 60 tokens."""
    folder = tmp_path_factory.mktemp("kept") / "context"
    ids, cache = torch.arange(3, 63), DynamicCache()
    with torch.no_grad():
        tiny_model(ids[None], **{cache_argument(tiny_model): cache})
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, ::2], layer.values[:, :, ::2]
    save_cache(
        tiny_model, None, ids, folder, cache=cache, positions=range(0, 60, 2), tables=None,
        progress=False,
    )  # fmt: skip
    return folder


def test_info_tells_what_is_kept(run: Run, folder: Path) -> None:
    facts = json.loads(run("info", folder, "--json"))
    assert (facts["tokens"], facts["kept"]) == (60, 30)
    assert facts["raw_bytes"] == 30 * 3 * 2 * 2 * 16 * 4
    assert "60, 30 of them kept by each head in 1 chunk" in run("info", folder)


def test_copied_with_what_is_kept(
    run: Run, refuse: Run, folder: Path, tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    run("verify", folder)
    run("fetch", folder, "-o", tmp_path / "copy")
    assert {p.name for p in (tmp_path / "copy").glob("kept-*")} == {
        p.name for p in folder.glob("kept-*")
    }
    cache = CompressedStreamingCache.from_pretrained(
        tmp_path / "copy", model=tiny_model, level="lossless"
    )
    assert cache.is_pruned
    # The same context with every token is not replaced by it.
    save_cache(tiny_model, None, range(3, 63), tmp_path / "whole", tables=None, progress=False)
    assert "holds a cache of" in refuse("fetch", folder, "-o", tmp_path / "whole")
    damaged = next((tmp_path / "copy").glob("kept-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert damaged.name in refuse("verify", tmp_path / "copy")
