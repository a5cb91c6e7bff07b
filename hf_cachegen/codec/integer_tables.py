"""Integer tables from histograms, and their arrays in a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_cachegen.codec.bank import ESCAPE_BITS, PROB_TOTAL, IntegerBank, normalise_counts
from hf_cachegen.config import MAX_ALPHABET
from hf_cachegen.errors import FormatError

BANK_FIELDS = {"freqs": np.uint16, "sizes": np.uint16, "lo": np.int16}
"""Arrays of a bank in a file and their dtypes; ``sizes`` are alphabets with the escape."""

LIMIT = (MAX_ALPHABET - 2) // 2
"""Largest integer with a symbol of its own; with the escape that makes MAX_ALPHABET symbols."""

TAIL_WEIGHT = 0.02
TAIL_DECAY = 0.7
"""Share of each count that is spread over its neighbours, and how fast it decays with distance: a
sample leaves holes in the tails that another text fills."""


def build_integer_bank(counts: NDArray[np.integer[Any]], lo: int) -> IntegerBank:
    """Tables over the range of integers that pays.

    Parameters
    ----------
    counts
        [tables, n + 1] occurrences of the integers lo, lo + 1, ..., lo + n - 1, then of all others.
    lo
        Integer of column 0.
    """
    counts, escapes = counts[:, :-1], counts[:, -1]
    weights = _smooth(counts.astype(np.float64))
    share = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1)
    # A symbol of frequency 1 costs all others 1.44 / PROB_TOTAL bits and saves its own escapes.
    pays = share * ESCAPE_BITS > np.log2(np.e) / PROB_TOTAL
    pays[:, counts.shape[1] // 2] = True
    first = pays.argmax(axis=1)
    last = counts.shape[1] - 1 - pays[:, ::-1].argmax(axis=1)
    columns = np.arange(counts.shape[1])
    inside = (columns >= first[:, None]) & (columns <= last[:, None])
    rest = escapes + counts.sum(axis=1, where=~inside)
    sizes = last - first + 2
    starts = np.concatenate(([0], np.cumsum(sizes)))
    ragged = np.empty(starts[-1])
    escape_at = starts[1:] - 1
    is_symbol = np.ones(len(ragged), bool)
    is_symbol[escape_at] = False
    ragged[is_symbol] = weights[inside]
    ragged[escape_at] = rest
    freqs = normalise_counts(ragged, starts, keep=escape_at)
    return IntegerBank(freqs, starts.astype(np.int32), (first + lo).astype(np.int32))


def integer_bits(counts: NDArray[np.integer[Any]], lo: int, bank: IntegerBank) -> float:
    """Ideal size, in bits, of integers that occur as counted; each table's escapes in its last.

    Parameters
    ----------
    counts, lo
        As for :func:`build_integer_bank`.
    bank
        The tables that code them.
    """
    occurrences = np.zeros(len(bank.freqs), np.int64)
    escaped = 0
    for table, (first, size) in enumerate(zip(bank.starts, bank.sizes, strict=False)):
        inside = slice(bank.lo[table] - lo, bank.lo[table] - lo + size - 1)
        occurrences[first : first + size - 1] = counts[table, inside]
        rest = counts[table].sum() - counts[table, inside].sum()
        # A symbol of frequency 0 inside the range is escaped as well.
        unknown = bank.freqs[first : first + size - 1] == 0
        rest += occurrences[first : first + size - 1][unknown].sum()
        occurrences[first : first + size - 1][unknown] = 0
        occurrences[first + size - 1] = rest
        escaped += int(rest)
    return bank.entropy_bits(occurrences) + ESCAPE_BITS * escaped


def bank_to_arrays(bank: IntegerBank) -> dict[str, NDArray[Any]]:
    """Arrays of a bank for a file, by :data:`BANK_FIELDS`."""
    arrays: dict[str, NDArray[Any]] = {"freqs": bank.freqs, "sizes": bank.sizes, "lo": bank.lo}
    return {name: arrays[name].astype(dtype) for name, dtype in BANK_FIELDS.items()}


def bank_from_arrays(arrays: Mapping[str, NDArray[Any]], n_tables: int) -> IntegerBank:
    """Inverse of :func:`bank_to_arrays`; FormatError unless they are ``n_tables`` valid tables."""
    for name, dtype in BANK_FIELDS.items():
        if arrays[name].ndim != 1 or arrays[name].dtype != dtype:
            raise FormatError(
                f"table array {name!r}: expected {np.dtype(dtype)} [n], "
                f"found {arrays[name].dtype} {arrays[name].shape}"
            )
    sizes, lo = arrays["sizes"], arrays["lo"].astype(np.int32)
    if len(sizes) != n_tables or len(lo) != n_tables:
        raise FormatError(f"expected {n_tables} tables, found {len(sizes)} sizes and {len(lo)} lo")
    starts = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))).astype(np.int32)
    bank = IntegerBank(arrays["freqs"], starts, lo)
    bank.validate()
    return bank


def _smooth(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Spread a little of each count over its neighbours, both ways, decaying geometrically."""
    spread = np.zeros_like(counts)
    for direction in (1, -1):
        tail = np.zeros(len(counts))
        for column in range(counts.shape[1])[::direction]:
            spread[:, column] += tail
            tail = TAIL_DECAY * (tail + counts[:, column])
    share = (1 - TAIL_DECAY) / (2 * TAIL_DECAY)
    return (1 - TAIL_WEIGHT) * counts + TAIL_WEIGHT * share * spread
