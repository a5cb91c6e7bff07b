from __future__ import annotations

import numpy as np
import pytest

from hf_cachegen.codec.table_arrays import check_names, read_array
from hf_cachegen.errors import FormatError

VECTOR = np.array([1.0, 2.0, 3.0], np.float32)


def test_an_array_that_fits_is_given_as_it_is():
    assert read_array({"a": VECTOR}, "a", np.float32, (3,), above_zero=True) is VECTOR
    read_array({"a": -VECTOR}, "a", np.float32, (3,))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (VECTOR[:2], r"'a': expected float32 \[3\], found float32 \[2\]"),
        (VECTOR[None], r"'a': expected float32 \[3\], found float32 \[1, 3\]"),
        (VECTOR.astype(np.float64), r"'a': expected float32 \[3\], found float64 \[3\]"),
        (VECTOR * np.float32("nan"), "'a': expected finite values"),
        (VECTOR * np.float32("inf"), "'a': expected finite values"),
        (VECTOR - 1, "'a': expected values above 0"),
        (-VECTOR, "'a': expected values above 0"),
    ],
)
def test_an_array_that_does_not_fit_is_told_apart(array, message):
    with pytest.raises(FormatError, match=message):
        read_array({"a": array}, "a", np.float32, (3,), above_zero=True)


@pytest.mark.parametrize("names", ["", "a", "abc", "ac"])
def test_arrays_that_lack_or_exceed_are_named(names):
    with pytest.raises(FormatError, match=r"expected \['a', 'b'\], found \["):
        check_names(dict.fromkeys(names, VECTOR), {"a", "b"})
    check_names({"b": VECTOR, "a": VECTOR}, {"a", "b"})
