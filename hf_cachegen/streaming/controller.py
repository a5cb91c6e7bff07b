"""Which level of a chunk to fetch: pure decisions, from numbers to a level.

No clock and no link in here: both are injected by whoever measures them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class StreamState:
    """What is known when the next chunk is about to be requested.

    Attributes
    ----------
    remaining_bytes
        Bytes of every chunk that is still to be fetched, the next one first: ``[chunk][level]``,
        levels coarse to fine.
    elapsed_s
        Seconds since the stream began.
    throughput_bytes_per_s
        Throughput of the last chunk; None before any was measured.
    """

    remaining_bytes: Sequence[Sequence[int]]
    elapsed_s: float
    throughput_bytes_per_s: float | None


class Policy(Protocol):
    """Chooses the level of the next chunk."""

    def choose(self, state: StreamState) -> int:
        """Index of the level to fetch for ``state.remaining_bytes[0]``."""


@dataclass(frozen=True)
class FixedLevel:
    """The same level for every chunk."""

    level: int

    def choose(self, state: StreamState) -> int:
        return self.level


@dataclass(frozen=True)
class PaperPolicy:
    """CacheGen's rule (SIGCOMM 2024, section 5.3 and algorithm 1), over encoded levels.

    The finest level whose remaining bytes, of all chunks, arrive within the remaining time at the
    throughput of the last chunk; the smallest if none does. Before a throughput is known it takes
    ``first_level``.

    Attributes
    ----------
    target_s
        Time to first token to meet, in seconds from the start of the stream.
    first_level
        Level of the first chunk.
    """

    target_s: float
    first_level: int

    def choose(self, state: StreamState) -> int:
        if state.throughput_bytes_per_s is None:
            return self.first_level
        totals = [sum(sizes) for sizes in zip(*state.remaining_bytes, strict=True)]
        budget = max(self.target_s - state.elapsed_s, 0) * state.throughput_bytes_per_s
        fitting = [level for level, total in enumerate(totals) if total <= budget]
        return max(fitting, default=min(range(len(totals)), key=totals.__getitem__))
