"""Helpers that the codecs' segments share: bounded reading, and the size of entropy streams."""

from __future__ import annotations

import struct
from typing import Any

from hf_cachegen.errors import FormatError

SYMBOLS_PER_STREAM = 32_768
"""Target of :func:`rows_per_stream`. A stream costs 4 bytes and its 32 lanes 2 bytes each that
carry no information: under 1% at 2 bits a symbol, with still a GPU's worth of streams a chunk."""


def rows_per_stream(tokens: int) -> int:
    """Rows (channels) of a plane ``[C, T]`` that share one entropy stream. Part of the format."""
    return max(1, SYMBOLS_PER_STREAM // max(tokens, 1))


def sized(data: bytes) -> bytes:
    """A field that is not the last of its segment: its size as ``u32``, then its bytes."""
    return struct.pack("<I", len(data)) + data


class ByteReader:
    """Cursor over a segment's bytes that never reads past its end.

    Parameters
    ----------
    data
        The segment.
    what
        Its name in messages.
    """

    def __init__(self, data: bytes, what: str) -> None:
        self.what = what
        self._data = memoryview(data)
        self._offset = 0

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes."""
        end = self._offset + size
        if end > len(self._data):
            raise FormatError(
                f"{self.what}: expected {size} bytes at offset {self._offset}, "
                f"found {len(self._data) - self._offset}; the segment is damaged, fetch it again"
            )
        piece = bytes(self._data[self._offset : end])
        self._offset = end
        return piece

    def take_sized(self) -> bytes:
        """What :func:`sized` was given."""
        return self.take(self.unpack("<I")[0])

    def unpack(self, layout: str) -> tuple[Any, ...]:
        """The next fields of a ``struct`` layout."""
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(len(self._data) - self._offset)

    def finish(self) -> None:
        """Raise FormatError if bytes are left over."""
        left = len(self._data) - self._offset
        if left:
            raise FormatError(f"{self.what}: {left} bytes too many; the segment is damaged")
