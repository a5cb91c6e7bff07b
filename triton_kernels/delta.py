"""Reconstruct keys and values of the ``delta`` codec: one pass from integers to the cache.

The arithmetic is that of ``hf_cachegen/codec/delta.py`` and ``rope.py``, operation by operation in
float32 without fused multiply-adds, so that the values do not depend on the device.

A program reads a tile of channel pairs by tokens, along tokens, and writes it along channels. A
rotated pair are the two channels that RoPE turns together. Channels that it leaves alone, all of
them for values, are paired too, the first half with the second.

There is no matrix product here: an anchor, a difference and a rotation are some ten operations a
value, and the memory's speed is the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cachegen.triton_kernels.streams import device_of, to_device

BLOCK_PAIRS = 32
BLOCK_TOKENS = 32
WARPS = 8
"""A tile of 2 x 32 channels by 32 tokens for 8 warps: 8 values a thread, 64 bytes a row, and no
register spills on any target, unlike the same with twice the tokens."""

SEGMENT_FIELDS = 6

IN_DTYPES = (torch.int16, torch.int32)
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_MAX_GRID = 65_535
_INT32_END = 1 << 31
"""Kernels count inside a plane, a rotary table and a tile of ``out`` with 32 bits."""
_FAR = 1 << 48
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


class Rotary(NamedTuple):
    """The rotation of a tensor.

    Attributes
    ----------
    cos, sin
        float32 [pairs, positions], contiguous, with the attention scaling in them.
    pairing
        As of :class:`~hf_cachegen.layout.RopeSpec`.
    """

    cos: Tensor
    sin: Tensor
    pairing: Literal["half", "interleaved"]


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
    _check_tensors(integers, channels, rotary, out)
    _check_segments(lines, integers, channels, group, rotary, out)
    _, heads, _, dim = out.shape
    n_rotated = 0 if rotary is None else len(rotary.cos)
    cos, sin = (channels.mean, channels.mean) if rotary is None else (rotary.cos, rotary.sin)
    n_rest = (dim - 2 * n_rotated + 1) // 2
    grid = (
        triton.cdiv(int(lines[:, 2].max()), BLOCK_TOKENS),
        triton.cdiv(n_rotated + n_rest, BLOCK_PAIRS),
        heads * len(segments),
    )
    if max(grid[1:]) > _MAX_GRID:
        raise ValueError(f"expected at most {_MAX_GRID} heads of segments a launch, got {grid[2]}")
    with device_of(out):
        delta_kernel[grid](
            integers,
            to_device(lines, out.device),
            channels.mean,
            channels.anchor_step,
            channels.bins,
            cos,
            sin,
            out,
            *out.stride(),
            heads,
            dim,
            n_rotated,
            n_rest,
            cos.shape[-1],
            channels.first,
            channels.total,
            group,
            HAS_ANCHORS=group > 0,
            INTERLEAVED=rotary is not None and rotary.pairing == "interleaved",
            **tile_options(),
        )


def tile_options() -> dict[str, Any]:
    """The one configuration that is compiled, for every GPU."""
    return {
        "BLOCK_P": BLOCK_PAIRS,
        "BLOCK_T": BLOCK_TOKENS,
        "num_warps": WARPS,
        "enable_fp_fusion": False,
    }


def _check_tensors(
    integers: Tensor, channels: DeltaChannels, rotary: Rotary | None, out: Tensor
) -> None:
    if integers.ndim != 1 or integers.dtype not in IN_DTYPES or not integers.is_contiguous():
        raise ValueError(f"expected contiguous integers [n], got {_described(integers)}")
    if out.ndim != 4 or out.dtype not in OUT_DTYPES:
        raise ValueError(f"expected out [B, H, T, D] in a float dtype, got {_described(out)}")
    parameters = [channels.mean, channels.anchor_step, channels.bins]
    n = out.shape[1] * out.shape[3]
    if any(tensor.shape != (n,) for tensor in parameters):
        raise ValueError(f"expected channel parameters [{n}], got {_described(*parameters)}")
    if BLOCK_TOKENS * out.stride(2) + out.shape[3] * out.stride(3) >= _INT32_END:
        raise ValueError(f"expected strides of out that fit 32 bits in a tile, got {out.stride()}")
    if channels.first < 0 or channels.first + n > channels.total:
        raise ValueError(f"expected {n} channels of {channels.total} from {channels.first} on")
    if rotary is not None:
        parameters += [rotary.cos, rotary.sin]
        if rotary.cos.ndim != 2 or rotary.cos.shape != rotary.sin.shape:
            raise ValueError(
                f"expected cos and sin [pairs, positions], got {_described(*rotary[:2])}"
            )
        if rotary.cos.numel() >= _INT32_END:
            raise ValueError(f"expected less than 2^31 angles, got {list(rotary.cos.shape)}")
        if 2 * len(rotary.cos) > out.shape[3]:
            raise ValueError(f"expected pairs of {out.shape[3]} channels, got {len(rotary.cos)}")
    if any(t.dtype != torch.float32 or not t.is_contiguous() for t in parameters):
        raise ValueError(f"expected contiguous float32 parameters, got {_described(*parameters)}")
    if any(tensor.device != out.device for tensor in (integers, *parameters)):
        raise ValueError(f"expected all tensors on {out.device}")


def _check_segments(
    lines: Tensor,
    integers: Tensor,
    channels: DeltaChannels,
    group: int,
    rotary: Rotary | None,
    out: Tensor,
) -> None:
    anchors, differences, tokens, batch, first_token, position = lines.unbind(1)
    n_groups = -(-tokens // group) if group else torch.zeros_like(tokens)
    positions = torch.iinfo(torch.int64).max if rotary is None else rotary.cos.shape[1]
    # Bounded first, so that no product below wraps round.
    inside = (
        ((lines >= 0) & (lines < _FAR)).all()
        & (tokens * channels.total < _INT32_END).all()
        & (anchors + n_groups * channels.total <= len(integers)).all()
        & (differences + (tokens - n_groups) * channels.total <= len(integers)).all()
        & (batch < out.shape[0]).all()
        & (first_token + tokens <= out.shape[2]).all()
        & (position + tokens <= positions).all()
    )
    if group < 0 or not inside:
        raise ValueError(
            f"expected segments inside {len(integers)} integers, out {list(out.shape)} and "
            f"{positions} positions, got {lines.tolist()} in groups of {group}"
        )


def _described(*tensors: Tensor) -> str:
    return ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors)


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


@triton.jit(do_not_specialize=["heads", "n_positions", "first_channel", "total_channels", "group"])
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
    n_positions,
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
    position = tl.load(fields + 5)
    n_groups = 0
    if HAS_ANCHORS:
        n_groups = tl.cdiv(tokens, group)

    first = tl.program_id(0) * BLOCK_T
    step = tl.arange(0, BLOCK_T)
    t = first + step
    pair = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    rotated = pair < n_rotated
    if INTERLEAVED:
        a = tl.where(rotated, 2 * pair, n_rotated + pair)
        b = tl.where(rotated, 2 * pair + 1, n_rotated + pair + n_rest)
    else:
        a = tl.where(rotated, pair, n_rotated + pair)
        b = tl.where(rotated, pair + n_rotated, n_rotated + pair + n_rest)
    has_a = pair < n_rotated + n_rest
    has_b = has_a & (b < dim)
    channel = head * dim
    x = _channel_values(
        anchors, differences, mean, anchor_step, bins, channel + a, first_channel, has_a,
        t, tokens, n_groups, group, HAS_ANCHORS,
    )  # fmt: skip
    y = _channel_values(
        anchors, differences, mean, anchor_step, bins, channel + b, first_channel, has_b,
        t, tokens, n_groups, group, HAS_ANCHORS,
    )  # fmt: skip

    turned = rotated[:, None] & (t < tokens)[None, :]
    angle = (pair * n_positions)[:, None] + t[None, :]
    c = tl.load(cos + position + angle, mask=turned, other=1)
    s = tl.load(sin + position + angle, mask=turned, other=0)
    x, y = tl.where(turned, x * c - y * s, x), tl.where(turned, y * c + x * s, y)

    # Transposed, so that neighbouring threads write neighbouring channels.
    out += first.to(tl.int64) * stride_t
    row = step[:, None] * stride_t
    written = (t < tokens)[:, None]
    x, y = tl.trans(x).to(out.dtype.element_ty), tl.trans(y).to(out.dtype.element_ty)
    tl.store(out + (row + a[None, :] * stride_d), x, mask=written & has_a[None, :])
    tl.store(out + (row + b[None, :] * stride_d), y, mask=written & has_b[None, :])
