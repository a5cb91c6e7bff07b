"""Codecs that give back every bit: ``raw`` and ``lossless``.

Segment of ``raw``: each tensor's values, ``[H, T, D]`` row-major, little-endian.

Segment of ``lossless``, per tensor. A value's bits are rotated left by one, which puts the exponent
(of bfloat16 and float32; exponent and three mantissa bits of float16) into the top byte and the
sign last. Top bytes are entropy-coded, channel by channel, and the others are stored as they are::

    u8 n_tables | per table: u8 first symbol, u8 number of symbols - 1, u16 frequencies[...]
    u8 table of each channel [C]
    u32 n | entropy-coded top bytes, n bytes, plane [C, T]
    remaining bytes of each value [C, T, itemsize - 1]

The tables are those of this segment, so a model needs no profile for it. Entropy-coding the
exponent alone is the approach of DFloat11 (Zhang et al. 2025) and ZipNN (Hershcovitch et al. 2024).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_cachegen.codec.bank import TableBank, normalise_counts
from hf_cachegen.codec.base import SegmentCodec
from hf_cachegen.codec.entropy import decode_symbols, encode_symbols
from hf_cachegen.codec.planes import ByteReader, rows_per_stream, sized
from hf_cachegen.errors import FormatError

MAX_TABLES = 8
"""Channels share this many tables, by the size of their values."""

_BITS = {2: torch.int16, 4: torch.int32}


class RawCodec(SegmentCodec):
    """The values as they are."""

    name = "raw"

    def encode(self, layer: int, tensors: Sequence[Tensor], start: int) -> bytes:
        self.check_tensors(layer, tensors)
        return b"".join(tensor_bytes(tensor) for tensor in tensors)

    def decode_into(self, layer: int, data: bytes, out: Sequence[Tensor], start: int) -> None:
        self.check_tensors(layer, out)
        reader = ByteReader(data, f"raw segment of layer {layer}")
        read_tensors(reader, out)
        reader.finish()


class LosslessCodec(SegmentCodec):
    """Exponents entropy-coded, sign and mantissa stored."""

    name = "lossless"

    def encode(self, layer: int, tensors: Sequence[Tensor], start: int) -> bytes:
        self.check_tensors(layer, tensors)
        return b"".join(_encode_tensor(tensor) for tensor in tensors)

    def decode_into(self, layer: int, data: bytes, out: Sequence[Tensor], start: int) -> None:
        self.check_tensors(layer, out)
        reader = ByteReader(data, f"lossless segment of layer {layer}")
        for tensor in out:
            tensor.copy_(_decode_tensor(reader, tuple(tensor.shape), tensor.dtype))
        reader.finish()


def tensor_bytes(tensor: Tensor) -> bytes:
    """Values of a tensor, row-major, little-endian."""
    return _bits(tensor).tobytes()


def read_tensors(reader: ByteReader, out: Sequence[Tensor]) -> None:
    """Fill tensors or views with what :func:`tensor_bytes` made of theirs, one after another."""
    for tensor in out:
        data = reader.take(tensor.numel() * tensor.element_size())
        tensor.copy_(tensor_from_bytes(data, tuple(tensor.shape), tensor.dtype))


def tensor_from_bytes(data: bytes, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Inverse of :func:`tensor_bytes`, on the CPU."""
    bits = np.frombuffer(data, dtype=f"<i{dtype.itemsize}").reshape(shape).copy()
    return torch.from_numpy(bits).view(dtype)


def _bits(tensor: Tensor) -> NDArray[Any]:
    as_integers = tensor.detach().cpu().contiguous().view(_BITS[tensor.element_size()])
    return as_integers.numpy().astype(f"<i{tensor.element_size()}", copy=False)


def _encode_tensor(tensor: Tensor) -> bytes:
    itemsize = tensor.element_size()
    bits = _bits(tensor.transpose(1, 2).flatten(0, 1)).view(f"<u{itemsize}")  # [C, T]
    rotated = (bits << 1) | (bits >> (8 * itemsize - 1))
    planes = rotated[..., None].view(np.uint8)  # [C, T, itemsize], top byte last
    top = np.ascontiguousarray(planes[..., -1])
    table_ids, counts = _classify(top)
    bank, header = _build_tables(counts)
    coded = encode_symbols(top, table_ids, bank, rows_per_stream(top.shape[1]))
    return b"".join(
        (
            header,
            table_ids.astype(np.uint8).tobytes(),
            sized(coded),
            np.ascontiguousarray(planes[..., :-1]).tobytes(),
        )
    )


def _classify(top: NDArray[np.uint8]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Group channels of similar magnitude; returns a table id per row and counts per table."""
    n_tables = min(MAX_TABLES, len(top))
    order = np.argsort(top.sum(axis=1, dtype=np.int64), kind="stable")
    table_ids = np.empty(len(top), np.int32)
    table_ids[order] = np.arange(len(top)) * n_tables // len(top)
    counts = np.stack(
        [np.bincount(top[table_ids == k].ravel(), minlength=256) for k in range(n_tables)]
    )
    return table_ids, counts


def _build_tables(counts: NDArray[np.int64]) -> tuple[TableBank, bytes]:
    """A table for each row of counts, and all of them as a segment has them.

    A table covers the range of bytes that occur; those inside it that do not have frequency 0.
    """
    parts, freqs, lows = [struct.pack("<B", len(counts))], [], []
    for row in counts:
        used = np.flatnonzero(row)
        low, high = (int(used[0]), int(used[-1])) if len(used) else (0, 0)
        keep = row[low : high + 1] > 0
        table = normalise_counts(row[low : high + 1], keep=np.flatnonzero(keep))
        parts.append(struct.pack("<BB", low, high - low) + table.astype("<u2").tobytes())
        freqs.append(table)
        lows.append(low)
    return _bank(freqs, lows), b"".join(parts)


def _bank(freqs: list[NDArray[np.uint16]], lows: list[int]) -> TableBank:
    """Tables over whole bytes: a symbol is the byte itself."""
    full = np.zeros((len(freqs), 256), np.uint16)
    for row, table, low in zip(full, freqs, lows, strict=True):
        row[low : low + len(table)] = table
    starts = np.arange(len(freqs) + 1, dtype=np.int32) * 256
    return TableBank(full.ravel(), starts)


def _read_tables(reader: ByteReader) -> TableBank:
    freqs, lows = [], []
    for _ in range(reader.unpack("<B")[0]):
        low, extent = reader.unpack("<BB")
        if low + extent > 255:
            raise FormatError(f"{reader.what}: a table reaches symbol {low + extent}, 255 is last")
        freqs.append(np.frombuffer(reader.take(2 * (extent + 1)), "<u2"))
        lows.append(low)
    bank = _bank(freqs, lows)
    bank.validate()
    return bank


def _decode_tensor(reader: ByteReader, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    heads, tokens, dim = shape
    channels, itemsize = heads * dim, dtype.itemsize
    bank = _read_tables(reader)
    table_ids = np.frombuffer(reader.take(channels), np.uint8).astype(np.int32)
    if table_ids.size and table_ids.max() >= len(bank.starts) - 1:
        raise FormatError(f"{reader.what}: a channel names a table that is not there")
    coded = reader.take_sized()
    planes = np.empty((channels, tokens, itemsize), np.uint8)
    planes[..., -1] = decode_symbols(
        coded, (channels, tokens), table_ids, bank, rows_per_stream(tokens)
    )
    rest = reader.take(channels * tokens * (itemsize - 1))
    planes[..., :-1] = np.frombuffer(rest, np.uint8).reshape(channels, tokens, itemsize - 1)
    rotated = planes.view(f"<u{itemsize}")[..., 0]
    bits = (rotated >> 1) | (rotated << (8 * itemsize - 1))
    values = torch.from_numpy(bits.view(f"<i{itemsize}")).view(dtype)
    return values.view(heads, dim, tokens).transpose(1, 2)
