from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_cachegen.codec import rans, rans_numba
from hf_cachegen.codec.bank import TableBank, normalise_counts
from hf_cachegen.config import RANS_LANES, RANS_STATE_WORDS
from hf_cachegen.errors import FormatError

CODERS = pytest.mark.parametrize("coder", [rans, rans_numba], ids=["numpy", "numba"])


def bank_of(*tables):
    starts = np.cumsum([0, *map(len, tables)]).astype(np.int32)
    return TableBank(np.concatenate(tables).astype(np.uint16), starts)


def draw_symbols(rng, bank, ids, tokens):
    """Symbols of the distribution that their row's table states."""
    rows = [
        rng.choice(stop - start, tokens, p=bank.freqs[start:stop] / 4096)
        for start, stop in zip(bank.starts[ids], bank.starts[1:][ids], strict=True)
    ]
    return np.array(rows, np.uint8).reshape(len(ids), tokens)


@st.composite
def planes(draw):
    """Any shape, with tables of one symbol, of rare symbols and of all 256, on any symbols."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kinds = {
        "certain": lambda: [4096],
        "certain, of many": lambda: np.roll([4096, 0, 0], rng.integers(3)),
        "rare": lambda: [1, 4094, 1],
        "all": lambda: normalise_counts(rng.gamma(0.1, size=256), keep=slice(None)),
        "some": lambda: normalise_counts(rng.gamma(0.3, size=rng.integers(1, 60))),
    }
    names = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=4))
    bank = bank_of(*[kinds[name]() for name in names])
    shape = draw(st.tuples(st.integers(0, 6), st.integers(0, 100)))
    ids = rng.integers(0, len(bank), shape[0])
    symbols = draw_symbols(rng, bank, ids, shape[1])
    if draw(st.booleans()):  # as unlikely as can be, instead of likely
        codable = [np.flatnonzero(bank.freqs[bank.starts[k] : bank.starts[k + 1]]) for k in ids]
        symbols = np.array([rng.choice(row, shape[1]) for row in codable], np.uint8).reshape(shape)
    return symbols, ids, bank, draw(st.integers(1, 8))


@given(planes())
def test_planes_round_trip_with_the_same_bytes_from_every_coder(plane):
    symbols, ids, bank, rows_per_stream = plane
    data = rans.encode_plane(symbols, ids, bank, rows_per_stream)
    assert rans_numba.encode_plane(symbols, ids, bank, rows_per_stream) == data
    assert rans_numba.encode_plane(symbols, ids, bank, rows_per_stream, threads=2) == data
    for decoded in (
        rans.decode_plane(data, symbols.shape, ids, bank, rows_per_stream),
        rans_numba.decode_plane(data, symbols.shape, ids, bank, rows_per_stream),
        rans_numba.decode_plane(data, symbols.shape, ids, bank, rows_per_stream, threads=2),
    ):
        assert decoded.dtype == np.uint8
        assert np.array_equal(decoded, symbols)


@pytest.mark.parametrize("scale", [0.4, 2.0, 12.0])
@pytest.mark.parametrize("tokens", [150, 1500])
def test_size_is_the_entropy_plus_a_fixed_overhead_per_stream(scale, tokens):
    rng = np.random.default_rng(1)
    weights = np.exp(-np.abs(np.arange(61) - 30) / scale)
    bank = bank_of(normalise_counts(weights, keep=slice(None)))
    symbols = draw_symbols(rng, bank, np.zeros(32, int), tokens)
    data = rans_numba.encode_plane(symbols, np.zeros(32, int), bank, 16)
    ideal_bytes = bank.entropy_bits(np.bincount(symbols.ravel(), minlength=61)) / 8
    overhead_bytes = 2 * (rans.COUNT_BYTES + 4 * RANS_LANES)
    assert ideal_bytes - 1 < len(data) <= 1.01 * ideal_bytes + overhead_bytes


@CODERS
def test_a_certain_symbol_costs_nothing(coder):
    bank = bank_of([0, 4096, 0])
    symbols = np.ones((5, 1000), np.uint8)
    data = coder.encode_plane(symbols, [0] * 5, bank, 2)
    assert len(data) == 3 * (rans.COUNT_BYTES + 2 * RANS_STATE_WORDS)
    assert np.array_equal(coder.decode_plane(data, (5, 1000), [0] * 5, bank, 2), symbols)


@CODERS
@pytest.mark.parametrize("shape", [(0, 0), (0, 9), (9, 0)])
def test_a_plane_without_symbols_is_no_bytes(coder, shape):
    bank, ids = bank_of([4096]), [0] * shape[0]
    assert coder.encode_plane(np.empty(shape, np.uint8), ids, bank, 4) == b""
    assert coder.decode_plane(b"", shape, ids, bank, 4).shape == shape
    with pytest.raises(FormatError):
        coder.decode_plane(b"\0\0", shape, ids, bank, 4)


def sample_plane():
    rng = np.random.default_rng(5)
    bank = bank_of(normalise_counts(rng.gamma(0.5, size=40)), [4096], [4095, 1])
    ids = np.array([0, 0, 1, 2, 0, 0, 0])
    symbols = draw_symbols(rng, bank, ids, 70)
    return symbols, ids, bank, rans.encode_plane(symbols, ids, bank, 3)


def decode_or_none(coder, data, shape, ids, bank):
    try:
        decoded = coder.decode_plane(data, shape, ids, bank, 3)
    except FormatError:
        return None
    assert decoded.shape == shape
    sizes = np.diff(bank.starts)[ids]
    assert (decoded < sizes[:, None]).all()
    return decoded


def assert_coders_agree(data, shape, ids, bank):
    plain = decode_or_none(rans, data, shape, ids, bank)
    compiled = decode_or_none(rans_numba, data, shape, ids, bank)
    assert (plain is None) == (compiled is None)
    assert plain is None or np.array_equal(plain, compiled)
    return plain


def test_every_truncation_is_refused():
    symbols, ids, bank, data = sample_plane()
    for size in range(len(data)):
        for coder in (rans, rans_numba):
            assert decode_or_none(coder, data[:size], symbols.shape, ids, bank) is None


def test_every_flipped_bit_is_refused_or_gives_a_plane():
    symbols, ids, bank, data = sample_plane()
    refused = 0
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        decoded = assert_coders_agree(bytes(damaged), symbols.shape, ids, bank)
        assert decoded is None or not np.array_equal(decoded, symbols)
        refused += decoded is None
    assert refused > 0.99 * 8 * len(data)


@given(st.data())
def test_hostile_bytes_are_refused_or_give_a_plane(data):
    symbols, ids, bank, good = sample_plane()
    words = data.draw(st.lists(st.integers(0, 300), min_size=3, max_size=3))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    body = rng.bytes(3 * 2 * RANS_STATE_WORDS + 2 * sum(words))
    assert_coders_agree(np.array(words, "<u4").tobytes() + body, symbols.shape, ids, bank)
    assert_coders_agree(data.draw(st.binary(max_size=600)), symbols.shape, ids, bank)
    cut = data.draw(st.integers(0, len(good)))
    assert_coders_agree(good[:cut] + rng.bytes(len(good) - cut), symbols.shape, ids, bank)


@CODERS
@pytest.mark.parametrize("count", [0, 1, 2**31, 2**32 - 1])
def test_word_counts_must_fit_the_data(coder, count):
    symbols, ids, bank, data = sample_plane()
    damaged = np.array([count], "<u4").tobytes() + data[4:]
    with pytest.raises(FormatError, match="entropy streams"):
        coder.decode_plane(damaged, symbols.shape, ids, bank, 3)


@CODERS
@pytest.mark.parametrize("state", [0, 1, 2**16 - 1])
def test_states_below_the_lower_bound_are_refused(coder, state):
    data = np.array([0, state] + [2**16] * (RANS_LANES - 1), "<u4").tobytes()
    with pytest.raises(FormatError, match="stream 0"):
        coder.decode_plane(data, (1, 4), [0], bank_of([4096]), 1)


@CODERS
def test_words_left_over_are_refused(coder):
    data = np.array([1] + [2**16] * RANS_LANES, "<u4").tobytes() + b"\0\0"
    with pytest.raises(FormatError, match="stream 0"):
        coder.decode_plane(data, (1, 4), [0], bank_of([4096]), 1)


@CODERS
def test_the_damaged_stream_is_named(coder):
    symbols, ids, bank, data = sample_plane()
    damaged = data[:-2] + bytes(255 - byte for byte in data[-2:])
    with pytest.raises(FormatError, match="stream 2"):
        coder.decode_plane(damaged, symbols.shape, ids, bank, 3)


@CODERS
@pytest.mark.parametrize("table", [[4095], [4097], [65535, 65535], [4096, 1], [0]])
def test_tables_that_do_not_sum_to_one_are_refused(coder, table):
    bank = bank_of(table)
    with pytest.raises(FormatError, match="sum to 4096"):
        coder.encode_plane(np.zeros((1, 40), np.uint8), [0], bank, 1)
    data = np.array([0] + [2**16] * RANS_LANES, "<u4").tobytes()
    with pytest.raises(FormatError, match="sum to 4096"):
        coder.decode_plane(data, (1, 40), [0], bank, 1)


@CODERS
@pytest.mark.parametrize("symbol", [1, 3, 255])
def test_symbols_that_cannot_be_coded_are_the_callers_mistake(coder, symbol):
    symbols = np.zeros((2, 40), np.uint8)
    symbols[1, 7] = symbol
    with pytest.raises(ValueError, match="frequency 1 or more"):
        coder.encode_plane(symbols, [0, 0], bank_of([2048, 0, 2048]), 1)


@CODERS
def test_arguments_must_fit_each_other(coder):
    bank = bank_of([4096])
    for symbols, ids, rows_per_stream in [
        (np.zeros(4, np.uint8), [0], 1),
        (np.zeros((2, 4), np.uint8), [0], 1),
        (np.zeros((1, 4), np.uint8), [1], 1),
        (np.zeros((1, 4), np.uint8), [0], 0),
    ]:
        with pytest.raises(ValueError, match="expected"):
            coder.encode_plane(symbols, ids, bank, rows_per_stream)


def test_decoding_from_many_threads_at_once():
    rng = np.random.default_rng(2)
    bank = bank_of(*[normalise_counts(rng.gamma(0.5, size=50)) for _ in range(8)])
    ids = rng.integers(0, 8, 64)
    planes = [draw_symbols(rng, bank, ids, 500) for _ in range(4)]
    coded = [rans_numba.encode_plane(plane, ids, bank, 16) for plane in planes]

    def decode(data):
        return rans_numba.decode_plane(data, (64, 500), ids, bank, 16)

    with ThreadPoolExecutor(4) as pool:
        decoded = list(pool.map(decode, coded * 8))
    assert all(np.array_equal(a, b) for a, b in zip(decoded, planes * 8, strict=True))


@given(st.integers(1, 4096), st.data())
def test_reciprocals_divide_exactly(freq, data):
    reciprocal = int(rans_numba._RECIPROCALS[freq])
    drawn = data.draw(st.integers(0, (freq << 20) - 1))
    edge = drawn - drawn % freq
    for x in (drawn, edge, max(edge - 1, 0), (freq << 20) - 1):
        assert x * reciprocal < 1 << 64
        assert (x * reciprocal) >> rans_numba._RECIPROCAL_BITS == x // freq
