"""Tensors of a segment to channels before RoPE, token by token, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_cachegen.codec.rope import rotate, unrotate
from hf_cachegen.layout import KVLayout, TensorSpec


def channels(
    layout: KVLayout, specs: Sequence[TensorSpec], tensors: Sequence[Tensor], start: int
) -> Tensor:
    """All channels of some tensors ``[H, T, D]`` before RoPE, float32 ``[T, C]``.

    C runs over the tensors in order; channel h * D + d of each.
    """
    parts = []
    for spec, tensor in zip(specs, tensors, strict=True):
        rope = layout.rope(spec)
        x = tensor.float() if rope is None else unrotate(tensor, rope, start)
        parts.append(x.transpose(0, 1).flatten(1))
    return torch.cat(parts, dim=1)


def store_channels(
    layout: KVLayout, specs: Sequence[TensorSpec], x: Tensor, out: Sequence[Tensor], start: int
) -> None:
    """Inverse of :func:`channels`, into preallocated tensors ``[H, T, D]``."""
    parts = torch.split(x, [spec.channels for spec in specs], dim=1)
    for spec, part, tensor in zip(specs, parts, out, strict=True):
        values = part.view(-1, spec.heads, spec.dim).transpose(0, 1)
        rope = layout.rope(spec)
        tensor.copy_(values if rope is None else rotate(values, rope, start))
