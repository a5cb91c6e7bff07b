"""Where segments wait for a decoder."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from hf_cachegen.streaming.steps import StreamStep


class QueuedSegment(NamedTuple):
    """A segment of a step's chunk and level."""

    step: StreamStep
    layer: int
    data: bytes


class SegmentQueue:
    """First come, first served. Every method may be called from any thread.

    Parameters
    ----------
    together
        Give whoever takes a segment all others of its level and layer, too.
    """

    def __init__(self, *, together: bool) -> None:
        self._together = together
        self._waiting: deque[QueuedSegment] = deque()
        self._lock = threading.Lock()

    def put(self, segment: QueuedSegment) -> None:
        """Add a segment."""
        with self._lock:
            self._waiting.append(segment)

    def take(self) -> list[QueuedSegment]:
        """What to decode next, in the order in which it came; nothing if all was taken."""
        with self._lock:
            if not self._waiting:
                return []
            if not self._together:
                return [self._waiting.popleft()]
            wanted = _kind(self._waiting[0])
            taken = [segment for segment in self._waiting if _kind(segment) == wanted]
            self._waiting = deque(s for s in self._waiting if _kind(s) != wanted)
            return taken


def _kind(segment: QueuedSegment) -> tuple[int, int]:
    return segment.step.level, segment.layer
