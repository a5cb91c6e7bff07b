"""What an artefact must match: every difference is named before a chunk is read."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_cachegen import ModelMismatch, TableMismatch, save_cache
from hf_cachegen.artifact import Artifact
from hf_cachegen.errors import UnsupportedError
from hf_cachegen.hf.cache import CompressedStreamingCache
from hf_cachegen.hf.describe import (
    FINGERPRINT_VALUES,
    config_digest,
    dtype_name,
    model_name,
    weights_fingerprint,
)
from hf_cachegen.streaming.controller import FixedLevel
from hf_cachegen.tables import ModelTable


def _one_value(model: PreTrainedModel) -> PreTrainedModel:
    weight = model.model.layers[1].self_attn.k_proj.weight
    stride = -(-weight.numel() // FINGERPRINT_VALUES)
    weight.data.view(-1)[5 * stride] += 1e-3
    return model


def _other_weights(model: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(77)
    return type(model)(model.config).eval()


def _other_dtype(model: PreTrainedModel) -> PreTrainedModel:
    return model.to(torch.bfloat16)


def _with_config(model: PreTrainedModel, **changes: Any) -> PreTrainedModel:
    config = copy.deepcopy(model.config)
    for name, value in changes.items():
        setattr(config, name, value)
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    return other


def _other_theta(model: PreTrainedModel) -> PreTrainedModel:
    ropes = copy.deepcopy(model.config.rope_parameters)
    for rope in ropes.values() if "rope_theta" not in ropes else [ropes]:
        rope["rope_theta"] = 777.0
    return _with_config(model, rope_parameters=ropes)


def _other_norm(model: PreTrainedModel) -> PreTrainedModel:
    return _with_config(model, rms_norm_eps=0.1)


MODELS: dict[str, tuple[Callable[[PreTrainedModel], PreTrainedModel], str]] = {
    "one weight": (_one_value, r"weights: expected '\w{32}', found '\w{32}'"),
    "all weights": (_other_weights, r"weights: expected '\w{32}', found '\w{32}'"),
    "dtype": (_other_dtype, r"layout\.dtype: expected 'bfloat16', found 'float32'"),
    "rope theta": (_other_theta, r"layout\.ropes\.\w+\.inv_freq: expected .* found .*differ"),
    "config": (_other_norm, r"config: expected '\w{32}', found '\w{32}'"),
}


@pytest.mark.parametrize(("change", "message"), MODELS.values(), ids=MODELS.keys())
def test_other_model_is_refused_before_a_chunk_is_read(
    published: Any, tricky_store: Any, threads_end: Any, change: Any, message: str
) -> None:
    store = tricky_store(published.folder)
    other = change(copy.deepcopy(published.model))
    with pytest.raises(ModelMismatch, match=message):
        CompressedStreamingCache(Artifact.open(store), other, FixedLevel(0))
    assert store.chunk_reads == []
    assert threads_end()


def test_other_architecture_is_refused(llama: Any, gemma: Any, tricky_store: Any) -> None:
    store = tricky_store(llama.folder)
    with pytest.raises(ModelMismatch, match="architecture: expected 'Gemma3ForCausalLM', found"):
        CompressedStreamingCache(Artifact.open(store), gemma.model, FixedLevel(0))
    assert store.chunk_reads == []


def test_other_table_is_refused_before_a_chunk_is_read(llama: Any, tricky_store: Any) -> None:
    store = tricky_store(llama.folder)
    artifact = Artifact.open(store)
    right = llama.load().table()
    delta = right.tables["delta"]
    other = ModelTable.build(
        replace(delta, spread=delta.spread * 2),
        model_id="other",
        config=right.record.config,
        layout=right.record.layout,
        data=right.record.data,
    )
    digests = [table.record.digests["delta"] for table in (right, other)]
    with pytest.raises(TableMismatch, match="(?s)" + ".*".join(digests)):
        CompressedStreamingCache(artifact, llama.model, FixedLevel(0), other)
    assert store.chunk_reads == []


def test_same_model_from_elsewhere_is_accepted(llama: Any, tmp_path: Any) -> None:
    llama.model.save_pretrained(tmp_path / "elsewhere")
    other = type(llama.model).from_pretrained(tmp_path / "elsewhere", attn_implementation="eager")
    assert weights_fingerprint(other) == weights_fingerprint(llama.model)
    assert config_digest(other) == config_digest(llama.model)
    cache = CompressedStreamingCache.from_pretrained(llama.folder, model=other, level="raw")
    assert cache.get_seq_length() == len(llama.ids)
    assert model_name(other) == "elsewhere"


def test_rope_frequencies_count_as_equal_within_rounding(llama: Any) -> None:
    other = copy.deepcopy(llama.model)
    other.model.rotary_emb.inv_freq *= 1 + 1e-7
    CompressedStreamingCache.from_pretrained(llama.folder, model=other).close()


def test_fingerprint_sees_every_parameter(llama: Any) -> None:
    found = {weights_fingerprint(llama.model)}
    names = [name for name, _ in llama.model.named_parameters()]
    for name in names:
        other = copy.deepcopy(llama.model)
        other.get_parameter(name).data.view(-1)[0] += 1e-3
        found.add(weights_fingerprint(other))
    assert len(found) == 1 + len(names)


def test_config_digest_is_of_what_is_computed(llama: Any) -> None:
    other = copy.deepcopy(llama.model)
    other.config._name_or_path = "somewhere/else"
    other.config.use_cache = False
    assert config_digest(other) == config_digest(llama.model)
    other.config.num_attention_heads = 2
    assert config_digest(other) != config_digest(llama.model)


def test_dtype_without_a_codec_is_refused() -> None:
    assert dtype_name(torch.float16) == "float16"
    with pytest.raises(UnsupportedError, match="float64"):
        dtype_name(torch.float64)


def test_layout_is_that_of_the_cache(gemma: Any) -> None:
    layout = Artifact.open(gemma.load().artifact.store).manifest.identity.layout
    assert [layer.window for layer in layout.layers] == [16, None, 16, None]
    assert [layer.tensors[0].rope for layer in layout.layers] == [
        "sliding_attention",
        "full_attention",
    ] * 2
    assert {layer.tensors[1].rope for layer in layout.layers} == {None}
    assert layout.bytes_per_token == 4 * 2 * 2 * 16 * 4
    assert json.loads(layout.model_dump_json())["dtype"] == "float32"


def test_table_of_another_layout_is_refused(llama: Any, gemma: Any, tmp_path: Any) -> None:
    with pytest.raises(TableMismatch, match="another layout"):
        save_cache(gemma.model, None, gemma.ids, tmp_path / "a", tables=llama.load().table())
