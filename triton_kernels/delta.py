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
    FAR,
    INT32_END,
    PairArguments,
    Rotary,
    check_cache,
    described,
    fit_cache,
    pair_channels,
    store_pairs,
    tile_options,
)
from hf_cachegen.triton_kernels.streams import device_of, to_device

SEGMENT_FIELDS = 6

IN_DTYPES = (torch.int16, torch.int32)

_SEGMENT_FIELDS = tl.constexpr(SEGMENT_FIELDS)


class DeltaSegment(NamedTuple):
    """One chunk of the layer.

    Attributes
    ----------
    anchors, differences
        Where its planes ``[C, ceil(T / group)]`` and ``[C, rest]`` begin in the integers, C over
        all tensors of the layer. Without anchors the first is not used.
    tokens
        T.
    batch, first_token
        Where its values go in ``out[batch, :, first_token:]``.
    position
        Column of the rotary tables that its first token takes.
    """

    anchors: int
    differences: int
    tokens: int
    batch: int = 0
    first_token: int = 0
    position: int = 0


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
    lines = torch.tensor([tuple(segment) for segment in segments], dtype=torch.int64)
    if integers.ndim != 1 or integers.dtype not in IN_DTYPES or not integers.is_contiguous():
        raise ValueError(f"expected contiguous integers [n], got {described(integers)}")
    check_cache(out, rotary, channels[:3])
    _check_segments(lines, integers, channels, group, rotary, out)
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
            INTERLEAVED=rotary is not None and rotary.interleaved,
            **tile_options(),
        )


def _check_segments(
    lines: Tensor,
    integers: Tensor,
    channels: DeltaChannels,
    group: int,
    rotary: Rotary | None,
    out: Tensor,
) -> None:
    if integers.device != out.device:
        raise ValueError(f"expected all tensors on {out.device}")
    if channels.first < 0 or channels.first + len(channels.mean) > channels.total:
        raise ValueError(
            f"expected {len(channels.mean)} channels of {channels.total} from {channels.first} on"
        )
    anchors, differences, tokens, batch, first_token, position = lines.unbind(1)
    n_groups = -(-tokens // group) if group else torch.zeros_like(tokens)
    # Bounded first, so that no product below wraps round.
    inside = (
        ((lines >= 0) & (lines < FAR)).all()
        & (tokens * channels.total < INT32_END).all()
        & (anchors + n_groups * channels.total <= len(integers)).all()
        & (differences + (tokens - n_groups) * channels.total <= len(integers)).all()
        & fit_cache(tokens, batch, first_token, position, rotary, out)
    )
    if group < 0 or not inside:
        raise ValueError(
            f"expected segments inside {len(integers)} integers, out {list(out.shape)} and "
            f"{FAR if rotary is None else len(rotary.cos)} positions, got {lines.tolist()} in "
            f"groups of {group}"
        )


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
    tokens = tl.load(fields + 2).to(tl.int32)
    out += tl.load(fields + 3) * stride_b + tl.load(fields + 4) * stride_t
    out += head.to(tl.int64) * stride_h
    turn = tl.load(fields + 5) * n_rotated
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
