"""How fast a link is, seen from one transfer."""

from __future__ import annotations

import bisect
import threading
import time
from operator import itemgetter
from typing import NamedTuple

MIN_SAMPLE_BYTES = 1 << 16
"""A part of a transfer tells the link's rate if it is not smaller than that."""

RECENT_S = 0.5
"""A link's present rate is that of this time at least: a gap in what arrives is no standstill."""

LATE_RATIO = 1.25
"""A transfer comes late if it will take so many times as long as was expected."""


def comes_late(waited_s: float, left_s: float, expected_s: float) -> bool:
    """Whether a transfer comes late of which so much was waited for and so much is to come."""
    return waited_s + left_s > LATE_RATIO * expected_s


class LinkCount:
    """The bytes that have come over a link, by all transfers that share it."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._changed_at = time.monotonic()
        self._still_at: int | None = None
        self._lock = threading.Lock()

    def add(self, size_bytes: int) -> int:
        """Count some more, from any thread; returns how many it are in all."""
        with self._lock:
            self.size_bytes += size_bytes
            self._changed_at = time.monotonic()
            return self.size_bytes

    @property
    def silent_s(self) -> float:
        """Seconds since anything has come."""
        return time.monotonic() - self._changed_at

    def note_standstill(self) -> None:
        """Note that the link stands still, which it does until more comes."""
        self._still_at = self.size_bytes

    @property
    def standstill_s(self) -> float:
        """How long a link that stands still will do so yet: as long as it has, for all we know."""
        return self.silent_s if self.size_bytes == self._still_at else 0.0


class _Mark(NamedTuple):
    """A moment of a transfer: what has arrived of it, and over its link, and the seconds since."""

    size_bytes: int
    link_bytes: int
    seconds: float


class Meter:
    """Measures a link while a transfer runs, from the construction or the last restart on.

    One thread receives, others may ask. Time in which the receiver does not wait for bytes says
    nothing about the link: they wait in buffers on both sides and then come at once. What others
    receive over the link at the same time counts for its rate.

    Parameters
    ----------
    expected_bytes
        What is expected to arrive.
    patience_s
        How long nothing may come at first: a server's answer takes its time.
    link
        What counts the bytes of all transfers; by default there are no others.

    Attributes
    ----------
    size_bytes
        What has arrived.
    latency_s
        From the start to the first bytes; None before they came.
    is_given_up
        Whether nobody wants what has not arrived yet.
    """

    def __init__(
        self, expected_bytes: int = 0, patience_s: float = 0.0, link: LinkCount | None = None
    ) -> None:
        self._lock = threading.Lock()
        self._patience_s = max(patience_s, RECENT_S)
        self._link = link or LinkCount()
        self._held_up: _Mark | None = None
        self.is_given_up = False
        self.restart(expected_bytes)

    def restart(self, expected_bytes: int) -> None:
        """Begin to measure: the request is sent, and the receiver waits.

        What was held up before stays so.
        """
        with self._lock:
            self._expected_bytes = expected_bytes
            self.size_bytes = 0
            self.latency_s: float | None = None
            self._started_s = time.monotonic()
            self._waits_since: float | None = self._started_s
            self._waited_s = 0.0
            self._turn_s = self._turn_waited_s = 0.0
            self._first = self._last = _Mark(0, self._link.size_bytes, 0.0)
            self._arrivals = [(0.0, self._link.size_bytes)]  # (seconds waited until then, bytes)

    def take_turn(self) -> None:
        """Note that the transfers that were asked for before have ended."""
        with self._lock:
            now_s = time.monotonic()
            self._turn_s = now_s - self._started_s
            self._turn_waited_s = self._waited_until(now_s)

    @property
    def seconds(self) -> float:
        """Since its turn: since the start unless others were before it."""
        return time.monotonic() - self._started_s - self._turn_s

    @property
    def waited_s(self) -> float:
        """Of them, those in which the receiver waited for bytes."""
        with self._lock:
            return self._waited_until(time.monotonic()) - self._turn_waited_s

    @property
    def left_bytes(self) -> int:
        """What has not arrived yet."""
        return max(self._expected_bytes - self.size_bytes, 0)

    def expect(self, size_bytes: int) -> None:
        """Tell how much will arrive in all."""
        self._expected_bytes = size_bytes

    def expect_more(self, size_bytes: int) -> None:
        """Tell how much will arrive besides."""
        self._expected_bytes += size_bytes

    def give_up(self) -> None:
        """Tell whoever receives that nobody wants the rest."""
        self.is_given_up = True

    def wait(self) -> None:
        """Note that the receiver waits for more from now on."""
        with self._lock:
            if self._waits_since is None:
                self._waits_since = time.monotonic()

    def received(self, size_bytes: int) -> None:
        """Note that bytes have come, and that the receiver does not wait for the moment."""
        with self._lock:
            now_s = time.monotonic()
            self._waited_s = self._waited_until(now_s)
            self._waits_since = None
            self.size_bytes += size_bytes
            seconds, link_bytes = now_s - self._started_s, self._link.add(size_bytes)
            self._last = _Mark(self.size_bytes, link_bytes, seconds)
            if self.latency_s is None:
                self.latency_s, self._first = seconds, self._last
            self._arrivals.append((self._waited_s, link_bytes))

    def progress(self, size_bytes: int) -> None:
        """Note that bytes have come, and that the receiver waits for more."""
        self.received(size_bytes)
        self.wait()

    @property
    def is_held_up(self) -> bool:
        """Whether the transfer has had to wait for something else than the link."""
        return self._held_up is not None

    def hold_up(self) -> None:
        """Note that the transfer waits for something else than the link from now on."""
        self._held_up = self._held_up or self._until_now()

    @property
    def outweighs_latency(self) -> bool:
        """Whether enough has come after the first bytes to tell the rate without their latency."""
        return self._measured().link_bytes - self._first.link_bytes >= MIN_SAMPLE_BYTES

    def bytes_per_s(self) -> float | None:
        """The link's rate over all of the transfer until it was held up; None if that is too short.

        Unless what came after the first bytes outweighs their latency, it is less than the link's.
        """
        end = self._measured()
        if self.latency_s is None or (self._held_up and end.size_bytes < MIN_SAMPLE_BYTES):
            return None
        if not self.outweighs_latency:
            return end.size_bytes / max(end.seconds, 1e-9)
        return (end.link_bytes - self._first.link_bytes) / max(end.seconds - self.latency_s, 1e-9)

    def recent_bytes_per_s(self) -> float | None:
        """The link's present rate; None if the receiver has not waited for long enough to tell.

        It is that of the last half of the time spent waiting since the first bytes: a link that has
        been slow for as long as it was fast is slow, and one that has stood still for long will for
        long.
        """
        with self._lock:
            waited_s = self._waited_until(time.monotonic())
            if self.latency_s is None:
                since_turn_s = waited_s - self._turn_waited_s
                silent_s = max(since_turn_s, min(waited_s, self._link.silent_s))
                return None if silent_s < self._patience_s else 0.0
            since_first_s = waited_s - self._arrivals[1][0]
            if since_first_s < RECENT_S:
                return None
            window_s = max(RECENT_S, since_first_s / 2)
            before = bisect.bisect_right(self._arrivals, waited_s - window_s, key=itemgetter(0))
            since_s, since_bytes = self._arrivals[before - 1]
            arrived_bytes = self._link.size_bytes - since_bytes
            return max(arrived_bytes, 0) / (waited_s - since_s)  # what was damaged counts no more

    def _measured(self) -> _Mark:
        """The end of what tells the rate: nobody waits after a hold-up, or the last byte."""
        return self._held_up or (self._until_now() if self.left_bytes else self._last)

    def _until_now(self) -> _Mark:
        return _Mark(self.size_bytes, self._link.size_bytes, time.monotonic() - self._started_s)

    def _waited_until(self, now_s: float) -> float:
        return self._waited_s + (0.0 if self._waits_since is None else now_s - self._waits_since)
