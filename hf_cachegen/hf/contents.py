"""What a filled transformers cache holds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.cache_utils import Cache

from hf_cachegen.errors import UnsupportedError
from hf_cachegen.hf.compat import storing_layers, token_layers


@dataclass(frozen=True)
class CachedLayer:
    """The tensors that a cache holds of one layer.

    Attributes
    ----------
    tensors
        Keys and values ``[H, T, D]``.
    first
        Which of the cached tokens is their first; above 0 where a sliding window has moved on.
    """

    tensors: tuple[Tensor, ...]
    first: int

    def tokens(self, start: int, end: int) -> list[Tensor]:
        """Views of the tokens [start, end)."""
        return [tensor[:, start - self.first : end - self.first] for tensor in self.tensors]


def cached_layers(cache: Cache) -> list[CachedLayer]:
    """The keys and values in a filled transformers cache of batch size 1.

    Layers that keep nothing but states are left out.
    """
    length = cache.get_seq_length()
    layers = []
    storing = storing_layers(cache)
    for index in token_layers(storing):
        layer = storing[index]
        tensors = (layer.keys, layer.values)
        if any(tensor is None or tensor.ndim != 4 for tensor in tensors):
            raise UnsupportedError(f"layer {index} of the cache holds no keys and values to save")
        if tensors[0].shape[0] != 1:
            raise UnsupportedError(
                f"the cache holds a batch of {tensors[0].shape[0]}, an artefact holds one context; "
                "select one with cache.batch_select_indices"
            )
        first = length - getattr(layer, "evicted", 0) - tensors[0].shape[2]
        layers.append(CachedLayer(tuple(tensor[0].detach() for tensor in tensors), first))
    return layers
