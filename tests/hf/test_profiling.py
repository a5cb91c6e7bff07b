"""Tables from sample text: what they count, what they cost, and that they fit."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

from hf_cachegen import profile_model
from hf_cachegen.codec.delta import DeltaCodec, DeltaConfig
from hf_cachegen.codec.delta_profile import DeltaProfiler
from hf_cachegen.hf.contents import cached_layers
from hf_cachegen.hf.describe import describe_layout
from hf_cachegen.hf.prefill import prefill
from hf_cachegen.hf.profiling import profile_cache
from hf_cachegen.levels import codec_for, lossy_levels


def profile(model: Any, tokenizer: Any, samples: dict[str, str], **options: Any) -> Any:
    return profile_model(model, tokenizer, samples, progress=False, **options)


def test_samples_are_cut_and_counted(tiny_model: Any, tiny_tokenizer: Any, tiny_text: str) -> None:
    length = len(tiny_tokenizer(tiny_text)["input_ids"])
    samples = {"a": tiny_text, "b": tiny_text[:200], "c": tiny_text}
    table = profile(tiny_model, tiny_tokenizer, samples, sample_tokens=300)
    kept = length - length % 300 + (length % 300 if 2 * (length % 300) >= 300 else 0)
    assert dict(table.record.data) == {"a": kept, "c": kept}
    table = profile(tiny_model, tiny_tokenizer, samples, sample_tokens=300, max_samples=1)
    assert dict(table.record.data) == {"a": 300}


def test_text_of_less_than_a_sample_is_refused(tiny_model: Any, tiny_tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="at least 750 tokens"):
        profile(tiny_model, tiny_tokenizer, {"a": "Too short."})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_tokens": 7}, "at least 8 tokens, got 7"),
        ({"sample_tokens": 0}, "at least 8 tokens, got 0"),
        ({"max_samples": 0}, "one sample"),
        ({"max_samples": -1}, "one sample"),
        ({"gradient_samples": 0}, "one gradient sample"),
        ({"configs": ()}, "at least one codec"),
    ],
)
def test_settings_without_a_sample_are_refused(
    tiny_model: Any, tiny_tokenizer: Any, tiny_text: str, options: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        profile(tiny_model, tiny_tokenizer, {"a": tiny_text}, **options)


def test_the_shortest_samples_and_the_shortest_rest_of_them(
    tiny_model: Any, tiny_tokenizer: Any, tiny_text: str
) -> None:
    text = tiny_tokenizer.decode(tiny_tokenizer(tiny_text)["input_ids"][:20])
    n_tokens = len(tiny_tokenizer(text)["input_ids"])
    assert n_tokens % 8 == 4
    table = profile(tiny_model, tiny_tokenizer, {"a": text}, sample_tokens=8)
    assert dict(table.record.data) == {"a": n_tokens}


def test_profile_is_deterministic(tiny_model: Any, tiny_tokenizer: Any, tiny_text: str) -> None:
    tables = [
        profile(tiny_model, tiny_tokenizer, {"a": tiny_text}, sample_tokens=300, model_id="me/it")
        for _ in range(2)
    ]
    assert tables[0].record.digests == tables[1].record.digests
    assert tables[0].record.model_id == "me/it"


def test_memory_does_not_grow_with_the_text(
    tiny_model: Any, tiny_tokenizer: Any, tiny_text: str
) -> None:
    """NumPy's part, the statistics: tensors are those of one sample's cache."""

    def peak_bytes(copies: int) -> int:
        samples = {str(n): tiny_text for n in range(copies)}
        tracemalloc.start()
        profile(tiny_model, tiny_tokenizer, samples, sample_tokens=200)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert peak_bytes(4) < 1.2 * peak_bytes(1)


@pytest.mark.parametrize("tables", ["channel", "tensor"])
@pytest.mark.parametrize("group", [0, 10])
def test_held_in_cache_is_coded_at_the_entropy_of_its_table(
    tiny_model: Any, tables: str, group: int
) -> None:
    """Within 2% and the fixed cost of each stream, for every level and layer."""
    ids = torch.randint(3, 300, (2000,), generator=torch.Generator().manual_seed(3))
    layers = cached_layers(prefill(tiny_model, ids, progress=False))
    layout = layout_of(tiny_model, layers)
    profiler = DeltaProfiler(layout, DeltaConfig(group=group, tables=tables, sinks=0))
    for observe in (profiler.observe_moments, profiler.observe_counts):
        for index, layer in enumerate(layers):
            observe(index, layer.tensors, 0)
    found = profiler.finish()
    ideal_bits = coded_bits = streams = 0.0
    for level, counts in enumerate(profiler._counts):
        codec = DeltaCodec(layout, found, level)
        coded_bits += 8 * sum(
            len(codec.encode(index, layer.tensors, 0)) for index, layer in enumerate(layers)
        )
        ideal_bits += _entropy_bits(counts)
        if group:
            ideal_bits += _entropy_bits(profiler._anchor_counts)
        streams += len(layers) * 64 * (1 if not group else 2) / (32768 // 2000)
    assert coded_bits < 1.02 * ideal_bits + streams * 8 * (4 + 2 * 32)


def _entropy_bits(counts: np.ndarray) -> float:
    """Bits of all that was counted, each table by its own frequencies; escapes as they are."""
    total = counts.sum(axis=1, keepdims=True)
    share = np.where(counts > 0, counts / total, 1.0)
    return float(-(counts * np.log2(share)).sum())


def layout_of(model: Any, layers: Any) -> Any:
    return describe_layout(model, [layer.tensors for layer in layers])


def test_table_of_one_cache_encodes_it(published: Any) -> None:
    layers = cached_layers(prefill(published.model, published.ids, progress=False))
    layout = layout_of(published.model, layers)
    table = profile_cache(published.model, layout, layers)
    assert table.record.data == (("the cached context itself", len(published.ids)),)
    assert table.tables["delta"].config.tables == "tensor"
    raw_bytes = layout.bytes_per_token * len(published.ids)
    for level in lossy_levels(table, "delta"):
        codec = codec_for(level, layout, table)
        coded = [codec.encode(i, layer.tensors, 0) for i, layer in enumerate(layers)]
        assert sum(map(len, coded)) < raw_bytes / 2
