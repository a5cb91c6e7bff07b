"""Where a launch writes: places of segments, and tensors of the cache, as the kernels take them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from torch import Tensor

from hf_cachegen.codec.kernel_codec import CodedSegment
from hf_cachegen.codec.rope import cos_sin
from hf_cachegen.layout import KVLayout, RopeSpec, TensorSpec
from hf_cachegen.triton_kernels.pairs import Place, Rotary


class CacheTensor(NamedTuple):
    """A tensor that a launch fills.

    Attributes
    ----------
    channels
        Which of those of all tensors are its own.
    rotary
        None if it is not rotated.
    out
        ``[B, H, T, D]``.
    """

    channels: slice
    rotary: Rotary | None
    out: Tensor


def cache_tensors(
    layout: KVLayout, specs: Sequence[TensorSpec], out: Sequence[Tensor], start: int
) -> list[CacheTensor]:
    """Tensors ``[B, H, T, D]`` whose first token is at position ``start``."""
    rotaries: dict[str | None, Rotary | None] = {}
    for spec, tensor in zip(specs, out, strict=True):
        if spec.rope not in rotaries:
            rotaries[spec.rope] = _rotary(layout.rope(spec), tensor[0], start)
    bounds = pairwise(accumulate((spec.channels for spec in specs), initial=0))
    return [
        CacheTensor(slice(first, end), rotaries[spec.rope], tensor)
        for spec, tensor, (first, end) in zip(specs, out, bounds, strict=True)
    ]


def place_of(segment: CodedSegment) -> Place:
    """Where a segment's values go; ``start`` of :func:`cache_tensors` is that of all segments."""
    return Place(segment.tokens, segment.batch, segment.first_token, segment.first_token)


def _rotary(rope: RopeSpec | None, tensor: Tensor, start: int) -> Rotary | None:
    """The rotation of a tensor ``[H, T, D]`` whose first token is at position ``start``."""
    if rope is None:
        return None
    return Rotary(*cos_sin(rope, start, tensor), rope.pairing)
