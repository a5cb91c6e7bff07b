"""``plan``: the arithmetic, the layout from a config, and the command."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    LlamaConfig,
    MambaConfig,
    RecurrentGemmaConfig,
)

from hf_cachegen.cli.arithmetic import (
    TYPICAL_BITS,
    Link,
    cached_values,
    plan_transfer,
    typical_levels,
)
from hf_cachegen.errors import UnsupportedError
from hf_cachegen.hf.contents import cached_layers
from hf_cachegen.hf.describe import describe_layout
from hf_cachegen.hf.estimate import estimate_layout, estimate_states_bytes
from hf_cachegen.hf.prefill import prefill
from hf_cachegen.layout import KVLayout, LayerSpec, TensorSpec


def layout_of(*windows: int | None, dtype: str = "bfloat16") -> KVLayout:
    """A cache of 2 x 3 x 64 values per token and layer."""
    tensors = tuple(TensorSpec(name=name, heads=3, dim=64) for name in ("keys", "values"))
    layers = [
        LayerSpec(
            kind="full_attention" if window is None else "sliding_attention",
            tensors=tensors,
            window=window,
        )
        for window in windows
    ]
    return KVLayout(dtype=dtype, ropes={}, layers=tuple(layers))


def test_a_case_by_hand():
    # 30 layers x 384 values = 11,520 values or 23,040 bytes a token, as SmolLM2-135M has.
    plan = plan_transfer(layout_of(*[None] * 30), 3000, Link(0.1), prefill_s=4.0)
    assert plan.bytes_per_token == 23_040
    assert plan.raw_bytes == 69_120_000
    levels = {level.level: level for level in plan.levels}
    assert list(levels) == [*TYPICAL_BITS, "lossless", "raw"]
    assert levels["raw"].load_s == pytest.approx(5.5296)
    assert levels["raw"].break_even_gbps == pytest.approx(0.13824)
    assert levels["delta-0"].size_bytes == 12_312_000
    assert levels["delta-0"].load_s == pytest.approx(0.98496)
    assert levels["lossless"].bits_per_value == pytest.approx(10.6)
    assert [level.helps for level in plan.levels] == [True] * 5 + [False]
    assert "helps at 0.1 Gbit/s" in plan.verdict
    assert "4.1x as soon" in plan.verdict
    assert plan.verdict.endswith("still sooner is lossless.")


def test_when_it_does_not_help():
    layout = layout_of(*[None] * 30)
    slow = plan_transfer(layout, 3000, Link(0.01), prefill_s=4.0)
    assert not any(level.helps for level in slow.levels)
    assert "does not help" in slow.verdict
    assert "0.0246 Gbit/s" in slow.verdict
    undecodable = plan_transfer(layout, 3000, Link(10, decode_gb_per_s=0.01), prefill_s=4.0)
    assert [level.helps for level in undecodable.levels] == [False] * 5 + [True]
    assert "level raw is there" in undecodable.verdict
    assert undecodable.levels[0].break_even_gbps is None
    unknown = plan_transfer(layout, 3000, Link(10))
    assert {level.helps for level in unknown.levels} == {None}
    assert "give the prefill time" in unknown.verdict


@given(
    tokens=st.integers(1, 10**6),
    gbps=st.floats(1e-3, 1e3),
    prefill_s=st.floats(1e-3, 1e4),
    window=st.one_of(st.none(), st.integers(1, 4096)),
)
def test_at_its_break_even_speed_a_level_takes_as_long_as_the_prefill(
    tokens, gbps, prefill_s, window
):
    layout = layout_of(None, window)
    for level in plan_transfer(layout, tokens, Link(gbps), prefill_s).levels:
        assert level.helps == (gbps > level.break_even_gbps) or level.load_s == prefill_s
        again = plan_transfer(layout, tokens, Link(level.break_even_gbps), prefill_s)
        same = next(other for other in again.levels if other.level == level.level)
        assert same.load_s == pytest.approx(prefill_s)


def test_a_window_bounds_what_is_kept():
    assert cached_values(layout_of(None, 512), 1000) == 384 * (1000 + 512)
    assert cached_values(layout_of(None, 512), 100) == 384 * 200


def test_exact_levels_follow_the_dtype():
    assert typical_levels("float32")["raw"] == 32
    assert typical_levels("float32")["lossless"] == pytest.approx(26.6)
    assert typical_levels("float16")["lossless"] == pytest.approx(13.6)


def test_the_estimate_is_what_the_model_caches(tiny_model):
    layers = cached_layers(prefill(tiny_model, tiny_model.dummy_inputs["input_ids"][0]))
    found = describe_layout(tiny_model, [layer.tensors for layer in layers])
    estimate = estimate_layout(tiny_model.config)
    assert estimate.bytes_per_token == found.bytes_per_token
    assert [layer.window for layer in estimate.layers] == [layer.window for layer in found.layers]


def test_estimates_of_other_architectures():
    gemma = estimate_layout(
        Gemma3TextConfig(num_hidden_layers=6, num_key_value_heads=1, head_dim=256, sliding_window=9)
    )
    assert [layer.window for layer in gemma.layers] == [9] * 5 + [None]
    assert gemma.layers[0].channels == 512
    latent = estimate_layout(
        DeepseekV3Config(num_hidden_layers=2, kv_lora_rank=512, qk_rope_head_dim=64)
    )
    assert latent.values_per_token == 2 * 576
    assert estimate_layout(LlamaConfig(), "float32").dtype == "float32"
    with pytest.raises(UnsupportedError, match=r"layer 0 of recurrent_gemma caches a recurrent"):
        estimate_layout(RecurrentGemmaConfig())


def test_states_are_part_of_every_level():
    config = MambaConfig(hidden_size=64, state_size=8, num_hidden_layers=3, conv_kernel=4)
    states_bytes = estimate_states_bytes(config, "bfloat16")
    assert states_bytes == 3 * 128 * (4 * 2 + 8 * 4)  # the recurrent ones are float32
    assert estimate_states_bytes(LlamaConfig()) == 0
    alone = plan_transfer(estimate_layout(config), 3000, Link(0.1), 4.0, states_bytes=states_bytes)
    assert {level.size_bytes for level in alone.levels} == {states_bytes} == {alone.raw_bytes}
    layout = layout_of(None)
    without, beside = (
        plan_transfer(layout, 3000, Link(0.1), 4.0, states_bytes=size) for size in (0, 1000)
    )
    for level, other in zip(without.levels, beside.levels, strict=True):
        assert other.size_bytes == level.size_bytes + 1000


def test_the_command(run, refuse, tiny_model_folder, tmp_path):
    arguments = ("plan", tiny_model_folder / "config.json", "--context", 1000, "--link-gbps", 1)
    found = json.loads(run(*arguments, "--prefill-tokens-per-s", 500, "--json"))
    assert found["prefill_s"] == 2
    assert found["bytes_per_token"] == 3 * 2 * 2 * 16 * 4
    assert found["levels"][0]["helps"] is True
    half = json.loads(run(*arguments, "--dtype", "bfloat16", "--json"))
    assert half["bytes_per_token"] * 2 == found["bytes_per_token"]
    assert half["levels"][0]["break_even_gbps"] is None
    assert "A cache helps" in run(*arguments, "--prefill-s", 2)
    assert "does not help" in run(*arguments, "--prefill-s", 1e-6)
    assert "expected one of" in refuse(*arguments, "--prefill-s", 2, "--measure")
    assert "positive" in refuse(*arguments, "--prefill-s", -2)


def test_a_measured_prefill(run, tiny_model_folder):
    arguments = ("plan", tiny_model_folder, "--context", 300, "--link-gbps", 1, "--measure")
    assert 0 < json.loads(run(*arguments, "--json"))["prefill_s"] < 60
