from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_cachegen.codec.bank import PROB_TOTAL, to_symbols
from hf_cachegen.codec.integer_tables import (
    TAIL_WEIGHT,
    bank_from_arrays,
    bank_to_arrays,
    build_integer_bank,
)
from hf_cachegen.errors import FormatError


@st.composite
def histograms(draw):
    """(counts, lo) of sparse, dense, empty and lopsided histograms."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n_tables, n = draw(st.integers(1, 5)), 2 * draw(st.integers(0, 127)) + 1
    weights = rng.gamma(draw(st.sampled_from([0.02, 0.5, 5.0])), size=(n_tables, n))
    counts = (weights * draw(st.sampled_from([0, 1, 1000]))).astype(np.int32)
    escapes = (rng.integers(0, 50, n_tables) * draw(st.booleans())).astype(np.int32)
    return with_escapes(counts, escapes), -(n // 2)


def with_escapes(counts, escapes):
    return np.append(counts, np.reshape(escapes, (-1, 1)), axis=1)


@given(histograms())
def test_tables_of_any_histogram_are_valid(histogram):
    counts, lo = histogram
    bank = build_integer_bank(counts, lo)
    bank.validate()
    assert len(bank) == len(counts)
    assert (bank.lo >= lo).all()
    assert (bank.lo + bank.sizes - 2 < lo + counts.shape[1] - 1).all()


@given(histograms())
def test_a_file_gives_the_same_bank_back(histogram):
    bank = build_integer_bank(*histogram)
    back = bank_from_arrays(bank_to_arrays(bank), len(bank))
    for name in ("freqs", "starts", "lo"):
        before, after = getattr(bank, name), getattr(back, name)
        assert before.dtype == after.dtype
        assert np.array_equal(before, after)


def laplace_counts(scale, total=10_000, half=60):
    weights = np.exp(-np.abs(np.arange(-half, half + 1)) / scale)
    return np.rint(total * weights / weights.sum()).astype(np.int32)[None]


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0, 15.0])
def test_the_sample_itself_is_coded_close_to_its_entropy(scale):
    counts = laplace_counts(scale)
    bank = build_integer_bank(with_escapes(counts, 0), -60)
    used = np.arange(bank.lo[0], bank.lo[0] + bank.sizes[0] - 1) + 60
    coded = counts[0, used]
    assert coded.sum() >= counts.sum() - 1, "what occurred has a symbol, or is too rare to pay"
    share = counts[counts > 0] / counts.sum()
    entropy_bits = -counts.sum() * (share @ np.log2(share))
    smoothing_bits = -np.log2(1 - TAIL_WEIGHT) * counts.sum()
    assert bank.entropy_bits([*coded, 0]) <= 1.01 * entropy_bits + smoothing_bits


def test_holes_in_a_sample_can_be_coded_and_far_values_escape():
    counts = laplace_counts(2.0)
    counts[0, 62] = 0  # the integer 2 happened not to occur
    bank = build_integer_bank(with_escapes(counts, 0), -60)
    q = np.array([[2, -2, 0, 60, -1000]], np.int32)
    _, escapes = to_symbols(q, [0], bank)
    assert escapes.tolist() == [60, -1000]


def test_a_table_of_nothing_codes_zero_and_escapes():
    bank = build_integer_bank(np.zeros((1, 256), np.int32), -127)
    assert (bank.lo[0], bank.freqs.tolist()) == (0, [PROB_TOTAL // 2, PROB_TOTAL // 2])


def test_escapes_get_the_share_that_they_had():
    bank = build_integer_bank(np.array([[100, 100, 100, 300]], np.int32), -1)
    assert bank.freqs[-1] == pytest.approx(PROB_TOTAL / 2, rel=0.02)


def valid_arrays():
    return bank_to_arrays(build_integer_bank(with_escapes(laplace_counts(2.0), 1), -60))


def changed(name, change):
    arrays = valid_arrays()
    return {**arrays, name: change(arrays[name])}


@pytest.mark.parametrize(
    "arrays",
    [
        changed("freqs", lambda a: a.astype(np.int64)),
        changed("freqs", lambda a: a[None]),
        changed("freqs", lambda a: a[:-1]),
        changed("freqs", lambda a: np.append(a, a[-1:])),
        changed("freqs", lambda a: a + np.uint16(1)),
        changed("freqs", lambda a: np.concatenate([[a[0] + a[-1]], a[1:-1], [0]]).astype(a.dtype)),
        changed("sizes", lambda a: a * np.uint16(0)),
        changed("sizes", lambda a: a + np.uint16(1)),
        changed("sizes", lambda a: a * np.uint16(0) + np.uint16(65535)),
        changed("sizes", lambda a: np.append(a, a)),
        changed("sizes", lambda a: a.astype(np.int32)),
        changed("lo", lambda a: a[:0]),
        changed("lo", lambda a: a.astype(np.float32)),
    ],
)
def test_damaged_arrays_are_refused(arrays):
    with pytest.raises(FormatError):
        bank_from_arrays(arrays, 1)


def test_another_number_of_tables_is_refused():
    with pytest.raises(FormatError, match="expected 2 tables"):
        bank_from_arrays(valid_arrays(), 2)


def test_sizes_whose_sum_wraps_round_are_refused():
    n_tables = 1 << 16  # times 65535 is more than an int32 holds
    arrays = {
        "freqs": np.full(4, PROB_TOTAL, np.uint16),
        "sizes": np.full(n_tables, 65535, np.uint16),
        "lo": np.zeros(n_tables, np.int16),
    }
    with pytest.raises(FormatError):
        bank_from_arrays(arrays, n_tables)
