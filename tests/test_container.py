"""The chunk file: layout, checksums, and refusal of everything else."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hf_cachegen.container import (
    MAX_CHUNK_TOKENS,
    MAX_LAYERS,
    MAX_LEVELS,
    ChunkIndex,
    build_chunk,
    index_size_bytes,
)
from hf_cachegen.errors import FormatError

GOLDEN = Path(__file__).parent / "golden" / "container_v1"
CHUNKS = sorted(GOLDEN.glob("*.kv"))

SEGMENTS = st.integers(1, 4).flatmap(
    lambda layers: st.lists(
        st.lists(st.binary(max_size=40), min_size=layers, max_size=layers), min_size=1, max_size=4
    )
)


def parse(data: bytes, segments: list[list[bytes]], n_tokens: int) -> ChunkIndex:
    n_levels, n_layers = len(segments), len(segments[0])
    return ChunkIndex.parse(
        data[: index_size_bytes(n_levels, n_layers)],
        n_levels=n_levels,
        n_layers=n_layers,
        n_tokens=n_tokens,
    )


def check_file(data: bytes, segments: list[list[bytes]], n_tokens: int) -> ChunkIndex:
    """Do what a reader of a whole file does: index, length, and each segment."""
    index = parse(data, segments, n_tokens)
    if len(data) != index.total_bytes:
        raise FormatError(f"expected {index.total_bytes} bytes, found {len(data)}")
    for level in range(index.n_levels):
        for layer in range(index.n_layers):
            offset, size = index.segment(level, layer)
            index.check(level, layer, data[offset : offset + size])
    return index


@given(SEGMENTS, st.integers(1, MAX_CHUNK_TOKENS))
def test_round_trip(segments: list[list[bytes]], n_tokens: int) -> None:
    data = build_chunk(segments, n_tokens)
    index = check_file(data, segments, n_tokens)
    found = [
        [data[offset : offset + size] for offset, size in map(index.segment, [level] * n, range(n))]
        for level, n in enumerate(map(len, segments))
    ]
    assert found == segments
    assert index.level_bytes == tuple(sum(map(len, layers)) for layers in segments)


@given(SEGMENTS, st.data())
def test_span_is_the_segments_of_neighbouring_layers(
    segments: list[list[bytes]], data: st.DataObject
) -> None:
    file = build_chunk(segments, 7)
    index = parse(file, segments, 7)
    level = data.draw(st.integers(0, len(segments) - 1))
    first = data.draw(st.integers(0, len(segments[0]) - 1))
    last = data.draw(st.integers(first, len(segments[0]) - 1))
    offset, size = index.span(level, first, last)
    assert file[offset : offset + size] == b"".join(segments[level][first : last + 1])


@given(SEGMENTS, st.data())
def test_any_changed_byte_is_noticed(segments: list[list[bytes]], data: st.DataObject) -> None:
    file = bytearray(build_chunk(segments, 7))
    file[data.draw(st.integers(0, len(file) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FormatError):
        check_file(bytes(file), segments, 7)


@given(SEGMENTS, st.data())
def test_truncation_and_extension_are_noticed(
    segments: list[list[bytes]], data: st.DataObject
) -> None:
    file = build_chunk(segments, 7)
    cut = data.draw(st.integers(0, len(file) - 1))
    tail = data.draw(st.binary(min_size=1, max_size=20))
    for damaged in (file[:cut], file + tail):
        with pytest.raises(FormatError):
            check_file(damaged, segments, 7)


def test_segment_is_valid_at_its_own_place_only() -> None:
    same = [[b"same bytes"] * 2] * 2
    index = parse(build_chunk(same, 7), same, 7)
    assert len(set(index.checksums)) == 4
    other = build_chunk([[b"first", b"other"]], 7)
    with pytest.raises(FormatError, match=r"level 0, layer 1\): checksum"):
        parse(other, [[b"", b""]], 7).check(0, 1, b"first")
    with pytest.raises(FormatError, match=r"level 0, layer 1\): expected 5 bytes, found 4"):
        parse(other, [[b"", b""]], 7).check(0, 1, b"four")


@given(st.binary(max_size=120))
def test_arbitrary_bytes_raise_format_error(data: bytes) -> None:
    with pytest.raises(FormatError):
        ChunkIndex.parse(data, n_levels=2, n_layers=2, n_tokens=7)


@given(st.sampled_from(CHUNKS), st.data())
def test_mutated_goldens_raise_format_error(path: Path, data: st.DataObject) -> None:
    description = json.loads(path.with_suffix(".json").read_text())
    segments = [[bytes.fromhex(text) for text in layers] for layers in description["segments"]]
    file = bytearray(path.read_bytes())
    start = data.draw(st.integers(0, len(file)))
    stop = data.draw(st.integers(start, len(file)))
    file[start:stop] = data.draw(st.binary(max_size=32))
    assume(bytes(file) != path.read_bytes())
    with pytest.raises(FormatError):
        check_file(bytes(file), segments, description["n_tokens"])


@pytest.mark.parametrize("path", CHUNKS, ids=lambda path: path.stem)
def test_golden(path: Path) -> None:
    description = json.loads(path.with_suffix(".json").read_text())
    segments = [[bytes.fromhex(text) for text in layers] for layers in description["segments"]]
    assert build_chunk(segments, description["n_tokens"]) == path.read_bytes()
    index = check_file(path.read_bytes(), segments, description["n_tokens"])
    assert index.digest == description["index_digest"]


def test_layout_is_the_documented_one() -> None:
    segments = [[b"a", b"bc"], [b"", b"def"]]
    body = struct.pack("<8sHHIII", b"\x89HFKV\r\n\x1a", 1, 2, 2, 1500, 0)
    for level, layers in enumerate(segments):
        for layer, data in enumerate(layers):
            salt = level.to_bytes(8, "little") + layer.to_bytes(8, "little")
            checksum = hashlib.blake2b(data, digest_size=8, person=b"hfkv segment", salt=salt)
            body += struct.pack("<I", len(data)) + checksum.digest()
    body += hashlib.blake2b(body, digest_size=8, person=b"hfkv index").digest()
    assert len(body) == index_size_bytes(2, 2)
    assert build_chunk(segments, 1500) == body + b"abcdef"


def test_other_counts_than_promised_are_named() -> None:
    data = build_chunk([[b"a", b"b"]], 7)
    with pytest.raises(FormatError, match=r"1 levels, 3 layers, 7 tokens; found .* 2 layers"):
        ChunkIndex.parse(data, n_levels=1, n_layers=3, n_tokens=7)
    with pytest.raises(FormatError, match=r"8 tokens; found .* 7 tokens"):
        ChunkIndex.parse(data, n_levels=1, n_layers=2, n_tokens=8)


def test_newer_version_says_upgrade() -> None:
    data = bytearray(build_chunk([[b"a"]], 7))
    data[8:10] = (2).to_bytes(2, "little")
    with pytest.raises(FormatError, match=r"version 2 is unknown.*upgrade"):
        parse(bytes(data), [[b""]], 7)


@pytest.mark.parametrize(
    ("segments", "n_tokens"),
    [
        ([], 7),
        ([[]], 7),
        ([[b"a"], [b"b", b"c"]], 7),
        ([[b"a"]], 0),
        ([[b"a"]], MAX_CHUNK_TOKENS + 1),
        ([[b"a"]] * (MAX_LEVELS + 1), 7),
        ([[b""] * (MAX_LAYERS + 1)], 7),
    ],
)
def test_build_refuses_shapes_outside_the_format(
    segments: list[list[bytes]], n_tokens: int
) -> None:
    with pytest.raises(ValueError, match="expected"):
        build_chunk(segments, n_tokens)


@pytest.mark.parametrize(("level", "layer"), [(1, 0), (0, 2), (-1, 0), (0, -1)])
def test_positions_outside_the_chunk_are_the_callers_mistake(level: int, layer: int) -> None:
    index = parse(build_chunk([[b"a", b"b"]], 7), [[b"", b""]], 7)
    with pytest.raises(ValueError, match="below"):
        index.segment(level, layer)
    with pytest.raises(ValueError, match="first_layer <= last_layer"):
        index.span(0, 1, 0)
