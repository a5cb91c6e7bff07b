"""The entropy coder for GPUs: :mod:`hf_cachegen.codec.rans` on Triton kernels.

The functions of :mod:`hf_cachegen.codec.rans` take and return arrays of the host, and so wait for
the GPU. :func:`launch_integers` leaves the integers there and does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from hf_cachegen.triton_kernels import rans as kernels
from hf_cachegen.triton_kernels.streams import CodedPlane, EntryTables, PlaneShape


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
    tables = entry_tables([(bank, table_ids, len(symbols))]).to(where)
    shape = PlaneShape(*symbols.shape, rows_per_stream)
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
    tables = entry_tables([(bank, table_ids, shape[0])]).to(where)
    plane = _coded_plane(data, PlaneShape(*shape, rows_per_stream))
    out = torch.empty(plane.shape.size, dtype=torch.uint8, device=where)
    _raise_damage(kernels.decode_planes([plane], tables, out), [plane])
    return out.cpu().numpy().reshape(shape)


def entry_tables(parts: Sequence[tuple[TableBank, ArrayLike, int]]) -> EntryTables:
    """Tables for the kernels, on the CPU: of (bank, table ids, rows) one after another.

    Raises
    ------
    ValueError, FormatError
        As :meth:`~hf_cachegen.codec.bank.TableBank.rows`; also, a table that is used does not sum
        to 1.
    """
    freqs, columns, begin = [], [], 0
    for bank, table_ids, n_rows in parts:
        rows = bank.rows(table_ids, n_rows)
        lo = bank.lo[rows.ids] if isinstance(bank, IntegerBank) else np.zeros(n_rows, np.int32)
        freqs.append(bank.freqs.astype(np.int64))
        columns.append(np.stack([rows.first + begin, rows.size, lo.astype(np.int64)]))
        begin += len(bank.freqs)
    first, size, lo = torch.tensor(np.concatenate(columns, axis=1))
    return EntryTables.build(torch.tensor(np.concatenate(freqs)), first, size, lo)


def launch_integers(
    data: Sequence[bytes], shapes: Sequence[PlaneShape], tables: EntryTables
) -> tuple[Tensor, DecodeCheck]:
    """Launch the decoding of planes of integers: of many chunks at once, if they are here.

    Parameters
    ----------
    data
        What :func:`hf_cachegen.codec.entropy.encode_integers` returned for each plane.
    shapes
        Of each.
    tables
        On the device that decodes, from :func:`entry_tables` of :class:`IntegerBank` parts.

    Returns
    -------
    integers
        int16 or int32 [symbols] on that device: the planes one after another.
    check
        Raises FormatError if they turned out to be damaged.

    Raises
    ------
    FormatError
        The bytes are not planes of these shapes.
    """
    planes = []
    for coded, shape in zip(data, shapes, strict=True):
        escapes, plane = split_escapes(coded)
        planes.append(_coded_plane(plane, shape, escapes))
    size = sum(plane.shape.size for plane in planes)
    dtype = kernels.integer_dtype(planes, tables)
    out = torch.empty(size, dtype=dtype, device=tables.rows.device)
    return out, DecodeCheck(kernels.decode_planes(planes, tables, out), planes)


class DecodeCheck:
    """What is left to check once the planes are decoded. Waits for them when called."""

    def __init__(self, flags: kernels.DecodeFlags, planes: Sequence[CodedPlane]) -> None:
        self._flags = flags
        self._planes = planes

    def __call__(self) -> None:
        _raise_damage(self._flags, self._planes)


def _raise_damage(flags: kernels.DecodeFlags, planes: Sequence[CodedPlane]) -> None:
    n_streams = len(flags.streams)
    found = torch.cat([flags.streams, flags.escapes]).cpu()
    streams, escapes = found[:n_streams], found[n_streams:]
    if streams.any():
        raise damaged_stream(int(streams.ne(0).to(torch.uint8).argmax()))
    given = torch.tensor([len(plane.escapes) for plane in planes]).cumsum(0)
    for n_symbols, n_escapes in zip((given + escapes).tolist(), given.tolist(), strict=True):
        check_escapes(n_symbols, n_escapes)


def _coded_plane(
    data: bytes, shape: PlaneShape, escapes: NDArray[np.int32] | None = None
) -> CodedPlane:
    bounds = stream_bounds(data, (shape.n_rows, shape.tokens), shape.rows_per_stream)
    words = torch.tensor(np.frombuffer(data, "<u2"))
    integers = np.empty(0, np.int32) if escapes is None else escapes
    return CodedPlane(shape, words, torch.tensor(bounds), torch.tensor(integers))
