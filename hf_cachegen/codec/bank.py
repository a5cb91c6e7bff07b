"""Static probability tables, and the integers that are coded with them.

A *bank* holds many tables of different alphabets in flat arrays, so that a model's tens of
thousands of tables load, travel and reach a GPU as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from hf_cachegen.config import MAX_ALPHABET, PROB_BITS
from hf_cachegen.errors import FormatError

PROB_TOTAL = 1 << PROB_BITS
"""What the frequencies of every table sum to."""

ESCAPE_BITS = 32
"""An escaped integer is stored as it is, beside its escape symbol."""


class RowTables(NamedTuple):
    """The tables of a plane's R rows, checked to lie inside their bank.

    Attributes
    ----------
    ids
        int64 [R]: number of the table.
    first
        int64 [R]: index into ``freqs`` of the table's symbol 0.
    size
        int64 [R]: symbols of its alphabet, 1 to 256.
    """

    ids: NDArray[np.int64]
    first: NDArray[np.int64]
    size: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TableBank:
    """Ragged probability tables. The arrays become read-only.

    Attributes
    ----------
    freqs
        uint16 [n]: the tables one after another. A symbol's probability is its frequency over
        :data:`PROB_TOTAL`; a symbol of frequency 0 cannot be coded.
    starts
        int32 [n_tables + 1]: table k is ``freqs[starts[k] : starts[k + 1]]``.

    Raises
    ------
    ValueError
        An array has another dtype or number of dimensions.
    """

    freqs: NDArray[np.uint16]
    starts: NDArray[np.int32]

    def __post_init__(self) -> None:
        object.__setattr__(self, "freqs", _vector(self.freqs, "freqs", np.uint16))
        object.__setattr__(self, "starts", _vector(self.starts, "starts", np.int32))
        if not len(self.starts):
            raise ValueError("expected starts of n_tables + 1 numbers, got none")

    def __len__(self) -> int:
        """Number of tables."""
        return len(self.starts) - 1

    @property
    def sizes(self) -> NDArray[np.int64]:
        """int64 [n_tables]: symbols of each table's alphabet."""
        # In 64 bits, where the difference of two hostile int32 cannot wrap round.
        bounds = self.starts.astype(np.int64)
        return bounds[1:] - bounds[:-1]

    def validate(self) -> None:
        """Check everything that the coders rely on.

        Raises
        ------
        FormatError
            The tables do not tile ``freqs``, an alphabet has not 1 to 256 symbols, or a table does
            not sum to :data:`PROB_TOTAL`.
        """
        ends = int(self.starts[0]), int(self.starts[-1])
        if ends != (0, len(self.freqs)):
            raise FormatError(f"expected tables from 0 to {len(self.freqs)}, found {ends}")
        sizes = self.sizes
        _check_each((sizes >= 1) & (sizes <= MAX_ALPHABET), sizes, f"1 to {MAX_ALPHABET} symbols")
        if len(self):
            totals = np.add.reduceat(self.freqs, self.starts[:-1], dtype=np.int64)
            _check_each(totals == PROB_TOTAL, totals, f"frequencies that sum to {PROB_TOTAL}")

    def entropy_bits(self, counts: ArrayLike) -> float:
        """Ideal size, in bits, of symbols that occur ``counts`` [n] times (in order of ``freqs``).

        Infinite where a symbol of frequency 0 occurs.
        """
        occurrences = np.asarray(counts)
        used = np.flatnonzero(occurrences)
        with np.errstate(divide="ignore"):
            code_lengths = PROB_BITS - np.log2(self.freqs[used].astype(np.float64))
        return float(occurrences[used] @ code_lengths)

    def rows(self, table_ids: ArrayLike, n_rows: int) -> RowTables:
        """Look up the tables of a plane's rows.

        Raises
        ------
        ValueError
            There is not one table id a row, or an id names no table.
        FormatError
            A table that is used does not lie inside the bank.
        """
        ids = np.asarray(table_ids)
        if ids.shape != (n_rows,) or (n_rows and ids.dtype.kind not in "iu"):
            raise ValueError(
                f"expected {n_rows} integer table ids, one a row; got {ids.dtype} {ids.shape}"
            )
        if n_rows and not 0 <= ids.min() <= ids.max() < len(self):
            raise ValueError(
                f"expected table ids from 0 to {len(self) - 1}, got {ids.min()} to {ids.max()}"
            )
        ids = ids.astype(np.int64)
        first = self.starts[ids].astype(np.int64)
        size = self.starts[ids + 1] - first
        inside = (first >= 0) & (size >= 1) & (size <= MAX_ALPHABET)
        inside &= first + size <= len(self.freqs)
        _check_each(inside, ids, "a table that lies inside its bank", what="row")
        return RowTables(ids, first, size)


@dataclass(frozen=True, eq=False)
class IntegerBank(TableBank):
    """Tables that code integers.

    Table k of A symbols codes the integers ``lo[k]`` to ``lo[k] + A - 2``. Its last symbol is the
    escape, which stands for any other int32.

    Attributes
    ----------
    lo
        int32 [n_tables]: the integer that symbol 0 stands for.
    """

    lo: NDArray[np.int32]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "lo", _vector(self.lo, "lo", np.int32))
        if len(self.lo) != len(self):
            raise ValueError(f"expected lo of {len(self)} tables, got {len(self.lo)}")

    def validate(self) -> None:
        """As :meth:`TableBank.validate`; also, escapes can be coded and integers fit an int32."""
        super().validate()
        escape = self.freqs[self.starts[1:] - 1]
        _check_each(escape >= 1, escape, "an escape symbol of frequency 1 or more")
        highest = self.lo.astype(np.int64) + self.sizes - 2
        _check_each(highest <= np.iinfo(np.int32).max, highest, "integers that fit an int32")


def to_symbols(
    q: NDArray[np.int32], table_ids: ArrayLike, bank: IntegerBank
) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Turn integers into symbols, and list those that have none.

    Parameters
    ----------
    q
        int32 [R, T].
    table_ids
        [R]: the table of each row.

    Returns
    -------
    symbols
        uint8 [R, T].
    escapes
        int32 [n]: the integers that became escape symbols, in row-major order.
    """
    rows = bank.rows(table_ids, len(q))
    escape = rows.size[:, None] - 1
    offset = q.astype(np.int64) - bank.lo[rows.ids, None]
    in_range = (offset >= 0) & (offset < escape)
    freq = bank.freqs[rows.first[:, None] + np.where(in_range, offset, 0)]
    codable = in_range & (freq > 0)
    return np.where(codable, offset, escape).astype(np.uint8), q[~codable]


def from_symbols(
    symbols: NDArray[np.uint8], escapes: NDArray[np.int32], table_ids: ArrayLike, bank: IntegerBank
) -> NDArray[np.int32]:
    """Inverse of :func:`to_symbols`: int32 [R, T].

    Raises
    ------
    FormatError
        ``escapes`` has not one integer for each escape symbol.
    """
    rows = bank.rows(table_ids, len(symbols))
    escaped = symbols == rows.size[:, None] - 1
    check_escapes(int(np.count_nonzero(escaped)), len(escapes))
    q = (symbols + bank.lo[rows.ids, None].astype(np.int64)).astype(np.int32)
    q[escaped] = escapes
    return q


def check_escapes(n_symbols: int, n_escapes: int) -> None:
    """Raise FormatError unless there is one integer for each escape symbol."""
    if n_symbols != n_escapes:
        raise FormatError(
            f"expected {n_symbols} escaped integers, one for each escape symbol, "
            f"found {n_escapes}; the data is damaged, fetch it again"
        )


def normalise_counts(
    counts: ArrayLike, starts: ArrayLike | None = None, *, keep: Any = None
) -> NDArray[np.uint16]:
    """Turn histograms into frequencies that sum to :data:`PROB_TOTAL`.

    Frequencies are rounded down, and each table's missing units go to the symbols whose code
    length they shorten most, weighted by how often the symbol occurs. A symbol so rare that
    escapes cost less than a unit gets frequency 0.

    Parameters
    ----------
    counts
        [n] occurrences, or any non-negative weights. A table without any is made uniform.
    starts
        [n_tables + 1] bounds of the tables in ``counts``. None: one table.
    keep
        Index or mask into ``counts`` of symbols that get at least frequency 1.

    Returns
    -------
    uint16 [n]

    Examples
    --------
    Integer tables of histograms whose last symbol is the escape::

        freqs = normalise_counts(counts, starts, keep=starts[1:] - 1)
    """
    weights = np.asarray(counts, np.float64)
    bounds = np.asarray([0, len(weights)] if starts is None else starts, np.int64)
    sizes = np.diff(bounds)
    if bounds[0] != 0 or bounds[-1] != len(weights) or not _all_in(sizes, 1, MAX_ALPHABET):
        raise ValueError(f"expected tables of 1 to {MAX_ALPHABET} symbols that tile counts")
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError("expected counts that are finite and not negative")
    table = np.repeat(np.arange(len(sizes)), sizes)
    kept = np.zeros(len(weights), bool)
    kept[[] if keep is None else keep] = True

    totals = np.add.reduceat(weights, bounds[:-1])[table]
    share = np.divide(weights, totals, out=1.0 / sizes[table], where=totals > 0)
    # A unit is worth 1 / (PROB_TOTAL ln 2) bits to the frequent symbols that it is taken from.
    worth_a_unit = share * ESCAPE_BITS > 1 / (PROB_TOTAL * np.log(2))
    # Symbols lifted to their first unit, against their share, get it before the others. The test
    # leaves room for the largest number of them, so that every other kept symbol rounds down to 1
    # or more.
    lifted = (kept | worth_a_unit) & (share * (PROB_TOTAL - MAX_ALPHABET) < 1)
    n_lifted = np.add.reduceat(lifted, bounds[:-1], dtype=np.int64)[table]
    rest = np.where(lifted, 0.0, share)
    rest /= np.add.reduceat(rest, bounds[:-1])[table]
    freqs = lifted + np.floor(rest * (PROB_TOTAL - n_lifted)).astype(np.int64)
    missing = PROB_TOTAL - np.add.reduceat(freqs, bounds[:-1])
    order = np.lexsort((-share * _saved_bits(freqs), table))
    rank = np.arange(len(order)) - bounds[table]
    freqs[order[rank < missing[table]]] += 1
    return freqs.astype(np.uint16)


def _saved_bits(freqs: NDArray[np.int64]) -> NDArray[np.float64]:
    """By how much one more unit shortens a symbol's code."""
    saved: NDArray[np.float64] = np.log2(1 + 1 / np.maximum(freqs, 1))
    return np.where(freqs == 0, ESCAPE_BITS, saved)


def _all_in(values: NDArray[np.int64], low: int, high: int) -> bool:
    return bool(((values >= low) & (values <= high)).all())


def _vector(array: NDArray[Any], name: str, dtype: DTypeLike) -> NDArray[Any]:
    """A read-only view (or copy, if need be) that every kernel sees as one type."""
    if array.ndim != 1 or array.dtype != dtype:
        raise ValueError(
            f"expected {name} as {np.dtype(dtype)} [n], got {array.dtype} {array.shape}"
        )
    return read_only(array)


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """A contiguous, aligned, read-only view, or a copy where there is no such view."""
    view = np.require(array, requirements=("C", "A")).view()
    view.flags.writeable = False
    return view


def _check_each(
    good: NDArray[np.bool_], found: NDArray[Any], expected: str, what: str = "table"
) -> None:
    if not good.all():
        bad = int(np.argmin(good))
        raise FormatError(f"{what} {bad}: expected {expected}, found {found[bad]}")
