"""Hand streamed contexts over to a cache of transformers' own: static, quantised or of a batch."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache

AnyCache = TypeVar("AnyCache", bound=Cache)


def fill_cache(target: AnyCache, *sources: Cache) -> tuple[AnyCache, Tensor]:
    """Put contexts into an empty cache, one row each, the shorter ones padded on the left.

    ``generate()`` takes the cache with the whole prompts, padded alike, and the mask that is
    returned followed by ones: ``torch.cat((mask, ones), dim=1)``. The sources stay as they are.

    Parameters
    ----------
    target
        An empty ``StaticCache``, ``DynamicCache``, ``QuantizedCache``, ... of the same model.
    sources
        Caches of one row, such as a :class:`CompressedStreamingCache`; of what has not arrived yet
        it is waited for.

    Returns
    -------
    tuple
        ``target``, and the attention mask ``[B, T]`` of what it holds, int64.

    Raises
    ------
    ValueError
        There are no sources, ``target`` is not empty, or a source has more than one row.
    """
    if not sources or target.get_seq_length() > 0:
        raise ValueError("expected an empty cache and at least one context to put into it")
    lengths = [source.get_seq_length() for source in sources]
    longest = max(lengths)
    for index in range(len(sources[0].layers)):
        layers = [source.layers[index] for source in sources]
        if any(layer.keys.shape[0] != 1 for layer in layers):
            raise ValueError(
                "expected caches of one row; select one with cache.batch_select_indices"
            )
        # Of a sliding layer only the last tokens are left, and no token sees those before them.
        keys = [pad(layer.keys, (0, 0, longest - layer.keys.shape[2], 0)) for layer in layers]
        values = [pad(layer.values, (0, 0, longest - layer.values.shape[2], 0)) for layer in layers]
        target.update(torch.cat(keys), torch.cat(values), index)
    starts = longest - torch.tensor(lengths)
    mask = (torch.arange(longest) >= starts[:, None]).long()
    return target, mask.to(keys[0].device)
