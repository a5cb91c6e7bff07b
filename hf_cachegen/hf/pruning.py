"""Caches from which tokens were evicted: what is kept of them, and where it was in the context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from transformers import PreTrainedModel

from hf_cachegen.errors import UnsupportedError
from hf_cachegen.hf.compat import keeps_states, native_layers, text_config
from hf_cachegen.hf.contents import CachedLayer
from hf_cachegen.hf.families import needs_every_token

Positions = ArrayLike | Tensor | Sequence[ArrayLike | Tensor]
"""Positions ``[n]`` of the tokens that are kept, or for each layer ``[n]`` or ``[H, n]``."""

_EXPECTED = (
    "expected positions as integers [n], or for each layer [n] or [H, n], one for each cached token"
)


def check_prunable(model: PreTrainedModel) -> None:
    """Raise UnsupportedError if a model cannot go on from a cache that lacks some tokens."""
    name = type(model).__name__
    layers = native_layers(model)
    reason = needs_every_token(text_config(model))
    if any(keeps_states(layer) for layer in layers):
        reason = "its states have seen every token"
    elif any(layer.is_sliding for layer in layers):
        reason = "its sliding windows count every token"
    if reason is not None:
        raise UnsupportedError(
            f"{name} cannot go on from a cache from which tokens were evicted: {reason}; save the "
            "whole cache"
        )


def keep(
    layers: Sequence[CachedLayer], positions: Positions, n_tokens: int
) -> tuple[list[CachedLayer], NDArray[np.bool_]]:
    """The layers of a pruned cache with their tokens in the order of the context.

    Attention does not depend on the order of what is cached, and presses leave it by score.

    Parameters
    ----------
    layers
        What the cache holds.
    positions
        Where each token was, in the order of the cache.
    n_tokens
        Tokens of the whole context.

    Returns
    -------
    tuple
        The layers, and which tokens they hold, bool ``[L or 1, H or 1, n_tokens]``, 1 where all
        hold the same.

    Raises
    ------
    UnsupportedError
        Layers hold different numbers of tokens.
    ValueError
        The positions are not one for each token, or not different ones in the context.
    """
    lengths = {tensor.shape[1] for layer in layers for tensor in layer.tensors}
    if len(lengths) > 1:
        raise UnsupportedError(
            f"the layers hold {min(lengths)} to {max(lengths)} tokens: transformers makes one "
            "attention mask for all of them, so evict the same number from each"
        )
    held = _by_layer_and_head(positions)
    heads = {tensor.shape[0] for layer in layers for tensor in layer.tensors}
    fits = (
        held.shape[0] in (1, len(layers))
        and (held.shape[1] == 1 or heads == {held.shape[1]})
        and {held.shape[2]} == lengths
    )
    if not fits:
        raise ValueError(
            f"{_EXPECTED}: of {len(layers)} layers with {sorted(heads)} heads and "
            f"{max(lengths)} tokens; got the shape {list(held.shape)} of layers, heads and tokens"
        )
    ordered, order = held.sort(dim=-1)
    if ordered[..., 0].min() < 0 or ordered[..., -1].max() >= n_tokens:
        raise ValueError(
            f"expected positions of 0 to {n_tokens - 1} in the context, got {int(held.min())} to "
            f"{int(held.max())}; pass the ids of the whole context, not of the tokens that are kept"
        )
    if not (ordered.diff(dim=-1) > 0).all():
        raise ValueError("expected different positions in each layer and head, got one twice")
    kept = torch.zeros((*held.shape[:2], n_tokens), dtype=torch.bool)
    kept.scatter_(-1, ordered, True)
    for dim in (0, 1):
        if (kept == kept.narrow(dim, 0, 1)).all():
            kept = kept.narrow(dim, 0, 1)
    orders = order.expand(len(layers), -1, -1)
    return [_reordered(*pair) for pair in zip(layers, orders, strict=True)], kept.numpy()


def kept_positions(kept: NDArray[np.bool_] | None) -> Tensor | None:
    """Positions int64 ``[L or 1, H or 1, n]``, ascending, of tokens that are kept; None of all."""
    if kept is None:
        return None
    return torch.from_numpy(kept).nonzero()[:, -1].view(*kept.shape[:2], -1)


def complete_from(kept: NDArray[np.bool_], n_layers: int) -> list[int]:
    """By layer, the position from which on every head has kept every token."""
    gaps = ~kept.all(axis=1)
    after = np.arange(1, kept.shape[-1] + 1)
    return [int(first) for first in np.broadcast_to((gaps * after).max(axis=-1), n_layers)]


def _by_layer_and_head(positions: Positions) -> Tensor:
    """Positions int64 ``[L or 1, H or 1, n]``."""
    try:
        if isinstance(positions, Tensor):
            found = positions
        elif isinstance(positions, Sequence) and any(np.ndim(part) for part in positions):
            found = torch.stack([torch.as_tensor(part) for part in positions])
        else:
            found = torch.as_tensor(np.asarray(positions))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{_EXPECTED}; got {type(positions).__name__} ({error})") from error
    if found.dtype == torch.bool:
        raise ValueError(f"{_EXPECTED}; got a mask, whose positions are mask.nonzero()[:, 0]")
    if (
        found.is_floating_point()
        or found.is_complex()
        or not 1 <= found.ndim <= 3
        or not found.numel()
    ):
        raise ValueError(f"{_EXPECTED}; got {found.dtype} of shape {list(found.shape)}")
    if found.ndim == 1:
        found = found[None]
    return found.reshape(len(found), -1, found.shape[-1]).long().cpu()


def _reordered(layer: CachedLayer, order: Tensor) -> CachedLayer:
    """A layer with its tokens in another order ``[H or 1, T]``."""
    if (order.diff(dim=-1) > 0).all():
        return layer
    tensors = (
        tensor.gather(1, order[..., None].to(tensor.device).expand_as(tensor))
        for tensor in layer.tensors
    )
    return replace(layer, tensors=tuple(tensors))
