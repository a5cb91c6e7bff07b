"""Every family against a native warm cache, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_cachegen import UnsupportedError, save_cache
from hf_cachegen.artifact import Artifact
from hf_cachegen.codec.rope import unrotate
from hf_cachegen.hf.compat import cache_argument, check_text, new_cache, token_layers
from hf_cachegen.hf.contents import cached_layers
from hf_cachegen.hf.describe import describe_layout
from hf_cachegen.hf.families import (
    CAUSAL_MODELS,
    HALF_ROTATION_MODELS,
    INTERLEAVED_ROTATION_MODELS,
    ONE_BY_ONE_MODELS,
    SLIDING_ROTATION_MODELS,
    SLOT_POSITION_MODELS,
    STATE_MODELS,
    UNCONTINUABLE_MODELS,
    UNPLACED_MODELS,
    media_tokens,
)
from hf_cachegen.layout import KVLayout
from hf_cachegen.stores import LocalStore

SUFFIX = torch.tensor([[7, 9, 11]])
LOSSY_ERROR = 0.1
"""Largest relative error (Frobenius norm) of a tensor at the finest lossy level."""


def test_exact_level_generates_as_a_native_cache(family: Any, warm_of: Callable[..., Any]) -> None:
    warm = warm_of(family)
    prompt = torch.cat((warm.ids[None], SUFFIX), dim=1)
    ours = warm.generate(warm.load(), prompt)
    native = warm.generate(warm.native(), prompt)
    assert all(torch.equal(a, b) for a, b in zip(ours, native, strict=True))


def test_native_cache_continues_as_the_whole_prompt(
    family: Any, warm_of: Callable[..., Any]
) -> None:
    # Were it otherwise, no cache of this family could be right.
    warm = warm_of(family)
    prompt = torch.cat((warm.ids[None], SUFFIX), dim=1)
    (_, cold), (_, native) = warm.generate(None, prompt), warm.generate(warm.native(), prompt)
    tolerance = 1e-2 if "native warm cache" in family.note else 1e-4
    assert (cold[0] - native[0]).norm() < tolerance * cold[0].norm()


def test_lossy_level_is_near(token_family: Any, warm_of: Callable[..., Any]) -> None:
    warm = warm_of(token_family)
    cache, native = warm.load("delta-3"), warm.native()
    for index in token_layers(cache.layers):
        layer, exact = cache.layers[index], native.layers[index]
        for ours, theirs in ((layer.keys, exact.keys), (layer.values, exact.values)):
            error = (ours - theirs).norm() / theirs.norm()
            assert 0 < error < LOSSY_ERROR
    prompt = torch.cat((warm.ids[None], SUFFIX), dim=1)
    assert warm.generate(cache, prompt)[1].isfinite().all()


def test_table_says_how_keys_are_rotated(family: Any, warm_of: Callable[..., Any]) -> None:
    manifest = Artifact.open(LocalStore(warm_of(family).folder)).manifest
    layout = manifest.identity.layout
    rotates = family.rotation not in ("none", "as cached")
    assert _rotation(layout) == (family.rotation if rotates else "")
    kinds = {layer.kind.removesuffix("_attention") for layer in layout.layers}
    kinds |= set() if manifest.states is None else {"states"}
    assert ", ".join(sorted(kinds)) == family.layers


@torch.no_grad()
def test_rotation_is_undone(rotated_family: Any, warm_of: Callable[..., Any]) -> None:
    # Where every token is the same, so is every layer's input at every position, and keys differ
    # by their rotation alone.
    family, model = rotated_family, copy.deepcopy(warm_of(rotated_family).model)
    for name, module in model.named_modules():
        if name.endswith((".linear_attn", ".mamba", ".conv")):  # whose states know the position
            for projection in {"out_proj", "o_proj"} & dict(module.named_children()).keys():
                getattr(module, projection).weight.zero_()
    cache = new_cache(model)
    model(input_ids=torch.full((1, 24), 7), **{cache_argument(model): cache})
    layers = cached_layers(cache)
    layout = describe_layout(model, [layer.tensors for layer in layers])
    assert layout.ropes
    for spec, layer in list(zip(layout.layers, layers, strict=True))[: 1 if family.sinks else None]:
        for tensor_spec, tensor in zip(spec.tensors, layer.tensors, strict=True):
            rotation = layout.rope(tensor_spec)
            constant = tensor if rotation is None else unrotate(tensor, rotation, 0)
            assert torch.allclose(constant, constant[:, :1], atol=1e-4 * float(tensor.abs().max()))


def test_what_is_known_of_a_family_is_tested(families: Any) -> None:
    known = {
        *HALF_ROTATION_MODELS,
        *INTERLEAVED_ROTATION_MODELS,
        *SLIDING_ROTATION_MODELS,
        *SLOT_POSITION_MODELS,
        *STATE_MODELS,
        *UNPLACED_MODELS,
        *ONE_BY_ONE_MODELS,
        *UNCONTINUABLE_MODELS,
        *CAUSAL_MODELS,
    }
    assert known <= {family.model_type for family in families}


def test_refused_by_name_before_the_model_runs(
    refused_family: tuple[Any, PreTrainedModel], tmp_path: Path
) -> None:
    family, model = refused_family
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(UnsupportedError, match=family.refused) as error:
        save_cache(model, None, list(range(3, 40)), tmp_path / "out", progress=False)
    assert type(model).__name__ in str(error.value)
    assert not (tmp_path / "out").exists()


@torch.no_grad()
def test_family_refused_for_what_it_sees_sees_it(
    uncontinuable_family: tuple[Any, PreTrainedModel],
) -> None:
    # Once transformers continues such a cache right, the refusal has lost its reason.
    _, model = uncontinuable_family
    ids = torch.arange(3, 76)[None]
    cache = DynamicCache(config=model.config)
    model(input_ids=ids[:, :70], **{cache_argument(model): cache})
    warm = model(input_ids=ids[:, 70:], **{cache_argument(model): cache}).logits[:, -1]
    cold = model(input_ids=ids).logits[:, -1]
    assert (warm - cold).norm() > 1e-3 * cold.norm()


@pytest.mark.parametrize("name", ["gemma3", "mistral3", "llava, with llama", "qwen2_5_vl"])
def test_context_with_a_picture_is_refused(name: str, warm_of: Any, families: Any) -> None:
    warm = warm_of(next(family for family in families if family.name == name))
    check_text(warm.model, warm.ids)
    token = next(iter(media_tokens(warm.model.config).values()))
    ids = torch.cat((warm.ids, torch.tensor([token, 5])))
    with pytest.raises(UnsupportedError, match=f"image_token_.* {token}.* at position 70"):
        check_text(warm.model, ids)


def _rotation(layout: KVLayout) -> str:
    """What :attr:`Family.rotation` says, as found in a layout."""
    if not layout.ropes:
        return ""
    tensors = [spec for layer in layout.layers for spec in layer.tensors]
    rotated = [spec for spec in tensors if spec.rope is not None]
    words = [next(iter(layout.ropes.values())).pairing]
    in_values = {spec.name for spec in rotated} == {"values"}
    if any(2 * len(layout.ropes[spec.rope].inv_freq) < spec.dim for spec in rotated):
        words.append("partial")
    if in_values:
        words.append("MLA")
    if len(rotated) < len(layout.layers):
        words.append("NoPE")
    return ", ".join(words)
