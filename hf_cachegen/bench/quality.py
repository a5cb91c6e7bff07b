"""How far a cache's predictions are from those of the exact cache."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_cachegen.hf.compat import cache_argument


@dataclass(frozen=True)
class Quality:
    """Differences of next-token distributions over a real continuation.

    Attributes
    ----------
    kl_mean, kl_p99
        Kullback-Leibler divergence from the exact cache's distribution, nats per token.
    top1
        Share of tokens whose most likely prediction is the same.
    perplexity_ratio
        Perplexity of the continuation over that with the exact cache.
    """

    kl_mean: float
    kl_p99: float
    top1: float
    perplexity_ratio: float


@torch.no_grad()
def continuation_logits(model: PreTrainedModel, cache: Cache, token_ids: Tensor) -> Tensor:
    """Logits ``[T, V]`` of a continuation ``[T]`` on a copy of ``cache``."""
    arguments: dict[str, Any] = {cache_argument(model): copy.deepcopy(cache)}
    logits: Tensor = model(input_ids=token_ids[None].to(model.device), **arguments).logits[0]
    return logits.float()


def compare(exact: Tensor, logits: Tensor, token_ids: Tensor) -> Quality:
    """Quality of ``logits`` ``[T, V]`` against those of the exact cache."""
    p, q = exact.log_softmax(-1), logits.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    # Position t predicts token t + 1.
    ahead = token_ids[1:, None].to(logits.device)
    loss_change = p[:-1].gather(1, ahead).mean() - q[:-1].gather(1, ahead).mean()
    return Quality(
        kl_mean=kl.mean().item(),
        kl_p99=kl.quantile(0.99).item(),
        top1=(p.argmax(-1) == q.argmax(-1)).float().mean().item(),
        perplexity_ratio=loss_change.exp().item(),
    )
