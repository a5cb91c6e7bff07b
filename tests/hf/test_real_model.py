"""A real model in float32: what the tiny random ones cannot show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_cachegen import CompressedStreamingCache, record_cache, save_cache
from hf_cachegen.bench.corpus import documents

FOLDER = Path(__file__).parents[2] / ".cache" / "models" / "SmolLM2-135M"

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(not FOLDER.exists(), reason="`make model` prepares the model"),
]

ANSWER = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


def test_answers_and_sizes(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    text = next(iter(documents("evaluation").values()))[:1200]
    manifest = save_cache(model, tokenizer, text, tmp_path / "a", progress=False)
    answers, sizes = {}, {}
    for level in ("delta-3", "lossless"):
        cache = CompressedStreamingCache.from_pretrained(tmp_path / "a", model=model, level=level)
        with record_cache(model, tmp_path / level, progress=False):
            prompt = cache.inputs(tokenizer, "\n\nIn short, this text is about")
            answers[level] = model.generate(**prompt, **ANSWER)
        sizes[level] = sum(transfer.size_bytes for transfer in cache.stream_report())
    ids = prompt["input_ids"]
    cold = model.generate(ids, attention_mask=torch.ones_like(ids), **ANSWER)
    assert torch.equal(answers["lossless"], cold)
    assert torch.equal(answers["delta-3"][:, : ids.shape[1]], ids)
    raw_bytes = manifest.identity.layout.bytes_per_token * manifest.tokens.n
    assert sizes["lossless"] < 0.9 * raw_bytes
    assert sizes["delta-3"] < 0.25 * raw_bytes
    again = CompressedStreamingCache.from_pretrained(
        tmp_path / "lossless", model=model, level="finest"
    )
    assert torch.equal(again.token_ids, cold[0, :-1])
