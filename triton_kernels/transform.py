"""Reconstruct keys and values of the ``transform`` codec: two kernels and a product between them.

``transform_join_kernel`` makes integers of their parts (what the coarsest level that codes a
coefficient says of it, low bits, and the third of the bin that every finer level picks) and lays
them out for a product: one row a token, float16. ``transform_store_kernel`` turns the product into
values: the token's step, the channel's scale and mean, RoPE.

The product is torch's. Its operands are float16, its sums float32. Float16 has 11 bits, and with
coefficients scaled by 2^-14 all that the codec codes lies in its range, 1 at its lower end. The
basis uses the 11 bits too, since each channel is divided by its largest entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cachegen.triton_kernels.pairs import (
    FAR,
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
from hf_cachegen.triton_kernels.streams import (
    check_integers,
    counted,
    described,
    device_of,
    to_device,
)

COEFFICIENT_SCALE = 2.0**-14
"""Of a coefficient in the product: 1 becomes the smallest normal float16."""

MIXED_PRODUCTS = hasattr(torch.ops.aten.mm, "dtype_out") and (
    torch.version.hip is None or torch.__version__ >= "2.10"
)
"""Whether torch multiplies float16 to float32: from 2.8 on, on HIP from 2.10 on."""

LARGEST_COEFFICIENT = 65_504.0
"""The largest float16. Only a coefficient beyond the codec's largest is cut off."""

BLOCK_ROWS = 64
BLOCK_TOKENS = 32
WARPS = 8
"""A tile of 64 coefficients by 32 tokens for 8 warps: 64 bytes a row read, 128 a row written."""

PLANE_FIELDS = 6
LEVEL_FIELDS = 3
"""Numbers of a :class:`CoefficientPlane`, without its levels, and of a :class:`LevelPlanes`."""

_MAX_ROWS = BLOCK_ROWS * 65_535
_PLANE_FIELDS = tl.constexpr(PLANE_FIELDS)
_LEVEL_FIELDS = tl.constexpr(LEVEL_FIELDS)
_SEGMENT_FIELDS = tl.constexpr(1 + PLACE_FIELDS)
_COEFFICIENT_SCALE = tl.constexpr(COEFFICIENT_SCALE)
_LARGEST = tl.constexpr(LARGEST_COEFFICIENT)


class LevelPlanes(NamedTuple):
    """What a level adds to a plane of coefficients.

    Attributes
    ----------
    coded
        Where its plane of new coefficients ``[n_rows - below, T]`` begins in the integers, below
        being ``n_rows`` of the level before, or 0.
    thirds
        Where its plane of thirds ``[below, T]`` begins.
    n_rows
        Coefficients that are known with it.
    """

    coded: int
    thirds: int
    n_rows: int


class CoefficientPlane(NamedTuple):
    """The coefficients of tokens with one step.

    Attributes
    ----------
    tokens
        T.
    row
        Where they go: ``out[row : row + T]``.
    columns
        Columns of ``out`` to fill, those behind the coefficients with zeros.
    low, n_low
        Where the plane of low bits ``[n_low, T]`` begins in the integers.
    low_bits
        Where the number of low bits of each of its rows begins in ``low_bits``.
    levels
        Coarse to fine, at least one; as many for all planes of a launch.
    """

    tokens: int
    row: int
    columns: int
    low: int
    n_low: int
    low_bits: int
    levels: Sequence[LevelPlanes]


class TransformSegment(NamedTuple):
    """The tokens of one chunk.

    Attributes
    ----------
    token
        Its first one in ``rows`` and ``scales``.
    place
        Where its values go.
    """

    token: int
    place: Place


class TransformProduct(NamedTuple):
    """What the store kernel reads of the product.

    Attributes
    ----------
    values
        float32 [N, C], contiguous.
    rows
        int32 [N]: the row of each token.
    scales
        float32 [N]: of each token.
    """

    values: Tensor
    rows: Tensor
    scales: Tensor


class TransformChannels(NamedTuple):
    """Parameters of a tensor's channels.

    Attributes
    ----------
    mean, scale
        float32 [H * D], contiguous.
    first
        Channel 0 of this tensor among those of the product.
    """

    mean: Tensor
    scale: Tensor
    first: int


def join(
    integers: Tensor,
    planes: Sequence[CoefficientPlane],
    low_bits: Tensor,
    out: Tensor,
) -> None:
    """Launch the joining of coefficients.

    Parameters
    ----------
    integers
        int16 or int32 [n], contiguous: planes of integers, thirds and low bits.
    planes
        Where they are.
    low_bits
        uint8 [m], contiguous.
    out
        float16 [N, columns]: coefficients times :data:`COEFFICIENT_SCALE`. Rows are contiguous.

    Raises
    ------
    ValueError
        The arguments do not fit each other: a kernel would read or write outside.
    """
    if not planes:
        return
    lines = torch.tensor(
        [[*plane[:-1], *(n for level in plane.levels for n in level)] for plane in planes],
        dtype=torch.int64,
    )
    _check_join(lines, integers, low_bits, out)
    tiles = -(-lines[:, 0] // BLOCK_TOKENS)
    places = torch.stack(
        (torch.arange(len(lines)).repeat_interleave(tiles), counted(tiles) * BLOCK_TOKENS), dim=1
    )
    grid = len(places), triton.cdiv(int(lines[:, 2].max()), BLOCK_ROWS)
    if not all(grid):
        return
    with device_of(out):
        transform_join_kernel[grid](
            integers,
            to_device(lines, out.device),
            to_device(places.to(torch.int32), out.device),
            low_bits,
            out,
            out.stride(0),
            len(planes[0].levels),
            **join_options(),
        )


def multiply(coefficients: Tensor, basis: Tensor, out: Tensor) -> None:
    """Multiply float16 matrices ``[N, K]`` and ``[K, C]`` with float32 sums to ``out`` [N, C]."""
    if out.is_cuda and MIXED_PRODUCTS:
        torch.mm(coefficients, basis, out_dtype=torch.float32, out=out)
    else:
        torch.mm(coefficients.float(), basis.float(), out=out)


def store(
    product: TransformProduct,
    segments: Sequence[TransformSegment],
    channels: TransformChannels,
    rotary: Rotary | None,
    out: Tensor,
) -> None:
    """Launch the last step for one tensor: mean + channel's scale * token's scale * product.

    Parameters
    ----------
    product
        Of the tokens of all segments.
    segments
        The chunks in it.
    channels
        The tensor's parameters.
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
    lines = torch.tensor([(s.token, *s.place) for s in segments], dtype=torch.int64)
    _check_product(product, out.device)
    check_cache(out, rotary, channels[:2])
    check_channels(channels.first, len(channels.mean), product.values.shape[1])
    n_tokens = len(product.rows)
    inside = (lines[:, 0] + lines[:, 1] <= n_tokens).all()
    check_segments(lines, inside, f"{n_tokens} tokens", rotary, out)
    pairs = PairArguments.of(rotary, out, channels.mean)
    with device_of(out):
        transform_store_kernel[pairs.grid(int(lines[:, 1].max()), len(segments))](
            *product,
            to_device(lines, out.device),
            channels.mean,
            channels.scale,
            *pairs,
            channels.first,
            product.values.shape[1],
            **tile_options(interleaved=rotary is not None and rotary.interleaved),
        )


def join_options() -> dict[str, Any]:
    """The one configuration that is compiled, for every GPU."""
    return {
        "BLOCK_K": BLOCK_ROWS,
        "BLOCK_T": BLOCK_TOKENS,
        "num_warps": WARPS,
        "enable_fp_fusion": False,
    }


def _check_join(lines: Tensor, integers: Tensor, low_bits: Tensor, out: Tensor) -> None:
    check_integers(integers, out.device)
    if low_bits.ndim != 1 or low_bits.dtype != torch.uint8 or not low_bits.is_contiguous():
        raise ValueError(f"expected contiguous uint8 low bits [m], got {described(low_bits)}")
    if out.ndim != 2 or out.dtype != torch.float16 or out.stride(1) != 1:
        raise ValueError(f"expected out float16 [N, columns], got {described(out)}")
    if BLOCK_TOKENS * out.stride(0) >= INT32_END:
        raise ValueError(f"expected rows that fit 32 bits in a tile, got {out.stride()}")
    if low_bits.device != out.device:
        raise ValueError(f"expected all tensors on {out.device}")
    tokens, row, columns, low, n_low, bits_at = lines[:, :PLANE_FIELDS].unbind(1)
    levels = lines[:, PLANE_FIELDS:].reshape(len(lines), -1, LEVEL_FIELDS)
    coded, thirds, n_rows = levels.unbind(2)
    below = torch.nn.functional.pad(n_rows, (1, 0))[:, :-1]
    # Bounded first, so that no product below wraps round.
    inside = (
        ((lines >= 0) & (lines < FAR)).all()
        & ((tokens < INT32_END) & (columns <= _MAX_ROWS) & (n_low <= n_rows[:, 0])).all()
        & ((below <= n_rows) & (n_rows <= columns[:, None])).all()
        & (tokens * columns < INT32_END).all()
        & (row + tokens <= out.shape[0]).all()
        & (columns <= out.shape[1]).all()
        & (low + n_low * tokens <= len(integers)).all()
        & (bits_at + n_low <= len(low_bits)).all()
        & (coded + (n_rows - below) * tokens[:, None] <= len(integers)).all()
        & (thirds + below * tokens[:, None] <= len(integers)).all()
    )
    if not inside:
        raise ValueError(
            f"expected planes inside {len(integers)} integers, {len(low_bits)} low bits and "
            f"out {list(out.shape)}, got {lines.tolist()}"
        )


def _check_product(product: TransformProduct, device: torch.device) -> None:
    values, rows, scales = product
    if values.ndim != 2 or values.dtype != torch.float32 or not values.is_contiguous():
        raise ValueError(f"expected contiguous float32 values [N, C], got {described(values)}")
    n = len(values)
    if (rows.shape, rows.dtype) != ((n,), torch.int32) or not rows.is_contiguous():
        raise ValueError(f"expected contiguous int32 rows [{n}], got {described(rows)}")
    if (scales.shape, scales.dtype) != ((n,), torch.float32) or not scales.is_contiguous():
        raise ValueError(f"expected contiguous float32 scales [{n}], got {described(scales)}")
    if any(tensor.device != device for tensor in product):
        raise ValueError(f"expected all tensors on {device}")


@triton.jit(do_not_specialize=["n_levels"])
def transform_join_kernel(
    integers,
    planes,
    places,
    low_bits,
    out,
    stride,
    n_levels,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Join a tile of coefficients."""
    place = places + tl.program_id(0) * 2
    fields = planes + tl.load(place) * (_PLANE_FIELDS + _LEVEL_FIELDS * n_levels)
    tokens, columns = tl.load(fields).to(tl.int32), tl.load(fields + 2).to(tl.int32)
    row, n_low = tl.load(fields + 1), tl.load(fields + 4).to(tl.int32)
    low = integers + tl.load(fields + 3)
    low_bits += tl.load(fields + 5)
    fields += _PLANE_FIELDS

    first, step = tl.load(place + 1), tl.arange(0, BLOCK_T)
    t, k = first + step, tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    at = (k * tokens)[:, None] + t[None, :]
    inside = (t < tokens)[None, :]

    below = tl.load(fields + 2).to(tl.int32)
    q = tl.load(integers + tl.load(fields) + at, mask=inside & (k < below)[:, None], other=0)
    bits = tl.load(low_bits + k, mask=k < n_low, other=0).to(tl.int32)
    rest = tl.load(low + at, mask=inside & (k < n_low)[:, None], other=0).to(tl.int32)
    q = (q.to(tl.int32) << bits[:, None]) | rest
    for _ in range(1, n_levels):
        fields += _LEVEL_FIELDS
        coded, thirds = integers + tl.load(fields), integers + tl.load(fields + 1)
        n_rows = tl.load(fields + 2).to(tl.int32)
        known = (k < below)[:, None]
        third = tl.load(thirds + at, mask=inside & known, other=1).to(tl.int32) - 1
        begun = inside & ((k >= below) & (k < n_rows))[:, None]
        fresh = tl.load(coded + (at - below * tokens), mask=begun, other=0).to(tl.int32)
        q = tl.where(known, 3 * q + tl.where(q < 0, -third, third), fresh)
        below = n_rows

    # Transposed, so that neighbouring threads write neighbouring coefficients.
    y = tl.trans(q.to(tl.float32) * _COEFFICIENT_SCALE)
    y = tl.minimum(tl.maximum(y, -_LARGEST), _LARGEST).to(out.dtype.element_ty)
    out += (row + first) * stride
    written = (t < tokens)[:, None] & (k < columns)[None, :]
    tl.store(out + ((step * stride)[:, None] + k[None, :]), y, mask=written)


@triton.jit(do_not_specialize=["heads", "first_channel"])
def transform_store_kernel(
    values,
    rows,
    scales,
    segments,
    mean,
    scale,
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
    width,
    INTERLEAVED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Finish a tile of a segment's head."""
    head = tl.program_id(2) % heads
    fields = segments + tl.program_id(2) // heads * _SEGMENT_FIELDS
    token = tl.load(fields)
    tokens, out, turn = open_place(fields + 1, head, out, stride_b, stride_h, stride_t, n_rotated)

    first = tl.program_id(0) * BLOCK_T
    step = tl.arange(0, BLOCK_T)
    inside = first + step < tokens
    pair = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    a, b = pair_channels(pair, n_rotated, n_rest, INTERLEAVED)
    has_a = pair < n_rotated + n_rest
    row = tl.load(rows + token + first + step, mask=inside, other=0).to(tl.int64)
    token_scale = tl.load(scales + token + first + step, mask=inside, other=0)
    values += (row * width)[:, None]
    x = _channel_values(
        values, token_scale, mean, scale, first_channel, head * dim + a, inside, has_a
    )
    y = _channel_values(
        values, token_scale, mean, scale, first_channel, head * dim + b, inside, has_a & (b < dim)
    )
    store_pairs(
        x, y, a, b, pair, first, step, tokens, cos + turn, sin + turn,
        out, stride_t, stride_d, dim, n_rotated, n_rest,
    )  # fmt: skip


@triton.jit
def _channel_values(values, token_scale, mean, scale, first_channel, channel, inside, valid):
    """Values [T, P] before RoPE."""
    x = tl.load(
        values + (first_channel + channel)[None, :],
        mask=inside[:, None] & valid[None, :],
        other=0,
    )
    channel_scale = tl.load(scale + channel, mask=valid, other=0)
    added = tl.load(mean + channel, mask=valid, other=0)
    return x * (token_scale[:, None] * channel_scale[None, :]) + added[None, :]
