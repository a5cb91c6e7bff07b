"""How fast this machine decodes and prefills, and how fast its links are, as measured."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hf_cachegen.artifact.manifest import LevelRecord

RECENT_SEGMENTS = 64
"""Decoded segments whose median counts. The first one may have waited for a compiler."""

MOST = 0.9
"""Of the segments: some groups of layers take longer than others, and any may be the last."""

REMEMBERED_S = 300.0
"""How long rates of a link are worth remembering for the next stream over it."""

REMEMBERED_TRANSFERS = 4
"""How many of them: half of what an estimate takes in, so that the stream's own soon prevail."""

_TOKEN = 1
"""Place of the cost per token among a pass's."""

_MEMORY = 0.5
"""Weight of what was known before in a new estimate of the prefill's speed."""


@dataclass(frozen=True)
class PrefillCost:
    """Seconds of a forward pass.

    Attributes
    ----------
    overhead_s
        Of any pass: launches, and one reading of all weights.
    token_s
        Per token.
    pair_s
        Per pair of tokens that attend to each other.
    """

    overhead_s: float
    token_s: float
    pair_s: float

    @classmethod
    def fit(cls, passes: Sequence[tuple[int, int, float]]) -> PrefillCost:
        """The non-negative costs that come closest to measured passes, relative to each.

        Tokens always cost something: where measurements say that overhead is all, they say nothing
        of longer passes.

        Parameters
        ----------
        passes
            (tokens before, tokens, seconds) of passes of different lengths and positions.
        """
        seconds = np.array([taken for _, _, taken in passes])
        terms = np.array([(1, n, _pairs(start, n)) for start, n, _ in passes]) / seconds[:, None]
        fits = []
        for count in (3, 2, 1):
            for columns in map(list, itertools.combinations(range(3), count)):
                if _TOKEN not in columns:
                    continue
                costs = np.zeros(3)
                costs[columns] = np.linalg.lstsq(terms[:, columns], np.ones(len(passes)))[0]
                if (costs >= 0).all():
                    fits.append((float(np.abs(terms @ costs - 1).max()), costs.tolist()))
        return cls(*min(fits)[1])

    def seconds(self, start: int, n_tokens: int) -> float:
        """Seconds to compute tokens that follow ``start`` others, in one pass."""
        pairs = _pairs(start, n_tokens)
        return self.overhead_s + n_tokens * self.token_s + pairs * self.pair_s


class MachineRates:
    """What a model's streams have measured on this machine; safe to use from several threads.

    Attributes
    ----------
    prefill
        Cost of the model's passes; None before it was measured.
    """

    def __init__(self) -> None:
        self.prefill: PrefillCost | None = None
        self._prefill_ratio = 1.0
        self._decode: dict[tuple[str, str], deque[_Decoded]] = {}
        self._links: dict[str, deque[tuple[float, float]]] = {}
        self._lock = threading.Lock()

    def prefill_s(self, start: int, n_tokens: int) -> float | None:
        """Seconds to compute tokens that follow ``start`` others; None if not known."""
        if self.prefill is None:
            return None
        return self._prefill_ratio * self.prefill.seconds(start, n_tokens)

    def note_prefill(self, start: int, n_tokens: int, seconds: float) -> None:
        """Learn from a pass."""
        with self._lock:
            if self.prefill is not None:
                ratio = seconds / self.prefill.seconds(start, n_tokens)
                self._prefill_ratio = _MEMORY * self._prefill_ratio + (1 - _MEMORY) * ratio

    def decode_s(self, level: LevelRecord, n_values: int, n_bytes: int) -> float:
        """Seconds of one thread to decode values that are encoded in so many bytes at a level.

        Of a level that was never decoded, what its bytes take is inferred from others of its codec,
        or of any. Before anything was decoded it is 0, and for no values at all.
        """
        if not n_values:
            return 0.0
        with self._lock:
            own = self._decode.get((level.codec, level.name))
            kin = [v for (codec, _), v in self._decode.items() if codec == level.codec]
            known = [
                (_median(d.n_bytes / d.n_values for d in seen), _median_value_s(seen))
                for seen in ([own] if own else kin or self._decode.values())
            ]
        if own or not known:
            return n_values * sum(value_s for _, value_s in known)
        return n_values * _inferred(sorted(known), n_bytes / n_values)

    def segment_s(self, level: LevelRecord) -> float:
        """Seconds that suffice one thread for most segments of a level; 0 if none was decoded."""
        with self._lock:
            seen = [d.seconds for d in self._decode.get((level.codec, level.name), ())]
        return float(np.quantile(seen, MOST)) if seen else 0.0

    def note_decode(self, level: LevelRecord, n_values: int, n_bytes: int, seconds: float) -> None:
        """Learn from a decoded segment."""
        with self._lock:
            seen = self._decode.setdefault((level.codec, level.name), deque(maxlen=RECENT_SEGMENTS))
            seen.append(_Decoded(n_values, n_bytes, seconds))

    def link_bytes_per_s(self, link: str) -> list[float]:
        """The last rates of a link, oldest first, but those that are too old."""
        with self._lock:
            oldest_s = time.monotonic() - REMEMBERED_S
            return [rate for noted_s, rate in self._links.get(link, ()) if noted_s > oldest_s]

    def note_link(self, link: str, bytes_per_s: float) -> None:
        """Remember a link's rate for later streams."""
        with self._lock:
            known = self._links.setdefault(link, deque(maxlen=REMEMBERED_TRANSFERS))
            known.append((time.monotonic(), bytes_per_s))


class _Decoded(NamedTuple):
    """A segment that was decoded."""

    n_values: int
    n_bytes: int
    seconds: float


def _median(values: Iterable[float]) -> float:
    return statistics.median(list(values))


def _median_value_s(seen: Iterable[_Decoded]) -> float:
    return _median(decoded.seconds / decoded.n_values for decoded in seen)


def _inferred(known: Sequence[tuple[float, float]], bytes_per_value: float) -> float:
    """Seconds per value at a number of bytes per value, from those that were seen, ascending.

    Between two, on the line through them. Beyond them the costlier of two guesses, that a value
    takes as long as the nearest, and that a byte does: a target is missed by too low a cost only.
    """
    sizes, seconds = zip(*known, strict=True)
    if sizes[0] <= bytes_per_value <= sizes[-1]:
        return float(np.interp(bytes_per_value, sizes, seconds))
    size, value_s = known[0 if bytes_per_value < sizes[0] else -1]
    return value_s * max(1.0, bytes_per_value / size)


def _pairs(start: int, n_tokens: int) -> float:
    return n_tokens * (start + (n_tokens + 1) / 2)
