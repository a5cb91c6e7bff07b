"""Interleaved rANS: one program of one warp a stream, one lane a state.

The bitstream is specified in ``hf_cachegen/codec/rans.py``; lanes, words and checks are as there.

**Which word.** The lanes that take a word in a step set their bit in a mask (one warp reduction);
the set bits below a lane say which word is its own, and all set bits how far the stream moves on.

**Which symbol.** A binary search over the first slots of the row's symbols. A lookup by slot would
cost 4 KiB a row even at a byte a slot, more than a row's values in a chunk of 1,500 tokens; a
gigabyte for all tables of a model where it holds frequencies too; and its 32 lanes touch some 20
cache lines a step. A search reads 4 bytes a symbol: a line or two a row, which stay in L1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cachegen.config import PROB_BITS, RANS_LANES, RANS_LOW
from hf_cachegen.triton_kernels.streams import (
    ROW_FIELDS,
    STATE_WORDS,
    STREAM_FIELDS,
    CodedPlane,
    EntryTables,
    PlaneShape,
    device_of,
    fit_int16,
    stream_table,
    to_device,
)

SEARCH_BITS = (4, 5, 6, 8)
"""Depths of search that are compiled: for alphabets of up to 16, 32, 64 and 256 symbols."""

ESCAPE_BLOCK = 128
"""Tokens that the escape pass looks at in one step."""

OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
"""One warp a stream. There are no floats to fuse, but Triton wants to be told."""

OUT_DTYPES = (torch.uint8, torch.int16, torch.int32)

_LANES = tl.constexpr(RANS_LANES)
_LOW = tl.constexpr(RANS_LOW)
_PROB_BITS = tl.constexpr(PROB_BITS)
_LIMIT_BITS = tl.constexpr(32 - PROB_BITS)
_SLOT_MASK = tl.constexpr((1 << PROB_BITS) - 1)
_STREAM_FIELDS = tl.constexpr(STREAM_FIELDS)
_ROW_FIELDS = tl.constexpr(ROW_FIELDS)
_STATE_WORDS = tl.constexpr(STATE_WORDS)


class DecodeFlags(NamedTuple):
    """What only decoding could tell, on the device. Damaged unless 0 everywhere.

    Attributes
    ----------
    streams
        int32 [S]: not 0 for a stream whose words or final states do not fit, plane by plane.
    escapes
        int64 [planes]: escape symbols found minus escapes given, up to and with each plane.
    """

    streams: Tensor
    escapes: Tensor


class EncodedStreams(NamedTuple):
    """Streams of a plane, on the device.

    Attributes
    ----------
    states
        uint32 [S, 32].
    words
        uint16 [S, capacity]: the words of stream s are ``words[s, begins[s]:]``.
    begins
        int32 [S].
    flags
        int32 [S]: not 0 where a symbol has frequency 0 in its row's table.
    """

    states: Tensor
    words: Tensor
    begins: Tensor
    flags: Tensor


def decode_planes(planes: Sequence[CodedPlane], tables: EntryTables, out: Tensor) -> DecodeFlags:
    """Launch the decoding of several planes at once, as of all chunks of a layer that are here.

    Parameters
    ----------
    planes
        What to decode; a program takes one stream.
    tables
        Tables of their rows, on the device of ``out``.
    out
        [symbols], contiguous: the planes one after another. uint8 takes symbols. int32, or int16
        where :func:`integer_dtype` allows it, take the integers that they stand for. Undefined
        where a flag is set.

    Raises
    ------
    FormatError
        A stream does not lie inside its plane, or begins with a state below 2^16. Nothing is
        launched.
    ValueError
        Other arguments do not fit each other.
    """
    shapes = [plane.shape for plane in planes]
    _check(shapes, tables, out)
    n_escapes = sum(len(plane.escapes) for plane in planes)
    if out.dtype == torch.uint8 and n_escapes:
        raise ValueError("expected planes of symbols to have no escapes")
    if out.dtype == torch.int16 != integer_dtype(planes, tables):
        raise ValueError("expected an int32 tensor for integers that int16 cannot hold")
    for plane in planes:
        plane.check()
    starts = _starts([len(plane.words) for plane in planes])
    bounds = [plane.bounds + start for plane, start in zip(planes, starts, strict=False)]
    streams = to_device(stream_table(shapes, bounds), out.device)
    flags = torch.zeros(len(streams), dtype=torch.int32, device=out.device)
    counts = torch.zeros(sum(s.n_rows for s in shapes), dtype=torch.int32, device=out.device)
    if len(streams):
        words = to_device(torch.cat([plane.words for plane in planes]), out.device)
        with device_of(out):
            rans_decode_kernel[(len(streams),)](
                words,
                streams,
                tables.rows,
                tables.entries,
                out,
                counts,
                flags,
                SEARCH_BITS=search_bits(tables),
                **OPTIONS,
            )
    if out.dtype == torch.uint8:
        return DecodeFlags(flags, torch.zeros(len(planes), dtype=torch.int64, device=out.device))
    ends = counts.cumsum(0)
    if n_escapes:
        escapes = to_device(torch.cat([plane.escapes for plane in planes]), out.device)
        with device_of(out):
            fill_escapes_kernel[(len(streams),)](
                streams,
                tables.rows,
                counts,
                ends,
                escapes,
                n_escapes,
                out,
                BLOCK=ESCAPE_BLOCK,
                **OPTIONS,
            )
    given = _starts([len(plane.escapes) for plane in planes])[1:]
    last = to_device(torch.tensor(_starts([s.n_rows for s in shapes])[1:]), out.device)
    found = torch.nn.functional.pad(ends, (1, 0))[last]
    return DecodeFlags(flags, found - to_device(torch.tensor(given), out.device))


def encode_plane(symbols: Tensor, shape: PlaneShape, tables: EntryTables) -> EncodedStreams:
    """Launch the encoding of a plane.

    Parameters
    ----------
    symbols
        uint8 [symbols], contiguous.
    shape
        Of the plane.
    tables
        Tables of its rows, on the same device.

    Raises
    ------
    ValueError
        The arguments do not fit each other.
    """
    _check([shape], tables, symbols)
    n, device = shape.n_streams, symbols.device
    capacity = min(shape.rows_per_stream, shape.n_rows) * shape.tokens
    if capacity >= 1 << 31:
        raise ValueError(f"expected less than 2^31 symbols a stream, got {shape}")
    encoded = EncodedStreams(
        torch.empty((n, RANS_LANES), dtype=torch.uint32, device=device),
        torch.empty((n, capacity), dtype=torch.uint16, device=device),
        torch.empty(n, dtype=torch.int32, device=device),
        torch.empty(n, dtype=torch.int32, device=device),
    )
    if n:
        streams = to_device(stream_table([shape], [torch.arange(n + 1) * capacity]), device)
        with device_of(symbols):
            rans_encode_kernel[(n,)](
                symbols, streams, tables.rows, tables.entries, *encoded, **OPTIONS
            )
    return encoded


def integer_dtype(planes: Sequence[CodedPlane], tables: EntryTables) -> torch.dtype:
    """int16 if all integers of the planes fit, which halves what the next kernel reads."""
    narrow = tables.fits_int16 and all(fit_int16(plane.escapes) for plane in planes)
    return torch.int16 if narrow else torch.int32


def search_bits(tables: EntryTables) -> int:
    """The compiled depth of search that the largest table needs."""
    return next(bits for bits in SEARCH_BITS if tables.max_symbols <= 1 << bits)


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *torch.tensor(sizes, dtype=torch.int64).cumsum(0).tolist()]


def _check(shapes: Sequence[PlaneShape], tables: EntryTables, plane: Tensor) -> None:
    size = sum(shape.size for shape in shapes)
    if plane.shape != (size,) or not plane.is_contiguous() or plane.dtype not in OUT_DTYPES:
        raise ValueError(
            f"expected a contiguous tensor [{size}] of one of {OUT_DTYPES}, got "
            f"{list(plane.shape)} of {plane.dtype}"
        )
    if plane.device != tables.rows.device:
        raise ValueError(f"expected tables on {plane.device}, got {tables.rows.device}")
    for shape in shapes:
        shape.check(tables)


@triton.jit
def _popcount(x):
    """Set bits of uint32, in the form that compilers turn into one instruction."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return (x * 0x01010101) >> 24


@triton.jit
def rans_decode_kernel(
    words, streams, rows, entries, out, counts, flags, SEARCH_BITS: tl.constexpr
):
    """Decode a stream to ``out`` and the number of last symbols of each row to ``counts``."""
    stream = tl.program_id(0)
    fields = streams + stream * _STREAM_FIELDS
    begin, end = tl.load(fields), tl.load(fields + 1)
    out += tl.load(fields + 2)
    counts += tl.load(fields + 3)
    rows += tl.load(fields + 4) * _ROW_FIELDS
    n_rows, tokens = tl.load(fields + 5).to(tl.int32), tl.load(fields + 6).to(tl.int32)
    words += begin
    n_words = (end - begin - _STATE_WORDS).to(tl.uint32)

    lane = tl.arange(0, _LANES)
    bit = tl.full((_LANES,), 1, tl.uint32) << lane.to(tl.uint32)
    x = tl.load(words + 2 * lane + 1).to(tl.uint32) << 16 | tl.load(words + 2 * lane).to(tl.uint32)
    words += _STATE_WORDS
    used = tl.full((), 0, tl.uint32)
    for _ in range(n_rows):
        table = entries + tl.load(rows)
        size, lo = tl.load(rows + 1), tl.load(rows + 2)
        n_last = tl.zeros((_LANES,), tl.int32)
        for start in range(0, tokens, _LANES):
            active = lane < tokens - start
            slot = x & _SLOT_MASK
            symbol = tl.zeros((_LANES,), tl.int32)
            entry = tl.zeros((_LANES,), tl.uint32) + tl.load(table).to(tl.uint32)
            for depth in tl.static_range(SEARCH_BITS):
                middle = symbol + (1 << (SEARCH_BITS - 1 - depth))
                found = tl.load(table + middle, mask=middle < size, other=0xFFFF).to(tl.uint32)
                above = (found & 0xFFFF) <= slot
                symbol = tl.where(above, middle, symbol)
                entry = tl.where(above, found, entry)
            tl.store(out + start + lane, (symbol + lo).to(out.dtype.element_ty), mask=active)
            n_last += (active & (symbol == size - 1)).to(tl.int32)

            moved = (entry >> 16) * (x >> _PROB_BITS) + slot - (entry & 0xFFFF)
            low = active & (moved < _LOW)
            takers = tl.sum(tl.where(low, bit, 0).to(tl.uint32), dtype=tl.uint32)
            place = used + _popcount(takers & (bit - 1))
            word = tl.load(words + place, mask=low & (place < n_words), other=0).to(tl.uint32)
            x = tl.where(active, tl.where(low, moved << 16 | word, moved), x)
            used += _popcount(takers)
        tl.store(counts, tl.sum(n_last))
        out += tokens
        rows += _ROW_FIELDS
        counts += 1
    n_bad = tl.sum((x != _LOW).to(tl.int32))
    tl.store(flags + stream, n_bad + (used != n_words).to(tl.int32))


@triton.jit(do_not_specialize=["n_escapes"])
def fill_escapes_kernel(streams, rows, counts, ends, escapes, n_escapes, out, BLOCK: tl.constexpr):
    """Replace the escape symbols of a stream's rows by the integers that they stand for."""
    fields = streams + tl.program_id(0) * _STREAM_FIELDS
    out += tl.load(fields + 2)
    counts += tl.load(fields + 3)
    ends += tl.load(fields + 3)
    rows += tl.load(fields + 4) * _ROW_FIELDS
    n_rows, tokens = tl.load(fields + 5).to(tl.int32), tl.load(fields + 6).to(tl.int32)
    for _ in range(n_rows):
        count = tl.load(counts)
        if count > 0:
            escape = tl.load(rows + 1) - 1 + tl.load(rows + 2)
            rank = tl.load(ends) - count
            for start in range(0, tokens, BLOCK):
                at = start + tl.arange(0, BLOCK)
                value = tl.load(out + at, mask=at < tokens, other=0)
                escaped = (value == escape) & (at < tokens)
                place = rank + tl.cumsum(escaped.to(tl.int32)) - 1
                given = escaped & (place < n_escapes)
                integer = tl.load(escapes + place, mask=given, other=0).to(out.dtype.element_ty)
                tl.store(out + at, integer, mask=given)
                rank += tl.sum(escaped.to(tl.int32))
        out += tokens
        rows += _ROW_FIELDS
        counts += 1
        ends += 1


@triton.jit
def rans_encode_kernel(symbols, streams, rows, entries, states, words, begins, flags):
    """Encode a stream, from its last step to its first, to the end of its line of ``words``."""
    stream = tl.program_id(0)
    fields = streams + stream * _STREAM_FIELDS
    begin = tl.load(fields)
    words += begin
    position = (tl.load(fields + 1) - begin).to(tl.uint32)
    n_rows, tokens = tl.load(fields + 5).to(tl.int32), tl.load(fields + 6).to(tl.int32)
    symbols += tl.load(fields + 2) + (n_rows - 1).to(tl.int64) * tokens
    rows += (tl.load(fields + 4) + n_rows - 1) * _ROW_FIELDS

    lane = tl.arange(0, _LANES)
    bit = tl.full((_LANES,), 1, tl.uint32) << lane.to(tl.uint32)
    x = tl.full((_LANES,), _LOW, tl.uint32)
    bad = tl.zeros((_LANES,), tl.int32)
    n_steps = tl.cdiv(tokens, _LANES)
    for _ in range(n_rows):
        table = entries + tl.load(rows)
        size = tl.load(rows + 1)
        for step in range(n_steps):
            start = (n_steps - 1 - step) * _LANES
            active = lane < tokens - start
            symbol = tl.load(symbols + start + lane, mask=active, other=0).to(tl.int32)
            entry = tl.load(table + symbol, mask=symbol < size, other=0).to(tl.uint32)
            freq = entry >> 16
            codable = active & (freq > 0)
            bad |= (active & (freq == 0)).to(tl.int32)
            freq = tl.where(codable, freq, 1)
            # Not x >= freq << 20, which is 2^32 for a certain symbol.
            full = codable & ((x >> _LIMIT_BITS) >= freq)
            takers = tl.sum(tl.where(full, bit, 0).to(tl.uint32), dtype=tl.uint32)
            position -= _popcount(takers)
            place = position + _popcount(takers & (bit - 1))
            tl.store(words + place, (x & 0xFFFF).to(tl.uint16), mask=full)
            small = tl.where(full, x >> 16, x)
            quotient = small // freq
            coded = (quotient << _PROB_BITS) + (entry & 0xFFFF) + (small - quotient * freq)
            x = tl.where(codable, coded, x)
        symbols -= tokens
        rows -= _ROW_FIELDS
    tl.store(states + stream * _LANES + lane, x)
    tl.store(begins + stream, position.to(tl.int32))
    tl.store(flags + stream, tl.sum(bad))
