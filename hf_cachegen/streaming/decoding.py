"""Decode the segments that have arrived, in threads of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from hf_cachegen.errors import CacheGenError
from hf_cachegen.streaming.costs import StreamCosts
from hf_cachegen.streaming.ledger import Ledger
from hf_cachegen.streaming.segment_queue import QueuedSegment, SegmentQueue
from hf_cachegen.streaming.steps import StepLog, StreamStep

DecodeSegment = Callable[[int, int, int, bytes], Sequence[int]]
"""Called with (chunk, level, layer, data), from several threads; returns the layers that now have
all their values of this chunk."""

DecodeSegments = Callable[[int, int, Sequence[tuple[int, bytes]]], Sequence[int]]
"""Called with (level, layer, [(chunk, data), ...]), as :data:`DecodeSegment` for each of them."""

LocateError = Callable[[int, int, int, CacheGenError], CacheGenError]
"""Called with (chunk, level, layer, error); returns the same error with the place in front."""


class SegmentDecoders:
    """Threads that decode what they are given, and tell the ledger.

    Parameters
    ----------
    decode
        Decodes one segment to where its values belong.
    decode_many
        Decodes segments of one level and layer; None if that is not faster than one by one.
    workers
        Number of threads.
    ledger, steps, costs
        What learns of each segment that was decoded, dropped or damaged.
    located
        Says where a damaged segment lies.
    """

    def __init__(
        self,
        decode: DecodeSegment,
        decode_many: DecodeSegments | None,
        workers: int,
        *,
        ledger: Ledger,
        steps: StepLog,
        costs: StreamCosts,
        located: LocateError,
    ) -> None:
        self._decode = decode
        self._decode_many = decode_many
        self._workers = workers
        self._ledger = ledger
        self._steps = steps
        self._costs = costs
        self._located = located
        self._queue = SegmentQueue(together=decode_many is not None)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="hf-cachegen-decode")

    def put(self, step: StreamStep, layer: int, data: bytes) -> None:
        """Have a segment decoded that the ledger has admitted."""
        self._queue.put(QueuedSegment(step, layer, data))
        self._threads.submit(self._decode_next)

    def end(self, *, wait: bool) -> None:
        """Let the threads end when nothing is left to decode; return then if that is wanted."""
        self._threads.shutdown(wait)

    def _decode_next(self) -> None:
        segments = self._queue.take()
        if len(segments) > 1 and self._decode_together(segments):
            return
        for segment in segments:
            self._decode_segment(*segment)

    def _decode_together(self, segments: Sequence[QueuedSegment]) -> bool:
        """False if that cannot be: one by one, it shows which of them is late or damaged."""
        assert self._decode_many is not None
        if not all(self._ledger.is_wanted(segment.step) for segment in segments):
            return False
        level, layer = segments[0].step.level, segments[0].layer
        started = time.perf_counter()
        try:
            done = self._decode_many(level, layer, [(s.step.chunk, s.data) for s in segments])
        except Exception:
            return False
        seconds = (time.perf_counter() - started) / len(segments)
        for step, _, data in segments:
            self._note_decoded(step, done, len(data), seconds)
            self._ledger.decoded(step, data, done)
        return True

    def _decode_segment(self, step: StreamStep, layer: int, data: bytes) -> None:
        done: Sequence[int] = ()
        try:
            if self._ledger.is_wanted(step):
                started = time.perf_counter()
                done = self._decode(step.chunk, step.level, layer, data)
                self._note_decoded(step, done, len(data), time.perf_counter() - started)
            elif data:  # of an empty one nothing is lost
                self._steps.note_dropped(step)
        except CacheGenError as error:
            located = self._located(step.chunk, step.level, layer, error)
            self._ledger.fail_decoding(step, located)
        except Exception as error:
            self._ledger.fail_decoding(step, error)
        finally:
            self._ledger.decoded(step, data, done)

    def _note_decoded(
        self, step: StreamStep, layers: Sequence[int], n_bytes: int, seconds: float
    ) -> None:
        self._costs.note_decode(step.chunk, step.level, layers, n_bytes, seconds)
        self._steps.note_decoded(step, seconds / self._workers)
