"""The chunk file: every level and layer of one chunk of tokens, as opaque checked segments.

Little-endian, an index and then the segments back to back, coarsest level first and layers in
order inside a level::

    magic 8s | version u16 | n_levels u16 | n_layers u32 | n_tokens u32 | reserved u32 = 0
    n_levels * n_layers records of  size u32 | checksum 8s
    checksum 8s of all bytes above
    segments

Offsets are not stored: they are the running sum of the sizes, so segments can neither overlap nor
leave holes. A segment's checksum is salted with its level and layer, so that it is valid at its
own place only.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from hf_cachegen.config import CHECKSUM_BYTES, FORMAT_VERSION
from hf_cachegen.errors import FormatError

MAGIC = b"\x89HFKV\r\n\x1a"
"""A high byte and both line ends, as PNG has, so that a text-mode transfer is noticed."""

MAX_LEVELS = 64
MAX_LAYERS = 4096
MAX_CHUNK_TOKENS = 1 << 20
MAX_SEGMENT_BYTES = (1 << 32) - 1

_HEADER = struct.Struct("<8sHHIII")
_RECORD = struct.Struct(f"<I{CHECKSUM_BYTES}s")
_SALT = struct.Struct("<QQ")


class Span(NamedTuple):
    """A byte range of a file."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class ChunkIndex:
    """The index of a chunk file: where each segment is and what it must hash to.

    Attributes
    ----------
    n_levels, n_layers, n_tokens
        Shape of the chunk.
    checksums
        One per segment, level by level.
    offsets
        First byte of each segment in the file, level by level, then the length of the file.
    digest
        BLAKE2b of the index bytes, 32 hex digits. It stands in ``cache.json``.
    """

    n_levels: int
    n_layers: int
    n_tokens: int
    checksums: tuple[bytes, ...]
    offsets: tuple[int, ...]
    digest: str

    @classmethod
    def parse(cls, data: bytes, *, n_levels: int, n_layers: int, n_tokens: int) -> ChunkIndex:
        """Read the first :func:`index_size_bytes` bytes of a chunk file.

        The counts are what the artefact's manifest promises; the file must agree.

        Raises
        ------
        ValueError
            The expected counts are outside the format's bounds.
        FormatError
            The bytes are not an index with these counts.
        """
        expected = _check_counts(n_levels, n_layers, n_tokens)
        _check_header(data, expected)
        size = index_size_bytes(n_levels, n_layers)
        if len(data) != size:
            raise FormatError(f"chunk index: expected {size} bytes, found {len(data)}")
        body = data[:-CHECKSUM_BYTES]
        if _index_checksum(body) != data[-CHECKSUM_BYTES:]:
            raise FormatError("chunk index: checksum mismatch, the file is damaged; fetch it again")
        records = list(_RECORD.iter_unpack(body[_HEADER.size :]))
        return cls(
            *expected,
            checksums=tuple(checksum for _, checksum in records),
            offsets=tuple(accumulate((length for length, _ in records), initial=size)),
            digest=hashlib.blake2b(data, digest_size=16).hexdigest(),
        )

    @property
    def total_bytes(self) -> int:
        """Length of the whole file."""
        return self.offsets[-1]

    @property
    def level_bytes(self) -> tuple[int, ...]:
        """Bytes of each level's segments, coarsest first."""
        bounds = self.offsets[:: self.n_layers]
        return tuple(stop - start for start, stop in pairwise(bounds))

    def segment(self, level: int, layer: int) -> Span:
        """Where one segment is in the file."""
        return self.span(level, layer, layer)

    def span(self, level: int, first_layer: int, last_layer: int) -> Span:
        """Where the segments of ``first_layer`` to ``last_layer`` (included) are, as one range."""
        first, last = self._position(level, first_layer), self._position(level, last_layer)
        if last < first:
            raise ValueError(f"expected first_layer <= last_layer, got {first_layer}, {last_layer}")
        return Span(self.offsets[first], self.offsets[last + 1] - self.offsets[first])

    def check(self, level: int, layer: int, data: bytes) -> None:
        """Raise FormatError unless ``data`` is the segment of this level and layer."""
        position = self._position(level, layer)
        size = self.offsets[position + 1] - self.offsets[position]
        if len(data) != size:
            raise FormatError(
                f"segment (level {level}, layer {layer}): expected {size} bytes, found {len(data)}"
            )
        if _segment_checksum(level, layer, data) != self.checksums[position]:
            raise FormatError(
                f"segment (level {level}, layer {layer}): checksum mismatch, the {size} bytes are "
                "damaged; fetch them again"
            )

    def _position(self, level: int, layer: int) -> int:
        if not (0 <= level < self.n_levels and 0 <= layer < self.n_layers):
            raise ValueError(
                f"expected a level below {self.n_levels} and a layer below {self.n_layers}, "
                f"got level {level}, layer {layer}"
            )
        return level * self.n_layers + layer


def index_size_bytes(n_levels: int, n_layers: int) -> int:
    """Length of the index that starts a chunk file."""
    return _HEADER.size + n_levels * n_layers * _RECORD.size + CHECKSUM_BYTES


def build_chunk(segments: Sequence[Sequence[bytes]], n_tokens: int) -> bytes:
    """Lay out a chunk file.

    Parameters
    ----------
    segments
        Encoded bytes by level (coarsest first) and layer. A segment may be empty.
    n_tokens
        Tokens the chunk covers.

    Raises
    ------
    ValueError
        The levels have different numbers of layers, or a count or size is outside the format's
        bounds.
    """
    n_layers = {len(level) for level in segments}
    if len(n_layers) != 1:
        raise ValueError(f"expected as many layers in every level, got {sorted(n_layers)}")
    counts = _check_counts(len(segments), n_layers.pop(), n_tokens)
    body = bytearray(_HEADER.pack(MAGIC, FORMAT_VERSION, *counts, 0))
    for level, layers in enumerate(segments):
        for layer, data in enumerate(layers):
            if len(data) > MAX_SEGMENT_BYTES:
                raise ValueError(
                    f"segment (level {level}, layer {layer}) has {len(data)} bytes, "
                    f"at most {MAX_SEGMENT_BYTES} fit; use fewer tokens per chunk"
                )
            body += _RECORD.pack(len(data), _segment_checksum(level, layer, data))
    return b"".join(
        [body, _index_checksum(body), *(data for layers in segments for data in layers)]
    )


def _check_header(data: bytes, expected: tuple[int, int, int]) -> None:
    if len(data) < _HEADER.size:
        raise FormatError(
            f"chunk index: expected at least {_HEADER.size} bytes, found {len(data)}; "
            "the file is truncated"
        )
    magic, version, *counts, reserved = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise FormatError(f"chunk index: expected magic {MAGIC!r}, found {magic!r}")
    if version != FORMAT_VERSION:
        raise FormatError(
            f"chunk index: version {version} is unknown, this library reads {FORMAT_VERSION}; "
            "upgrade hf-cachegen"
        )
    if tuple(counts) != expected:
        names = ("levels", "layers", "tokens")
        raise FormatError(
            "chunk index: expected "
            + ", ".join(f"{n} {name}" for n, name in zip(expected, names, strict=True))
            + "; found "
            + ", ".join(f"{n} {name}" for n, name in zip(counts, names, strict=True))
        )
    if reserved != 0:
        raise FormatError(f"chunk index: expected the reserved field to be 0, found {reserved}")


def _check_counts(n_levels: int, n_layers: int, n_tokens: int) -> tuple[int, int, int]:
    counts = (n_levels, n_layers, n_tokens)
    bounds = (MAX_LEVELS, MAX_LAYERS, MAX_CHUNK_TOKENS)
    if not all(1 <= count <= bound for count, bound in zip(counts, bounds, strict=True)):
        raise ValueError(
            f"expected 1 to {MAX_LEVELS} levels, 1 to {MAX_LAYERS} layers and 1 to "
            f"{MAX_CHUNK_TOKENS} tokens, got {n_levels}, {n_layers} and {n_tokens}"
        )
    return counts


def _index_checksum(body: bytes | bytearray) -> bytes:
    return hashlib.blake2b(body, digest_size=CHECKSUM_BYTES, person=b"hfkv index").digest()


def _segment_checksum(level: int, layer: int, data: bytes) -> bytes:
    return hashlib.blake2b(
        data, digest_size=CHECKSUM_BYTES, person=b"hfkv segment", salt=_SALT.pack(level, layer)
    ).digest()
