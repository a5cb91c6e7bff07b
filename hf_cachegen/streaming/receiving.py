"""Items that arrive in a thread of their own, while another one does something else."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

AHEAD = 8
"""Items that may wait to be taken: threads that compute let others in every few milliseconds only,
so that to hand over each one by itself takes longer than it takes to arrive."""


class Receiving(Generic[T]):
    """Runs a generator in a thread, from now on, up to :data:`AHEAD` items ahead.

    Parameters
    ----------
    source
        The generator.
    pause_s
        How long to wait for an item before telling that none has come; None waits for any time.
    """

    def __init__(self, source: Generator[T, None, None], pause_s: float | None) -> None:
        self._source = source
        self._pause_s = pause_s
        self._closed = False
        self._room = threading.Semaphore(AHEAD)
        self._found: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="hf-cachegen-receive", daemon=True).start()

    def __iter__(self) -> Iterator[T | None]:
        """What the generator yields or raises, and None each time that nothing came for long."""
        while True:
            try:
                item, error = self._found.get(timeout=self._pause_s)
            except queue.Empty:
                yield None
                continue
            if error is not None:
                raise error
            if item is None:
                return
            yield item
            self._room.release()

    @property
    def is_full(self) -> bool:
        """Whether no more is received before something is taken."""
        return self._found.qsize() >= AHEAD

    def close(self) -> None:
        """Close the generator, as soon as it comes to its next item or error."""
        self._closed = True
        self._room.release()

    def _run(self) -> None:
        with contextlib.closing(self._source):
            while self._room.acquire() and not self._closed:
                item, error = None, None
                try:
                    item = next(self._source, None)
                except BaseException as raised:
                    error = raised
                self._found.put((item, error))
                if item is None:
                    return
