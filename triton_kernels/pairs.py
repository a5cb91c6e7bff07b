"""Pairs of channels, turned by RoPE and written to the cache: how every codec's values leave.

A rotated pair are the two channels that RoPE turns together. Channels that it leaves alone, all of
them for values, are paired too, the first half with the second.

The rotation is that of ``hf_cachegen/codec/rope.py``, operation by operation in float32 without
fused multiply-adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cachegen.triton_kernels.streams import described

BLOCK_PAIRS = 32
BLOCK_TOKENS = 32
WARPS = 8
"""A tile of 32 tokens by 2 x 32 channels for 8 warps: 8 values a thread, 64 bytes a row, and no
register spills on any target, unlike the same with twice the tokens."""

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

INT32_END = 1 << 31
"""Kernels count inside a plane, a rotary table and a tile of ``out`` with 32 bits."""

FAR = 1 << 48
"""No offset is larger, so that no product of one with a 16-bit number wraps round."""

PLACE_FIELDS = 4
"""Numbers of a :class:`Place`."""

_MAX_GRID = 65_535


class Place(NamedTuple):
    """Where the values of a segment go.

    Attributes
    ----------
    tokens
        How many it has.
    batch, first_token
        They go to ``out[batch, :, first_token : first_token + tokens]``.
    position
        Row of the rotary tables that the first one takes.
    """

    tokens: int
    batch: int = 0
    first_token: int = 0
    position: int = 0


class Rotary(NamedTuple):
    """The rotation of a tensor.

    Attributes
    ----------
    cos, sin
        float32 [positions, pairs], contiguous, with the attention scaling in them.
    pairing
        As of :class:`~hf_cachegen.layout.RopeSpec`.
    """

    cos: Tensor
    sin: Tensor
    pairing: Literal["half", "interleaved"]

    @property
    def interleaved(self) -> bool:
        """Whether pairs are neighbours."""
        return self.pairing == "interleaved"


class PairArguments(NamedTuple):
    """Arguments of a kernel that ends with :func:`store_pairs`, in its order."""

    cos: Tensor
    sin: Tensor
    out: Tensor
    stride_b: int
    stride_h: int
    stride_t: int
    stride_d: int
    heads: int
    dim: int
    n_rotated: int
    n_rest: int

    @classmethod
    def of(cls, rotary: Rotary | None, out: Tensor, unread: Tensor) -> PairArguments:
        """For a tensor ``[B, H, T, D]`` and its rotation.

        Any float32 tensor does as ``unread``: it stands for the tables where there is no rotation.
        """
        _, heads, _, dim = out.shape
        stride_b, stride_h, stride_t, stride_d = out.stride()
        n_rotated = 0 if rotary is None else rotary.cos.shape[1]
        cos, sin = (unread, unread) if rotary is None else rotary[:2]
        n_rest = (dim - 2 * n_rotated + 1) // 2
        return cls(
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
        )

    def grid(self, tokens: int, segments: int) -> tuple[int, int, int]:
        """A program for each tile of each head of each segment of at most ``tokens``."""
        tiles = triton.cdiv(self.n_rotated + self.n_rest, BLOCK_PAIRS)
        grid = triton.cdiv(tokens, BLOCK_TOKENS), tiles, self.heads * segments
        if max(grid[1:]) > _MAX_GRID:
            raise ValueError(
                f"expected at most {_MAX_GRID} heads of segments a launch, got {grid[2]}"
            )
        return grid


def tile_options(*, interleaved: bool) -> dict[str, Any]:
    """The one configuration that is compiled for a pairing, for every GPU."""
    return {
        "INTERLEAVED": interleaved,
        "BLOCK_P": BLOCK_PAIRS,
        "BLOCK_T": BLOCK_TOKENS,
        "num_warps": WARPS,
        "enable_fp_fusion": False,
    }


def check_cache(out: Tensor, rotary: Rotary | None, vectors: Sequence[Tensor]) -> None:
    """Raise ValueError unless values with parameters ``vectors`` can be written to ``out``.

    Parameters
    ----------
    out
        ``[B, H, T, D]``.
    rotary
        None for a tensor that is not rotated.
    vectors
        float32 [H * D], contiguous, on the device of ``out``.
    """
    if out.ndim != 4 or out.dtype not in OUT_DTYPES:
        raise ValueError(f"expected out [B, H, T, D] in a float dtype, got {described(out)}")
    n = out.shape[1] * out.shape[3]
    if any(tensor.shape != (n,) for tensor in vectors):
        raise ValueError(f"expected channel parameters [{n}], got {described(*vectors)}")
    if BLOCK_TOKENS * out.stride(2) + out.shape[3] * out.stride(3) >= INT32_END:
        raise ValueError(f"expected strides of out that fit 32 bits in a tile, got {out.stride()}")
    floats = [*vectors, *([] if rotary is None else rotary[:2])]
    if rotary is not None:
        if rotary.cos.ndim != 2 or rotary.cos.shape != rotary.sin.shape:
            raise ValueError(
                f"expected cos and sin [positions, pairs], got {described(*rotary[:2])}"
            )
        if rotary.cos.numel() >= INT32_END:
            raise ValueError(f"expected less than 2^31 angles, got {list(rotary.cos.shape)}")
        if 2 * rotary.cos.shape[1] > out.shape[3]:
            raise ValueError(
                f"expected pairs of {out.shape[3]} channels, got {rotary.cos.shape[1]}"
            )
    if any(t.dtype != torch.float32 or not t.is_contiguous() for t in floats):
        raise ValueError(f"expected contiguous float32 parameters, got {described(*floats)}")
    if any(tensor.device != out.device for tensor in floats):
        raise ValueError(f"expected all tensors on {out.device}")


def check_channels(first: int, n: int, total: int) -> None:
    """Raise ValueError unless ``n`` channels from ``first`` on are among ``total``."""
    if first < 0 or first + n > total:
        raise ValueError(f"expected {n} channels of {total} from {first} on")


def check_segments(
    lines: Tensor, inside: Tensor, source: str, rotary: Rotary | None, out: Tensor
) -> None:
    """Raise ValueError unless segments lie inside all that a kernel reads and writes.

    Parameters
    ----------
    lines
        int64 [n, fields]: where each is in what is read, then its :class:`Place`.
    inside
        Bool []: whether all of them lie inside what is read, which may have wrapped round where a
        number is negative or :data:`FAR`.
    source
        What is read, for the message.
    rotary, out
        As for :func:`check_cache`.
    """
    tokens, batch, first_token, position = lines[:, -PLACE_FIELDS:].unbind(1)
    positions = FAR if rotary is None else len(rotary.cos)
    fit = (
        ((lines >= 0) & (lines < FAR)).all()
        & inside
        & (batch < out.shape[0]).all()
        & (first_token + tokens <= out.shape[2]).all()
        & (position + tokens <= positions).all()
    )
    if not fit:
        raise ValueError(
            f"expected segments inside {source}, out {list(out.shape)} and {positions} positions, "
            f"got {lines.tolist()}"
        )


@triton.jit
def open_place(place, head, out, stride_b, stride_h, stride_t, n_rotated):
    """A segment's tokens, where its head begins in ``out``, and how far into the rotary tables."""
    tokens = tl.load(place).to(tl.int32)
    out += tl.load(place + 1) * stride_b + tl.load(place + 2) * stride_t
    out += head.to(tl.int64) * stride_h
    return tokens, out, tl.load(place + 3) * n_rotated


@triton.jit
def pair_channels(pair, n_rotated, n_rest, INTERLEAVED: tl.constexpr):
    """The two channels of each pair."""
    rotated = pair < n_rotated
    if INTERLEAVED:
        a = tl.where(rotated, 2 * pair, n_rotated + pair)
        b = tl.where(rotated, 2 * pair + 1, n_rotated + pair + n_rest)
    else:
        a = tl.where(rotated, pair, n_rotated + pair)
        b = tl.where(rotated, pair + n_rotated, n_rotated + pair + n_rest)
    return a, b


@triton.jit
def store_pairs(
    x, y, a, b, pair, first, step, tokens, cos, sin, out, stride_t, stride_d, dim, n_rotated, n_rest
):
    """Turn the values [T, P] of channels ``a`` and ``b``, and write them.

    ``first`` and ``step`` [T] count tokens in the segment, whose first one the pointers are at.
    """
    inside = (first + step < tokens)[:, None]
    turned = inside & (pair < n_rotated)[None, :]
    angle = ((first + step) * n_rotated)[:, None] + pair[None, :]
    c = tl.load(cos + angle, mask=turned, other=1)
    s = tl.load(sin + angle, mask=turned, other=0)
    x, y = tl.where(turned, x * c - y * s, x), tl.where(turned, y * c + x * s, y)
    out += first.to(tl.int64) * stride_t
    row = (step * stride_t)[:, None]
    dtype = out.dtype.element_ty
    has_a = (pair < n_rotated + n_rest)[None, :]
    tl.store(out + (row + (a * stride_d)[None, :]), x.to(dtype), mask=inside & has_a)
    has_b = has_a & (b < dim)[None, :]
    tl.store(out + (row + (b * stride_d)[None, :]), y.to(dtype), mask=inside & has_b)
