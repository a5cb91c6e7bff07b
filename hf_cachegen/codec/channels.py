"""Tensors of a segment to channels before RoPE, token by token, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_cachegen.codec.rope import rotate, unrotate
from hf_cachegen.layout import KVLayout, TensorSpec

Positions = int | Sequence[Tensor]
"""Where tokens are in their context: the first of consecutive ones, or all, ``[T]`` or
``[H or 1, T]`` for each tensor."""


def kept_positions(
    layout: KVLayout, layers: Sequence[int], kept: Tensor | None, start: int, tokens: int
) -> Positions:
    """Positions of a segment's tokens, for each tensor of some layers.

    Parameters
    ----------
    layers
        Those whose tensors are meant, one after another.
    kept
        ``[L or 1, H or 1, n]``, ascending: the positions of all tokens that each layer and head of
        the layout has; None if they have all there are.
    start, tokens
        How many of them come before the segment's, and how many are in it.
    """
    if kept is None:
        return start
    by_layer = kept[..., start : start + tokens].expand(len(layout.layers), -1, -1)
    return [by_layer[layer] for layer in layers for _ in layout.layers[layer].tensors]


def channels(
    layout: KVLayout, specs: Sequence[TensorSpec], tensors: Sequence[Tensor], positions: Positions
) -> Tensor:
    """All channels of some tensors ``[H, T, D]`` before RoPE, float32 ``[T, C]``.

    C runs over the tensors in order; channel h * D + d of each.
    """
    parts = []
    for spec, tensor, place in zip(specs, tensors, _each(positions, specs), strict=True):
        rope = layout.rope(spec)
        x = tensor.float() if rope is None else unrotate(tensor, rope, place)
        parts.append(x.transpose(0, 1).flatten(1))
    return torch.cat(parts, dim=1)


def store_channels(
    layout: KVLayout,
    specs: Sequence[TensorSpec],
    x: Tensor,
    out: Sequence[Tensor],
    positions: Positions,
) -> None:
    """Inverse of :func:`channels`, into preallocated tensors ``[H, T, D]``."""
    parts = torch.split(x, [spec.channels for spec in specs], dim=1)
    for spec, part, tensor, place in zip(specs, parts, out, _each(positions, specs), strict=True):
        values = part.view(-1, spec.heads, spec.dim).transpose(0, 1)
        rope = layout.rope(spec)
        tensor.copy_(values if rope is None else rotate(values, rope, place))


def _each(positions: Positions, specs: Sequence[TensorSpec]) -> Sequence[int | Tensor]:
    """Positions for each tensor."""
    return positions if isinstance(positions, Sequence) else [positions] * len(specs)
