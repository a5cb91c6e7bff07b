"""What saving, loading and streaming make of single families."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from transformers import DynamicCache
from warm import CHUNK_TOKENS, build, generate, random_ids

from hf_cachegen import CompressedStreamingCache, PromptMismatch, UnsupportedError, save_cache
from hf_cachegen.hf.calibration import calibrate
from hf_cachegen.hf.compat import cache_argument
from hf_cachegen.hf.contents import cached_layers
from hf_cachegen.hf.prefill import prefill
from hf_cachegen.hf.states import KINDS, cached_states

NEW = torch.tensor([[7, 9, 11]])


def named(families: Any, name: str) -> Any:
    return next(family for family in families if family.name == name)


def test_recomputed_context_is_the_native_one(family: Any, warm_of: Any) -> None:
    warm = warm_of(family)
    prompt = torch.cat((warm.ids[None], NEW), dim=1)
    if not family.recomputed:
        with pytest.raises(UnsupportedError, match=r"RoPE of type|token by token"):
            CompressedStreamingCache.from_pretrained(
                warm.folder, model=copy.deepcopy(warm.model), policy="text"
            )
        return
    model = copy.deepcopy(warm.model)
    cache = CompressedStreamingCache.from_pretrained(warm.folder, model=model, policy="text")
    (ours, logits), (native, expected) = (
        generate(model, each, prompt) for each in (cache, warm.native())
    )
    assert torch.equal(ours, native)
    assert torch.allclose(logits, expected, atol=family.tolerance)


def test_opened_cache_guards_its_model(warm_of: Any, families: Any) -> None:
    warm = warm_of(families[0])
    model = copy.deepcopy(warm.model)
    cache = CompressedStreamingCache.from_pretrained(warm.folder, model=model)
    with pytest.raises(PromptMismatch, match="at position 0 of 70"):
        generate(model, cache, NEW, attention_mask=None)


def test_cropped_answer_may_be_written_anew(warm_of: Any, families: Any) -> None:
    warm = warm_of(families[0])
    model = copy.deepcopy(warm.model)
    cache = CompressedStreamingCache.from_pretrained(warm.folder, model=model, level="lossless")
    first, _ = generate(model, cache, torch.cat((warm.ids[None], NEW), dim=1))
    cache.crop(-4)
    other = torch.cat((first[:, :-5], torch.tensor([[30, 31, 32, 33]])), dim=1)
    with torch.no_grad():
        model(input_ids=other[:, -4:], **{cache_argument(model): cache})
    prompt = torch.cat((other, NEW), dim=1)
    ours, native = generate(model, cache, prompt), generate(model, warm.native_of(other[0]), prompt)
    assert torch.equal(ours[0], native[0])
    assert torch.allclose(ours[1], native[1], atol=1e-5)


def test_prefill_in_pieces_is_that_of_one_pass(family: Any, warm_of: Any) -> None:
    warm = warm_of(family)
    pieces = prefill(copy.deepcopy(warm.model), warm.ids, piece_tokens=30, progress=False)
    native = warm.native()
    for ours, exact in zip(cached_layers(pieces), cached_layers(native), strict=True):
        for tensor, other in zip(ours.tensors, exact.tensors, strict=True):
            assert torch.allclose(tensor[:, -other.shape[1] :], other, atol=family.tolerance)
    for index, states in cached_states(native).items():
        for kind in KINDS:
            ours = getattr(cached_states(pieces)[index], kind)
            for number, tensor in getattr(states, kind).items():
                assert torch.allclose(ours[number], tensor, atol=family.tolerance)


@pytest.mark.parametrize("name", ["llama, dynamic NTK scaling", "phi3, longrope"])
def test_context_past_the_original_length_takes_one_pass(families: Any, name: str) -> None:
    model, ids = build(named(families, name)), random_ids(150)
    native = DynamicCache(config=model.config)
    with torch.no_grad():
        copy.deepcopy(model)(input_ids=ids[None], **{cache_argument(model): native})
    ours = prefill(model, ids, piece_tokens=CHUNK_TOKENS, progress=False)
    for layer, exact in zip(ours.layers, native.layers, strict=True):
        assert torch.equal(layer.keys, exact.keys)


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_cache_of_generate_with_shared_layers_is_saved(
    families: Any, name: str, tmp_path: Path
) -> None:
    model, ids = build(named(families, name)), random_ids(70)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    sequences, _ = generate(model, cache, ids[None])
    save_cache(model, None, sequences, tmp_path / "out", cache=cache, tables=None, progress=False)
    loaded = CompressedStreamingCache.from_pretrained(tmp_path / "out", model=model)
    assert loaded.get_seq_length() == 75
    for layer, exact in zip(loaded.layers, cache.layers, strict=False):
        assert torch.equal(layer.keys, exact.keys[:, :, -layer.keys.shape[2] :])


def test_context_with_a_picture_is_not_saved(families: Any, tmp_path: Path) -> None:
    model = build(named(families, "qwen2_5_vl"))
    ids = torch.cat((random_ids(9), torch.tensor([model.config.image_token_id, 5])))
    with pytest.raises(UnsupportedError, match=r"image_token_id .* at position 9"):
        save_cache(model, None, ids, tmp_path / "out", progress=False)


@pytest.mark.parametrize("name", ["gemma3n_text", "llama, dynamic NTK scaling"])
def test_calibration_leaves_the_model_as_it_is(families: Any, name: str) -> None:
    model, ids = build(named(families, name)), random_ids(100)[None]
    with torch.no_grad():
        before = copy.deepcopy(model)(input_ids=ids).logits
        assert calibrate(model).prefill is not None
        assert torch.equal(model(input_ids=ids).logits, before)


def test_question_to_an_offloaded_model(warm_of: Any, families: Any) -> None:
    warm = warm_of(families[0])
    model = cpu_offload(copy.deepcopy(warm.model), execution_device=torch.device("cpu"))
    cache = CompressedStreamingCache.from_pretrained(warm.folder, model=model, level="lossless")
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    ours = model.generate(**cache.inputs(input_ids=NEW), **options)
    prompt = torch.cat((warm.ids[None], NEW), dim=1)
    assert torch.equal(ours, warm.generate(warm.native(), prompt)[0])
    assert torch.equal(
        prefill(model, warm.ids, progress=False).layers[1].keys, warm.native().layers[1].keys
    )
