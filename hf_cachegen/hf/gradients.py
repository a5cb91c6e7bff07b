"""Gradients of the next-token loss with respect to what is cached."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_cachegen.hf.compat import cache_argument, place_arguments, token_layers
from hf_cachegen.hf.contents import CachedLayer, cached_layers


@dataclass(frozen=True)
class Gradients:
    """One context and how the loss of what follows depends on its cache.

    Attributes
    ----------
    layers
        The cache of the context.
    draws
        Per draw of the labels, the gradients as ``layers``.
    """

    layers: list[CachedLayer]
    draws: list[list[CachedLayer]]


def cache_gradients(
    model: PreTrainedModel,
    cache: Cache,
    token_ids: Tensor,
    *,
    draws: int,
    generator: torch.Generator,
) -> Gradients:
    """Differentiate the loss of a continuation by the cache before it.

    The labels are drawn from the model's own predictions, not taken from the text: the mean outer
    product of such gradients is the Fisher information, which is also the second derivative of the
    divergence that an error of the cache causes (Martens, New Insights and Perspectives on the
    Natural Gradient Method, 2020). The loss is the sum over the T predicted tokens, divided by
    sqrt(T): with independent labels the expected outer product is that of one token.

    Parameters
    ----------
    model, cache
        The model and the filled cache of a context.
    token_ids
        The continuation ``[T]``.
    draws
        How many times labels are drawn.
    generator
        Of the labels.
    """
    filled = copy.deepcopy(cache)
    before = cached_layers(filled)
    layers = [filled.layers[index] for index in token_layers(filled.layers)]
    for layer in layers:
        layer.keys.requires_grad_()
        layer.values.requires_grad_()
    inputs = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
    ids = token_ids[None].to(model.device)
    arguments: dict[str, Any] = {
        cache_argument(model): filled,
        **place_arguments(model, filled.get_seq_length(), ids),
    }
    with torch.enable_grad():
        logits = model(input_ids=ids, **arguments).logits[0].float()
        log_probabilities = logits.log_softmax(-1)
    probabilities = log_probabilities.detach().exp().cpu()
    found = []
    for draw in range(draws):
        labels = torch.multinomial(probabilities, 1, generator=generator).to(logits.device)
        with torch.enable_grad():
            loss = -log_probabilities.gather(1, labels).sum() / len(labels) ** 0.5
        gradients = torch.autograd.grad(loss, inputs, retain_graph=draw + 1 < draws)
        pairs = zip(gradients[0::2], gradients[1::2], before, strict=True)
        found.append([CachedLayer((keys[0], values[0]), b.first) for keys, values, b in pairs])
    return Gradients(before, found)
