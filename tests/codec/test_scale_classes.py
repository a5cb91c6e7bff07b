from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_cachegen.codec.bank import PROB_TOTAL
from hf_cachegen.codec.scale_classes import (
    CLASS_RATIOS,
    LOWEST_RATIO,
    MAX_LOW_BITS,
    N_CLASSES,
    UNIFORM,
    classify,
    n_coded,
)

descending = st.lists(
    st.floats(2.0**-30, 2.0**30, width=32), min_size=0, max_size=30
).map(lambda values: np.array(sorted(values, reverse=True), np.float32))  # fmt: skip
scales = st.floats(1e-6, 1e6)


def test_classes_are_quarter_octaves_from_the_lowest_coded_ratio():
    assert CLASS_RATIOS[0] == LOWEST_RATIO
    assert len(CLASS_RATIOS) == N_CLASSES
    np.testing.assert_allclose(CLASS_RATIOS[1:] / CLASS_RATIOS[:-1], 2**0.25, rtol=1e-15)


@given(descending, scales)
def test_coded_coefficients_are_the_first_ones(sigma, scale):
    coded = n_coded(sigma, scale)
    assert (sigma[:coded].astype(np.float64) >= LOWEST_RATIO * scale).all()
    assert (sigma[coded:].astype(np.float64) < LOWEST_RATIO * scale).all()


@given(descending, scales)
def test_a_finer_step_codes_no_fewer(sigma, scale):
    assert n_coded(sigma, scale) <= n_coded(sigma, scale / 3)


@given(descending, scales)
def test_the_class_is_that_of_the_ratio_without_its_low_bits(sigma, scale):
    coded = sigma[: n_coded(sigma, scale)]
    classes, low_bits = classify(coded, scale)
    assert classes.dtype == low_bits.dtype == np.int32
    assert classes.shape == low_bits.shape == coded.shape
    assert ((classes >= 0) & (classes < N_CLASSES)).all()
    assert ((low_bits >= 0) & (low_bits <= MAX_LOW_BITS)).all()
    assert (np.diff(low_bits) <= 0).all(), "those with low bits come first"
    ratio = coded.astype(np.float64) / scale / 2.0**low_bits
    ends = np.append(CLASS_RATIOS, np.inf)
    inside = (ratio >= ends[classes] * (1 - 1e-12)) & (ratio < ends[classes + 1] * (1 + 1e-12))
    assert inside.all()
    most = low_bits == MAX_LOW_BITS
    assert (ratio[~most] < CLASS_RATIOS[-1]).all(), "only the last class may lack low bits"


@pytest.mark.parametrize("bits", range(MAX_LOW_BITS + 1))
def test_low_bits_begin_at_the_open_class_and_double(bits):
    edge = CLASS_RATIOS[-1] * 2.0**bits
    _, low_bits = classify(np.array([edge * 1.01, edge * 0.99], np.float32), 1.0)
    assert low_bits.tolist() == [min(bits + 1, MAX_LOW_BITS), bits]


def test_uniform_tables_code_their_bits_and_nothing_else():
    UNIFORM.validate()
    assert UNIFORM.sizes.tolist() == [2**bits for bits in range(MAX_LOW_BITS + 1)]
    for bits in range(MAX_LOW_BITS + 1):
        freqs = UNIFORM.freqs[UNIFORM.starts[bits] : UNIFORM.starts[bits + 1]]
        assert (freqs == PROB_TOTAL >> bits).all()
