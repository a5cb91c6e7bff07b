"""What a config alone says of a cache, against the cache that the model fills."""

from __future__ import annotations

from typing import Any

import pytest
from family_table import Family
from transformers import PreTrainedModel
from warm import build, random_ids

from hf_cachegen.hf.contents import cached_layers
from hf_cachegen.hf.describe import describe_layout
from hf_cachegen.hf.estimate import estimate_layout, estimate_states_bytes
from hf_cachegen.hf.prefill import prefill
from hf_cachegen.hf.states import cached_states
from hf_cachegen.layout import KVLayout

FEW_HEADS = [
    Family("falcon, all heads", "falcon", config={"multi_query": False}),
    Family(
        "falcon, groups", "falcon", config={"new_decoder_architecture": True, "num_kv_heads": 2}
    ),
    Family("gpt_bigcode", "gpt_bigcode", config={"n_embd": 64, "n_layer": 2, "n_head": 4}),
]


def shapes(layout: KVLayout) -> list[Any]:
    """What decides on the size of a cache."""
    return [
        (layer.kind, layer.window, [(spec.heads, spec.dim) for spec in layer.tensors])
        for layer in layout.layers
    ]


def found(model: PreTrainedModel) -> KVLayout:
    """The layout of a cache that the model has filled."""
    layers = cached_layers(prefill(model, random_ids(9), progress=False))
    return describe_layout(model, [layer.tensors for layer in layers])


def test_estimate_is_what_a_family_caches(family: Any) -> None:
    model = build(family)
    assert shapes(estimate_layout(model.config)) == shapes(found(model))


def test_estimated_states_are_as_large_as_those_that_a_family_keeps(family: Any) -> None:
    model = build(family)
    states = cached_states(prefill(model, random_ids(9), progress=False)).values()
    estimated = estimate_states_bytes(model.config, "float32")
    assert estimated == sum(held.size_bytes for held in states)
    assert (estimated > 0) == ("states" in family.layers)


@pytest.mark.parametrize("variant", FEW_HEADS, ids=str)
def test_estimate_counts_the_heads_that_are_cached(variant: Family) -> None:
    model = build(variant)
    assert shapes(estimate_layout(model.config)) == shapes(found(model))
