"""Arrays of a model's statistics, as they come from a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hf_cachegen.errors import FormatError


def check_names(arrays: Mapping[str, NDArray[Any]], expected: set[str]) -> None:
    """Raise FormatError unless these very arrays are there."""
    if set(arrays) != expected:
        raise FormatError(f"table arrays: expected {sorted(expected)}, found {sorted(arrays)}")


def read_array(
    arrays: Mapping[str, NDArray[Any]],
    name: str,
    dtype: DTypeLike,
    shape: tuple[int, ...],
    *,
    above_zero: bool = False,
) -> NDArray[Any]:
    """An array, if it has this dtype and shape and finite values; else FormatError."""
    array = arrays[name]
    if array.shape != shape or array.dtype != dtype:
        raise FormatError(
            f"table array {name!r}: expected {np.dtype(dtype)} {list(shape)}, "
            f"found {array.dtype} {list(array.shape)}"
        )
    if not np.isfinite(array).all():
        raise FormatError(f"table array {name!r}: expected finite values")
    if above_zero and (array <= 0).any():
        raise FormatError(f"table array {name!r}: expected values above 0")
    return array
