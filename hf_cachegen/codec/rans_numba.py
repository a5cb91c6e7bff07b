"""The entropy coder for CPUs: :mod:`hf_cachegen.codec.rans` and the integer mapping, compiled.

The kernels release the GIL, so planes can be coded from several threads at once.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numba
import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_cachegen.codec.bank import (
    PROB_TOTAL,
    IntegerBank,
    RowTables,
    TableBank,
    check_escapes,
    read_only,
)
from hf_cachegen.codec.rans import (
    check_plane,
    damaged_stream,
    invalid_table,
    join_streams,
    not_codable,
    stream_bounds,
)
from hf_cachegen.config import MAX_ALPHABET, PROB_BITS, RANS_LANES, RANS_LOW, RANS_STATE_WORDS

_OK, _BAD_TABLE, _BAD_SYMBOL, _BAD_STREAM = 0, 1, 2, 3
_SLOT_MASK = PROB_TOTAL - 1

# Numba turns a mix of signed and unsigned integers into floats, so all states, words and
# constants of the kernels are uint64.
_U64 = np.uint64
_LOW = _U64(RANS_LOW)

# x // f == (x * r) >> 44 with r = ceil(2^44 / f), for every x < f * 2^20 (which renormalised
# states are): with r * f = 2^44 + e, e < f, the excess x * e is below f^2 * 2^20 <= 2^44, and
# x * r < 2^64.
_RECIPROCAL_BITS = 44
_RECIPROCALS = read_only(
    np.array([0, *(-(-(1 << _RECIPROCAL_BITS) // f) for f in range(1, PROB_TOTAL + 1))], np.uint64)
)


def _jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile on first call, without the GIL; on disk where some cache folder can be written."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # numba found no folder for its cache
        return numba.njit(**options)(function)


def encode_plane(
    symbols: NDArray[np.uint8],
    table_ids: ArrayLike,
    bank: TableBank,
    rows_per_stream: int,
    threads: int = 1,
) -> bytes:
    """As :func:`hf_cachegen.codec.rans.encode_plane`, with streams shared among threads."""
    check_plane(symbols.shape, rows_per_stream)
    rows = bank.rows(table_ids, len(symbols))
    if symbols.size == 0:
        return b""
    n_streams = -(-len(symbols) // rows_per_stream)
    capacity = RANS_STATE_WORDS + min(rows_per_stream, len(symbols)) * symbols.shape[1]
    streams = np.empty((n_streams, capacity), np.uint16)
    begins = np.empty(n_streams, np.int64)
    arguments = (
        read_only(symbols),
        rows,
        bank.freqs,
        _RECIPROCALS,
        rows_per_stream,
        streams,
        begins,
    )
    _run(_encode_streams, arguments, n_streams, threads)
    return join_streams([stream[begin:] for stream, begin in zip(streams, begins, strict=True)])


def decode_plane(
    data: bytes,
    shape: tuple[int, int],
    table_ids: ArrayLike,
    bank: TableBank,
    rows_per_stream: int,
    threads: int = 1,
) -> NDArray[np.uint8]:
    """As :func:`hf_cachegen.codec.rans.decode_plane`, with streams shared among threads."""
    check_plane(shape, rows_per_stream)
    rows = bank.rows(table_ids, shape[0])
    bounds = stream_bounds(data, shape, rows_per_stream)
    symbols = np.empty(shape, np.uint8)
    # A step may read, though not use, a word for each lane behind the last one.
    words = np.zeros(len(data) // 2 + RANS_LANES, np.uint16)
    words[: len(data) // 2] = np.frombuffer(data, "<u2")
    arguments = (words, bounds, rows, bank.freqs, rows_per_stream, symbols)
    _run(_decode_streams, arguments, len(bounds) - 1, threads)
    return symbols


def _run(
    kernel: Callable[..., Any], arguments: tuple[Any, ...], n_streams: int, threads: int
) -> None:
    """Run a kernel over all streams; raise what its status says."""
    n_parts = max(1, min(threads, n_streams))
    cuts = [n_streams * part // n_parts for part in range(n_parts + 1)]
    parts = list(pairwise(cuts))
    if n_parts == 1:
        results = [kernel(*arguments, *parts[0])]
    else:
        with ThreadPoolExecutor(n_parts) as pool:
            results = list(pool.map(lambda part: kernel(*arguments, *part), parts))
    for status, index in results:
        if status == _BAD_TABLE:
            raise invalid_table()
        if status == _BAD_SYMBOL:
            raise not_codable()
        if status == _BAD_STREAM:
            raise damaged_stream(index)


@_jit
def _encode_streams(
    symbols: Any,
    rows: RowTables,
    freqs: Any,
    reciprocals: Any,
    rows_per_stream: int,
    streams: Any,
    begins: Any,
    begin: int,
    end: int,
) -> tuple[int, int]:
    """Write each stream to the end of its row of ``streams``."""
    n_rows = symbols.shape[0]
    reciprocal = np.zeros(MAX_ALPHABET, np.uint64)
    packed = np.zeros(MAX_ALPHABET, np.uint64)
    state = np.empty(RANS_LANES, np.uint64)
    for stream in range(begin, end):
        out = streams[stream]
        position = _U64(out.size)
        state[:] = _LOW
        start = stream * rows_per_stream
        stop = min(start + rows_per_stream, n_rows)
        for row in range(stop - 1, start - 1, -1):
            table = freqs[rows.first[row] : rows.first[row] + rows.size[row]]
            known = row < stop - 1 and rows.ids[row] == rows.ids[row + 1]
            if not known and not _fill_encoder(table, reciprocals, reciprocal, packed):
                return _BAD_TABLE, stream
            position, codable = _encode_row(symbols[row], reciprocal, packed, state, out, position)
            if not codable:
                return _BAD_SYMBOL, stream
        for lane in range(RANS_LANES - 1, -1, -1):
            position -= _U64(2)
            out[position] = state[lane] & _U64(0xFFFF)
            out[position + _U64(1)] = state[lane] >> _U64(16)
        begins[stream] = position
    return _OK, 0


@_jit
def _fill_encoder(table: Any, reciprocals: Any, reciprocal: Any, packed: Any) -> bool:
    """Per symbol 1 / f and f << 32 | c; all zero where the symbol cannot be coded."""
    total = _U64(0)
    packed[:] = _U64(0)
    for symbol in range(table.size):
        freq = _U64(table[symbol])
        total += freq
        if total > _U64(PROB_TOTAL):
            return False
        reciprocal[symbol] = reciprocals[freq]
        if freq > _U64(0):
            packed[symbol] = freq << _U64(32) | (total - freq)
    return bool(total == _U64(PROB_TOTAL))


@_jit
def _encode_row(
    symbols: Any, reciprocal: Any, packed: Any, state: Any, out: Any, position: Any
) -> tuple[Any, bool]:
    codable = True
    for token in range(symbols.size - 1, -1, -1):
        lane = token & (RANS_LANES - 1)
        symbol = symbols[token]
        entry = packed[symbol]
        freq = entry >> _U64(32)
        codable &= entry != _U64(0)
        x = state[lane]
        full = x >= freq << _U64(32 - PROB_BITS)
        # Stored in any case, counted only if it is needed: no branch to mispredict. Streams have
        # room for a word a symbol, so this is inside.
        out[position - _U64(1)] = x & _U64(0xFFFF)
        position -= _U64(full)
        x = x >> _U64(16) if full else x
        quotient = (x * reciprocal[symbol]) >> _U64(_RECIPROCAL_BITS)
        state[lane] = x + (entry & _U64(0xFFFF)) + quotient * (_U64(PROB_TOTAL) - freq)
    return position, codable


@_jit
def _decode_streams(
    words: Any,
    bounds: Any,
    rows: RowTables,
    freqs: Any,
    rows_per_stream: int,
    out: Any,
    begin: int,
    end: int,
) -> tuple[int, int]:
    n_rows = out.shape[0]
    lookup = np.empty(PROB_TOTAL, np.uint32)
    state = np.empty(RANS_LANES, np.uint64)
    for stream in range(begin, end):
        position, limit = _U64(bounds[stream]), _U64(bounds[stream + 1])
        for lane in range(RANS_LANES):
            state[lane] = _U64(words[position]) | _U64(words[position + _U64(1)]) << _U64(16)
            position += _U64(2)
            if state[lane] < _LOW:
                return _BAD_STREAM, stream
        start = stream * rows_per_stream
        for row in range(start, min(start + rows_per_stream, n_rows)):
            table = freqs[rows.first[row] : rows.first[row] + rows.size[row]]
            known = row > start and rows.ids[row] == rows.ids[row - 1]
            if not known and not _fill_decoder(table, lookup):
                return _BAD_TABLE, stream
            position = _decode_row(words, position, limit, lookup, state, out[row])
        if position != limit:
            return _BAD_STREAM, stream
        for lane in range(RANS_LANES):
            if state[lane] != _LOW:
                return _BAD_STREAM, stream
    return _OK, 0


@_jit
def _fill_decoder(table: Any, lookup: Any) -> bool:
    """Per slot (f - 1) << 20 | (slot - c) << 8 | symbol, in 32 bits."""
    slot = np.int64(0)
    for symbol in range(table.size):
        freq = np.int64(table[symbol])
        if slot + freq > PROB_TOTAL:
            return False
        for offset in range(freq):
            lookup[slot + offset] = (freq - 1) << 20 | offset << 8 | symbol
        slot += freq
    return bool(slot == PROB_TOTAL)


@_jit
def _decode_row(words: Any, position: Any, limit: Any, lookup: Any, state: Any, out: Any) -> Any:
    """Decode a row; returns a position behind ``limit`` when the words do not suffice."""
    for start in range(0, out.size, RANS_LANES):
        if position > limit:
            break
        for lane in range(min(RANS_LANES, out.size - start)):
            x = state[lane]
            entry = _U64(lookup[x & _U64(_SLOT_MASK)])
            out[start + lane] = entry & _U64(0xFF)
            x = ((entry >> _U64(20)) + _U64(1)) * (x >> _U64(PROB_BITS)) + (
                (entry >> _U64(8)) & _U64(_SLOT_MASK)
            )
            low = x < _LOW
            # Read in any case, used only if it is needed: no branch to mispredict.
            fresh = x << _U64(16) | _U64(words[position])
            position += _U64(low)
            state[lane] = fresh if low else x
    return position


def to_symbols(
    q: NDArray[np.int32], table_ids: ArrayLike, bank: IntegerBank
) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """As :func:`hf_cachegen.codec.bank.to_symbols`."""
    rows = bank.rows(table_ids, len(q))
    symbols = np.empty(q.shape, np.uint8)
    n_escapes = _fill_symbols(read_only(q), rows, bank.lo, bank.freqs, symbols)
    if n_escapes == 0:
        return symbols, np.empty(0, np.int32)
    return symbols, q[_escaped(symbols, rows)]


def from_symbols(
    symbols: NDArray[np.uint8], escapes: NDArray[np.int32], table_ids: ArrayLike, bank: IntegerBank
) -> NDArray[np.int32]:
    """As :func:`hf_cachegen.codec.bank.from_symbols`."""
    rows = bank.rows(table_ids, len(symbols))
    q = np.empty(symbols.shape, np.int32)
    n_escapes = _fill_integers(read_only(symbols), rows, bank.lo, q)
    check_escapes(n_escapes, len(escapes))
    if n_escapes:
        q[_escaped(symbols, rows)] = escapes
    return q


def _escaped(symbols: NDArray[np.uint8], rows: RowTables) -> NDArray[np.bool_]:
    escaped: NDArray[np.bool_] = symbols == (rows.size - 1).astype(np.uint8)[:, None]
    return escaped


@_jit
def _fill_symbols(q: Any, rows: RowTables, lo: Any, freqs: Any, symbols: Any) -> int:
    """Map integers to symbols; returns how many became escapes."""
    n_escapes = 0
    mapped = np.empty(MAX_ALPHABET, np.uint8)
    for row in range(q.shape[0]):
        low, first, escape = lo[rows.ids[row]], rows.first[row], rows.size[row] - 1
        for symbol in range(escape):
            mapped[symbol] = symbol if freqs[first + symbol] > 0 else escape
        mapped[escape] = escape
        for token in range(q.shape[1]):
            offset = np.int64(q[row, token]) - low
            inside = (offset >= 0) & (offset < escape)
            symbol = mapped[offset if inside else escape]
            symbols[row, token] = symbol
            n_escapes += symbol == escape
    return n_escapes


@_jit
def _fill_integers(symbols: Any, rows: RowTables, lo: Any, q: Any) -> int:
    """Map symbols to integers; returns how many are escapes, whose integers are not set."""
    n_escapes = 0
    for row in range(symbols.shape[0]):
        low, escape = lo[rows.ids[row]], rows.size[row] - 1
        for token in range(symbols.shape[1]):
            symbol = symbols[row, token]
            q[row, token] = low + symbol
            n_escapes += symbol == escape
    return n_escapes
