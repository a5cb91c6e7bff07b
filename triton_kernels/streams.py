"""What the rANS kernels read and write: tables, streams and integers, checked on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from triton import knobs

from hf_cachegen.config import MAX_ALPHABET, PROB_BITS, RANS_STATE_WORDS
from hf_cachegen.errors import BackendUnavailable, FormatError

DEPTHS = (2, 4, 6, 8)
"""Depths of the search for a symbol: in alphabets of up to 4, 16, 64 and 256."""

TABLE_FIELDS = 4
"""Columns of :attr:`EntryTables.tables`."""

NO_ESCAPE = -1

BEHIND_ALL_SLOTS = 0xFFFF
"""Entry of no symbol, which fills a table up: of frequency 0, from a slot on that there is not."""

STREAM_FIELDS = 7
"""Columns of :meth:`PlaneShapes.stream_table`."""

INTEGER_DTYPES = (torch.int16, torch.int32)
"""Of decoded integers."""

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, eq=False)
class EntryTables:
    """Probability tables, and the one of each row.

    Attributes
    ----------
    entries
        int32 [n]: ``f << 16 | c`` of each symbol's frequency and first slot, table by table, each
        filled up with :data:`BEHIND_ALL_SLOTS`.
    tables
        int32 [n_tables, 4]: where each begins in ``entries``, log2 of its entries (one of
        :data:`DEPTHS`), the integer that its symbol 0 stands for, and its escape symbol or
        :data:`NO_ESCAPE`.
    rows
        int32 [R]: the table of each row.
    fits_int16
        Whether all integers with a symbol do, and one more for the escape.
    """

    entries: Tensor
    tables: Tensor
    rows: Tensor
    fits_int16: bool

    @classmethod
    def build(
        cls, freqs: Tensor, first: Tensor, size: Tensor, lo: Tensor, escapes: Tensor, rows: Tensor
    ) -> EntryTables:
        """Lay out the tables ``freqs[first : first + size]``, on the CPU.

        Parameters
        ----------
        freqs
            Integers [n].
        first, size, lo
            Integers [n_tables].
        escapes
            Bool [n_tables]: whether the last symbol stands for integers that have none.
        rows
            Integers [R]: the table of each row.

        Raises
        ------
        FormatError
            A table does not lie inside ``freqs``, has not 1 to 256 symbols, or does not sum to
            2^12.
        ValueError
            A row has no table.
        """
        freqs, lo = freqs.to(torch.int64), lo.to(torch.int64)
        first, size = first.to(torch.int64), size.to(torch.int64)
        inside = (first >= 0) & (size >= 1) & (size <= MAX_ALPHABET) & (first + size <= len(freqs))
        if not inside.all():
            raise FormatError(f"expected tables of 1 to {MAX_ALPHABET} symbols inside the bank")
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(first):
            raise ValueError(f"expected rows of {len(first)} tables")
        place, last = counted(size), size.cumsum(0) - 1
        f = freqs[first.repeat_interleave(size) + place]
        slot = before(f) - before(f)[before(size)].repeat_interleave(size)
        if (f < 0).any() or (slot[last] + f[last] != 1 << PROB_BITS).any():
            raise FormatError(f"expected a table of frequencies that sum to {1 << PROB_BITS}")
        depths = torch.tensor(DEPTHS)
        depth = depths[torch.searchsorted(1 << depths, size)]
        filled = torch.ones_like(size) << depth
        at = before(filled)
        entries = torch.full((int(filled.sum()),), BEHIND_ALL_SLOTS, dtype=torch.int32)
        entries[at.repeat_interleave(size) + place] = (f << 16 | slot).to(torch.int32)
        escape = torch.where(escapes, size - 1, NO_ESCAPE)
        return cls(
            entries,
            torch.stack((at, depth, lo, escape), dim=1).to(torch.int32),
            rows.to(torch.int32),
            fit_int16(lo) and fit_int16(lo + size),
        )

    def to(self, device: torch.device) -> EntryTables:
        """A copy on a device."""
        entries, tables, rows = (
            to_device(tensor, device) for tensor in (self.entries, self.tables, self.rows)
        )
        return EntryTables(entries, tables, rows, self.fits_int16)


class PlaneShape(NamedTuple):
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


@dataclass(frozen=True, eq=False)
class PlaneShapes:
    """The :class:`PlaneShape` of P planes whose symbols follow one another in a flat buffer.

    Attributes
    ----------
    n_rows, tokens, rows_per_stream, first_row
        int64 [P].
    """

    n_rows: Tensor
    tokens: Tensor
    rows_per_stream: Tensor
    first_row: Tensor

    @classmethod
    def of(cls, shapes: Sequence[PlaneShape]) -> PlaneShapes:
        """Columns of P shapes."""
        return cls(*torch.tensor(shapes, dtype=torch.int64).view(-1, 4).unbind(1))

    @property
    def size(self) -> int:
        """Symbols of all planes."""
        return int((self.n_rows * self.tokens).sum())

    @property
    def n_streams(self) -> Tensor:
        """int64 [P]: S of each plane."""
        streams = (self.n_rows + self.rows_per_stream - 1) // self.rows_per_stream
        return torch.where(self.tokens > 0, streams, 0)

    def check(self, tables: EntryTables) -> None:
        """Raise ValueError unless these are shapes whose rows all have tables."""
        columns = torch.stack((self.n_rows, self.tokens, self.rows_per_stream - 1, self.first_row))
        bad = ((columns < 0) | (columns > _INT32_MAX)).any(dim=0)
        if bad.any():
            raise ValueError(
                "expected planes of 0 to 2^31 - 1 rows and tokens, got "
                f"{columns[:, int(bad.to(torch.uint8).argmax())].tolist()}"
            )
        last = int((self.first_row + self.n_rows).max()) if len(self.n_rows) else 0
        if last > len(tables.rows):
            raise ValueError(f"expected planes of {len(tables.rows)} rows at most, got {last}")

    def stream_table(self, bounds: Tensor) -> Tensor:
        """One line a stream.

        Parameters
        ----------
        bounds
            int64 [streams, 2]: where the words of each begin and end.

        Returns
        -------
        int64 [streams, 7]
            ``bounds``; where its symbols begin; its first row, counted over all planes, and that
            row in the tables; its rows; its tokens.
        """
        plane = torch.arange(len(self.n_rows)).repeat_interleave(self.n_streams)
        first = counted(self.n_streams) * self.rows_per_stream[plane]
        tokens = self.tokens[plane]
        columns = (
            *bounds.unbind(1),
            before(self.n_rows * self.tokens)[plane] + first * tokens,
            before(self.n_rows)[plane] + first,
            self.first_row[plane] + first,
            torch.minimum(self.n_rows[plane] - first, self.rows_per_stream[plane]),
            tokens,
        )
        return torch.stack(columns, dim=1)


@dataclass(frozen=True, eq=False)
class CodedPlanes:
    """Entropy-coded planes, on the host: what one launch decodes.

    Attributes
    ----------
    words
        uint16 [n].
    bounds
        int64 [streams, 2]: begin and end of each stream in ``words``, plane by plane; 64 words of
        states first.
    escapes
        int32 [n]: integers of the escape symbols, in row-major order, plane by plane.
    n_escapes
        int64 [P].
    """

    shapes: PlaneShapes
    words: Tensor
    bounds: Tensor
    escapes: Tensor
    n_escapes: Tensor

    def check(self) -> None:
        """Raise FormatError unless every stream lies inside ``words`` and has valid states."""
        begin, end = self.bounds.unbind(1)
        sizes = end - begin - RANS_STATE_WORDS
        n_streams = int(self.shapes.n_streams.sum())
        if (
            len(self.bounds) != n_streams
            or ((begin < 0) | (end > len(self.words)) | (sizes < 0) | (sizes > _INT32_MAX)).any()
        ):
            raise FormatError(
                f"expected {n_streams} entropy streams inside {len(self.words)} words, "
                "found bounds that are not; fetch the data again"
            )
        # A state is 2^16 or more if its upper word is not 0.
        upper = begin[:, None] + torch.arange(1, RANS_STATE_WORDS, 2)
        low = (self.words.view(torch.int16)[upper] == 0).any(dim=1)
        if low.any():
            raise FormatError(
                f"entropy stream {int(low.to(torch.uint8).argmax())} begins with a state below "
                "2^16; it is damaged, fetch it again"
            )


def before(sizes: Tensor) -> Tensor:
    """Sum of all that come before each of some sizes."""
    return sizes.cumsum(0) - sizes


def counted(sizes: Tensor) -> Tensor:
    """0, 1, ..., n - 1 for each of some sizes n, one after another."""
    return torch.arange(int(sizes.sum())) - before(sizes).repeat_interleave(sizes)


def fit_int16(integers: Tensor) -> bool:
    """Whether all integers of a tensor on the CPU fit int16."""
    limits = torch.iinfo(torch.int16)
    return bool(((integers >= limits.min) & (integers <= limits.max)).all())


def check_integers(integers: Tensor, device: torch.device) -> None:
    """Raise ValueError unless ``integers`` are int16 or int32 [n], contiguous, on ``device``."""
    if integers.ndim != 1 or integers.dtype not in INTEGER_DTYPES or not integers.is_contiguous():
        raise ValueError(f"expected contiguous integers [n], got {described(integers)}")
    if integers.device != device:
        raise ValueError(f"expected integers on {device}, got them on {integers.device}")


def described(*tensors: Tensor) -> str:
    """Dtypes and shapes, for a message."""
    return ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on a device, on the current stream, that the host does not wait for."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def device_of(tensor: Tensor) -> torch.cuda.device:
    """Makes a tensor's device the one that Triton launches on.

    Raises
    ------
    BackendUnavailable
        The tensor is on the CPU, and kernels are not interpreted.
    """
    if not tensor.is_cuda and not knobs.runtime.interpret:
        raise BackendUnavailable(
            f"the Triton kernels need tensors on a GPU, got one on {tensor.device}; there the "
            "entropy backends 'numba' and 'numpy' decode"
        )
    return torch.cuda.device(tensor.device if tensor.is_cuda else -1)
