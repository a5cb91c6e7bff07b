from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_cachegen.codec.planes import SYMBOLS_PER_STREAM, ByteReader, rows_per_stream, sized
from hf_cachegen.errors import FormatError


@given(st.lists(st.binary(max_size=20)))
def test_pieces_come_back_in_order_and_nothing_is_left(pieces):
    reader = ByteReader(b"".join(pieces), "test")
    assert [reader.take(len(piece)) for piece in pieces] == pieces
    reader.finish()


@given(st.binary(max_size=20), st.integers(0, 20), st.integers(1, 2**64))
def test_nothing_is_read_past_the_end(data, first, excess):
    reader = ByteReader(data, "the segment")
    first = min(first, len(data))
    reader.take(first)
    with pytest.raises(FormatError, match=f"the segment: expected .* at offset {first}"):
        reader.take(len(data) - first + excess)
    assert reader.rest() == data[first:], "a refused read moves nothing"


def test_fields_and_the_rest():
    reader = ByteReader(b"\x01\x02\x00\x00\x00tail", "test")
    assert reader.unpack("<BI") == (1, 2)
    assert reader.rest() == b"tail"
    assert reader.rest() == b""
    with pytest.raises(FormatError, match="expected 4 bytes"):
        reader.unpack("<I")


@given(st.lists(st.binary(max_size=300)))
def test_sized_fields_come_back_in_order(fields):
    reader = ByteReader(b"".join(map(sized, fields)), "test")
    assert [reader.take_sized() for _ in fields] == fields
    reader.finish()


@pytest.mark.parametrize("size", [3, 5, 2**32 - 1])
def test_a_size_that_promises_too_much_is_refused(size):
    reader = ByteReader(size.to_bytes(4, "little") + b"ab", "test")
    with pytest.raises(FormatError, match=f"expected {size} bytes"):
        reader.take_sized()


def test_bytes_left_over_are_refused():
    reader = ByteReader(b"abc", "the segment")
    reader.take(1)
    with pytest.raises(FormatError, match="the segment: 2 bytes too many"):
        reader.finish()


@given(st.integers(0, 1 << 21))
def test_streams_hold_as_many_whole_rows_as_fit_the_target(tokens):
    rows = rows_per_stream(tokens)
    assert rows == 1 or rows * tokens <= SYMBOLS_PER_STREAM < (rows + 1) * max(tokens, 1)


@pytest.mark.parametrize(
    ("tokens", "rows"), [(0, 32768), (1, 32768), (150, 218), (1350, 24), (1500, 21), (32769, 1)]
)
def test_the_rows_of_a_stream_are_part_of_the_format(tokens, rows):
    assert rows_per_stream(tokens) == rows
