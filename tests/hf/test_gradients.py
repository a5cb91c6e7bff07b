"""Gradients of the next-token loss by the cache, against its definition."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_cachegen.hf.compat import cache_argument
from hf_cachegen.hf.gradients import cache_gradients
from hf_cachegen.hf.prefill import prefill

CONTEXT, AHEAD = 24, 8

STEP = 3e-3  # of finite differences; the model's norms round to float32 whatever its dtype


@pytest.fixture(scope="module")
def model() -> Any:
    """A Llama of two layers, in float64."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=12,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).double().eval()


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, 12, (CONTEXT + AHEAD,), generator=torch.Generator().manual_seed(1))


def gradients(model: Any, ids: Tensor, draws: int = 1, seed: int = 0) -> Any:
    cache = prefill(model, ids[:CONTEXT], progress=False)
    generator = torch.Generator().manual_seed(seed)
    return cache_gradients(model, cache, ids[CONTEXT:], draws=draws, generator=generator)


@torch.no_grad()
def log_probabilities(model: Any, cache: Any, ids: Tensor) -> Tensor:
    arguments = {cache_argument(model): copy.deepcopy(cache)}
    return model(input_ids=ids[None], **arguments).logits[0].double().log_softmax(-1)


def drawn_labels(model: Any, cache: Any, ids: Tensor, seed: int) -> Tensor:
    """The labels of the first draw, by its definition."""
    p = log_probabilities(model, cache, ids).float().exp()
    return torch.multinomial(p, 1, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", ["keys", "values"])
def test_gradients_are_the_slopes_of_the_loss(
    model: Any, ids: Tensor, layer: int, name: str
) -> None:
    """Of the sum over T predicted tokens over sqrt(T), by central differences."""
    cache, ahead = prefill(model, ids[:CONTEXT], progress=False), ids[CONTEXT:]
    labels = drawn_labels(model, cache, ahead, seed=3)
    found = gradients(model, ids, seed=3).draws[0][layer].tensors[name == "values"]
    generator = torch.Generator().manual_seed(4)
    for _ in range(5):
        direction = torch.randn(found.shape, generator=generator, dtype=torch.float64)
        losses = []
        for sign in (1, -1):
            moved = copy.deepcopy(cache)
            tensor = getattr(moved.layers[layer], name)
            tensor[0] += sign * STEP * direction
            log_p = log_probabilities(model, moved, ahead)
            losses.append(-log_p.gather(1, labels).sum() / AHEAD**0.5)
        slope = (losses[0] - losses[1]) / (2 * STEP)
        assert float((found * direction).sum()) == pytest.approx(float(slope), rel=5e-3, abs=5e-4)


def test_the_mean_outer_product_is_the_fisher_information_of_one_token(
    model: Any, ids: Tensor
) -> None:
    """Its trace: by draws, and exactly, as the mean over all labels of every predicted token."""
    cache, ahead = prefill(model, ids[:CONTEXT], progress=False), ids[CONTEXT:]
    filled = copy.deepcopy(cache)
    values = filled.layers[0].values.requires_grad_()
    with torch.enable_grad():
        arguments = {cache_argument(model): filled}
        log_p = model(input_ids=ahead[None], **arguments).logits[0].log_softmax(-1)
    exact = 0.0
    for token in range(AHEAD):
        for label in range(12):
            (g,) = torch.autograd.grad(-log_p[token, label], values, retain_graph=True)
            exact += float(log_p[token, label].detach().exp() * g.square().sum()) / AHEAD
    draws = gradients(model, ids, draws=1500).draws
    squares = torch.stack([draw[0].tensors[1].square().sum() for draw in draws])
    error = float(squares.std()) / len(squares) ** 0.5
    assert float(squares.mean()) == pytest.approx(exact, abs=4 * error)
    assert error < 0.1 * exact


def test_labels_are_drawn_anew_and_the_same_every_time(model: Any, ids: Tensor) -> None:
    first, again, other = (gradients(model, ids, draws=3, seed=seed) for seed in (0, 0, 1))
    keys = [[draw[0].tensors[0] for draw in found.draws] for found in (first, again, other)]
    assert all(torch.equal(a, b) for a, b in zip(keys[0], keys[1], strict=True))
    assert not torch.equal(keys[0][0], keys[0][1])
    assert not torch.equal(keys[0][0], keys[2][0])


def test_the_cache_and_the_weights_stay_as_they_are(model: Any, ids: Tensor) -> None:
    cache = prefill(model, ids[:CONTEXT], progress=False)
    before = copy.deepcopy(cache)
    generator = torch.Generator().manual_seed(0)
    found = cache_gradients(model, cache, ids[CONTEXT:], draws=1, generator=generator)
    assert cache.get_seq_length() == CONTEXT
    for layer, old, seen in zip(cache.layers, before.layers, found.layers, strict=True):
        assert not layer.keys.requires_grad
        assert torch.equal(layer.keys, old.keys)
        assert torch.equal(seen.tensors[0], old.keys[0])
        assert torch.equal(seen.tensors[1], old.values[0])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_sliding_layers_have_gradients_of_what_is_seen(tiny_gemma: Any) -> None:
    ids = torch.randint(3, 300, (60,), generator=torch.Generator().manual_seed(5))
    cache = prefill(tiny_gemma, ids[:50], progress=False)
    generator = torch.Generator().manual_seed(0)
    found = cache_gradients(tiny_gemma, cache, ids[50:], draws=2, generator=generator)
    windows = [16, None, 16, None]  # the first token ahead sees the last 15
    assert [layer.first for layer in found.layers] == [0] * 4
    for draw in found.draws:
        for layer, g, window in zip(found.layers, draw, windows, strict=True):
            assert g.first == layer.first
            if window is not None:
                assert not any(tensor[:, : 50 - window + 1].any() for tensor in g.tensors)
            assert [t.shape for t in g.tensors] == [t.shape for t in layer.tensors]
            assert all(torch.isfinite(t).all() and t.any() for t in g.tensors)


def test_a_cache_in_half_precision_has_finite_gradients(tiny_model: Any) -> None:
    model = copy.deepcopy(tiny_model).bfloat16()
    ids = torch.randint(3, 300, (60,), generator=torch.Generator().manual_seed(6))
    cache = prefill(model, ids[:48], progress=False)
    generator = torch.Generator().manual_seed(0)
    found = cache_gradients(model, cache, ids[48:], draws=1, generator=generator)
    for g in found.draws[0]:
        for tensor in g.tensors:
            assert tensor.dtype == torch.bfloat16
            assert torch.isfinite(tensor).all()
            assert tensor.any()
