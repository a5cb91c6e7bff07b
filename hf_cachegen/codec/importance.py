"""Which tokens an encoder spends its bits on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Mode = Literal["flat", "predicted", "recent"]


@dataclass(frozen=True)
class Importance:
    """How an encoder tells tokens apart: the better half of the bits go where errors cost more.

    Attributes
    ----------
    mode
        ``flat``: all tokens alike. ``predicted``: by the table's regression on the norms of a
        token's keys and values. ``recent``: by the regression that also knows how far a token is
        from the end of the context: better if the next question is about what came last, worse if
        it is about the beginning.
    n_tokens
        Tokens of the whole context, for ``recent``.
    log_weights
        Natural log of how much more an error matters, float ``[n_tokens]``, added to the above.
    """

    mode: Mode = "predicted"
    n_tokens: int | None = None
    log_weights: Tensor | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"expected importance of {get_args(Mode)}, got {self.mode!r}")
        if self.mode == "recent" and self.n_tokens is None:
            raise ValueError("importance 'recent': expected n_tokens, the length of the context")

    @property
    def label(self) -> str:
        """What tells encodings with other weights apart."""
        if self.log_weights is None:
            return self.mode
        weights = self.log_weights.float().cpu().numpy().tobytes()
        return f"{self.mode}-{hashlib.blake2b(weights, digest_size=8).hexdigest()}"


def importance_features(tensors: Sequence[Tensor], start: int, n_tokens: int | None) -> Tensor:
    """What the regression of a token's importance knows of it, float32 ``[T, features + 1]``.

    Log norms of its values per tensor and head ``[H, T, D]``; then, if the context's length is
    known, the log of its distance from the end.
    """
    norms = [tensor.float().square().sum(-1).cpu() for tensor in tensors]  # [H, T]
    features = torch.cat(norms).clamp_min(1e-20).log().T
    if n_tokens is None:
        return features
    distance = torch.arange(n_tokens - start, n_tokens - start - len(features), -1)
    return torch.cat((features, distance.clamp_min(1).log()[:, None]), dim=1)
