"""Interleaved rANS: one program of one warp a stream, one lane a state.

The bitstream is specified in ``hf_cachegen/codec/rans.py``; lanes, words and checks are as there.

**Which word.** The lanes that take a word in a step set their bit in a mask (one warp reduction);
the set bits below a lane say which word is its own, and all set bits how far the stream moves on.

**Which symbol.** A binary search over the first slots of the row's symbols, as deep as its alphabet
asks for: one launch decodes planes of all of them. A lookup by slot would cost 4 KiB a row even at
a byte a slot, more than a row's values in a chunk of 1,500 tokens; a gigabyte for all tables of a
model where it holds frequencies too; and its 32 lanes touch some 20 cache lines a step. A search
reads 4 bytes a symbol: a line or two a row, which stay in L1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_cachegen.config import PROB_BITS, RANS_LANES, RANS_LOW, RANS_STATE_WORDS
from hf_cachegen.triton_kernels.streams import (
    INTEGER_DTYPES,
    STREAM_FIELDS,
    TABLE_FIELDS,
    CodedPlanes,
    EntryTables,
    PlaneShape,
    PlaneShapes,
    device_of,
    fit_int16,
    to_device,
)

ESCAPE_BLOCK = 128
"""Tokens that the escape pass looks at in one step."""

OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
"""One warp a stream. There are no floats to fuse, but Triton wants to be told."""

OUT_DTYPES = (torch.uint8, *INTEGER_DTYPES)

_LANES = tl.constexpr(RANS_LANES)
_LOW = tl.constexpr(RANS_LOW)
_PROB_BITS = tl.constexpr(PROB_BITS)
_LIMIT_BITS = tl.constexpr(32 - PROB_BITS)
_SLOT_MASK = tl.constexpr((1 << PROB_BITS) - 1)
_STREAM_FIELDS = tl.constexpr(STREAM_FIELDS)
_TABLE_FIELDS = tl.constexpr(TABLE_FIELDS)
_STATE_WORDS = tl.constexpr(RANS_STATE_WORDS)


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


def decode_planes(planes: CodedPlanes, tables: EntryTables, out: Tensor) -> DecodeFlags:
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
    shapes, n_escapes, device = planes.shapes, len(planes.escapes), out.device
    _check(shapes, tables, out)
    if out.dtype == torch.uint8 and n_escapes:
        raise ValueError("expected planes of symbols to have no escapes")
    if out.dtype == torch.int16 != integer_dtype(planes, tables):
        raise ValueError("expected an int32 tensor for integers that int16 cannot hold")
    planes.check()
    streams = to_device(shapes.stream_table(planes.bounds), device)
    flags = torch.zeros(len(streams), dtype=torch.int32, device=device)
    counts = torch.zeros(int(shapes.n_rows.sum()), dtype=torch.int32, device=device)
    if len(streams):
        words = to_device(planes.words, device)
        with device_of(out):
            rans_decode_kernel[(len(streams),)](
                words,
                streams,
                tables.rows,
                tables.tables,
                tables.entries,
                out,
                counts,
                flags,
                **OPTIONS,
            )
    ends = counts.cumsum(0)
    if n_escapes:
        escapes = to_device(planes.escapes, device)
        with device_of(out):
            fill_escapes_kernel[(len(streams),)](
                streams,
                tables.rows,
                tables.tables,
                counts,
                ends,
                escapes,
                n_escapes,
                out,
                BLOCK=ESCAPE_BLOCK,
                **OPTIONS,
            )
    last = to_device(shapes.n_rows.cumsum(0), device)
    found = torch.nn.functional.pad(ends, (1, 0))[last]
    return DecodeFlags(flags, found - to_device(planes.n_escapes.cumsum(0), device))


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
    shapes, device = PlaneShapes.of([shape]), symbols.device
    _check(shapes, tables, symbols)
    n = int(shapes.n_streams)
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
        ends = torch.arange(1, n + 1) * capacity
        streams = to_device(
            shapes.stream_table(torch.stack((ends - capacity, ends), dim=1)), device
        )
        with device_of(symbols):
            rans_encode_kernel[(n,)](
                symbols, streams, tables.rows, tables.tables, tables.entries, *encoded, **OPTIONS
            )
    return encoded


def integer_dtype(planes: CodedPlanes, tables: EntryTables) -> torch.dtype:
    """int16 if all integers of the planes fit, which halves what the next kernel reads."""
    narrow = tables.fits_int16 and fit_int16(planes.escapes)
    return torch.int16 if narrow else torch.int32


def _check(shapes: PlaneShapes, tables: EntryTables, plane: Tensor) -> None:
    size = shapes.size
    if plane.shape != (size,) or not plane.is_contiguous() or plane.dtype not in OUT_DTYPES:
        raise ValueError(
            f"expected a contiguous tensor [{size}] of one of {OUT_DTYPES}, got "
            f"{list(plane.shape)} of {plane.dtype}"
        )
    if plane.device != tables.rows.device:
        raise ValueError(f"expected tables on {plane.device}, got {tables.rows.device}")
    shapes.check(tables)


@triton.jit
def _popcount(x):
    """Set bits of uint32, in the form that compilers turn into one instruction."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return (x * 0x01010101) >> 24


@triton.jit
def _decode_row(x, used, words, n_words, table, lo, escape, tokens, out, DEPTH: tl.constexpr):
    """Decode a row; returns the states, the words used so far and each lane's escapes."""
    lane = tl.arange(0, _LANES)
    bit = tl.full((_LANES,), 1, tl.uint32) << lane.to(tl.uint32)
    first = tl.load(table).to(tl.uint32)
    n_escapes = tl.zeros((_LANES,), tl.int32)
    for start in range(0, tokens, _LANES):
        active = lane < tokens - start
        slot = x & _SLOT_MASK
        symbol = tl.zeros((_LANES,), tl.int32)
        entry = tl.zeros((_LANES,), tl.uint32) + first
        for step in tl.static_range(DEPTH):
            middle = symbol + (1 << (DEPTH - 1 - step))
            found = tl.load(table + middle).to(tl.uint32)
            above = (found & 0xFFFF) <= slot
            symbol = tl.where(above, middle, symbol)
            entry = tl.where(above, found, entry)
        tl.store(out + start + lane, (symbol + lo).to(out.dtype.element_ty), mask=active)
        n_escapes += (active & (symbol == escape)).to(tl.int32)

        moved = (entry >> 16) * (x >> _PROB_BITS) + slot - (entry & 0xFFFF)
        low = active & (moved < _LOW)
        takers = tl.sum(tl.where(low, bit, 0).to(tl.uint32), dtype=tl.uint32)
        place = used + _popcount(takers & (bit - 1))
        word = tl.load(words + place, mask=low & (place < n_words), other=0).to(tl.uint32)
        x = tl.where(active, tl.where(low, moved << 16 | word, moved), x)
        used += _popcount(takers)
    return x, used, n_escapes


@triton.jit
def rans_decode_kernel(words, streams, rows, tables, entries, out, counts, flags):
    """Decode a stream to ``out`` and the number of escapes of each row to ``counts``."""
    stream = tl.program_id(0)
    fields = streams + stream * _STREAM_FIELDS
    begin, end = tl.load(fields), tl.load(fields + 1)
    out += tl.load(fields + 2)
    counts += tl.load(fields + 3)
    rows += tl.load(fields + 4)
    n_rows, tokens = tl.load(fields + 5).to(tl.int32), tl.load(fields + 6).to(tl.int32)
    words += begin
    n_words = (end - begin - _STATE_WORDS).to(tl.uint32)

    lane = tl.arange(0, _LANES)
    x = tl.load(words + 2 * lane + 1).to(tl.uint32) << 16 | tl.load(words + 2 * lane).to(tl.uint32)
    words += _STATE_WORDS
    used = tl.full((), 0, tl.uint32)
    for _ in range(n_rows):
        row = tables + tl.load(rows) * _TABLE_FIELDS
        table, depth = entries + tl.load(row), tl.load(row + 1)
        lo, escape = tl.load(row + 2), tl.load(row + 3)
        # As many loops as depths, so that each search is unrolled.
        if depth == 2:
            x, used, n = _decode_row(x, used, words, n_words, table, lo, escape, tokens, out, 2)
        elif depth == 4:
            x, used, n = _decode_row(x, used, words, n_words, table, lo, escape, tokens, out, 4)
        elif depth == 6:
            x, used, n = _decode_row(x, used, words, n_words, table, lo, escape, tokens, out, 6)
        else:
            x, used, n = _decode_row(x, used, words, n_words, table, lo, escape, tokens, out, 8)
        tl.store(counts, tl.sum(n))
        out += tokens
        rows += 1
        counts += 1
    n_bad = tl.sum((x != _LOW).to(tl.int32))
    tl.store(flags + stream, n_bad + (used != n_words).to(tl.int32))


@triton.jit(do_not_specialize=["n_escapes"])
def fill_escapes_kernel(
    streams, rows, tables, counts, ends, escapes, n_escapes, out, BLOCK: tl.constexpr
):
    """Replace the escape symbols of a stream's rows by the integers that they stand for."""
    fields = streams + tl.program_id(0) * _STREAM_FIELDS
    out += tl.load(fields + 2)
    counts += tl.load(fields + 3)
    ends += tl.load(fields + 3)
    rows += tl.load(fields + 4)
    n_rows, tokens = tl.load(fields + 5).to(tl.int32), tl.load(fields + 6).to(tl.int32)
    for _ in range(n_rows):
        count = tl.load(counts)
        if count > 0:
            row = tables + tl.load(rows) * _TABLE_FIELDS
            escape = tl.load(row + 2) + tl.load(row + 3)
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
        rows += 1
        counts += 1
        ends += 1


@triton.jit
def rans_encode_kernel(symbols, streams, rows, tables, entries, states, words, begins, flags):
    """Encode a stream, from its last step to its first, to the end of its line of ``words``."""
    stream = tl.program_id(0)
    fields = streams + stream * _STREAM_FIELDS
    begin = tl.load(fields)
    words += begin
    position = (tl.load(fields + 1) - begin).to(tl.uint32)
    n_rows, tokens = tl.load(fields + 5).to(tl.int32), tl.load(fields + 6).to(tl.int32)
    symbols += tl.load(fields + 2) + (n_rows - 1).to(tl.int64) * tokens
    rows += tl.load(fields + 4) + n_rows - 1

    lane = tl.arange(0, _LANES)
    bit = tl.full((_LANES,), 1, tl.uint32) << lane.to(tl.uint32)
    x = tl.full((_LANES,), _LOW, tl.uint32)
    bad = tl.zeros((_LANES,), tl.int32)
    n_steps = tl.cdiv(tokens, _LANES)
    for _ in range(n_rows):
        row = tables + tl.load(rows) * _TABLE_FIELDS
        table, size = entries + tl.load(row), 1 << tl.load(row + 1)
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
        rows -= 1
    tl.store(states + stream * _LANES + lane, x)
    tl.store(begins + stream, position.to(tl.int32))
    tl.store(flags + stream, tl.sum(bad))
