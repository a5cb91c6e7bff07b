"""``plan``: the arithmetic, the layout from a config, and the command."""

from __future__ import annotations

import json
import shutil

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

from hf_cachegen.bench.link import LinkServer
from hf_cachegen.bench.simulate import LADDERS
from hf_cachegen.cli.arithmetic import (
    TYPICAL_CODECS,
    Link,
    cached_values,
    exact_levels,
    plan_transfer,
    typical_levels,
)
from hf_cachegen.codec.delta import DeltaConfig
from hf_cachegen.codec.transform_tables import TransformConfig
from hf_cachegen.errors import UnsupportedError
from hf_cachegen.hf import codecs
from hf_cachegen.hf.contents import cached_layers
from hf_cachegen.hf.describe import describe_layout
from hf_cachegen.hf.estimate import estimate_layout, estimate_states_bytes
from hf_cachegen.hf.prefill import prefill
from hf_cachegen.hf.profiling import profile_model
from hf_cachegen.layout import KVLayout, LayerSpec, TensorSpec
from hf_cachegen.levels import codec_levels
from hf_cachegen.stores import LocalStore
from hf_cachegen.tables import ModelTable


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
    lossy = [level for codec in TYPICAL_CODECS for level in LADDERS[codec].levels]
    assert list(levels) == [*(level.name for level in lossy), "lossless", "raw"]
    assert [levels[level.name].bits_per_value for level in lossy] == [
        level.bits_per_value for level in lossy
    ]
    assert levels["raw"].load_s == pytest.approx(5.5296)
    assert levels["raw"].break_even_gbps == pytest.approx(0.13824)
    assert levels["delta-0"].size_bytes == 3000 * 11_520 * 2.82 / 8
    assert levels["delta-0"].load_s == pytest.approx(11_520 * 3000 * 2.82 / 1e8)
    assert levels["lossless"].bits_per_value == pytest.approx(10.6)
    assert levels["transform-0"].load_s == pytest.approx(11_520 * 3000 * 0.13 / 1e8)
    assert [level.helps for level in plan.levels] == [True] * 10 + [False]
    assert "helps at 0.1 Gbit/s" in plan.verdict
    assert "level transform-0 is there after 0.0449 s, 89.0x as soon" in plan.verdict
    assert plan.verdict.endswith("still sooner is lossless.")


def test_when_it_does_not_help():
    layout = layout_of(*[None] * 30)
    slow = plan_transfer(layout, 3000, Link(0.001), prefill_s=4.0)
    assert not any(level.helps for level in slow.levels)
    assert "does not help" in slow.verdict
    assert "0.00112 Gbit/s" in slow.verdict
    undecodable = plan_transfer(layout, 3000, Link(10, decode_gb_per_s=0.01), prefill_s=4.0)
    assert [level.helps for level in undecodable.levels] == [False] * 10 + [True]
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
    assert exact_levels("float32")["raw"] == 32
    assert exact_levels("float32")["lossless"] == pytest.approx(26.6)
    assert exact_levels("float16")["lossless"] == pytest.approx(13.6)
    assert (
        exact_levels("bfloat16")["lossless"]
        == LADDERS["delta"].with_exact_levels().levels[-2].bits_per_value
    )


def test_typical_levels_are_the_default_ones():
    assert list(typical_levels("transform")) == [
        level.name for level in codec_levels(TransformConfig())
    ]
    assert list(typical_levels("delta")) == [level.name for level in codec_levels(DeltaConfig())]


def test_the_finest_level_is_one_of_those_that_an_artefact_has():
    layout = layout_of(*[None] * 30)
    # Of the larger levels of delta, all are slower than the best of transform.
    plan = plan_transfer(layout, 3000, Link(0.1), prefill_s=1.0)
    assert [level.level for level in plan.levels if level.helps][-1] == "delta-0"
    assert plan.verdict.endswith("still sooner is transform-4.")
    alone = plan_transfer(layout, 3000, Link(0.1), 1.0, lossy={"delta": typical_levels("delta")})
    assert alone.verdict.endswith("still sooner is delta-0.")
    exact = plan_transfer(layout, 3000, Link(0.1), 4.0, lossy={})
    assert [level.level for level in exact.levels] == ["lossless", "raw"]
    assert exact.verdict.endswith("still sooner is lossless.")


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
    assert "folder or Hub id with --measure, got the file" in refuse(*arguments, "--measure")
    assert "above 0, got -2" in refuse(*arguments, "--prefill-s", -2)


def test_a_measured_prefill(run, tiny_model_folder):
    arguments = ("plan", tiny_model_folder, "--context", 300, "--link-gbps", 1, "--measure")
    assert 0 < json.loads(run(*arguments, "--json"))["prefill_s"] < 60


@pytest.fixture(scope="module")
def tables(tiny_model, tiny_tokenizer, tiny_text, tmp_path_factory):
    """``tables(*codecs)``: the folder of a table with the default levels of some codecs."""
    configs = {"delta": DeltaConfig(), "transform": TransformConfig(group=2, levels=3)}

    def tables(*codecs):
        table = profile_model(
            tiny_model,
            tiny_tokenizer,
            {"a": tiny_text},
            configs=[configs[codec] for codec in codecs],
            sample_tokens=200,
            max_samples=2,
            progress=False,
        )
        return table.save(tmp_path_factory.mktemp("tables") / "-".join(codecs))

    return tables


def test_sizes_of_a_table(run, refuse, tables, tiny_model_folder, tmp_path):
    arguments = ("plan", tiny_model_folder, "--context", 1000, "--link-gbps", 1, "--table")
    both = tables("transform", "delta")
    found = {
        level["level"]: level["bits_per_value"]
        for level in json.loads(run(*arguments, both, "--json"))["levels"]
    }
    with LocalStore(both) as store:
        rates = ModelTable.load(store).tables["transform"].rates
    assert list(found) == [
        *(f"transform-{i}" for i in range(3)),
        *typical_levels("delta"),
        "lossless",
        "raw",
    ]
    assert [found[f"transform-{i}"] for i in range(3)] == pytest.approx(rates)
    assert {name: found[name] for name in typical_levels("delta")} == typical_levels("delta")
    assert str(both) in run(*arguments, both)
    assert "typical" in run(*arguments[:-1])
    config = LlamaConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=2)
    config.save_pretrained(tmp_path)
    other = ("plan", tmp_path, *arguments[2:])
    assert "another layout than this model" in refuse(*other, both)


def test_table_that_is_not_at_hand_is_counted_once(
    run, tables, tiny_model_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(codecs, "HF_HOME", str(tmp_path))
    folder = tables("transform", "delta")
    arguments = ("plan", tiny_model_folder, "--context", 1000, "--link-gbps", 0.1, "--table")
    at_hand = json.loads(run(*arguments, folder, "--json"))
    assert at_hand["table_bytes"] == {}
    assert all(level["first_load_s"] == level["load_s"] for level in at_hand["levels"])
    with LinkServer(folder) as server:
        found = json.loads(run(*arguments, server.url, "--json"))
        assert found["table_bytes"] == {
            codec: (folder / f"{codec}.safetensors").stat().st_size
            for codec in ("transform", "delta")
        }
        for level, other in zip(found["levels"], at_hand["levels"], strict=True):
            table_s = 8 * found["table_bytes"].get(level["codec"], 0) / 1e8
            assert level["load_s"] == other["load_s"]
            assert level["first_load_s"] == pytest.approx(level["load_s"] + table_s)
        shutil.rmtree(tmp_path / "hf-cachegen")
        shown = run(*arguments, server.url, "--prefill-s", 10)
        size = found["table_bytes"]["transform"]
        assert f"{size / 1e6:.2f} MB to fetch, once for all caches of the model" in shown
        assert "first load" in shown
        assert "s with the table, the first time" in shown
        # Now it is at hand.
        assert json.loads(run(*arguments, server.url, "--json"))["table_bytes"] == {}
        assert "first load" not in run(*arguments, server.url)
    assert "name it with --table" in run(*arguments[:-1])


@pytest.mark.parametrize("at_hand", [False, True])
def test_table_is_opened_once(run, tables, tiny_model_folder, tmp_path, monkeypatch, at_hand):
    monkeypatch.setattr(codecs, "HF_HOME", str(tmp_path))
    arguments = ("plan", tiny_model_folder, "--context", 1000, "--link-gbps", 1, "--table")
    with LinkServer(tables("transform", "delta")) as server:
        for _ in range(1 + at_hand):
            server.requests.clear()
            run(*arguments, server.url)
        asked = [record.path for record in server.requests if record.sent_bytes]
    arrays = [] if at_hand else ["transform.safetensors", "delta.safetensors"]
    assert sorted(asked) == sorted(["table.json", *arrays])


def test_levels_whose_size_nobody_knows_are_left_out(run, tables, tiny_model_folder):
    arguments = ("plan", tiny_model_folder, "--context", 1000, "--link-gbps", 1, "--json")
    folder = tables("delta")
    levels = json.loads(run(*arguments, "--table", folder))["levels"]
    assert [level["level"] for level in levels] == [*typical_levels("delta"), "lossless", "raw"]
    record = json.loads((folder / "table.json").read_text())
    record["codecs"][0]["params"]["factors"] = [1.5, 1.0, 0.5, 0.25]
    (folder / "table.json").write_text(json.dumps(record))
    levels = json.loads(run(*arguments, "--table", folder))["levels"]
    assert [level["level"] for level in levels] == ["lossless", "raw"]
