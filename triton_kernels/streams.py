"""What the rANS kernels read: tables and streams, laid out and checked on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_cachegen.config import MAX_ALPHABET, PROB_BITS, RANS_LANES
from hf_cachegen.errors import FormatError

STATE_WORDS = 2 * RANS_LANES
"""The states at the head of a stream, in 16-bit words."""

ROW_FIELDS = 3
"""Columns of :attr:`EntryTables.rows`."""

STREAM_FIELDS = 7
"""Columns of :func:`stream_table`."""

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, eq=False)
class EntryTables:
    """Probability tables of rows.

    Attributes
    ----------
    entries
        int32 [n]: ``f << 16 | c`` of each symbol's frequency and first slot, table by table.
    rows
        int32 [R, 3]: where each row's table begins in ``entries``, the number of its symbols, and
        the integer that its symbol 0 stands for. The last symbol is the escape of integer planes.
    max_symbols
        Of the largest table, 1 to 256.
    fits_int16
        Whether all integers with a symbol do, and one more for the escape.
    """

    entries: Tensor
    rows: Tensor
    max_symbols: int
    fits_int16: bool

    @classmethod
    def build(cls, freqs: Tensor, first: Tensor, size: Tensor, lo: Tensor) -> EntryTables:
        """Lay out the tables ``freqs[first : first + size]`` of each row, on the CPU.

        Parameters
        ----------
        freqs
            Integers [n].
        first, size, lo
            Integers [R].

        Raises
        ------
        FormatError
            A table does not lie inside ``freqs``, has not 1 to 256 symbols, or does not sum to
            2^12.
        """
        freqs = freqs.to(torch.int64)
        spans = torch.stack((first, size), dim=1).to(torch.int64)
        spans, table_of = spans.unique(dim=0, return_inverse=True)
        first, size = spans.unbind(1)
        inside = (first >= 0) & (size >= 1) & (size <= MAX_ALPHABET) & (first + size <= len(freqs))
        if not inside.all():
            raise FormatError(f"expected tables of 1 to {MAX_ALPHABET} symbols inside the bank")
        ends = size.cumsum(0)
        begins = ends - size
        f = freqs[torch.arange(int(size.sum())) + (first - begins).repeat_interleave(size)]
        before = f.cumsum(0) - f
        slot = before - before[begins].repeat_interleave(size)
        if (f < 0).any() or (slot[ends - 1] + f[ends - 1] != 1 << PROB_BITS).any():
            raise FormatError(f"expected a table of frequencies that sum to {1 << PROB_BITS}")
        lo, row_size = lo.to(torch.int64), size[table_of]
        rows = torch.stack((begins[table_of], row_size, lo), dim=1)
        return cls(
            (f << 16 | slot).to(torch.int32),
            rows.to(torch.int32),
            int(size.max()) if len(size) else 1,
            fit_int16(lo) and fit_int16(lo + row_size),
        )

    def to(self, device: torch.device) -> EntryTables:
        """A copy on a device."""
        entries, rows = to_device(self.entries, device), to_device(self.rows, device)
        return EntryTables(entries, rows, self.max_symbols, self.fits_int16)


@dataclass(frozen=True, eq=False)
class PlaneShape:
    """How a plane ``[R, T]`` is cut into streams, and which tables its rows take.

    Attributes
    ----------
    n_rows, tokens
        R and T.
    rows_per_stream
        Rows that share a stream: there are S = ceil(R / rows_per_stream), or none if T is 0.
    first_row
        Row of the :class:`EntryTables` that row 0 takes; the others follow.
    """

    n_rows: int
    tokens: int
    rows_per_stream: int
    first_row: int = 0

    @property
    def size(self) -> int:
        """Symbols."""
        return self.n_rows * self.tokens

    @property
    def n_streams(self) -> int:
        """S."""
        return -(-self.n_rows // self.rows_per_stream) if self.tokens else 0

    def check(self, tables: EntryTables) -> None:
        """Raise ValueError unless this is a shape whose rows all have tables."""
        counts = (self.n_rows, self.tokens, self.rows_per_stream - 1, self.first_row)
        if not 0 <= min(counts) <= max(counts) <= _INT32_MAX:
            raise ValueError(f"expected a plane of less than 2^31 rows and tokens, got {self}")
        if self.first_row + self.n_rows > len(tables.rows):
            raise ValueError(f"expected tables of {len(tables.rows)} rows at most, got {self}")


@dataclass(frozen=True, eq=False)
class CodedPlane:
    """An entropy-coded plane, on the host.

    Attributes
    ----------
    words
        uint16 [n].
    bounds
        int64 [S + 1]: stream s is ``words[bounds[s] : bounds[s + 1]]``, 64 words of states first.
    escapes
        int32 [n]: integers of a plane's escape symbols, in row-major order.
    """

    shape: PlaneShape
    words: Tensor
    bounds: Tensor
    escapes: Tensor

    def check(self) -> None:
        """Raise FormatError unless every stream lies inside ``words`` and has valid states."""
        sizes = self.bounds.diff() - STATE_WORDS
        if (
            len(self.bounds) != self.shape.n_streams + 1
            or (sizes < 0).any()
            or (sizes > _INT32_MAX).any()
            or int(self.bounds[0]) < 0
            or int(self.bounds[-1]) > len(self.words)
        ):
            raise FormatError(
                f"expected {self.shape.n_streams} entropy streams inside {len(self.words)} words, "
                "found bounds that are not; fetch the data again"
            )
        # A state is 2^16 or more if its upper word is not 0.
        upper = self.bounds[:-1, None] + torch.arange(1, STATE_WORDS, 2)
        low = (self.words.view(torch.int16)[upper] == 0).any(dim=1)
        if low.any():
            raise FormatError(
                f"entropy stream {int(low.to(torch.uint8).argmax())} begins with a state below "
                "2^16; it is damaged, fetch it again"
            )


def stream_table(shapes: Sequence[PlaneShape], word_bounds: Sequence[Tensor]) -> Tensor:
    """One line a stream, for planes whose symbols follow one another in a flat buffer.

    Parameters
    ----------
    shapes
        The planes.
    word_bounds
        int64 [S + 1] of each plane, in words from the start of what they are joined to.

    Returns
    -------
    int64 [streams, 7]
        Its words' begin and end; where its symbols begin; its first row, counted over all planes,
        and that row in the tables; its rows; its tokens.
    """
    lines = [torch.empty((0, STREAM_FIELDS), dtype=torch.int64)]
    symbols = rows = 0
    for shape, bounds in zip(shapes, word_bounds, strict=True):
        first = torch.arange(shape.n_streams) * shape.rows_per_stream
        columns = (
            bounds[:-1],
            bounds[1:],
            symbols + first * shape.tokens,
            rows + first,
            shape.first_row + first,
            (shape.n_rows - first).clamp(max=shape.rows_per_stream),
            torch.full_like(first, shape.tokens),
        )
        lines.append(torch.stack(columns, dim=1))
        symbols += shape.size
        rows += shape.n_rows
    return torch.cat(lines)


def fit_int16(integers: Tensor) -> bool:
    """Whether all integers of a tensor on the CPU fit int16."""
    limits = torch.iinfo(torch.int16)
    return bool(((integers >= limits.min) & (integers <= limits.max)).all())


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on a device, on the current stream, that the host does not wait for."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def device_of(tensor: Tensor) -> torch.cuda.device:
    """Makes a tensor's device the one that Triton launches on; nothing for a tensor on the CPU."""
    return torch.cuda.device(tensor.device if tensor.is_cuda else -1)
