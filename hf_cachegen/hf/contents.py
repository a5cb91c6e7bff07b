"""What a filled transformers cache holds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.cache_utils import Cache

from hf_cachegen.errors import UnsupportedError
from hf_cachegen.hf.compat import storing_layers


@dataclass(frozen=True)
class CachedLayer:
    """The tensors that a cache holds of one layer.

    Attributes
    ----------
    tensors
        Keys and values ``[H, T, D]``.
    first
        Position of their first token; above 0 where a sliding window has moved on.
    """

    tensors: tuple[Tensor, ...]
    first: int

    def tokens(self, start: int, end: int) -> list[Tensor]:
        """Views of the tokens [start, end)."""
        return [tensor[:, start - self.first : end - self.first] for tensor in self.tensors]


def cached_layers(cache: Cache) -> list[CachedLayer]:
    """The contents of a filled transformers cache of batch size 1."""
    length = cache.get_seq_length()
    layers = []
    for index, layer in enumerate(storing_layers(cache)):
        tensors = (layer.keys, layer.values)
        if any(tensor is None or tensor.ndim != 4 for tensor in tensors):
            raise UnsupportedError(f"layer {index} of the cache holds no keys and values to save")
        if tensors[0].shape[0] != 1:
            raise UnsupportedError(
                f"the cache holds a batch of {tensors[0].shape[0]}, an artefact holds one context; "
                "select one with cache.batch_select_indices"
            )
        first = length - tensors[0].shape[2]
        layers.append(CachedLayer(tuple(tensor[0].detach() for tensor in tensors), first))
    return layers
