"""Hand streamed contexts over to a cache of transformers' own: static, quantised or of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from hf_cachegen.errors import UnsupportedError
from hf_cachegen.hf.compat import keeps_states, token_layers

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
    UnsupportedError
        The model keeps nothing but states, or needs new tokens one by one, or tokens were evicted
        from a source.
    """
    if sources and not token_layers(sources[0].layers):
        raise UnsupportedError(
            "generate() runs the whole prompt again on top of a cache of transformers' own that "
            "has nothing but states; pass it the streamed cache itself"
        )
    if any(getattr(source, "one_by_one", False) for source in sources):
        raise UnsupportedError(
            "this model goes on from its states only if it is given new tokens one by one, which "
            "generate() does with the streamed cache itself; pass it that one"
        )
    if any(getattr(layer, "evicted", 0) for source in sources for layer in source.layers):
        raise UnsupportedError(
            "tokens were evicted from a source, and a cache of transformers' own counts positions "
            "by the tokens that it holds; pass generate() the streamed cache itself"
        )
    if not sources or target.get_seq_length() > 0:
        raise ValueError("expected an empty cache and at least one context to put into it")
    lengths = [source.get_seq_length() for source in sources]
    longest = max(lengths)
    for index in token_layers(sources[0].layers):
        layers = [source.layers[index] for source in sources]
        # Of a sliding layer only the last tokens are left, and no token sees those before them.
        keys = [pad(layer.keys, (0, 0, longest - layer.keys.shape[2], 0)) for layer in layers]
        values = [pad(layer.values, (0, 0, longest - layer.values.shape[2], 0)) for layer in layers]
        target.update(_rows(keys), _rows(values), index)
    for index, layer in enumerate(sources[0].layers):
        if keeps_states(layer):
            _fill_states(target, index, [source.layers[index] for source in sources])
    starts = longest - torch.tensor(lengths)
    mask = (torch.arange(longest) >= starts[:, None]).long()
    return target, mask.to(keys[0].device)


def _fill_states(target: Cache, index: int, layers: Sequence[Any]) -> None:
    """Put the states of one layer into a cache that has none. Padding was never in them."""
    for number in range(layers[0].number_of_states):
        conv = [layer.conv_states[number] for layer in layers]
        recurrent = [layer.recurrent_states[number] for layer in layers]
        if conv[0] is not None:
            target.update_conv_state(_rows(conv), index, number)
        if recurrent[0] is not None:
            target.update_recurrent_state(_rows(recurrent), index, number)


def _rows(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor of a row each."""
    if any(tensor.shape[0] != 1 for tensor in tensors):
        raise ValueError("expected caches of one row; select one with cache.batch_select_indices")
    return torch.cat(list(tensors))
