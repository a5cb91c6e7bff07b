"""The entropy coder for GPUs: :mod:`hf_cachegen.codec.rans` on Triton kernels.

The functions of :mod:`hf_cachegen.codec.rans` take and return arrays of the host, and so wait for
the GPU. :func:`launch_planes` leaves the integers there and does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from hf_cachegen.codec.bank import IntegerBank, TableBank, check_escapes
from hf_cachegen.codec.entropy import split_escapes
from hf_cachegen.codec.rans import (
    check_plane,
    damaged_stream,
    join_streams,
    not_codable,
    stream_bounds,
)
from hf_cachegen.config import RANS_STATE_WORDS
from hf_cachegen.triton_kernels import rans as kernels
from hf_cachegen.triton_kernels.streams import (
    CodedPlanes,
    EntryTables,
    PlaneShape,
    PlaneShapes,
    before,
    counted,
)


def encode_plane(
    symbols: NDArray[np.uint8],
    table_ids: ArrayLike,
    bank: TableBank,
    rows_per_stream: int,
    threads: int = 1,
    device: str = "cuda",
) -> bytes:
    """As :func:`hf_cachegen.codec.rans.encode_plane`, all streams at once."""
    check_plane(symbols.shape, rows_per_stream)
    where = torch.device(device)
    tables = _symbol_tables(bank, table_ids, len(symbols)).to(where)
    n_rows, n_tokens = symbols.shape
    shape = PlaneShape(n_rows, n_tokens, rows_per_stream)
    coded = kernels.encode_plane(torch.tensor(symbols.ravel()).to(where), shape, tables)
    if coded.flags.any():
        raise not_codable()
    begins = coded.begins.tolist()
    states = coded.states.cpu().numpy().astype("<u4").view("<u2")
    words = [coded.words[s, begin:].cpu().numpy() for s, begin in enumerate(begins)]
    return join_streams([np.concatenate(parts) for parts in zip(states, words, strict=True)])


def decode_plane(
    data: bytes,
    shape: tuple[int, int],
    table_ids: ArrayLike,
    bank: TableBank,
    rows_per_stream: int,
    threads: int = 1,
    device: str = "cuda",
) -> NDArray[np.uint8]:
    """As :func:`hf_cachegen.codec.rans.decode_plane`, all streams at once."""
    check_plane(shape, rows_per_stream)
    where = torch.device(device)
    tables = _symbol_tables(bank, table_ids, shape[0]).to(where)
    planes = coded_planes([PlaneBytes(data, PlaneShape(*shape, rows_per_stream), False)])
    out = torch.empty(planes.shapes.size, dtype=torch.uint8, device=where)
    DecodeCheck(kernels.decode_planes(planes, tables, out), planes)()
    return out.cpu().numpy().reshape(shape)


def entry_tables(parts: Sequence[tuple[TableBank, ArrayLike, int]]) -> EntryTables:
    """Tables for the kernels, on the CPU: of (bank, table ids, rows) one after another.

    Raises
    ------
    ValueError, FormatError
        As :meth:`~hf_cachegen.codec.bank.TableBank.rows`; also, a table that is used does not sum
        to 1.
    """
    freqs, columns, rows = [], [], []
    n_freqs = n_tables = 0
    for bank, table_ids, n_rows in parts:
        used, table_of = np.unique(bank.rows(table_ids, n_rows).ids, return_inverse=True)
        codes_integers = isinstance(bank, IntegerBank)
        lo = bank.lo[used] if isinstance(bank, IntegerBank) else np.zeros_like(used)
        first = bank.starts[used].astype(np.int64) + n_freqs
        columns.append(np.stack([first, bank.sizes[used], lo, np.full_like(used, codes_integers)]))
        rows.append(table_of + n_tables)
        freqs.append(bank.freqs.astype(np.int64))
        n_freqs += len(bank.freqs)
        n_tables += len(used)
    first, size, lo, escapes = torch.tensor(np.concatenate(columns, axis=1))
    return EntryTables.build(
        torch.tensor(np.concatenate(freqs)),
        first,
        size,
        lo,
        escapes.bool(),
        torch.tensor(np.concatenate(rows)),
    )


def _symbol_tables(bank: TableBank, table_ids: ArrayLike, n_rows: int) -> EntryTables:
    """Tables of a plane of symbols, whatever they stand for."""
    return entry_tables([(TableBank(bank.freqs, bank.starts), table_ids, n_rows)])


class PlaneBytes(NamedTuple):
    """A coded plane.

    Attributes
    ----------
    data
        What :func:`~hf_cachegen.codec.entropy.encode_integers` or
        :func:`~hf_cachegen.codec.entropy.encode_symbols` returned.
    shape
        Of the plane.
    holds_integers
        Which of the two it was.
    """

    data: bytes
    shape: PlaneShape
    holds_integers: bool


def coded_planes(parts: Sequence[PlaneBytes]) -> CodedPlanes:
    """What the kernels read of coded planes.

    Raises
    ------
    FormatError
        The bytes are not planes of these shapes.
    """
    shapes = PlaneShapes.of([part.shape for part in parts])
    # All planes at once: a chunk has dozens, and each would cost as much as all of them.
    n_bytes = torch.tensor([len(part.data) for part in parts], dtype=torch.int64)
    _check_planes(parts, n_bytes % 2 == 0)
    joined = np.frombuffer(bytearray().join(part.data for part in parts), "<u2")
    words = torch.from_numpy(joined)  # of bytes that may be written: no copy, no warning
    sizes = n_bytes // 2
    at = before(sizes)
    holds_integers = torch.tensor([part.holds_integers for part in parts], dtype=torch.bool)
    n_escapes = torch.zeros_like(sizes)
    _check_planes(parts, ~holds_integers | (sizes >= 2))
    n_escapes[holds_integers] = _read_uint32(words, at[holds_integers])
    head = torch.where(holds_integers, 2 + 2 * n_escapes, 0)
    n_streams = shapes.n_streams
    _check_planes(parts, head + 2 * n_streams <= sizes)
    escapes_at = (at + 2).repeat_interleave(n_escapes) + 2 * counted(n_escapes)
    first = at + head
    counts = _read_uint32(words, first.repeat_interleave(n_streams) + 2 * counted(n_streams))
    n_words = counts + RANS_STATE_WORDS
    plane = torch.arange(len(parts)).repeat_interleave(n_streams)
    total = torch.zeros_like(sizes).index_add_(0, plane, n_words)
    _check_planes(parts, head + 2 * n_streams + total == sizes)
    # Streams of a plane follow one another, behind its head and its counts.
    gaps = (head + 2 * n_streams).cumsum(0)
    end = n_words.cumsum(0) + gaps[plane]
    return CodedPlanes(
        shapes,
        words,
        torch.stack((end - n_words, end), dim=1),
        _read_uint32(words, escapes_at).to(torch.int32),
        n_escapes,
    )


def launch_planes(planes: CodedPlanes, tables: EntryTables) -> tuple[Tensor, DecodeCheck]:
    """Launch the decoding of planes: of many chunks at once, if they are here.

    Parameters
    ----------
    planes
        From :func:`coded_planes`.
    tables
        On the device that decodes, from :func:`entry_tables`.

    Returns
    -------
    integers
        int16 or int32 [symbols] on that device: the planes one after another.
    check
        Raises FormatError if they turned out to be damaged.

    Raises
    ------
    FormatError
        A stream begins with a state that there is not.
    """
    dtype = kernels.integer_dtype(planes, tables)
    out = torch.empty(planes.shapes.size, dtype=dtype, device=tables.rows.device)
    return out, DecodeCheck(kernels.decode_planes(planes, tables, out), planes)


class DecodeCheck:
    """What is left to check once the planes are decoded. Waits for them when called."""

    def __init__(self, flags: kernels.DecodeFlags, planes: CodedPlanes) -> None:
        self._flags = flags
        self._n_escapes = planes.n_escapes

    def __call__(self) -> None:
        n_streams = len(self._flags.streams)
        found = torch.cat([self._flags.streams, self._flags.escapes]).cpu()
        streams, surplus = found[:n_streams], found[n_streams:]
        if streams.any():
            raise damaged_stream(int(streams.ne(0).to(torch.uint8).argmax()))
        if surplus.any():
            given = self._n_escapes.cumsum(0)
            plane = int(surplus.ne(0).to(torch.uint8).argmax())
            check_escapes(int(given[plane] + surplus[plane]), int(given[plane]))


def _read_uint32(words: Tensor, at: Tensor) -> Tensor:
    """Numbers of two words each, int64."""
    low, high = (words.view(torch.int16)[at + i].to(torch.int64) & 0xFFFF for i in range(2))
    return low | high << 16


def _check_planes(parts: Sequence[PlaneBytes], fit: Tensor) -> None:
    """Raise FormatError, with what is wrong with the first plane that does not ``fit``."""
    if fit.all():
        return
    data, shape, holds_integers = parts[int((~fit).to(torch.uint8).argmax())]
    plane = split_escapes(data)[1] if holds_integers else data
    stream_bounds(plane, (shape.n_rows, shape.tokens), shape.rows_per_stream)
    raise AssertionError("expected a plane that does not fit to be refused")
