"""The entropy coder, written down: interleaved rANS in plain NumPy.

This module is the specification of the bitstream. Faster implementations give the same bytes.

rANS is asymmetric numeral systems in its range variant (Duda 2013, arXiv:1311.2540), renormalised
by whole words and interleaved as in Giesen 2014 (arXiv:1402.3392).

**Plane.** Symbols ``[R, T]`` (rows, tokens) of one byte, and for each row the table it is coded
with. Rows are cut in order into S = ceil(R / rows_per_stream) *streams*, which decode independently
of each other. R, T, the tables and ``rows_per_stream`` are known to both sides. Little-endian::

    u32 n[S]                      words of each stream
    for each stream:
        u32 state[32]             a decoder's first state of each lane, each >= 2^16
        u16 word[n]

A plane without symbols is no bytes at all.

**Tables.** Symbol s has the frequency f[s]; a table's frequencies sum to M = 2^12. Its slots
0 ... M-1 belong, in order, f[0] to symbol 0, f[1] to symbol 1, ...; c[s] is the first slot of s.

**Decoding a stream.** 32 *lanes* hold a 32-bit state x each and share the stream's words. Rows are
decoded one after another, and token t of a row by lane t mod 32. For each token::

    slot = x mod M
    s    = the symbol that owns slot
    x    = f[s] * (x div M) + slot - c[s]
    if x < 2^16:  x = x * 2^16 + the next word

The 32 tokens of a *step* use the same table and different lanes, so a GPU decodes them at once:
lanes that need a word find its place by counting such lanes below them.

**Bounds.** A state lies in [2^16, 2^32) before each token. So the third line gives at least
f * 2^4 >= 2^4, and one word always lifts it back to 2^16 or more. A symbol with f = M leaves x as
it is and costs nothing.

**End.** After the last token every state is 2^16, which is where the encoder began, and all words
are used. Anything else is damage.

**Encoding** is decoding backwards, from the last token of the last row to the first::

    if x >= f[s] * 2^20:  put x mod 2^16 before the words so far;  x = x div 2^16
    x = (x div f[s]) * M + c[s] + x mod f[s]

One word suffices here too: x < 2^32 gives x div 2^16 < 2^16 < f * 2^20. With x in
[f * 2^4, f * 2^20), the second line then gives a state in [2^16, 2^32).

**Size.** Code lengths of the symbols, 4 bytes of count, and for each lane the 32 bits of its first
state less the log2(x) - 16 bits of symbols that it carries: 3 bytes a lane on average, 4 at most.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_cachegen.codec.bank import PROB_TOTAL, TableBank
from hf_cachegen.config import PROB_BITS, RANS_LANES, RANS_LOW, RANS_STATE_WORDS
from hf_cachegen.errors import FormatError

COUNT_BYTES = 4
_LIMIT_BITS = 32 - PROB_BITS
"""Before symbol s is encoded, a state must be below ``f[s] << _LIMIT_BITS``."""


def encode_plane(
    symbols: NDArray[np.uint8],
    table_ids: ArrayLike,
    bank: TableBank,
    rows_per_stream: int,
    threads: int = 1,
) -> bytes:
    """Encode a plane.

    Parameters
    ----------
    symbols
        uint8 [R, T].
    table_ids
        [R]: the table of each row.
    bank
        The tables.
    rows_per_stream
        Rows that share a stream, at least 1.
    threads
        Streams to work on at once; this implementation takes them one by one.

    Raises
    ------
    ValueError
        The arguments do not fit each other, or a symbol cannot be coded with its row's table.
    FormatError
        A table is not valid.
    """
    check_plane(symbols.shape, rows_per_stream)
    tables = _row_tables(bank, table_ids, len(symbols))
    if symbols.size == 0:
        return b""
    return join_streams(
        [
            _encode_stream(
                symbols[row : row + rows_per_stream], tables[row : row + rows_per_stream]
            )
            for row in range(0, len(symbols), rows_per_stream)
        ]
    )


def decode_plane(
    data: bytes,
    shape: tuple[int, int],
    table_ids: ArrayLike,
    bank: TableBank,
    rows_per_stream: int,
    threads: int = 1,
) -> NDArray[np.uint8]:
    """Decode a plane: the inverse of :func:`encode_plane`.

    Parameters
    ----------
    data
        What :func:`encode_plane` returned.
    shape
        R, T of the plane.
    table_ids, bank, rows_per_stream, threads
        As for :func:`encode_plane`.

    Returns
    -------
    uint8 [R, T]

    Raises
    ------
    ValueError
        The arguments do not fit each other.
    FormatError
        A table is not valid, or the bytes are not a plane of this shape and these tables.
    """
    check_plane(shape, rows_per_stream)
    tables = _row_tables(bank, table_ids, shape[0])
    bounds = stream_bounds(data, shape, rows_per_stream)
    words = np.frombuffer(data, "<u2")
    symbols = np.empty(shape, np.uint8)
    for index, row in enumerate(range(0, shape[0] if symbols.size else 0, rows_per_stream)):
        part = slice(row, row + rows_per_stream)
        stream = words[bounds[index] : bounds[index + 1]]
        _decode_stream(stream, tables[part], symbols[part], index)
    return symbols


class _Table:
    """A row's table as int64 arrays: f and c of each symbol, and the symbol of each slot."""

    def __init__(self, freqs: NDArray[np.uint16]) -> None:
        self.freq = freqs.astype(np.int64)
        if self.freq.sum() != PROB_TOTAL:
            raise invalid_table()
        self.first_slot = np.cumsum(self.freq) - self.freq
        self.symbol = np.repeat(np.arange(len(freqs)), self.freq)


def _row_tables(bank: TableBank, table_ids: ArrayLike, n_rows: int) -> list[_Table]:
    rows = bank.rows(table_ids, n_rows)
    tables = {
        index: _Table(bank.freqs[first : first + size])
        for index, first, size in zip(*map(np.ndarray.tolist, rows), strict=True)
    }
    return [tables[index] for index in rows.ids.tolist()]


def _encode_stream(symbols: NDArray[np.uint8], tables: Sequence[_Table]) -> NDArray[np.uint16]:
    state = np.full(RANS_LANES, RANS_LOW, np.int64)
    pieces: list[NDArray[np.uint16]] = []
    for row, table in zip(symbols[::-1], tables[::-1], strict=True):
        if row.max() >= len(table.freq) or (table.freq[row] == 0).any():
            raise not_codable()
        for start in reversed(range(0, len(row), RANS_LANES)):
            step = row[start : start + RANS_LANES]
            freq, x = table.freq[step], state[: len(step)]
            full = x >= freq << _LIMIT_BITS
            pieces.append(x[full].astype("<u2"))
            x = np.where(full, x >> 16, x)
            state[: len(step)] = (x // freq << PROB_BITS) + table.first_slot[step] + x % freq
    return np.concatenate([state.astype("<u4").view("<u2"), *pieces[::-1]])


def _decode_stream(
    stream: NDArray[np.uint16], tables: Sequence[_Table], out: NDArray[np.uint8], index: int
) -> None:
    state = stream[:RANS_STATE_WORDS].view("<u4").astype(np.int64)
    words, used = stream[RANS_STATE_WORDS:], 0
    if (state < RANS_LOW).any():
        raise damaged_stream(index)
    for row, table in zip(out, tables, strict=True):
        for start in range(0, len(row), RANS_LANES):
            step = row[start : start + RANS_LANES]
            x = state[: len(step)]
            slot = x % PROB_TOTAL
            step[:] = symbol = table.symbol[slot]
            x = table.freq[symbol] * (x >> PROB_BITS) + slot - table.first_slot[symbol]
            low = x < RANS_LOW
            fresh = words[used : used + np.count_nonzero(low)]
            if len(fresh) < np.count_nonzero(low):
                raise damaged_stream(index)
            x[low] = x[low] << 16 | fresh
            state[: len(step)] = x
            used += len(fresh)
    if used != len(words) or (state != RANS_LOW).any():
        raise damaged_stream(index)


def check_plane(shape: Sequence[int], rows_per_stream: int) -> None:
    """Raise ValueError unless this is the shape of a plane, and streams have rows."""
    if len(shape) != 2 or min(shape) < 0:
        raise ValueError(f"expected a plane [R, T], got {list(shape)}")
    if rows_per_stream < 1:
        raise ValueError(f"expected rows_per_stream of at least 1, got {rows_per_stream}")


def join_streams(streams: Sequence[NDArray[np.uint16]]) -> bytes:
    """A plane's bytes, from each stream's states and words."""
    counts = np.array([len(stream) - RANS_STATE_WORDS for stream in streams], "<u4")
    return b"".join([counts.tobytes(), *(stream.tobytes() for stream in streams)])


def stream_bounds(data: bytes, shape: Sequence[int], rows_per_stream: int) -> NDArray[np.int64]:
    """Where a plane's streams lie.

    Returns
    -------
    int64 [S + 1]
        In 16-bit words from the start of ``data``: stream s takes ``bounds[s] : bounds[s + 1]``, of
        which the first :data:`~hf_cachegen.config.RANS_STATE_WORDS` are its states.

    Raises
    ------
    FormatError
        The counts and the length of ``data`` do not agree.
    """
    n_streams = -(-shape[0] // rows_per_stream) if shape[1] else 0
    if len(data) < n_streams * COUNT_BYTES:
        raise FormatError(
            f"expected {n_streams} word counts, found {len(data)} bytes; fetch the data again"
        )
    counts = np.frombuffer(data, "<u4", n_streams).astype(np.int64)
    bounds = np.cumsum(np.concatenate([[n_streams * COUNT_BYTES // 2], counts + RANS_STATE_WORDS]))
    if 2 * bounds[-1] != len(data):
        raise FormatError(
            f"expected {2 * bounds[-1]} bytes in {n_streams} entropy streams, found {len(data)}; "
            "fetch the data again"
        )
    return bounds


def damaged_stream(index: int) -> FormatError:
    """The error for words or states that no encoder writes."""
    return FormatError(
        f"entropy stream {index} is damaged, or was encoded with other tables; fetch it again"
    )


def invalid_table() -> FormatError:
    """The error for a table that does not sum to 1."""
    return FormatError(f"expected a table of frequencies that sum to {PROB_TOTAL}")


def not_codable() -> ValueError:
    """The error for a symbol that its row's table gives no probability."""
    return ValueError("expected symbols of frequency 1 or more in their row's table")
