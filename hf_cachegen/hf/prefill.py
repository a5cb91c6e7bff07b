"""Fill a cache with a long context, piece by piece."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_cachegen.hf.compat import (
    cache_argument,
    new_cache,
    one_pass_limit,
    place_arguments,
    running_device,
)

PREFILL_TOKENS = 2048
"""Tokens per forward pass. It bounds the memory that activations take, whatever the context."""


@torch.no_grad()
def prefill(
    model: PreTrainedModel,
    token_ids: Tensor,
    *,
    piece_tokens: int = PREFILL_TOKENS,
    progress: bool = True,
) -> Cache:
    """Run a context through the model and return its cache.

    Parameters
    ----------
    model
        The model, in eval mode.
    token_ids
        ``[T]``.
    piece_tokens
        Tokens per forward pass. A context takes one pass if its rotation depends on its length.
    progress
        Show a progress bar if there is more than one pass.
    """
    cache = new_cache(model)
    limit = one_pass_limit(model)
    if limit is not None and token_ids.numel() > limit:
        piece_tokens = token_ids.numel()
    pieces = torch.split(token_ids.to(running_device(model))[None], piece_tokens, dim=1)
    bar = tqdm(pieces, "prefill", unit="pass", disable=not progress or len(pieces) == 1)
    for piece in bar:
        arguments: dict[str, Any] = {
            cache_argument(model): cache,
            **place_arguments(model, cache.get_seq_length(), piece),
        }
        model(input_ids=piece, use_cache=True, logits_to_keep=1, **arguments)
    return cache
