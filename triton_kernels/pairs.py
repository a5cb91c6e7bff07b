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

_MAX_GRID = 65_535


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
        n_rotated = 0 if rotary is None else rotary.cos.shape[1]
        cos, sin = (unread, unread) if rotary is None else rotary[:2]
        return cls(
            cos, sin, out, *out.stride(), heads, dim, n_rotated, (dim - 2 * n_rotated + 1) // 2
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


def tile_options() -> dict[str, Any]:
    """The one configuration that is compiled, for every GPU."""
    return {
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


def fit_cache(
    tokens: Tensor,
    batch: Tensor,
    first_token: Tensor,
    position: Tensor,
    rotary: Rotary | None,
    out: Tensor,
) -> Tensor:
    """Whether segments, int64 [n] each, lie inside ``out`` and the rotary tables: bool []."""
    positions = FAR if rotary is None else len(rotary.cos)
    return (
        (batch < out.shape[0]).all()
        & (first_token + tokens <= out.shape[2]).all()
        & (position + tokens <= positions).all()
    )


def described(*tensors: Tensor) -> str:
    """Dtypes and shapes, for a message."""
    return ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors)


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
