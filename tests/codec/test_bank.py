from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_cachegen.codec import bank as plain
from hf_cachegen.codec import rans_numba as compiled
from hf_cachegen.codec.bank import (
    ESCAPE_BITS,
    PROB_TOTAL,
    IntegerBank,
    TableBank,
    normalise_counts,
)
from hf_cachegen.errors import FormatError

MAPPINGS = pytest.mark.parametrize("mapping", [plain, compiled], ids=["numpy", "numba"])
INT32 = np.iinfo(np.int32)


def ragged(sizes):
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)


def integer_bank(tables, lo):
    freqs = np.concatenate([np.asarray(table, np.uint16) for table in tables])
    return IntegerBank(freqs, ragged([len(table) for table in tables]), np.array(lo, np.int32))


@st.composite
def histograms(draw):
    """Histograms of every shape: empty, of one symbol, with giants beside dwarfs."""
    sizes = draw(st.lists(st.integers(1, 256), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    counts = rng.gamma(draw(st.sampled_from([0.01, 0.1, 1.0, 100.0])), size=sum(sizes))
    counts *= 10.0 ** draw(st.integers(-3, 9))
    counts[rng.random(sum(sizes)) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = 0
    keep = rng.random(sum(sizes)) < draw(st.sampled_from([0.0, 0.1, 1.0]))
    return counts, ragged(sizes), keep


@given(histograms())
def test_normalised_tables_are_valid_and_keep_what_they_must(histogram):
    counts, starts, keep = histogram
    freqs = normalise_counts(counts, starts, keep=keep)
    TableBank(freqs, starts).validate()
    assert (freqs[keep] >= 1).all()
    has_counts = np.add.reduceat(counts, starts[:-1]) > 0
    impossible = (counts == 0) & ~keep & np.repeat(has_counts, np.diff(starts))
    assert (freqs[impossible] == 0).all()


@given(histograms())
def test_normalising_many_tables_is_normalising_each(histogram):
    counts, starts, keep = histogram
    parts = [slice(a, b) for a, b in pairwise(starts)]
    each = [normalise_counts(counts[part], keep=keep[part]) for part in parts]
    assert np.array_equal(normalise_counts(counts, starts, keep=keep), np.concatenate(each))


def greedy_optimum(share, keep):
    """Frequencies of the smallest expected code length: unit by unit, to whom it helps most."""
    freqs = np.zeros(len(share), np.int64)
    freqs[keep] = 1

    def item(symbol):
        freq = freqs[symbol]
        saved = ESCAPE_BITS if freq == 0 else np.log2((freq + 1) / freq)
        return -share[symbol] * saved, symbol

    heap = [item(symbol) for symbol in range(len(share))]
    heapq.heapify(heap)
    for _ in range(PROB_TOTAL - len(keep)):
        symbol = heap[0][1]
        freqs[symbol] += 1
        heapq.heapreplace(heap, item(symbol))
    return freqs


@pytest.mark.parametrize("scale", [0.3, 2.0, 15.0, 60.0])
def test_normalised_tables_are_close_to_the_best_possible(scale):
    counts = 1500 * np.exp(-np.abs(np.arange(128) - 60) / scale)
    counts[-1] = 0
    share = counts / counts.sum()

    def expected_bits(freqs):
        code = np.where(freqs, 12 - np.log2(np.maximum(freqs, 1)), 12 + ESCAPE_BITS)
        return share @ code

    found = expected_bits(normalise_counts(counts, keep=-1).astype(np.int64))
    assert found <= expected_bits(greedy_optimum(share, [127])) * 1.0005 + 1e-6


def test_a_histogram_without_counts_becomes_uniform():
    assert normalise_counts(np.zeros(3)).tolist() == [1366, 1365, 1365]


@pytest.mark.parametrize(
    ("counts", "starts"),
    [
        ([1.0, -1.0], None),
        ([1.0, np.nan], None),
        ([], None),
        (np.ones(257), None),
        (np.ones(4), [0, 2, 2, 4]),
        (np.ones(4), [0, 3]),
        (np.ones(4), [1, 4]),
    ],
)
def test_normalising_nonsense_is_the_callers_mistake(counts, starts):
    with pytest.raises(ValueError, match="expected"):
        normalise_counts(counts, starts)


@pytest.mark.parametrize(
    ("freqs", "starts"),
    [
        ([4095], [0, 1]),
        ([4096, 1], [0, 2]),
        ([4096], [0, 2]),
        ([4096, 4096], [0, 1]),
        ([4096], [0, 0, 1]),
        ([4096, 4096], [0, 2, 1, 2]),
        ([4096], [-1, 1]),
        ([4096], [0, INT32.max, INT32.min, 1]),
        ([16] * 257, [0, 257]),
        ([], [0, 0]),
    ],
)
def test_tables_that_break_the_format_are_refused(freqs, starts):
    with pytest.raises(FormatError):
        TableBank(np.array(freqs, np.uint16), np.array(starts, np.int32)).validate()


@pytest.mark.parametrize(
    ("table", "lo"),
    [([4096, 0], 0), ([2048, 2047, 1], INT32.max)],
    ids=["escape of frequency 0", "integers above int32"],
)
def test_integer_tables_that_break_the_format_are_refused(table, lo):
    with pytest.raises(FormatError):
        integer_bank([table], [lo]).validate()


def test_a_bank_without_tables_is_valid():
    TableBank(np.empty(0, np.uint16), np.zeros(1, np.int32)).validate()


@pytest.mark.parametrize(
    ("freqs", "starts", "lo"),
    [
        (np.array([4096]), np.array([0, 1], np.int32), np.zeros(1, np.int32)),
        (np.array([4096], np.uint16), np.array([0, 1]), np.zeros(1, np.int32)),
        (np.array([[4096]], np.uint16), np.array([0, 1], np.int32), np.zeros(1, np.int32)),
        (np.array([4096], np.uint16), np.array([0, 1], np.int32), np.zeros(2, np.int32)),
        (np.array([4096], np.uint16), np.empty(0, np.int32), np.zeros(0, np.int32)),
    ],
)
def test_arrays_of_another_type_are_the_callers_mistake(freqs, starts, lo):
    with pytest.raises(ValueError, match="expected"):
        IntegerBank(freqs, starts, lo)


def test_a_banks_arrays_cannot_be_changed():
    freqs = np.array([4096], np.uint16)
    bank = TableBank(freqs, np.array([0, 1], np.int32))
    with pytest.raises(ValueError, match="read-only"):
        bank.freqs[0] = 1
    freqs[0] = 4096  # the caller's own array stays as it was


def test_entropy_of_counts():
    bank = TableBank(np.array([2048, 1024, 1024, 0], np.uint16), np.array([0, 4], np.int32))
    assert bank.entropy_bits([10, 2, 3, 0]) == 10 * 1 + 2 * 2 + 3 * 2
    assert bank.entropy_bits([0, 0, 0, 1]) == np.inf


@pytest.mark.parametrize("ids", [[0], [0, 2], [-1, 0], [0.0, 1.0], [[0, 1]], [0, 2**63]])
def test_table_ids_must_name_one_table_a_row(ids):
    bank = TableBank(np.array([4096, 4096], np.uint16), np.array([0, 1, 2], np.int32))
    with pytest.raises(ValueError, match="expected"):
        bank.rows(ids, 2)


@pytest.mark.parametrize("starts", [[0, 5, 1], [-3, 1, 1], [0, 1, INT32.max]])
def test_rows_never_point_outside_the_bank(starts):
    bank = TableBank(np.array([4096], np.uint16), np.array(starts, np.int32))
    with pytest.raises(FormatError):
        bank.rows([0, 1], 2)


@st.composite
def integer_planes(draw):
    """Integers in and out of range, with holes in the tables, up to the ends of int32."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    tables = [
        normalise_counts(rng.integers(0, 3, size), keep=-1)
        for size in draw(st.lists(st.integers(1, 256), min_size=1, max_size=3))
    ]
    lo = [draw(st.sampled_from([INT32.min, -20, 0, INT32.max - 254])) for _ in tables]
    shape = draw(st.tuples(st.integers(0, 4), st.integers(0, 40)))
    ids = rng.integers(0, len(tables), shape[0])
    near = np.array(lo)[ids][:, None] + rng.integers(-3, 260, shape)
    far = rng.integers(INT32.min, INT32.max, shape, endpoint=True)
    q = np.where(rng.random(shape) < draw(st.sampled_from([0.0, 0.1, 1.0])), far, near)
    return q.clip(INT32.min, INT32.max).astype(np.int32), ids, integer_bank(tables, lo)


@given(integer_planes())
def test_integers_round_trip_and_both_mappings_agree(plane):
    q, ids, bank = plane
    bank.validate()
    symbols, escapes = plain.to_symbols(q, ids, bank)
    assert (bank.freqs[bank.starts[ids][:, None] + symbols] > 0).all()
    for mapping in (plain, compiled):
        same_symbols, same_escapes = mapping.to_symbols(q, ids, bank)
        assert symbols.dtype == same_symbols.dtype == np.uint8
        assert np.array_equal(symbols, same_symbols)
        assert np.array_equal(escapes, same_escapes)
        back = mapping.from_symbols(symbols, escapes, ids, bank)
        assert back.dtype == np.int32
        assert np.array_equal(back, q)


@MAPPINGS
def test_what_a_table_cannot_code_is_escaped_in_order(mapping):
    bank = integer_bank([[2000, 0, 2095, 1]], [-1])
    q = np.array([[-1, 0, 1], [2, -2, INT32.min]], np.int32)
    symbols, escapes = mapping.to_symbols(q, [0, 0], bank)
    assert symbols.tolist() == [[0, 3, 2], [3, 3, 3]]
    assert escapes.tolist() == [0, 2, -2, INT32.min]


@MAPPINGS
@pytest.mark.parametrize("n_escapes", [0, 1, 3])
def test_escapes_must_match_their_symbols(mapping, n_escapes):
    bank = integer_bank([[4095, 1]], [0])
    symbols = np.array([[0, 1, 1]], np.uint8)
    with pytest.raises(FormatError, match="expected 2 escaped integers"):
        mapping.from_symbols(symbols, np.zeros(n_escapes, np.int32), [0], bank)
