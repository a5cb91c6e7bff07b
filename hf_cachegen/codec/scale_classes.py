"""Scale classes: one probability table for all coefficients of about the same spread.

Coefficients of a Karhunen-Loeve transform have nearly one shape of distribution, so a
coefficient's table follows from its standard deviation over the quantiser's step, in quarter
octaves. Coefficients far below the step are zero and not coded; of those far above it the low bits,
which are uniform, are split off.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hf_cachegen.codec.bank import PROB_TOTAL, TableBank

LOWEST_RATIO = 2.0**-2.5
"""Coefficients of a smaller standard deviation over the step are not coded."""

CLASS_RATIOS = LOWEST_RATIO * np.concatenate(
    # Quarter octaves from exact constants, so that every machine draws the same boundaries.
    [
        2.0**octave * np.array([1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429])
        for octave in range(7)
    ]
)
"""Lower end of each scale class. The last is open: larger coefficients send low bits apart."""

N_CLASSES = len(CLASS_RATIOS)

MAX_LOW_BITS = 8


def n_coded(sigma: NDArray[np.float32], scale: float) -> int:
    """Coefficients that are coded with the step ``scale``; ``sigma`` [K] descends."""
    return int(np.count_nonzero(sigma.astype(np.float64) >= LOWEST_RATIO * scale))


def classify(
    sigma: NDArray[np.float32], scale: float
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Scale class and number of low bits of each coded coefficient, int32 [K'] each."""
    ratio = sigma.astype(np.float64) / scale
    low_bits = np.zeros(len(ratio), np.int32)
    for bits in range(MAX_LOW_BITS):
        low_bits += ratio >= CLASS_RATIOS[-1] * 2.0**bits
    classes = np.searchsorted(CLASS_RATIOS, ratio / 2.0**low_bits, side="right") - 1
    return np.maximum(classes, 0).astype(np.int32), low_bits


def _uniform_tables() -> TableBank:
    sizes = [1 << bits for bits in range(MAX_LOW_BITS + 1)]
    freqs = np.concatenate([np.full(size, PROB_TOTAL // size, np.uint16) for size in sizes])
    return TableBank(freqs, np.concatenate(([0], np.cumsum(sizes))).astype(np.int32))


UNIFORM = _uniform_tables()
"""Table b codes b bits of equal probability."""
