"""What a streamed cache costs in memory: one copy of itself."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_cachegen import CompressedStreamingCache, save_cache
from hf_cachegen.codec.delta import DeltaConfig
from hf_cachegen.codec.delta_profile import DeltaProfiler
from hf_cachegen.hf.compat import cache_argument
from hf_cachegen.hf.contents import cached_layers
from hf_cachegen.hf.describe import config_digest, describe_layout
from hf_cachegen.tables import ModelTable

TOKENS = 2000
LEVELS = ("delta-0", "lossless", "raw")

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")

pytestmark = pytest.mark.skipif(
    not CLEAR_REFS.exists(), reason="needs Linux's account of a process's memory"
)


def memory_bytes(field: str) -> int:
    """``VmRSS``, the memory of this process now, or ``VmHWM``, the most it has been."""
    lines = STATUS.read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """A model that computes little and caches 48 KiB a token."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8,
            hidden_size=32,
            intermediate_size=8,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=4096,
            dtype="float32",
        )
    ).eval()


@pytest.fixture(scope="module")
def folder(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artefact of a cache of some 100 MB of noise, in many chunks."""
    cache = DynamicCache(config=model.config)
    generator = torch.Generator().manual_seed(1)
    for layer in range(6):
        cache.update(*torch.randn(2, 1, 8, TOKENS, 128, generator=generator), layer)
    layers = cached_layers(cache)
    layout = describe_layout(model, [layer.tensors for layer in layers])
    profiler = DeltaProfiler(layout, DeltaConfig(factors=(1.0,), tables="tensor"))
    for observe in (profiler.observe_moments, profiler.observe_counts):
        for index, layer in enumerate(layers):
            observe(index, layer.tokens(0, 200), 0)
    table = ModelTable.build(
        profiler.finish(), model_id="m", config=config_digest(model), layout=layout, data=()
    )
    target = tmp_path_factory.mktemp("memory") / "wide"
    ids = torch.zeros(TOKENS, dtype=torch.long)
    options = {"tables": table, "levels": LEVELS, "chunk_tokens": 200, "progress": False}
    save_cache(model, None, ids, target, cache=cache, **options)
    return target


@pytest.mark.parametrize("level", LEVELS)
def test_first_use_needs_little_more_than_the_cache(
    model: LlamaForCausalLM, folder: Path, level: str
) -> None:
    def use() -> int:
        """Peak of memory, from what was there before, until two tokens after first use."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # gives back what is free already
        CLEAR_REFS.write_text("5")  # resets VmHWM
        before = memory_bytes("VmRSS")
        cache = CompressedStreamingCache.from_pretrained(folder, model=model, level=level)
        with torch.no_grad():
            for _ in range(2):
                model(torch.ones(1, 1, dtype=torch.long), **{cache_argument(model): cache})
        return memory_bytes("VmHWM") - before

    use()  # compiles and warms up
    assert use() < 1.35 * 6 * 2 * 8 * TOKENS * 128 * 4
