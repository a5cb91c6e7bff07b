"""How fast this machine decodes and prefills, and how fast its links are, as measured."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_cachegen.artifact.manifest import LevelRecord

RECENT_SEGMENTS = 64
"""Decoded segments whose median counts. The first one may have waited for a compiler."""

REMEMBERED_S = 300.0
"""How long rates of a link are worth remembering for the next stream over it."""

REMEMBERED_TRANSFERS = 4
"""How many of them: half of what an estimate takes in, so that the stream's own soon prevail."""

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
        self._decode: dict[tuple[str, str], deque[float]] = {}
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

    def decode_s(self, level: LevelRecord, n_values: int) -> float:
        """Seconds of one thread to decode values at a level.

        A level that was never decoded is taken to be like another of its codec, or of any. Before
        anything was decoded it is 0.
        """
        with self._lock:
            own = self._decode.get((level.codec, level.name))
            kin = [v for (codec, _), v in self._decode.items() if codec == level.codec]
            known = [own] if own else kin or list(self._decode.values())
            rates = [statistics.median(values) for values in known]
        return n_values * statistics.fmean(rates) if rates else 0.0

    def note_decode(self, level: LevelRecord, n_values: int, seconds: float) -> None:
        """Learn from a decoded segment."""
        with self._lock:
            known = self._decode.setdefault(
                (level.codec, level.name), deque(maxlen=RECENT_SEGMENTS)
            )
            known.append(seconds / n_values)

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


def _pairs(start: int, n_tokens: int) -> float:
    return n_tokens * (start + (n_tokens + 1) / 2)
