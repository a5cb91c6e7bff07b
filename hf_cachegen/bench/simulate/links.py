"""Simulated links: rates over time or per request, from a seed."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

TraceName = Literal["constant", "iid", "markov", "step", "mobile"]
TRACES: tuple[TraceName, ...] = get_args(TraceName)

STEP_S = 0.1
"""How long a rate holds in traces over time."""

N_STEPS = 600
"""Steps of such a trace; after a minute it repeats."""

N_REQUESTS = 256
"""Rates of a trace per request, before it repeats."""

BYTES_PER_GBIT = 1e9 / 8


class Link(Protocol):
    """Carries one request after the other. It has no state: what went before is the caller's."""

    def send(
        self, request: int, start_s: float, size_bytes: float, stop_s: float = math.inf
    ) -> tuple[float, float]:
        """(end in seconds, bytes carried) of a transfer that is given up at ``stop_s``.

        ``request`` counts transfers from 0.
        """


class RequestLink:
    """A rate for each request, whatever its size, as the published evaluation draws them.

    Parameters
    ----------
    rates_bytes_per_s
        All positive; they repeat after the last.
    """

    def __init__(self, rates_bytes_per_s: Sequence[float]) -> None:
        self._rates = _checked(rates_bytes_per_s)

    def send(
        self, request: int, start_s: float, size_bytes: float, stop_s: float = math.inf
    ) -> tuple[float, float]:
        rate = self._rates[request % len(self._rates)]
        end_s = start_s + size_bytes / rate
        if end_s <= stop_s:
            return end_s, size_bytes
        return max(stop_s, start_s), rate * max(stop_s - start_s, 0)


class TimedLink:
    """A piecewise constant rate over time.

    Parameters
    ----------
    rates_bytes_per_s
        All positive, each for ``step_s``; they repeat after the last.
    """

    def __init__(self, rates_bytes_per_s: Sequence[float], step_s: float = STEP_S) -> None:
        self._rates = _checked(rates_bytes_per_s)
        self._step_s = step_s
        self._carried = [0.0, *accumulate(rate * step_s for rate in self._rates)]

    def send(
        self, request: int, start_s: float, size_bytes: float, stop_s: float = math.inf
    ) -> tuple[float, float]:
        before = self._carried_by(start_s)
        end_s = max(self._time_of(before + size_bytes), start_s)
        if end_s <= stop_s:
            return end_s, size_bytes
        return max(stop_s, start_s), max(self._carried_by(stop_s) - before, 0)

    def _carried_by(self, time_s: float) -> float:
        """Bytes that a busy link has carried at a time."""
        step = int(time_s / self._step_s)
        rounds, index = divmod(step, len(self._rates))
        inside = (time_s - step * self._step_s) * self._rates[index]
        return rounds * self._carried[-1] + self._carried[index] + inside

    def _time_of(self, carried_bytes: float) -> float:
        """The inverse of :meth:`_carried_by`."""
        rounds, rest = divmod(carried_bytes, self._carried[-1])
        index = min(bisect_right(self._carried, rest), len(self._rates)) - 1
        steps = rounds * len(self._rates) + index
        return steps * self._step_s + (rest - self._carried[index]) / self._rates[index]


def make_link(
    trace: TraceName,
    seed: tuple[int, ...],
    *,
    gbps: float = 3.0,
    low_gbps: float = 0.1,
    high_gbps: float = 10.0,
    sharing: int = 1,
) -> Link:
    """A link that follows a trace.

    Parameters
    ----------
    trace
        ``constant``: ``gbps``. ``iid``: uniform between ``low_gbps`` and ``high_gbps``, anew for
        each request. ``markov``: between low, their geometric mean and high, moving on with a
        chance of one in ten per 0.1 s. ``step``: from ``gbps`` to a tenth of it at some tenth of
        the first second. ``mobile``: log rate around ``gbps`` that wanders (AR(1), spread 0.7,
        correlation 0.95 per 0.1 s), now and then with almost nothing for 0.3 s, as a handover.
    seed
        Equal seeds give equal links.
    sharing
        Streams that share the link evenly; this one has its part of every rate.

    Raises
    ------
    ValueError
        The trace is unknown, or a rate is not positive.
    """
    unit = BYTES_PER_GBIT / sharing
    rng = np.random.default_rng(seed)
    match trace:
        case "constant":
            return TimedLink([gbps * unit])
        case "iid":
            return RequestLink((unit * rng.uniform(low_gbps, high_gbps, N_REQUESTS)).tolist())
        case "markov":
            return TimedLink((unit * _markov(rng, low_gbps, high_gbps)).tolist())
        case "step":
            first = np.arange(N_STEPS) < rng.integers(1, 10, endpoint=True)
            return TimedLink((unit * np.where(first, gbps, gbps / 10)).tolist())
        case "mobile":
            return TimedLink((unit * gbps * _mobile(rng)).tolist())
    raise ValueError(f"unknown trace {trace!r}; expected one of {', '.join(TRACES)}")


def _markov(rng: np.random.Generator, low: float, high: float) -> NDArray[np.float64]:
    rates = np.array([low, math.sqrt(low * high), high])
    moves = np.where(rng.random(N_STEPS) < 0.1, rng.choice([-1, 1], N_STEPS), 0)
    state, states = int(rng.integers(3)), []
    for move in moves:
        state = min(max(state + int(move), 0), 2)
        states.append(state)
    return rates[states]


def _mobile(
    rng: np.random.Generator, spread: float = 0.7, memory: float = 0.95
) -> NDArray[np.float64]:
    noise = spread * math.sqrt(1 - memory**2) * rng.standard_normal(N_STEPS)
    value, values = spread * rng.standard_normal(), []
    for shock in noise:
        value = memory * value + shock
        values.append(value)
    starts = rng.random(N_STEPS) < 0.01
    handover = starts | np.roll(starts, 1) | np.roll(starts, 2)
    return np.exp(values) * np.where(handover, 0.01, 1.0)


def _checked(rates_bytes_per_s: Sequence[float]) -> Sequence[float]:
    if not rates_bytes_per_s or not all(0 < rate < math.inf for rate in rates_bytes_per_s):
        raise ValueError("expected at least one rate, all positive")
    return rates_bytes_per_s
