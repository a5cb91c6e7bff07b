"""Reconstruct keys and values of the ``delta`` codec: one pass from integers to the cache.

The arithmetic is that of ``hf_cachegen/codec/delta.py``, operation by operation in float32 without
fused multiply-adds, so that the values do not depend on the device.

A program reads a tile of channel pairs by tokens, along tokens, and writes it along channels.

There is no matrix product here: an anchor, a difference and a rotation are some ten operations a
value, and the memory's speed is the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cachegen.triton_kernels.pairs import (
    INT32_END,
    PLACE_FIELDS,
    PairArguments,
    Place,
    Rotary,
    check_cache,
    check_channels,
    check_segments,
    open_place,
    pair_channels,
    store_pairs,
    tile_options,
)
from hf_cachegen.triton_kernels.streams import check_integers, device_of, to_device

_SEGMENT_FIELDS = tl.constexpr(2 + PLACE_FIELDS)


class DeltaSegment(NamedTuple):
    """One chunk of a layer.

    Attributes
    ----------
    anchors, differences
        Where its planes ``[C, ceil(T / group)]`` and ``[C, rest]`` begin in the integers, T being
        its tokens and C over all tensors of the layer. Without anchors the first is not used.
    place
        Where its values go.
    """

    anchors: int
    differences: int
    place: Place


class DeltaChannels(NamedTuple):
    """Parameters of a tensor's channels.

    Attributes
    ----------
    mean, anchor_step, bins
        float32 [H * D], contiguous.
    first, total
        Channel 0 of this tensor among the layer's, and how many the layer has (C).
    """

    mean: Tensor
    anchor_step: Tensor
    bins: Tensor
    first: int
    total: int


def reconstruct(
    integers: Tensor,
    segments: Sequence[DeltaSegment],
    channels: DeltaChannels,
    group: int,
    rotary: Rotary | None,
    out: Tensor,
) -> None:
    """Launch the reconstruction of one tensor of a layer.

    Parameters
    ----------
    integers
        int16 or int32 [n], contiguous.
    segments
        The chunks in ``integers``.
    channels
        The tensor's parameters.
    group
        Tokens per anchor; 0 if there are none.
    rotary
        None for a tensor that is not rotated.
    out
        ``[B, H, T, D]`` in bf16, fp16 or fp32, of any strides.

    Raises
    ------
    ValueError
        The arguments do not fit each other: a kernel would read or write outside.
    """
    if not segments or out.numel() == 0:
        return
    lines = torch.tensor([(*s[:-1], *s.place) for s in segments], dtype=torch.int64)
    check_integers(integers, out.device)
    check_cache(out, rotary, channels[:3])
    check_channels(channels.first, len(channels.mean), channels.total)
    _check_group(lines, integers, channels.total, group, rotary, out)
    pairs = PairArguments.of(rotary, out, channels.mean)
    with device_of(out):
        delta_kernel[pairs.grid(int(lines[:, 2].max()), len(segments))](
            integers,
            to_device(lines, out.device),
            channels.mean,
            channels.anchor_step,
            channels.bins,
            *pairs,
            channels.first,
            channels.total,
            group,
            HAS_ANCHORS=group > 0,
            **tile_options(interleaved=rotary is not None and rotary.interleaved),
        )


def _check_group(
    lines: Tensor, integers: Tensor, total: int, group: int, rotary: Rotary | None, out: Tensor
) -> None:
    """Raise ValueError unless segments in groups of ``group`` lie inside."""
    if group < 0:
        raise ValueError(f"expected a group of 0 or more tokens, got {group}")
    anchors, differences, tokens = lines[:, :3].unbind(1)
    n_groups = -(-tokens // group) if group else torch.zeros_like(tokens)
    inside = (
        (tokens * total < INT32_END).all()
        & (anchors + n_groups * total <= len(integers)).all()
        & (differences + (tokens - n_groups) * total <= len(integers)).all()
    )
    source = f"{len(integers)} integers in groups of {group}"
    check_segments(lines, inside, source, rotary, out)


@triton.jit
def _channel_values(
    anchors,
    differences,
    mean,
    anchor_step,
    bins,
    channel,
    first_channel,
    valid,
    t,
    tokens,
    n_groups,
    group,
    HAS_ANCHORS: tl.constexpr,
):
    """Values [BLOCK_P, BLOCK_T] before RoPE."""
    inside = valid[:, None] & (t < tokens)[None, :]
    value = tl.load(mean + channel, mask=valid, other=0)[:, None]
    bin_width = tl.load(bins + channel, mask=valid, other=0)[:, None]
    row = first_channel + channel
    at = t
    if HAS_ANCHORS:
        step = tl.load(anchor_step + channel, mask=valid, other=0)[:, None]
        g = t // group
        anchor = tl.load(anchors + ((row * n_groups)[:, None] + g[None, :]), mask=inside, other=0)
        value = value + anchor.to(tl.float32) * step
        inside = inside & (t != g * group)[None, :]
        at = t - g - 1
    width = tokens - n_groups
    q = tl.load(differences + ((row * width)[:, None] + at[None, :]), mask=inside, other=0)
    return value + q.to(tl.float32) * bin_width


@triton.jit(do_not_specialize=["heads", "first_channel", "total_channels", "group"])
def delta_kernel(
    integers,
    segments,
    mean,
    anchor_step,
    bins,
    cos,
    sin,
    out,
    stride_b,
    stride_h,
    stride_t,
    stride_d,
    heads,
    dim,
    n_rotated,
    n_rest,
    first_channel,
    total_channels,
    group,
    HAS_ANCHORS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Reconstruct a tile of a segment's head."""
    head = tl.program_id(2) % heads
    fields = segments + tl.program_id(2) // heads * _SEGMENT_FIELDS
    anchors, differences = integers + tl.load(fields), integers + tl.load(fields + 1)
    tokens, out, turn = open_place(fields + 2, head, out, stride_b, stride_h, stride_t, n_rotated)
    n_groups = 0
    if HAS_ANCHORS:
        n_groups = tl.cdiv(tokens, group)

    first = tl.program_id(0) * BLOCK_T
    step = tl.arange(0, BLOCK_T)
    t = first + step
    pair = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    a, b = pair_channels(pair, n_rotated, n_rest, INTERLEAVED)
    has_a = pair < n_rotated + n_rest
    channel = head * dim
    x = _channel_values(
        anchors, differences, mean, anchor_step, bins, channel + a, first_channel, has_a,
        t, tokens, n_groups, group, HAS_ANCHORS,
    )  # fmt: skip
    y = _channel_values(
        anchors, differences, mean, anchor_step, bins, channel + b, first_channel,
        has_a & (b < dim), t, tokens, n_groups, group, HAS_ANCHORS,
    )  # fmt: skip
    # Transposed, so that neighbouring threads write neighbouring channels.
    store_pairs(
        tl.trans(x), tl.trans(y), a, b, pair, first, step, tokens, cos + turn, sin + turn,
        out, stride_t, stride_d, dim, n_rotated, n_rest,
    )  # fmt: skip
