"""Rotations and layers as transformers' own modules have them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_cachegen.codec.rope import rotate, unrotate
from hf_cachegen.hf.compat import (
    cache_argument,
    layer_devices,
    longrope_limit,
    new_cache,
    one_pass_limit,
    output_cache,
    rope_specs,
)

START = 37


def llama_with(**rope: Any) -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8,
            hidden_size=32,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=512,
            rope_parameters={"rope_theta": 10_000.0, **rope},
        )
    )


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "yarn": YARN,
    "llama3": LLAMA3,
}


def assert_same_rotation(spec: Any, rotary: torch.nn.Module, *kind: str) -> None:
    """``rotate`` is the model's own rotation, and ``unrotate`` undoes it."""
    keys = torch.randn(1, 2, 20, 16, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(START, START + 20)[None]
    cos, sin = rotary(keys, positions, *kind)
    _, expected = apply_rotary_pos_emb(keys, keys, cos, sin)
    assert torch.allclose(rotate(keys[0], spec, START), expected[0], atol=2e-6)
    assert torch.allclose(unrotate(expected[0], spec, START), keys[0], atol=2e-6)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_rotation_is_that_of_llama(rope: dict[str, Any]) -> None:
    model = llama_with(**rope)
    specs = rope_specs(model)
    assert list(specs) == [""]
    assert_same_rotation(specs[""], model.model.rotary_emb)


def test_yarn_scales_attention() -> None:
    assert rope_specs(llama_with(**YARN))[""].attention_scaling > 1.1


def test_gemma_has_two_rotations(tiny_gemma: Gemma3ForCausalLM) -> None:
    specs = rope_specs(tiny_gemma)
    assert set(specs) == {"sliding_attention", "full_attention"}
    assert specs["sliding_attention"].inv_freq != specs["full_attention"].inv_freq
    for kind, spec in specs.items():
        assert_same_rotation(spec, tiny_gemma.model.rotary_emb, kind)


def _longrope() -> PreTrainedModel:
    return Phi3ForCausalLM(
        Phi3Config(
            vocab_size=8,
            hidden_size=32,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            pad_token_id=0,
            max_position_embeddings=512,
            original_max_position_embeddings=128,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 128,
            },
        )
    )


def _dynamic() -> PreTrainedModel:
    return llama_with(rope_type="dynamic", factor=2.0)


def _unknown_family() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=2))


@pytest.mark.parametrize("make", [_longrope, _dynamic, _unknown_family])
def test_rotation_that_may_move_or_is_not_known_is_left_alone(make: Any) -> None:
    assert rope_specs(make()) == {}


def test_lengths_at_which_a_rotation_moves() -> None:
    static = llama_with(**YARN)
    assert (longrope_limit(static), one_pass_limit(static)) == (None, None)
    assert (longrope_limit(_longrope()), one_pass_limit(_longrope())) == (128, 128)
    assert (longrope_limit(_dynamic()), one_pass_limit(_dynamic())) == (None, 512)
    assert one_pass_limit(_unknown_family()) is None


def test_lengths_of_a_model_with_two_rotations(tiny_gemma: Gemma3ForCausalLM) -> None:
    assert one_pass_limit(tiny_gemma) is None
    config = copy.deepcopy(tiny_gemma.config)
    config.rope_parameters["full_attention"] = {
        "rope_type": "dynamic",
        "factor": 2.0,
        "rope_theta": 10_000.0,
    }
    assert one_pass_limit(Gemma3ForCausalLM(config)) == 4096


def test_recorded_cache_keeps_what_a_window_leaves(tiny_gemma: Gemma3ForCausalLM) -> None:
    cache = new_cache(tiny_gemma)
    with torch.no_grad():
        output = tiny_gemma(torch.arange(3, 43)[None], **{cache_argument(tiny_gemma): cache})
    assert {layer.keys.shape[2] for layer in cache.layers} == {40}
    assert output_cache(output) is cache
    assert output_cache({"logits": 1}) is None
    assert output_cache(torch.zeros(1)) is None


def test_layers_are_cached_where_they_run(tiny_gemma: Gemma3ForCausalLM) -> None:
    assert layer_devices(tiny_gemma, 4) == [torch.device("cpu")] * 4
