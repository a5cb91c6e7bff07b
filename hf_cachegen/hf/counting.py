"""Caches that know how many tokens they hold where none of their layers does."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache


class CountsTokens(Cache):
    """A cache whose layers may keep nothing but states, which have no length.

    Tokens are counted by the first layer: every pass asks for its state once and updates it, but
    for a pass over one token, which changes the state where it is.
    """

    _n_tokens: int | None = None
    """Tokens so far; None where layers have a length of their own."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        if self._n_tokens is not None and layer_idx == state_idx == 0:
            self._n_tokens += 1
        state: Tensor | None = super().get_conv_state(layer_idx, state_idx)
        return state

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        if self._n_tokens is not None and layer_idx == state_idx == 0:
            self._n_tokens += conv_states.shape[-1] - 1
        updated: Tensor = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        return updated

    def get_seq_length(self, layer_idx: int = 0) -> int:
        if self._n_tokens is not None:
            return self._n_tokens
        length: int = super().get_seq_length(layer_idx)
        return length

    @property
    def is_linear(self) -> list[bool]:
        """By layer, whether nothing is known of its length, as ``generate()`` takes it.

        It cuts what is cached from the prompt only if it can ask the cache for a length.
        """
        counted = self._n_tokens is not None
        return [not counted and linear for linear in super().is_linear]

    @property
    def is_compileable(self) -> bool:
        """Whether passes may be compiled: not if they are counted."""
        return self._n_tokens is None and bool(super().is_compileable)

    def reset(self) -> None:
        if self._n_tokens is not None:
            self._n_tokens = 0
        super().reset()


class CountingCache(CountsTokens, DynamicCache):
    """A cache of transformers' own for a model whose layers keep nothing but states.

    Parameters
    ----------
    layers
        Its layers.
    n_tokens
        Tokens that they have seen.
    """

    def __init__(self, layers: list[Any], n_tokens: int = 0) -> None:
        super().__init__()
        self.layers = layers
        self.layer_class_to_replicate = None
        self._n_tokens = n_tokens


def knows_length(cache: Cache) -> bool:
    """Whether a cache can tell how many tokens it holds."""
    return not cache.layers or not all(cache.is_linear)
