"""A real model with sliding windows, one KV head and two rotations: Gemma 3 270M, float32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_cachegen import CompressedStreamingCache, save_cache
from hf_cachegen.bench.corpus import documents
from hf_cachegen.bench.quality import compare, continuation_logits
from hf_cachegen.hf.compat import cache_argument

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "models" / "gemma-3-270m"
TABLE = ROOT / "model_tables" / "google--gemma-3-270m"

pytestmark = [
    pytest.mark.real_gemma,
    pytest.mark.skipif(not FOLDER.exists(), reason="`make test-gemma` prepares the model"),
]

CONTEXT_TOKENS = 1300
CHUNK_TOKENS = 400
NEW_TOKENS = 64
DIVERGENCE = {"transform-0": 0.3, "transform-1": 0.09, "transform-2": 0.03, "transform-3": 0.006}
"""Largest mean KL divergence of the tokens after the context, nats: about twice what the table's
card says of several documents."""


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def ids() -> Tensor:
    """A document, ``[T]``, and the tokens that follow it."""
    text = next(iter(documents("evaluation").values()))
    tokens = AutoTokenizer.from_pretrained(FOLDER)(text, return_tensors="pt")["input_ids"][0]
    assert len(tokens) >= CONTEXT_TOKENS + NEW_TOKENS
    return tokens[: CONTEXT_TOKENS + NEW_TOKENS]


@pytest.fixture(scope="module")
def folder(model: Any, ids: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of the document."""
    folder = tmp_path_factory.mktemp("gemma") / "context"
    context = ids[:CONTEXT_TOKENS]
    save_cache(
        model, None, context, folder, tables=TABLE, chunk_tokens=CHUNK_TOKENS, progress=False
    )
    return folder


@pytest.fixture(scope="module")
def native(model: Any, ids: Tensor) -> Callable[[], DynamicCache]:
    """``native()``: the document in a cache of transformers' own."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[None, :CONTEXT_TOKENS], **{cache_argument(model): cache})
    return lambda: copy.deepcopy(cache)


def test_exact_level_generates_as_a_native_cache(
    model: Any, ids: Tensor, folder: Path, native: Any
) -> None:
    assert model.config.sliding_window < CONTEXT_TOKENS
    assert {*model.config.layer_types} == {"sliding_attention", "full_attention"}
    prompt = ids[None, : CONTEXT_TOKENS + 4]
    options = {"max_new_tokens": 16, "do_sample": False, "output_logits": True}
    ours, theirs = (
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            return_dict_in_generate=True,
            **{cache_argument(model): cache},
            **options,
        )
        for cache in (
            CompressedStreamingCache.from_pretrained(folder, model=model, level="lossless"),
            native(),
        )
    )
    assert torch.equal(ours.sequences, theirs.sequences)
    assert torch.equal(torch.stack(ours.logits), torch.stack(theirs.logits))


def test_finer_levels_predict_more_alike(
    model: Any, ids: Tensor, folder: Path, native: Any
) -> None:
    following = ids[CONTEXT_TOKENS:]
    exact = continuation_logits(model, native(), following)
    found, sizes = [], []
    for level, bound in DIVERGENCE.items():
        cache = CompressedStreamingCache.from_pretrained(folder, model=model, level=level)
        quality = compare(exact, continuation_logits(model, cache, following), following)
        assert 0 < quality.kl_mean < bound, level
        found.append(quality.kl_mean)
        sizes.append(sum(transfer.size_bytes for transfer in cache.stream_report()))
    assert found == sorted(found, reverse=True)
    assert sizes == sorted(sizes)


def test_only_the_window_of_a_sliding_layer_is_kept(model: Any, folder: Path, native: Any) -> None:
    cache = CompressedStreamingCache.from_pretrained(folder, model=model, level="lossless")
    kept = [layer.keys.shape[2] for layer in cache.layers]
    assert kept == [layer.keys.shape[2] for layer in native().layers]
    assert {*kept} == {CONTEXT_TOKENS, model.config.sliding_window - 1}
